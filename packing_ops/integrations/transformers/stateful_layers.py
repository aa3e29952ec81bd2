"""Layers that carry a state along the sequence, each document from a state of its own.

Attention is told where documents end. Mamba, gated delta nets, linear attention and short convolutions take a row for
one document, unless kernels that know boundaries run in them. In a call with several documents in a row, such a layer
gets the documents as rows of a batch, by length and padded on the right, where a causal layer does not look: the
results are those of each document alone.

stateful_kinds.py finds these layers, stateful_ways.py tries how each keeps documents apart, stateful_rows.py is the rows.
"""

import functools
import weakref

import torch

from packing_ops._arguments import int32_cu_seqlens
from packing_ops.integrations._patching import WeakPartial
from packing_ops.integrations.transformers.call import refuse_own_positions
from packing_ops.integrations.transformers.documents import (
    BatchDocuments,
    as_bool,
    find_documents,
    is_tensor,
    positions_of_axes,
    refuse_where,
    several_in,
)
from packing_ops.integrations.transformers.stateful_forwards import checkpoint, forward, put_back, tried
from packing_ops.integrations.transformers.stateful_kinds import (
    by_themselves,
    calls_attention_inside,
    class_name,
    learned,
    module_of,
    of_transformers,
    stateful_layers,
    untried,
)
from packing_ops.integrations.transformers.stateful_probe import settle
from packing_ops.integrations.transformers.stateful_rows import CACHES

# Where models and torch's checkpoint_wrapper keep the function that checkpoints a layer.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
_prepared: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # modules whose functions are replaced by ours


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
    if is_tensor(position_ids, 3) and position_ids.shape[0] == 4:  # of text or a sequence, in front of other axes
        position_ids = position_ids[0]
    if not is_tensor(position_ids, 2):
        position_ids = positions_of_axes(call, tokens.shape[:2])
    if position_ids is None and call.cu_seqlens is None and call.numbers is None:
        return
    refuse_own_positions(model, call, position_ids, tokens.shape[0])
    traced, padded = torch.compiler.is_compiling(), call.padding is not None
    stateful, unknown = _traced_prepare(id(model), padded) if traced else _prepare(model, padded=padded)
    if unknown:
        several = several_in(position_ids, call.padding, call.cu_seqlens, call.numbers, tokens.shape[0])
        refuse_where(several, _unknown(unknown))
    if stateful is None:
        return
    call.has_attention = _traced_has_attention(id(model)) if traced else _has_attention(model)
    call.seq_idx = _seq_idx(tokens, call, position_ids)
    if call.seq_idx is None:
        return
    for name in [name for name in CACHES if name in kwargs] if stateful else ():
        cached = kwargs[name].get_seq_length() if hasattr(kwargs[name], "get_seq_length") else 0
        if isinstance(cached, int) and cached > 0:
            raise ValueError(
                f"{name}: expected an empty cache beside several documents in a row, got {cached} tokens, whose state "
                f"the layers of {class_name(model)} would go on with"
            )


def _unknown(name) -> str:
    return (
        f"position_ids: expected one document in each row, got several, and whether {name} carries a state along the "
        "sequence cannot be tried in a compiled graph; call the model once with a packed row before it is compiled, or "
        "give each document a row of its own"
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


# torch.compile before 2.13 takes a module for no constant, but its id.
@torch.compiler.assume_constant_result
def _traced_has_attention(model_id) -> bool:
    return calls_attention_inside(module_of(model_id))


@torch.compiler.assume_constant_result
def _traced_prepare(model_id, padded) -> tuple[bool | None, str]:
    return prepare(module_of(model_id), True, padded)


# A frame that Dynamo left to Python, behind a break of the graph: it would trace every function that is called from there.
@torch.compiler.disable
def _has_attention(model) -> bool:
    return calls_attention_inside(model)


@torch.compiler.disable
def _prepare(model, padded) -> tuple[bool | None, str]:
    return prepare(model, padded=padded)


# --- in a model ---


def prepare(model, in_graph: bool = False, padded: bool = False) -> tuple[bool | None, str]:
    """(whether the model has layers with a state; None if it has none, and none that were not tried yet. The class of a
    layer that cannot be tried here, or nothing).

    Their forward is ours from now on, until revert, or until they were tried and have none. Rows without padding are
    enough to try layers by, and are looked at by attention too; else they are called by themselves first.
    """
    unknown, unknown_layers = "", untried(model)
    for layer, beside, compiled in unknown_layers:
        alone = in_graph or compiled
        if not (alone or padded) or of_transformers(layer):
            continue
        if not settle(layer, getattr(model.config, "hidden_size", None)) and alone and beside:
            unknown = class_name(layer)
    stateful = stateful_layers(model)
    layers = [(forward, layer) for layer in stateful]
    # A forward of its own for each layer inside what is compiled would be a graph for each.
    of_model = [layer for layer, _, compiled in unknown_layers if not (in_graph or compiled)]
    layers += [(tried, layer) for layer in of_model if _is_to_be_tried(layer, padded)]
    for ours, layer in layers:
        stock = layer.__dict__.get("forward")
        if getattr(stock, "func", None) is tried:
            stock = stock.args[0]
        if getattr(stock, "func", None) is not forward:
            layer.__dict__["forward"] = WeakPartial(ours, layer, stock)
        _prepared.add(layer)
    for module in model.modules() if layers else ():
        for name in _CHECKPOINTS:
            stock = module.__dict__.get(name)
            if stock is not None and getattr(stock, "func", None) is not checkpoint:
                module.__dict__[name] = functools.partial(checkpoint, stock)
                _prepared.add(module)
    return (bool(stateful) if layers else None), unknown


def _is_to_be_tried(layer, padded) -> bool:
    return not (layer in by_themselves or layer in learned or (padded and of_transformers(layer)))


def revert(model=None) -> None:
    """Put back what prepare replaced, in one model or in all."""
    for module in list(_prepared) if model is None else [each for each in model.modules() if each in _prepared]:
        put_back(module, "forward", (forward, tried))
        for name in _CHECKPOINTS:
            put_back(module, name, (checkpoint,))
        _prepared.discard(module)
