"""The cache of what the layers of a model share about a batch: cu_seqlens of dense rows, layouts, attention plans.

An entry is used only for the values that it was made from. Torch counts the writes that it sees (``_version``), but not
those of dist.broadcast, recv, ``.data``, NumPy or DLPack, so the values are compared before an entry is used again: on
the CPU at once, on CUDA by a kernel that reports through the fault flag.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch

from packing_ops import _ops
from packing_ops._checks import check_unchanged
from packing_ops.boundaries import cu_seqlens_of_rows


def is_real(tensor: torch.Tensor) -> bool:
    """Whether results may be kept: False in a trace, for fake tensors and those of torch.func, and while a CUDA graph is
    captured, whose replays may have other values."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) is not torch.Tensor
        or (torch._C._len_torch_dispatch_stack() and _traced())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _traced() -> bool:
    """Whether a dispatch mode makes results fake. Modes that only observe, such as profilers, do not."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def _stream(tensor: torch.Tensor) -> int:
    """The current stream, 0 on the CPU. An entry serves one stream: another would not wait until it is made."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


# --- cu_seqlens of a dense batch ---


def dense_cu_seqlens(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """int32 ``[batch + 1]`` for ``[batch, seqlen, ...]``: the same tensor in every call, so that layers share a plan."""
    batch, seqlen = tensor.shape[:2]
    if batch * seqlen >= 2**31:
        raise ValueError(f"{name}: expected batch * seqlen below 2**31, got {list(tensor.shape)}")
    if is_real(tensor):
        return _kept_cu_seqlens(batch, seqlen, tensor.device, _stream(tensor))
    return cu_seqlens_of_rows(batch, seqlen, tensor.device)


@functools.lru_cache(maxsize=16)
def _kept_cu_seqlens(batch, seqlen, device, stream):
    with torch.inference_mode(False):  # the next call may train
        return cu_seqlens_of_rows(batch, seqlen, device)


# --- what the layers of a model share about a batch ---

MOST_KEPT = 8  # of one tensor: its plans by geometry, its layouts
_kept: dict[int, "_OfTensor"] = {}  # by id of the first tensor


class _OfTensor:
    """The entries of a tensor at this version, by key, the oldest first."""

    __slots__ = ("entries", "first", "version")

    def __init__(self, first):
        key = id(first)
        self.first = weakref.ref(first, lambda _, kept=_kept: kept.pop(key, None))  # the entries go with the tensor
        self.version, self.entries = first._version, {}


class _Entry:
    __slots__ = ("layer", "made", "others", "state", "values", "version")

    def __init__(self, made, others, state, values):
        self.made, self.others, self.state, self.values, self.layer = made, others, state, values, None
        self.version = _version(made)

    def is_of(self, others, state):
        if self.state != state or self.version != _version(self.made):
            return False
        return all(map(operator.is_, [reference() for reference in self.others], others))


def _version(made) -> int:
    return made._version if isinstance(made, torch.Tensor) else 0


def kept_with(
    tensors: Sequence[torch.Tensor],
    key: tuple,
    make: Callable[[], object],
    *,
    layer: int | None = None,
    checked_by_kernel: bool = False,
) -> object:
    """``make()``, or its earlier result for ``key`` if these very tensors still have the same values.

    On the CPU changed values are seen at once, and ``make`` is called again. On CUDA nothing waits for the comparison:
    changed values raise in a later call, and this call returns the result of the old ones.

    The result is kept as long as ``tensors[0]`` lives, and must hold no reference to that tensor. A result that was
    written into is made again.

    Args:
        layer: number of the calling layer. The one after the last caller is taken to be in the same forward, where the
            values are not compared again. Leave it out where layers of several batches run in turn.
        checked_by_kernel: the user of the result compares the values itself, as attention does with its plan.

    Raises:
        ValueError: on CUDA, in a later call: values changed unseen by torch. All entries are dropped.
    """
    first, *others = tensors
    if not is_real(first):
        return make()
    for tensor in tensors:
        if tensor.is_inference():  # it has no version
            return make()
    of_first = _kept.get(id(first))
    if of_first is None or of_first.version != first._version or of_first.first() is not first:
        of_first = _kept[id(first)] = _OfTensor(first)
    state = [tensor._version for tensor in others]
    if first.is_cuda:
        state.append(_stream(first))
    entry = of_first.entries.get(key)
    if entry is not None and entry.is_of(others, state):
        follows = layer is not None and entry.layer is not None and layer == entry.layer + 1
        entry.layer = layer
        if checked_by_kernel or follows or _unchanged(tensors, entry.values):
            return entry.made
    with torch.inference_mode(False), torch.no_grad():  # the next call may train
        values = None if checked_by_kernel else [tensor.clone() for tensor in tensors]
        made = make()
    of_first.entries.pop(key, None)
    while len(of_first.entries) >= MOST_KEPT:
        of_first.entries.pop(next(iter(of_first.entries)))
    of_first.entries[key] = entry = _Entry(made, [weakref.ref(tensor) for tensor in others], state, values)
    entry.layer = layer
    return made


def _unchanged(tensors, values) -> bool:
    """On CUDA always True: a change is a fault of a later call, so that nothing waits for the comparison."""
    if not tensors[0].is_cuda:
        return all(map(torch.equal, tensors, values))
    try:
        for tensor, value in zip(tensors, values, strict=True):
            check_unchanged(tensor, value)
    except ValueError:
        forget()
        raise
    return True


def forget() -> None:
    """Drop all entries: after a fault it is not known which of them is wrong."""
    _kept.clear()


# --- the plan of a batch ---


def plan_for(q, k, cu_seqlens_q, cu_seqlens_k, causal: bool, left: int, right: int) -> torch.Tensor | None:
    """The plan of an attention call; None on the CPU, and for shapes that the op itself refuses with a message."""
    if not (isinstance(k, torch.Tensor) and q.is_cuda):
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
    """Made for the first layer with this geometry, kept with cu_seqlens for the others."""
    same = cu_seqlens_k is cu_seqlens_q
    tensors = (cu_seqlens_q,) if same else (cu_seqlens_q, cu_seqlens_k)
    return kept_with(
        tensors,
        ("plan", same, geometry),
        lambda: _ops.attention_plan(cu_seqlens_q, cu_seqlens_k, *geometry),
        checked_by_kernel=True,
    )
