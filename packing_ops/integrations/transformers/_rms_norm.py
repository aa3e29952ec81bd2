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
    return [module for module in model.modules() if is_norm(type(module))]


def forward_of(cls: type):
    """The fused forward, with the name and module of the stock one."""
    fused = FORWARDS[MODULES[cls.__module__].norm]

    @functools.wraps(cls.forward)
    def forward(self, hidden_states):
        return fused(self, hidden_states)

    return forward


def apply_to_model(model: torch.nn.Module) -> None:
    for module in norms(model):
        if _ours(module) is None:
            # A partial, not a bound method: it can be pickled.
            module.forward = functools.partial(FORWARDS[MODULES[type(module).__module__].norm], module)


def revert_model(model: torch.nn.Module) -> None:
    for module in norms(model):
        name = _ours(module)
        if name == "forward":
            del module.forward
        elif name is not None:
            setattr(module, name, types.MethodType(type(module).forward, module))


def _ours(module) -> str | None:
    """Where our forward stands; accelerate's hooks move the one that they wrap to ``_old_forward``."""
    for name in ("forward", "_old_forward"):
        if getattr(module.__dict__.get(name), "func", None) in FORWARDS.values():
            return name
    return None
