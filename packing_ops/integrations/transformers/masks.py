"""What the layers of a forward get in place of a mask tensor, and where transformers makes it.

transformers asks for a mask once per forward and kind of layer. The answer here is a MaskPattern where varlen attention
can follow it, and transformers' 4-D mask where it cannot, or where the model reads masks itself (see call.py).
"""

import copy
import functools
import inspect
from typing import NamedTuple

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers import versions
from packing_ops.integrations.transformers.call import (
    ADDITIVE,
    NAMES,
    OTHER_POSITIONS,
    PATTERN,
    current,
    now,
    numbers_of,
)
from packing_ops.integrations.transformers.documents import (
    SEQUENCE,
    cached_cast,
    can_read,
    each_document_alone,
    is_tensor,
    refuse_where,
    several_in,
)
from packing_ops.integrations.transformers.layer_documents import MADE_FOR, documents_of, note_attention
from packing_ops.integrations.transformers.versions import CACHE, cached_length, masking_utils, refusal, version
from packing_ops.varlen.visible_ends import visible_end_from_blocks


class MaskPattern:
    """Causal or not, the window, and where the documents are: found before the layers, which write nothing here.

    padding, position_ids, axes: see MaskArguments.
    blocks: [batch, slots], tokens of one number from 0 on see each other, in addition to causality; or None.
    last: how many queries there are, the last ones of the row; None for all.
    shape: the 4-D mask's. Its values are in no tensor, but models look whether it is one of two dimensions.
    of_tree: of a call with segment_parents, which attention has to get too.
    """

    def __init__(self, causal, window, length, padding, position_ids, axes=False, blocks=None, batch=1):
        self.causal, self.window, self.length, self.axes = causal, window, length, axes
        self.padding, self.position_ids, self.blocks = padding, position_ids, blocks
        self.shape, self.ndim, self.last = torch.Size((batch, 1, length, length)), 4, None
        self._found, self.of_tree = None, False

    def dim(self):
        return self.ndim

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def find(self, slots, cu_seqlens):
        """Find the documents before the layers run. A layer may run again in the backward of a checkpoint, in another
        graph: what one wrote here it would read then.

        slots: a tensor ``[batch, 1, length]`` on their device. cu_seqlens: of the model's call, (of queries, of keys).
        """
        self._found = cu_seqlens, *self._documents_and_ends(slots, cu_seqlens, self.position_ids)

    def documents(self, key, cu_seqlens, position_ids):
        """Return (the documents of key ``[batch, num_heads, length, head_dim]``, visible_end of varlen_attention for
        their packed rows or None, why they cannot be found or ""). cu_seqlens, position_ids: as the layer got them,
        (None, None) without.
        """
        # Layers may not get the call's: positions agree with them.
        found = self._found
        if found is not None and all(
            given is None or given is kept for given, kept in zip(cu_seqlens, found[0], strict=True)
        ):
            documents, ends = found[1:]
        else:
            position_ids = position_ids if self.position_ids is None and not self.axes else self.position_ids
            documents, ends = self._documents_and_ends(key, cu_seqlens, position_ids)
        none = "" if self.blocks is None or ends is not None else "blocks of a mask that are no runs of neighbours"
        return documents.on(key.device), ends, none

    def _documents_and_ends(self, key, cu_seqlens, position_ids):
        documents = documents_of(key, cu_seqlens, self.padding, position_ids)
        return documents, None if self.blocks is None else ends_of_blocks(documents, self.blocks)

    def _refuse(self, *_):
        raise TypeError(_READ)

    def _has_none(self):
        raise AttributeError(_READ)

    # What a model may ask of a mask tensor, by name: __getattr__ would slow the look-ups of the layers.
    dtype = to = masked_fill = property(_has_none)
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = _refuse

    def __getitem__(self, index):
        """Return all of it or its last queries, which Gemma 4 takes for layers that share keys; no other part of it."""
        if not isinstance(index, tuple) or not all(isinstance(each, slice) for each in index):
            raise TypeError(_READ)
        queries = index[2] if len(index) > 2 else slice(None)
        first = queries.start or 0
        whole = all(each in _WHOLE for each in (*index[:2], *index[3:])) and queries.step is queries.stop is None
        if not whole or first > 0:
            raise TypeError(_READ)
        if first == 0 or first <= -self.shape[2]:
            return self
        part = copy.copy(self)
        part.last, part.shape = -first, torch.Size((*self.shape[:2], -first, self.length))
        return part

    @classmethod
    def __torch_function__(cls, *_):
        raise TypeError(_READ)


