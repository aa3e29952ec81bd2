"""Documents of a forward's attention: of the mask's slots, or of rows that another library's Ulysses gathered from its ranks."""

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
    if cu_seqlens != (None, None):
        raise ValueError(
            f"cu_seq_lens_q: expected None where rows of {length} slots are gathered to {seqlen}, whose position_ids tell "
            "the documents"
        )
    if pattern.padding is not None and not bool((pattern.padding == 1).all()):
        raise ValueError(
            f"attention_mask: expected None or all ones where rows of {length} slots are gathered to {seqlen}, got padding "
            "or document numbers: let position_ids restart with each document"
        )
    mark_used(position_ids)
    layer = getattr(module, "layer_idx", None)
    return find_documents(query, (None, None), None, position_ids, layer).on(query.device)
