"""Causal masks with blocks whose tokens see each other, images and prefixes, as visible_end of varlen_attention."""

from packing_ops import _ops
from packing_ops.integrations.transformers.document_checks import can_read
from packing_ops.integrations.transformers.imports import masking_utils
from packing_ops.visible_ends import visible_end_from_blocks


def blocks_of(mask_function, batch, length):
    """(pattern, blocks) where the mask is causality or a block, and within that a window to the left; else (None, None).

    A window that blocks reach out of is another mask: no keys' end alone tells it. A graph cannot read whether blocks are
    runs of neighbours.
    """
    parts, window = _made_by("and_masks", mask_function), (-1, -1)
    if parts is not None and len(parts["mask_functions"]) == 2:
        mask_function, overlay = parts["mask_functions"]
        sliding = _made_by("sliding_window_overlay", overlay)
        if sliding is None:
            return None, None
        window = (sliding["sliding_window"] - 1, -1)
    parts = _made_by("or_masks", mask_function)
    if parts is None or len(parts["mask_functions"]) != 2:
        return None, None
    causal, overlay = parts["mask_functions"]
    overlay = _made_by("blockwise_overlay", overlay)
    if causal is not masking_utils.causal_mask_function or overlay is None:
        return None, None
    blocks = overlay["block_sequence_ids"]
    return ((True, window), blocks) if blocks.shape == (batch, length) and can_read(blocks) else (None, None)


def _made_by(maker, function):
    """What a function that masking_utils.maker made holds, by name; None for every other function."""
    if getattr(function, "__qualname__", "").partition(".<locals>.")[0] != maker or not function.__closure__:
        return None
    if function.__module__ != masking_utils.__name__:
        return None
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def ends_of_blocks(documents, blocks):
    """int32 [total] of the packed rows of ``documents``; None if a number comes back in a document. One synchronisation.

    blocks: [batch, slots], see MaskPattern.
    """
    numbers = blocks.to(documents.device).flatten()
    if documents.indices is not None:
        numbers = numbers[documents.indices]
    numbers = numbers.long().clamp(min=-1) + 1
    ends = visible_end_from_blocks(numbers, documents.cu_seqlens_q)
    if numbers.numel() < 2:
        return ends
    # Numbers that grow from run to run of a document do not come back.
    of_documents = _ops.seq_idx_from_cu_seqlens(documents.cu_seqlens_q, numbers.shape[0]) * (numbers.max() + 1)
    keys = of_documents + numbers
    starts = (keys[1:] != keys[:-1]) & (numbers[1:] != 0)
    comes_back = starts & (keys[1:] <= keys.cummax(0).values[:-1])
    return None if bool(comes_back.any()) else ends
