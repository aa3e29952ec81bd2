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
