"""Under PACKING_OPS_CHECK: whether all ranks of a group call the same attention over the same documents.

Ranks that differ hang, or exchange rows of different heads and keys. The check is an extra collective, so all ranks
make it or no rank does: the environment decides, not what one rank has called before.
"""

from typing import Any

import torch
import torch.distributed as dist

from packing_ops._runtime.arguments import checks_each_call, dtype_name, number, plain
from packing_ops._runtime.batch_cache import is_captured
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.collectives import check_process
from packing_ops.varlen.options import AttentionOptions


def check_agreement(
    attention: str,
    scheme: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor | None,
    group: dist.ProcessGroup,
    options: AttentionOptions,
    *,
    keep_keys: bool | None = None,
    return_lse: bool | None = None,
) -> None:
    """Raise ValueError on every rank, under PACKING_OPS_CHECK, if one has other options, heads, dtypes, rows or
    documents.

    It names what differs. It precedes the checks of one rank's arguments: a rank that raises without the others leaves
    the others waiting. It waits for the GPU.

    Args:
        attention: the name of the function that is called.
        q, k, v: ``[rows, num_heads, head_dim]`` of this rank.
        documents: of the whole row; None where each rank is given a part. Its visible_end is compared too.
        keep_keys: of gathered attention.
        return_lse: of Ulysses attention, which exchanges lse.
    """
    if torch.compiler.is_compiling() or not checks_each_call() or is_captured(q):
        return
    # Backward is a collective too.
    recorded, sinks = torch.is_grad_enabled(), options.sinks
    ends: Any = documents
    visible_end, paths, total = None, None, group.size() * len(q)  # cu_seqlens alone are of that many slots
    if isinstance(documents, PackedMetadata):
        ends, visible_end, paths, total = documents.cu_seqlens, documents.visible_end, documents.paths, documents.total
    # All ranks send the same names, whichever attention they call.
    given = {
        "attention": attention,
        "keep_keys": keep_keys,
        "return_lse": return_lse,
        "scheme": scheme,
        **options._replace(sinks=None, window_size=(0, 0))._asdict(),
        "window_size[0]": options.window_size[0],
        "window_size[1]": options.window_size[1],
        "visible_end": visible_end is not None,
        "paths": paths is not None,
        "q, k or v requires_grad": recorded and (q.requires_grad or k.requires_grad or v.requires_grad),
        "sinks requires_grad": recorded and sinks is not None and sinks.requires_grad,
    }
    call = {name: value if name in ("attention", "scheme") else _in_words(value) for name, value in given.items()}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        call[f"{name}.dtype"] = dtype_name(tensor.dtype)
        for dimension, size in zip(("rows", "heads", "head_dim"), tensor.shape, strict=True):
            call[f"{name} {dimension}"] = str(size)
    call["sinks"] = "None" if sinks is None else f"{dtype_name(sinks.dtype)} {list(sinks.shape)}"
    call["cu_seqlens (total)"] = str(total)
    call["cu_seqlens (documents)"] = str(None if ends is None else len(ends) - 1)
    call["cu_seqlens (checksum)"] = _checksum(ends)
    call["visible_end (checksum)"] = _checksum(visible_end)
    call["paths (checksum)"] = _checksum(None if paths is None else paths.slot_of_key)
    check_process(group)
    calls: list[Any] = [None] * group.size()
    with torch.cuda.device_of(q):  # NCCL sends from the current device
        dist.all_gather_object(calls, call, group)
    for name, first in calls[0].items():
        for rank, other in enumerate(calls):
            if other[name] != first:
                raise ValueError(
                    f"{name}: expected {first} on all {len(calls)} ranks as on rank 0, got {other[name]} on rank "
                    f"{rank} of the group"
                )


def _in_words(value: Any) -> str:
    """Return an option as text. What is not a number is refused by its name after this check: no rank may raise
    here.
    """
    value = plain(value)
    if value is None or isinstance(value, bool):
        return str(value)
    try:
        found = float(number(value, "value"))
    except (TypeError, ValueError, OverflowError):
        return "no number"
    return str(int(found) if found.is_integer() and abs(found) < 2**53 else found)


def _checksum(numbers: torch.Tensor | None) -> str:
    """Return a sum weighted by index, so that the order counts."""
    if numbers is None:
        return "None"
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device) * 2_654_435_761 % 1_000_003
    return str(int((numbers.long() * weights).sum().remainder(2**52)))
