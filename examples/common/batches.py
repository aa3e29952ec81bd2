"""Batches of documents for the small model, padded, packed and unpadded, and the loss of one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import packing_ops as po

from .text_data import IGNORE, Document
from .tiny_llama import TinyLlama


@dataclass
class Batch:
    """One optimizer step. Padded: tensors are [batch, seqlen], ``cu_seqlens`` None. Packed: tensors are [total]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    num_targets: int
    real_tokens: int
    cu_seqlens: torch.Tensor | None = None


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


def summed_loss(model: TinyLlama, batch: Batch) -> torch.Tensor:
    logits = model(batch.input_ids, batch.position_ids, batch.cu_seqlens)
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")


def to_device(batch: Batch, device: str) -> Batch:
    moved = {k: v.to(device, non_blocking=True) for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return Batch(**{**vars(batch), **moved})
