"""What the arguments of an attention call mean: the layout of q, k and v, cu_seqlens of the documents, Keys."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

import torch

from packing_ops._runtime.arguments import check_tensor, described
from packing_ops._runtime.batch_cache import BatchCache
from packing_ops.keys import KeyPages, Keys, Parents, PrefixPaths, checked_tree
from packing_ops.metadata import PackedMetadata, cu_seqlens_of
from packing_ops.varlen.options import AttentionOptions, refuse_in_tree

Layout = Literal["thd", "bhsd", "bshd"]
LAYOUTS = get_args(Layout)  # t total, b batch of 1, s seqlen, h num_heads, d head_dim


def layout_of(q: torch.Tensor, k: torch.Tensor, layout: str | None, same_documents: bool) -> str:
    """Return ``layout``, or the one that the shapes allow; a q of a wrong shape is left for the op to refuse."""
    if layout is not None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected 'thd', 'bhsd' or 'bshd', got {layout!r}")
        if q.dim() != len(layout):
            raise ValueError(f"q: expected {len(layout)} dimensions in layout {layout!r}, got {described(q)}")
        return layout
    check_tensor(k, "k")
    # Rows of the same documents have as many tokens in q and k: where one size differs it counts heads.
    if k.dim() != 4 or q.shape[0] != 1 or (same_documents and q.shape[2] == k.shape[2] and q.shape[1] != k.shape[1]):
        return "bhsd"
    raise ValueError(
        "layout: expected 'bhsd' ([1, num_heads, total, head_dim]) or 'bshd' ([1, total, num_heads, head_dim]) for a q "
        f"that may be either, got None with q {described(q)} and k {described(k)}"
    )


def without_batch(tensor: torch.Tensor, name: str) -> torch.Tensor:
    check_tensor(tensor, name)
    if tensor.dim() != 4 or tensor.shape[0] != 1:
        raise ValueError(f"{name}: expected [1, total, num_heads, head_dim] in layout 'bshd', got {described(tensor)}")
    return tensor[0]


def refuse_heads_first(q: torch.Tensor) -> None:
    """Raise ValueError for a q with a batch, as scaled_dot_product_attention takes it, heads before tokens."""
    check_tensor(q, "q")
    if q.dim() != 3:
        raise ValueError(f"q: expected [total_q, num_q_heads, head_dim], got {list(q.shape)}")


# What others call an option of varlen_attention, and what to write in its place
_OTHER_NAMES = {
    "is_causal": "causal=, which is True by default",
    "scale": "softmax_scale=",
    "attn_mask": "cu_seqlens, causal=, window_size= or visible_end=: no mask is read",
    "dropout_p": "nothing: there is no dropout, leave it out",
    "enable_gqa": "nothing: k and v may always have fewer heads than q",
    "window": "window_size=(left, right)",
    "cu_seqlens": "cu_seqlens_q=",
    "max_seqlen_q": "nothing: max_seqlen is not needed, leave it out",
    "max_seqlen_k": "nothing: max_seqlen is not needed, leave it out",
}


def refuse_misplaced(misplaced: tuple[object, ...], unknown: Mapping[str, object] = MappingProxyType({})) -> None:
    """Raise TypeError for arguments by position after cu_seqlens_k, where flash-attn has max_seqlen_q and max_seqlen_k,
    and for keywords that varlen_attention does not have.
    """
    for name in unknown:
        if name in _OTHER_NAMES:
            raise TypeError(f"{name}: expected {_OTHER_NAMES[name]}, got a keyword that varlen_attention does not have")
        raise TypeError(f"varlen_attention() got an unexpected keyword argument {name!r}")
    if misplaced:
        raise TypeError(
            "max_seqlen_q: expected at most 5 arguments by position, options by name (causal=True), got "
            f"{5 + len(misplaced)}: "
            "max_seqlen is not needed, leave it out (flash_attn_varlen_func takes flash-attn's arguments)"
        )


# --- documents and keys ---


def in_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    given: Keys | Parents | PackedMetadata,
    options: AttentionOptions,
) -> tuple[torch.Tensor, Keys, AttentionOptions, BatchCache | None]:
    """Return cu_seqlens of q, the keys, the options and where plans are kept, of PackedMetadata, trees and pages.

    Raises:
        ValueError: documents or keys that do not fit the rows, or options that these keys do not have.
    """
    metadata = documents if isinstance(documents, PackedMetadata) else None
    cache = None if metadata is None else metadata._cache
    documents_k = documents if isinstance(given, (KeyPages, PrefixPaths, Parents)) else given
    ends = None if metadata is None or documents_k is not documents else metadata.visible_end
    if ends is not None and options.visible_end is None:
        options = options._replace(visible_end=ends)
    if isinstance(given, KeyPages):
        if options.visible_end is not None:
            raise ValueError(f"visible_end: expected None beside block_table, got {described(options.visible_end)}")
        cu_seqlens_q, _ = without_metadata(q, q, documents, documents, tree=False)
        return cu_seqlens_q, given, options, cache
    tree = given if isinstance(given, (PrefixPaths, Parents)) else None
    if metadata is not None and metadata.paths is not None and documents_k is documents:
        if tree is not None:
            raise ValueError("parents: expected None beside the PackedMetadata of a prefix tree, which has them")
        tree = metadata.paths
    axis, rows = 2 if q.dim() == 4 else 0, 0
    if tree is not None:
        rows = q.shape[axis] if q.dim() in (3, 4) else -1
        for name, tensor in (("k", k), ("v", v)):
            check_tensor(tensor, name)
            if tensor.dim() != q.dim() or tensor.shape[axis] != rows:
                raise ValueError(
                    f"{name}: expected the layout and the {rows} rows of q, which are the tree's, got "
                    f"{described(tensor)}"
                )
    cu_seqlens_q, cu_seqlens_k = without_metadata(q, k, documents, documents_k)
    if tree is None:
        return cu_seqlens_q, cu_seqlens_k, options, cache
    refuse_in_tree(options)
    return cu_seqlens_q, checked_tree(tree, cu_seqlens_q, rows, cache), options, cache


def without_metadata(
    q: torch.Tensor,
    k: torch.Tensor,
    documents_q: PackedMetadata | torch.Tensor,
    documents_k: PackedMetadata | torch.Tensor,
    *,
    tree: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cu_seqlens of q and of k; tree: whether those of both may be a prefix tree."""
    check_tensor(k, "k")
    for name, documents in (("cu_seqlens_q", documents_q), ("cu_seqlens_k", documents_k)):
        if isinstance(documents, int):
            raise TypeError(
                f"{name}: expected PackedMetadata or its cu_seqlens, got {documents} (int): varlen_attention takes no "
                "max_seqlen, leave it out (flash_attn_varlen_func takes flash-attn's arguments)"
            )
    total_q, total_k = (rows.shape[2] if rows.dim() == 4 else rows.shape[:1].numel() for rows in (q, k))
    same = documents_k is documents_q and total_k == total_q
    cu_seqlens_q = cu_seqlens_of(documents_q, total_q, like="q", name="cu_seqlens_q", tree=same and tree)
    return cu_seqlens_q, cu_seqlens_q if same else cu_seqlens_of(documents_k, total_k, like="k", name="cu_seqlens_k")
