"""Which layers of a model carry a state along the sequence; see stateful_layers.

Recognised by what a layer is: it holds a convolution along the sequence or a torch RNN, or its code calls a recurrence
or keeps the state of one in the cache. Other layers are tried, see stateful_ways.
"""

import ast
import functools
import gc
import inspect
import re
import sys
import weakref

import torch

from packing_ops.integrations.transformers.versions import PreTrainedModel

# In the code of a layer: names of recurrences, and of their states in transformers' caches.
_STATE = re.compile(
    r"causal_conv1d|conv_state|ssm_state|recurrent_state|rnn_state|linear_cache|_scan\(|time_shift|linear_attention\("
    r"|delta_rule|delta_attention|mlstm|wkv"
)
# Layers: tried, and with a state; tried, and without; not to be tried alone; with attention or a state inside. Not
# classes: of two layers of one, a flag may give a state to the second.
learned: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
by_themselves: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
not_settled: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
_parting: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


@functools.cache
def source_of(cls: type) -> str:
    """The code of a module's class and of those it inherits from, without torch's; empty where there is none."""
    sources = []
    for base in cls.__mro__:
        if issubclass(base, torch.nn.Module) and not base.__module__.startswith("torch."):
            try:
                source = _classes_in(base.__module__).get(base.__qualname__)
                sources.append(inspect.getsource(base) if source is None else source)
            except (OSError, TypeError):
                continue
    return "\n".join(sources)


@functools.cache
def _classes_in(module: str) -> dict[str, str]:
    """The code of transformers' classes by name: inspect.getsource would parse the module's file for each of them."""
    if not module.startswith("transformers."):
        return {}  # code from the Hub may be loaded again under its name
    source = inspect.getsource(sys.modules[module])
    lines, classes = source.splitlines(), [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in classes}


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


def is_stateful(module) -> bool:
    cls = type(module)
    return _has_recurrent_code(cls) or module in learned or any(map(_reads_neighbours, module._modules.values()))


def stateful_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules of a model that carry a state along the sequence; empty for attention alone."""
    found = []
    for child in model._modules.values():
        if child is None:
            continue
        if _has_recurrent_code(type(child)) or child in learned:
            inside = stateful_layers(child)
            # A layer that only passes the state of what is inside of it on, as decoder layers do with their cache.
            holds = any(map(_reads_neighbours, child._modules.values())) or not inside
            found += [child] if holds or not calls_attention_inside(child) else inside
        elif is_stateful(child):
            found.append(child)
        else:
            found += stateful_layers(child)
    return found


def untried(module, of_text: bool = True, compiled: bool = False) -> list[tuple[torch.nn.Module, bool, bool]]:
    """The outermost modules whose code says nothing of a state, and which were not tried yet; each with whether
    it stands beside attention in a model of text, and not around an image, and whether it or one around it is compiled."""
    found = []
    if isinstance(module, PreTrainedModel):
        of_text = reads_text(type(module))
    beside = of_text and not isinstance(module, PreTrainedModel) and not type(module).__module__.startswith("torch.")
    for child in module._modules.values():
        cls = type(child)
        if child is None or child in by_themselves or calls_interface(cls) or is_stateful(child):
            continue
        if child in _parting or _parts_it(child):
            _parting.add(child)
            found += untried(child, of_text, compiled or child._compiled_call_impl is not None)
        else:
            found.append((child, beside, compiled or child._compiled_call_impl is not None))
    return found


@functools.cache
def reads_text(cls) -> bool:
    return not {"input_ids", "inputs_embeds"}.isdisjoint(inspect.signature(cls.forward).parameters)


def _parts_it(module) -> bool:
    """It has attention, or a layer with a state, inside: its own code passes tokens from one to the other."""
    if isinstance(module, PreTrainedModel) or type(module).__module__.startswith("torch."):
        return True
    return any(calls_interface(type(each)) or is_stateful(each) for each in module.modules())


def calls_attention_inside(module) -> bool:
    return any(calls_interface(type(each)) for each in module.modules())


@functools.cache
def calls_interface(cls: type) -> bool:
    """Its code calls the attention that attn_implementation names."""
    return not issubclass(cls, PreTrainedModel) and bool(
        re.search(r"attention_interface\(|ALL_ATTENTION_FUNCTIONS", source_of(cls))
    )


def of_transformers(layer) -> bool:
    """Its class is tried by the tests."""
    return type(layer).__module__.startswith("transformers.")


def class_name(layer) -> str:
    """Without what FSDP puts in front of it."""
    cls = type(layer)
    return cls.__name__ if not cls.__name__.startswith("FSDP") else cls.__mro__[1].__name__


def module_of(module_id: int) -> torch.nn.Module:
    """The module whose id this is. Looked for once, while torch.compile traces a model's call."""
    return next(each for each in gc.get_objects() if id(each) == module_id)
