"""Layers that carry a state along the sequence, each document from a state of its own.

Attention is told where documents end. Mamba, gated delta nets, linear attention and short convolutions take a row for
one document, unless kernels that know boundaries run in them. In a call with several documents in a row, such a layer
gets the documents as rows of a batch, by length and padded on the right, where a causal layer does not look: the
results are those of each document alone.

Recognised by what a layer is: it holds a convolution along the sequence or a torch RNN, or its code calls a recurrence
or keeps the state of one in the cache.
"""

import contextlib
import functools
import inspect
import re
import weakref

import torch

from packing_ops._batch_cache import kept_with
from packing_ops.integrations.transformers import running
from packing_ops.integrations.transformers.document_checks import is_tensor
from packing_ops.integrations.transformers.documents import as_bool, find_documents
from packing_ops.integrations.transformers.imports import PreTrainedModel

# In the code of a layer: names of recurrences, and of their states in transformers' caches.
_STATE = re.compile(
    r"causal_conv1d|conv_state|ssm_state|recurrent_state|rnn_state|linear_cache|_scan\(|time_shift|linear_attention\("
    r"|delta_rule|delta_attention|mlstm|wkv"
)
_CACHES = frozenset(("past_key_values", "past_key_value", "cache_params", "cache", "state"))
_BOUNDARIES = frozenset(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
# Where models and torch's checkpoint_wrapper keep the function that checkpoints a layer.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
_CLOSE = 0.05  # of the norm: rounding is far below, what other tokens do is far above
_TRIED = 16  # tokens on each side of a boundary between documents

_prepared: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # modules whose functions are replaced by ours
_ways: dict[tuple, str] = {}  # {(class, device type): how its documents are kept apart, or why they cannot be}


# --- which layers ---


@functools.cache
def source_of(cls: type) -> str:
    """The code of a module's class and of those it inherits from, without torch's; empty where there is none."""
    sources = []
    for base in cls.__mro__:
        if issubclass(base, torch.nn.Module) and not base.__module__.startswith("torch."):
            try:
                sources.append(inspect.getsource(base))
            except (OSError, TypeError):
                continue
    return "\n".join(sources)


@functools.cache
def _has_recurrent_code(cls) -> bool:
    if cls.__module__.startswith("torch.") or issubclass(cls, PreTrainedModel):
        return False
    return _STATE.search(source_of(cls)) is not None


def _reads_neighbours(module) -> bool:
    """torch's own layers that mix the tokens of a sequence, and are no attention."""
    if isinstance(module, torch.nn.Conv1d):
        return module.kernel_size[0] > 1
    return isinstance(module, torch.nn.RNNBase)


def stateful_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules of a model that carry a state along the sequence; empty for attention alone."""
    found = []
    for child in model._modules.values():
        if child is None:
            continue
        if _has_recurrent_code(type(child)):
            inside = stateful_layers(child)
            # A layer that only passes the state of what is inside of it on, as decoder layers do with their cache.
            holds = any(map(_reads_neighbours, child._modules.values())) or not inside
            found += [child] if holds or not _calls_attention_inside(child) else inside
        elif any(each is not None and _reads_neighbours(each) for each in child._modules.values()):
            found.append(child)
        else:
            found += stateful_layers(child)
    return found


def _calls_attention_inside(module) -> bool:
    return any(calls_interface(type(each)) for each in module.modules())


@functools.cache
def calls_interface(cls: type) -> bool:
    """Its code calls the attention that attn_implementation names."""
    return not issubclass(cls, PreTrainedModel) and bool(
        re.search(r"attention_interface\(|ALL_ATTENTION_FUNCTIONS", source_of(cls))
    )


# --- which documents ---


def find_documents_of(model, call, args, kwargs) -> None:
    """Sets ``call.seq_idx`` where rows of a model's call hold several documents and some of its layers have a state."""
    tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if t is not None), None)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2 or tokens.shape[1] < 2:
        return
    outer = getattr(call.outer, "seq_idx", None)
    if outer is not None and outer.shape == tokens.shape[:2]:
        call.seq_idx, call.has_attention = outer, call.outer.has_attention
        return
    position_ids = call.position_ids
    if is_tensor(position_ids, 3) and position_ids.shape[0] == 4:  # of text, in front of those of the axes
        position_ids = position_ids[0]
    position_ids = position_ids if is_tensor(position_ids, 2) else None
    if position_ids is None and call.cu_seqlens is None and call.numbers is None:
        return
    if not prepare(model):
        return
    call.seq_idx = _seq_idx(tokens, call, position_ids)
    if call.seq_idx is None:
        return
    call.has_attention = _has_attention(model)
    for name in _CACHES & kwargs.keys():
        cached = kwargs[name].get_seq_length() if hasattr(kwargs[name], "get_seq_length") else 0
        if isinstance(cached, int) and cached > 0:
            raise ValueError(
                f"{name}: expected an empty cache beside several documents in a row, got {cached} tokens, whose state "
                f"the layers of {class_name(model)} would go on with"
            )


