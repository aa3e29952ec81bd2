"""Arguments of public functions: conversion of arrays, columns and sequences, checks, and the words of errors."""

import functools
import math
import operator
import os
import reprlib
import warnings
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

warned: set[str] = set()  # messages that this process has given
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # that the ops take on the CPU


_Named = TypeVar("_Named", bound=Callable[..., Any])


def old_name(old: str, new: str = "cu_seqlens") -> Callable[[_Named], _Named]:
    """Return a decorator by which a function or a class takes an argument by an older name too, and warns of it."""

    def decorated(named: Any) -> Any:
        function = named.__init__ if isinstance(named, type) else named

        @functools.wraps(function)
        def call(*args, **kwargs):
            if old in kwargs and new not in kwargs:
                if not torch.compiler.is_compiling():  # a graph cannot warn
                    warnings.warn(f"{old}: {named.__name__} calls it {new} now", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        # torch.compile counts recompilations by code object
        call.__code__ = call.__code__.replace(co_name=function.__name__)
        if function is named:
            return call
        named.__init__ = call
        return named

    return decorated


def first_time(message: str) -> bool:
    """Return whether this process has not given the message yet, and note that it has now."""
    known = message in warned
    warned.add(message)
    return not known


_TO_PLAIN = ("tolist", "to_pylist", "as_py")


def plain(value):
    """Convert a column or scalar of NumPy, pandas or pyarrow to Python's numbers; return anything else as it is."""
    for name in _TO_PLAIN:
        if hasattr(value, name):
            return getattr(value, name)()
    return value


def plain_entries(values) -> list:
    """List the entries of a column or sequence, each as plain gives it. Each type is looked at once."""
    entries = list(plain(values))
    if any(hasattr(kind, name) for kind in set(map(type, entries)) for name in _TO_PLAIN):
        return list(map(plain, entries))
    return entries


def index_tensor(values: torch.Tensor | Sequence[int], name: str) -> torch.Tensor:
    """Return ``values`` as an integer tensor; a sequence or array becomes int64 on the CPU. Fractions raise."""
    if isinstance(values, torch.Tensor):
        return values
    try:
        # A list: array() would read the memory of bytes, and an iterator could not be read again for the message.
        numbers = list(plain(values))
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of integers, got {values!r}") from None
    try:
        return int64_tensor(numbers)
    except TypeError:
        pass
    except OverflowError:
        raise ValueError(f"{name}: expected integers that fit int64, got {max(numbers, key=abs)}") from None
    taken = list(map(plain, numbers))
    for number, wrong in zip(taken, numbers, strict=True):
        try:
            operator.index(number)
        except TypeError:
            raise TypeError(f"{name}: expected integers, got {wrong!r} ({type(wrong).__name__})") from None
    return int64_tensor(taken)


def int64_tensor(values: list[int]) -> torch.Tensor:
    """Return ``torch.tensor(values)``, in a fifth of the time."""
    return buffer_tensor(array("q", values), torch.int64)


def buffer_tensor(buffer: bytearray | array, dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor over the buffer's memory. The buffer may be empty, unlike torch.frombuffer's."""
    return torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype, device="cpu")


def as_tensor(value) -> torch.Tensor:
    """Return a tensor as it is, and anything else as a CPU tensor, whatever the default device."""
    if isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "as_py"):  # pyarrow's scalars, of lists too
        value = value.as_py()
    elif hasattr(value, "__array__"):  # columns: torch would ask a pandas one for its label 0
        value = value.__array__()
        if not value.dtype.isnative or any(stride < 0 for stride in value.strides):  # which torch does not take
            value = value.astype(value.dtype.newbyteorder("="), order="C")
        if not value.flags.writeable:  # pyarrow's memory: torch would warn
            return torch.tensor(value, device="cpu")
    return torch.as_tensor(value, device="cpu")


def alone(value):
    """Return a tensor or array whose memory holds nothing else: the value itself, or a copy of what is a part of more.

    Example:
        >>> whole = torch.zeros(4, 100)
        >>> alone(whole) is whole, alone(whole[:, :3]).untyped_storage().nbytes()
        (True, 48)
    """
    if not isinstance(value, torch.Tensor):
        return value if getattr(value, "base", None) is None else value.copy()
    try:
        nbytes = value.untyped_storage().nbytes()
    except NotImplementedError:  # torch.func's and sparse tensors do not say
        return value.clone()
    held = math.prod(size for size, stride in zip(value.shape, value.stride(), strict=True) if stride)  # not expanded
    return value.clone() if nbytes > held * value.element_size() else value


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed and returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- what was passed, in words ---


def wrong_type(name: str, wanted: str, value) -> TypeError:
    return TypeError(f"{name}: expected {wanted}, got {reprlib.repr(value)} ({type(value).__name__})")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name as C++ errors write it.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def described(tensor: torch.Tensor) -> str:
    """Describe a tensor as C++ errors do, without the device.

    Example:
        >>> described(torch.zeros(2, 3))
        'float32 [2, 3]'
    """
    return f"{dtype_name(tensor.dtype)} [{', '.join(map(str, tensor.shape))}]"


# --- checks ---


def checks_each_call() -> bool:
    """Return whether PACKING_OPS_CHECK is on: set to anything but "" and 0, as check_each_call of
    csrc/host/launch.cpp reads it.
    """
    return os.environ.get("PACKING_OPS_CHECK", "") not in ("", "0")


def check_tensor(value, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise wrong_type(name, "a tensor", value)


def check_names(value, name: str) -> None:
    """Raise TypeError for what is no mapping of names to tensors; a TensorDict is one, and no Mapping."""
    if not hasattr(value, "items"):
        raise wrong_type(name, "a dict of tensors", value)


def check_real(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError for a complex tensor, whose imaginary parts would be lost."""
    check_tensor(tensor, name)
    if tensor.is_complex():
        raise ValueError(f"{name}: expected bool, integer or floating, got {described(tensor)}")


def is_set(mask: torch.Tensor, name: str) -> torch.Tensor:
    """Return a mask of any kind (bool, integer, floating) as bool: True where it is not zero."""
    check_real(mask, name)
    return mask if mask.dtype == torch.bool else mask != 0


def check_cu_seqlens(cu_seqlens: torch.Tensor, name: str = "cu_seqlens") -> None:
    """Raise ValueError for another dtype or shape than an integer ``[num_documents + 1]``. Values are not read."""
    if not isinstance(cu_seqlens, torch.Tensor):
        got = reprlib.repr(cu_seqlens)
    elif cu_seqlens.dim() == 1 and cu_seqlens.numel() and cu_seqlens.dtype in (torch.int32, torch.int64):
        return
    else:
        got = described(cu_seqlens)
    raise ValueError(f"{name}: expected int32 or int64 [num_documents + 1], got {got}")


def check_cumulated(cu_seqlens: torch.Tensor) -> None:
    """Raise ValueError for values that do not start at 0 or that decrease. It reads them: for the CPU."""
    if cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {cu_seqlens[0]}")
    smaller = (cu_seqlens.diff() < 0).nonzero()
    if smaller.numel():
        at = int(smaller[0]) + 1
        raise ValueError(
            f"cu_seqlens: expected never to decrease, got {cu_seqlens[at]} after {cu_seqlens[at - 1]} at index {at}"
        )


def int32_cu_seqlens(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return int32 cu_seqlens as they are, and int64 ones cast. Values past int32 are not wrapped: they stay wrong, so
    that a check finds them.

    Example:
        >>> int32_cu_seqlens(torch.tensor([0, 2**32 + 5, 12]))
        tensor([         0, 2147483647,         12], dtype=torch.int32)
    """
    return cu_seqlens if cu_seqlens.dtype == torch.int32 else cu_seqlens.clamp(-1, 2**31 - 1).int()


def refuse_gradient(tensor: torch.Tensor, name: str, wanted: str = "a tensor") -> None:
    """Raise ValueError where autograd would want a gradient of an argument that gets no gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected {wanted} without requires_grad (it gets no gradient), got one with it")


def refuse_beside(other: str, **given: object) -> None:
    """Raise ValueError for the first given argument that cannot be combined with ``other``."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected None beside {other}, got {type(value).__name__}")


def one_number(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor of one element as a scalar: a view."""
    if tensor.numel() != 1:
        raise ValueError(f"{name}: expected one number, got {described(tensor)}")
    return tensor.reshape(())


def one_row(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a view ``[total]`` of ``[total]`` or ``[1, total]``."""
    check_tensor(tensor, name)
    if tensor.dim() == 1:
        return tensor
    if tensor.dim() != 2 or tensor.shape[0] != 1:
        raise ValueError(f"{name}: expected [total] or [1, total], got {described(tensor)}")
    return tensor[0]


def window_sides(window_size: tuple[int, int]) -> tuple[int, int]:
    """Return (left, right) of an argument ``window_size``."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise wrong_type("window_size", "(left, right) keys, -1 for all", window_size) from None
    return left, right


def sides_of_flash_attn(window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    """Return (left, right) by flash-attn's rule: a causal mask limits the right side to 0, whatever was asked for."""
    left, right = window_sides(window_size)
    return left, min(right, 0) if causal else right


def sides_of_keys(sliding_window: int | None) -> tuple[int, int]:
    """Return (left, right) of a causal window of a number of keys, the query's included; None, 0 and less mean no
    window.
    """
    keys = 0 if sliding_window is None else integer(sliding_window, "sliding_window")
    return (keys - 1, 0) if keys > 0 else (-1, -1)


def integer(value, name: str) -> int:
    """Return ``value`` as a Python int that fits int64. Fractions raise."""
    try:
        number = value if isinstance(value, int) else operator.index(value)  # torch.compile's sizes are int
    except TypeError:
        if hasattr(value, "as_py"):  # a scalar of pyarrow
            return integer(value.as_py(), name)
        raise TypeError(f"{name}: expected an integer, got {value!r} ({type(value).__name__})") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an integer that fits int64, got {number}")
    return number


def at_least(value, name: str, least: int, unit: str = "") -> int:
    """Return ``integer(value, name)``, checked against a smallest value.

    Example:
        >>> at_least(0, "dp_size", 1, "rank")
        Traceback (most recent call last):
        ValueError: dp_size: expected at least 1 rank, got 0
    """
    number = integer(value, name)
    if number < least:
        raise ValueError(f"{name}: expected at least {f'{least} {unit}'.rstrip()}, got {value}")
    return number


def place_in(value, name: str, size: int, of: str) -> int:
    """Return ``integer(value, name)``, checked to be a place among ``size``, an argument called ``of``.

    Example:
        >>> place_in(2, "dp_rank", 2, "dp_size")
        Traceback (most recent call last):
        ValueError: dp_rank: expected 0 to 1 for dp_size=2, got 2
    """
    place = integer(value, name)
    if not 0 <= place < size:
        raise ValueError(f"{name}: expected 0 to {size - 1} for {of}={size}, got {value}")
    return place


def one_of(value: object, choices: Sequence[str], name: str) -> None:
    """Raise ValueError unless value is one of the names.

    Example:
        >>> one_of("best", ("first", "last"), "ties")
        Traceback (most recent call last):
        ValueError: ties: expected 'first' or 'last', got 'best'
    """
    if value not in choices:
        names = [*map(repr, choices)]
        raise ValueError(f"{name}: expected {', '.join(names[:-1])} or {names[-1]}, got {value!r}")


def number(value, name: str) -> float:
    """Return ``value`` as a Python number: scalars of NumPy, pandas, pyarrow and torch too."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, torch.Tensor):
        refuse_gradient(value, name, "a number or a tensor")
    try:
        return float(operator.pos(plain(value)))  # no text
    except (TypeError, ValueError):
        raise wrong_type(name, "a number", value) from None


def holds(dtype: torch.dtype, value) -> bool:
    """Return whether a tensor of ``dtype`` can hold the number ``value`` unchanged; a floating one may round it.

    Example:
        >>> holds(torch.int64, -100.0), holds(torch.int64, 0.5), holds(torch.uint8, 256), holds(torch.float32, 0.1)
        (True, False, False, True)
    """
    if torch.compiler.is_compiling():  # a graph cannot read the tensor made below
        if dtype.is_floating_point or dtype.is_complex:
            return True
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        return low <= value <= high and value == int(value)
    try:
        held = torch.full((), value, dtype=dtype, device="cpu").item()
        rounded = dtype.is_floating_point and (math.isfinite(held) or not math.isfinite(value))
        return rounded or held == value == float(value)  # a double: what pad_sequence and F.pad take
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def as_autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast the arguments of a linear layer as autocast does, and return them."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(x), cast(weight), None if bias is None else cast(bias)
