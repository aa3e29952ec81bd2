"""Rotary position embedding of queries and keys.

A head's first ``rotary_dim`` elements are pairs ``(x1, x2)``, each turned by the angle of its token and its frequency:
``(x1 * cos - x2 * sin, x2 * cos + x1 * sin)``. Half-split pairs (GPT-NeoX, Llama) are elements ``i`` and
``i + rotary_dim / 2``, interleaved pairs (GPT-J) are elements ``2 i`` and ``2 i + 1``.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.autograd import has_tangent, in_forward_mode, register_autograd
from packing_ops.metadata import PackedMetadata


@overload
def apply_rotary_qk(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    position_ids: PackedMetadata | torch.Tensor | None = None, *, interleaved: bool = False, inplace: bool = False,
    unsqueeze_dim: int = 1, sections: Sequence[int] | None = None, rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def apply_rotary_qk(
    q: torch.Tensor, k: None, cos: torch.Tensor, sin: torch.Tensor,
    position_ids: PackedMetadata | torch.Tensor | None = None, *, interleaved: bool = False, inplace: bool = False,
    unsqueeze_dim: int = 1, sections: Sequence[int] | None = None, rotary_dim: int | None = None,
) -> tuple[torch.Tensor, None]: ...  # fmt: skip
def apply_rotary_qk(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: PackedMetadata | torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    unsqueeze_dim: int = 1,
    sections: Sequence[int] | None = None,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by the angles of their positions, both in one pass. Differentiable in q and k.

    Args:
        q: float32, float64, bfloat16 or float16, any strides but a contiguous last dimension:
            ``[batch, num_heads, seqlen, head_dim]`` (``unsqueeze_dim=1``, as transformers; often a transposed view),
            ``[batch, seqlen, num_heads, head_dim]`` (``unsqueeze_dim=2``), or ``[total, num_heads, head_dim]``, which
            is one batch of ``total`` tokens.
        k: like q, but with any number of heads; or None.
        cos, sin: one of the four dtypes, any strides (copied first only where the last dimension is not contiguous).
            With ``position_ids`` a cache ``[max_positions, entries]``. Without, already gathered:
            ``[seqlen, entries]`` or ``[1 or batch, seqlen, entries]``.
        position_ids: int32 or int64 ``[seqlen]`` or ``[1 or batch, seqlen]``: rows of the cache. Or the PackedMetadata
            of a packed row, whose position_ids are taken.
        interleaved: pairs are elements 2i and 2i + 1 instead of i and i + rotary_dim / 2.
        inplace: write into q and k themselves; for q and k that need no gradient.
        unsqueeze_dim: where the heads are in 4 dimensions, 1 or 2.
        sections: pairs per chunk of frequencies, summing to rotary_dim / 2 (multimodal rope; Qwen2-VL's
            ``mrope_section``). ``position_ids``, or the gathered tables, then have 3 or 4 rows in front
            (``[3, batch, seqlen]``), and chunk i takes its angles from row ``i % rows``.
        rotary_dim: elements of a head that are rotated; the rest is copied. By default head_dim if the tables have
            ``head_dim / 2`` entries, else the number of entries. Pass it where that guess is wrong: an entry for each
            element of half a head, or an entry for each pair of less than a head.

    Tables have an entry for each pair (rotary_dim / 2 entries) or for each element (rotary_dim entries). With an entry
    for each element, element i uses entry i. Half-split tables are then transformers' ``cat(freqs, freqs)``, and
    interleaved tables repeat each entry (``repeat_interleave(freqs, 2)``).

    Returns:
        (q, k) rotated, or (q, None): new tensors in the memory order of the inputs (as torch.empty_like), or q and k
        themselves with ``inplace``. Computed in float32 (float64 for float64). The result of a head depends on its
        values and angles only, so its bits are the same in any layout, batch or packing.

    Cost:
        Reads and writes q and k once; tables are read once per token.

    Example:
        >>> position, frequency = torch.arange(8.0)[:, None], 10_000 ** -torch.tensor([0.0, 0.5])
        >>> cos, sin = (position * frequency).cos(), (position * frequency).sin()
        >>> q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        >>> apply_rotary_qk(q, None, cos, sin, torch.tensor([1]))[0]
        tensor([[[-1.9841,  1.9599,  2.4624,  4.0198]]])

    Raises:
        ValueError: wrong rank, dtype, device or shape; a position outside the cache (on the CPU before anything is
            written); sections that do not sum to rotary_dim / 2; ``inplace`` with gradients or overlapping memory;
            cos or sin that require a gradient.

    Source:
        Su et al., RoFormer, arXiv:2104.09864; sections: Wang et al., Qwen2-VL, arXiv:2409.12191.

    Determinism: the same bits in every call, and for a head in any layout, batch or packing.
    Synchronises: never; a wrong position on CUDA raises in a later call.
    Memory: the results; with ``inplace`` nothing.
    Gradients: of q and k, expanded or strided, by the inverse rotation; of any order, and forward mode. None of cos and
        sin, which may not require one.
    """
    if isinstance(position_ids, PackedMetadata):
        position_ids = _positions_of(position_ids, q, unsqueeze_dim, sections)
    options = position_ids, sections, rotary_dim, interleaved, unsqueeze_dim, False
    try:
        if not inplace:
            q_out, k_out = gate.rope_qk(q, k, cos, sin, *options)
            return q_out, None if k is None else k_out
        _refuse_derivatives(q=q, k=k, cos=cos, sin=sin)
        gate.rope_qk_(q, k, cos, sin, *options)
    except ValueError as error:
        one_dimension = isinstance(position_ids, torch.Tensor) and position_ids.dim() == 1
        if one_dimension and sections is None and str(error).startswith("position_ids: expected [seqlen="):
            advice = "PackedMetadata.from_cu_seqlens(cu_seqlens) or position_ids_from_cu_seqlens(cu_seqlens)"
            raise ValueError(f"{error}; where these are cu_seqlens, pass {advice}") from None
        raise
    if not torch.compiler.is_compiling():  # autograd must notice if it saved q or k elsewhere
        torch.autograd.graph.increment_version([q] if k is None else [q, k])
    return q, k


