"""Trains one Hugging Face model with transformers' Trainer on the same documents twice, padded and packed, and
compares.

    python examples/hf_sft.py                        a tiny Llama on docstrings of the standard library
    python examples/hf_sft.py --data chat.jsonl      {"messages": [...]} or {"prompt": ..., "completion": ...}
    python examples/hf_sft.py --model PATH --device cuda
    python examples/hf_sft.py --stock                what packing alone brings

Padded: batches of 8, each padded to its longest, by the stock model with sdpa attention (eager where transformers has
no other, as for Gemma 2 and gpt-oss). Packed: rows of 2048 slots filled first-fit-decreasing, by the model after
apply_packing_ops. Each run has a process of its own, so that peak memory is its own too. Every eighth document is held
out, and both models are measured on those after the same tokens: losses of steps are means over different documents.
"""

from common.options import needs, parser_of


def parse_arguments():
    parser = parser_of(__doc__, documents=192, writes="demo_hf_DEVICE.json and .png")
    parser.add_argument("--capacity", type=int, default=2048, help="slots of a packed row")
    parser.add_argument("--batch-size", type=int, default=8, help="documents of a padded batch")
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", "matplotlib", "rich", options=parse_arguments)

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import transformers
from common.hf_setup import documents_for, new_model, one_pass, packed_inputs, padded_inputs, swap
from common.report_packed import save_report
from common.runs import Run, groups_of, peak_mib
from common.text_data import IGNORE, Document
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

COLUMNS = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[loss]}"))


HELD_OUT = 8  # every so many documents one is


@dataclass
class MeasuredRun(Run):
    """held_out_loss: per target token of the documents that no step saw, after all the others."""

    held_out_loss: float = 0.0


class MeasuredTrainer(transformers.Trainer):
    """A Trainer that writes down the loss of every step and shows a bar."""

    def __init__(self, run: Run, **options):
        super().__init__(**options)
        self.remove_callback(transformers.PrinterCallback)
        self.run = run

    def train(self, progress: Progress):
        self.bar = progress.add_task(self.run.mode, total=len(self.train_dataset), loss="")
        self.progress = progress
        self.start = time.perf_counter()
        super().train()
        self.run.seconds = time.perf_counter() - self.start

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.run.losses.append(loss.item())
        self.run.seconds_seen.append(time.perf_counter() - self.start)
        self.progress.update(self.bar, advance=1, loss=f"loss {self.run.losses[-1]:.3f}")
        return loss


def model_for(mode: str, arguments):
    model = new_model(arguments.model, arguments.capacity, arguments.seed)
    if mode == "packed" and not arguments.stock:
        swap(model)
    return model.to(arguments.device)


@torch.no_grad()
def held_out_loss(model, documents: list[Document], collate, arguments) -> float:
    """Per target token, in batches as those of training."""
    total = 0.0
    for first in range(0, len(documents), arguments.batch_size):
        batch = to_device(collate(documents[first : first + arguments.batch_size]), arguments.device)
        total += model(**batch, num_items_in_batch=1).loss.item()  # the sum
    return total / sum(int((d.labels[1:] != IGNORE).sum()) for d in documents)


def split(documents: list) -> tuple[list, list]:
    """For training, and held out."""
    return [d for i, d in enumerate(documents) if i % HELD_OUT != HELD_OUT - 1], documents[HELD_OUT - 1 :: HELD_OUT]


def train(mode: str, tokens: list[tuple[list[int], list[int]]], arguments) -> MeasuredRun:
    """One pass over the documents, given as (input_ids, labels); runs in a process of its own."""
    documents, held_out = split([Document(torch.tensor(ids), torch.tensor(labels)) for ids, labels in tokens])
    groups = [[documents[i] for i in group] for group in groups_of(mode, [len(d) for d in documents], arguments)]
    collate = padded_inputs if mode == "padded" else packed_inputs
    model = model_for(mode, arguments)
    model(**to_device(collate(groups[0]), arguments.device)).loss.backward()  # warm-up
    model.zero_grad()
    run = MeasuredRun(mode, steps=len(groups))
    for group in groups:
        run.real_tokens += sum(map(len, group))
        run.tokens_seen.append(run.real_tokens)
        slots = collate(group)["input_ids"].numel()
        run.slots += slots if mode == "padded" else max(arguments.capacity, slots)
    with tempfile.TemporaryDirectory() as folder, Progress(TextColumn(f"{mode:>7}"), *COLUMNS) as progress:
        settings = one_pass(arguments, folder, lr_scheduler_type="constant")
        trainer = MeasuredTrainer(
            run, model=model, args=settings, train_dataset=groups, data_collator=lambda groups: collate(groups[0])
        )
        trainer.train(progress)
    run.peak_mib = peak_mib(arguments.device)
    run.held_out_loss = held_out_loss(model.eval(), held_out, collate, arguments)
    return run


def to_device(batch: dict, device: str) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def first_step_losses(documents, arguments) -> dict[str, float]:
    """The same 8 documents: padded in the stock model, padded and unpadded inside by packing_ops, packed."""
    losses = {}
    cases = [
        ("padded", "padded", padded_inputs),
        ("unpadded", "packed", padded_inputs),
        ("packed", "packed", packed_inputs),
    ]
    for name, mode, collate in cases:
        model = model_for(mode, arguments)
        with torch.no_grad():
            batch = to_device(collate(documents[: arguments.batch_size]), arguments.device)
            losses[name] = model(**batch).loss.item()
    return losses


def main():
    arguments = parse_arguments()
    documents, cut = documents_for(arguments.model, arguments.data, arguments.documents, arguments.capacity)
    trained, held_out = split(documents)
    lengths = [len(d) for d in trained]
    if not held_out:
        raise SystemExit(f"--documents: expected {HELD_OUT} or more, of which one is held out, got {len(documents)}")
    kept = f"{len(held_out)} more are held out"
    print(f"{len(lengths)} documents, {sum(lengths)} tokens, {cut} cut to {arguments.capacity}; {kept}")
    losses = first_step_losses(documents, arguments)
    tokens = [(d.input_ids.tolist(), d.labels.tolist()) for d in documents]  # a tensor would cost a file descriptor
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver"), max_tasks_per_child=1) as pool:
        runs = [pool.submit(train, mode, tokens, arguments).result() for mode in ("padded", "packed")]
    stem = arguments.out / f"demo_hf_{arguments.device}"
    save_report(
        stem, lengths, cut, arguments, runs, losses, stock=arguments.stock, transformers=transformers.__version__
    )


if __name__ == "__main__":
    main()
