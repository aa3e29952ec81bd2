"""Documents of a forward's attention: of the mask's slots, or of rows that another library's Ulysses gathered from its
ranks; and what is refused where such a library drops the mask."""

from packing_ops.integrations.transformers import model_call
from packing_ops.integrations.transformers.document_checks import can_read, is_tensor
from packing_ops.integrations.transformers.documents import find_documents
from packing_ops.integrations.transformers.masks import mark_used


def documents_of_pattern(module, pattern, query, key, cu_seqlens, position_ids):
    """The documents of query ``[batch, num_heads, seqlen, head_dim]`` under a MaskPattern; of key, for the last queries."""
    seqlen, length = query.shape[2], pattern.length
    if key.shape[2] == length and seqlen == (length if pattern.last is None else pattern.last):
        return pattern.documents(key, cu_seqlens, position_ids).on(query.device)
    # Ulysses of other libraries: the mask was made for this rank's slots, position_ids are gathered as the heads are.
    gathered = seqlen == key.shape[2] and length > 0 and seqlen % length == 0
    if not gathered or position_ids is None or tuple(position_ids.shape) != (query.shape[0], seqlen):
        lengths = f"{seqlen} queries and {key.shape[2]} keys"
        raise ValueError(f"key: expected the {length} slots that the mask was made for, got {lengths}")
    _refuse_parts(length, seqlen, cu_seqlens, pattern.padding)
    mark_used(position_ids)
    layer = getattr(module, "layer_idx", None)
    return find_documents(query, (None, None), None, position_ids, layer).on(query.device)


def refuse_dropped_mask(module, query, cu_seqlens, position_ids, causal, window):
    """Where rows are gathered, and the wrapper of another library passes no mask on: ValueError for what only that said."""
    call, seqlen = model_call.current(), query.shape[2]
    own = None if call is None else call.position_ids
    if not is_tensor(own, 2) or not is_tensor(position_ids, 2) or position_ids.shape[1] != seqlen:
        return
    length = own.shape[1]
    if not 0 < length < seqlen or seqlen % length:
        return
    if not call.looked_at_parts:  # once for all layers
        _refuse_parts(length, seqlen, cu_seqlens, call.padding if call.numbers is None else call.numbers)
        call.looked_at_parts = True
    masks = {mask and (mask[0], _narrow(mask[1], seqlen)) for mask in call.masks}
    told = causal, _narrow(window, seqlen)
    # Of several masks, a layer that tells no window may have had one that does.
    unclear = len(masks) > 1 and told[1] == (-1, -1) and not _is_full_attention(module)
    if masks and (None in masks or told not in masks or unclear):
        raise ValueError(
            f"attention_mask: expected to reach attention, got dropped where rows of {length} slots are gathered to {seqlen}: "
            f"it had more than causal={causal} and window_size={window}, which the layer tells"
        )


def _narrow(window, seqlen):
    """The window, or that of all keys where it reaches over a row of seqlen slots."""
    return (-1, -1) if window[0] >= seqlen - 1 else window


def _is_full_attention(module) -> bool:
    types, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return bool(types) and isinstance(index, int) and types[index] == "full_attention"


def _refuse_parts(length, seqlen, cu_seqlens, padding):
    """Of a rank's part of a row that is gathered, by position_ids alone."""
    gathered = f"where rows of {length} slots are gathered to {seqlen}"
    if cu_seqlens != (None, None):
        raise ValueError(f"cu_seq_lens_q: expected None {gathered}, whose position_ids tell the documents")
    if padding is None or (is_tensor(padding, 2) and can_read(padding) and bool((padding == 1).all())):
        return
    raise ValueError(
        f"attention_mask: expected None or all ones {gathered}, got padding or document numbers: let position_ids restart "
        "with each document"
    )
