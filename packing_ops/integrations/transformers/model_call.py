"""The model call that runs in this thread, and its arguments: transformers makes many masks without position_ids.

The call also records whether its documents have reached an attention: if none has, it is refused afterwards.
"""

import inspect

import torch

from packing_ops._arguments import check_cu_seqlens
from packing_ops._checks import checked_documents
from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers import running, sequence_group, stateful_layers
from packing_ops.integrations.transformers.axes import first_axis
from packing_ops.integrations.transformers.document_checks import (
    NUMBERS,
    argument,
    is_tensor,
    numbers_of,
    positions_restart,
    refuse_where,
)
from packing_ops.integrations.transformers.imports import PreTrainedModel, not_causal
from packing_ops.integrations.transformers.keywords import check_keywords

NAMES: set[str] = set()  # attn_implementations that register() made
GUARD = "_packing_ops_guard"  # in a model that keeps its attention: why, see attn_implementation.guard

# The forms of a mask. Only our attention reads a MaskPattern. A model that supports neither FlashAttention nor
# FlexAttention reads masks itself, or has an attention of its own. It gets a tensor: bool, as for SDPA, or additive, as
# for eager attention, where it does not support SDPA.
PATTERN, BOOL, ADDITIVE = "pattern", "bool", "additive"
_READERS = ("transformers.models.doge.",)  # supports FlexAttention, and reads every other mask itself
# Models in which tokens of neighbouring documents also mix outside attention: convolutions, trigrams, compressed keys,
# patches of bytes.
_MIXERS = frozenset({
    "blt", "canine", "convbert", "deepseek_v4", "inkling2_loop_text", "inkling2_text", "inkling_text", "mobilebert", "nystromformer",
    "sam3_lite_text_text_model",
})  # fmt: skip
# These give position_ids of zeros, and embed the time step instead.
OTHER_POSITIONS = frozenset(("decision_transformer",))


class ModelCall:
    """One call of a model under a name of ours, and what says where its documents are."""

    def __init__(self, model, args, kwargs, outer):
        self.name = type(model).__name__
        self.mask_form, indices, model_type, self.first_axis = _habits_of(type(model), type(model.config))
        self.position_ids = None if model_type in OTHER_POSITIONS else argument("position_ids", indices, args, kwargs)
        self.cu_seqlens, self.cu_seqlens_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        sequence = sequence_group.of(model)
        if sequence is not None:  # cu_seqlens are of a row of which this rank has a part
            sequence.check_call(self.name, indices, args, kwargs)
            self.cu_seqlens = self.cu_seqlens_k = None
        self.cache = None  # the KV cache that check_cache has seen in this call
        self.positions_of_axes = None  # see axes
        self.checked = None  # (position_ids that cu_seqlens were compared with, result of check_positions)
        self.traced = torch.compiler.is_compiling()  # this call is inside a graph
        self.padding, self.outer = argument("attention_mask", indices, args, kwargs), outer
        self.numbers = numbers_of(self.padding)
        self.mixes = mixes_tokens(model.config)
        self.guard = guard_of(model)
        # A 4-D mask, or a dict of masks made by an outer model, already says which tokens may attend to each other.
        whole = self.padding is not None and not is_tensor(self.padding, 2)
        self.used = whole and not self.mixes
        self.numbers_used = self.numbers is None
        self.seq_idx = None  # see stateful_layers
        self.has_attention, self.masks, self.looked_at_parts = True, set(), False  # see masks.note, gathered_rows

    def mark_used(self):
        """The position_ids or cu_seq_lens_q of this call have reached a mask or an attention; so have the outer calls'.

        A call without either, such as a vision tower's, marks neither itself nor the outer calls.
        """
        call = self
        while call is not None and not (call.position_ids is None and call.cu_seqlens is None):
            call.used = not call.mixes and call.guard is None
            call = call.outer

    def check_positions(self, position_ids, batch):
        """(position_ids, cu_seq_lens_q), checked; None for the latter where there was nothing to check.

        ValueError where cu_seq_lens_q give other documents than the position_ids of a mask: layers may see the mask
        alone.
        """
        cu_q, cu_k = self.cu_seqlens, self.cu_seqlens_k
        if not isinstance(cu_q, torch.Tensor) or position_ids.shape[0] not in (1, batch):
            return position_ids, None
        if self.checked is None or self.checked[0] is not position_ids:  # masks of other layers come with the same ones
            cu_k = cu_k if isinstance(cu_k, torch.Tensor) else cu_q
            check_cu_seqlens(cu_q, "cu_seq_lens_q")
            check_cu_seqlens(cu_k, "cu_seq_lens_k")
            positions, length = position_ids.to(cu_q.device), position_ids.shape[1]
            cu_q, positions = checked_documents(cu_q, cu_k.to(cu_q.device), None, positions, batch, length)
            self.checked = position_ids, (positions.to(position_ids.device), cu_q)
        return self.checked[1]

    def mark_numbers_used(self, numbers):
        """These document numbers have reached a mask: they are this call's, or an outer call's that passed them on."""
        call = self
        while call is not None and numbers is not None:
            call.numbers_used |= call.numbers is numbers and not call.mixes
            call = call.outer

    def refuse_if_lost(self):
        """ValueError if several documents reached no attention: they would have attended to each other.

        A graph cannot read values on the host: it asserts on the device.
        """
        if not self.used and isinstance(self.cu_seqlens, torch.Tensor) and self.cu_seqlens.numel() > 2:
            raise ValueError(self._refusal("cu_seq_lens_q"))
        if not self.used:
            refuse_where(positions_restart(self.position_ids, self.padding), self._refusal("position_ids"))
        if not self.numbers_used:
            refuse_where((self.numbers > 1).any(), self._refusal("attention_mask"))

    def _refusal(self, lost):
        why = "mixes tokens beside its attention" if self.mixes else "passes them to no attention"
        if self.guard is not None:
            why = f"keeps its attention: {self.guard.why}"
        return (
            f"{lost}: expected one document in each row, got several, and {self.name} {why}; give each document a row of "
            "its own (no packing, padding on the right)"
        )


