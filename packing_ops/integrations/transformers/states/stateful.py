"""Layers that carry a state along the sequence, each document from a fresh state.

Attention gets cu_seqlens. Mamba, gated delta nets, linear attention and short convolutions take a row for one document,
unless kernels that know boundaries run in them. In a call with several documents in a row, such a layer gets the
documents as rows of a batch, by length and padded on the right, where a causal layer does not look: the results are
those of each document in a row without others.

stateful_rows.py: documents as rows, and how each layer keeps them apart.
"""

import functools
import inspect
import re
import sys
import weakref

import torch

from packing_ops._runtime.batch_cache import unseen
from packing_ops.boundaries import seq_idx_from_cu_seqlens
from packing_ops.integrations._patching import calls, function_of, is_of, kept_with_class, put_around, take_out_function
from packing_ops.integrations._walks import DOCUMENTS, MIXES, kept_with_model
from packing_ops.integrations.transformers import masks, sequence_group
from packing_ops.integrations.transformers.call import now
from packing_ops.integrations.transformers.documents import (
    ROW_EACH,
    can_read,
    one_each,
    refuse_encoder_decoder,
    refuse_one_result,
    refuse_packed_choices,
    refuse_where,
    several_in,
    tokens_of,
)
from packing_ops.integrations.transformers.positions import refuse_own_positions
from packing_ops.integrations.transformers.states import cached, linear_attention
from packing_ops.integrations.transformers.states.stateful_rows import (
    BOUNDARIES,
    Isolation,
    RowDocuments,
    StateKind,
    axes_in,
    axes_of,
    boundaries_for,
    by_name,
    isolation_of,
    leaves,
    run_in_rows,
)
from packing_ops.integrations.transformers.versions import (
    PreTrainedModel,
    cached_length,
    class_name,
    code_has,
    parameters_of,
    reads_text,
    source_of,
    unwrapped,
)
from packing_ops.keys import cached_paths


