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

from packing_ops._arguments import int32_cu_seqlens
from packing_ops._batch_cache import kept_with
from packing_ops.integrations.transformers import running
from packing_ops.integrations.transformers.document_checks import is_tensor
from packing_ops.integrations.transformers.documents import BatchDocuments, as_bool, find_documents
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
_learned: "weakref.WeakSet[type]" = weakref.WeakSet()  # classes that were tried, and have a state
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


def _is_stateful(module) -> bool:
    cls = type(module)
    return _has_recurrent_code(cls) or cls in _learned or any(map(_reads_neighbours, module._modules.values()))


def stateful_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules of a model that carry a state along the sequence; empty for attention alone."""
    found = []
    for child in model._modules.values():
        if child is None:
            continue
        if _has_recurrent_code(type(child)) or type(child) in _learned:
            inside = stateful_layers(child)
            # A layer that only passes the state of what is inside of it on, as decoder layers do with their cache.
            holds = any(map(_reads_neighbours, child._modules.values())) or not inside
            found += [child] if holds or not _calls_attention_inside(child) else inside
        elif _is_stateful(child):
            found.append(child)
        else:
            found += stateful_layers(child)
    return found


def _untried(module) -> list[torch.nn.Module]:
    """The outermost modules of classes whose code says nothing of a state, and which were not tried yet."""
    found = []
    for child in module._modules.values():
        cls = type(child)
        if child is None or calls_interface(cls) or _is_stateful(child):
            continue
        if isinstance(child, PreTrainedModel) or cls.__module__.startswith("torch.") or _parts_it(child):
            found += _untried(child)
        elif not any((cls, kind) in _ways for kind in _kinds_of(child)):
            found.append(child)
    return found


def _parts_it(module) -> bool:
    """It has attention, or a layer with a state, inside: its own code passes tokens from one to the other."""
    return any(calls_interface(type(each)) or _is_stateful(each) for each in module.modules())


def _kinds_of(module):
    return {parameter.device.type for parameter in module.parameters()} or {"cpu", "cuda"}


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
    # Packed rows without padding are enough to try layers by, and are looked at by attention too.
    stateful = prepare(model, torch.compiler.is_compiling() or call.padding is not None)
    if stateful is None:
        return
    call.has_attention = _has_attention(model)
    call.seq_idx = _seq_idx(tokens, call, position_ids)
    if call.seq_idx is None:
        return
    for name in _CACHES & kwargs.keys() if stateful else ():
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
    if call.cu_seqlens is not None and call.has_attention:  # which checks them
        cu_seqlens = int32_cu_seqlens(call.cu_seqlens)
        documents = BatchDocuments(cu_seqlens, cu_seqlens).on(tokens.device)
    else:
        cu_seqlens = call.cu_seqlens, call.cu_seqlens_k
        documents = find_documents(like, cu_seqlens, padding, position_ids).on(tokens.device)
    if documents.indices is None and not torch.compiler.is_compiling() and documents.cu_seqlens_q.numel() - 1 <= batch:
        return None
    return documents.document_ids(batch, seqlen).int()


@torch.compiler.assume_constant_result
def _has_attention(model) -> bool:
    return _calls_attention_inside(model)


# --- in a model ---


@torch.compiler.assume_constant_result
def prepare(model, known_alone: bool = False) -> bool | None:
    """Whether the model has layers with a state; None if it has none, and none that were not tried yet. Their forward is
    ours from now on, until revert, or until they were tried and have none.

    known_alone: leave those that were not tried yet.
    """
    layers = [(_forward, layer) for layer in stateful_layers(model)]
    stateful = bool(layers)
    layers += [] if known_alone else [(_tried, layer) for layer in _untried(model)]
    for ours, layer in layers:
        stock = layer.__dict__.get("forward")
        if getattr(stock, "func", None) is _tried:
            stock = stock.args[1]
        if getattr(stock, "func", None) is not _forward:
            layer.__dict__["forward"] = functools.partial(ours, layer, stock)
        _prepared.add(layer)
    for module in model.modules() if layers else ():
        for name in _CHECKPOINTS:
            stock = module.__dict__.get(name)
            if stock is not None and getattr(stock, "func", None) is not _checkpoint:
                module.__dict__[name] = functools.partial(_checkpoint, stock)
                _prepared.add(module)
    return stateful if layers else None


def revert(model=None) -> None:
    """Put back what prepare replaced, in one model or in all."""
    for module in list(_prepared) if model is None else [each for each in model.modules() if each in _prepared]:
        _put_back(module, "forward", (_forward, _tried), 1)
        for name in _CHECKPOINTS:
            _put_back(module, name, (_checkpoint,), 0)
        _prepared.discard(module)


def _put_back(module, name, ours, index) -> None:
    function = module.__dict__.get(name)
    if getattr(function, "func", None) in ours:
        if function.args[index] is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = function.args[index]


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


def _tried(layer, stock, *args, **kwargs):
    """In place of the forward of a layer that may have a state: the first packed row shows it."""
    seq_idx = _current_seq_idx()
    run = functools.partial(type(layer).forward, layer) if stock is None else stock
    if seq_idx is None or torch.compiler.is_compiling():
        return run(*args, **kwargs)
    try:
        return _apart(layer, run, seq_idx, args, kwargs)
    finally:
        _put_back(layer, "forward", (_tried,), 1)
        if type(layer) in _learned:
            layer.__dict__["forward"] = functools.partial(_forward, layer, stock)


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
    if hidden is None or hidden.shape[:2] != seq_idx.shape or not hidden.is_floating_point():
        return run(*args, **kwargs)  # another sequence: of images or audio
    seq_idx = seq_idx.to(hidden.device)
    documents = kept_with([seq_idx], ("documents of layers with a state",), lambda: Documents(seq_idx))
    if not documents.several:
        return run(*args, **kwargs)
    way = _way_of(layer, run, named, documents, seq_idx.shape)
    if way == _BY_ITSELF:
        return run(*args, **kwargs)
    call = running.here().call
    while call is not None and call.seq_idx is not None and not call.has_attention and not call.mixes:
        call.used = call.numbers_used = True
        call = call.outer
    named = {name: value for name, value in named.items() if name not in _BOUNDARIES}
    if seq_idx.shape[0] == 1 and not documents.padded and way == _TOLD:
        return run(**named, **_boundaries(seq_idx, documents.cu_seqlens))
    return _in_rows(run, named, documents, seq_idx.shape)


def _in_rows(run, named, documents, shape):
    results = [
        run(**{name: _rows_of(name, value, slots, shape) for name, value in named.items()})
        for slots in documents.batches
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


def _is_mask(value):
    if isinstance(value, dict):
        return any(map(_is_mask, value.values()))
    return not _is_plain(value) or (isinstance(value, torch.Tensor) and value.dim() == 4)


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


_AS_ROWS, _TOLD, _BY_ITSELF = "as rows of a batch", "told by seq_idx and cu_seq_lens_q", "each token by itself"


def _way_of(layer, run, named, documents, shape):
    """How documents are kept apart in layers of this class.

    Raises:
        ValueError: they cannot be.
    """
    key = type(layer), documents.order.device.type
    if key not in _ways:
        named = {name: value for name, value in named.items() if name not in _BOUNDARIES}
        if _is_stateful(layer):
            with _without_dropout(layer):
                _ways[key] = _tried_way(layer, run, named, documents, shape)
        elif any(_is_mask(value) for value in named.values()):
            return _BY_ITSELF  # attention of the model's own, which reads the masks of all documents
        else:
            with _without_dropout(layer), _without_hooks(layer):
                _ways[key] = _learned_way(layer, run, named, documents, shape)
    if _ways[key] not in (_AS_ROWS, _TOLD, _BY_ITSELF):
        raise ValueError(
            f"position_ids: expected one document in each row, got several, and {class_name(layer)} carries a state along "
            f"the sequence and {_ways[key]}; give each document a row of its own (no packing, padding on the right)"
        )
    return _ways[key]


@torch.no_grad()
def _learned_way(layer, run, named, documents, shape):
    """Of a layer whose code says nothing: whether other tokens in the first document change the results of the second."""
    try:
        given, others, _, after = _around(named, documents, shape)
        if not _differ(run(**given), run(**others[0]), after):
            return _BY_ITSELF
    except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError, ValueError):
        return _BY_ITSELF  # no layer with one result for each token, or FSDP has its weights elsewhere
    _learned.add(type(layer))
    return _tried_way(layer, run, named, documents, shape)


@torch.no_grad()
def _tried_way(layer, run, named, documents, shape):
    """_AS_ROWS; _TOLD where its kernels keep documents apart that they are told of; or why neither is possible."""
    if _calls_attention_inside(layer):
        return "calls attention inside, whose documents are those of the whole batch"
    given, others, before, after = _around(named, documents, shape)
    if _differ(run(**given), run(**others[1]), before):
        return "reads tokens ahead"
    boundary, length = documents.boundary, documents.around.shape[1]
    second = {name: _rows_of(name, value, documents.around[:, boundary:], shape) for name, value in named.items()}
    seq_idx = (torch.arange(length, device=after.device) >= boundary).int()[None]
    told = _boundaries(seq_idx, seq_idx.new_tensor([0, boundary, length]))
    try:
        results = [_first_tensor(run(**each, **told))[:, boundary:] for each in (given, others[0])]
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it takes none, or has no kernels that do
        return _AS_ROWS
    close = not _differ(results[0], run(**second), after[:, boundary:])
    return _TOLD if close and torch.equal(*results) else _AS_ROWS


def _around(named, documents, shape):
    """A layer's arguments for the tokens around a boundary, the same with other tokens before it and after it, and 1 at
    the tokens before it and after it."""
    given = {name: _rows_of(name, value, documents.around, shape) for name, value in named.items()}
    hidden = next(name for name, value in given.items() if isinstance(value, torch.Tensor))
    before, after = torch.zeros_like(given[hidden]), torch.zeros_like(given[hidden])
    before[:, : documents.boundary] = after[:, documents.boundary :] = 1
    others = [{**given, hidden: given[hidden] + where * (1 - 3 * given[hidden])} for where in (before, after)]
    return given, others, before, after


def _boundaries(seq_idx, cu_seqlens):
    cu_seqlens = cu_seqlens.int()
    return {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}


def _differ(first, second, where) -> bool:
    """Whether a token among ``where`` has another result, by more than rounding."""
    first, second = (_first_tensor(each).float().flatten(2) for each in (first, second))
    norms = first.norm(dim=-1)
    far = (first - second).norm(dim=-1) > _CLOSE * torch.maximum(norms, 0.01 * norms.mean())
    return bool((far & (where.flatten(2)[..., 0] > 0)).any())


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


@contextlib.contextmanager
def _without_hooks(layer):
    """Who watches the modules inside sees the model's own call of them, and nothing else."""
    names = "_forward_hooks", "_forward_pre_hooks"
    hooks = [(each, name, each.__dict__[name]) for each in layer.modules() for name in names]
    for module, name, kept in hooks:
        module.__dict__[name] = type(kept)()
    try:
        yield
    finally:
        for module, name, kept in hooks:
            module.__dict__[name] = kept


def _first_tensor(result):
    return next(each for each in result if isinstance(each, torch.Tensor)) if isinstance(result, tuple) else result


def class_name(layer) -> str:
    """Without what FSDP puts in front of it."""
    cls = type(layer)
    return cls.__name__ if not cls.__name__.startswith("FSDP") else cls.__mro__[1].__name__
