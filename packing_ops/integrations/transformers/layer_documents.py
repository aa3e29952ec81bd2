"""The documents of one attention layer: by its mask, by what the layer is given, or of rows that another library's
Ulysses gathered from its ranks.
"""

import torch

from packing_ops._runtime.batch_cache import kept_with
from packing_ops.integrations.transformers.call import call_of_layers, current, numbers_of
from packing_ops.integrations.transformers.documents import ROW_EACH, can_read, find_documents, is_tensor, one_each
from packing_ops.integrations.transformers.versions import class_name, note_graph

STEP = "decoding with a KV cache"  # one token of each row
MADE_FOR = ("cu_seqlens of a mask",)


def note_attention(unread: bool) -> None:
    """Note in the call, and in those around it, that our attention runs, or that its mask was made (``unread``)."""
    if torch.compiler.is_compiling():
        return None if unread else note_graph()
    for call in (current(), *current().outers) if current() else ():
        call.unread = unread


def documents_of(query, cu_seqlens, padding, position_ids):
    """Return the documents of query ``[batch, num_heads, seqlen, head_dim]``: of the call that runs, else of these
    arguments.
    """
    call = call_of_layers()
    if call is None:
        return find_documents(query, cu_seqlens, padding, position_ids)
    call.mark_consumed(padding, *cu_seqlens, position_ids)
    return call.documents(query, cu_seqlens, padding, position_ids)


def find(module, query, key, mask, pattern, cu_seqlens, position_ids, options):
    """Return (BatchDocuments, visible_end, why varlen attention does not serve them); None for documents that are
    not found.
    """
    if pattern is not None:
        if pattern.of_tree:
            raise ValueError(
                f"segment_parents: expected a model that passes them to its attention, got {type(module).__name__} "
                "without them; give it the samples as packed documents"
            )
        documents, visible_end, none = documents_of_pattern(module, pattern, query, key, cu_seqlens, position_ids)
        return (documents, None, "the last queries of a row") if pattern.last else (documents, visible_end, none)
    causal, window = options.causal, options.window_size
    if mask is None and position_ids is not None:
        refuse_dropped_mask(module, query, cu_seqlens, position_ids, causal, window)
    other = "Cross" in type(module).__name__
    if mask is None and query.shape[2] > 1 and (other or query.shape[2] != key.shape[2]):
        refuse_other_sequence(module, query)
    none = why_no_documents(query, key, mask, causal, window, other) or (
        "attention to another sequence" if other else ""
    )
    if none and not other and cu_seqlens != (None, None) and not has_documents_of(cu_seqlens[0], mask):
        raise ValueError(f"cu_seq_lens_q: expected a row of its own documents, got {none}")
    return None if none else documents_of_layer(query, mask, cu_seqlens, position_ids), None, none


def has_documents_of(cu_seqlens, mask) -> bool:
    """Return whether this tensor was made by position_ids that were found to agree with these cu_seqlens."""
    if cu_seqlens is None or mask is None:
        return False
    call = current()
    is_of_call = call is not None and call.checked is not None and call.cu_seqlens is cu_seqlens
    # Recomputed, in no call
    return is_of_call or kept_with([mask], MADE_FOR, lambda: None, checked_by_kernel=True) is cu_seqlens


def documents_of_layer(query, mask, cu_seqlens, position_ids):
    """Return the documents by what the layer is given."""
    numbers = numbers_of(mask, current())
    padding = mask if numbers is None else numbers
    return documents_of(query, cu_seqlens, padding, position_ids).on(query.device)


def documents_of_pattern(module, pattern, query, key, cu_seqlens, position_ids):
    """Return MaskPattern.documents of query ``[batch, num_heads, seqlen, head_dim]``; of key, for the last queries."""
    seqlen, length = query.shape[2], pattern.length
    if key.shape[2] == length and seqlen == (length if pattern.last is None else pattern.last):
        return pattern.documents(key, cu_seqlens, position_ids)
    # Ulysses of other libraries: the mask was made for this rank's slots, position_ids are gathered as the heads are.
    gathered = seqlen == key.shape[2] and length > 0 and seqlen % length == 0
    if not gathered or position_ids is None or tuple(position_ids.shape) != (query.shape[0], seqlen):
        raise ValueError(
            f"key: expected the {length} slots that the mask was made for, got {seqlen} queries and {key.shape[2]} keys"
        )
    _refuse_parts(length, seqlen, cu_seqlens, pattern.padding)
    return documents_of_layer(query, None, (None, None), position_ids), None, ""