def declare(cls: type[torch.nn.Module], *, mixes: bool | None) -> None:
    """Say whether a layer class mixes tokens along the sequence, for packed rows under packing_ops.

    A packed row keeps its documents apart if every layer does. Three kinds of layers need no declaration: those of
    transformers, those that hold a convolution along the sequence or one of torch's RNNs, and those whose code calls a
    known recurrence. A layer of any other class makes rows with several documents an error until it is declared.
    A declaration is for all models of the process. Subclasses inherit it. A later one replaces it.

    Args:
        cls: class of a layer. Its arguments hold hidden states, also in tuples, dicts and dataclasses:
            ``[batch, seqlen, width]``, ``[seqlen, batch, width]``, ``[batch, width, seqlen]`` or
            ``[batch * seqlen, width]``.
        mixes: False: the layer and those inside take each token by itself. A recurrence inside is found all the same.
            An attention that reads the model's mask counts as False.
            True: each document runs as a row of a batch, padded on the right. A layer that reads tokens ahead, or calls
            attention inside, is refused.
            None: take the declaration back.

    Raises:
        TypeError: cls is no subclass of torch.nn.Module, or mixes is neither a bool nor None.
        ValueError: cls is torch.nn.Module itself, or a whole model.

    Example:
        >>> from packing_ops.integrations.transformers import declare, register
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> class Shift(torch.nn.Module):
        ...     def forward(self, x):  # each token gets the one before it, too
        ...         return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        >>> declare(Shift, mixes=True)
        >>> register()
        >>> config = LlamaConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="packing_ops")
        >>> model.model.norm = torch.nn.Sequential(model.model.norm, Shift())
        >>> position_ids = torch.tensor([[0, 1, 2, 0, 1]])  # two documents
        >>> one = model(torch.tensor([[1, 2, 3, 4, 5]]), position_ids=position_ids).logits
        >>> other = model(torch.tensor([[9, 9, 9, 4, 5]]), position_ids=position_ids).logits
        >>> torch.equal(one[:, 3:], other[:, 3:])  # the second document does not see the first
        True
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
        raise TypeError(f"cls: expected a subclass of torch.nn.Module, got {cls!r}")
    if mixes is not None and not isinstance(mixes, bool):
        raise TypeError(f"mixes: expected True, False or None, got {mixes!r}")
    if cls is torch.nn.Module or issubclass(cls, PreTrainedModel):
        raise ValueError(f"cls: expected the class of a layer, got {cls.__name__}, of which whole models are made")
    if mixes is not None:
        setattr(cls, MIXES, mixes)
    elif MIXES in vars(cls):
        delattr(cls, MIXES)
    _kind_of_class.cache_clear()
    for module in [each for each in _prepared if isinstance(each, cls)]:  # by an earlier declaration
        take_out_function(module, _forward)


# --- which layers ---

# In the code of a layer: names of recurrences, and of their states in transformers' caches.
_STATE = (
    r"causal_conv1d|conv_state|ssm_state|recurrent_state|rnn_state|linear_cache|_scan\(|time_shift|linear_attention\("
    r"|delta_rule|delta_attention|mlstm|wkv"
)
# Layers of transformers with a special attention that, without a 2-D mask, does not keep documents apart:
# causal_families.json fails for one that is missing here.
_OWN_ATTENTION = frozenset({
    "bloom.BloomBlock", "mpt.MptBlock", "openai.Block", "reformer.ReformerEncoder", "xlm.MultiHeadAttention",
    "xlnet.XLNetLayer",
})  # fmt: skip
# Packages whose layers take each token by itself, unless a recurrence or attention is found in them: torch,
# transformers (the tests run its families), and libraries that put a layer of the same function in another one's place.
_KNOWN = re.compile(
    r"(torch|transformers|packing_ops|accelerate|apex\.normalization|bitsandbytes|gptqmodel|hqq|liger_kernel"
    r"|optimum\.quanto|peft|torchao|transformer_engine\.pytorch\.module|unsloth)(\.|$)"
)


def layers_of(module: torch.nn.Module, judged: bool = True) -> dict[torch.nn.Module, StateKind]:
    """Return the outermost layers inside that are not TOKENWISE, in their order.

    judged: UNKNOWN ones count: in a model of text, next to attention.
    """
    if isinstance(module, PreTrainedModel):
        judged = reads_text(type(module))
    found = {}
    for child in module.children():
        kind, sees_inside = _kind_of(child)
        inside = layers_of(child, judged and sees_inside and kind is not StateKind.RECURRENT)
        if kind is StateKind.UNKNOWN:
            # A block of attention and other layers: these count, its code passes tokens from one to the other.
            is_block = (attentions(child) and not _passes_by(child)) or {*inside.values()} - {kind}
            found.update(inside if is_block or not judged else {child: kind})
        elif kind is not StateKind.TOKENWISE:
            # A decoder layer's code passes the state of what is inside on.
            passes_on = kind is StateKind.RECURRENT and not _holds_state(child) and attentions(child)
            inside = (inside if passes_on else {}) or {child: kind}
            found.update(inside)
        else:
            found.update(inside)
    return found


def why_not_on_ranks(models, scheme: str, linear: bool) -> str | None:
    """Return why the rows of these models cannot be spread over ranks, each of which would start with a fresh state.

    linear: linear_attention swaps what it can, whose states travel from rank to rank in a contiguous row.
    """
    for layer, kind in (item for model in models for item in layers_of(model).items()):
        if linear and linear_attention.layers_in(layer) and linear_attention.why_not(layer) is None:
            if scheme == "contiguous":
                continue
            return f'{class_name(layer)} carries a state along the sequence, which takes sequence_scheme="contiguous"'
        if kind is StateKind.UNKNOWN:
            return (
                f"{class_name(layer)}, of which nothing says whether it mixes tokens: declare(cls, mixes=...) says so"
            )
        return f"{class_name(layer)} carries a state along the sequence"
    return None


def _kind_of(layer) -> tuple[StateKind, bool]:
    """Return its kind, and whether what is inside is judged by itself: not in attention, nor in a layer that was
    declared.
    """
    cls = type(layer)
    kind, declared, attends = _kind_of_class(cls, cls.forward)
    if not declared and kind is not StateKind.RECURRENT and layer._modules and _holds_state(layer):
        kind = StateKind.RECURRENT
    if kind is StateKind.TOKENWISE and not declared and not _is_known_in(layer):
        kind = StateKind.UNKNOWN
    return kind, not (declared or attends)


@kept_with_class
def _kind_of_class(cls, forward) -> tuple[StateKind, bool, bool]:
    """Return (its kind by declaration, else by its code; whether it is declared; whether it calls attention)."""
    # Kept by the forward of the class, too, which another library may replace.
    mixes, attends, is_model = (
        getattr(cls, MIXES, None),
        calls_interface(cls, forward),
        issubclass(cls, PreTrainedModel),
    )
    if mixes is not None:
        return StateKind.MIXING if mixes else StateKind.TOKENWISE, True, attends
    if not is_model and code_has(cls, _STATE):
        return StateKind.RECURRENT, False, attends
    if _has_own_attention(cls):
        return StateKind.MIXING, False, attends
    # All classes in its MRO, and its forward, are of packages above.
    known = is_model or (
        all(
            _KNOWN.match(base.__module__)
            for base in cls.__mro__
            if base.__module__.partition(".")[0] not in sys.stdlib_module_names
        )
        and _is_known_function(forward)
    )
    return StateKind.TOKENWISE if known else StateKind.UNKNOWN, False, attends


def _holds_state(layer) -> bool:
    """Return whether it holds a convolution along the sequence, or one of torch's RNNs."""
    return any(
        isinstance(each, torch.nn.RNNBase) or (isinstance(each, torch.nn.Conv1d) and each.kernel_size[0] > 1)
        for each in layer._modules.values()
    )