_WHOLE = slice(None), slice(0, None)
_READ = (
    "attention_mask: expected to reach attention as it is, got read by the model on the way: "
    "load it with another attn_implementation"
)


class MaskArguments(NamedTuple):
    """What the mask function needs of where transformers prepares a mask. The thread keeps it between them."""

    padding: torch.Tensor | None
    position_ids: torch.Tensor | None = None  # [batch or 1, q_length]
    mask_form: str = PATTERN  # see call.py
    stock: bool = False  # make transformers' 4-D mask: keys of another sequence, or of a cache of fixed length
    numbers: torch.Tensor | None = None  # [batch, slots], each token's document from 1 on, 0 for padding
    axes: bool = False  # layers get position_ids of one axis of an image, which tell no documents


def packing_ops_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **kwargs
):
    """Make the mask of AttentionMaskInterface: a MaskPattern, or a 4-D mask (None for one query over all)."""
    call = current()
    prepared, now.mask_arguments = now.mask_arguments, None
    if prepared is None or prepared.padding is not attention_mask:
        # A bidirectional mask may be one of cross-attention; where nothing was prepared that is not known.
        prepared = MaskArguments(attention_mask, stock="allow_is_bidirectional_skip" in kwargs)
    # A pattern that varlen attention follows.
    pattern = blocks = None
    if prepared.mask_form == PATTERN and not prepared.stock:
        pattern = _pattern_of(mask_function, kwargs)
        if pattern is None:
            pattern, blocks = blocks_of(mask_function, batch_size, q_length)
    from_the_start = isinstance(q_offset, int) and q_offset == 0 and isinstance(kv_offset, int) and kv_offset == 0
    follows = pattern is not None and from_the_start and q_length == kv_length
    if call is not None:
        call.masks.add(pattern if follows and blocks is None else None)
    if follows:
        padding = prepared.padding if prepared.numbers is None else prepared.numbers
        made = MaskPattern(*pattern, q_length, padding, prepared.position_ids, prepared.axes, blocks, batch_size)
        note_attention(unread=True)
        # Whether what the layers get shows no more about documents than what is known here.
        by_padding = prepared.padding is not None and call is not None and not call.has_positions()
        if call is not None and call.segment_parents is not None and made.causal:
            made.of_tree = True
            call.mark_consumed_by("segment_parents", call.cu_seqlens)
        elif (call is None or not call.on_ranks) and (prepared.position_ids is not None or prepared.axes or by_padding):
            slots = torch.empty(batch_size, 1, q_length, dtype=torch.bool, device=kwargs.get("device"))
            made.find(slots, (None, None) if call is None else (call.cu_seqlens, call.cu_seqlens_k))
        return made
    # A tensor: documents are compared for each query and key.
    by_document = q_length > 1 and not (prepared.position_ids is None and prepared.numbers is None)
    if by_document:
        if call is not None:
            prepared = prepared._replace(position_ids=call.checked_positions(prepared.position_ids, batch_size))
        mask_function = each_document_alone(mask_function, kwargs, prepared, batch_size, q_length, q_offset)
    # Without a mask the layer could not tell causal from full; one query that attends to every key is both.
    skip = kwargs.pop("allow_is_causal_skip", True) and q_length == 1
    kwargs["allow_is_bidirectional_skip"] = False
    make = masking_utils.eager_mask if prepared.mask_form == ADDITIVE else masking_utils.sdpa_mask
    mask = make(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=prepared.padding,
        allow_is_causal_skip=skip,
        **kwargs,
    )
    if by_document and mask is not None and call is not None and call.checked is not None:
        kept_with([mask], MADE_FOR, lambda: call.cu_seqlens, checked_by_kernel=True)
    return mask


def _pattern_of(mask_function, kwargs):
    """Return (causal, window), or None for a pattern other than causal, full and their sliding windows."""
    name = getattr(mask_function, "__name__", "")
    if kwargs.get("use_vmap"):  # the model adds another mask function
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


# --- blocks of a mask whose tokens see each other, images and prefixes: visible_end of varlen_attention ---


