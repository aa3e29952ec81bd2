"""Applied: what apply_packing_ops swapped, and what it says of the rest."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from packing_ops.integrations.transformers import attn_implementation


@dataclass(frozen=True)
class Applied:
    """What apply_packing_ops swapped and what it left. True as a bool if anything was swapped.

    attention, rope, rms_norm: how many modules were swapped.
    fused_loss: how many models make their loss from hidden states.
    vision: how many attention modules of vision and audio towers attend to all images in one call.
    skipped: {option: why it, or a part of it, was left as it is}.
    """

    attention: int = 0
    rope: int = 0
    rms_norm: int = 0
    fused_loss: int = 0
    vision: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.attention + self.rope + self.rms_norm + self.fused_loss + self.vision > 0


def _name_of(model: torch.nn.Module) -> str:
    inside = (type(host).__name__ for host in attn_implementation.hosts(model))
    return " in ".join(dict.fromkeys([*inside, type(model).__name__]))


_PARAMETERS = {"vision": "attention"}  # of what has no parameter of its own


def refuse(model: torch.nn.Module, skipped: Mapping[str, str], strict: bool) -> None:
    if strict and skipped:
        what = "; ".join(f"{part}: {reason} (or pass {_parameter(part)}=False)" for part, reason in skipped.items())
        raise ValueError(f"strict: expected to swap all that was asked for, but in {_name_of(model)} {what}")


def warn(model: torch.nn.Module, skipped: Mapping[str, str], stacklevel: int = 3) -> None:
    for part, reason in skipped.items():
        left = f"{part} of {_name_of(model)} was not swapped: {reason}"
        remedy = f"Pass {_parameter(part)}=False to silence this"
        warnings.warn(f"apply_packing_ops: {left}. {remedy}", stacklevel=stacklevel)


def _parameter(part: str) -> str:
    return _PARAMETERS.get(part, part)