def _has_own_attention(cls) -> bool:
    stock = unwrapped(cls)
    return f"{stock.__module__.rpartition('.modeling_')[2]}.{stock.__name__}" in _OWN_ATTENTION


def _is_known_in(layer) -> bool:
    """Return whether no forward was put into this instance, or one of packages above (Liger, accelerate's hooks)."""
    own = layer.__dict__
    if not ("forward" in own or "_old_forward" in own) or hasattr(type(layer), "kernel_layer_name"):
        return True  # the Hub's kernels replace classes that are marked for them
    return all(_is_known_function(own[name]) for name in ("forward", "_old_forward") if name in own)


def _is_known_function(function) -> bool:
    """Return whether a function, and all that it wraps, is known."""
    while function is not None:
        if function_of(function) is not None:
            function = function_of(function)
        elif _KNOWN.match(getattr(function, "__globals__", {}).get("__name__", "")):
            function = getattr(function, "__wrapped__", None)
        else:
            return False
    return True


def attentions(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules inside that call the attention that attn_implementation names."""
    return [each for each in module.modules() if calls_interface(type(each), each.forward)]


def calls_interface(cls: type, forward) -> bool:
    """Return whether a forward, of the class or of one module, calls the attention that attn_implementation names."""
    if issubclass(cls, PreTrainedModel) or not code_has(cls, r"attention_interface\(|ALL_ATTENTION_FUNCTIONS"):
        return False
    # A wrapper keeps what it wraps, ours call what they replace. A subclass may attend by itself.
    stock, homes = inspect.unwrap(forward), {(base.__module__, base.__qualname__): base for base in cls.__mro__}
    of = getattr(stock, "__globals__", {}).get("__name__"), getattr(stock, "__qualname__", "").rpartition(".")[0]
    return is_of(function_of(forward) or forward, "packing_ops") or bool(
        of in homes
        and re.search(r"\A\Z|attention_interface\(|ALL_ATTENTION_FUNCTIONS|super\(|\.forward\(", source_of(homes[of]))
    )


def _passes_by(layer) -> bool:
    """Return whether the forward of a layer reads the weights of an attention in it, and does not call that."""
    source = source_of(inspect.unwrap(layer.forward))
    return any(
        re.search(rf"\.{name}\.({'|'.join([*child._modules, *child._parameters]) or '$'})\b", source)
        and not re.search(rf"\.{name}(\.forward)?\(", source)
        for name, child in layer.named_children()
        if calls_interface(type(child), child.forward)
    )


# --- the documents of a model's call ---


def find_documents_of(model, call, args, kwargs) -> dict:
    """Return the call's keyword arguments, and set ``call.row_documents`` if rows hold several documents and some of
    the model's layers have a state. Such rows fill a cache only if the call asks for one: it would hold one state each.
    """
    refuse_encoder_decoder(model, call, args, kwargs)
    # A call without a sequence, or inside one that has looked already.
    tokens = tokens_of(args, kwargs)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        return kwargs
    refuse_packed_choices(model, call, tokens, kwargs)
    caches = cached.caches_in(cached.named(model, args, kwargs))
    _refuse_masks_and_caches(model, call, caches, call.given("attention_mask", args, kwargs))
    if cached.goes_on(model, call, caches, tokens) or (tokens.shape[1] < 2 and not call.on_ranks):
        return kwargs
    batch, seqlen = tokens.shape[:2]
    if call.has_rows_of(call.outer, (batch, seqlen)):
        call.rows, call.row_documents = call.outer.rows, call.outer.row_documents
        return _filling_no_cache(model, call, args, kwargs)

    # What says where documents are.
    position_ids = call.row_positions(batch, seqlen)
    if position_ids is None and call.cu_seqlens is None and call.numbers is None:
        return kwargs

    # Layers that cannot have several documents in a row.
    refuse_one_result(model, call, kwargs, position_ids, batch)
    refuse_own_positions(model, call, position_ids, batch)
    stateful, has_attention, unknown = prepare(call, model, call.padding is not None)
    if unknown:
        message = one_each(
            call.named_by(),
            f"nothing says whether {unknown} mixes tokens",
            "call packing_ops.integrations.transformers.declare(cls, mixes=...) (False: each token by itself), or "
            + ROW_EACH,
        )
        refuse_where(call.several(batch, position_ids), message)
    if not stateful:
        return kwargs

    call.rows = batch, seqlen
    if call.on_ranks:
        ranks = sequence_group.of(model).documents(kwargs["cu_seq_lens_q"], seqlen)
        seq_idx = seq_idx_from_cu_seqlens(ranks.cu_seqlens, seqlen)[None]
        call.row_documents = RowDocuments(seq_idx, ranks.cu_seqlens, None, has_attention, True, ranks=ranks)
        return _filling_no_cache(model, call, args, kwargs)

    # Their documents, where a row may have several.
    documents, several = call.documents_of_tokens(tokens, position_ids), None
    if not torch.compiler.is_compiling():
        several = documents.several is not False
        if documents.indices is None and documents.cu_seqlens.numel() - 1 <= batch:
            return kwargs
    seq_idx, parents = documents.document_ids(batch, seqlen), call.segment_parents
    paths = None if parents is None else cached_paths(documents.cu_seqlens, parents, seqlen, None)
    call.row_documents = RowDocuments(seq_idx, documents.cu_seqlens, documents.indices, has_attention, several, paths)
    return _filling_no_cache(model, call, args, kwargs)


def _refuse_masks_and_caches(model, call, caches, made):
    """Raise TypeError for masks by kind of layer without one for its layers with a state, and ValueError for a cache
    that was filled with several documents of a row: numbers of its tokens help attention, and no state.
    """
    marked = [each for each in caches.values() if masks.is_marked(each)]
    if not (marked or isinstance(made, dict)):
        return
    stateful, has_attention, _ = prepare(call, model, call.padding is not None)
    for cache in marked if stateful else ():
        masks.refuse_several(cache, cached_length(cache), whole=True)
    if stateful and isinstance(made, dict):
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        missing = sorted({kind for kind in kinds if not kind.startswith("hybrid")}.difference(made))
        if missing or not has_attention:
            wanted = f"one for {missing[0]!r} in a dict of masks" if has_attention else "a tensor"
            raise TypeError(f"attention_mask: expected {wanted}, got {type(made).__name__} of {[*made]}")


def _filling_no_cache(model, call, args, kwargs) -> dict:
    """Return the keyword arguments of a call, an outer or an inner one, that may make the cache: beside several
    documents in a row none that nobody asked for. Raise ValueError for a cache that nothing refuses later.
    """
    found = call.row_documents
    if found is None or found.several is False:
        return kwargs
    given, names = cached.named(model, args, kwargs), parameters_of(type(model).forward)
    # A cache would hold one state for the row. Attention that makes its mask refuses to go on with it, nothing else.
    if given.get("use_cache") or cached.caches_in(given):
        if found.ranks is not None:
            raise ValueError("use_cache: expected False with a sequence_group, whose documents end on other ranks")
        # Documents without a token count as none: the host reads how many there are where it has to know.
        of_row = several_in(numbers=found.seq_idx + 1) if call.cu_seqlens is not None else found.several
        if found.several and can_read(found.seq_idx) and not bool(of_row):
            call.row_documents = found._replace(several=False)
            return kwargs
        if not found.has_attention or all(each.masks_made for each in (call, *call.outers)):
            refuse_where(
                found.several or several_in(numbers=found.seq_idx + 1),
                "use_cache: expected False, and no cache, beside several documents in a row, of which a cache of "
                f"{class_name(model)} keeps one state",
            )
    # A graph cannot know of several: attention marks its cache.
    takes = found.several or not found.has_attention
    takes = takes and given.get("use_cache") is None and "use_cache" in names[len(args) :]
    return {**kwargs, "use_cache": False} if takes else kwargs


# --- in place of their forward ---

# Layers whose forward is replaced by ours: whether one has trained on rows with several documents. A copy has not.
_prepared: "weakref.WeakKeyDictionary[torch.nn.Module, bool]" = weakref.WeakKeyDictionary()


@kept_with_model
def prepare(model, masked=False) -> tuple[bool, bool, str]:
    """Put ours into its layers with a state, until revert. Return (whether there are any and attention next to them,
    UNKNOWN ones).

    Layers that linear_attention has swapped get their documents as an argument.
    """
    layers = layers_of(model)
    unknown = dict.fromkeys(class_name(layer) for layer, kind in layers.items() if kind is StateKind.UNKNOWN)
    # An attention of transformers reads a mask, or the call is refused at its end.
    stateful = [
        layer
        for layer, kind in layers.items()
        if kind is not StateKind.UNKNOWN and not (masked and _has_own_attention(type(layer)))
    ]
    for layer in (each for each in stateful if not linear_attention.is_swapped(each)):
        put_around(layer, "forward", _forward, {})
        _prepared.setdefault(layer, False)
    return bool(stateful), bool(stateful and attentions(model)), ", ".join(unknown)


@kept_with_model
def layers_apart(model) -> tuple:
    """Return [(function that says whether ours is in a layer, layer)] of those that keep documents apart."""
    keeps = linear_attention.is_swapped, _is_prepared
    return tuple((is_in, layer) for layer in layers_of(model) for is_in in keeps if is_in(layer))


def _is_prepared(layer) -> bool:
    # Behind what others put in front of it: accelerate keeps _old_forward.
    return any(calls(vars(layer).get(name), _forward, {}) for name in ("forward", "_old_forward"))


def revert() -> None:
    """Put back what prepare replaced, in all models."""
    for module in list(_prepared):
        take_out_function(module, _forward)
    _prepared.clear()


def _forward(layer, stock, isolations, *args, **kwargs):
    """Replace the forward of a layer with a state.

    stock: the forward that was in the instance, or None. isolations: {device type: Isolation, or why it is missing}.
    """
    run = functools.partial(type(layer).forward, layer) if stock is None else stock
    if DOCUMENTS in kwargs:
        return run(*args, **kwargs)
    found = now.row_documents
    if found is None and isolations:
        _refuse_backward(layer)
    return _apart(layer, run, isolations, found, args, kwargs) if found else run(*args, **kwargs)


@torch.compiler.disable
def _refuse_backward(layer) -> None:
    """Raise RuntimeError where a layer that has had several documents in a row runs again in backward without them."""
    if torch._C._current_graph_task_id() == -1:
        _prepared[layer] = False  # it goes on with another attention
    elif _prepared.get(layer):  # torch's checkpoints bring them, or False
        raise RuntimeError(
            f"checkpoint: expected torch.utils.checkpoint around {class_name(layer)}, whose rows held several "
            "documents, got another function that runs the layer again in backward, without its documents"
        )


@torch.compiler.disable(reason="packing_ops: how many documents a row has is known when the layer runs")
def _apart(layer, run, isolations, found, args, kwargs):
    # Which of its tensors have the tokens of the batch, and where these have their documents.
    run, named = by_name(layer, run, args, kwargs)
    shape = tuple(found.seq_idx.shape)
    axes = axes_of(named, shape)
    if axes is None:
        return run(**named)  # another sequence: of images or audio
    device = next(leaf.device for leaf in leaves(named) if axes_in(leaf, shape, axes) is not None)
    documents, call = found.split(device), now.call  # None where it is recomputed in backward
    # In a model without attention, these layers are where the call's documents have to arrive.
    around = call
    while around is not None and around.row_documents is not None:
        if around.row_documents.has_attention or around.mixes:
            break
        around.unconsumed.clear()
        around = around.outer
    named = {name: value for name, value in named.items() if name not in BOUNDARIES}
    if not documents.several:
        return run(**named)

    # How the layer keeps them apart.
    if device.type not in isolations:
        kind, inside = _kind_of(layer)[0], attentions(layer)
        why = f"{kind.value} calls attention inside, whose documents are those of the whole batch" if inside else None
        with unseen():
            isolations[device.type] = why or isolation_of(layer, kind, run, named, documents, shape, axes)
    isolation = isolations[device.type]
    if isinstance(isolation, str):
        why = f"{class_name(layer)} {isolation}"
        raise ValueError(one_each("position_ids" if call is None else call.named_by(), why))
    if call is not None and call.trains:
        _prepared[layer] = True
    passes = isolation is Isolation.PASS_BOUNDARIES and found.paths is None
    if passes and shape[0] == 1 and not documents.padded:
        return run(**named, **boundaries_for(layer, found.seq_idx.to(device), documents.cu_seqlens))
    return run_in_rows(run, named, documents, shape, axes)
