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
    buffer = array("q", values)
    return torch.frombuffer(buffer, dtype=torch.int64) if buffer else torch.empty(0, dtype=torch.int64)


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
