"""Oracle of packing_ops.losses.kl: all logits of both heads at once."""

import math

import torch

from packing_ops.reference.boundaries import shift_labels


def token_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the divergence ``[total]``; of half types as a model has them: logits in their dtype."""
    student = _log_softmax(hidden, weight, bias, temperature)
    teacher = _log_softmax(
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        temperature if teacher_temperature is None else teacher_temperature,
    )
    mixture = None
    if 0 < beta < 1:  # not the logarithm of a sum, which may leave the range where its terms have next to no weight
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    divergence = torch.zeros_like(student[:, 0])
    if beta < 1:
        divergence = divergence + (1 if beta == 0 else beta) * _kl(teacher, student if mixture is None else mixture)
    if beta > 0:
        divergence = divergence + (1 if beta == 1 else 1 - beta) * _kl(student, teacher if mixture is None else mixture)
    return torch.where(shift_labels(labels, cu_seqlens, ignore_index) != ignore_index, divergence, 0)


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return ((logits if logits.dtype == torch.float64 else logits.float()) / temperature).log_softmax(-1)


def _kl(logp: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return the divergence. Entries without weight add nothing, whatever their logarithms."""
    p = logp.exp()
    gap = torch.where(p == 0, 0, logp) - torch.where(p == 0, 0, of)
    return (p * gap).sum(-1)
