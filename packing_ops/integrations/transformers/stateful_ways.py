"""How a layer that carries a state keeps documents apart, tried once for its class; see stateful_layers."""

import contextlib
import inspect

import torch

from packing_ops.integrations.transformers.stateful_kinds import (
    calls_attention_inside,
    class_name,
    is_stateful,
    learned,
)
from packing_ops.integrations.transformers.stateful_probe import settle
from packing_ops.integrations.transformers.stateful_rows import hidden_of, is_mask, rows_of

BOUNDARIES = frozenset(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
_CLOSE = 0.05  # of the norm: rounding is far below, what other tokens do is far above
_ways: dict[tuple, str] = {}  # {(class, device type): how its documents are kept apart, or why they cannot be}


_STATEFUL = "carries a state along the sequence and"
_AS_ROWS, TOLD, BY_ITSELF = "as rows of a batch", "told by seq_idx and cu_seq_lens_q", "each token by itself"


def way_of(layer, run, named, documents, shape):
    """How documents are kept apart in layers of this class.

    Raises:
        ValueError: they cannot be.
    """
    key = type(layer), documents.order.device.type
    if key not in _ways:
        named = {name: value for name, value in named.items() if name not in BOUNDARIES}
        if is_stateful(layer):
            with _without_dropout(layer):
                _ways[key] = _tried_way(layer, run, named, documents, shape)
        elif any(is_mask(value) for value in named.values()):
            return BY_ITSELF  # attention of the model's own, which reads the masks of all documents
        else:
            _ways[key] = _learned_way(layer, run, named, documents, shape)
    if _ways[key] not in (_AS_ROWS, TOLD, BY_ITSELF):
        raise ValueError(
            f"position_ids: expected one document in each row, got several, and {class_name(layer)} {_ways[key]}; give each "
            "document a row of its own (no packing, padding on the right)"
        )
    return _ways[key]


def _learned_way(layer, run, named, documents, shape):
    """Of a layer whose code says nothing."""
    with _without_dropout(layer), _without_hooks(layer):
        mixes = _mixes(layer, run, named, documents, shape)
        if mixes:
            learned.add(type(layer))
            return _tried_way(layer, run, named, documents, shape)
    if mixes is None and _is_sharded(layer):
        if not settle(layer, None):
            return "cannot be tried where its weights are on other ranks"
        if type(layer) in learned:
            with _without_dropout(layer):
                return _tried_way(layer, run, named, documents, shape)
    return BY_ITSELF


@torch.no_grad()
def _mixes(layer, run, named, documents, shape) -> bool | None:
    """Whether other tokens in the first document change the results of the second; None where it cannot be told."""
    try:
        given, others, _, after = _around(named, documents, shape)
        return _differ(run(**given), run(**others[0]), after)
    except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError, ValueError):
        return None  # no layer with one result for each token, or FSDP has its weights elsewhere


def _is_sharded(layer) -> bool:
    """Of FSDP, or of ZeRO-3."""
    return any(hasattr(each, "placements") or hasattr(each, "ds_shape") for each in layer.parameters())


@torch.no_grad()
def _tried_way(layer, run, named, documents, shape):
    """_AS_ROWS; TOLD where its kernels keep documents apart that they are told of; or why neither is possible."""
    if calls_attention_inside(layer):
        return f"{_STATEFUL} calls attention inside, whose documents are those of the whole batch"
    given, others, before, after = _around(named, documents, shape)
    if _differ(run(**given), run(**others[1]), before):
        return f"{_STATEFUL} reads tokens ahead"
    boundary, length = documents.boundary, documents.around.shape[1]
    second = {name: rows_of(name, value, documents.around[:, boundary:], shape) for name, value in named.items()}
    seq_idx = (torch.arange(length, device=after.device) >= boundary).int()[None]
    told = boundaries(layer, seq_idx, seq_idx.new_tensor([0, boundary, length]))
    try:
        results = [_first_tensor(run(**each, **told))[:, boundary:] for each in (given, others[0])]
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it takes none, or has no kernels that do
        return _AS_ROWS
    close = not _differ(results[0], run(**second), after[:, boundary:])
    return TOLD if close and torch.equal(*results) else _AS_ROWS


def _around(named, documents, shape):
    """A layer's arguments for the tokens around a boundary, the same with other tokens before it and after it, and 1 at
    the tokens before it and after it."""
    given = {name: rows_of(name, value, documents.around, shape) for name, value in named.items()}
    hidden = next(name for name, value in given.items() if value is not None and value is hidden_of(given.values()))
    before, after = torch.zeros_like(given[hidden]), torch.zeros_like(given[hidden])
    before[:, : documents.boundary] = after[:, documents.boundary :] = 1
    others = [{**given, hidden: given[hidden] + where * (1 - 3 * given[hidden])} for where in (before, after)]
    return given, others, before, after


def boundaries(layer, seq_idx, cu_seqlens):
    """Of these the ones that the layer has names for, or all where it hands on what it is given."""
    cu_seqlens = cu_seqlens.int()
    told = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    taken = inspect.signature(type(layer).forward).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return told
    return {name: value for name, value in told.items() if name in taken}


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
