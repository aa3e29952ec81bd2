"""What stands in place of a layer's forward while it is tried or served; see stateful_layers."""

import functools

import torch

from packing_ops._batch_cache import kept_with
from packing_ops.integrations._patching import WeakPartial
from packing_ops.integrations.transformers.call import here, traced
from packing_ops.integrations.transformers.stateful_arguments import layout_of, token_tensors
from packing_ops.integrations.transformers.stateful_kinds import by_themselves, learned
from packing_ops.integrations.transformers.stateful_rows import Documents, by_name, in_rows
from packing_ops.integrations.transformers.stateful_ways import BOUNDARIES, BY_ITSELF, TOLD, boundaries, way_of


def put_back(module, name, ours) -> None:
    function = module.__dict__.get(name)
    if getattr(function, "func", None) in ours:
        stock = function.args[0]
        if stock is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = stock


def checkpoint(stock, function, *args, **kwargs):
    """The layer is run again in backward, when the model's call is over: it takes the documents along."""
    seq_idx = _current_seq_idx()
    if seq_idx is None or torch.compiler.is_compiling():
        return stock(function, *args, **kwargs)
    return stock(functools.partial(_with_documents, seq_idx, function), *args, **kwargs)


def _with_documents(seq_idx, function, *args, **kwargs):
    now = here()
    before, now.seq_idx = now.seq_idx, seq_idx
    try:
        return function(*args, **kwargs)
    finally:
        now.seq_idx = before


def _current_seq_idx():
    now = here()
    call = now.call or traced.call
    return now.seq_idx if call is None or now.seq_idx is not None else call.seq_idx


def forward(layer, stock, *args, **kwargs):
    """In place of the forward of a layer with a state."""
    seq_idx = _current_seq_idx()
    run = functools.partial(type(layer).forward, layer) if stock is None else stock
    if seq_idx is None:
        return run(*args, **kwargs)
    return _apart(layer, run, seq_idx, args, kwargs)


def tried(layer, stock, *args, **kwargs):
    """In place of the forward of a layer that may have a state: the first packed row shows it."""
    seq_idx = _current_seq_idx()
    run = functools.partial(type(layer).forward, layer) if stock is None else stock
    if seq_idx is None or torch.compiler.is_compiling():
        return run(*args, **kwargs)
    try:
        return _apart(layer, run, seq_idx, args, kwargs)
    finally:
        put_back(layer, "forward", (tried,))
        if layer in learned:
            layer.__dict__["forward"] = WeakPartial(forward, layer, stock)


@torch.compiler.disable(reason="packing_ops: how many documents a row has is known when the layer runs")
def _apart(layer, run, seq_idx, args, kwargs):
    run, named = by_name(layer, run, args, kwargs)
    found = _documents_of(named, seq_idx)
    if found is None:
        return run(**named)  # another sequence: of images or audio
    documents, shape, layout = found
    if not documents.several:
        return run(**named)
    way = way_of(layer, run, named, documents, shape, layout)
    if way == BY_ITSELF:
        by_themselves.add(layer)
        return run(**named)
    call = here().call
    while call is not None and call.seq_idx is not None and not call.has_attention and not call.mixes:
        call.used = call.numbers_used = True
        call = call.outer
    named = {name: value for name, value in named.items() if name not in BOUNDARIES}
    if seq_idx.shape[0] == 1 and not documents.padded and way == TOLD:
        return run(**named, **boundaries(layer, seq_idx, documents.cu_seqlens))
    return in_rows(run, named, documents, shape, layout)


def _documents_of(named, seq_idx):
    """(Documents, their batch and length, the layout of a layer's arguments), or None."""
    shape = tuple(seq_idx.shape)
    layout = layout_of(named, shape)
    if layout is None:
        return None
    seq_idx = seq_idx.to(next(each.device for each in token_tensors(named, shape, layout)))
    return kept_with([seq_idx], ("documents of layers with a state",), lambda: Documents(seq_idx)), shape, layout
