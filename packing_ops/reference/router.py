"""Oracle of packing_ops.router: document by document."""

import itertools

import torch


def router_statistics(
    probabilities: torch.Tensor, cu_seqlens: torch.Tensor, top_k: int, copies: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens of each expert, sums of probabilities, tokens), by document."""
    experts = probabilities.shape[1]
    weights = probabilities.new_ones(probabilities.shape[0]) if copies is None else copies
    weights = weights.double()
    routed, sums, tokens = [], [], []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        part, weight = probabilities[start:end].double(), weights[start:end]
        chosen = torch.nn.functional.one_hot(part.topk(top_k, dim=-1).indices, experts).sum(1)
        routed.append((chosen * weight[:, None]).sum(0))
        sums.append((part * weight[:, None]).sum(0))
        tokens.append(weight.sum())
    empty = probabilities.new_zeros(0, experts, dtype=torch.float64)
    return (
        torch.stack(routed) if routed else empty,
        torch.stack(sums) if sums else empty,
        torch.stack(tokens) if tokens else empty[:, 0],
    )
