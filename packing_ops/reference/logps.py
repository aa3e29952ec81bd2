"""Oracle of packing_ops.logps: all logits at once."""

import torch

from packing_ops.reference.boundaries import shift_labels


def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies), both [total]; of half types as a model has them: logits in their dtype."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    logps = logits.log_softmax(-1)
    targets = shift_labels(labels, cu_seqlens, ignore_index).long()
    kept = targets != ignore_index
    chosen = logps.gather(1, torch.where(kept, targets, 0)[:, None])[:, 0]
    terms = torch.where(logps == -torch.inf, 0, logps.exp() * logps)
    return torch.where(kept, chosen, 0), torch.where(kept, -terms.sum(-1), 0)


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
) -> dict[str, torch.Tensor]:
    """All outputs of token_logps by their names, each [total]."""
    z = torch.nn.functional.linear(hidden, weight, bias)
    z = scale * (z if z.dtype == torch.float64 else z.float())
    z = softcap * torch.tanh(z / softcap) if softcap else z
    z = z / (temperature.to(z.dtype)[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    targets = shift_labels(labels, cu_seqlens, ignore_index).long()
    has_target, logps = targets != ignore_index, z.log_softmax(-1)
    p = logps.exp()
    found = {
        "logps": logps.gather(-1, targets.clamp(min=0)[:, None])[:, 0],
        "lse": z.logsumexp(-1),
        "entropy": -torch.where(p == 0, 0, p * logps).sum(-1),
        "sum_p2": p.square().sum(-1),
        "mean_logit": z.mean(-1),
    }
    found = {name: torch.where(has_target, values, 0) for name, values in found.items()}
    return {**found, "top1": torch.where(has_target, z.argmax(-1), -1)}
