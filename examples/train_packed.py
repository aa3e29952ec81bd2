"""Trains one small model on the same real documents twice, padded and packed, and compares.

    python examples/train_packed.py                        docstrings of the standard library
    python examples/train_packed.py --data chat.jsonl      {"messages": [...]} or {"prompt": ..., "completion": ...}
    python examples/train_packed.py --device cuda

Padded: batches of 8, each padded to its longest. Packed: rows of 2048 slots filled first-fit-decreasing. Each run has a
process of its own, so that peak memory is its own too.
"""

import argparse
from pathlib import Path

from options import add_device, needs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL of chats or prompt/completion pairs; default: docstrings")
    parser.add_argument("--documents", type=int, default=2048, help="at most this many documents")
    parser.add_argument("--capacity", type=int, default=2048, help="slots of a packed row")
    parser.add_argument("--batch-size", type=int, default=8, help="documents of a padded batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo_DEVICE.json and .png")
    return parser.parse_args()


if __name__ == "__main__":
    needs("matplotlib", "rich", options=parse_arguments)

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from report_packed import save_report
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from save_results import machine
from text_data import IGNORE, Document, load_documents
from tiny_llama import Config, TinyLlama

import packing_ops as po


@dataclass
class Batch:
    """One optimizer step. Padded: tensors are [batch, seqlen], ``cu_seqlens`` None. Packed: tensors are [total]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    num_targets: int
    real_tokens: int
    cu_seqlens: torch.Tensor | None = None


@dataclass
class Run:
    """What one training run measured."""

    mode: str
    steps: int = 0
    real_tokens: int = 0
    slots: int = 0
    seconds: float = 0.0
    peak_mib: float = 0.0
    losses: list[float] = field(default_factory=list)
    tokens_seen: list[int] = field(default_factory=list)
    seconds_seen: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / self.seconds

    @property
    def padding_waste(self) -> float:
        return 1 - self.real_tokens / self.slots


def padded_batch(documents: list[Document]) -> Batch:
    """[batch, seqlen], padded on the right to the longest document."""
    input_ids, labels = (
        torch.nn.utils.rnn.pad_sequence([getattr(d, name) for d in documents], True, fill)
        for name, fill in (("input_ids", 0), ("labels", IGNORE))
    )
    rows, seqlen = input_ids.shape
    row_ends = torch.arange(rows + 1, dtype=torch.int32) * seqlen
    targets = po.shift_labels(labels.view(-1), row_ends).view(rows, seqlen)
    real = sum(map(len, documents))
    return Batch(input_ids, torch.arange(seqlen)[None], targets, int(po.count_target_tokens(labels)), real)


def packed_batch(documents: list[Document]) -> Batch:
    """[total]: the documents one after another, each with positions of its own."""
    metadata = po.PackedMetadata.from_lengths([len(d) for d in documents])
    labels = torch.cat([d.labels for d in documents])
    labels = po.mask_boundary_labels(labels, metadata.cu_seqlens)
    return Batch(
        torch.cat([d.input_ids for d in documents]),
        metadata.position_ids,
        po.shift_labels(labels, metadata.cu_seqlens),
        int(po.count_target_tokens(labels, metadata.cu_seqlens)),
        metadata.total,
        metadata.cu_seqlens,
    )


def unpadded_batch(documents: list[Document]) -> Batch:
    """The padded batch with its padding taken out again: what a model does that receives padded input."""
    padded = padded_batch(documents)
    lengths = torch.tensor([len(d) for d in documents])
    mask = torch.arange(padded.input_ids.shape[1])[None] < lengths[:, None]
    metadata = po.PackedMetadata.from_attention_mask(mask)
    tensors = {"input_ids": padded.input_ids, "targets": padded.targets}
    kept = {name: po.unpad_input(tensor, mask)[0] for name, tensor in tensors.items()}
    return Batch(
        **kept,
        position_ids=metadata.position_ids,
        num_targets=padded.num_targets,
        real_tokens=metadata.total,
        cu_seqlens=metadata.cu_seqlens,
    )


def groups_of(mode: str, lengths: list[int], arguments) -> list[list[int]]:
    """Which documents share a step, in a shuffled order that is the same on every machine."""
    generator = torch.Generator().manual_seed(arguments.seed)
    if mode == "padded":
        order = torch.randperm(len(lengths), generator=generator).tolist()
        return [order[i : i + arguments.batch_size] for i in range(0, len(order), arguments.batch_size)]
    bins = po.pack_sequences(lengths, arguments.capacity, strategy="ffd").bins
    return [bins[i] for i in torch.randperm(len(bins), generator=generator).tolist()]


def summed_loss(model: TinyLlama, batch: Batch) -> torch.Tensor:
    logits = model(batch.input_ids, batch.position_ids, batch.cu_seqlens)
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")


def new_model(arguments) -> TinyLlama:
    torch.manual_seed(arguments.seed)
    return TinyLlama(Config(max_positions=arguments.capacity)).to(arguments.device)


def to_device(batch: Batch, device: str) -> Batch:
    moved = {k: v.to(device, non_blocking=True) for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return Batch(**{**vars(batch), **moved})


def peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def train(mode: str, arguments) -> Run:
    """One pass over the documents; runs in a process of its own."""
    documents, _ = load_documents(arguments.data, arguments.documents, arguments.capacity)
    groups = groups_of(mode, [len(d) for d in documents], arguments)
    collate = padded_batch if mode == "padded" else packed_batch
    model = new_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    summed_loss(model, to_device(collate([documents[i] for i in groups[0]]), arguments.device)).backward()  # warm-up
    optimizer.zero_grad()
    run = Run(mode)
    columns = (
        TextColumn(f"{mode:>7}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(mode, total=len(groups), loss="")
        start = time.perf_counter()
        for group in groups:
            batch = to_device(collate([documents[i] for i in group]), arguments.device)
            loss = summed_loss(model, batch) / batch.num_targets
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.steps += 1
            run.real_tokens += batch.real_tokens
            run.slots += batch.input_ids.numel() if mode == "padded" else max(arguments.capacity, batch.real_tokens)
            run.losses.append(loss.item())
            run.tokens_seen.append(run.real_tokens)
            run.seconds_seen.append(time.perf_counter() - start)
            progress.update(task, advance=1, loss=f"loss {run.losses[-1]:.3f}")
        run.seconds = time.perf_counter() - start
    run.peak_mib = peak_mib(arguments.device)
    return run


def first_step_losses(documents: list[Document], arguments) -> dict[str, float]:
    """The same 8 documents padded, unpadded and packed: one number, normalised by target tokens, in float32."""
    model = new_model(arguments)
    losses = {}
    for name, collate in (("padded", padded_batch), ("unpadded", unpadded_batch), ("packed", packed_batch)):
        batch = to_device(collate(documents[: arguments.batch_size]), arguments.device)
        with torch.no_grad():
            losses[name] = (summed_loss(model, batch).double() / batch.num_targets).item()
    return losses


def main():
    arguments = parse_arguments()
    documents, cut = load_documents(arguments.data, arguments.documents, arguments.capacity)
    lengths = [len(d) for d in documents]
    told = f"{len(documents)} documents, {sum(lengths)} tokens, {cut} cut to {arguments.capacity}"
    print(f"{told}; on {machine(arguments.device)['device']}")
    losses = first_step_losses(documents, arguments)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver"), max_tasks_per_child=1) as pool:
        runs = [pool.submit(train, mode, arguments).result() for mode in ("padded", "packed")]
    stem = arguments.out / f"demo_{arguments.device}"
    save_report(stem, lengths, cut, arguments, runs, losses)


if __name__ == "__main__":
    main()
