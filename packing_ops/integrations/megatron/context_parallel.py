"""Attention of Megatron's context parallelism: zigzag rows, by packing_ops.parallel's gathered attention."""

import torch
import torch.distributed as dist

from packing_ops.parallel.gathered import attention_over_keys, refuse_window
from packing_ops.parallel.key_layout import KeyLayout
from packing_ops.varlen.options import checked_options


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: KeyLayout,
    group: dist.ProcessGroup,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute varlen_attention over the documents of all ranks of ``group``. Differentiable in q, k, v and sinks.

    packing_ops.parallel.gathered_attention for rows as Megatron lays them out: padding between documents, and no
    synchronisation but the check of the lengths.

    Args:
        q: ``[rows, num_heads, head_dim]``, this rank's chunks of each document.
        k, v: ``[rows, num_kv_heads, head_dim]``, of the same tokens.
        call: ``varlen_call_of(documents, rows, causal=causal, cp_rank=group.rank(), cp_size=group.size())``.
        causal, softmax_scale, window_size, sinks: as varlen_attention; a window needs causal.

    Returns:
        out like q, contiguous; padding has 0. The gradient of sinks is of this rank's queries only, as for any
        parameter.

    Example:
        One document of 8 tokens on 2 ranks: rank 0 holds tokens 0, 1, 6, 7 and its query documents attend to keys 0..1
        and 0..7; rank 1 holds 2, 3, 4, 5, which attend to 0..3 and 0..5.

        >>> out = context_parallel_attention(q, k, v, layout, group)  # needs two processes # doctest: +SKIP

    Raises:
        NotImplementedError: a window without causal.
        ValueError: as varlen_attention.

    Method: Llama Team, The Llama 3 Herd of Models (2024): gathered keys and values, 2 * cp_size chunks.

    Determinism: as packing_ops.parallel.gathered_attention.
    Synchronises: never, except once per batch for the check of the lengths.
    Memory: as packing_ops.parallel.gathered_attention.
    Gradients: of q, k, v and sinks. No second derivative, no forward mode.
    """
    options = checked_options(causal, softmax_scale, window_size, sinks=sinks)
    refuse_window(options)
    return attention_over_keys(q, k, v, call, group, options)[0]
