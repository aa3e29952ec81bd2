"""One call of a model under a name of ours: its arguments, from its start to its end, for masks and layers below it.

transformers makes many masks without position_ids. The call knows them; it also records whether its documents have
reached an attention. A document argument that nothing consumed raises after the forward.
"""

import inspect
import operator
import re
import threading
from typing import NamedTuple

import torch

from packing_ops._runtime.batch_cache import check_same, kept_with
from packing_ops.integrations._patching import PACKS_ROWS
from packing_ops.integrations.transformers import sequence_group, versions
from packing_ops.integrations.transformers.documents import (
    TIME,
    cached_cast,
    checked_against,
    find_documents,
    first_axis,
    is_tensor,
    mask_of_row,
    one_each,
    positions_from_axes,
    refuse_where,
    rows_of,
    several_in,
)
from packing_ops.integrations.transformers.versions import CACHE, code_has, constant, parameters_of, reads_text
from packing_ops.keys import cached_paths, positions_of_paths

NAMES: set[str] = set()  # attn_implementations that register() made
REQUESTS = "write_index"  # a keyword that only transformers' continuous batching gives: where new keys go in its cache
LAST_FORWARD = "_packing_ops_last_forward"  # in a model: what its last call saw, for info
BALANCE = "_packing_ops_balance"  # in a model whose balance loss is ours, see fused_loss
GUARD = "_packing_ops_guard"  # in a model, for while its attention is not ours: see other_attention.py

# The forms of a mask. Only our attention reads a MaskPattern. A model that supports neither FlashAttention nor
# FlexAttention reads masks itself, or has a special attention. It gets a tensor: bool, as for SDPA, or additive, as
# for eager attention, where it does not support SDPA.
PATTERN, BOOL, ADDITIVE = "pattern", "bool", "additive"
_READERS = ("transformers.models.doge.",)  # supports FlexAttention, and reads every other mask itself
# Models in which tokens of neighbouring documents also mix outside attention: convolutions, trigrams, compressed keys,
# patches of bytes; or in it, by a mask that is made for one query, or one protein for a row (Evolla).
_MIXERS = frozenset({
    "blt", "canine", "convbert", "deepseek_v4", "evolla", "inkling2_loop_text", "inkling2_text", "inkling_text",
    "mobilebert", "nystromformer", "sam3_lite_text_text_model", "visual_bert",
})  # fmt: skip
# These give position_ids of zeros, and embed the time step instead.
OTHER_POSITIONS = frozenset(("decision_transformer",))


