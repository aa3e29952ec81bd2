"""How a layer that carries a state keeps documents apart, tried once; see stateful_layers."""

import contextlib
import inspect
import weakref

import torch

from packing_ops.integrations.transformers.call import here
from packing_ops.integrations.transformers.stateful_arguments import (
    copied,
    differ,
    token_tensors,
    width_of,
    with_others,
)
from packing_ops.integrations.transformers.stateful_kinds import (
    calls_attention_inside,
    class_name,
    is_stateful,
    learned,
    of_transformers,
)
from packing_ops.integrations.transformers.stateful_probe import settle
from packing_ops.integrations.transformers.stateful_rows import has_masks, rows_of

BOUNDARIES = frozenset(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
_CLOSE = 0.05  # of the norm: rounding is far below, what other tokens do is far above
# {layer: {device type: how its documents are kept apart, or why they cannot be}}
_ways: "weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]]" = weakref.WeakKeyDictionary()


_STATEFUL, _MIXING = "carries a state along the sequence and", "mixes tokens by code of its own, which"
_NOT_RUN = AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError
_AS_ROWS, TOLD, BY_ITSELF = "as rows of a batch", "told by seq_idx and cu_seq_lens_q", "each token by itself"


def way_of(layer, run, named, documents, shape, layout):
    """How documents are kept apart in this layer.

    Raises:
        ValueError: they cannot be.
    """
    ways, device = _ways.setdefault(layer, {}), documents.order.device.type
    if device not in ways:
        named = {name: value for name, value in named.items() if name not in BOUNDARIES}
        with _without_dropout(layer):
            reason = None if is_stateful(layer) else _learn(layer, run, named, documents, shape, layout)
            if reason is None and is_stateful(layer):
                reason = _tried_way(layer, run, named, documents, shape, layout)
        ways[device] = reason or BY_ITSELF
    if ways[device] not in (_AS_ROWS, TOLD, BY_ITSELF):
        raise ValueError(
            f"{_told_by()}: expected one document in each row, got several, and {class_name(layer)} {ways[device]}; give each "
            "document a row of its own (no packing, padding on the right)"
        )
    return ways[device]


def _learn(layer, run, named, documents, shape, layout) -> str | None:
    """Puts a layer whose code says nothing among ``learned`` if it has a state; why it cannot be tried."""
    with _without_hooks(layer):
        mixes = _mixes(run, named, documents, shape, layout)
    if mixes:
        learned.add(layer)
    elif of_transformers(layer) and not _is_sharded(layer):
        return None  # by tests, with other weights: those here may let nothing through yet
    elif not settle(layer, width_of(named, shape, layout)) and mixes is None and _is_sharded(layer):
        return "cannot be tried where its weights are on other ranks"
    return None


@torch.no_grad()
def _mixes(run, named, documents, shape, layout) -> bool | None:
    """Whether tokens of one document change the results of another; None where it cannot be told.

    By the tokens around a boundary, or in a call as the model's own, with masks, where they are not enough.
    """
    for whole in (has_masks(named), True):
        try:
            if whole:
                given, size, (where, after) = named, shape, documents.in_turn
            else:
                given, size, where, after = _around(named, documents, shape, layout)
            others = with_others(given, size, layout, where)
            found = [token_tensors(run(**copied(each, size, layout)), size, layout) for each in (others, given)]
            if (differs := differ(*found, after, _CLOSE)) is not None:
                return differs
        except torch.OutOfMemoryError:  # which says nothing of the layer
            raise
        except _NOT_RUN:
            continue  # no layer with a result for each token, or FSDP has its weights elsewhere
    return None


def _told_by() -> str:
    """The argument of the model's call that says where its documents are."""
    call, told = here().call, None
    while call is not None:  # the outer ones: what they pass on to an inner model may be less
        told = call if call.position_ids is not None or call.cu_seqlens is not None else told
        call = call.outer
    if told is None:
        return "position_ids" if here().call is None else "attention_mask"
    return "cu_seq_lens_q" if told.position_ids is None else "position_ids"


def _is_sharded(layer) -> bool:
    """Of FSDP, or of ZeRO-3."""
    return any(hasattr(each, "placements") or hasattr(each, "ds_shape") for each in layer.parameters())


@torch.no_grad()
def _tried_way(layer, run, named, documents, shape, layout):
    """_AS_ROWS; TOLD where its kernels keep documents apart that they are told of; or why neither is possible."""
    does = _MIXING if layer in learned else _STATEFUL
    if calls_attention_inside(layer):
        return f"{does} calls attention inside, whose documents are those of the whole batch"
    given, size, before, after = _around(named, documents, shape, layout)

    def results(arguments, size, **told):
        return token_tensors(run(**arguments, **told), size, layout)

    try:
        wanted = results(given, size)
        ahead = differ(wanted, results(with_others(given, size, layout, after), size), before, _CLOSE)
    except torch.OutOfMemoryError:
        raise
    except _NOT_RUN as error:
        if layer not in learned:
            raise
        return f"{does} cannot run for a part of the row ({type(error).__name__})"
    if ahead:
        return f"{does} reads tokens ahead"
    others = with_others(given, size, layout, before)
    if not differ(wanted, results(others, size), after, _CLOSE):
        return _AS_ROWS  # nothing comes through yet that being told could keep back
    boundary, (_, length) = documents.boundary, size
    seq_idx = after.int()
    told = boundaries(layer, seq_idx, seq_idx.new_tensor([0, boundary, length]))
    try:
        found = [results(each, size, **told) for each in (given, others)]
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it takes none, or has no kernels that do
        return _AS_ROWS
    first, other = ([each[:, boundary:] for each in tensors] for tensors in found)
    alone = results(rows_of(named, documents.around[:, boundary:], shape, layout), (1, length - boundary))
    close = differ(first, alone, after[:, boundary:], _CLOSE) is False
    return TOLD if close and all(map(torch.equal, first, other)) else _AS_ROWS


def _around(named, documents, shape, layout):
    """A layer's arguments for the tokens around a boundary, their batch and length, and which are before it and after it."""
    given = rows_of(named, documents.around, shape, layout)
    before = (torch.arange(documents.around.shape[1], device=documents.around.device) < documents.boundary)[None]
    return given, tuple(before.shape), before, ~before


def boundaries(layer, seq_idx, cu_seqlens):
    """Of these the ones that the layer has names for, or all where it hands on what it is given."""
    cu_seqlens = cu_seqlens.int()
    told = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    taken = inspect.signature(type(layer).forward).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return told
    return {name: value for name, value in told.items() if name in taken}


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
