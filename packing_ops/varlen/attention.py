"""Attention over packed documents: each one attends only to itself.

q is ``[total_q, num_q_heads, head_dim]``, k and v are ``[total_k, num_kv_heads, head_dim]``, v and out with a head_dim
of another size; document ``i`` owns tokens ``cu_seqlens[i] : cu_seqlens[i + 1]``. Scores are ``softmax_scale * q.k``,
then ``softcap * tanh(score / softcap)``. With n queries and m keys in a document, query i is at key i + m - n and sees
the keys from ``left`` before to ``right`` after that position (-1: all; causal: right is 0).

What holds on every device:
    A document's out, lse and gradients are the same to the bit in any pack, and from run to run.
    NaN or Inf in a document stays in it. Inside it, a key reaches only the tokens that see it, and a token only the
    keys that it sees.
In the half types on a GPU, NaN and Inf spread by blocks of 128, counted from the document's start, since 0 * NaN is
added for hidden pairs. A key also reaches tokens less than 192 from one that sees some key of its block, and a token
reaches keys likewise. Under a causal mask over as many keys as queries, tokens before key // 128 * 128 - 191 stay
clean. lse is exact.
    Memory grows with the tokens, never with their square.
"""

from typing import Literal, NoReturn, overload

import torch
from typing_extensions import Unpack

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import FLOATS, check_tensor, described, refuse_beside, window_sides
from packing_ops._runtime.batch_cache import forget
from packing_ops.keys import KeyPages, Keys, Parents, PrefixPaths, cached_paths, keys_of, plan_for
from packing_ops.metadata import PackedMetadata
from packing_ops.varlen.call import Layout, in_tensors, layout_of, refuse_misplaced, without_batch
from packing_ops.varlen.ops import attention_forward
from packing_ops.varlen.options import AttentionKeywords, AttentionOptions, checked_options

# By device. Float64 has no CUDA kernel.
DTYPES = {"cpu": FLOATS, "cuda": tuple(dtype for dtype in FLOATS if dtype != torch.float64)}


class VarlenKeywords(AttentionKeywords, total=False):
    """Adds what only varlen_attention takes."""

    plan: torch.Tensor | None
    parents: torch.Tensor | PrefixPaths | None
    block_table: torch.Tensor | None
    seqused_k: torch.Tensor | None
    layout: Layout | None


