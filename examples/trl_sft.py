"""Trains a model with TRL's SFTTrainer on packed rows: two lines swap its packing, and the model's attention and RoPE.

python examples/trl_sft.py                        a tiny Llama on docstrings of the standard library
python examples/trl_sft.py --data chat.jsonl      {"messages": [...]} or {"prompt": ..., "completion": ...}
python examples/trl_sft.py --model PATH --device cuda
python examples/trl_sft.py --stock                nothing swapped
"""

from common.options import needs, parser_of


def parse_arguments():
    parser = parser_of(
        __doc__, documents=256, writes="demo_trl_DEVICE.json", data="JSONL, all chats or all prompt/completion"
    )
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a packed row")
    parser.add_argument("--max-steps", type=int, default=-1, help="optimizer steps; default: one pass")
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", "trl", "datasets", options=parse_arguments)

import json
import time
from pathlib import Path

import datasets
import trl
from common.hf_setup import byte_tokenizer, new_model, swap
from common.results import save_results
from common.text_data import docstring_pairs
from transformers import AutoTokenizer

from packing_ops.integrations.trl import patch_pack_dataset


def load_rows(data: Path | None, limit: int) -> datasets.Dataset:
    if data is not None:
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
        return datasets.Dataset.from_list(rows[:limit])
    return datasets.Dataset.from_list([{"prompt": p, "completion": c} for p, c in docstring_pairs(limit)])


def main():
    arguments = parse_arguments()
    model = new_model(arguments.model, arguments.max_length, arguments.seed)
    if not arguments.stock:
        patch_pack_dataset()  # packing=True fills rows over the whole dataset
        swap(model)  # apply_packing_ops

    settings = trl.SFTConfig(
        output_dir=str(arguments.out / "trl_checkpoints"),
        packing=True,
        max_length=arguments.max_length,
        per_device_train_batch_size=1,
        num_train_epochs=1,
        max_steps=arguments.max_steps,
        learning_rate=arguments.learning_rate,
        gradient_checkpointing=False,
        bf16=arguments.device == "cuda",
        use_cpu=arguments.device == "cpu",
        dataloader_pin_memory=arguments.device != "cpu",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=settings,
        train_dataset=load_rows(arguments.data, arguments.documents),
        processing_class=AutoTokenizer.from_pretrained(arguments.model) if arguments.model else byte_tokenizer(),
    )
    lengths = trainer.train_dataset["seq_lengths"]
    tokens = sum(map(sum, lengths))
    start = time.perf_counter()
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    results = {
        "documents": sum(map(len, lengths)),
        "rows": len(lengths),
        "fill": tokens / (len(lengths) * arguments.max_length),
        "tokens": tokens,
        "seconds": time.perf_counter() - start,
        "losses": [float(entry["loss"]) for entry in steps],
        "stock": arguments.stock,
        "trl": trl.__version__,
    }
    print(
        f"{results['documents']} documents in {results['rows']} rows, {results['fill']:.1%} full; "
        f"loss {results['losses'][0]:.3f} to {results['losses'][-1]:.3f} in {results['seconds']:.1f} s"
    )
    save_results(arguments.out / f"demo_trl_{arguments.device}.json", results, arguments.device)


if __name__ == "__main__":
    main()
