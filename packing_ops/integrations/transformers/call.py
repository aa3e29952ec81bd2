"""One call of a model under a name of ours: its arguments, from its start to its end, for masks and layers below it.

transformers makes many masks without position_ids. The call knows them; it also records whether its documents have
reached an attention: if none has, it is refused afterwards.
"""

import inspect
import re
import threading
import weakref

import torch

from packing_ops._arguments import check_cu_seqlens
from packing_ops._checks import checked_documents
from packing_ops.integrations.transformers import sequence_group
from packing_ops.integrations.transformers.documents import (
    NUMBERS,
    argument,
    can_read,
    first_axis,
    is_tensor,
    numbers_of,
    positions_restart,
    refuse_where,
    several_in,
)
from packing_ops.integrations.transformers.versions import (
    CACHE,
    PreTrainedModel,
    class_name,
    module_of,
    not_causal,
    reads_text,
)

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
        self.seq_idx = None  # see stateful
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
    return here().call


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
    here().chunked = carrier


def collect(padding):
    """The carrier that was kept for this 2-D mask, or None."""
    now = here()
    carrier, now.chunked = now.chunked, None
    return carrier if carrier is not None and carrier.padding is padding else None


def watched(begin, stock):
    """PreTrainedModel.__call__ with a ModelCall around it. ``begin`` is called with it before the model is."""

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
        now = here()
        outer = now.call
        call = now.call = traced.call = ModelCall(self, args, kwargs, outer)  # what it calls may be compiled
        try:
            if call.guard is None or call.guard.has_state:
                begin(self, call, args, kwargs)
            outputs = stock(self, *args, **kwargs)
        finally:
            now.call = traced.call = outer
        call.refuse_if_lost()
        return outputs

    return __call__


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


# --- the thread ---

# State of this thread: the model call that runs, and the model whose loss is fused.


class _Now(threading.local):
    def __init__(self):  # not of the class: a graph that looks for them in the object would hold until one is set
        self.call = None
        self.chunked = None
        self.preparing = False  # masks, see masks.py
        self.fused = None  # see fused_loss
        self.seq_idx = None  # see stateful


class _Traced:
    """Stands for _now while torch.compile before 2.13 traces.

    Its trace reads the class attributes of a threading.local in place of what the thread has set. This object is one for
    all threads: two of them that call compiled models at the same time may find each other's call.
    """

    call = None
    chunked = None
    preparing = False
    fused = None
    seq_idx = None


_now = _Now()
traced = _now if torch.__version__ >= (2, 13) else _Traced()


def here():
    return traced if torch.compiler.is_compiling() else _now


def fuse(running):
    """Sets the model whose loss is fused in this thread, also for compiled parts that it calls; returns the one before."""
    before, here().fused, traced.fused = here().fused, running, running
    return before


# --- keywords that are refused ---

# Refuses keywords that describe documents under a name that transformers does not read, such as ``cu_seqlens``.

_CU_SEQLENS = ("cu_seq_lens_q", "cu_seq_lens_k")
_NEAR = re.compile(
    r"cu(m|mulative)?_?seq(uence)?s?_?len(gth)?s?(_?(q|k|kv|padded))*"
    r"|((packed|sub)_?)?(seq|sequence|doc|document)s?_?len(gth)?s(_?(q|k|kv))?"
    r"|seq_idx"
)
_BESIDE = ("packed_seq_lengths", "seq_idx")  # collators give these together with what attention reads
_near: dict[tuple, tuple] = {}  # torch.compile would look through functools.cache


def check_keywords(cls: type, kwargs: dict) -> None:
    """TypeError for near misses of cu_seq_lens_q: the model would drop them, and the documents would see each other."""
    for name in _CU_SEQLENS:
        if not isinstance(kwargs.get(name), (torch.Tensor, type(None))):
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


@torch.compiler.assume_constant_result
def _near_misses(cls, names):
    """Near misses among ``names`` that a language model's forward does not declare."""
    if (cls, names) not in _near:
        near = [name for name in names if name not in _CU_SEQLENS and _NEAR.fullmatch(name.lower())]
        known = inspect.signature(cls.forward).parameters if near else ()
        reads_text = "input_ids" in known or "inputs_embeds" in known
        _near[cls, names] = tuple(name for name in near if reads_text and name not in known)
    return _near[cls, names]


# --- models that count positions along the row ---

# Models that count positions along the row and take none: packed documents after the first would get others than alone.
#
# Recognised by an embedding of positions in a module of a text model whose forward is given no positions (BART's decoders).
#

