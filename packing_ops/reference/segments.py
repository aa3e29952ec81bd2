"""Oracles of packing_ops.segments, next to those of boundaries."""

import torch

from packing_ops.reference.boundaries import documents


def segment_std(
    values: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None = None, correction: int = 1
) -> torch.Tensor:
    flat = values.reshape(-1)
    keep = torch.ones_like(flat, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    found = [flat[start:end][keep[start:end]] for start, end in documents(cu_seqlens)]
    stds = [kept.std(correction=correction) if kept.numel() > correction else flat.new_zeros(()) for kept in found]
    return torch.stack(stds) if stds else flat.new_zeros(0)


def segment_broadcast(values: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    out = values.new_zeros(total, *values.shape[1:])
    for value, (start, end) in zip(values, documents(cu_seqlens), strict=True):
        out[start:end] = value
    return out


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    mask: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the recurrence in float64 as papers write it, over the slots that are kept."""
    reward, value = (tensor.double().flatten().tolist() for tensor in (rewards, values))
    keep = [True] * len(reward) if mask is None else (mask.flatten() != 0).tolist()
    advantages, returns = [0.0] * len(reward), [0.0] * len(reward)
    for i, (start, end) in enumerate(documents(cu_seqlens)):
        next_value = 0.0 if bootstrap is None else float(bootstrap[i])
        next_advantage = 0.0
        for t in range(end - 1, start - 1, -1):
            if keep[t]:
                delta = reward[t] + gamma * next_value - value[t]
                next_value, next_advantage = value[t], delta + gamma * lam * next_advantage
                advantages[t], returns[t] = next_advantage, next_advantage + value[t]
    both = torch.tensor([advantages, returns], dtype=torch.float64, device=rewards.device)
    return both[0], both[1]
