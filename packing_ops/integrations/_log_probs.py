"""Log-probabilities from logits that an engine holds, by the sums of token_logps: within invariant() with a trainer's
bits.
"""

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import sum_dtype


def log_sums_of(logits: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Log of the sum of exponentials of each row ``[rows]``, float32 (float64 for float64).

    Args:
        logits: ``[rows, vocab]``.
        dtype: of their head. token_logps sums in the order of that dtype.
        scales: float32 ``[rows]``, what the logits of a row are multiplied by: 1 / temperature.
    """
    sums = _log_sums(logits, scales)
    if dtype == logits.dtype:
        return sums
    # Unless rounding to it changes one, the logits are as the head gave them.
    rounded = logits.to(dtype)
    return torch.where((rounded.to(logits.dtype) == logits).all(), _log_sums(rounded, scales).to(sums.dtype), sums)


def _log_sums(logits: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    rows, vocab = logits.shape
    if vocab % 8 or logits.data_ptr() % 16 or not logits.is_contiguous():
        logits = F.pad(logits, (0, -vocab % 8))[:, :vocab]  # rows start on 16 bytes, as those of token_logps
    sums = logits.new_zeros(3, rows, dtype=sum_dtype(logits.dtype))
    sums[0] = -float("inf")
    targets = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    scales = torch.ones_like(sums[0]) if scales is None else scales.to(sums.dtype)
    gate.logps_chunk_(logits, None, targets, 0, scales, 0.0, sums)
    largest, total, _ = sums
    return largest + total.log()
