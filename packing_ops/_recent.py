"""What a call keeps for the next one: the cu_seqlens of a dense batch, what was worked out from a batch, its plan."""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch

_ops = torch.ops.packing_ops


def _keeps(tensor: torch.Tensor) -> bool:
    """Not in a trace, and not in a graph: it may be replayed with other lengths and must make its own."""
    return not (torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()))


def _stream(tensor: torch.Tensor) -> int:
    """Another stream would not wait for what this one makes."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


# --- cu_seqlens of a dense batch ---


def dense_cu_seqlens(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """int32 ``[batch + 1]`` for ``[batch, seqlen, ...]``: the same tensor in every call, so that layers share a plan."""
    batch, seqlen = tensor.shape[:2]
    if batch * seqlen >= 2**31:
        raise ValueError(f"{name}: expected batch * seqlen below 2**31, got {list(tensor.shape)}")
    if type(tensor) is torch.Tensor and _keeps(tensor):  # a fake tensor's cu_seqlens would be fake
        return _kept_cu_seqlens(batch, seqlen, tensor.device, _stream(tensor))
    return _every(seqlen, batch, tensor.device)


@functools.lru_cache(maxsize=16)
def _kept_cu_seqlens(batch, seqlen, device, stream):
    with torch.inference_mode(False):  # the next call may train
        return _every(seqlen, batch, device)


def _every(seqlen, batch, device):
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


# --- what the layers of a model share about a batch ---

# By id of the first tensor, which is quick to look up: a reference that takes the entry with it when it dies, the values
# that it had, and by key what was made of them.
_kept: dict[int, tuple[weakref.ref, int, dict[tuple, tuple]]] = {}


def kept_with(tensors: Sequence[torch.Tensor], key: tuple, make: Callable[[], object]) -> object:
    """``make()``, or what it gave for ``key`` while these very tensors had the values that they have now.

    It lives as long as ``tensors[0]``, which it must not hold.
    """
    first, *others = tensors
    if not _keeps(first):
        return make()
    for tensor in tensors:
        if tensor.is_inference():  # no version that would tell a change
            return make()
    place, version = id(first), first._version
    if place not in _kept or _kept[place][1] != version:
        _kept[place] = weakref.ref(first, lambda _, kept=_kept: kept.pop(place, None)), version, {}
    of_first = _kept[place][2]
    state = [tensor._version for tensor in others]
    if first.is_cuda:
        state.append(_stream(first))
    if key in of_first:
        made_for, of, made = of_first[key]
        if made_for == state and all(map(operator.is_, [reference() for reference in of], others)):
            return made
    with torch.inference_mode(False), torch.no_grad():  # the next call may train
        made = make()
    of_first[key] = state, [weakref.ref(tensor) for tensor in others], made
    return made


# --- the plan of a batch ---


def plan_for(q, k, cu_seqlens_q, cu_seqlens_k, causal: bool, left: int, right: int) -> torch.Tensor | None:
    """The plan of a call of attention; None on the CPU, and for shapes that the op will refuse by name."""
    if not q.is_cuda:
        return None
    if q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] == 1:
        (_, num_heads, total_q, head_dim), (_, num_kv_heads, total_k, _) = q.shape, k.shape
    elif q.dim() == k.dim() == 3:
        (total_q, num_heads, head_dim), (total_k, num_kv_heads, _) = q.shape, k.shape
    else:
        return None
    if num_kv_heads == 0 or num_heads % num_kv_heads or not 0 < head_dim <= 256:
        return None
    geometry = (total_q, total_k, num_heads, num_kv_heads, head_dim, causal, left, right)
    return plan_of(cu_seqlens_q, cu_seqlens_k, geometry)


def plan_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, geometry: tuple) -> torch.Tensor:
    """Made by the first layer of a model that has this geometry, kept with cu_seqlens for the others."""
    same = cu_seqlens_k is cu_seqlens_q
    tensors = (cu_seqlens_q,) if same else (cu_seqlens_q, cu_seqlens_k)
    return kept_with(
        tensors, ("plan", same, geometry), lambda: _ops.attention_plan(cu_seqlens_q, cu_seqlens_k, *geometry)
    )
