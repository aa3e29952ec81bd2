"""RoPE of a model by apply_rotary_qk: its rotary embedding is tagged, and the functions of its module see the tag."""

import importlib
import inspect
import sys
from typing import NamedTuple

import torch

from packing_ops.integrations._patching import revert_left
from packing_ops.integrations.transformers import vision_rope
from packing_ops.integrations.transformers.axes import TIME, first_axis
from packing_ops.integrations.transformers.positions import give_axes, give_position_ids
from packing_ops.integrations.transformers.rope_functions import (
    HOSTS,
    PATCHES,
    Tables,
    dispatch_for,
    functions_called,
    patches_of,
    refusal,
)


class Rotating(NamedTuple):
    """A language model inside, its rotary embedding, and the attention that calls the functions of its module."""

    owner: torch.nn.Module
    rotary: torch.nn.Module
    attentions: list[torch.nn.Module]


def is_rotary(cls: type) -> bool:
    """The rotary embedding of a language model: its angles are those of positions, not of an image's patches."""
    name = cls.__name__
    return cls.__module__.startswith(HOSTS) and "RotaryEmbedding" in name and "Vision" not in name


def attentions(owner, module_name: str) -> list[torch.nn.Module]:
    """Those that call a function that we serve."""
    served = patches_of(module_name)
    return [
        module
        for module in owner.modules()
        if type(module).forward.__module__ == module_name and served.keys() & {*functions_called(type(module))}
    ]


def find(model: torch.nn.Module) -> tuple[list[Rotating], list[str]]:
    """All language models inside that can rotate with ours, and why others, or parts of them, cannot."""
    found, reasons = [], []
    for owner, rotary in _pairs(model):
        module_name = type(rotary).__module__
        ours = [] if (own := _own_attention(owner)) else attentions(owner, module_name)
        if ours:
            found.append(Rotating(owner, rotary, ours))
        reasons += _reasons(owner, module_name, own)
    return found, list(dict.fromkeys(reasons))


def _pairs(model) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Every rotary embedding with the module that has it, by itself or in a list of one for each base."""
    lists = torch.nn.ModuleList, torch.nn.ModuleDict
    found = []
    for owner in model.modules():
        children = [] if isinstance(owner, lists) else list(owner.children())
        inside = [inner for child in children if isinstance(child, lists) for inner in child.children()]
        found += [(owner, child) for child in children + inside if is_rotary(type(child))]
    return found


def _own_attention(owner) -> str | None:
    """Somebody's own attention may do with its angles what it likes."""
    for cls in dict.fromkeys(type(module) for module in owner.modules()):
        if cls.__name__.endswith("Attention") and not cls.forward.__module__.startswith((*HOSTS, "torch.")):
            return f"{cls.__name__} has a forward of its own, in {cls.forward.__module__}"
    return None


def _reasons(owner, module_name, own) -> list[str]:
    if own:
        return [own]
    module = importlib.import_module(module_name)
    called = {name: type(each) for each in owner.modules() for name in functions_called(type(each))}
    called = {name: cls for name, cls in called.items() if cls.forward.__module__ == module_name}
    if not called:
        return [f"{type(owner).__name__} calls no function of {module_name} that rotates q and k"]
    return [reason for name in called if name in vars(module) and (reason := refusal(module, name))]


def owners(model: torch.nn.Module) -> list[Rotating]:
    return find(model)[0]


def why_not(model: torch.nn.Module) -> str | None:
    """Why RoPE of this model, or of a part of it, stays as it is; None if all of it is swapped."""
    found, reasons = find(model)
    towers = vision_rope.attentions(model)
    if found or reasons or towers:
        return "; ".join(reasons) or None
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        for name in functions_called(cls) if cls.__module__.startswith(HOSTS) else ():
            home = sys.modules[inspect.unwrap(cls.forward).__module__]
            if not hasattr(home, name):
                return f"{cls.__name__} rotates by a method of its own"
            return refusal(home, name) or f"{cls.__name__} has angles that come from no rotary embedding"
    return "no rotary embedding was found in it"


def count(found: list[Rotating]) -> int:
    return len({id(module) for each in found for module in each.attentions})


def apply_to_model(model: torch.nn.Module, fp32_cos_sin: bool) -> int:
    """How many attention modules rotate with ours from now on."""
    found = owners(model)
    revert_left()
    for owner, rotary, _ in found:
        _remove_hooks(owner, rotary)
    for owner, rotary, _ in found:
        dispatch_for(rotary, type(rotary).__module__)
        rotary.register_forward_hook(_tag)
        if fp32_cos_sin:
            rotary.register_forward_pre_hook(_ask_for_fp32)
        hook = give_axes if first_axis(type(owner)) == TIME else give_position_ids
        takes = "position_ids" in inspect.signature(owner.forward).parameters
        if takes and hook not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(hook, with_kwargs=True)
    return count(found) + vision_rope.apply_to_model(model)


def rotates(rotary: torch.nn.Module) -> bool:
    """Whether ours rotates."""
    return _tag in rotary._forward_hooks.values()


def revert_model(model: torch.nn.Module) -> None:
    vision_rope.revert_model(model)
    for owner, rotary in _pairs(model):
        _remove_hooks(owner, rotary)
        for patch in PATCHES.get(type(rotary).__module__, {}).values():
            patch.revert(rotary)
    revert_left()


def _remove_hooks(owner, rotary) -> None:
    for hooks in (rotary._forward_hooks, rotary._forward_pre_hooks, owner._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
            del hooks[key]
            owner._forward_pre_hooks_with_kwargs.pop(key, None)


def _tag(rotary, args, output):
    revert_left()
    dispatch_for(rotary, type(rotary).__module__)  # a copy or an unpickled model brings its hooks alone
    if isinstance(output, torch.Tensor):
        return Tables(output) if output.is_complex() else output
    if not isinstance(output, tuple) or len(output) != 2:
        return output  # of another form: the functions of its module get what they know
    cos, sin = output
    return Tables(cos), sin


def _ask_for_fp32(rotary, args):
    x, *others = args
    return (_in_fp32(x), *others)


def _in_fp32(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings compute in fp32 and read nothing of x but its device, its shape and the dtype to cast down to."""
    return x if x.dtype in (torch.float32, torch.float64) else x.new_empty((), dtype=torch.float32).expand(x.shape)


_HOOKS = (_tag, _ask_for_fp32, give_position_ids, give_axes)
