"""What a call of attention keeps for the next one: the plan."""

import weakref

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