class PackedCall:
    """One call of a model under a name of ours. Only it knows where the documents of its rows are.

    Masks, attention and layers with a state ask it (see documents_of); it looks once for what they ask.

    position_ids, cu_seqlens, cu_seqlens_k: as the model was given them.
    numbers: each token's document, by its mask or an outer call's; None where neither can number.
    padding: the mask with ones for numbers. mask: the numbers, or the mask without numbers.
    mask_form: the form of the model's masks. first_axis: see documents.py.
    unconsumed: document arguments that may give a row several, and that have reached no mask, attention or layer with a
        state yet: "position_ids", which includes cu_seqlens, "attention_mask", "segment_parents".
    answers: [(batch, seqlen), what was asked for, its documents], shared with the calls inside of this one.
    rows: (batch, seqlen), of rows in which layers with a state have looked for documents; row_documents: what they
        found, None for one in each row; see stateful.
    layers: those that got row_documents, see Layers of checkpoints.py; None where none can be looked at.
    by_states, by_masks: whether its layers with a state get the documents, and whether transformers' masks may keep
        them apart, beside another attention: see other_attention.py.
    takes_positions: whether an attention or a mask that gets position_ids keeps documents apart.
    unread: whether its layers got a mask that says the documents, and none has called our attention since.
    why: what an error says of documents that nothing keeps apart.
    """

    def __init__(self, model, args, kwargs, outer, sequence):
        self.name, self.outer = type(model).__name__, outer
        self.outers = () if outer is None else (outer, *outer.outers)
        self.mask_form, self.indices, model_type, self.first_axis, self.shifts, reads = _traits_of(
            type(model), type(model.config)
        )
        positions, mask = self.given("position_ids", args, kwargs), self.given("attention_mask", args, kwargs)
        if outer is None and reads:
            check_form(positions, mask)
        self.position_ids = None if model_type in OTHER_POSITIONS else positions
        self.made_positions = None if outer is None else outer.made_positions  # by this package: they tell no documents
        self.needs_positions = positions is None  # of models that otherwise count along the row
        self.where_several = None  # (batch, what to say at the end where a row has several documents), see documents.py
        self.cu_seqlens, self.cu_seqlens_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        if REQUESTS in kwargs:  # a dict: the cache of a layer knows which
            self.cu_seqlens_k = None
        if self.cu_seqlens is None:  # one is for both
            self.cu_seqlens = self.cu_seqlens_k
        # For what runs again in backward, see checkpoints.py
        self.config, self.layers = model.config, None
        self.given_documents = {name: kwargs.get(name) for name in _READ_AGAIN}
        # What is kept with the model, see _walks.py, and what in it counts along the row, see positions.py.
        self.walks = self.counting = None
        self.on_ranks = sequence is not None
        if sequence is not None:  # cu_seqlens are of a row of which this rank has a part
            if BALANCE in model.__dict__:
                raise ValueError("balance_loss: expected False beside a sequence_group: documents lie on several ranks")
            sequence.check_call(self.name, positions, mask, kwargs)
            self.cu_seqlens = self.cu_seqlens_k = None
        self.segment_parents = kwargs.get("segment_parents") if reads else None  # a vision tower has other rows
        if self.segment_parents is not None:  # positions are depths in the tree, and tell no documents
            self.position_ids = None
            if outer is None or outer.segment_parents is None:
                self._check_tree(positions, mask, self.given("labels", args, kwargs), sequence)
        # Whether masks of each query and key are made, which attention gets.
        self.masks_made, mask = not (mask is None or is_tensor(mask, 2)), mask_of_row(mask)
        self.numbers = numbers_of(mask, outer)
        # One op: a graph that breaks in a layer with a state knows no result of two as the same tensor.
        self.padding = mask.sign() if mask is not None and self.numbers is mask else mask
        self.mask = mask if self.numbers is None else self.numbers
        self.mixes = mixes_tokens(model.config)
        self.by_states, self.by_masks, self.takes_positions = True, False, not self.mixes
        self.why = f"{self.name} {'mixes tokens beside its attention' if self.mixes else 'passes them to no attention'}"
        has_to_arrive = {
            # A 4-D mask, or a dict of masks made by an outer model, already says which tokens may attend to each other.
            # Attention over ranks reads cu_seq_lens_q of the whole row, or raises.
            "position_ids": self.mixes or not (self.on_ranks or self.masks_made),
            "attention_mask": self.numbers is not None,
            "segment_parents": self.segment_parents is not None,
        }
        self.unconsumed = {name for name, has_to in has_to_arrive.items() if has_to}
        self.answers = [] if outer is None else outer.answers
        self.seen = self.of_axes = self.rows = self.row_documents = self.mask_of_tokens = None
        self.cache = self.saw_state = None  # the KV cache that check_cache has seen; whether states/cached.py has, too
        self.checked = None  # (position_ids that cu_seqlens were compared with, these with the comparison before them)
        # Whether this call is inside a graph, and whether a backward may follow.
        self.traced, self.trains = torch.compiler.is_compiling(), torch.is_grad_enabled()
        self.balance, self.num_tokens = model.__dict__.get(BALANCE), kwargs.get("num_tokens")  # see fused_loss
        self.has_cache = kwargs.get(CACHE) is not None or REQUESTS in kwargs
        # Of its masks (causal, window), None for more than that; see refuse_dropped_mask
        self.masks, self.looked_at_parts, self.unread = set(), False, False

    def _check_tree(self, position_ids, mask, labels, sequence):
        """Raise ValueError for what has no meaning with segment_parents, and for positions that are not depths."""
        for name, value in (("attention_mask", mask), ("labels", labels), ("sequence_group", sequence)):
            if value is not None:
                why = " (see prefix_token_logps: a row may have several next tokens)" if name == "labels" else ""
                raise ValueError(f"{name}: expected None beside segment_parents{why}, got {type(value).__name__}")
        if position_ids is None:
            raise ValueError(
                "position_ids: expected each row's distance from its root beside segment_parents "
                "(PrefixTree.position_ids), got None"
            )
        if self.cu_seqlens is None:
            raise ValueError("cu_seq_lens_q: expected the segments of the tree beside segment_parents, got None")
        if not is_tensor(position_ids, 2) or position_ids.shape[0] != 1:
            return  # axes of images are no depths
        total = position_ids.shape[1]
        paths = cached_paths(self.cu_seqlens, self.segment_parents, total, None)
        depths = kept_with(paths[:2], ("depths", total), lambda: positions_of_paths(paths, total))
        check_same(position_ids[0].long().to(depths.device), depths, "depths")

    def given(self, name, args, kwargs):
        """Return an argument of the model, by its name or its place: "position_ids", "attention_mask", "labels"."""
        index = self.indices[name]
        return args[index] if kwargs.get(name) is None and index < len(args) else kwargs.get(name)

    def put(self, name, value, args, kwargs):
        """Return the arguments with another value for it, in its place."""
        index = self.indices[name]
        if index < len(args) and kwargs.get(name) is None:
            return (*args[:index], value, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def documents_of_tokens(self, tokens, position_ids):
        """Return the documents of the model's tokens ``[batch, seqlen, ...]``, by all that it was given."""
        of_tokens = is_tensor(self.mask, 2) and self.mask.shape == tokens.shape[:2]
        mask = cached_cast(self.mask.dtype, self.mask, tokens.device) if of_tokens else None
        cu_seqlens = self.cu_seqlens, self.cu_seqlens_k
        return self.documents(tokens[:, None], cu_seqlens, mask, position_ids).on(tokens.device)

    def documents(self, query, cu_seqlens, padding, position_ids):
        """Return find_documents' answer, from an outer call if it has one: models pass arguments on."""
        given = self.has_positions()
        if not given and cu_seqlens[0] is None and cu_seqlens[1] is None:
            position_ids = None  # made by the model, or by numbers: they tell no more
        shape, asked = (query.shape[0], query.shape[2]), (*cu_seqlens, padding, position_ids)
        same = (found for of, before, found in self.answers if of == shape and all(map(operator.is_, before, asked)))
        documents = next(same, None)
        if documents is None:
            documents = find_documents(query, cu_seqlens, padding, position_ids)
            self.answers.append((shape, asked, documents))
        if self.traced or self.seen is not None:
            return documents
        # By what they were found. Positions that a model makes tell no documents.
        by = "rows"
        if cu_seqlens[0] is not None or cu_seqlens[1] is not None:
            by = "cu_seq_lens_q"
        elif given:
            by = "position_ids"
        elif padding is not None and padding.dtype != torch.bool:
            by = "attention_mask"
        for call in (self, *self.outers):  # for info; no tensor is kept
            call.seen = call.seen or LastForward(shape[0], documents.cu_seqlens.numel() - 1, by)
        return documents

    def says_others_than(self, outer) -> bool:
        """Return whether it was given other cu_seqlens or positions of tokens than an outer call that has them."""
        return any(
            isinstance(of, torch.Tensor) and mine is not of and is_tensor(mine, of.dim())
            for mine, of in ((self.cu_seqlens, outer.cu_seqlens), (self.position_ids, outer.position_ids))
        )

    def has_rows_of(self, outer, rows) -> bool:
        """Return whether its (batch, seqlen) rows are those in which an outer call has found documents."""
        if outer is None or outer.rows != rows or self.says_others_than(outer):
            return False
        if outer.row_documents is not None and outer.row_documents.several is not False:
            return True
        # Padding alone, or one document in each row: nothing that this call was given may show others.
        shows = is_tensor(self.position_ids, 2) and self.position_ids is not outer.made_positions
        return (self.traced or outer.row_documents is not None) and not (shows and outer.position_ids is None)

    def has_positions(self) -> bool:
        """Return whether position_ids were given that may show documents."""
        given = [call.position_ids for call in (self, *self.outers)]
        return any(each is not None and each is not self.made_positions for each in given)

    def row_positions(self, batch, seqlen):
        """Return position_ids ``[batch or 1, seqlen]`` that restart with each document, or None."""
        positions = self.position_ids
        if not is_tensor(positions, 3):
            return positions if is_tensor(positions, 2) else None
        if tuple(positions.shape[1:]) not in ((batch, seqlen), (1, seqlen)):
            return None
        if self.of_axes is None:  # one tensor for masks and layers with a state, which look at its values once
            if positions.shape[0] > 3:  # of text or a sequence, in front of the other axes
                self.of_axes = positions[0]
            # With cu_seq_lens_q a model that makes its axes itself counts them along the row.
            elif self.first_axis == TIME and positions.shape[0] == 3 and self.cu_seqlens is None:
                self.of_axes = positions_from_axes(positions, self.padding)
        return self.of_axes

    def mark_consumed(self, numbers, *positions):
        """Note that a mask or an attention has used these numbers and positions, for outer calls too."""
        has_positions = any(each is not None for each in positions)
        for call in (self, *self.outers):
            if numbers is not None and call.numbers is numbers and not call.mixes:
                call.unconsumed.discard("attention_mask")
            # A call without them, such as a vision tower's, says nothing of its outer calls'.
            has_positions = has_positions and not (call.position_ids is None and call.cu_seqlens is None)
            if has_positions and call.takes_positions:
                call.unconsumed.discard("position_ids")

    def mark_consumed_by(self, found_by, cu_seqlens):
        """Note that an attention has used the tree or the requests of this call, for outer calls too."""
        self.mark_consumed(None, cu_seqlens)
        for call in (self, *self.outers):
            call.unconsumed.discard("segment_parents")
            call.seen = LastForward(1, cu_seqlens.numel() - 1, found_by)  # also where a mask has found cu_seqlens

    def checked_positions(self, position_ids, batch):
        """Return position_ids of a tensor mask. Raises ValueError if cu_seq_lens_q, unseen by layers, disagree."""
        if position_ids is None or self.cu_seqlens is None or position_ids.shape[0] not in (1, batch):
            return position_ids
        if self.segment_parents is not None:  # depths in a tree, which attention refuses with such a mask
            return position_ids
        if self.checked is None or self.checked[0] is not position_ids:  # masks of other layers have the same ones
            cu_seqlens = self.cu_seqlens, self.cu_seqlens_k
            _, positions = checked_against(cu_seqlens, None, position_ids, batch, position_ids.shape[1])
            self.checked = position_ids, positions.to(position_ids.device)
        return self.checked[1]

    def refuse_unconsumed(self, args, kwargs):
        """Raise ValueError if several documents reached no attention: they would have attended to each other."""
        if "segment_parents" in self.unconsumed:
            raise ValueError(
                f"segment_parents: expected a model that passes them to its attention, got {self.name}; give it the "
                "samples as packed documents"
            )
        if "position_ids" in self.unconsumed:
            if isinstance(self.cu_seqlens, torch.Tensor) and self.cu_seqlens.numel() > 2:
                (batch, seqlen), starts = rows_of(args, kwargs), self.cu_seqlens.flatten()
                refuse_where(  # in one row the shape tells, also a graph
                    (self.traced and batch == 1)
                    or several_in(cu_seqlens=starts, batch=batch) | (starts[-1] != batch * seqlen),
                    one_each("cu_seq_lens_q", self.why),
                )
            has_axes = is_tensor(self.position_ids, 3)
            positions = self.row_positions(*self.position_ids.shape[1:]) if has_axes else self.position_ids
            refuse_where(several_in(positions, self.padding), one_each("position_ids", self.why))
        if "attention_mask" in self.unconsumed:
            refuse_where(several_in(numbers=self.numbers), one_each("attention_mask", self.why))
        # Layers with a state may keep them apart where there is no attention. What a graph has called is not known.
        by_attention = self.row_documents is None or self.row_documents.has_attention
        if self.unread and by_attention and not versions.graphs and self.seen and self.seen.documents > self.seen.rows:
            raise ValueError(one_each(self.named_by(), f"no layer of {self.name} calls packing_ops' attention"))
        if self.where_several is None:
            return
        # Where an attention found the documents, the host knows whether there are several.
        batch, message = self.where_several
        known = [
            found.several
            for _, (_, _, padding, _), found in self.answers
            if padding is self.numbers and found.several is not None
        ]
        refuse_where(known[0] if known else self.several(batch, self.position_ids), message)

    def several(self, batch, position_ids=None):
        """Return whether a row has several documents: bool ``[]``, None if it is unknown. Nothing waits for it."""
        return several_in(position_ids, self.padding, self.cu_seqlens, self.numbers, batch)

    def named_by(self):
        """Return the argument that says where the documents are."""
        # The outer calls first: what they pass on to an inner model may be less.
        for each in (*reversed(self.outers), self):
            if each.position_ids is not None or each.cu_seqlens is not None:
                return "cu_seq_lens_q" if each.position_ids is None else "position_ids"
        return "attention_mask"


def check_form(positions, mask=None) -> None:
    """Raise TypeError for a mask that is none, which some layers would drop; ValueError for 1-D positions, which would
    fit tables of RoPE, and show no documents.
    """
    if not (mask is None or isinstance(mask, dict) or hasattr(mask, "dim") or hasattr(mask, "to")):  # of a BlockMask
        raise TypeError(f"attention_mask: expected a tensor, got {type(mask).__name__}")
    if positions is not None and not (is_tensor(positions, 2) or is_tensor(positions, 3)):
        got = list(positions.shape) if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise ValueError(f"position_ids: expected a tensor [1 or batch, seqlen], or one of several axes, got {got}")


class LastForward(NamedTuple):
    """What a model's last call saw. Of a graph nothing is kept."""

    rows: int
    documents: int
    found_by: str  # an argument of the model; cache: of continuous batching; "rows" if no argument was given


def last_forward(model) -> LastForward | None:
    """Return what a model's last call saw; None before the first, and where only masks hold documents apart."""
    return model.__dict__.get(LAST_FORWARD)


def numbers_of(mask, call) -> torch.Tensor | None:
    """Return the document numbers of this 2-D mask, or the mask; None for one that cannot number."""
    if not is_tensor(mask, 2) or mask.dtype == torch.bool:
        return None
    # GPT-2 views it in another shape. A graph does not know what is viewed: there its numbers are refused.
    viewed = None if torch.compiler.is_compiling() else mask._base
    if viewed is not None and (viewed.shape, viewed.stride()) == (mask.shape, mask.stride()):
        mask = viewed
    for each in () if call is None else (call, *call.outers):
        if each.padding is mask and each.numbers is not None:
            return each.numbers
    return mask


def mixes_tokens(config) -> bool:
    """Return whether tokens of neighbouring documents mix outside attention."""
    # token_dropout of ESM scales a row by how many of all its tokens are masked.
    return config.model_type in _MIXERS or bool(getattr(config, "token_dropout", False))


def current() -> PackedCall | None:
    """Return the innermost call that runs in this thread; None without one, or if model.forward was called directly."""
    return now.call


def call_of_layers() -> PackedCall | None:
    """Return what a layer may ask: the call that runs; in a graph only one that began in it. A layer that is
    compiled without its model runs again in the backward of a checkpoint, when the call is over: it must find the
    same then, or another graph is made.
    """
    return now.begun if torch.compiler.is_compiling() else now.call


def watched(other, begin, end, stock):
    """Wrap PreTrainedModel.__call__ in a PackedCall. ``other``: the class of a call whose attention is not ours.
    ``begin(model, call, args, kwargs)``: the model's arguments. ``end(model, call, kwargs, outputs)`` looks at what it
    returned.
    """

    def __call__(self, *args, **kwargs):
        if args and not (args[0] is None or isinstance(args[0], torch.Tensor)):
            return stock(self, *args, **kwargs)  # a method of a trainer, which replaces forward while it runs
        ours = self.config._attn_implementation in NAMES
        if not ours and GUARD not in self.__dict__:
            if "position_ids" in kwargs and (outer := current()) is not None:
                outer.mark_consumed(None, kwargs["position_ids"])  # by an implementation that finds documents itself
            return stock(self, *args, **kwargs)
        check_keywords(type(self), kwargs)
        # Its forward packs the rows of this call, and makes another one of them.
        if (packs := self.__dict__.get(PACKS_ROWS)) and packs(args, kwargs):
            return stock(self, *args, **kwargs)

        call = (PackedCall if ours else other)(self, args, kwargs, now.call, sequence_group.of(self))
        given = call.given("attention_mask", args, kwargs)
        if call.numbers is not None and not (call.padding is given or isinstance(given, dict)):
            args, kwargs = call.put("attention_mask", call.padding, args, kwargs)  # models expect 0 and 1
        begun, now.begun = now.begun, call if call.traced else None
        now.call, documents = call, now.row_documents
        try:
            args, kwargs = begin(self, call, args, kwargs)
            now.row_documents = call.row_documents or (False if call.by_states else None)
            outputs = stock(self, *args, **kwargs)
        finally:
            now.call, now.begun, now.row_documents = call.outer, begun, documents
            now.mask_arguments = None

        # Documents that nothing kept apart.
        call.refuse_unconsumed(args, kwargs)
        if call.seen is not None:
            self.__dict__[LAST_FORWARD] = call.seen
        end(self, call, kwargs, outputs)
        return outputs

    return __call__


# As older models and code from the Hub shift labels in the code of their forward.
SHIFT = r"labels\[(\.\.\.|:), 1:\]"


@constant
def _traits_of(cls, config_cls):
    """Return (form of its masks, indices of position_ids, attention_mask and labels among its arguments, model_type,
    first_axis, whether its loss takes the label of the next token, whether it reads text).
    """
    known = ("position_ids", "attention_mask", "labels")
    # Behind all others if it is missing: torch.compile has no empty dict from here.
    names = (*parameters_of(cls.forward), *known)
    indices = {name: names.index(name) for name in known}
    form = BOOL if cls._supports_sdpa else ADDITIVE
    if cls._supports_flash_attn or cls._supports_flex_attn:
        form = form if any(base.__module__.startswith(_READERS) for base in cls.__mro__) else PATTERN
    reads, code = reads_text(cls), getattr(inspect.unwrap(cls.forward), "__code__", None)
    shifts = reads and ("loss_function" in getattr(code, "co_names", ()) or code_has(cls.forward, SHIFT))
    return form, indices, config_cls.model_type, first_axis(cls), shifts, reads


# --- the thread ---


class _Now(threading.local):
    """What runs in this thread, in graphs too.

    mask_arguments, preparing: see masks.py; fused: see fused_loss.py.
    row_documents: of layers with a state, see stateful.py. False: each row is one; None: nothing says.

    begun: the call, where it is traced: see call_of_layers. checkpoint, frames: see checkpoints.py.
    """

    __slots__ = ()  # a dict of all threads would keep a traced call, and its model: torch.compile writes to it

    def __init__(self):  # not of the class, where torch.compile would read them in place of the thread's
        self.call = self.begun = self.mask_arguments = self.fused = self.row_documents = self.preparing = None
        self.checkpoint, self.frames = None, ()


now = _Now()


# --- keywords that are refused: those that describe documents under a name that transformers does not read ---

_CU_SEQLENS = ("cu_seq_lens_q", "cu_seq_lens_k")
_READ_AGAIN = (*_CU_SEQLENS, "segment_parents")  # by attention that runs again
_NEAR = re.compile(
    r"cu(m|mulative)?_?seq(uence)?s?_?len(gth)?s?(_?(q|k|kv|padded))*"
    r"|((packed|sub)_?)?(seq|sequence|doc|document)s?_?len(gth)?s(_?(q|k|kv))?"
    r"|seq_idx"
)
_BESIDE = ("packed_seq_lengths", "seq_idx")  # collators give these together with what attention reads


def check_keywords(cls: type, kwargs: dict) -> None:
    """Raise TypeError for near misses of cu_seq_lens_q, which the model would drop: documents would mix."""
    for name in _CU_SEQLENS:
        if not isinstance(kwargs.get(name), (torch.Tensor, type(None))) and REQUESTS not in kwargs:
            raise ValueError(f"{name}: expected an int32 tensor [num_documents + 1], got {kwargs[name]!r}")
    for name in _near_misses(cls, tuple(kwargs)):
        beside = kwargs.get("position_ids") is not None or kwargs.get("cu_seq_lens_q") is not None
        if kwargs[name] is None or (name in _BESIDE and beside):
            continue
        raise TypeError(
            f"{name}: expected cu_seq_lens_q and cu_seq_lens_k, int32 [num_documents + 1], which attention reads "
            f"(PackedMetadata.from_lengths(lengths).to_transformers() makes them), got {name}, which "
            f"{cls.__name__} would drop"
        )


@constant
def _near_misses(cls, names):
    """Return near misses among ``names`` that a language model's forward does not declare."""
    if not reads_text(cls):
        return ()
    known = {*_CU_SEQLENS, *parameters_of(cls.forward)}
    return tuple(name for name in names if name not in known and _NEAR.fullmatch(name.lower()))
