"""Oracles of packing_ops.padding."""

from collections.abc import Iterator, Mapping, Sequence

import torch


def unpad_layout(
    attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Return indices, cu_seqlens, seqused, total, max_seqlen."""
    attended = attention_mask != 0
    real = attended if unused_mask is None else attended | (unused_mask != 0)
    indices = real.flatten().nonzero().flatten()
    lengths = real.sum(dim=1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return indices, cu_seqlens, attended.sum(dim=1).to(torch.int32), indices.numel(), max_seqlen


def gather_rows(input: torch.Tensor, indices: torch.Tensor, total: int) -> torch.Tensor:
    rows = input.flatten(0, 1)
    packed = rows.new_zeros((total, *rows.shape[1:]))
    kept = indices[:total] >= 0
    packed[kept] = rows[indices[:total][kept]]
    return packed


def scatter_rows(packed: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    rows = packed.new_zeros((batch * seqlen, *packed.shape[1:]))
    kept = indices[: packed.shape[0]] >= 0
    rows[indices[: packed.shape[0]][kept]] = packed[kept]
    return rows.unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    indices, cu_seqlens, seqused, total, max_seqlen = unpad_layout(attention_mask, unused_mask)
    return gather_rows(hidden_states, indices, total), indices, cu_seqlens, max_seqlen, seqused


def pad_input(packed: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    return scatter_rows(packed, indices, batch, seqlen)


def kept_columns(
    attention_mask: torch.Tensor, side: str = "right", min_length: int = 1, multiple_of: int = 1
) -> tuple[int, int]:
    """Find the narrowest allowed span of columns that holds every real slot, by trying all."""
    width = attention_mask.shape[1]
    real = [column for column in range(width) if (attention_mask[:, column] != 0).any()]
    for kept in range(min(min_length, width), width + 1):
        if kept % multiple_of and kept != width:
            continue
        from_the_right = range(width - kept, -1, -1) if real else [0]
        for start in {"right": [0], "left": [width - kept], "both": from_the_right}[side]:
            if all(start <= column < start + kept for column in real):
                return start, start + kept
    raise AssertionError("the full width always fits")


def iter_microbatches(
    examples: Sequence[Mapping[str, Sequence[int]]], microbatch_size: int, pad_values: Mapping[str, int]
) -> Iterator[dict[str, torch.Tensor]]:
    for first in range(0, len(examples), microbatch_size):
        group = examples[first : first + microbatch_size]
        longest = max(len(next(iter(example.values()))) for example in group)
        yield {
            name: torch.tensor([[*e[name], *[value] * (longest - len(e[name]))] for e in group], device="cpu")
            for name, value in pad_values.items()
        }
