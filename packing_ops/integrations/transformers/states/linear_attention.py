"""Hybrid models by causal_conv1d, gated_delta_rule and mamba2_scan, which know the documents of a row.

The layers look these functions up in their modelling module, which all models of a family share. While a swapped model
lives, a dispatcher replaces each. A swapped model's call has one keyword more, DOCUMENTS, which reaches the
functions through the layers' ``**kwargs``. A dispatcher serves the calls that bring it; others get the stock function.
So nothing is looked up while a layer runs: recomputation, threads and torch.compile see the same arguments.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from transformers.activations import ACT2FN

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import sum_dtype
from packing_ops._runtime.batch_cache import dense_cu_seqlens, kept_with
from packing_ops.conv import causal_conv1d
from packing_ops.integrations import _patching
from packing_ops.integrations._patching import Patch, kept_with_class
from packing_ops.integrations._trial import alike, attempt, numbers, quiet, with_gradients
from packing_ops.integrations._walks import DOCUMENTS, SWAPPED, kept_with_model
from packing_ops.integrations.transformers.states.stateful_rows import in_rows, keeps_apart
from packing_ops.integrations.transformers.versions import PreTrainedModel, unwrapped
from packing_ops.scan import gated_delta_rule, mamba2_scan

_HOST = "transformers."

# --- the functions of a modelling module ---


def _convolution(documents, hidden_states, weight, bias=None, activation=None):
    """causal_conv1d_fn of transformers: hidden_states ``[batch, channels, seqlen]``."""
    before = 0 if documents is None else hidden_states.shape[2] - documents.seq_idx.shape[1]
    if before > 0 and hidden_states.shape[2] == weight.shape[1]:  # a short prompt, which an empty cache fills up
        out = _convolution(documents, hidden_states[..., before:], weight, bias, activation)
        return torch.nn.functional.pad(out, (before, 0))
    dtype = hidden_states.dtype
    if torch.is_autocast_enabled(hidden_states.device.type):
        weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
    rows = hidden_states.to(weight.dtype).transpose(1, 2)
    inside = activation in (None, "silu", "swish")

    def scan(rows, cu_seqlens, **states):
        out, state = causal_conv1d(rows, weight, bias, cu_seqlens, activation=activation if inside else None, **states)
        return out if inside else ACT2FN[activation](out), state

    state = rows.shape[2], weight.shape[1] - 1
    out, _ = _scanned(scan, [rows], documents, state, rows.dtype, constants=[weight, bias])
    return out.transpose(1, 2).to(dtype)


def _delta_rule(
    documents,
    query,
    key,
    value,
    g,
    beta,
    chunk_size=64,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    *,
    stock=None,
):
    """chunk_gated_delta_rule of transformers: query ``[batch, seqlen, heads, head_dim]``.

    stock: chunk_kimi_delta_attention, whose decay is of each channel: it runs, documents as rows.
    """
    tensors, dtype = [query, key, value.to(query.dtype), g, beta], sum_dtype(query.dtype)
    state = value.shape[2], key.shape[3], value.shape[3]
    if stock is None:
        scan = functools.partial(gated_delta_rule, use_qk_l2norm=use_qk_l2norm_in_kernel)
        initial_state = None if initial_state is None else initial_state.float()
        return _scanned(scan, tensors, documents, state, dtype, initial_state, output_final_state)
    tensors[2] = value
    rule = functools.partial(stock, chunk_size=chunk_size, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if documents is None:
        return rule(*tensors, initial_state=initial_state, output_final_state=output_final_state)
    scan = functools.partial(in_rows, rule)
    return _scanned(scan, tensors, documents, state, torch.float32, initial_state, output_final_state)


def _mamba2(
    documents,
    hidden_states,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
):
    """mamba2_chunk_scan of transformers: hidden_states ``[batch, seqlen, heads, head_dim]``."""
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def scan(x, dt, B, C, cu_seqlens, **states):
        return mamba2_scan(x, dt, A, B, C, cu_seqlens, **options, **states)

    dtype = hidden_states.dtype
    tensors, constants = [hidden_states, dt, B.to(dtype), C.to(dtype)], [A, D, dt_bias]
    state, of_state = (*hidden_states.shape[2:], B.shape[3]), sum_dtype(dtype)
    initial_state = None if initial_states is None else initial_states.float()
    out, final = _scanned(scan, tensors, documents, state, of_state, initial_state, return_final_states, constants)
    return (out, final) if return_final_states else out


def _apart(documents, *args):
    """mamba2_split_conv1d_scan_combined of transformers: None has the layer call the convolution and the scan."""


def _scanned(scan, tensors, documents, state, dtype, initial_state=None, output_final_state=False, constants=()):
    """Return (out, the state after each row's last document, as a cache holds one a row, or None) of tensors
    ``[batch, seqlen, ...]`` by ``scan(*rows, cu_seqlens, initial_state=..., ...)`` of packed rows, without padding.

    A branch of a prefix tree begins with its parent's state, a document that goes on on this rank with the one that
    the rank before sends.

    state, dtype: of one document. constants: tensors that scan holds.
    """
    batch, seqlen = tensors[0].shape[:2]
    given = {"initial_state": initial_state, "output_final_state": output_final_state}
    if documents is None:
        rows = [each.flatten(0, 1) for each in tensors]
        out, final = scan(*rows, dense_cu_seqlens(batch, seqlen, rows[0], "hidden_states"), **given)
        return out.unflatten(0, (batch, seqlen)), final
    if documents.seq_idx.shape != (batch, seqlen):
        raise ValueError(
            f"hidden_states: expected the {list(documents.seq_idx.shape)} tokens of the batch, whose rows hold several "
            f"documents, got {[batch, seqlen]}"
        )
    # Packed rows, and the states between them
    device, indices = tensors[0].device, documents.indices
    if indices is None:
        rows = [each.flatten(0, 1) for each in tensors]
    else:
        indices = indices.to(device)
        rows = gate.gather_rows_many(tensors, indices, indices.shape[0])
    if documents.paths is not None:
        out, final = _over_tree(scan, rows, documents.paths)
    elif documents.ranks is None:
        out, final = scan(*rows, documents.cu_seqlens.to(device), **given)
    else:  # a call with a cache is refused, see stateful
        scan, final = functools.partial(scan, *rows, documents.cu_seqlens.to(device)), None
        out = documents.ranks.scanned(scan, [*rows, *constants], state, dtype)
    # Back in the batch
    out = out.unflatten(0, (batch, seqlen)) if indices is None else gate.scatter_rows(out, indices, batch, seqlen)
    if final is not None:  # -1, of a row without a token, finds the zeros at the end
        final = torch.cat([final, final.new_zeros(1, *final.shape[1:])])[documents.seq_idx.amax(1).to(device).long()]
    return out, final


@torch.compiler.disable(reason="packing_ops: how many levels a tree has is known when the layer runs")
def _over_tree(scan, rows, paths):
    """Return (out, the states after each segment): segments level by level, each from the state after its parent."""
    levels, segments = kept_with(paths[:3], ("levels",), lambda: _levels(paths))
    outs, states = [], []
    for slots, level_cu_seqlens, before in levels:
        initial = states[-1].index_select(0, before) if states else None
        of_level = (each.index_select(0, slots) for each in rows)
        out, final = scan(*of_level, level_cu_seqlens, initial_state=initial, output_final_state=True)
        outs.append(out)
        states.append(final)
    slots = torch.cat([slots for slots, _, _ in levels]).argsort()
    return torch.cat(outs).index_select(0, slots), torch.cat(states).index_select(0, segments)


def _levels(paths):
    """Return [(rows, cu_seqlens, parents in the level above)] by depth, and where each segment is among all levels'."""
    device, edges = paths.segments.device, paths.segments.cpu().long()
    ends, lengths = paths.cu_seqlens.cpu().long()[1:], edges.diff()
    before = paths.slot_of_key.cpu().long()[(ends - lengths - 1).clamp(min=0)]  # on the path to a segment
    parents = torch.searchsorted(edges, before, right=True) - 1
    parents = parents.masked_fill(paths.cu_seqlens.diff().cpu() == lengths, -1).tolist()
    edges = edges.tolist()
    levels, depths, place, found = [], [], [], []
    for segment, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if depths[-1] == len(levels):
            levels.append([])
        place.append(len(levels[depths[-1]]))
        levels[depths[-1]].append(segment)
    for chosen in levels:
        slots = torch.cat([torch.arange(edges[i], edges[i + 1], device="cpu") for i in chosen])
        lengths = torch.tensor([0, *(edges[i + 1] - edges[i] for i in chosen)], device="cpu")
        before = torch.tensor([place[parents[i]] for i in chosen], dtype=torch.int64, device="cpu")  # roots: not read
        found.append(tuple(each.to(device) for each in (slots, lengths.cumsum(0).int(), before)))
    order = [segment for chosen in levels for segment in chosen]
    return found, torch.tensor(order, dtype=torch.int64, device="cpu").argsort().to(device)


# They take one token of a cache, and no documents.
_OF_ONE_TOKEN = frozenset((
    "causal_conv1d_update", "torch_recurrent_gated_delta_rule", "mamba2_selective_state_update",
    "recurrent_kimi_delta_attention",
))  # fmt: skip
# Names of functions that carry something from token to token.
_SEQUENTIAL = re.compile(r"causal_conv1d\w*|\w*(delta_rule|delta_attention|_kda|_scan_combined|_scan|state_update)")


@functools.cache
def patches_of(module_name: str) -> dict[str, Patch]:
    """Return {function: its Patch} of a modelling module, of the functions that ours agree with."""
    module = importlib.import_module(module_name)
    found = {name: rule for name, rule in _RULES.items() if hasattr(module, name)}
    return {name: _patch(module, name, rule) for name, rule in found.items() if _agrees(vars(module)[name], *rule)}


def _patch(module, name, rule) -> Patch:
    known = frozenset([*inspect.signature(rule.ours).parameters][1:])

    def make(stock):
        ours = functools.partial(rule.ours, stock=stock) if rule.in_rows else rule.ours

        @functools.wraps(stock)
        def dispatch(*args, **kwargs):
            if DOCUMENTS not in kwargs:
                return stock(*args, **kwargs)
            return ours(kwargs[DOCUMENTS], *args, **{name: value for name, value in kwargs.items() if name in known})

        return dispatch

    return Patch(module, name, make)


# --- the trial ---


@kept_with_class
@torch.compiler.disable
def _agrees(stock, ours, cases, in_rows) -> bool:
    """Return whether ours has the results and gradients of a stock function, without a library that stands in for
    it.
    """
    stock = inspect.unwrap(stock)
    parameters = inspect.signature(stock).parameters
    wanted = [*inspect.signature(ours).parameters][2:]  # the first tensor goes by place
    wanted = [name for name in wanted if name != "stock"]
    if in_rows:
        return [*parameters][1 : len(wanted) + 1] == wanted and keeps_apart(stock)
    if cases is None:
        needed = [
            each for each in parameters.values() if each.default is each.empty and each.kind < each.VAR_POSITIONAL
        ]
        return attempt(stock, *[None] * len(needed)) is None
    if [name for name in [*parameters][1:] if name not in ("kwargs", "args")] != wanted:
        return False
    with quiet():
        for dtype in (torch.float32, torch.bfloat16):
            for inputs, options in cases():
                inputs = [each.to(dtype) for each in inputs]
                names = [name for name in wanted if name not in options]
                found, theirs = (
                    with_gradients(functools.partial(_results, each, names, options), inputs)
                    for each in (functools.partial(ours, None), stock)
                )
                if not alike(found, theirs, 64):
                    return False
    return True


def _results(function, names, options, *inputs):
    """Return the tensors that came, in the inputs' dtype: of bfloat16 some functions make float32."""
    result = attempt(function, inputs[0], **dict(zip(names, inputs[1:], strict=False)), **options)
    found = result if isinstance(result, tuple) else (result,)
    return tuple(each.to(inputs[0].dtype) for each in found if isinstance(each, torch.Tensor))


def _convolutions():
    """Return [(inputs, options)]: two rows, with and without a bias and silu, of 2 to 4 taps."""
    for taps, bias, activation in ((4, False, "silu"), (3, True, None), (2, True, "silu")):
        inputs = [numbers(2, 8, 11), numbers(8, taps, start=1.0)] + [numbers(8, start=2.0)] * bias
        yield inputs, {"activation": activation}


def _delta_rules():
    """Return [(inputs, options)]: rows of more than a chunk; grouped heads; norms inside; a state before and after."""
    for heads, tokens, options in (
        (2, 70, {"use_qk_l2norm_in_kernel": True}),
        (1, 5, {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "initial_state": numbers(2, 2, 16, 8)}),
    ):
        q, k = (numbers(2, tokens, heads, 16, start=start) for start in (0.0, 1.0))
        g, beta = -numbers(2, tokens, 2, start=3.0).abs(), numbers(2, tokens, 2, start=4.0).abs()
        yield [q, k, numbers(2, tokens, 2, 8, start=2.0), g, beta], options


def _mamba2_scans():
    """Return [(inputs, options)]: rows of several chunks, groups and limits; a state before and after."""
    for groups, tokens, options in (
        (2, 21, {"D": numbers(4, start=5.0), "dt_softplus": True, "dt_limit": (0.1, 0.9)}),
        (1, 5, {"return_final_states": True, "initial_states": numbers(2, 4, 8, 16), "dt_softplus": True}),
    ):
        x, dt = numbers(2, tokens, 4, 8), numbers(2, tokens, 4, start=1.0)
        B, C = (numbers(2, tokens, groups, 16, start=start) for start in (2.0, 3.0))
        options = {"chunk_size": 8, "dt_bias": numbers(4, start=4.0), **options}
        yield [x, dt, -numbers(4, start=6.0).abs(), B, C], options


class Rule(NamedTuple):
    """What serves a function of transformers."""

    ours: Callable
    cases: Callable | None = None  # of the trial; None: both return None, or in_rows
    in_rows: bool = False  # ours runs the stock function, documents as rows


_RULES = {
    "causal_conv1d_fn": Rule(_convolution, _convolutions),
    "torch_chunk_gated_delta_rule": Rule(_delta_rule, _delta_rules),
    "chunk_kimi_delta_attention": Rule(_delta_rule, in_rows=True),
    "mamba2_chunk_scan": Rule(_mamba2, _mamba2_scans),
    "mamba2_split_conv1d_scan_combined": Rule(_apart),
}


# --- the layers of a model ---


def stock_rules(classes: Iterable[type]) -> str:
    """Return what swapped layers leave to transformers, as the end of a sentence; empty if nothing."""
    names = (name for cls in classes for name in functions_called(unwrapped(cls)))
    rule = next((name for name in names if name in _RULES and _RULES[name].in_rows), None)
    return f", but {rule} is transformers', its documents rows of batches" if rule else ""


def why_by_place(model: torch.nn.Module) -> str | None:
    """Return why bits of a delta rule may depend on a token's place: on the CPU, or where it is transformers'; else
    None.
    """
    for name, module in model.named_modules():
        on_cpu = any(parameter.is_cpu for parameter in module.parameters(recurse=False))
        if rule := stock_rules([type(module)]):
            return f"{name}: rows that were tried agree{rule}, whose sums may go by their size"
        if on_cpu and "torch_chunk_gated_delta_rule" in functions_called(unwrapped(type(module))):
            return (
                f"{name}: rows that were tried agree, but torch's softplus and sigmoid of its heads round otherwise in "
                "the last elements of a row on the CPU"
            )
    return None


def layers_in(model: torch.nn.Module) -> dict[torch.nn.Module, str | None]:
    """Return {layer: why it cannot be swapped, or None}, of the layers that call functions which carry a state."""
    found = {}
    for module in model.modules():
        if functions_called(cls := unwrapped(type(module))):
            found[module] = why_not_class(cls)
    return found


@kept_with_class
def functions_called(cls: type) -> tuple[str, ...]:
    """Return the names of functions that carry a state from token to token, of those that this layer's forward
    calls.
    """
    if not cls.__module__.startswith(_HOST) or issubclass(cls, PreTrainedModel):
        return ()
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    home = vars(importlib.import_module(cls.__module__))
    return tuple(name for name in getattr(code, "co_names", ()) if _SEQUENTIAL.fullmatch(name) and name in home)


def why_not_class(cls: type) -> str | None:
    served = patches_of(cls.__module__)
    left = [name for name in functions_called(cls) if name not in served and name not in _OF_ONE_TOKEN]
    if left:
        return (
            "documents run as rows of a batch, slower: "
            f"{cls.__name__} calls {left[0]}, which no op of packing_ops computes"
        )
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.forward).parameters.values()):
        return f"{cls.__name__} takes no **kwargs in this version of transformers"
    return None


