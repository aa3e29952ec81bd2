"""What public functions accept for one argument: a tensor, an array, or a plain Python sequence."""

import math
import operator
from array import array
from collections.abc import Sequence

import torch


def index_tensor(values: torch.Tensor | Sequence[int], name: str) -> torch.Tensor:
    """``values`` as an integer tensor; a sequence or array becomes int64 on the CPU. Fractions are an error, not a cut."""
    if isinstance(values, torch.Tensor):
        return values
    try:
        # A list, of bytes too: array would read their memory, and of an iterator nothing would be left to name.
        numbers = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of integers, got {values!r}") from None
    try:
        return int64_tensor(numbers)
    except TypeError:
        wrong = next(number for number in numbers if not _is_integer(number))
        raise TypeError(f"{name}: expected integers, got {wrong!r} ({type(wrong).__name__})") from None
    except OverflowError:
        raise ValueError(f"{name}: expected integers that fit int64, got {max(numbers, key=abs)}") from None


def _is_integer(number) -> bool:
    try:
        return operator.index(number) is not None
    except TypeError:
        return False


def int64_tensor(values: list[int]) -> torch.Tensor:
    """``torch.tensor(values)``, in a fifth of the time."""
    return buffer_tensor(array("q", values), torch.int64)


def buffer_tensor(buffer: bytearray | array, dtype: torch.dtype) -> torch.Tensor:
    """The buffer's own memory, on the CPU; torch.frombuffer takes no empty one, and knows no default device."""
    return torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype, device="cpu")


def as_tensor(value) -> torch.Tensor:
    """A tensor where it is; anything else on the CPU, whatever the default device."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def check_cu_seqlens(cu_seqlens: torch.Tensor, name: str = "cu_seqlens") -> None:
    """ValueError where it is no integer ``[num_documents + 1]``; values are not looked at."""
    if not isinstance(cu_seqlens, torch.Tensor):
        got = cu_seqlens
    elif cu_seqlens.dim() == 1 and cu_seqlens.numel() and cu_seqlens.dtype in (torch.int32, torch.int64):
        return
    else:
        got = f"{str(cu_seqlens.dtype).removeprefix('torch.')} {list(cu_seqlens.shape)}"
    raise ValueError(f"{name}: expected int32 [num_documents + 1], got {got}")


def integer(value, name: str) -> int:
    """``value`` as a Python int that C++ can hold. Fractions are an error, not a cut."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r} ({type(value).__name__})") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an integer that fits int64, got {number}")
    return number


def holds(dtype: torch.dtype, value) -> bool:
    """Whether a tensor of ``dtype`` can have the number ``value`` as it is; a floating one may round it.

    Example:
        >>> holds(torch.int64, -100.0), holds(torch.int64, 0.5), holds(torch.uint8, 256), holds(torch.float32, 0.1)
        (True, False, False, True)
    """
    try:
        held = torch.full((), value, dtype=dtype, device="cpu").item()
        rounded = dtype.is_floating_point and (math.isfinite(held) or not math.isfinite(value))
        return rounded or held == value == float(value)  # a double: what pad_sequence and F.pad take
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def exactly_one(**arguments) -> None:
    """Exactly one of the named arguments must be given."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"expected exactly one of {' and '.join(arguments)}, got {' and '.join(given) or 'neither'}")
