"""Runs a function of a host beside ours: small numbers, a quiet place to run in, and whether two results agree."""

import contextlib
import warnings

import torch
from torch.utils._python_dispatch import _disable_current_modes


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: float = 0.0) -> torch.Tensor:
    """Values in [-1, 1] without a pattern, on the CPU. torch's random numbers are not used."""
    size = torch.Size(shape).numel()
    steps = torch.arange(size, dtype=torch.float64, device="cpu")
    return (steps * steps * 0.7390851332 + steps + start).sin().reshape(shape).to(dtype)


@contextlib.contextmanager
def quiet():
    """Real CPU tensors without gradients, whatever is around: autocast, inference mode, fake tensors, a device."""
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
    """Its result, or the exception that it raised: whatever another library raises is a verdict, not an error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def agree(found, wanted, terms: int) -> bool:
    """Equal dtypes and shapes, and values as far apart as ``terms`` roundings of values near 1 may be."""
    if not all(isinstance(each, torch.Tensor) for each in (found, wanted)):
        return False
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    scale = max(1.0, wanted.abs().max().item())
    return (found.double() - wanted.double()).abs().max().item() <= terms * torch.finfo(wanted.dtype).eps * scale
