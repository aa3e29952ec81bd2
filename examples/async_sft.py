"""Trains the same model on the same batches twice: collated in the loop, and one step ahead by AsyncBatchCollator.

    python examples/async_sft.py
    python examples/async_sft.py --data chat.jsonl --device cuda

Collating is everything from raw text to packed tensors: bytes to tokens, boundaries, targets. Done in the loop it is
added to every step; one step ahead, the step hides it, if it leaves a core to the worker: on the CPU torch is given all
cores but one, in both runs. The order of the documents is shuffled anew in every epoch, so the first batch of an epoch
is never collated ahead.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from text_data import docstring_pairs, encode, read_jsonl
from tiny_llama import Config, TinyLlama
from train_packed import packed_batch, summed_loss, to_device

from packing_ops.data import AsyncBatchCollator


@dataclass
class Run:
    """Seconds of every step, waiting for its batch included; what ``compute`` took in the worker; losses."""

    ahead: bool
    waited: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    collated: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train(texts: list[list[tuple[str, bool]]], ahead: bool, arguments) -> Run:
    order = list(range(len(texts)))
    steps_per_epoch = len(texts) // arguments.batch_size

    def collate(step):
        first = step % steps_per_epoch * arguments.batch_size
        return packed_batch([encode(texts[i]) for i in order[first : first + arguments.batch_size]])

    torch.manual_seed(arguments.seed)
    longest = max(sum(len(text.encode()) for text, _ in pieces) for pieces in texts) + 2
    config = Config(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=longest)
    model = TinyLlama(config).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    run, epoch = Run(ahead), None
    last_step = arguments.epochs * steps_per_epoch - 1
    with AsyncBatchCollator(collate) as collator:
        for step in range(last_step + 1):
            if step // steps_per_epoch != epoch:
                epoch = step // steps_per_epoch
                collator.clear()
                generator = torch.Generator().manual_seed(arguments.seed + epoch)
                order[:] = torch.randperm(len(texts), generator=generator).tolist()
            start = time.perf_counter()
            if collator.has_pending():
                batch = collator.get(step)
                run.collated.append(collator.last_compute_seconds)
            else:
                batch = collate(step)
            waited = time.perf_counter() - start
            if ahead and step < last_step and (step + 1) // steps_per_epoch == epoch:
                collator.submit(step + 1)
            batch = to_device(batch, arguments.device)
            loss = summed_loss(model, batch) / batch.num_targets
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
            if step % steps_per_epoch:  # an epoch's first batch is collated in the loop either way
                run.waited.append(waited)
                run.step.append(time.perf_counter() - start)
    return run


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL of chats or prompt/completion pairs; default: docstrings")
    parser.add_argument("--documents", type=int, default=256, help="at most this many documents")
    parser.add_argument("--batch-size", type=int, default=32, help="documents of a step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo_async_DEVICE.json")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if arguments.device == "cpu":  # the step and the worker need a core each
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    if arguments.data is None:
        texts = [[(prompt, False), (answer, True)] for prompt, answer in docstring_pairs(arguments.documents)]
    else:
        texts = read_jsonl(arguments.data)[: arguments.documents]
    if len(texts) < 2 * arguments.batch_size:
        raise SystemExit(
            f"--batch-size: expected two steps or more of {len(texts)} documents, got {arguments.batch_size}"
        )
    train(texts[: 2 * arguments.batch_size], False, arguments)  # warm-up
    runs = {ahead: train(texts, ahead, arguments) for ahead in (False, True)}

    same = runs[True].losses == runs[False].losses
    collate, in_loop, ahead = (
        median(values) * 1e3 for values in (runs[True].collated, runs[False].waited, runs[True].waited)
    )
    print(
        f"{len(texts)} documents, {len(runs[True].losses)} steps; losses {'are equal to the bit' if same else 'DIFFER'}"
    )
    for run, waited in ((runs[False], in_loop), (runs[True], ahead)):
        name = "one step ahead" if run.ahead else "in the loop"
        print(
            f"collated {name:14}: step {median(run.step) * 1e3:7.2f} ms, {waited:6.2f} ms of it waiting for the batch"
        )
    print(f"collating takes {collate:.2f} ms beside a step; {1 - ahead / in_loop:.0%} of the wait is hidden")

    result = {
        "documents": len(texts),
        "device": torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "losses_equal": same,
        "hidden": 1 - ahead / in_loop,
        "runs": [asdict(run) for run in runs.values()],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"demo_async_{arguments.device}.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