def refuse_other_sequence(module, query) -> None:
    """Raise ValueError at the end of a call with several documents in a row: without a mask each of them sees all of
    another sequence, of which each may have a part (Mllama's images).
    """
    call = call_of_layers()
    if call is None or all(shape != (query.shape[0], query.shape[2]) for shape, _, _ in call.answers):
        return  # of a resampler, which has other queries
    outermost = (call, *call.outers)[-1]
    why = (
        f"{class_name(module)} attends to another sequence (of images, say) without a mask that says which part is "
        "whose (cross_attention_mask)"
    )
    message = one_each(outermost.named_by(), why, f"give one, or {ROW_EACH}")
    outermost.where_several = outermost.where_several or (query.shape[0], message)


def refuse_dropped_mask(module, query, cu_seqlens, position_ids, causal, window):
    """Raise ValueError for what only a mask said, where rows are gathered and the wrapper of another library passes
    no mask on.
    """
    call, seqlen = current(), query.shape[2]
    own = None if call is None else call.position_ids
    if not is_tensor(own, 2) or not is_tensor(position_ids, 2) or position_ids.shape[1] != seqlen:
        return
    length = own.shape[1]
    if not 0 < length < seqlen or seqlen % length:
        return
    if not call.looked_at_parts:  # once for all layers
        _refuse_parts(length, seqlen, cu_seqlens, call.mask)
        call.looked_at_parts = not torch.compiler.is_compiling()  # a graph writes nothing that it reads
    masks = {mask and (mask[0], _narrow(mask[1], seqlen)) for mask in call.masks}
    of_layer = causal, _narrow(window, seqlen)
    # Of several masks, a layer that passes no window may have had one that has.
    types, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    is_full = bool(types) and isinstance(index, int) and types[index] == "full_attention"
    unclear = len(masks) > 1 and of_layer[1] == (-1, -1) and not is_full
    if masks and (of_layer not in masks or None in masks or unclear):
        raise ValueError(
            f"attention_mask: expected to reach attention, got dropped where rows of {length} slots are gathered to "
            f"{seqlen}: it had more than causal={causal} and window_size={window}, which the layer passes"
        )


def _narrow(window, seqlen):
    """Return the window, or (-1, -1) if it reaches over a row of seqlen slots."""
    return (-1, -1) if window[0] >= seqlen - 1 else window


def _refuse_parts(length, seqlen, cu_seqlens, padding):
    """Raise ValueError for a rank's part of a row that is gathered if anything but position_ids says its documents."""
    gathered = f"where rows of {length} slots are gathered to {seqlen}"
    if cu_seqlens != (None, None):
        raise ValueError(f"cu_seq_lens_q: expected None {gathered}, whose position_ids tell the documents")
    if padding is None or (is_tensor(padding, 2) and can_read(padding) and bool((padding == 1).all())):
        return
    raise ValueError(
        f"attention_mask: expected None or all ones {gathered}, got padding or document numbers: let position_ids "
        "restart with each document"
    )


def why_no_documents(query, key, mask, causal, window, other):
    """Return why the documents of a call without a MaskPattern cannot be found, or an empty string."""
    if mask is not None and mask.dim() != 2:
        why = "decoding with a KV cache" if query.shape[2] != key.shape[2] else "a mask that is neither causal nor full"
        return f"{why} (mask of {mask.dim()} dimensions)"
    if query.shape[2] != key.shape[2]:
        is_step = mask is None and query.shape[2] == 1 and causal and window == (-1, -1)
        return STEP if is_step and not other else f"{STEP} or attention to another sequence"
    if not causal and window != (-1, -1):
        return "a sliding window without causality and without its mask"
    return ""
