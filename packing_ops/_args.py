"""What public functions accept for one argument: a tensor, or a plain Python sequence."""

import operator
from array import array
from collections.abc import Sequence

import torch


def index_tensor(values: torch.Tensor | Sequence[int], name: str) -> torch.Tensor:
    """``values`` as an integer tensor; a sequence becomes int64 on the CPU. Fractions are an error, not a cut."""
    if isinstance(values, torch.Tensor):
        return values
    values = list(values)  # of an iterator nothing would be left after the look at its types
    if not all(isinstance(value, int) for value in values):
        wrong = next(value for value in values if not isinstance(value, int))
        raise TypeError(f"{name}: expected integers, got {wrong!r} ({type(wrong).__name__})")
    try:
        return int64_tensor(values)
    except OverflowError:
        raise ValueError(f"{name}: expected integers that fit int64, got {max(values, key=abs)}") from None


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


def exactly_one(**arguments) -> None:
    """Exactly one of the named arguments must be given."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"expected exactly one of {' and '.join(arguments)}, got {' and '.join(given) or 'neither'}")
