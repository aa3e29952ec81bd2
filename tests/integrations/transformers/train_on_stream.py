"""Trains by a trainer on a PackedStream and writes down each step's tokens: on one process, or as torchrun starts it.

python train_on_stream.py KIND FOLDER STEPS NUM_WORKERS [CHECKPOINT]
"""

import json
import os
import sys
from pathlib import Path

import datasets
import torch
import transformers
import trl
from common.hf_setup import byte_tokenizer
from helpers.hf_models import tiny_model

from packing_ops.data import PackedStream, PaddingFreeCollator
from packing_ops.integrations.transformers import apply_packing_ops

KINDS = {
    "transformers": (transformers.Trainer, transformers.TrainingArguments, {}),
    "trl": (trl.SFTTrainer, trl.SFTConfig, {"max_length": None}),
}
EPOCHS = 4
TEXTS = ["word " * (1 + number % 5) + str(number) for number in range(30)]


def examples_of(texts):
    """As TRL tokenizes them, EPOCHS times."""
    tokenizer = byte_tokenizer()
    return [{"input_ids": tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]} for text in texts] * EPOCHS


def stream_of(examples):
    return PackedStream(examples, 64, buffer=8)


def main(kind, folder, steps, num_workers, checkpoint=None):
    trainer_class, arguments_class, more = KINDS[kind]
    steps, folder, seen, losses = int(steps), Path(folder), [], []

    class Recorded(trainer_class):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append(inputs["input_ids"][0].tolist())
            loss = super().training_step(model, inputs, num_items_in_batch)
            losses.append(loss.item())
            return loss

    model = tiny_model("qwen3", vocab_size=258)
    assert apply_packing_ops(model)
    arguments = arguments_class(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        save_steps=steps // 2,
        per_device_train_batch_size=1,
        dataloader_num_workers=int(num_workers),
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        accelerator_config={"dispatch_batches": False},
        **more,
    )
    given = {"model": model, "args": arguments, "data_collator": PaddingFreeCollator()}
    if kind == "trl":
        texts = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
        trainer = Recorded(**{**given, "data_collator": None}, train_dataset=texts, processing_class=byte_tokenizer())
        trainer.train_dataset = stream_of(trainer.train_dataset.repeat(EPOCHS))
        trainer.data_collator = given["data_collator"]
    else:
        trainer = Recorded(**given, train_dataset=stream_of(examples_of(TEXTS)))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    weights = sum(parameter.detach().double().square().sum().item() for parameter in trainer.model.parameters())
    result = {"seen": seen, "losses": losses, "weights": weights}
    (folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))
    del trainer, model  # what DDP holds goes before its process group
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
