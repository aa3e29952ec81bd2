"""Oracle of packing_ops.losses.logps: all logits at once."""

import itertools
from typing import Any

import torch

from packing_ops.reference.boundaries import shift_labels


def token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probabilities, entropies) of token_outputs, which has the options."""
    found = token_outputs(hidden, weight, labels, cu_seqlens, **options)
    return found["logps"], found["entropy"]


def token_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    allowed_ids: torch.Tensor | None = None,
    allowed_offsets: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return all outputs of token_logps by their names, each [total]; of half types as a model has them: logits in
    their dtype.
    """
    z = torch.nn.functional.linear(hidden, weight, bias)
    z = scale * (z if z.dtype == torch.float64 else z.float())
    z = softcap * torch.tanh(z / softcap) if softcap else z
    z = z / (temperature.to(z.dtype)[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    if allowed_ids is not None and allowed_offsets is not None:
        allowed = torch.ones_like(z, dtype=torch.bool)
        sets = itertools.pairwise(allowed_offsets.tolist()[1:])  # row t predicts label t + 1
        for row, (begin, end) in enumerate(sets):
            if end > begin:
                allowed[row] = torch.zeros_like(allowed[row]).index_fill(0, allowed_ids[begin:end].long(), True)
        z = z.masked_fill(~allowed, -torch.inf)
    targets = shift_labels(labels, cu_seqlens, ignore_index).long()
    has_target, logps = targets != ignore_index, z.log_softmax(-1)
    p = logps.exp()
    found = {
        "logps": logps.gather(-1, targets.clamp(min=0)[:, None])[:, 0],
        "lse": z.logsumexp(-1),
        "entropy": -(p * torch.where(p == 0, 0, logps)).sum(-1),
        "sum_p2": p.square().sum(-1),
        "mean_logit": z.mean(-1),
    }
    found = {name: torch.where(has_target, values, 0) for name, values in found.items()}
    return {**found, "top1": torch.where(has_target, z.argmax(-1), -1)}
