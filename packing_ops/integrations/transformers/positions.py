"""The positions that a model sees: each document's are the same as in a row without others.

A numbered mask and cu_seqlens say where documents start, and no positions: these are made. Where positions are not
enough, because a part of the model looks at the whole row, that part is run by document, or several documents are
refused.
"""

import functools
import inspect
import re

import torch

from packing_ops.boundaries import position_ids_from_cu_seqlens
from packing_ops.integrations._patching import put_around
from packing_ops.integrations._walks import kept_with_model
from packing_ops.integrations.transformers import sequence_group
from packing_ops.integrations.transformers.call import NAMES, PATTERN
from packing_ops.integrations.transformers.documents import (
    SEQUENCE,
    TIME,
    checked_against,
    first_axis,
    first_tokens,
    is_tensor,
    one_each,
    refuse_where,
    several_in,
    tokens_of,
)
from packing_ops.integrations.transformers.states.cached import state_in
from packing_ops.integrations.transformers.versions import (
    CACHE,
    PreTrainedModel,
    cached_length,
    class_name,
    code_has,
    parameters_of,
    reads_text,
    source_of,
    unwrapped,
)

# --- parts of a model that count along the row ---

# Some models take no positions (BART's decoders). Others count if they are not given (BERT), or start a state where a
# position is 0 (RecurrentGemma). Recognised by an embedding of positions in a module of a text model, or by the code of
# a layer that is given positions.

_EMBEDDING = re.compile(r"(^|_)(pos|position|positions)(_|$)|^wpe$")
_RELATIVE = re.compile(r"rotary|rope|relative|bias", re.IGNORECASE)  # the same wherever a document is
_STARTS_AT_ZERO = r"position_ids\[.*\] == 0"
_BEHIND_PADDING = r"\bpadding_idx \+ 1\b|create_position_ids_from_input_ids"  # RoBERTa and its like
_BEHIND_NUMBER = r"arange\(config\.max_position_embeddings\)\.expand\(\(1, -1\)\) \+ (\d+)"  # Nystromformer
_ALONG_THE_ROW = r"torch\.arange\(hidden_states\.shape\[1\].*\) \+ past_seen_tokens"  # Llama 4


@kept_with_model
def _found_in(model) -> tuple[str, str, str, bool, int, str | None]:
    """Return (takes_none, needs, by_length, has_axes, first, axis). What looks at the whole row runs by document from
    now on.

    takes_none: class of a module that counts along the row and takes no positions. needs: of one that counts where
    it is given no positions. by_length: of a rotary embedding whose angles depend on the largest position. has_axes:
    whether the model makes positions of several axes. first: the position of a document's first token. axis:
    first_axis of the model, or of the text model in it.
    """
    takes_none = needs = by_length = ""
    has_axes, first, axis = False, 0, None
    of_text: dict[torch.nn.Module, bool] = {}  # whether the model around a module reads text
    for module in model.modules():
        cls, reads = type(module), of_text.get(module, False)
        if isinstance(module, PreTrainedModel):
            reads = reads_text(cls)
            axis = axis or first_axis(cls)
            has_axes |= axis is not None or hasattr(cls, "get_rope_index")
        of_text |= dict.fromkeys(module.children(), reads)
        named = ((name, type(child).__name__) for name, child in module.named_children())
        embeds = any(_EMBEDDING.search(name) and not _RELATIVE.search(f"{name} {of}") for name, of in named)
        if reads and (embeds or (not module._modules and _starts_at_zero(cls))):
            if any("position" in name for name in inspect.signature(cls.forward).parameters):
                needs, first = needs or class_name(module), max(first, _first_position(module))
            else:
                takes_none = takes_none or class_name(module)
        kinds = vars(module).get("rope_type")
        kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            by_length = class_name(module)
            put_around(module, "forward", _by_length)
        elif "Attention" in cls.__name__ and code_has(cls.forward, _ALONG_THE_ROW):
            put_around(module, "forward", _scaled_by_position)
    return takes_none, needs, by_length, has_axes, first, axis


def _starts_at_zero(cls) -> bool:
    """Return whether a layer of this class starts a state where a position is 0."""
    return "position_ids" in parameters_of(cls.forward) and code_has(cls.forward, _STARTS_AT_ZERO)


def _first_position(module) -> int:
    if isinstance(getattr(module, "padding_idx", None), int) and code_has(type(module), _BEHIND_PADDING):
        return module.padding_idx + 1
    number = re.search(_BEHIND_NUMBER, source_of(unwrapped(type(module))))
    return int(number[1]) if number else 0


# --- the positions of a call ---


