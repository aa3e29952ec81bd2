"""Under PACKING_OPS_CHECK: whether all ranks of a group call the same attention over the same documents.

Ranks that differ hang, or exchange rows of different heads and keys. The check is an extra collective, so all ranks
make it or no rank does: the environment decides, not what one rank has called before.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from packing_ops._runtime.arguments import FLOATS, checks_each_call, number
from packing_ops._runtime.batch_cache import is_captured
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.collectives import start_all_gather
from packing_ops.varlen.options import AttentionOptions

# Words are sent as their index.
_WORDS = {
    "attention": (
        "ulysses_attention",
        "gathered_attention",
        "varlen_attention_over",
        "llama3_flash_attn_varlen_func",
    ),
    "scheme": ("contiguous", "zigzag"),
}
_GRADIENTS = ("q, k or v requires_grad", "sinks requires_grad")
_NO_NUMBER = -sys.float_info.max  # no option is this number
_FLAGS = ("causal", "keep_keys", "sinks", "visible_end", "paths", *_GRADIENTS)


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
) -> None:
    """Raise ValueError on every rank, under PACKING_OPS_CHECK, if one has other options, heads, dtypes, rows or
    documents.

    It names what differs. It precedes the checks of one rank's arguments: a rank that raises without the others leaves
    the others waiting. It waits for the GPU.

    Args:
        attention: the function that is called, one of _WORDS.
        q, k, v: ``[rows, num_heads, head_dim]`` of this rank.
        documents: of the whole row; None where each rank is given a part. Its visible_end is compared too.
        keep_keys: of gathered attention.
    """
    if torch.compiler.is_compiling() or not checks_each_call() or is_captured(q):
        return
    # Backward is a collective too.
    recorded, sinks = torch.is_grad_enabled(), options.sinks
    gradients = (
        recorded and (q.requires_grad or k.requires_grad or v.requires_grad),
        recorded and sinks is not None and sinks.requires_grad,
    )
    metadata = documents if isinstance(documents, PackedMetadata) else None
    # All ranks send the same names, whichever attention they call.
    given = {
        "keep_keys": keep_keys,
        "attention": attention,
        "scheme": scheme,
        **options._asdict(),
        "sinks": sinks is not None,
        "visible_end": metadata is not None and metadata.visible_end is not None,
        "paths": metadata is not None and metadata.paths is not None,
        **dict(zip(_GRADIENTS, gradients, strict=True)),
    }
    numbers = _numbers(q, k, v, documents, given)
    sent = torch.tensor(list(numbers.values()), dtype=torch.float64, device=q.device)
    of_ranks = start_all_gather(sent[None], group)().tolist()
    for index, name in enumerate(numbers):
        for rank, found in enumerate(of_ranks):
            if repr(found[index]) != repr(of_ranks[0][index]):  # repr: NaN encodes None
                first, other = (_in_words(name, each[index]) for each in (of_ranks[0], found))
                raise ValueError(
                    f"{name}: expected {first} on all {len(of_ranks)} ranks as on rank 0, got {other} on rank {rank} "
                    "of the group"
                )


def _numbers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor | None,
    given: Mapping[str, Any],
) -> dict[str, float]:
    """Return the call as numbers, in the same order and under the same names on every rank."""
    numbers: dict[str, float] = {}
    # options
    for name, value in given.items():
        pair = name == "window_size"
        for index, each in enumerate(value if pair else (value,)):
            key = f"{name}[{index}]" if pair else name
            numbers[key] = float(_WORDS[name].index(each)) if name in _WORDS else _sent(each)
    # tensors
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        numbers[f"{name}.dtype"] = float(FLOATS.index(tensor.dtype) if tensor.dtype in FLOATS else -1)
        for dimension, size in zip(("rows", "heads", "head_dim"), tensor.shape, strict=True):
            numbers[f"{name} {dimension}"] = float(size)
    # documents
    metadata = documents if isinstance(documents, PackedMetadata) else None
    ends = documents.cu_seqlens if isinstance(documents, PackedMetadata) else documents
    numbers["cu_seqlens (documents)"] = float("nan") if ends is None else float(len(ends) - 1)
    numbers["cu_seqlens (checksum)"] = float("nan") if ends is None else _checksum(ends)
    visible_end = None if metadata is None else metadata.visible_end
    numbers["visible_end (checksum)"] = 0.0 if visible_end is None else _checksum(visible_end)
    paths = None if metadata is None else metadata.paths
    numbers["paths (checksum)"] = 0.0 if paths is None else _checksum(paths.slot_of_key)
    return numbers


def _sent(value: Any) -> float:
    """Return a number as float64 holds it. What is not a number is refused by its name after this check: no rank may
    raise here.
    """
    if value is None:
        return float("nan")
    try:
        return float(number(value, "value"))
    except (TypeError, ValueError, OverflowError):
        return _NO_NUMBER


def _checksum(numbers: torch.Tensor) -> float:
    """Return a sum weighted by index, so that the order counts; below 2**53, which float64 holds exactly."""
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device) * 2_654_435_761 % 1_000_003
    return float((numbers.long() * weights).sum().remainder(2**52))


def _in_words(name: str, sent: float) -> str:
    if name in _WORDS:
        return _WORDS[name][int(sent)]
    if sent != sent:
        return "None"
    if sent == _NO_NUMBER:
        return "no number"
    if name in _FLAGS:
        return str(bool(sent))
    if name.endswith(".dtype"):
        return str(FLOATS[int(sent)]).removeprefix("torch.") if sent >= 0 else "another dtype"
    return str(int(sent) if sent == int(sent) else sent) if abs(sent) < 2**53 else str(sent)
