"""What stands in for the mask of a forward: its pattern, found once, which every layer reads.

transformers asks for a mask once per forward and kind of layer. The answer here is a MaskPattern where varlen attention
can follow it, and transformers' own 4-D mask where it cannot.
"""

import functools
import inspect

import torch

from packing_ops.integrations.transformers._host import masking_utils
from packing_ops.integrations.transformers.layout import as_bool, find_layout

NAMES: set[str] = set()


class MaskPattern:
    """Causal or not, the window, and what tells the documents. Layers share it, and the layout found in it."""

    def __init__(self, causal, window, length, padding, position_ids):
        self.causal, self.window, self.length = causal, window, length
        self.padding, self.position_ids = padding, position_ids
        self._layout = self._given = None

    def layout(self, query, cu_seqlens, position_ids):
        if self._layout is None or self._given[0] is not cu_seqlens[0] or self._given[1] is not cu_seqlens[1]:
            position_ids = position_ids if self.position_ids is None else self.position_ids
            self._layout = find_layout(query, cu_seqlens, self.padding, position_ids)
            self._given = cu_seqlens
        return self._layout


class _Carrier:
    """Goes where transformers hands the 2-D mask on to the mask function, and takes along what that is not told.

    separates: transformers' own masks would separate the documents of position_ids. stock: keys of another sequence, or
    of a cache of fixed length, whose masks transformers makes ahead and handles as tensors.
    """

    def __init__(self, padding, position_ids=None, separates=False, stock=False):
        self.padding, self.position_ids, self.separates, self.stock = padding, position_ids, separates, stock


def packing_ops_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    **kwargs,
):
    """The mask function of AttentionMaskInterface: a MaskPattern, or a 4-D bool mask (None for one query over all)."""
    carrier = attention_mask
    if not isinstance(carrier, _Carrier):
        # Nobody said whose keys a bidirectional mask is about.
        carrier = _Carrier(attention_mask, stock="allow_is_bidirectional_skip" in kwargs)
    pattern = None if carrier.stock else _pattern_of(mask_function, kwargs)
    start = isinstance(q_offset, int) and q_offset == 0 and isinstance(kv_offset, int) and kv_offset == 0
    if pattern is not None and start and q_length == kv_length:
        return MaskPattern(*pattern, q_length, carrier.padding, carrier.position_ids)
    if carrier.separates:
        documents = masking_utils.find_packed_sequence_indices(carrier.position_ids)
        if documents is not None:
            mask_function = _each_document_alone(mask_function, carrier.position_ids, documents)
    # Without a mask the layer could not tell causal from full; one query that sees every key is both.
    skip = kwargs.pop("allow_is_causal_skip", True) and q_length == 1 and not carrier.separates
    kwargs["allow_is_bidirectional_skip"] = False
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=carrier.padding,
        allow_is_causal_skip=skip,
        **kwargs,
    )


def _each_document_alone(mask_function, position_ids, documents):
    """mask_function over positions inside each document, and nothing between documents ([batch, seqlen] each)."""

    def same_document(batch, head, q, k):
        inside = mask_function(batch, head, position_ids[batch, q], position_ids[batch, k])
        return inside & (documents[batch, q] == documents[batch, k])

    return same_document


def _pattern_of(mask_function, kwargs):
    """(causal, window), or None for a pattern that is none of causal, full and their sliding windows."""
    name = getattr(mask_function, "__name__", "")
    if kwargs.get("use_vmap"):  # somebody's function is mixed in
        return None
    local_size, config = kwargs.get("local_size"), kwargs.get("config")
    full = "allow_is_bidirectional_skip" in kwargs  # only the makers of bidirectional masks pass it
    if local_size is None:
        expected = "bidirectional_mask_function" if full else "causal_mask_function"
        return (not full, (-1, -1)) if name == expected else None
    sliding = getattr(config, "sliding_window", None) == local_size
    if name != "and_mask" or not sliding or getattr(config, "attention_chunk_size", None) is not None:
        return None
    return (False, (local_size, local_size)) if full else (True, (local_size - 1, 0))


# --- position_ids reach the mask function without being read on the host ---

_PARAMETERS = ["config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids", "layer_idx"]


def carry_position_ids() -> bool:
    """Wraps the preparation that every mask goes through, for models under our names only. False: it looks different."""
    original = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if hasattr(original, "carries_position_ids"):
        return True
    if original is None or list(inspect.signature(original).parameters)[: len(_PARAMETERS)] != _PARAMETERS:
        return False

    @functools.wraps(original)
    def prepare(config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx, *rest, **named):
        chunked = getattr(config, "attention_chunk_size", None) is not None  # reads the 2-D mask itself
        if config._attn_implementation not in NAMES or chunked:
            return original(
                config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx, *rest, **named
            )
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            attention_mask = as_bool(attention_mask, inputs_embeds.device)
        early, mask, *prepared = original(
            config, inputs_embeds, attention_mask, past_key_values, None, layer_idx, *rest, **named
        )
        if early:
            return early, mask, *prepared
        separates = position_ids is not None and mask is None and past_key_values is None
        cross = (rest[0] if rest else named.get("encoder_hidden_states")) is not None
        slots = list(inputs_embeds.shape[:2])
        excess = 0 if mask is None or cross else mask.shape[-1] - slots[1]
        if excess < 0 or (excess > 0 and past_key_values is None):  # longer: keys of a cache
            raise ValueError(f"attention_mask: expected {slots} like the batch, got {list(mask.shape)}")
        stock = cross or getattr(past_key_values, "is_compileable", False)
        return early, _Carrier(mask, position_ids, separates, stock), *prepared

    prepare.carries_position_ids = True
    masking_utils._preprocess_mask_arguments = prepare
    return True
