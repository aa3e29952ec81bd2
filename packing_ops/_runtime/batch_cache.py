"""The cache of what the layers of a model share about a batch: cu_seqlens of dense rows, layouts, attention plans.

Entries are kept with a cu_seqlens tensor: in its PackedMetadata, or for as long as the tensor lives. An entry is used
only for the values that it was made from. Torch counts the writes that it sees (``_version``), but not those of
dist.broadcast, recv, ``.data``, NumPy or DLPack, so the values are compared before an entry is used again: on the CPU
at once, on CUDA by a kernel that reports through the fault flag.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from packing_ops._runtime import gate

# The dispatch modes that make results fake. Those that only observe, such as profilers, do not.
_KEYS = torch._C._TorchDispatchModeKey
_FAKING = _KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL


def is_real(tensor: torch.Tensor) -> bool:
    """Return whether results may be cached. False in a trace, for fake tensors and those of torch.func, and while a
    CUDA graph is captured, whose replays may have other values.
    """
    return not (
        torch.compiler.is_compiling()
        or type(tensor) is not torch.Tensor
        or (torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _FAKING)))
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())  # is_captured, without a call: each layer asks
    )


def is_captured(tensor: torch.Tensor) -> bool:
    """Return whether a CUDA graph is being captured: the host can read no values then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def unseen() -> AbstractContextManager[None]:
    """Hide ops from modes that observe. What is computed once for several layers must not count among the ops of
    one: selective checkpointing matches each op of a layer's recomputation with one of its forward.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _stream(tensor: torch.Tensor) -> int:
    """Return the current stream, 0 on the CPU. Entries are per stream: a kernel on another stream would read one
    before it is written.
    """
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


# --- cu_seqlens of a dense batch ---


def cu_seqlens_of_rows(rows: int, seqlen: int, device: torch.device) -> torch.Tensor:
    """Return int32 ``[rows + 1]``: every row of a dense batch is a document."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * seqlen


def dense_cu_seqlens(batch: int, seqlen: int, like: torch.Tensor, name: str) -> torch.Tensor:
    """Return int32 ``[batch + 1]`` of equal rows, on the device of ``like``. It is the same tensor in every call, so
    that layers share a plan.
    """
    if batch * seqlen >= 2**31:
        raise ValueError(f"{name}: expected batch * seqlen below 2**31, got batch {batch} and seqlen {seqlen}")
    if is_real(like):
        return _kept_cu_seqlens(batch, seqlen, like.device, _stream(like))
    return cu_seqlens_of_rows(batch, seqlen, like.device)


@functools.lru_cache(maxsize=16)
def _kept_cu_seqlens(batch, seqlen, device, stream):
    with torch.inference_mode(False):  # the next call may train
        return cu_seqlens_of_rows(batch, seqlen, device)


# --- what the layers of a model share about a batch ---

MOST_KEPT = 8  # entries of one tensor: its plans by geometry, its layouts


class BatchCache:
    """The entries of one cu_seqlens tensor, by key, the oldest first. PackedMetadata holds one.

    Copies and pickles of it are empty.
    """

    __slots__ = ("entries", "state")

    def __init__(self):
        self.state, self.entries = None, {}

    def __reduce__(self):
        return BatchCache, ()

    def entries_at(self, version: int) -> dict:
        """Return the cache's entries, without those that are older than the last write that torch has seen, or than
        the last fault.
        """
        state = version, _forgotten
        if self.state != state:
            self.state, self.entries = state, {}
        return self.entries


class _TensorCache(BatchCache):
    """The entries of cu_seqlens that were passed without a PackedMetadata; dropped when the tensor is freed."""

    __slots__ = ("first",)

    def __init__(self, first):
        super().__init__()
        tensor_id = id(first)
        self.first = weakref.ref(first, lambda _, caches=_tensor_caches: caches.pop(tensor_id, None))


_tensor_caches: dict[int, _TensorCache] = {}  # by id of the tensor
_forgotten = 0  # how often forget() was called


class _Entry:
    __slots__ = ("forward", "made", "others", "state", "values", "version")

    def __init__(self, made, others, state, values):
        self.made, self.others, self.state, self.values, self.forward = made, others, state, values, None
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
    forward: object | None = None,
    checked_by_kernel: bool = False,
    cache: BatchCache | None = None,
) -> Any:
    """Return ``make()``, or its earlier result for ``key`` if these very tensors still have the same values.

    On the CPU changed values are seen at once, and ``make`` is called again. On CUDA nothing waits for the comparison:
    changed values raise in a later call, and this call returns the result of the old ones.

    The result is kept in ``cache``, or without one as long as ``tensors[0]`` lives; it must hold no reference to that
    tensor. A result that was written into is made again.

    Args:
        forward: the call of the model that asks, as an object that nothing else is asked with. In it the values are not
            compared again.
        checked_by_kernel: the kernel that uses the result compares the values itself, as attention does with its plan.
        cache: the one of the PackedMetadata that ``tensors[0]`` belongs to.

    Raises:
        ValueError: on CUDA, in a later call: values changed unseen by torch. All entries are dropped.
    """
    first, *others = tensors
    if not is_real(first):
        return make()
    for tensor in tensors:
        if tensor.is_inference():  # it has no version
            return make()
    asks = None if forward is None else weakref.ref(forward)
    if cache is None:
        cache = _tensor_caches.get(id(first))
        if cache is None or cache.first() is not first:
            cache = _tensor_caches[id(first)] = _TensorCache(first)
    entries = cache.entries_at(first._version)
    state = [tensor._version for tensor in others]
    if first.is_cuda:
        state.append(_stream(first))
    entry = entries.get(key)
    if entry is not None and entry.is_of(others, state):
        known = forward is not None and entry.forward is not None and entry.forward() is forward
        if checked_by_kernel or known or _unchanged(tensors, entry.values):
            entry.forward = asks
            return entry.made
    with torch.inference_mode(False), torch.no_grad(), unseen():  # the next call may train
        values = None if checked_by_kernel else [tensor.clone() for tensor in tensors]
        made = make()
    entries.pop(key, None)
    while len(entries) >= MOST_KEPT:
        entries.pop(next(iter(entries)))
    entries[key] = entry = _Entry(made, [weakref.ref(tensor) for tensor in others], state, values)
    entry.forward = asks
    return made


def _unchanged(tensors, values) -> bool:
    """Return whether values are unchanged. On CUDA always True: a change is a fault of a later call, so that nothing
    waits for the comparison.
    """
    with unseen():
        if not tensors[0].is_cuda:
            return all(map(torch.equal, tensors, values))
        try:
            for tensor, value in zip(tensors, values, strict=True):
                gate.check_unchanged(tensor, value, "as it was")
        except ValueError:
            forget()
            raise
        return True


def check_same(values: torch.Tensor, expected: torch.Tensor, wanted: str) -> None:
    """Raise ValueError where values differ: on the CPU at once, on CUDA in a later call, in a graph never.

    Args:
        wanted: what the error says. "depths": position_ids of a prefix tree; "segments": cu_seqlens of one.
    """
    if is_real(values):
        gate.check_unchanged(values, expected, wanted)


def forget() -> None:
    """Drop all entries: after a fault it is not known which of them is wrong."""
    global _forgotten
    _forgotten += 1  # entries_at then drops those of each PackedMetadata
    _tensor_caches.clear()
