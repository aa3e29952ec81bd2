"""Runs a function of a host next to ours: small numbers, a quiet place to run in, and whether two results agree."""

import contextlib
import warnings

import torch
from torch.utils._python_dispatch import _disable_current_modes


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: float = 0.0) -> torch.Tensor:
    """Return values in [-1, 1] without a pattern, on the CPU. torch's random numbers are not used."""
    size = torch.Size(shape).numel()
    steps = torch.arange(size, dtype=torch.float64, device="cpu")
    return (steps * steps * 0.7390851332 + steps + start).sin().reshape(shape).to(dtype)


@contextlib.contextmanager
def quiet():
    """Compute with real CPU tensors without gradients, whatever is around: autocast, inference mode, fake tensors, a
    device.
    """
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def attempt(function, *args, **kwargs):
    """Return a function's result, or the exception that it raised: whatever another library raises is a verdict, not
    an error.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def bare(cls, attributes) -> torch.nn.Module:
    """Make a module of this class that holds only these (name, value)."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    for name, value in attributes:
        setattr(made, name, value)
    return made


def tensors_of(result) -> list[torch.Tensor]:
    """Return the tensors of a result, which is one or a tuple of one or two; [] for any other result."""
    found = [result] if isinstance(result, torch.Tensor) else list(result) if type(result) is tuple else []
    return found if len(found) <= 2 and all(isinstance(each, torch.Tensor) for each in found) else []


def with_gradients(function, inputs, parameters=()) -> list[torch.Tensor]:
    """Return tensors_of(function(*inputs)), and gradients of inputs and parameters; [] if one lacks a gradient."""
    with torch.enable_grad():
        given = [x.clone().requires_grad_() for x in inputs]
        for each in parameters:
            each.grad = None
        out = tensors_of(attempt(function, *given))
        loss = sum((each * numbers(*each.shape, start=4.0)).sum() for each in out)
        if not out or attempt(loss.backward) is not None:
            return []
    gradients = [each.grad for each in (*given, *parameters)]
    return [] if None in gradients else [*(each.detach() for each in out), *gradients]


def agree(found, wanted, terms: int) -> bool:
    """Return whether dtypes and shapes are equal, and values as far apart as ``terms`` roundings of values near 1
    may be.
    """
    if not all(isinstance(each, torch.Tensor) for each in (found, wanted)):
        return False
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    scale = max(1.0, wanted.abs().max().item())
    return (found.double() - wanted.double()).abs().max().item() <= terms * torch.finfo(wanted.dtype).eps * scale


def alike(found: list, wanted: list, terms: int) -> bool:
    """Return whether both hold as many tensors, at least one, that agree."""
    return len(found) == len(wanted) > 0 and all(agree(*pair, terms) for pair in zip(found, wanted, strict=True))
