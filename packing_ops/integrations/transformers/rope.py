"""apply_rotary_pos_emb of transformers' modelling modules by apply_rotary_qk, for one model or for all."""

import functools
import importlib
import inspect
from typing import NamedTuple

import torch

from packing_ops.integrations._patching import Patch, revert_left
from packing_ops.integrations.transformers.models import MODULES
from packing_ops.integrations.transformers.positions import give_position_ids, give_text_positions
from packing_ops.rope import apply_rotary_qk

# How one model is patched and not the others of its family. Attention looks apply_rotary_pos_emb up in its module, which
# all models of the family share, so that function is replaced by a dispatcher. A hook on the patched model's rotary_emb
# returns cos as Tables; the dispatcher rotates with our op if it gets Tables, else it calls the stock function. No global
# state is set around a forward, so recomputation, threads and torch.compile see the same program.

FUNCTION = "apply_rotary_pos_emb"


class Tables(NamedTuple):
    """cos and sin of a model that rotates with packing_ops."""

    cos: torch.Tensor
    sin: torch.Tensor


_patches: dict[str, Patch] = {}  # by modelling module


def patch_of(module_name: str) -> Patch:
    """Pinned while all models of the module rotate with ours; its users are the rotary embeddings of single models."""
    if module_name not in _patches:
        _patches[module_name] = new_patch(module_name)
    return _patches[module_name]


def new_patch(module_name: str) -> Patch:
    def make(stock):
        names = list(inspect.signature(stock).parameters)[4:]  # up to 4.57 position_ids, which are not read, come first
        index = names.index("unsqueeze_dim") if "unsqueeze_dim" in names else 0

        @functools.wraps(stock)
        def apply_rotary_pos_emb(q, k, cos, sin, *rest, **named):
            if isinstance(cos, Tables):
                cos, sin = cos
            elif not patch.pinned:
                revert_left()
                return stock(q, k, cos, sin, *rest, **named)
            unsqueeze_dim = rest[index] if len(rest) > index else named.get("unsqueeze_dim", 1)
            return _rotate(family, q, k, cos, sin, unsqueeze_dim)

        return apply_rotary_pos_emb

    family = MODULES[module_name]
    patch = Patch(importlib.import_module(module_name), FUNCTION, make)
    return patch


def _rotate(family, q, k, cos, sin, unsqueeze_dim):
    pairs = cos.shape[-1] if family.half_tables else cos.shape[-1] // 2
    if family.interleaved:  # the model repeats the first half of its tables
        cos, sin = cos[..., :pairs], sin[..., :pairs]
    layout = {"interleaved": family.interleaved, "unsqueeze_dim": unsqueeze_dim, "rotary_dim": 2 * pairs}
    return apply_rotary_qk(q, k, cos, sin, **layout)


def is_rotary(cls: type) -> bool:
    """The rotary embedding of a language model that we know."""
    name = cls.__name__
    return cls.__module__ in MODULES and name.endswith("RotaryEmbedding") and "Vision" not in name


# --- one model ---


def owners(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """(owner, rotary embedding) of every language model inside whose attention calls the function of its module."""
    found = []
    for owner in model.modules():
        for rotary in owner.children():
            if is_rotary(type(rotary)) and _rotates_with(owner, type(rotary).__module__):
                found.append((owner, rotary))
    return found


def attentions(owner) -> list[torch.nn.Module]:
    return [module for module in owner.modules() if type(module).__name__.endswith("Attention")]


def _rotates_with(owner, module_name) -> bool:
    """Somebody's own attention would not find the dispatcher and could not read Tables."""
    found = {type(module) for module in attentions(owner)}
    return bool(found) and all(cls.forward.__module__ == module_name for cls in found)


def apply_to_model(model: torch.nn.Module, fp32_cos_sin: bool) -> int:
    """How many attention modules rotate with ours from now on."""
    found = owners(model)
    revert_left()
    for owner, rotary in found:
        _remove_hooks(owner, rotary)
        patch_of(type(rotary).__module__).apply(rotary)
        rotary.register_forward_hook(_tag)
        if fp32_cos_sin:
            rotary.register_forward_pre_hook(_ask_for_fp32)
        multimodal = MODULES[type(rotary).__module__].multimodal
        owner.register_forward_pre_hook(give_text_positions if multimodal else give_position_ids, with_kwargs=True)
    return len({id(module) for owner, _ in found for module in attentions(owner)})


def rotates(rotary: torch.nn.Module) -> bool:
    """Whether ours rotates: swapped in this model, or in all models of its class."""
    patch = patch_of(type(rotary).__module__)
    return (patch.is_applied and patch.pinned) or _tag in rotary._forward_hooks.values()


def revert_model(model: torch.nn.Module) -> None:
    for owner, rotary in owners(model):
        _remove_hooks(owner, rotary)
        patch_of(type(rotary).__module__).revert(rotary)
    revert_left()


def _remove_hooks(owner, rotary) -> None:
    for hooks in (rotary._forward_hooks, rotary._forward_pre_hooks, owner._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
            del hooks[key]
            owner._forward_pre_hooks_with_kwargs.pop(key, None)


def _tag(rotary, args, output):
    revert_left()
    patch = patch_of(type(rotary).__module__)
    if not patch.is_applied or not (torch.compiler.is_compiling() or rotary in patch.users):
        patch.apply(rotary)  # a copy or an unpickled model brings its hooks without having been applied to
    cos, sin = output
    return Tables(cos, sin), sin


def _ask_for_fp32(rotary, args):
    x, *others = args
    return (in_fp32(x), *others)


def in_fp32(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings compute in fp32 and read nothing of x but its device and the dtype to cast down to."""
    return x if x.dtype in (torch.float32, torch.float64) else x.new_empty((), dtype=torch.float32)


_HOOKS = (_tag, _ask_for_fp32, give_position_ids, give_text_positions)


def fp32_forward(stock):
    """Wraps the forward of a rotary module."""

    @functools.wraps(stock)
    def forward(self, x, *args, **kwargs):
        return stock(self, in_fp32(x), *args, **kwargs)

    return forward