def with_positions(model, call, args, kwargs):
    """Return the call's arguments, with position_ids if they are missing or count from 0 in a model that starts
    elsewhere.
    """
    call.counting = _found_in(call, model)
    _, needs, _, has_axes, first, _ = call.counting
    if call.outer is None and first and is_tensor(call.position_ids, 2):
        if sequence_group.of(model) is not None:
            raise ValueError(
                f"sequence_group: expected a model whose positions start at 0, got {needs}, which starts at {first}"
            )
        call.position_ids = positions = _raised(call.position_ids, call.padding, first)
    elif call.needs_positions and call.segment_parents is None and _takes_positions(model, needs):
        # Several axes are the model's to make, but those of text, of which the first one says where documents are.
        is_text = call.first_axis == SEQUENCE or (call.first_axis == TIME and call.cu_seqlens is not None)
        positions = _made(model, call, args, kwargs, needs, first) if is_text or not has_axes else None
        if positions is None:
            return args, kwargs
        if call.first_axis == TIME:
            positions = positions.expand(4, *positions.shape)
        call.needs_positions, call.made_positions = False, positions
    else:
        return args, kwargs
    return call.put("position_ids", positions, args, kwargs)


def _takes_positions(model, needs) -> bool:
    parameters = inspect.signature(type(model).forward).parameters
    # Whisper's decoder passes keywords on.
    return "position_ids" in parameters or (bool(needs) and any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def _raised(position_ids, padding, first):
    """Return position_ids, by ``first`` more in each document that starts at 0."""
    of_row = is_tensor(padding, 2) and padding.shape[1] == position_ids.shape[1]
    padding = padding.to(position_ids.device) if of_row else torch.ones_like(position_ids)
    positions = position_ids.expand(padding.shape[0], -1)
    of_start = positions.gather(1, _start_of(padding != 0, positions))
    return positions + first * (of_start == 0)


def _made(model, call, args, kwargs, needs, first):
    """Make position_ids ``[batch, seqlen]`` by cu_seqlens or the numbers of a mask; None where a row has one
    document.
    """
    tokens = tokens_of(args, kwargs)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        return None
    (batch, seqlen), numbers, cache = tokens.shape[:2], call.numbers, kwargs.get(CACHE)
    cached = cached_length(cache) if hasattr(cache, "get_seq_length") else 0
    # Bamba and MiniMax count from 0 again. A static cache has a tensor.
    if (isinstance(cached, torch.Tensor) or cached) and not needs and state_in(cache):
        return torch.arange(seqlen, device=tokens.device)[None] + cached
    if seqlen < 2:
        return None
    is_start = isinstance(cached, int) and cached == 0
    if call.cu_seqlens is not None:
        if not is_start:
            return None
        cu_seqlens, _ = checked_against((call.cu_seqlens, call.cu_seqlens_k), call.padding, None, batch, seqlen)
        made = position_ids_from_cu_seqlens(cu_seqlens, batch * seqlen).view(batch, seqlen)
    elif numbers is None or numbers.shape[0] != batch or numbers.shape[1] < seqlen:
        return None
    elif is_start and call.mask_form == PATTERN and not torch.compiler.is_compiling():
        if numbers.shape[1] != seqlen or not call.documents_of_tokens(tokens, None).several:
            return None
        made = _positions_by(numbers)
    elif needs:  # whose positions in a row of one document, and whether there are several, is not known here
        return None
    else:
        slots = torch.arange(seqlen, device=numbers.device) + cached
        made = _positions_by(numbers)[:, slots.clamp(max=numbers.shape[1] - 1)]
        made = torch.where((numbers > 1).any(), made, slots)
    return made.to(tokens.device) + first


def _positions_by(numbers):
    """Return int64 ``[batch, seqlen]``: each slot's distance to where its document starts; 0 for padding.

    Example:
        >>> _positions_by(torch.tensor([[3, 3, 7, 7, 7, 0]])).tolist()
        [[0, 1, 0, 1, 2, 0]]
    """
    slots = torch.arange(numbers.shape[1], device=numbers.device)
    return (slots - _start_of(numbers)) * (numbers != 0)


def _start_of(padding, position_ids=None):
    """Return int64 ``[batch, seqlen]``: the slot where each slot's document starts, by what first_tokens takes.

    Example:
        >>> _start_of(torch.tensor([[3, 3, 7, 7, 7, 0]])).tolist()
        [[0, 0, 2, 2, 2, 2]]
    """
    real, slots = padding != 0, torch.arange(padding.shape[1], device=padding.device)
    starts = first_tokens(padding, position_ids, *padding.shape, padding.device) | (real & (real.cumsum(1) == 1))
    return (slots * starts).cummax(1).values


def refuse_own_positions(model, call, position_ids, batch) -> None:
    """Raise ValueError if a row of this call has several documents and the model counts through them.

    Where position_ids would help, at the end of the call: documents that reach no attention are the first thing to say.
    """
    takes_none, needs, by_length, has_axes, *_ = call.counting
    if takes_none or (by_length and has_axes):
        why = (
            f"{takes_none} counts positions along the row and takes none"
            if takes_none
            else f"{by_length} scales the angles of all by the longest, whose positions have several axes"
        )
        refuse_where(call.several(batch, position_ids), one_each(call.named_by(), why))
    elif needs and call.needs_positions and call.outer is None and _takes_positions(model, needs):
        message = (
            f"position_ids: expected [{batch}, seqlen] that start in each document as they do alone (at 0, as "
            f"PackedMetadata.position_ids do), got None beside several documents in {call.named_by()}, and {needs} "
            "then counts along the row"
        )
        call.where_several = batch, message


# --- axes of images, with position_ids of one axis ---

# The rest of get_rope_index is sizes of images.
_OF_TEXT = frozenset(("input_ids", "attention_mask", "mm_token_type_ids"))


def with_axes_of_images(model, call, args, kwargs):
    """Return the arguments of a call. position_ids of one axis are of text: with images each document gets the axes
    that the model's get_rope_index gives it in a separate call, as without position_ids.
    """
    if call.has_cache or not hasattr(type(model), "get_rope_index"):
        return args, kwargs
    # Without positions a model counts along the row: mostly these are the same distances within a document.
    axis = _found_in(call, model)[-1]
    of_first_image = axis == SEQUENCE and call.position_ids is None  # of the row: HunYuan numbers its images
    told = (
        is_tensor(call.position_ids, 2) or call.cu_seqlens is not None or (of_first_image and call.numbers is not None)
    )
    if not told or (call.position_ids is not None and call.position_ids.dim() != 2):
        return args, kwargs
    # What get_rope_index would be given
    given = dict(zip(parameters_of(type(model).forward), args, strict=False)) | kwargs
    given = {name: given[name] for name in parameters_of(type(model).get_rope_index) if given.get(name) is not None}
    sizes = sorted(name for name in given if name not in _OF_TEXT)
    if not sizes:
        return args, kwargs
    # Refuse what cannot be asked document by document
    why = _why_no_axes(model, call, given)
    if axis is None or why:
        wanted = f"beside {sizes[0]}, which get_rope_index of {call.name} gives each document"
        if of_first_image:
            batch = len(next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)))
            message = f"{call.named_by()}: expected position_ids of several axes {wanted}, got None{why}"
            refuse_where(call.several(batch), message)
        if call.position_ids is None:
            return args, kwargs
        raise ValueError(
            f"position_ids: expected several axes {wanted} ([4, batch, seqlen], the text's positions in front), got "
            f"{list(call.position_ids.shape)}{why}"
        )
    # Each document becomes a row of a padded batch
    ids = given["input_ids"]
    documents = call.documents_of_tokens(ids, call.position_ids)
    lengths = [length for length in documents.cu_seqlens.diff().tolist() if length]
    indices = documents.indices

    def rows(values):
        values = values.flatten(0, 1) if indices is None else values.flatten(0, 1)[indices]
        return torch.nn.utils.rnn.pad_sequence(values.split(lengths), batch_first=True)

    each = {name: rows(value) if value.shape[:2] == ids.shape else value for name, value in given.items()}
    real = rows(torch.ones_like(ids))
    # Ask, and put the positions back into the packed row
    axes = (_axes_one_by_one if axis == SEQUENCE else _axes_of)(model, {**each, "attention_mask": real})
    if axis == TIME:
        axes = torch.cat([(real.cumsum(1) - 1)[None], axes])
    axes = axes[:, real.bool()]
    if indices is not None:
        axes = axes.new_zeros(len(axes), ids.numel()).index_copy(1, indices, axes)
    return call.put("position_ids", axes.view(-1, *ids.shape), args, kwargs)


