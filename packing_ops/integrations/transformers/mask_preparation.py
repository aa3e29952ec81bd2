"""Brings position_ids and the document numbers of a mask to the mask function, without reading them on the host.

transformers prepares every mask in one function, which is wrapped here for models with our attention. Up to 4.57 that
function and the mask function take cache_position for the queries; here both have the signatures of version 5. Up to
5.23 the cache was called past_key_values.
"""

import functools
import inspect

import torch

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers import fallback, model_call, running
from packing_ops.integrations.transformers.axes import are_axes, positions_of_axes
from packing_ops.integrations.transformers.document_checks import can_read, numbers_of
from packing_ops.integrations.transformers.documents import as_bool, on_device
from packing_ops.integrations.transformers.imports import masking_utils, refusal, version
from packing_ops.integrations.transformers.kv_cache import check_cache
from packing_ops.integrations.transformers.masks import Carrier, MaskPattern, packing_ops_mask

_PARAMETERS = ["config", "inputs_embeds", "attention_mask", "cache", "position_ids", "layer_idx"]
_PARAMETERS_5 = [*_PARAMETERS[:3], "past_key_values", *_PARAMETERS[4:]]  # up to 5.23
_PARAMETERS_4 = ["config", "input_embeds", "attention_mask", "cache_position", *_PARAMETERS_5[3:]]


def _carrying(original):
    """The preparation of masks that takes position_ids along, for models with our attention only.

    Raises:
        ImportError: its parameters are none that are known here; the message has both versions.
    """
    parameters = [] if original is None else list(inspect.signature(original).parameters)
    if parameters[: len(_PARAMETERS)] == _PARAMETERS:
        return functools.wraps(original)(_wrapped(original))
    if parameters[: len(_PARAMETERS_5)] == _PARAMETERS_5:
        as_now = _wrapped(original)

        @functools.wraps(original)
        def prepare_5(config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx, *rest, **named):
            given = config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx
            return as_now(*given, *rest, **named)

        return prepare_5
    if parameters != _PARAMETERS_4:
        raise ImportError(refusal(version))

    def in_order(config, embeds, mask, past, positions, layer, cache_position):
        return original(config, embeds, mask, cache_position, past, positions, layer)

    wrapped = _wrapped(in_order)

    @functools.wraps(original)
    def prepare(config, embeds, mask, cache_position, past, positions, layer):
        return wrapped(config, embeds, mask, past, positions, layer, cache_position=cache_position)

    return prepare


def patch_of(owner) -> Patch:
    return Patch(owner, "_preprocess_mask_arguments", _carrying)


PATCH = patch_of(masking_utils)


def carry() -> None:
    """Once. Another library's wrapper may stand over an earlier one of ours: then the outer one alone acts."""
    if not PATCH.pinned:
        PATCH.apply()


def mask_function():
    """packing_ops_mask as this transformers calls it."""
    called_with = inspect.signature(masking_utils.sdpa_mask).parameters
    return packing_ops_mask_4 if "cache_position" in called_with else packing_ops_mask


def packing_ops_mask_4(batch_size, cache_position, kv_length, kv_offset=0, **kwargs):
    """cache_position: int64 ``[q_length]``, where the queries stand among the keys; not read on the host."""
    q_length = cache_position.shape[0]
    from_the_start = q_length == kv_length and isinstance(kv_offset, int) and kv_offset == 0
    # Masks with a function mixed in, and those of static caches, must not be skipped.
    kwargs["use_vmap"] = not kwargs.get("allow_is_causal_skip", True)
    q_offset = 0 if from_the_start else cache_position[0]
    return packing_ops_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, cache_position=cache_position, **kwargs
    )


def _wrapped(original):
    def prepare(config, inputs_embeds, attention_mask, cache, position_ids, layer_idx, *rest, **named):
        now = running.here()
        nested = now.preparing

        def transformers_own(mask, positions):
            now.preparing = True
            try:
                return original(config, inputs_embeds, mask, cache, positions, layer_idx, *rest, **named)
            finally:
                now.preparing = nested

        if nested or config._attn_implementation not in model_call.NAMES:
            return transformers_own(attention_mask, position_ids)
        if isinstance(attention_mask, MaskPattern):  # made by an outer model: passed on, as a 4-D mask would be
            early, _, *prepared = transformers_own(inputs_embeds.new_empty(1, 1, 1, 1), None)
            return early, attention_mask, *prepared
        numbers = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            numbers = numbers_of(attention_mask)
            attention_mask = as_bool(attention_mask, inputs_embeds.device)
        early, mask, *prepared = transformers_own(attention_mask, None)
        if early:
            return early, mask, *prepared
        call, slots = model_call.current(), list(inputs_embeds.shape[:2])
        cross = (rest[0] if rest else named.get("encoder_hidden_states")) is not None
        if cross and numbers is not None and can_read(numbers) and bool((numbers > 1).any()):
            raise ValueError("attention_mask: expected one document in each row beside another sequence, got several")
        mask_form = model_call.PATTERN if call is None else call.mask_form
        excess = 0 if mask is None or cross or mask_form != model_call.PATTERN else mask.shape[-1] - slots[1]
        if excess < 0 or (excess > 0 and cache is None):  # a longer mask covers the keys of a cache too
            raise ValueError(f"attention_mask: expected {slots} like the batch, got {list(mask.shape)}")
        axes = call is not None and are_axes(call.position_ids, call.first_axis)
        if call is not None and (position_ids is None or axes):
            position_ids = positions_of_axes(call, slots) if axes else call.position_ids
        if cross or not _about(position_ids, slots[1]) or config.model_type in model_call.OTHER_POSITIONS:
            position_ids = None
        checked = None
        if call is not None:
            call.mark_numbers_used(numbers)
            if position_ids is not None:
                position_ids, cu_seqlens = call.check_positions(position_ids, slots[0])
                checked = None if cu_seqlens is None else (call.cu_seqlens, call.cu_seqlens_k, cu_seqlens)
                call.mark_used()
        if mask_form != model_call.PATTERN:
            fallback.log_once(f"{call.name} may read its masks, it gets them of every query and key")
        elif call is None and position_ids is None and not cross:
            fallback.log_once("position_ids of a model whose forward is called by itself may not be found")
        if cache is not None and not cross:
            check_cache(cache, call, position_ids, attention_mask, numbers, *slots)
        stock = cross or getattr(cache, "is_compileable", False)
        numbers = None if numbers is None or cross else on_device(numbers, mask.device)
        carrier = Carrier(mask, position_ids, mask_form, stock, numbers, checked, axes)
        if getattr(config, "attention_chunk_size", None) is None:
            return early, carrier, *prepared
        model_call.leave(carrier)  # chunked masks are made by a function that reads the 2-D mask
        return early, mask, *prepared

    return prepare


def _about(position_ids, q_length):
    return isinstance(position_ids, torch.Tensor) and position_ids.dim() == 2 and position_ids.shape[1] == q_length
