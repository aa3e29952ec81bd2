"""Attention over keys in pages: the cache of keys and values from which several documents are decoded.

k and v are ``[num_pages, page_size, num_kv_heads, head_dim]``; key j of document i is row ``j % page_size`` of page
``block_table[i, j // page_size]``. The kernels are varlen_attention's: a tile of keys lies in one page, which only says where
the tile starts, so that a row has the bits that it has over contiguous keys. Rows that hold no key are never read.
"""

from typing import Any, NoReturn

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    check_tensor,
    described,
    layout_of,
    without_batch,
)
from packing_ops._runtime.autograd import register_autograd
from packing_ops._runtime.batch_cache import BatchCache, forget, kept_with
from packing_ops.keys import KeyPages
from packing_ops.metadata import PackedMetadata, cu_seqlens_of
from packing_ops.varlen.options import AttentionOptions


def write_keys(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Writes k and v ``[num_documents, new, num_kv_heads, head_dim]`` into pages, after the first ``lengths`` keys.

    Rows that have no place in their document's pages are left out: what is wrong, attention then says.
    """
    documents, new = block_table.shape[0], k.shape[1:2].numel()
    for rows, name, cache in ((k, "k", k_cache), (v, "v", v_cache)):
        if rows.dtype != cache.dtype or rows.shape != (documents, new, *cache.shape[2:]):
            wanted = f"[batch={documents}, seqlen_new={new}, num_kv_heads, head_dim] like its cache, {described(cache)}"
            raise ValueError(f"{name}: expected {wanted}, got {described(rows)}")
    num_pages, page_size = k_cache.shape[:2]
    if block_table.numel() == 0 or num_pages * page_size == 0:
        return
    keys = lengths.long()[:, None] + torch.arange(new, device=lengths.device)
    column = keys.div(page_size, rounding_mode="floor")
    page = block_table.gather(1, column.clamp(0, block_table.shape[1] - 1))
    fits = ((lengths >= 0)[:, None] & (column < block_table.shape[1]) & (page >= 0) & (page < num_pages)).flatten()
    if fits.numel() == 0:
        return
    # A row without a place writes what the first one that has a place writes: nothing waits to count them.
    first, row = fits.byte().argmax(), torch.arange(fits.numel(), device=fits.device)
    row = row.where(fits, first)
    some = fits.index_select(0, first.view(1))
    at = page.flatten().long()[row].where(some, 0), (keys % page_size).flatten()[row].where(some, 0)
    with torch.no_grad():
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache.index_put_(at, rows.flatten(0, 1)[row].where(some, cache[at]))


def attend_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    pages: KeyPages,
    options: AttentionOptions,
    *,
    plan: torch.Tensor | None = None,
    layout: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """varlen_attention of queries by ``documents`` over keys in pages: (out, lse)."""
    check_tensor(q, "q")
    if q.dim() == 4 and layout is None:
        raise ValueError(
            f"layout: expected 'bhsd' or 'bshd' for a q of four dimensions, got None with q {described(q)}"
        )
    tokens_first = layout is not None and layout_of(q, k, layout, same_documents=False) == "bshd"
    if tokens_first:
        q = without_batch(q, "q")
    metadata = documents if isinstance(documents, PackedMetadata) else None
    ends = metadata.visible_end if metadata is not None and options.visible_end is None else options.visible_end
    if ends is not None:
        raise ValueError(f"visible_end: expected None beside block_table, got {described(ends)}")
    total_q = q.shape[2] if q.dim() == 4 else q.shape[:1].numel()
    cu_seqlens_q = cu_seqlens_of(documents, total_q, like="q", name="cu_seqlens_q")
    if plan is None:
        plan = _plan_for(q, k, v, cu_seqlens_q, pages, options, None if metadata is None else metadata._cache)
    try:
        out, lse = gate.paged_attention(q, k, v, cu_seqlens_q, *pages, *options.arguments_of_pages(plan))
    except ValueError:
        forget()  # it may be of a plan that was kept while its lengths changed
        raise
    return (out[None] if tokens_first else out), lse


def _plan_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    pages: KeyPages,
    options: AttentionOptions,
    cache: BatchCache | None,
) -> torch.Tensor | None:
    """The plan, made for the first layer of a step; None on the CPU, and for shapes that the op itself refuses."""
    if not q.is_cuda or any(not isinstance(t, torch.Tensor) or t.dim() != 4 for t in (k, v)):
        return None
    if q.dim() not in (3, 4) or pages.block_table.dim() != 2 or k.shape[2] == 0:
        return None
    total_q, num_heads, head_dim = (q.transpose(1, 2)[0] if q.dim() == 4 else q).shape
    if num_heads % k.shape[2] or not (0 < head_dim <= 512 and 0 < v.shape[3] <= 512):
        return None
    max_keys = pages.block_table.shape[1] * k.shape[1] if k.shape[0] else 0
    mask = options.causal, *options.window_size
    geometry = total_q, max_keys, num_heads, k.shape[2], head_dim, *mask, v.shape[3]
    return kept_with(
        (cu_seqlens_q, pages.seqused_k),
        ("pages", geometry),
        lambda: gate.paged_attention_plan(cu_seqlens_q, pages.seqused_k, *geometry),
        checked_by_kernel=True,
        cache=cache,
    )


# --- registration: there is no gradient; the shapes are in attention.py ---


def _refuse(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
    raise NotImplementedError(
        "packing_ops::paged_attention has no gradient: keys in pages are for generation, train with keys end to end"
    )


register_autograd("paged_attention", _refuse, setup_context=lambda ctx, inputs, output: None)
