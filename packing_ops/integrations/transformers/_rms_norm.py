"""The RMSNorm modules of transformers through torch.nn.functional.rms_norm, each by its model's formula."""

import functools
import types

import torch
import torch.nn.functional as F

from packing_ops.integrations.transformers._rotary import MODULES


def _eps(module):
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def _weight(self, hidden_states):
    # Stock: the normalised value is rounded to the dtype of the input, then the product with the weight.
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    return _rms_norm(hidden_states.to(dtype), self.weight.to(dtype), _eps(self))


def _weight_in_fp32(self, hidden_states):
    return _weight(self, hidden_states).to(hidden_states.dtype)  # rounded once in the stock module too


def _one_plus_weight(self, x):
    # In fp32: 1 + weight in a half type would lose most of a small weight.
    return _rms_norm(x.float(), 1.0 + self.weight.float(), _eps(self)).to(x.dtype)


def _rms_norm(x, weight, eps):
    # As rows: the CUDA kernel copies any other layout to rows too, but to torch.compile torch announces a gradient in
    # the layout of the one that came, and a compiled model then fails where it makes a view of it.
    return F.rms_norm(x.reshape(-1, x.shape[-1]), weight.shape, weight, eps).view(x.shape)


FORWARDS = {"weight": _weight, "weight_in_fp32": _weight_in_fp32, "one_plus_weight": _one_plus_weight}


def is_norm(cls: type) -> bool:
    """An RMSNorm with the forward of a modelling module that we know."""
    return cls.__name__.endswith("RMSNorm") and cls.__module__ in MODULES and cls.forward.__module__ == cls.__module__


def norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that run the forward of their class, or ours, perhaps inside accelerate's hooks."""
    return [module for module in model.modules() if is_norm(type(module)) and _place(module) is not None]


def forward_of(cls: type):
    """The fused forward, with the name and module of the stock one."""
    fused = FORWARDS[MODULES[cls.__module__].norm]

    @functools.wraps(cls.forward)
    def forward(self, hidden_states):
        return fused(self, hidden_states)

    return forward


def apply_to_model(model: torch.nn.Module) -> None:
    for module in norms(model):
        # A partial, not a bound method: it can be pickled.
        setattr(module, _place(module), functools.partial(FORWARDS[MODULES[type(module).__module__].norm], module))


def revert_model(model: torch.nn.Module) -> None:
    for module in norms(model):
        name = _place(module)
        if not _is_ours(module.__dict__.get(name)):
            continue
        if name == "forward":
            del module.forward
        else:
            setattr(module, name, types.MethodType(type(module).forward, module))


def _place(module) -> str | None:
    """Where a forward of this module stands; accelerate's hooks move the one that they wrap to ``_old_forward``."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    forward = module.__dict__.get(name)
    of_class = getattr(getattr(forward, "__func__", None), "__module__", None) == type(module).__module__
    return name if forward is None or of_class or _is_ours(forward) else None  # somebody else's stays


def _is_ours(forward) -> bool:
    return getattr(forward, "func", None) in FORWARDS.values()