def _seq_idx(tokens, call, position_ids):
    """int32 ``[batch, seqlen]``: the document of each token, -1 for padding; None where each row is one."""
    batch, seqlen = tokens.shape[:2]
    padding = call.padding if is_tensor(call.padding, 2) and call.padding.shape == (batch, seqlen) else None
    if padding is not None:
        padding = call.numbers.to(tokens.device) if call.numbers is not None else as_bool(padding, tokens.device)
    like = tokens.reshape(batch, 1, seqlen, -1)
    documents = find_documents(like, (call.cu_seqlens, call.cu_seqlens_k), padding, position_ids).on(tokens.device)
    if documents.indices is None and not torch.compiler.is_compiling() and documents.cu_seqlens_q.numel() - 1 <= batch:
        return None
    return documents.document_ids(batch, seqlen).int()


@torch.compiler.assume_constant_result
def _has_attention(model) -> bool:
    return _calls_attention_inside(model)


# --- in a model ---


@torch.compiler.assume_constant_result
def prepare(model) -> bool:
    """Whether the model has layers with a state. Their forward is ours from now on, until revert."""
    layers = stateful_layers(model)
    for layer in layers:
        stock = layer.__dict__.get("forward")
        if getattr(stock, "func", None) is not _forward:
            layer.__dict__["forward"] = functools.partial(_forward, layer, stock)
        _prepared.add(layer)
    for module in model.modules() if layers else ():
        for name in _CHECKPOINTS:
            stock = module.__dict__.get(name)
            if stock is not None and getattr(stock, "func", None) is not _checkpoint:
                module.__dict__[name] = functools.partial(_checkpoint, stock)
                _prepared.add(module)
    return bool(layers)


def revert(model=None) -> None:
    """Put back what prepare replaced, in one model or in all."""
    for module in list(_prepared) if model is None else [each for each in model.modules() if each in _prepared]:
        for name, ours, index in (("forward", _forward, 1), *((name, _checkpoint, 0) for name in _CHECKPOINTS)):
            function = module.__dict__.get(name)
            if getattr(function, "func", None) is ours:
                if function.args[index] is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = function.args[index]
        _prepared.discard(module)


def _checkpoint(stock, function, *args, **kwargs):
    """The layer is run again in backward, when the model's call is over: it takes the documents along."""
    seq_idx = _current_seq_idx()
    if seq_idx is None or torch.compiler.is_compiling():
        return stock(function, *args, **kwargs)
    return stock(functools.partial(_with_documents, seq_idx, function), *args, **kwargs)


def _with_documents(seq_idx, function, *args, **kwargs):
    now = running.here()
    before, now.seq_idx = now.seq_idx, seq_idx
    try:
        return function(*args, **kwargs)
    finally:
        now.seq_idx = before


def _current_seq_idx():
    now = running.here()
    call = now.call or running.traced.call
    return now.seq_idx if call is None or now.seq_idx is not None else call.seq_idx


def _forward(layer, stock, *args, **kwargs):
    """In place of the forward of a layer with a state."""
    seq_idx = _current_seq_idx()
    run = functools.partial(type(layer).forward, layer) if stock is None else stock
    if seq_idx is None:
        return run(*args, **kwargs)
    return _apart(layer, run, seq_idx, args, kwargs)


# --- documents as rows ---