def _axes_of(model, given):
    return model.get_rope_index(**given)[0]


def _axes_one_by_one(model, given):
    """Return the axes of a model that numbers images through all rows of a batch, one span of tokens each (HunYuan)."""
    is_image = given["mm_token_type_ids"] == 1
    counts = (is_image[:, 1:] & ~is_image[:, :-1]).sum(1) + is_image[:, 0]
    if int(counts.sum()) != len(given["image_grid_thw"]):
        return _axes_of(model, given)  # which says what is missing
    grids = given["image_grid_thw"].split(counts.tolist())
    rows = {name: value.split(1) for name, value in given.items() if name != "image_grid_thw"}
    each = [{"image_grid_thw": grid, **{name: row[i] for name, row in rows.items()}} for i, grid in enumerate(grids)]
    return torch.cat([_axes_of(model, one) for one in each], 1)


def _why_no_axes(model, call, given) -> str:
    """Return why get_rope_index cannot be asked here, or an empty string."""
    of_method = [*inspect.signature(type(model).get_rope_index).parameters.values()][1:]
    named = [p for p in of_method if p.kind is not p.VAR_KEYWORD]
    made = [p.name for p in named if p.name not in (*parameters_of(type(model).forward), *_OF_TEXT)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if made:
        return f" (its forward makes {made[0]} itself)"
    if missing or "input_ids" not in given:
        return f" without {(missing or ['input_ids'])[0]}"
    return " in a graph of torch.compile" if call.traced else ""


# --- RoPE that scales with the length: dynamic NTK, longrope ---


def _by_length(rotary, stock, x, position_ids, *args, **kwargs):
    """Replace the forward of such an embedding: each document gets the frequencies of its length.

    stock: the forward that was in the instance, or None.
    """
    run = functools.partial(type(rotary).forward, rotary, x) if stock is None else functools.partial(stock, x)
    kind, config = rotary.rope_type, rotary.config
    parameters, layer_type = config.rope_parameters, args[0] if args else kwargs.get("layer_type")
    if isinstance(kind, dict):
        kind, parameters = kind[layer_type], parameters[layer_type]
    is_long = kind == "longrope"
    if config._attn_implementation not in NAMES or position_ids.dim() != 2 or not (is_long or "dynamic" in kind):
        return run(position_ids, *args, **kwargs)

    def of(slots):
        """Return the tables as if other slots had position 0. Theirs are not used."""
        return run(position_ids.masked_fill(~slots, 0), *args, **kwargs)

    lengths = _lengths_of(position_ids)
    if is_long:  # two sets of frequencies
        is_far = lengths > parameters["original_max_position_embeddings"]
        return _chosen(is_far, run(position_ids, *args, **kwargs), of(~is_far))
    # A set for each length above the training's. transformers keeps the last one, until a row is short enough.
    lengths = lengths.clamp(min=rotary.original_max_seq_len)
    of(lengths < 0)
    tables = None
    for length in lengths.unique().tolist():
        is_it = lengths == length
        tables = of(is_it) if tables is None else _chosen(is_it, of(is_it), tables)
    return tables


def _lengths_of(position_ids):
    """Return int64 ``[batch, seqlen]``: one more than the last position of each slot's document.

    Example:
        >>> _lengths_of(torch.tensor([[0, 1, 0, 1, 2]])).tolist()
        [[2, 2, 3, 3, 3]]
    """
    (batch, seqlen), device = position_ids.shape, position_ids.device
    ends = first_tokens(None, position_ids, batch, seqlen, device).roll(-1, 1)
    ends[:, -1:] = True
    slots = torch.arange(seqlen, device=device).where(ends, seqlen)
    return position_ids.gather(1, slots.flip(1).cummin(1).values.flip(1)) + 1


def _chosen(slots, tables, others):
    """Return cos and sin, or one complex table: ``tables`` in these slots, ``others`` elsewhere."""
    if isinstance(tables, torch.Tensor):
        return torch.where(slots[..., None], tables, others)
    return tuple(torch.where(slots[..., None], *pair) for pair in zip(tables, others, strict=True))


# --- attention that scales its queries by their place in the row: Llama 4's layers without RoPE ---


class _CountedFrom:
    """In place of a layer's empty KV cache, or of None: as many tokens are in it as make a slot's place its
    position.
    """

    def __init__(self, cache, offsets):
        self.cache, self.offsets = cache, offsets

    def get_seq_length(self, layer_idx=0):
        return self.offsets

    def update(self, key, value, *args, **kwargs):
        return (key, value) if self.cache is None else self.cache.update(key, value, *args, **kwargs)


def _scaled_by_position(attention, stock, *args, **kwargs):
    """Replace the forward of such a layer. Its MaskPattern knows the positions; another mask does not."""
    run = functools.partial(type(attention).forward, attention) if stock is None else stock
    mask = kwargs.get("attention_mask")
    positions, of_keys = getattr(mask, "position_ids", None), "past_key_values" if CACHE not in kwargs else CACHE
    if positions is None or getattr(attention, "use_rope", False):
        return run(*args, **kwargs)
    if positions.shape[0] > 1:
        if positions.shape[1] >= attention.floor_scale:
            refuse_where(
                several_in(positions, mask.padding),
                f"position_ids: expected one row, or several shorter than {attention.floor_scale}, got "
                f"{list(positions.shape)} with several documents in a row, which {class_name(attention)} scales by "
                "their place in it",
            )
        return run(*args, **kwargs)
    offsets = positions[0] - torch.arange(positions.shape[1], device=positions.device)
    return run(*args, **{**kwargs, of_keys: _CountedFrom(kwargs.get(of_keys), offsets)})