def why_not(model: torch.nn.Module) -> str | None:
    """Return why layers of this model are not swapped; None if all are that could be, or there are none."""
    return "; ".join(dict.fromkeys(reason for reason in layers_in(model).values() if reason)) or None


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """Return (layers that run ours, those that can)."""
    found = [layer for layer, reason in layers_in(model).items() if reason is None]
    return sum(is_swapped(layer) for layer in found), len(found)


def is_swapped(layer: torch.nn.Module) -> bool:
    return SWAPPED in vars(layer)


def apply_to_model(model: torch.nn.Module) -> None:
    """Let the layers that can run ours do so from now on."""
    for layer, reason in layers_in(model).items():
        if reason is None:
            vars(layer)[SWAPPED] = True
            _patching.apply_all(patches_of(unwrapped(type(layer)).__module__), layer)


def release(model: torch.nn.Module) -> None:
    """Put back the functions of modelling modules that only this model needed."""
    for home in {unwrapped(type(layer)).__module__ for layer in layers_in(model)}:
        _patching.release(patches_of(home), model)


# --- a call of a model ---


@kept_with_model
def _homes(model) -> tuple[str, ...]:
    """Return the modelling modules of the swapped layers in this model, without those in models inside of it."""
    homes = {layer: unwrapped(type(layer)).__module__ for layer in _of(model) if is_swapped(layer)}
    for layer, home in homes.items():
        _patching.apply_all(patches_of(home), layer)
    return tuple(dict.fromkeys(homes.values()))


def _of(module):
    for child in module._modules.values():
        if child is not None and not isinstance(child, PreTrainedModel):
            yield child
            yield from _of(child)


def with_documents(model, call, kwargs):
    """Return the keyword arguments of a call, with DOCUMENTS where layers of this model read it."""
    homes = _homes(call, model)
    if not homes:
        return kwargs
    for home in homes if not torch.compiler.is_compiling() else ():
        if not all(patch.is_applied for patch in patches_of(home).values()):  # another library has replaced one
            _patching.apply_all(patches_of(home), model)
    documents = call.row_documents
    if documents is not None and not documents.has_attention:  # these layers are where they have to arrive
        for each in (call, *call.outers):
            each.unconsumed.clear()
    return {**kwargs, DOCUMENTS: documents}
