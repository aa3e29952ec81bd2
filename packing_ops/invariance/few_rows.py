"""Modules that run at least 16 rows in the mode invariant(): with fewer, sums on a GPU may have another order."""

import functools
import math
from typing import Any

import torch
from torch.nn.functional import pad

from packing_ops.invariance.mode import NARROW

LEAST_ROWS = 16


def is_narrow(module: torch.nn.Module) -> bool:
    """Return whether it is a product of few columns or few terms, whose gradient has few columns: a router of experts,
    an adapter.
    """
    weight = module._parameters.get("weight")  # not that of a layer inside, whose input has other uses there
    if not isinstance(weight, torch.Tensor) or isinstance(module, torch.nn.Embedding):
        return False
    return weight.dim() == 2 and weight.is_floating_point() and min(weight.shape) <= NARROW


def in_enough_rows(module: Any, before: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward on at least LEAST_ROWS rows, zeros after those that it is given."""
    run = functools.partial(type(module).forward, module) if before is None else before
    *batch, rows, _ = hidden_states.shape if hidden_states.dim() > 1 else (LEAST_ROWS, 1)
    wanted = -(-LEAST_ROWS // max(math.prod(batch), 1))  # of each row of the batch
    # torch.compile has its sums of a norm, and calls cuBLASLt for products.
    if not 0 < rows < wanted or (torch.compiler.is_compiling() and not is_narrow(module)):
        return run(hidden_states, *args, **kwargs)

    def padded(value: Any) -> Any:
        return pad(value, (0, 0, 0, wanted - rows)) if isinstance(value, torch.Tensor) else value

    named = {name: padded(value) for name, value in kwargs.items()}
    out = run(padded(hidden_states), *map(padded, args), **named)
    many = isinstance(out, tuple)
    if any(t.dim() < 2 or t.shape[-2] != wanted for t in (out if many else [out])):
        return run(hidden_states, *args, **kwargs)  # rows lie elsewhere in its results
    return tuple(t[..., :rows, :] for t in out) if many else out[..., :rows, :]