_EMBEDDING = re.compile(r"(^|_)(pos|position|positions)(_|$)|^wpe$")
_RELATIVE = re.compile(r"rotary|rope|relative|bias", re.IGNORECASE)  # the same wherever a document stands
_counts: "weakref.WeakKeyDictionary[torch.nn.Module, str]" = weakref.WeakKeyDictionary()


def refuse_own_positions(model, call, position_ids, batch) -> None:
    """ValueError if a row of this call has several documents and the model counts through them."""
    name = _traced_owner(id(model)) if torch.compiler.is_compiling() else _owner(model)
    if name:
        several = several_in(position_ids, call.padding, call.cu_seqlens, call.numbers, batch)
        lost = "position_ids" if position_ids is not None else "cu_seq_lens_q"
        lost = "attention_mask" if position_ids is None and call.cu_seqlens is None else lost
        refuse_where(
            several,
            f"{lost}: expected one document in each row, got several, and {name} counts positions along the "
            "row and takes none; give each document a row of its own (no packing, padding on the right)",
        )


def _owner(model) -> str:
    """The class of the module that counts, or nothing. Once for each model."""
    if model not in _counts:
        _counts[model] = _counting(model, False)
    return _counts[model]


@torch.compiler.assume_constant_result
def _traced_owner(model_id) -> str:
    return _owner(module_of(model_id))


def _counting(module, of_text) -> str:
    cls = type(module)
    if isinstance(module, PreTrainedModel):
        of_text = reads_text(cls)
    takes = any("position" in name for name in inspect.signature(cls.forward).parameters)
    if of_text and not takes and any(map(_embeds_positions, module._modules.items())):
        return class_name(module)
    return next(
        filter(None, (_counting(child, of_text) for child in module._modules.values() if child is not None)), ""
    )


def _embeds_positions(named) -> bool:
    name, child = named
    words = f"{name} {type(child).__name__}"
    return child is not None and _EMBEDDING.search(name) is not None and _RELATIVE.search(words) is None


# --- a KV cache ---

# Refuses a call with a KV cache that holds several documents in a row: its queries would attend to all of them.

# Attributes of the cache. SEVERAL: a bool tensor, whether a row has several documents. READ: that tensor, once it was
# read and is False. ONE: that tensor, once a mask beside it was found to number one document.
_SEVERAL, _READ, _ONE = "_packing_ops_several", "_packing_ops_read", "_packing_ops_one"
_REFUSAL = (
    f"{CACHE}: expected a cache of one document in each row to go on with, got one that was filled with several, "
    "which would all be seen; fill a cache for each document, or number the cached tokens' documents and these in "
    "attention_mask"
)


def check_cache(cache, call, position_ids, padding, numbers, batch, length):
    """Called where a mask is made, before the keys of this call are in the cache.

    Raises:
        ValueError: the cache holds several documents. The first call with a filled cache waits for the GPU, later
            ones do not.
    """
    if call is not None:
        if call.cache is cache:  # masks of several kinds in one forward
            return
        call.cache = cache
    several, cached = getattr(cache, _SEVERAL, None), cache.get_seq_length()
    if isinstance(cached, torch.Tensor) or cached > 0:
        if length == 1 and numbers is not None and can_read(numbers):
            _refuse_numbers(cache, several, numbers)
        if several is not None:
            _refuse(cache, several, cached, numbers)
    if length > 1:
        if padding is not None and padding.dim() == 2:  # of the keys; these are the last ones
            padding = padding[:, -length:]
        cu_seqlens = None if call is None else call.cu_seqlens
        setattr(cache, _SEVERAL, several_in(position_ids, padding, cu_seqlens, numbers, batch))


def _refuse_numbers(cache, several, numbers):
    """generate gives every step a mask of integers, and 1 to each new token. On CUDA the first step alone waits for it."""
    if numbers.is_cuda and getattr(cache, _ONE, False) is several:
        return
    if bool((numbers > 1).any()):
        raise ValueError("attention_mask: expected 0 and 1 beside a KV cache, got the numbers of several documents")
    setattr(cache, _ONE, several)


def _refuse(cache, several, cached, numbers):
    compiled = torch.compiler.is_compiling()
    if not compiled and getattr(cache, _READ, None) is several:
        return
    if can_read(several) and not bool(several):
        setattr(cache, _READ, several)
        return
    wrong = several
    if isinstance(cached, torch.Tensor):  # of a cache of fixed length, which may have been reset
        wrong = wrong & (cached > 0).to(wrong.device)
    if numbers is not None:  # of all tokens: masks are made by them
        wrong = wrong & ~(numbers > 1).any().to(wrong.device)
    refuse_where(wrong, _REFUSAL)
    if not compiled and numbers is None:
        setattr(cache, _READ, several)
