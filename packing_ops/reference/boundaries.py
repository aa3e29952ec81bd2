"""Oracles of packing_ops.boundaries."""

import itertools

import torch


def documents(cu_seqlens: torch.Tensor, total: int | None = None) -> list[tuple[int, int]]:
    """Return (start, end) per document; with ``total`` the padding after the last one too."""
    bounds = cu_seqlens.tolist()
    pairs = list(itertools.pairwise(bounds))
    return pairs if total is None else [*pairs, (bounds[-1], total)]


def cu_seqlens_from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def position_ids_from_cu_seqlens(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    return torch.cat([torch.arange(b - a, device=cu_seqlens.device) for a, b in documents(cu_seqlens, total)])


def seq_idx_from_cu_seqlens(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    spans = enumerate(documents(cu_seqlens, total))
    return torch.cat([cu_seqlens.new_full((end - start,), i, dtype=torch.int32) for i, (start, end) in spans])


def cu_seqlens_from_position_ids(position_ids: torch.Tensor) -> torch.Tensor:
    ids = position_ids.tolist()
    starts = [t for t in range(len(ids)) if t == 0 or ids[t] <= ids[t - 1]]
    return torch.tensor([*starts, len(ids)] if ids else [0], dtype=torch.int32, device=position_ids.device)


def prompt_end_indices(uids: torch.Tensor) -> torch.Tensor:
    codes = uids.tolist()
    ends = [i + 1 for i in range(len(codes)) if i + 1 == len(codes) or codes[i + 1] != codes[i]]
    return torch.tensor(ends, dtype=torch.int64, device=uids.device)


def mask_boundary_labels(labels: torch.Tensor, cu_seqlens: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    out = labels.clone().reshape(-1)
    for start, end in documents(cu_seqlens):
        out[start : min(start + 1, end)] = ignore_index
    return out.reshape(labels.shape)


def mask_boundary_labels_shifted(
    labels: torch.Tensor, cu_seqlens: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    out = labels.clone().reshape(-1)
    for start, end in documents(cu_seqlens):
        out[max(end - 1, start) : end] = ignore_index
    return out.reshape(labels.shape)


def shift_labels(labels: torch.Tensor, cu_seqlens: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    return shift_values(labels, cu_seqlens, ignore_index)


def shift_values(values: torch.Tensor, cu_seqlens: torch.Tensor, fill_value: float = 0.0) -> torch.Tensor:
    flat = values.reshape(-1)
    out = torch.full_like(flat, fill_value)
    for start, end in documents(cu_seqlens):
        out[start : max(end - 1, start)] = flat[start + 1 : end]
    return out.reshape(values.shape)


def segment_sum(
    values: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None = None, average: bool = False
) -> torch.Tensor:
    keep = torch.ones(len(values), dtype=torch.bool, device=values.device) if mask is None else mask != 0
    sums = []
    for start, end in documents(cu_seqlens):
        kept = values[start:end][keep[start:end]]
        sums.append(kept.sum(0) / max(len(kept), 1) if average else kept.sum(0))
    return torch.stack(sums) if sums else values.new_zeros(0, *values.shape[1:])


def segment_mean(values: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return segment_sum(values, cu_seqlens, mask, average=True)


def count_target_tokens(labels: torch.Tensor, cu_seqlens: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    flat = labels.reshape(-1)
    targets = [(flat[start + 1 : end] != ignore_index).sum() for start, end in documents(cu_seqlens)]
    return torch.stack(targets).sum() if targets else flat.new_zeros(())


def block_causal_mask(
    cu_seqlens: torch.Tensor, total: int, *, dtype: torch.dtype = torch.bool, window: int | None = None
) -> torch.Tensor:
    idx = seq_idx_from_cu_seqlens(cu_seqlens, total)
    slot = torch.arange(total, device=cu_seqlens.device)
    back = slot[:, None] - slot[None, :]
    visible = (idx[:, None] == idx[None, :]) & (back >= 0)
    if window is not None:
        visible &= back < window
    if dtype == torch.bool:
        return visible
    return torch.zeros(total, total, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
