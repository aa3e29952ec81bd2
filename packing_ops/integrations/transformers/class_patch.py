"""apply_packing_ops of a model class, or of all: patches of modelling modules, which all of their models share."""

import functools
import importlib
import sys
from collections import Counter
from typing import NamedTuple

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers import attn_implementation as attention_patch
from packing_ops.integrations.transformers import rms_norm as rms_norm_patch
from packing_ops.integrations.transformers import rope as rope_patch
from packing_ops.integrations.transformers import rope_functions
from packing_ops.integrations.transformers.applied import Applied, refuse, warn
from packing_ops.integrations.transformers.attention import register
from packing_ops.integrations.transformers.imports import PreTrainedModel

_class_patches: dict[str | None, dict] = {}  # {modelling module, None for all: {(owner, attribute): Patch}}


class Options(NamedTuple):
    """What is swapped in all models of a module."""

    rope: bool
    attention: bool
    rms_norm: bool
    fp32_cos_sin: bool


def apply_to_classes(cls, options, strict) -> Applied:
    if options.attention:
        register()
    if cls is not None:
        skipped = _why_not_class(cls, options)
        refuse(cls, skipped, strict)
        warn(cls, skipped, stacklevel=4)
        return Applied(**_swap_module(cls.__module__, options, key=cls.__module__), skipped=skipped)
    counts = Counter(attention=0, rope=0, rms_norm=0)
    for name in [name for name in sys.modules if is_modelling(name)]:
        counts.update(_swap_module(name, options, key=None))
    _pin(None, Patch(PreTrainedModel, "__init__", functools.partial(_swapping_its_module, options)))
    return Applied(**counts)


def is_modelling(name) -> bool:
    return name.startswith(rope_functions.HOSTS) and ".modeling_" in name


def _why_not_class(cls, options) -> dict[str, str]:
    skipped, name = {}, cls.__module__
    if options.attention and not _bases(name):
        skipped["attention"] = "its module has no model of transformers"
    if options.rope and (reason := rope_functions.refusal_of_module(name)):
        skipped["rope"] = f"its module is not served: {reason}"
    if options.rms_norm:
        verdicts = [rms_norm_patch.formula_of_class(value) for value in _norms(name)]
        if reasons := [reason for formula, reason in verdicts if formula is None]:
            skipped["rms_norm"] = "; ".join(reasons)
        elif not verdicts:
            skipped["rms_norm"] = "its module has no RMSNorm"
    return skipped


def _swap_module(name, options, key) -> dict[str, int]:
    """How many classes, and 1 for RoPE, are swapped in a modelling module, under ``key`` of _class_patches."""
    counts = dict.fromkeys(("attention", "rope", "rms_norm"), 0)
    patches = rope_functions.patches_of(name) if options.rope else {}
    for patch in patches.values():
        _pin(key, patch)
        counts["rope"] = 1
    for value in _classes(name):
        if patches and options.fp32_cos_sin and rope_patch.is_rotary(value):
            _pin(key, Patch(value, "forward", _fp32_forward))
    for value in _norms(name) if options.rms_norm else ():
        formula, _ = rms_norm_patch.formula_of_class(value)
        if formula is not None:
            make = functools.partial(_fused_forward, value, formula)
            _pin(key, Patch(value, "forward", make))
            counts["rms_norm"] += 1
    for value in _bases(name) if options.attention else ():
        _pin(key, Patch(value, "_check_and_adjust_attn_implementation", _with_our_default))
        counts["attention"] += 1
    return counts


def _fused_forward(cls, formula, stock):
    return rms_norm_patch.forward_of(cls, formula)


def _swapping_its_module(options, stock):
    """Wraps the constructor that all models call: their module is swapped when the first of them is made."""

    @functools.wraps(stock)
    def __init__(self, *args, **kwargs):
        name = type(self).__module__
        if is_modelling(name):
            _swap_module(name, options, key=None)
        return stock(self, *args, **kwargs)

    return __init__


def _norms(module_name) -> list[type]:
    return [value for value in _classes(module_name) if rms_norm_patch.is_norm(value)]


def _classes(module_name) -> list[type]:
    values = vars(importlib.import_module(module_name)).values()
    return [value for value in values if isinstance(value, type) and value.__module__ == module_name]


def _bases(module_name) -> list[type]:
    found = [value for value in _classes(module_name) if issubclass(value, PreTrainedModel)]
    return [value for value in found if PreTrainedModel in value.__bases__]


def _pin(key, patch) -> None:
    _class_patches.setdefault(key, {}).setdefault((patch.owner, patch.name), patch).apply()


def _fp32_forward(stock):
    @functools.wraps(stock)
    def forward(self, x, *args, **kwargs):
        return stock(self, rope_patch.in_fp32(x), *args, **kwargs)

    return forward


def _with_our_default(stock):
    """Wraps the method that picks the attn_implementation of a new model."""

    @functools.wraps(stock)
    def check(self, attn_implementation, *args, **kwargs):
        if not attn_implementation:
            self.__dict__.setdefault(attention_patch.STATE, attention_patch.AttentionBefore())
        return stock(self, attn_implementation or attention_patch.IMPLEMENTATION, *args, **kwargs)

    return check


def revert_classes(cls) -> None:
    for name in [name for name in [*_class_patches] if cls is None or name == cls.__module__]:
        for patch in _class_patches.pop(name).values():
            patch.revert()
