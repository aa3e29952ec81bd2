"""Where the documents of a thd batch are, for one varlen call: worked out once per batch, shared by its layers.

Padding between documents costs no copy. Its queries get a document without keys (out 0, gradient 0), its keys one
without queries (gradient 0): lengths 3 and 2 in 4 slots each make the query documents 3, 1, 0, 2, 2, 0 and the key
documents 3, 0, 1, 2, 0, 2.

Under context parallelism it is a KeyLayout of packing_ops.parallel: rank r of n holds chunks r and 2n-1-r of a
document's 2n equal chunks.
"""

from typing import NamedTuple

import megatron.core
import torch

from packing_ops._runtime.arguments import check_cu_seqlens, int32_cu_seqlens
from packing_ops._runtime.batch_cache import is_captured, kept_with
from packing_ops.metadata import PackedMetadata, check_causal
from packing_ops.parallel.key_layout import KeyLayout, RowSpans, cumulated, key_layout

_FIELDS = [f"packed_seq_params.cu_seqlens_{name}" for name in ("q", "kv", "q_padded", "kv_padded")]


Call = tuple[torch.Tensor, torch.Tensor]  # cu_seqlens of one varlen call, int32: of the rows of q and of those of k


class DocumentSpans(NamedTuple):
    """cu_seqlens of queries and keys, int ``[num_documents + 1]``: real lengths, and the slots that hold them."""

    q: torch.Tensor
    k: torch.Tensor
    q_slots: torch.Tensor
    k_slots: torch.Tensor


def field_of(of, name):
    """Return a field that this version of megatron-core must have."""
    try:
        return getattr(of, name)
    except AttributeError:
        raise _lacks(of, name) from None


def _lacks(of, name):
    return AttributeError(
        f"{type(of).__name__}.{name}: needed, megatron-core {megatron.core.__version__} does not have it"
    )


def spans_of(packed_seq_params) -> DocumentSpans:
    """Return the spans of a thd batch, or of PackedMetadata; without ``*_padded`` its documents have no gaps."""
    if isinstance(packed_seq_params, PackedMetadata):
        check_causal(packed_seq_params)
        return DocumentSpans(*[packed_seq_params.cu_seqlens] * 4)
    if getattr(packed_seq_params, "segment_parents", None) is not None:
        raise ValueError(
            "packed_seq_params: expected packed documents, got the segments of a prefix tree (segment_parents)"
        )
    try:
        q, k = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv
    except AttributeError as error:
        raise _lacks(packed_seq_params, error.name) from None
    q_slots = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    k_slots = getattr(packed_seq_params, "cu_seqlens_kv_padded", None)
    documents = DocumentSpans(q, k, q if q_slots is None else q_slots, k if k_slots is None else k_slots)
    # Mostly they are one tensor, and each layer asks.
    checked = None
    for name, given in zip(_FIELDS, documents, strict=True):
        if given is None or given is not checked:
            check_cu_seqlens(given, name)
        checked = given
    return documents


def varlen_call_of(
    documents: DocumentSpans, rows: int, *, causal: bool, cp_rank: int = 0, cp_size: int = 1
) -> Call | KeyLayout:
    """Return the layout of a batch, kept with its cu_seqlens; if these are one int32 tensor it is that tensor.

    On CUDA one synchronisation per batch where lengths must agree with something: padding between documents, cu_seqlens
    of queries and keys in two tensors, context parallelism. None otherwise, and in a CUDA graph's capture.

    Args:
        documents: of the whole batch, whatever ``cp_size``.
        rows: of k on this rank.
    """
    q, k, q_slots, k_slots = documents
    one_tensor = q is k is q_slots is k_slots
    if cp_size == 1 and one_tensor and q.dtype == torch.int32:
        return q, q  # nothing to work out, and no lengths that must agree

    def make() -> Call | KeyLayout:
        same = k is q and k_slots is q_slots
        _check(documents, rows * cp_size, causal and not same, cp_size)
        # Documents over several ranks.
        if cp_size > 1:
            spans = RowSpans.of(q, q_slots, rows, cp_size, "zigzag")
            return key_layout(spans, cp_rank, causal=causal, exchange=False)
        # Documents end to end. detach: the same memory, but not the tensor that this is kept with.
        if q_slots is q and k_slots is k:
            cu_seqlens_q = int32_cu_seqlens(q).detach()
            return cu_seqlens_q, cu_seqlens_q if same else int32_cu_seqlens(k).detach()
        # Padding between documents.
        tokens_q, tokens_k, none = q.diff(), k.diff(), torch.zeros_like(q[1:])
        cu_seqlens_q = cumulated(tokens_q, q_slots.diff() - tokens_q, none)
        return cu_seqlens_q, cumulated(tokens_k, none, k_slots.diff() - tokens_k)

    key = "layout", rows, causal, cp_rank, cp_size
    return kept_with(documents[:1] if one_tensor else documents, key, make)


def _check(documents, rows, causal_between_two, cp_size):
    """Check the lengths; values of a CUDA graph's capture are not known."""
    q, k, q_slots, k_slots = documents
    wrong = {}  # {message: whether, on the device}
    # Slots hold their tokens.
    if q_slots is not q or k_slots is not k or cp_size > 1:
        sides = [("q", q, q_slots), ("kv", k, k_slots)]
        for name, real, slots in sides[: 1 if k is q and k_slots is q_slots else 2]:
            if len(slots) != len(real):
                raise ValueError(
                    f"cu_seqlens_{name}_padded: expected {len(real)} entries like cu_seqlens_{name}, got {len(slots)}"
                )
            lengths = real.diff()
            wrong[f"cu_seqlens_{name}: expected to start at 0"] = real[0] != 0
            wrong[f"cu_seqlens_{name}: expected never to decrease"] = (lengths < 0).any()
            wrong[f"cu_seqlens_{name}_padded: expected to start at 0"] = slots[0] != 0
            longer = (lengths > slots.diff()).any()
            wrong[f"cu_seqlens_{name}_padded: expected no fewer slots than tokens in each document"] = longer
    # Queries and keys are of the same documents.
    if len(q) != len(k):
        raise ValueError(f"cu_seqlens_kv: expected {len(q)} entries like cu_seqlens_q, got {len(k)}")
    if causal_between_two or cp_size > 1:
        why = "under context parallelism" if cp_size > 1 else "under a causal mask"
        differ = (q != k).any() | (q_slots != k_slots).any()
        wrong[f"cu_seqlens_kv: expected the lengths of cu_seqlens_q {why}"] = differ
    # Ranks divide the slots.
    if cp_size > 1:
        name = "cu_seqlens_q" if q_slots is q else "cu_seqlens_q_padded"
        wrong[f"{name}: expected multiples of 2 * context parallel size {cp_size} = {2 * cp_size}"] = (
            q_slots % (2 * cp_size) != 0
        ).any()
        wrong[f"{name}: expected at most the {rows} rows of {cp_size} ranks"] = q_slots[-1] > rows
    # One synchronisation for all.
    if not wrong or torch.compiler.is_compiling() or is_captured(q):
        return
    for message, is_wrong in zip(wrong, torch.stack(list(wrong.values())).tolist(), strict=True):
        if is_wrong:
            raise ValueError(f"{message}, got {[t.tolist() for t in (q, q_slots, k, k_slots)]}")