def blocks_of(mask_function, batch, length):
    """Return (pattern, blocks) where the mask is causality or a block, and within that a window to the left; else
    (None, None).
    """
    parts, window = _closure_variables("and_masks", mask_function), (-1, -1)
    if parts is not None and len(parts["mask_functions"]) == 2:
        mask_function, overlay = parts["mask_functions"]
        sliding = _closure_variables("sliding_window_overlay", overlay)
        if sliding is None:  # a window that blocks reach out of is another mask: no end of keys describes it
            return None, None
        window = (sliding["sliding_window"] - 1, -1)
    parts = _closure_variables("or_masks", mask_function)
    if parts is None or len(parts["mask_functions"]) != 2:
        return None, None
    causal, overlay = parts["mask_functions"]
    overlay = _closure_variables("blockwise_overlay", overlay)
    if causal is not masking_utils.causal_mask_function or overlay is None:
        return None, None
    blocks = overlay["block_sequence_ids"]
    # A graph cannot read whether blocks are runs of neighbours.
    return ((True, window), blocks) if blocks.shape == (batch, length) and can_read(blocks) else (None, None)


def _closure_variables(maker, function):
    """Return the variables of a function that masking_utils.maker made, by name; None for every other function."""
    made_by = getattr(function, "__qualname__", "").partition(".<locals>.")[0]
    if made_by != maker or not function.__closure__ or function.__module__ != masking_utils.__name__:
        return None
    return {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }


def ends_of_blocks(documents, blocks):
    """Return int32 [total] of the packed rows of ``documents``; None if a number returns in a document. One
    synchronisation.
    """
    numbers = blocks.to(documents.cu_seqlens.device).flatten()
    if documents.indices is not None:
        numbers = numbers[documents.indices]
    numbers = numbers.long().clamp(min=-1) + 1
    ends = visible_end_from_blocks(numbers, documents.cu_seqlens)
    if numbers.numel() < 2:
        return ends
    # Numbers that grow from run to run of a document do not return.
    of_documents = gate.seq_idx_from_cu_seqlens(documents.cu_seqlens, numbers.shape[0]) * (numbers.max() + 1)
    keys = of_documents + numbers
    starts = (keys[1:] != keys[:-1]) & (numbers[1:] != 0)
    comes_back = starts & (keys[1:] <= keys.cummax(0).values[:-1])
    return None if bool(comes_back.any()) else ends


# --- transformers' preparation of masks ---

# It prepares every mask in one function. Here it is wrapped, for models with our attention: position_ids and the
# document numbers of a mask go on to the mask function, without being read on the host.

_KNOWN = (
    ["config", "inputs_embeds", "attention_mask", "cache", "position_ids", "layer_idx"],
    ["config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids", "layer_idx"],  # up to 5.23
)


def _with_positions(original):
    """Wrap the preparation of masks so that it takes position_ids along. Raises ImportError if its parameters are
    unknown.
    """
    names = [] if original is None else list(inspect.signature(original).parameters)
    if not any(names[: len(known)] == known for known in _KNOWN):
        raise ImportError(refusal(version))

    @functools.wraps(original)
    def prepare(*args, **kwargs):
        given = dict(zip(names, args, strict=False), **kwargs)
        config, inputs_embeds, attention_mask = given["config"], given["inputs_embeds"], given["attention_mask"]
        cache, position_ids = given[names[3]], given["position_ids"]
        nested = now.preparing

        def transformers_own(mask, positions):
            now.preparing = True
            try:
                return original(**{**given, "attention_mask": mask, "position_ids": positions})
            finally:
                now.preparing = nested

        # Masks of other names, and those that an outer model has made.
        if nested or config._attn_implementation not in NAMES:
            return _of_stock(transformers_own, attention_mask, position_ids, len(inputs_embeds), nested)
        given["layer_idx"] = _layer_that_counts(cache, given["layer_idx"])
        if isinstance(attention_mask, MaskPattern):  # made by an outer model: passed on, as a 4-D mask would be
            early, _, *prepared = transformers_own(inputs_embeds.new_empty(1, 1, 1, 1), None)
            return early, attention_mask, *prepared
        if attention_mask is not None and not hasattr(attention_mask, "to"):  # tensors and BlockMasks have it
            raise TypeError(f"attention_mask: expected a tensor, got {type(attention_mask).__name__}")

        # transformers prepares a bool mask without positions: it would make a 4-D mask of those.
        numbers = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            numbers = numbers_of(attention_mask, current())
            attention_mask = cached_cast(torch.bool, attention_mask, inputs_embeds.device)
        early, mask, *prepared = transformers_own(attention_mask, None)
        if early:
            return early, mask, *prepared

        # What does not fit.
        call, slots = current(), list(inputs_embeds.shape[:2])
        cross = given.get("encoder_hidden_states") is not None
        if cross and numbers is not None and can_read(numbers) and bool((numbers > 1).any()):
            raise ValueError("attention_mask: expected one document in each row beside another sequence, got several")
        mask_form = PATTERN if call is None else call.mask_form
        excess = 0 if mask is None or cross or mask_form != PATTERN else mask.shape[-1] - slots[1]
        if excess < 0 or (excess > 0 and cache is None):  # a longer mask covers the keys of a cache too
            raise ValueError(f"attention_mask: expected {slots} like the batch, got {list(mask.shape)}")

        # What tells documents.
        position_ids, axes = _row_positions(call, position_ids, slots, cross or config.model_type in OTHER_POSITIONS)
        if call is not None:
            call.mark_consumed(numbers, position_ids)

        # Warnings, a KV cache, and what the mask function is to know.
        if mask_form != PATTERN:
            versions.log_once(f"{call.name} may read its masks, it gets them of every query and key")
        elif call is None and position_ids is None and not cross:
            versions.log_once("position_ids of a model whose forward is called by itself may not be found")
        if cache is not None and not cross:
            check_cache(cache, call, position_ids, attention_mask, numbers, *slots)
        numbers = None if numbers is None or cross else cached_cast(numbers.dtype, numbers, mask.device)
        now.mask_arguments = MaskArguments(
            mask, position_ids, mask_form, cross or getattr(cache, "is_compileable", False), numbers, axes
        )
        return early, mask, *prepared

    return prepare


