"""flash_attn.flash_attn_interface: the attention functions under flash-attn's names, signatures and rules."""

from typing import Any

import torch

from packing_ops.varlen.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    """Call flash_attn_func with ``qkv[:, :, 0 to 2]``, qkv ``[batch, seqlen, 3, num_heads, head_dim]``. Nothing is
    copied.

    Example:
        >>> flash_attn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 64), causal=True).shape
        torch.Size([2, 5, 4, 64])

    Determinism: as varlen_attention.
    Synchronises: never.
    Memory: as varlen_attention; qkv is not copied.
    Gradients: of qkv.
    """
    q, k, v = _parts("qkv", qkv, 5, 2, 3)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    """Call flash_attn_func with q and ``kv[:, :, 0 to 1]``, kv ``[batch, seqlen_k, 2, num_kv_heads, head_dim]``.

    Example:
        >>> flash_attn_kvpacked_func(torch.zeros(2, 5, 4, 64), torch.zeros(2, 7, 2, 1, 64)).shape
        torch.Size([2, 5, 4, 64])

    Determinism: as varlen_attention.
    Synchronises: never.
    Memory: as varlen_attention; kv is not copied.
    Gradients: of q and kv.
    """
    k, v = _parts("kv", kv, 5, 2, 2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Attended:
    """Call flash_attn_varlen_func with ``qkv[:, 0 to 2]``, qkv ``[total, 3, num_heads, head_dim]``. Nothing is copied.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.zeros(5, 3, 4, 64), cu_seqlens, 3, causal=True).shape
        torch.Size([5, 4, 64])

    Determinism: as varlen_attention.
    Synchronises: never.
    Memory: as varlen_attention; qkv is not copied.
    Gradients: of qkv.
    """
    q, k, v = _parts("qkv", qkv, 4, 1, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Attended:
    """Call flash_attn_varlen_func with q and ``kv[:, 0 to 1]``, kv ``[total_k, 2, num_kv_heads, head_dim]``.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> q, kv = torch.zeros(5, 4, 64), torch.zeros(5, 2, 1, 64)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 3, 3).shape
        torch.Size([5, 4, 64])

    Determinism: as varlen_attention.
    Synchronises: never.
    Memory: as varlen_attention; kv is not copied.
    Gradients: of q and kv.
    """
    k, v = _parts("kv", kv, 4, 1, 2)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def _parts(name: str, packed: torch.Tensor, dims: int, dim: int, parts: int) -> tuple[torch.Tensor, ...]:
    if packed.dim() != dims or packed.shape[dim] != parts:
        raise ValueError(f"{name}: expected {dims} dimensions with {parts} at {dim}, got {list(packed.shape)}")
    return packed.unbind(dim)