def _positions_of(metadata: PackedMetadata, q: torch.Tensor, unsqueeze_dim: int, sections: object) -> torch.Tensor:
    """Return the position_ids of a packed row that is as long as q; what else is wrong with q, the op says."""
    if sections is not None:
        raise ValueError("position_ids: expected 3 or 4 rows of positions with sections, got PackedMetadata")
    axes = {3: 0, 4: 2 if unsqueeze_dim == 1 else 1}
    total = q.shape[axes[q.dim()]] if isinstance(q, torch.Tensor) and q.dim() in axes else metadata.total
    # total is a number in a graph, and reading it would make the size of the row one too
    if torch.compiler.is_compiling() and metadata.paths is None:
        return gate.position_ids_from_cu_seqlens(metadata.cu_seqlens, total)
    if metadata.total != total:
        raise ValueError(f"position_ids: expected total={total} like q, got PackedMetadata with total={metadata.total}")
    return metadata.position_ids


def _refuse_derivatives(**tensors: torch.Tensor | None) -> None:
    recorded, forward_mode = torch.is_grad_enabled(), in_forward_mode()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if recorded and tensor.requires_grad:
            raise ValueError(f"{name}: expected no gradient with inplace=True, got requires_grad (use inplace=False)")
        if forward_mode and has_tangent(tensor):
            raise ValueError(f"{name}: expected no forward-mode tangent with inplace=True, got one (use inplace=False)")


# --- gradients ---


def _rope_qk_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, position_ids, *ctx.options = inputs
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            raise ValueError(f"{name}: expected no gradient (only q and k get one), got requires_grad; detach it")
    ctx.save_for_backward(cos, sin, position_ids)


def _rope_qk_backward(
    ctx: Any, grad_q: torch.Tensor | None, grad_k: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    *options, conjugate = ctx.options
    tables = ctx.saved_tensors
    needed = zip((grad_q, grad_k), ctx.needs_input_grad[:2], strict=True)
    grad_q, grad_k = (_rotatable(grad) if grad is not None and need else None for grad, need in needed)
    if grad_q is not None:
        grad_q, k_out = gate.rope_qk(grad_q, grad_k, *tables, *options, not conjugate)
        grad_k = None if grad_k is None else k_out
    elif grad_k is not None:
        grad_k, _ = gate.rope_qk(grad_k, None, *tables, *options, not conjugate)
    return grad_q, grad_k, *[None] * 8


def _rotatable(grad: torch.Tensor) -> torch.Tensor:
    """Return a tensor that the kernel takes: any strides but of the last dimension."""
    return grad if grad.stride(-1) == 1 or grad.shape[-1] <= 1 else grad.contiguous()


register_autograd("rope_qk", _rope_qk_backward, setup_context=_rope_qk_context, linear=2)
