"""Log-probabilities of packed preference pairs."""

import torch
import torch.nn.functional as F

import packing_ops as po


def packed_logps(
    log_probs: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, *, average: bool = False
) -> torch.Tensor:
    """Return the log-probability of each completion in a packed row: what DPO compares, without padding.

    Args:
        log_probs: ``[total - 1]`` or ``[1, total - 1]``, floating: entry t is log p of token t + 1, as TRL's fused LM
            head and ``logits[:, :-1]`` give it.
        mask: ``[total]`` or ``[1, total]``, bool or integer: tokens that count (TRL's completion_mask). The first
            token of a document never counts: the entry before it is in another document.
        cu_seqlens: int32 ``[num_documents + 1]``.
        average: mean over the tokens that count, as IPO takes it, instead of their sum.

    Returns:
        ``[num_documents]``, float64 for float64, else float32.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0, -9.0, -4.0]])
        >>> packed_logps(log_probs, torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([0, 3, 5], dtype=torch.int32))
        tensor([-3., -4.])

    Raises:
        ValueError: log_probs that are not one shorter than mask.

    Determinism: the same bits in every call.
    Synchronises: never.
    Memory: as segment_sum.
    Gradients: of log_probs.
    """
    if log_probs.numel() + 1 != mask.numel():
        raise ValueError(
            f"log_probs: expected one entry less than mask={list(mask.shape)}, got {list(log_probs.shape)}"
        )
    counts = po.mask_boundary_labels((mask.reshape(-1) != 0).long(), cu_seqlens, ignore_index=0)
    return po.segment_sum(F.pad(log_probs.reshape(-1), (1, 0)), cu_seqlens, counts.bool(), average)