@overload
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: PackedMetadata | torch.Tensor,
    cu_seqlens_k: PackedMetadata | torch.Tensor | None = None, *misplaced: NoReturn, return_lse: Literal[False] = False,
    **options: Unpack[VarlenKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: PackedMetadata | torch.Tensor,
    cu_seqlens_k: PackedMetadata | torch.Tensor | None = None, *misplaced: NoReturn, return_lse: Literal[True],
    **options: Unpack[VarlenKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: PackedMetadata | torch.Tensor,
    cu_seqlens_k: PackedMetadata | torch.Tensor | None = None,
    *misplaced: NoReturn,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
    parents: torch.Tensor | PrefixPaths | None = None,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    layout: Layout | None = None,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention inside each document of a packed row. Differentiable in q, k, v, sinks and through lse.

    Args:
        q: ``[total_q, num_q_heads, head_dim]``, float32, float64, bfloat16 or float16, head_dim 1 to 512. Any strides
            with a contiguous last dimension (a view into a fused QKV projection, say), no copy is made. CUDA: no
            float64, head_dim of the half types in multiples of 8, their rows on 16 bytes (else one copy).
            Or with a batch of 1, see ``layout``.
        k: ``[total_k, num_kv_heads, head_dim]``, in the layout and the dtype of q; num_kv_heads divides num_q_heads
            (GQA, MQA).
        v: like k, but its head_dim may be another one, 1 to 512 (192 and 128 in multi-head latent attention). No
            copy is made for it. CUDA, half types: a multiple of 8.
        cu_seqlens_q: PackedMetadata of q's row, or its cu_seqlens, int32 ``[num_documents + 1]`` (int64 is copied in
            each call); zero-length documents may be anywhere.
        cu_seqlens_k: the same for k and v; without it ``cu_seqlens_q``.
        causal: a query sees no key after its position.
        softmax_scale: without it ``head_dim ** -0.5``.
        window_size: (left, right), how many keys are seen before and after its position, -1 for all. A causal
            window of w keys, the query's included, is ``(w - 1, 0)``.
        softcap: bound of the scores, 0 or inf for no cap.
        sinks: ``[num_q_heads]``, one more score per head that takes part in the denominator only.
        plan: from attention_plan for these lengths and heads; without it one is made, and kept in the PackedMetadata or
            with cu_seqlens, so that layers called with the same ones share it.
        visible_end: int32 ``[total_q]``, for each query the end of the keys that it sees, counted in keys of its
            document: it takes the place of the causal limit. In each document: above the position of the query (key i +
            m - n, at the top), not decreasing, at most the number of keys. Values at padding are ignored. The left
            window still applies. A right window or ``causal=False`` is an error. Use it for image blocks
            inside causal text, prefixes, documents that see all of themselves next to causal ones
            (visible_end_from_blocks, visible_end_from_prefix_lengths, visible_end_from_causal make it). Without it that
            of the PackedMetadata, where ``cu_seqlens_k`` is left out or is the same one.
        parents: int32 ``[num_segments]``: cu_seqlens_q are the segments of a prefix tree (pack_prefix_tree), and this
            is each one's parent, -1 for a root. A token sees the tokens of its segment's ancestors, then its
            segment up to itself; windows count along that path. The paths are found once for a tree; k and v are read
            in place, in the backward too. A tensor on CUDA is read on the host, which waits.
            PackedMetadata.from_prefix_tree in place of cu_seqlens_q does not wait, nor do its ``paths`` here. Causal,
            without ``cu_seqlens_k``.
        block_table: int32 ``[num_documents, pages]``: k and v are pages, ``[num_pages, page_size, num_kv_heads,
            head_dim]``, page_size a multiple of 128 (any, where a document has one page), and these are the pages of
            each document. Forward only, without ``cu_seqlens_k``, ``visible_end`` and ``parents``. docs/pages.md.
        seqused_k: int32 ``[num_documents]``, the keys of each document, with ``block_table``. Rows after them are not
            read.
        return_lse: also return the log of each denominator, sink included.
        layout: ``"thd"`` ``[total, num_heads, head_dim]``; ``"bhsd"`` ``[1, num_heads, total, head_dim]``, heads first,
            as models of transformers hold them; ``"bshd"`` ``[1, total, num_heads, head_dim]``, as flash-attn does.
            Three dimensions are thd. Four are bhsd where q has more heads than k and as many tokens; elsewhere they may
            be either, and the layout must be named.

    Returns:
        out like q with v's head_dim, contiguous, and with ``return_lse`` lse ``[num_q_heads, total_q]``, float32
        (float64 for float64). In the layouts with a batch out is ``[1, total_q, num_q_heads, head_dim of v]``, and
        gradients have its memory order. Tokens past ``cu_seqlens_q[-1]`` and tokens that see no key have out 0 and lse
        -inf (the sink, if there is one and the token belongs to a document); their gradients are 0. float32 inside,
        float64 for float64. A token's out and lse depend, to the bit, on the keys that it sees: a prefix of its
        document that has them and a chunk of its queries give the same. Work: 2 * (head_dim + head_dim of v) operations
        per visible pair of query and key and head, in backward 6 * head_dim + 4 * head_dim of v (in documents of more
        than 4096 keys 8 and 6). register_flop_formulas lets torch's FlopCounterMode count these, 6 and 4 in backward,
        document by document, which synchronises; fake tensors count as one document.

    Example:
        >>> q = k = torch.zeros(3, 1, 2)
        >>> v = torch.tensor([[[1.0, 2.0]], [[5.0, 6.0]], [[7.0, 8.0]]])
        >>> varlen_attention(q, k, v, torch.tensor([0, 2, 3], dtype=torch.int32)).tolist()
        [[[1.0, 2.0]], [[3.0, 4.0]], [[7.0, 8.0]]]

        The first document's tokens see both of each other:

        >>> cu_seqlens, visible_end = torch.tensor([[0, 2, 3, 3], [2, 2, 1, 0]], dtype=torch.int32)
        >>> varlen_attention(q, k, v, cu_seqlens, visible_end=visible_end[:3]).tolist()
        [[[3.0, 4.0]], [[3.0, 4.0]], [[7.0, 8.0]]]

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, four dimensions that may be either layout, cu_seqlens
            that do not start at 0, decrease or end past the tokens, causal with keys to the right, visible_end with
            ``causal=False`` or a right window. The message names the argument. Values of visible_end that are too
            small, too large or decrease too: on CUDA in a later call, and then the results are zeros. The same for
            seqused_k larger than the table allows, and for page numbers outside k, where another page is read.
        TypeError: an option by position, as flash-attn's max_seqlen_q.
        NotImplementedError: a device without a kernel; second derivatives and forward-mode ones (torch.func.jvp); any
            derivative with block_table.

    Method: Dao, FlashAttention-2 (2023): tiles, online softmax, recomputation in backward.

    Determinism: the same bits in every call, backward too, and for a document in any pack.
    Synchronises: never; with ``parents`` on CUDA the host reads them once for a tree.
    Memory: out, lse and the plan; in backward the gradients and float32 scratch for dq.
    Gradients: of q, k, v and sinks, through lse too. No second derivative, no forward mode; none with block_table.
    """
    refuse_misplaced(misplaced, unknown)
    options = checked_options(causal, softmax_scale, window_size, softcap, sinks, visible_end)
    check_tensor(q, "q")
    if q.dim() == 3 and q.shape[1] > q.shape[0]:
        total = cu_seqlens_q.total if isinstance(cu_seqlens_q, PackedMetadata) else -1
        if isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.is_cpu and cu_seqlens_q.dim() == 1:
            total = int(cu_seqlens_q[-1]) if len(cu_seqlens_q) else -1
        if total == q.shape[1]:
            raise ValueError(
                f"q: expected [total_q, num_q_heads, head_dim], got {list(q.shape)} with {total} tokens, which looks "
                "like [num_q_heads, total_q, head_dim]: transpose(0, 1), or give [1, num_q_heads, total_q, head_dim] "
                "and layout='bhsd'"
            )
    keys = keys_of(cu_seqlens_q, cu_seqlens_k, parents, block_table, seqused_k)
    out, lse = attend(q, k, v, cu_seqlens_q, keys, options, plan=plan, layout=layout)
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    keys: Keys | Parents | PackedMetadata,
    options: AttentionOptions,
    *,
    plan: torch.Tensor | None = None,
    layout: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of varlen_attention for a tensor q, its documents, keys and options that are checked."""
    # Layout
    pages, tokens_first = isinstance(keys, KeyPages), False
    if layout or q.dim() == 4:
        if pages and layout is None:
            raise ValueError(
                f"layout: expected 'bhsd' or 'bshd' for a q of four dimensions, got None with q {described(q)}"
            )
        tokens_first = layout_of(q, k, layout, keys is documents or isinstance(keys, (PrefixPaths, Parents))) == "bshd"
    if tokens_first:
        q = without_batch(q, "q")
        k, v = (k, v) if pages else (without_batch(k, "k"), without_batch(v, "v"))
    # Documents and keys as tensors
    of_keys: Keys
    if isinstance(documents, torch.Tensor) and isinstance(keys, torch.Tensor):
        cu_seqlens_q, of_keys, cache = documents, keys, None
    else:
        cu_seqlens_q, of_keys, options, cache = in_tensors(q, k, v, documents, keys, options)
    # The op
    if plan is None:
        plan = plan_for(q, k, v, cu_seqlens_q, of_keys, options, cache)
    try:
        out, lse = attention_forward(q, k, v, cu_seqlens_q, of_keys, options, plan)
    except ValueError:
        forget()  # it may be of a plan that was kept while its cu_seqlens changed
        raise
    return (out[None] if tokens_first else out), lse


def attention_plan(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    total_q: int,
    total_k: int | None = None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    head_dim_v: int | None = None,
    visible_end: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    parents: torch.Tensor | PrefixPaths | None = None,
) -> torch.Tensor:
    """Make the work list of a packed batch on a GPU: once, for the forward and backward of every layer.

    Args:
        cu_seqlens_q, cu_seqlens_k, causal, window_size, visible_end: as varlen_attention.
        total_q, total_k: tokens of q and of k; without total_k those of q.
        num_heads, num_kv_heads, head_dim: of the calls that will use it.
        head_dim_v: head_dim of their v, if it differs from the one of q and k.
        seqused_k: for calls with a block_table, whose values do not matter; then pass total_k = pages * page_size.
        parents: of a prefix tree, whose segments cu_seqlens_q has; total_k is then not read.

    Returns:
        int32, its size independent of the lengths; empty on the CPU. One kernel, no synchronisation. A plan is valid
        only for the values of cu_seqlens and visible_end that it was made from: make it again when they change (for a
        CUDA graph, capture this call too). Each forward and backward compares cu_seqlens with its copy, each forward
        visible_end; other values are a ValueError in a later call.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> attention_plan(cu_seqlens, total_q=3, num_heads=4, num_kv_heads=2, head_dim=64).shape
        torch.Size([0])

    Raises:
        ValueError: cu_seqlens, visible_end or heads that do not fit; the message names the argument.

    Determinism: the same integers in every call.
    Synchronises: never.
    Memory: the result: it grows with total, heads and documents, not with the lengths.
    Gradients: none: integers.
    """
    if parents is not None:
        refuse_beside("parents", cu_seqlens_k=cu_seqlens_k, visible_end=visible_end, seqused_k=seqused_k)
        paths = cached_paths(cu_seqlens_q, parents, total_q, None)
        cu_seqlens_k, total_k = (paths.cu_seqlens, paths.slot_of_key.shape[0]) if paths.shares else (None, None)
    total_k = total_q if total_k is None else total_k
    geometry = total_q, total_k, num_heads, num_kv_heads, head_dim, causal, *window_sides(window_size), head_dim_v
    if seqused_k is not None:
        refuse_beside("seqused_k", cu_seqlens_k=cu_seqlens_k, visible_end=visible_end)
        return gate.paged_attention_plan(cu_seqlens_q, seqused_k, *geometry)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return gate.attention_plan(cu_seqlens_q, cu_seqlens_k, *geometry, visible_end)