def _of_stock(make, mask, position_ids, batch, nested):
    """Return what transformers prepares. The call that runs knows then if this mask keeps documents apart."""
    call = current()
    by_masks = call is not None and call.by_masks
    if by_masks and not nested and call.position_ids is not None:  # before: a graph drops a check that is not used
        position_ids = call.checked_positions(position_ids, batch)
    prepared = make(mask, position_ids)
    # Where it has numbers of tokens' documents, and not by positions that the model counts along the row.
    if (
        prepared[2] is not None
        and call is not None
        and (call.position_ids is not None if by_masks else not call.traced)
    ):
        call.mark_consumed(None, position_ids)
    return prepared


def _layer_that_counts(cache, layer_idx):
    """Return layer_idx, or where that layer of the cache has no keys one that has, whose mask has their length: the
    first layer of MiniMax is a linear one.
    """
    layers = getattr(cache, "layers", ())
    if layer_idx is None or layer_idx >= len(layers) or getattr(layers[layer_idx], "is_initialized", True):
        return layer_idx
    return next(
        (place for place, each in enumerate(layers) if hasattr(each, "get_seq_length") and each.is_initialized),
        layer_idx,
    )


PATCH = Patch(masking_utils, "_preprocess_mask_arguments", _with_positions)


def _row_positions(call, position_ids, slots, of_others):
    """Return (position_ids ``[batch or 1, q_length]`` that show documents, or None; whether layers get those of one
    axis of an image).
    """
    # Several axes and no text positions in front, which such a model takes apart itself.
    axes = (
        call is not None
        and is_tensor(call.position_ids, 3)
        and (call.position_ids.shape[0] == 3 or call.first_axis == SEQUENCE)
    )
    if axes or (position_ids is None and call is not None):  # of several axes, or the model does not pass them on
        position_ids = call.row_positions(*slots)
    if of_others or not is_tensor(position_ids, 2) or position_ids.shape[1] != slots[1]:
        position_ids = None
    return position_ids, axes


# --- a KV cache that holds several documents in a row: queries of a later call would attend to all of them ---

# The one attribute that a cache gets. Copies of a filled prompt keep it, and a compiled model can set it: a weak map
# next to the cache would know no copy, and torch.compile does not trace one. What it holds: a bool tensor: whether a
# row has several documents, ``[]``, or at which of its slots one starts behind another, ``[cached tokens]``, which a
# cropped cache has fewer of; None: that was read, and is False; False: a mask with it was read too.
_SEVERAL = "_packing_ops_several"
_REFUSAL = (
    f"{CACHE}: expected a cache of one document in each row to go on with, got one that was filled with several, or "
    "with more tokens than position_ids count, which would all be seen; fill a cache for each document, or number the "
    "cached tokens' documents and these in attention_mask"
)


