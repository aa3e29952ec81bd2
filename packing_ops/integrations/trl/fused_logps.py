"""TRL's fused LM head within invariant(): by token_logps, whose bits samplers in the mode have too."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from packing_ops.integrations._patching import Patch
from packing_ops.invariance import mode
from packing_ops.losses.logps import token_logps

# What TRL asks for besides: the name in token_logps, and what is made of it. Only entropy has a gradient in TRL.
_OUTPUTS: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "entropy": ("entropy", lambda found, _: found),
    "log_sum_sq_probs": ("sum_p2", lambda found, _: found.detach().log()),
    "mean_logits": ("mean_logit", lambda found, _: found.detach()),
    "is_top1": ("top1", lambda found, targets: found == targets),
}


def patches() -> tuple[Patch, ...]:
    """One of the TRL that is imported, or none where it has no such head."""
    utils, kernels = (sys.modules.get(f"trl.{name}") for name in ("trainer.utils", "kernels"))
    # Before TRL 1.15 the head was in utils, and took fewer arguments; 1.15 has none without Triton.
    of_kernels = hasattr(kernels, "ChunkedLogProbFunction") and hasattr(utils, "_ChunkedLogProbFunction")
    return (_patch(utils),) if of_kernels else ()


@functools.cache
def _patch(utils: types.ModuleType) -> Patch:
    def make(stock: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(apply=functools.partial(_apply, stock.apply))

    return Patch(utils, "_ChunkedLogProbFunction", make)


def _apply(
    stock: Callable[..., Any],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk: int,
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: tuple[str, ...] = (*_OUTPUTS,),
) -> tuple[torch.Tensor | None, ...]:
    """Log-probabilities of ``targets [rows]`` and what of _OUTPUTS is asked for, None in place of the others."""
    if not mode.active():
        return stock(hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs)
    slots, asked = len(targets) + 1, [name for name in _OUTPUTS if name in outputs]
    log_probs, *others = token_logps(
        F.pad(hidden, (0, 0, 0, 1)),
        weight.to(hidden.dtype),
        F.pad(targets, (1, 0)),  # a slot's label is the next one's
        torch.arange(0, slots + 1, slots, device=targets.device),
        bias=None if bias is None else bias.to(hidden.dtype),
        temperature=torch.full([slots], temperature, device=hidden.device),  # in float32, as samplers have it
        softcap=softcap or 0.0,
        scale=scale,
        outputs=("logps", *(_OUTPUTS[name][0] for name in asked)),
    )
    found = {name: _OUTPUTS[name][1](each[:-1], targets) for name, each in zip(asked, others, strict=True)}
    return log_probs[:-1], *map(found.get, _OUTPUTS)
