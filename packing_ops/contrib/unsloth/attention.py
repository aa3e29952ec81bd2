"""What Unsloth's run_attention computes for packed rows, by varlen_attention."""

from typing import Any

import torch

from packing_ops import PackedMetadata, prefix_tree_metadata, varlen_attention
from packing_ops.integrations.adapters import kept_with, sides_of_flash_attn, sides_of_keys


def packed_attention(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    seq_info: tuple[torch.Tensor | None, torch.Tensor, int],
    *,
    sliding_window: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend inside each document of a packed row, on the CPU and on NVIDIA GPUs. Differentiable.

    Args:
        Q: ``[batch, num_heads, seqlen, head_dim]``, any strides with a contiguous last dimension.
        K, V: the same with another number of heads, which divides the number of Q's.
        seq_info: (lengths, cu_seqlens int32 ``[num_documents + 1]``, max_seqlen) of the ``batch * seqlen`` slots, as
            Unsloth's get_packed_info_from_kwargs returns it. The layers of a batch share one layout.
        sliding_window: visible keys including the query itself; None, 0 and less for all. Not read with
            ``window_size``.
        dropout_p, softmax_scale, causal, window_size, softcap: as in Unsloth's ``flash_varlen_kwargs``; with ``causal``
            the right side of ``window_size`` is 0, whatever is given.

    Returns:
        ``[batch, seqlen, num_heads, head_dim]``. Slots after the last document have 0.

    Example:
        >>> Q = K = torch.zeros(1, 1, 3, 2)
        >>> V = torch.tensor([[[[1.0, 2.0], [5.0, 6.0], [7.0, 8.0]]]])
        >>> seq_info = torch.tensor([2, 1]), torch.tensor([0, 2, 3], dtype=torch.int32), 2
        >>> packed_attention(Q, K, V, seq_info)[0, :, 0].tolist()
        [[1.0, 2.0], [3.0, 4.0], [7.0, 8.0]]

    Raises:
        NotImplementedError: dropout.
        ValueError: shapes that do not fit, documents that are longer than the row.

    Determinism: as varlen_attention.
    Synchronises: as packed_metadata, in the first layer.
    Memory: as varlen_attention.
    Gradients: of Q, K and V.
    """
    if dropout_p:
        raise NotImplementedError(f"dropout_p: expected 0.0, dropout in attention is not supported, got {dropout_p}")
    if Q.dim() != 4:
        raise ValueError(f"Q: expected [batch, num_heads, seqlen, head_dim], got {list(Q.shape)}")
    window_size = sides_of_keys(sliding_window) if window_size is None else sides_of_flash_attn(window_size, causal)
    _, cu_seqlens, max_seqlen = seq_info
    batch, _, seqlen, _ = Q.shape
    total = batch * seqlen

    def layout() -> PackedMetadata:
        return PackedMetadata.from_cu_seqlens(cu_seqlens.clone(), total=total, max_seqlen=max_seqlen)

    metadata = kept_with([cu_seqlens], ("unsloth attention", total), layout)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (Q, K, V))
    out = varlen_attention(
        q, k, v, metadata, causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap or 0.0
    )
    return out.unflatten(0, (batch, seqlen))


def prefix_attention(
    Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, prefix_seg_info: Any, *, softmax_scale: float | None = None
) -> torch.Tensor:
    """Return attention over a stream in which the answers to a prompt share it, in place of Unsloth's FlexAttention.

    Args:
        Q, K, V: as packed_attention, ``[1, heads, total, head_dim]``.
        prefix_seg_info: Unsloth's PrefixSegInfo of the stream, of which ``group_of_kv``, ``is_prefix`` and
            ``suffix_of_kv`` ``[>= total]`` are read; or a PackedMetadata, as prefix_tree_metadata makes it. The layers
            share one layout.
        softmax_scale: 1 / sqrt(head_dim) by default.

    Returns:
        ``[1, total, num_heads, head_dim]``: a token sees the prompt of its group and its answer up to itself.

    Example:
        >>> from packing_ops import prefix_tree_metadata
        >>> Q = K = torch.zeros(1, 1, 3, 2)
        >>> V = torch.tensor([[[[1.0, 2.0], [5.0, 6.0], [7.0, 8.0]]]])
        >>> metadata = prefix_tree_metadata([0, 1, 2], [0, 0, 0])  # a prompt and two answers
        >>> prefix_attention(Q, K, V, metadata)[0, :, 0].tolist()
        [[1.0, 2.0], [3.0, 4.0], [4.0, 5.0]]

    Raises:
        ValueError: another number of rows than 1, or of tokens than the stream's.

    Determinism: as varlen_attention.
    Synchronises: once a batch on CUDA, for the stream's labels.
    Memory: as varlen_attention over prefix trees.
    Gradients: of Q, K and V.
    """
    if Q.dim() != 4 or Q.shape[0] != 1:
        raise ValueError(f"Q: expected [1, num_heads, total, head_dim], got {list(Q.shape)}")
    total = Q.shape[2]

    def layout() -> PackedMetadata:
        group, is_prefix, suffix = (each[:total].cpu() for each in labels)
        prompts = -1 - group  # no answer has these numbers
        return prefix_tree_metadata(prompts.where(is_prefix, suffix), prompts, device=Q.device)

    if isinstance(prefix_seg_info, PackedMetadata):
        metadata = prefix_seg_info
    else:
        labels = [prefix_seg_info.group_of_kv, prefix_seg_info.is_prefix, prefix_seg_info.suffix_of_kv]
        metadata = kept_with(labels, ("unsloth prefixes", total, Q.device), layout)
    if metadata.total != total:
        raise ValueError(f"prefix_seg_info: expected a stream of {total} tokens like Q, got {metadata.total}")
    q, k, v = (t.transpose(1, 2)[0] for t in (Q, K, V))
    return varlen_attention(q, k, v, metadata, causal=True, softmax_scale=softmax_scale)[None]
