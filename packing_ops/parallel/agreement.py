"""Whether all ranks of a group call the same attention over the same documents: else they would hang, or mix rows."""

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from packing_ops.parallel.collectives import start_all_gather

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = (
    weakref.WeakKeyDictionary()
)  # {group: the calls on which its ranks agreed}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_agreement(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, group: dist.ProcessGroup, options: Mapping[str, Any]
) -> None:
    """ValueError on every rank where one of them has other options, heads, dtypes, rows or documents; it is named.

    It waits for the GPU, so it is done in the first call with these options; with PACKING_OPS_CHECK=1 in every call.

    Args:
        q, k: ``[rows, num_heads, head_dim]`` of this rank.
        cu_seqlens: of the whole row.
        options: of the attention, by name: numbers, None, bools, and tuples of numbers.
    """
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    agreed = _agreed.setdefault(group, set())
    call = (*options.items(), *q.shape[1:], *k.shape[1:], q.dtype, k.dtype, torch.is_grad_enabled())
    if call in agreed and os.environ.get("PACKING_OPS_CHECK") != "1":
        return
    told = _told(q, k, cu_seqlens, options)
    numbers = torch.tensor(list(told.values()), dtype=torch.float64, device=q.device)
    of_ranks = start_all_gather(numbers[None], group)().tolist()
    for index, name in enumerate(told):
        for rank, found in enumerate(of_ranks):
            if repr(found[index]) != repr(of_ranks[0][index]):
                first, other = (_in_words(name, each[index]) for each in (of_ranks[0], found))
                raise ValueError(
                    f"{name}: expected {first} on all {len(of_ranks)} ranks as on rank 0, got {other} on rank {rank} "
                    "of the group"
                )
    agreed.add(call)


def _told(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, options: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, in the same order and under the same names on every rank."""
    told = {}
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        for index, number in enumerate(values):
            key = name if len(values) == 1 else f"{name}[{index}]"
            told[key] = float("nan") if number is None else float(number)
    for name, tensor in (("q", q), ("k", k)):
        told[f"{name}.dtype"] = float(_DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else -1)
        for dimension, size in zip(("rows", "heads", "head_dim"), tensor.shape, strict=True):
            told[f"{name} {dimension}"] = float(size)
    ends = cu_seqlens.long()
    told["cu_seqlens (documents)"] = float(len(ends) - 1)
    # Weighed by their index, so that ends in another order are told apart; float64 holds 2**53.
    weights = torch.arange(1, len(ends) + 1, device=ends.device) * 2_654_435_761 % 1_000_003
    told["cu_seqlens (checksum)"] = float((ends * weights).sum().remainder(2**52))
    return told


def _in_words(name: str, number: float) -> str:
    if name.endswith(".dtype"):
        return str(_DTYPES[int(number)]).removeprefix("torch.") if number >= 0 else "another dtype"
    if number != number:
        return "None"
    return str(int(number) if number == int(number) else number) if abs(number) < 2**53 else str(number)
