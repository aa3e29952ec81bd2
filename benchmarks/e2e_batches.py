"""Documents of the sft workload as batches of a model: padded together, or packed into rows of one length."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import packing_ops as po

PADDED_BATCH = 8
IGNORED = -100


class Batches(NamedTuple):
    """What a step runs over: batches, the share of all targets that each has, and the documents in their order
    there.
    """

    batches: list[dict]
    shares: list[float]
    order: list[int]


def documents_of(total: int, longest: int, vocabulary: int) -> list[torch.Tensor]:
    """Random tokens in documents that fill total / longest rows of ``longest`` tokens and no row more.

    Their lengths are the workload's for rows of 8192, shorter in proportion for shorter rows.
    """
    workloads = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]
    lengths = []
    for length in workloads["sft"]:
        lengths.append(max(2, min(length * longest // 8192, total - sum(lengths))))
        if sum(lengths) >= total:
            break
    while po.pack_sequences(lengths, longest).num_bins > total // longest:
        lengths.pop()
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def padded_batches(documents: list[torch.Tensor], size: int = PADDED_BATCH) -> Batches:
    batches = []
    for first in range(0, len(documents), size):
        group = documents[first : first + size]
        ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in group], batch_first=True)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)})
    return Batches(batches, _shares(batches), list(range(len(documents))))


def packed_rows(documents: list[torch.Tensor], capacity: int, explicit: bool) -> Batches:
    """Rows of one length, so that nothing has to be compiled for many; the end of a row is a document without targets.

    explicit: cu_seqlens are passed along; else position_ids alone tell the documents.
    """
    batches, order = [], []
    for items in po.pack_sequences([len(document) for document in documents], capacity).bins:
        row = [documents[i] for i in items]
        rest = capacity - sum(map(len, row))
        row += [torch.zeros(rest, dtype=torch.int64)] if rest else []
        ids, metadata = torch.cat(row), po.PackedMetadata.from_lengths([len(document) for document in row])
        labels = po.mask_boundary_labels(ids, metadata.cu_seqlens)
        labels[capacity - rest :] = IGNORED
        batch = {"input_ids": ids, "labels": labels, "position_ids": metadata.position_ids}
        batch = {name: tensor[None] for name, tensor in batch.items()}
        batches.append(batch | metadata.to_transformers() if explicit else batch)
        order += items
    return Batches(batches, _shares(batches), order)


def _shares(batches: list[dict]) -> list[float]:
    counts = [int((_targets(batch) != IGNORED).sum()) for batch in batches]
    return [count / sum(counts) for count in counts]


def _targets(batch: dict) -> torch.Tensor:
    """What each slot predicts, as transformers' loss shifts the labels."""
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()


def token_losses(logits: torch.Tensor, batch: dict) -> torch.Tensor:
    """The loss of every target of a batch, in its order, on the CPU."""
    targets = _targets(batch)
    losses = F.cross_entropy(logits.detach().flatten(0, 1).float(), targets, reduction="none", ignore_index=IGNORED)
    return losses[targets != IGNORED].cpu()


def by_document(losses: torch.Tensor, order: list[int], documents: list[torch.Tensor]) -> torch.Tensor:
    """Losses in the order of the documents, whichever way they were batched."""
    chunks = losses.split([len(documents[i]) - 1 for i in order])
    return torch.cat([chunks[place] for place in sorted(range(len(order)), key=order.__getitem__)])