def mixes_tokens(config) -> bool:
    """Whether tokens of neighbouring documents mix outside attention."""
    # token_dropout of ESM scales a row by how many of all its tokens are masked.
    return config.model_type in _MIXERS or bool(getattr(config, "token_dropout", False))


def guard_of(model):
    """Of a model that apply_packing_ops left with its attention, else None."""
    return None if model.config._attn_implementation in NAMES else model.__dict__.get(GUARD)


def current() -> ModelCall | None:
    """The innermost call that runs in this thread; None if none does, or if model.forward was called directly."""
    return running.here().call


def call_to_mark() -> ModelCall | None:
    """The call whose documents an attention or a mask uses. None in a layer compiled alone: the mask, made outside of
    it, has marked them."""
    call = current()
    return None if call is None or (torch.compiler.is_compiling() and not call.traced) else call


def has_masked(cu_seqlens) -> bool:
    """Whether the model got masks of this call's documents as tensors, by position_ids that agree with cu_seqlens."""
    call = current()
    return call is not None and call.mask_form != PATTERN and call.checked is not None and call.cu_seqlens is cu_seqlens


def leave(carrier) -> None:
    """Keeps a carrier for the mask function: create_chunked_causal_mask reads the 2-D mask itself, so it cannot get one."""
    running.here().chunked = carrier


def collect(padding):
    """The carrier that was kept for this 2-D mask, or None."""
    now = running.here()
    carrier, now.chunked = now.chunked, None
    return carrier if carrier is not None and carrier.padding is padding else None


def watch_calls() -> bool:
    """Wraps PreTrainedModel.__call__, once. False where transformers defines a __call__ itself: it is left alone.

    What another library put over an earlier wrapper of ours is wrapped again.
    """
    inherited = PreTrainedModel.__call__ is torch.nn.Module.__call__
    if not (_PATCH.pinned or _PATCH.covered or inherited):
        return False
    if not _PATCH.pinned:
        _PATCH.apply()
    return True


def unwatch_calls() -> None:
    _PATCH.revert()


def _watched(stock):
    def __call__(self, *args, **kwargs):
        ours = self.config._attn_implementation in NAMES
        if not ours and GUARD not in self.__dict__:
            if "position_ids" in kwargs and (outer := current()) is not None:
                outer.mark_used()  # by another implementation, which finds documents in its own way
            return stock(self, *args, **kwargs)
        if ours and (why := not_causal(self)):
            raise NotImplementedError(
                f"attn_implementation: expected 'eager', got {self.config._attn_implementation!r}; {why}"
            )
        check_keywords(type(self), kwargs)
        args, kwargs = _with_ones(self, args, kwargs)
        now = running.here()
        outer = now.call
        call = now.call = running.traced.call = ModelCall(self, args, kwargs, outer)  # what it calls may be compiled
        try:
            if call.guard is None or call.guard.has_state:
                stateful_layers.find_documents_of(self, call, args, kwargs)
            outputs = stock(self, *args, **kwargs)
        finally:
            now.call = running.traced.call = outer
        call.refuse_if_lost()
        return outputs

    return __call__


_PATCH = Patch(PreTrainedModel, "__call__", _watched)


_habits: dict[tuple, tuple] = {}  # torch.compile would look through functools.cache


@torch.compiler.assume_constant_result
def _habits_of(cls, config_cls):
    """(form of its masks, indices of position_ids and attention_mask among its arguments, model_type, first_axis)."""
    if (cls, config_cls) not in _habits:
        names = list(inspect.signature(cls.forward).parameters)[1:]
        # Behind all others where it is none: torch.compile has no empty dict from here.
        names += ["position_ids", "attention_mask"]
        indices = {name: names.index(name) for name in ("position_ids", "attention_mask")}
        form = BOOL if cls._supports_sdpa else ADDITIVE
        if cls._supports_flash_attn or cls._supports_flex_attn:
            form = form if any(base.__module__.startswith(_READERS) for base in cls.__mro__) else PATTERN
        _habits[cls, config_cls] = form, indices, config_cls.model_type, first_axis(cls)
    return _habits[cls, config_cls]


# --- numbers of documents in a 2-D attention_mask ---


def numbered(mask):
    """The 2-D mask that reached an attention, with the document numbers that _with_ones took out of it."""
    numbers, call = numbers_of(mask), call_to_mark()
    if call is not None:
        call.mark_numbers_used(numbers)
    return mask if numbers is None else numbers


def _with_ones(model, args, kwargs):
    """The arguments, document numbers of a 2-D attention_mask replaced by ones: models expect 0 and 1 there."""
    indices = _habits_of(type(model), type(model.config))[1]
    mask = argument("attention_mask", indices, args, kwargs)
    if not is_tensor(mask, 2) or mask.dtype == torch.bool or hasattr(mask, NUMBERS):
        return args, kwargs
    ones = mask.clamp(max=1)
    setattr(ones, NUMBERS, mask)
    if kwargs.get("attention_mask") is not None:
        return args, {**kwargs, "attention_mask": ones}
    index = indices["attention_mask"]
    return (*args[:index], ones, *args[index + 1 :]), kwargs
