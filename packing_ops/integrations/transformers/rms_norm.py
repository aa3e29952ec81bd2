"""The RMSNorm modules of transformers through torch.nn.functional.rms_norm, each by its model's formula."""

import types

import torch

from packing_ops.integrations._patching import WeakPartial, function_of
from packing_ops.integrations.transformers.module_class import stock_of, subclass_of
from packing_ops.integrations.transformers.rms_norm_trial import FORWARDS, formula_of
from packing_ops.integrations.transformers.rope_functions import HOSTS


def is_norm(cls: type) -> bool:
    """An RMSNorm by its name, with the forward of its modelling module."""
    home = cls.__module__
    return cls.__name__.endswith("RMSNorm") and home.startswith(HOSTS) and cls.forward.__module__ == home


def _candidates(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that run the forward of their class, or ours, perhaps inside accelerate's hooks."""
    return [
        module
        for module in model.modules()
        if is_norm(stock_of(type(module))) and _forward_attribute(module) is not None
    ]


def norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those whose formula ours is."""
    return [module for module in _candidates(model) if _formula_of(module) is not None]


def _formula_of(module) -> str | None:
    """Of one that runs ours, what it runs: its class may have another forward by now."""
    forward = module.__dict__.get(_forward_attribute(module), module.forward)
    function = function_of(forward)
    if function in FORWARDS.values():
        return next(name for name, ours in FORWARDS.items() if ours is function)
    return formula_of(stock_of(type(module)), module)[0]


def why_not(model: torch.nn.Module) -> str | None:
    """Why the RMSNorm of this model, or a part of them, stay as they are; None if all are swapped."""
    found = _candidates(model)
    left = [module for module in found if _formula_of(module) is None]
    reasons = dict.fromkeys(formula_of(stock_of(type(module)), module)[1] for module in left)
    if found:
        return "; ".join(reasons) or None
    return "it has no RMSNorm that runs the forward of its modelling module"


def fused(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that run ours."""
    return [
        module for module in norms(model) if _is_ours(module.__dict__.get(_forward_attribute(module), module.forward))
    ]


def apply_to_model(model: torch.nn.Module) -> int:
    """How many run ours from now on."""
    found = norms(model)
    for module in found:
        stock, name = stock_of(type(module)), _forward_attribute(module)
        if name == "forward" and name not in module.__dict__:
            module.__class__ = subclass_of(stock, FORWARDS[_formula_of(module)])
        elif not _is_ours(module.__dict__.get(name)):
            setattr(module, name, WeakPartial(FORWARDS[_formula_of(module)], module))
    return len(found)


def revert_model(model: torch.nn.Module) -> None:
    for module in _candidates(model):
        stock, name = stock_of(type(module)), _forward_attribute(module)
        module.__class__ = stock
        if not _is_ours(module.__dict__.get(name)):
            continue
        if name == "forward":
            del module.forward
        else:
            setattr(module, name, types.MethodType(stock.forward, module))


def _forward_attribute(module) -> str | None:
    """Where a forward of this module stands; accelerate's hooks move the one that they wrap to ``_old_forward``."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    forward = module.__dict__.get(name)
    of_class = getattr(getattr(forward, "__func__", None), "__module__", None) == type(module).__module__
    return name if forward is None or of_class or _is_ours(forward) else None  # somebody else's stays


def _is_ours(forward) -> bool:
    """A partial of this file, or a bound method of a class of ours."""
    return function_of(forward) in FORWARDS.values()