class Documents:
    """The documents of seq_idx as rows of smaller batches, the longest of each less than twice its shortest.

    several: whether a row has several. padded: whether some slots are in none.
    cu_seqlens: int32 ``[documents + 1]``.
    around, boundary: int64 ``[1, tokens]``, slots around the first boundary inside a row, and the place of it in them.
    batches: [int64 ``[documents, length]``, slots of the flat batch; after its end a document repeats its last one].
    order: int64 ``[batch * seqlen]``: where each slot is among the tokens of all batches, one after the other; the
        last place, behind them, is for padding.
    """

    def __init__(self, seq_idx):
        device, flat = seq_idx.device, seq_idx.flatten().cpu()
        slots = (flat >= 0).nonzero()[:, 0]
        _, lengths = torch.unique_consecutive(flat[slots], return_counts=True)
        rows = slots // max(seq_idx.shape[1], 1)
        self.several = len(lengths) > len(rows.unique())
        self.padded = len(slots) < len(flat)
        ends = lengths.cumsum(0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int().to(device)
        self.around, self.boundary = None, 0
        for end in ends[:-1][rows[ends[:-1] - 1] == rows[ends[:-1]]][:1].tolist():
            first, last = max(end - _TRIED, *(ends[ends < end].tolist()[-1:] or [0])), min(end + _TRIED, len(slots))
            last = min(last, int(ends[ends > end][0]))
            self.around, self.boundary = slots[None, first:last].to(device), end - first
        starts, self.batches, total = ends - lengths, [], 0
        sizes = torch.log2(lengths.double()).floor()
        order = torch.empty(len(flat) + 1, dtype=torch.int64)
        for size in sizes.unique().tolist():
            chosen = (sizes == size).nonzero()[:, 0]
            longest = int(lengths[chosen].max())
            steps = torch.arange(longest)
            inside = steps < lengths[chosen][:, None]
            tokens = slots[starts[chosen][:, None] + steps.minimum(lengths[chosen][:, None] - 1)]
            self.batches.append(tokens.to(device))
            order[tokens[inside]] = total + inside.flatten().nonzero()[:, 0]
            total += tokens.numel()
        order[:-1][flat < 0] = total
        self.order = order[:-1].to(device)


@torch.compiler.disable(reason="packing_ops: how many documents a row has is known when the layer runs")
def _apart(layer, run, seq_idx, args, kwargs):
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    named = {name: value for name, value in bound.arguments.items() if name != "self" and value is not layer}
    keywords = next((n for n, p in bound.signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    named |= named.pop(keywords, {})
    hidden = next((value for value in named.values() if isinstance(value, torch.Tensor)), None)
    if hidden is None or hidden.shape[:2] != seq_idx.shape:
        return run(*args, **kwargs)  # another sequence: of images or audio
    seq_idx = seq_idx.to(hidden.device)
    documents = kept_with([seq_idx], ("documents of layers with a state",), lambda: Documents(seq_idx))
    if not documents.several:
        return run(*args, **kwargs)
    _refuse(layer, run, named, documents, seq_idx.shape)
    call = running.here().call
    while call is not None and call.seq_idx is not None and not call.has_attention and not call.mixes:
        call.used = call.numbers_used = True
        call = call.outer
    named = {name: value for name, value in named.items() if name not in _BOUNDARIES}
    if seq_idx.shape[0] == 1 and not documents.padded and _ways[type(layer), seq_idx.device.type] == _TOLD:
        return run(**named, **_boundaries(seq_idx, documents.cu_seqlens))
    return _in_rows(run, named, documents, seq_idx.shape)


def _in_rows(run, named, documents, shape):
    results = [
        run(**{name: _rows_of(name, value, slots, shape) for name, value in named.items()}) for slots in documents.batches
    ]
    return _joined(results, documents, shape)


def _rows_of(name, value, slots, shape):
    """An argument of a layer for one batch of documents."""
    if name in _CACHES:
        return None
    if name == "use_cache":
        return False
    if isinstance(value, tuple | list):
        parts = [_rows_of("", each, slots, shape) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not isinstance(value, torch.Tensor):
        return value if _is_plain(value) else None
    if value.dim() < 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
        return None if name == "attention_mask" else value
    flat = value.expand(shape[0], *value.shape[1:]).flatten(0, 1)
    return flat.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _is_plain(value):
    """Not a mask of all documents, which the rows do not have."""
    return value is None or isinstance(value, bool | int | float | str | dict | torch.Tensor)


def _joined(results, documents, shape):
    first = results[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(parts), documents, shape) for parts in zip(*results, strict=True))
    batches = documents.batches
    if not isinstance(first, torch.Tensor) or any(
        each.shape[:2] != slots.shape for each, slots in zip(results, batches, strict=True)
    ):
        return None  # a state
    tokens = [each.flatten(0, 1) for each in results]
    if documents.padded:
        tokens.append(tokens[0].new_zeros(1, *tokens[0].shape[1:]))
    return torch.cat(tokens).index_select(0, documents.order).unflatten(0, shape)


# --- layers that cannot ---


def _refuse(layer, run, named, documents, shape):
    """ValueError where documents as rows would not be what the layer computes for each alone."""
    key = type(layer), documents.order.device.type
    if key not in _ways:
        named = {name: value for name, value in named.items() if name not in _BOUNDARIES}
        with _without_dropout(layer):
            _ways[key] = _way_of(layer, run, named, documents, shape)
    if _ways[key] not in (_AS_ROWS, _TOLD):
        raise ValueError(
            f"position_ids: expected one document in each row, got several, and {class_name(layer)} carries a state along "
            f"the sequence and {_ways[key]}; give each document a row of its own (no packing, padding on the right)"
        )


_AS_ROWS, _TOLD = "as rows of a batch", "told by seq_idx and cu_seq_lens_q"


@torch.no_grad()
def _way_of(layer, run, named, documents, shape):
    """_AS_ROWS; _TOLD where its kernels keep documents apart that they are told of; or why neither is possible.

    Tried on the tokens around a boundary, in place of which others are put.
    """
    if _calls_attention_inside(layer):
        return "calls attention inside, whose documents are those of the whole batch"
    given = {name: _rows_of(name, value, documents.around, shape) for name, value in named.items()}
    hidden = next(name for name, value in given.items() if isinstance(value, torch.Tensor))
    before, after = torch.zeros_like(given[hidden]), torch.zeros_like(given[hidden])
    before[:, : documents.boundary] = after[:, documents.boundary :] = 1
    others = [{**given, hidden: given[hidden] + where * (1 - 3 * given[hidden])} for where in (before, after)]
    if _differ(run(**given), run(**others[1]), before):
        return "reads tokens ahead"
    parts = documents.around.split((documents.boundary, documents.around.shape[1] - documents.boundary), 1)
    wanted = [run(**{name: _rows_of(name, value, slots, shape) for name, value in named.items()}) for slots in parts]
    seq_idx = after[0, :, 0].int()[None]
    told = _boundaries(seq_idx, torch.cat([seq_idx.new_zeros(1), (1 - seq_idx).sum(1), seq_idx.new_full((1,), len(seq_idx[0]))]))
    try:
        results = [run(**each, **told) for each in (given, others[0])]
    except (TypeError, ValueError, RuntimeError, AssertionError):  # it takes none, or has no kernels that do
        return _AS_ROWS
    first, second = map(_first_tensor, results)
    boundary = documents.boundary
    close = not _differ(first[:, boundary:], _first_tensor(wanted[1]), after[:, boundary:])
    return _TOLD if close and torch.equal(first[:, boundary:], second[:, boundary:]) else _AS_ROWS


def _boundaries(seq_idx, cu_seqlens):
    cu_seqlens = cu_seqlens.int()
    return {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}


def _differ(first, second, where) -> bool:
    """Whether a token among ``where`` has another result, by more than rounding."""
    first, second = (_first_tensor(each).float().flatten(2) for each in (first, second))
    norms = first.norm(dim=-1)
    far = (first - second).norm(dim=-1) > _CLOSE * torch.maximum(norms, 0.01 * norms.mean())
    return bool((far & (where[..., 0] > 0)).any())


@contextlib.contextmanager
def _without_dropout(layer):
    training = [each for each in layer.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True


def _first_tensor(result):
    return next(each for each in result if isinstance(each, torch.Tensor)) if isinstance(result, tuple) else result


def class_name(layer) -> str:
    """Without what FSDP puts in front of it."""
    cls = type(layer)
    return cls.__name__ if not cls.__name__.startswith("FSDP") else cls.__mro__[1].__name__
