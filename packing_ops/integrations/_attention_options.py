"""What a model's layer asks of attention beside its tensors and documents."""

from typing import NamedTuple

import torch


class AttentionOptions(NamedTuple):
    """Options of varlen_attention, under its names."""

    causal: bool = True
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
