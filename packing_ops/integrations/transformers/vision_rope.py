"""RoPE of the attention of vision and audio towers: its tables come with each call, as position_embeddings."""

import functools
import inspect

import torch

from packing_ops.integrations._patching import revert_left
from packing_ops.integrations.transformers.module_class import stock_of
from packing_ops.integrations.transformers.rope_functions import (
    HOSTS,
    Tables,
    dispatch_for,
    functions_called,
    patches_of,
    rotation_in,
)


def attentions(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that rotate all tokens ``[total, num_heads, head_dim]`` by functions that we serve."""
    return [module for module in model.modules() if "forward" not in vars(module) and _served(stock_of(type(module)))]


def _served(cls: type) -> bool:
    if not _takes_tables(cls, cls.forward):
        return False
    patches = patches_of(cls.__module__)
    rotations = [rotation_in(patches[name]) if name in patches else None for name in functions_called(cls)]
    return bool(rotations) and all(getattr(rotation, "tokens", False) for rotation in rotations)


@functools.cache
def _takes_tables(cls: type, forward) -> bool:
    if not cls.__module__.startswith(HOSTS) or forward.__module__ != cls.__module__:
        return False
    parameters = [*inspect.signature(forward).parameters]
    return parameters[1:3] == ["hidden_states", "cu_seqlens"] and "position_embeddings" in parameters


def apply_to_model(model: torch.nn.Module) -> int:
    """How many rotate with ours from now on."""
    found = attentions(model)
    for module in found:
        dispatch_for(module, type(module).__module__)
        if not _is_tagged(module):
            module.register_forward_pre_hook(_tag, with_kwargs=True)
    return len(found)


def rotates(module: torch.nn.Module) -> bool:
    """Whether ours rotates."""
    return _is_tagged(module)


def revert_model(model: torch.nn.Module) -> None:
    for module in filter(_is_tagged, model.modules()):
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _tag]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        for patch in patches_of(type(module).__module__).values():
            patch.revert(module)


def _is_tagged(module) -> bool:
    return _tag in module._forward_pre_hooks.values()


def _tag(module, args, kwargs):
    revert_left()
    dispatch_for(module, type(module).__module__)  # a copy or an unpickled model brings its hooks alone
    given = kwargs.get("position_embeddings")
    if not isinstance(given, tuple) or len(given) != 2 or isinstance(given[0], Tables):
        return args, kwargs
    return args, {**kwargs, "position_embeddings": (Tables(given[0]), given[1])}
