"""What a call keeps for the next one: the plan, the cu_seqlens of a dense batch, what was worked out from a batch."""

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


# --- the plan of the call before ---


def plannable(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Shapes that a plan can be made for; the op names what is wrong with any other."""
    if q.dim() != 3 or k.dim() != 3:
        return False
    return k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and 0 < q.shape[2] <= 256


_recent: tuple | None = None


def plan_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, geometry: tuple) -> torch.Tensor:
    """The layers of a model call one after the other with the same cu_seqlens: the first makes the plan."""
    global _recent
    tensors = (cu_seqlens_q, cu_seqlens_k)
    # Inference tensors have no version that would tell a change.
    if not _keeps(cu_seqlens_q) or any(tensor.is_inference() for tensor in tensors):
        return _ops.attention_plan(*tensors, *geometry)
    key = (*geometry, _stream(cu_seqlens_q), cu_seqlens_q._version, cu_seqlens_k._version)
    if _recent is not None:
        of, made_for, plan = _recent
        if made_for == key and of[0]() is cu_seqlens_q and of[1]() is cu_seqlens_k:
            return plan
    with torch.inference_mode(False):  # the next call may train
        plan = _ops.attention_plan(*tensors, *geometry)
    _recent = (weakref.ref(cu_seqlens_q), weakref.ref(cu_seqlens_k)), key, plan
    return plan


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

# By id of the first tensor, which is quick to look up: a reference that takes the entry with it when it dies, and by key
# what was made.
_kept: dict[int, tuple[weakref.ref, dict[tuple, tuple]]] = {}


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
    state = [tensor._version for tensor in tensors]
    if first.is_cuda:
        state.append(_stream(first))
    place = id(first)
    if place not in _kept:
        _kept[place] = weakref.ref(first, lambda _, kept=_kept: kept.pop(place)), {}
    of_first = _kept[place][1]
    if key in of_first:
        made_for, of, made = of_first[key]
        if made_for == state and all(map(operator.is_, [reference() for reference in of], others)):
            return made
    with torch.inference_mode(False), torch.no_grad():  # the next call may train
        made = make()
    of_first[key] = state, [weakref.ref(tensor) for tensor in others], made
    return made