def check_cache(cache, call, position_ids, padding, numbers, batch, length):
    """Check a cache before the keys of this call are in it. Raises ValueError if it holds several documents: the
    first call with a filled cache waits for the GPU, later ones do not.
    """
    if call is not None:
        if call.cache is cache:  # masks of several kinds in one forward
            return
        call.cache = cache
    cached = cached_length(cache)
    is_empty = isinstance(cached, int) and cached == 0
    if not is_empty:
        # No call of ours has filled it: it was made of the tensors of another one, say. Axes of images count otherwise.
        is_known = hasattr(cache, _SEVERAL) or isinstance(cached, torch.Tensor)
        if not (is_known or position_ids is None or getattr(call, "of_axes", None) is not None):
            setattr(cache, _SEVERAL, _holds_others(cache, position_ids, padding, length))
        refuse_several(cache, cached, numbers)
        # generate gives every step a mask of integers, and 1 to each new token: on CUDA the first step alone waits.
        is_new = numbers is not None and not (numbers.is_cuda and getattr(cache, _SEVERAL, None) is False)
        if length == 1 and is_new and can_read(numbers):
            if bool((numbers > 1).any()):
                raise ValueError(
                    "attention_mask: expected 0 and 1 beside a KV cache, got the numbers of several documents"
                )
            setattr(cache, _SEVERAL, False)
    if length > 1:
        padding = padding[:, -length:] if is_tensor(padding, 2) else None  # of the keys; these are the last ones
        cu_seqlens = None if call is None else call.cu_seqlens
        # With cu_seq_lens_q alone a model counts along the row.
        position_ids = None if cu_seqlens is not None and call.position_ids is None else position_ids
        several = several_in(position_ids, padding, cu_seqlens, numbers, batch, isinstance(cached, int))
        # Attention refuses a tree.
        if not (is_empty or several is None or getattr(call, "segment_parents", None) is not None):
            # A first document that does not start at position 0 goes on with the cached tokens.
            _refuse_behind(
                several.any() if position_ids is None else several.any() & (position_ids[:, 0] == 0).any(),
                cached,
                numbers,
                f"{CACHE}: expected an empty cache, got a filled one beside several documents in a row, the first of "
                "which would see the cached tokens; give them without the cache, or number the cached tokens' "
                "documents and these in attention_mask",
            )
        if several is not None and several.dim():
            several = torch.nn.functional.pad(several, (cached + length - len(several), 0))
        setattr(cache, _SEVERAL, several)
    elif is_empty:  # what follows is known
        setattr(cache, _SEVERAL, None)


def _holds_others(cache, position_ids, padding, length):
    """Return whether more tokens of a row are cached than position_ids count before these: bool ``[]``."""
    if not is_tensor(padding, 2):
        # A copy of a layer with a window counts the tokens that it holds.
        counts = [each.get_seq_length() for each in getattr(cache, "layers", ()) if hasattr(each, "get_seq_length")]
        return (position_ids[:, 0] < max([0, *counts])).any()
    return ((position_ids[:, 0] < padding[:, :-length].sum(1)) & padding[:, -length]).any()


def _refuse_behind(several, cached, numbers, message):
    """Raise ValueError where a row has several documents beside cached tokens, unless a mask has their numbers."""
    if isinstance(cached, torch.Tensor):  # of a cache of fixed length, which may have been reset
        several = several & (cached > 0).to(several.device)
    if numbers is not None:  # of all tokens: masks are made by them
        several = several & ~(numbers > 1).any().to(several.device)
    refuse_where(several, message)


def is_marked(cache) -> bool:
    """Return whether the call that filled a cache has left there whether a row had several documents."""
    return isinstance(getattr(cache, _SEVERAL, None), torch.Tensor)


def refuse_several(cache, cached, numbers=None, whole=False):
    """Raise ValueError if a cache of ``cached`` tokens holds several documents in a row, unless the mask has their
    numbers. whole: tokens count that it was cropped of, as a state has seen them.
    """
    if not is_marked(cache) or (isinstance(cached, int) and cached == 0):  # reset
        return
    several = getattr(cache, _SEVERAL)
    several = several[: None if whole else cached].any() if several.dim() else several
    if can_read(several) and not bool(several):
        setattr(cache, _SEVERAL, None)
        return
    _refuse_behind(several, cached, numbers, _REFUSAL)
    if numbers is None and not torch.compiler.is_compiling():
        setattr(cache, _SEVERAL, None)
