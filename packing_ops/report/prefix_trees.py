"""What prefix trees would save: documents that begin alike, with what they share computed once."""

from typing import Any

import torch

import packing_ops as po
from packing_ops.packing import Overlong


def savings(
    tokens: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor | None, *, capacity: int, overlong: Overlong
) -> dict[str, Any]:
    """Count tokens, rows and visible pairs of query and key, of separate documents and as the trees of
    pack_prefix_tree.

    Args:
        tokens: int64 ``[total]``, the documents end to end.
        lengths: int64 ``[num_documents]``.
        groups: int64 ``[num_documents]``: only documents of one number are compared. None: all are.
        capacity: tokens of a row. Longer documents are cut to it, or left out with ``overlong="drop"``.

    Example:
        >>> found = savings(torch.zeros(400).long(), torch.tensor([200, 200]), None, capacity=256, overlong="truncate")
        >>> found["tokens"], found["rows"]
        ({'alone': 400, 'shared': 200}, {'alone': 2, 'shared': 1})
    """
    kept = torch.where(lengths > capacity, 0 if overlong == "drop" else capacity, lengths)
    position_ids = po.position_ids_from_cu_seqlens(po.cu_seqlens_from_lengths(lengths), tokens.numel())
    tokens = tokens[position_ids < kept.repeat_interleave(lengths)]
    groups, lengths = None if groups is None else groups[kept > 0], kept[kept > 0]
    tree = po.pack_prefix_tree(tokens, po.cu_seqlens_from_lengths(lengths), groups=groups, capacity=capacity)
    pairs = {"alone": int((lengths * (lengths + 1) // 2).sum()), "shared": int((tree.position_ids + 1).sum())}
    return {
        "documents": lengths.numel(),
        "groups": None if groups is None else groups.unique().numel(),
        "tokens": {"alone": tree.num_tokens, "shared": tree.num_slots},
        "rows": {
            "alone": po.pack_sequences(lengths, capacity).num_bins,
            "shared": tree.num_bins if tree.num_slots else 0,
        },
        "pairs": pairs,
        "repeated_at_forks": tree.repeated_at_forks,
        "repeated_by_cuts": tree.repeated_by_cuts,
    }
