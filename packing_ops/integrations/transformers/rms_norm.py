"""The RMSNorm modules of transformers through torch.nn.functional.rms_norm, each by its model's formula."""

import functools
import types

import torch
import torch.nn.functional as F

from packing_ops.integrations._patching import function_of
from packing_ops.integrations.transformers.models import MODULES

# One model's modules get a class of their own, a subclass of theirs: torch.compile guards the class of a module, so all
# layers share what was compiled for one, which a forward of each module's own would not let them.


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
    return [
        module for module in model.modules() if is_norm(_stock(type(module))) and _forward_attribute(module) is not None
    ]


def fused(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that run ours."""
    return [
        module for module in norms(model) if _is_ours(module.__dict__.get(_forward_attribute(module), module.forward))
    ]


def forward_of(cls: type):
    """The fused forward, with the name and module of the stock one."""
    ours = FORWARDS[MODULES[cls.__module__].norm]

    @functools.wraps(cls.forward)
    def forward(self, hidden_states):
        return ours(self, hidden_states)

    forward.packing_ops = True
    return forward


def apply_to_model(model: torch.nn.Module) -> int:
    """How many run ours from now on."""
    found = norms(model)
    for module in found:
        stock, name = _stock(type(module)), _forward_attribute(module)
        if name == "forward" and name not in module.__dict__:
            module.__class__ = _fused_class(stock)
        elif not _is_ours(module.__dict__.get(name)):  # a partial, not a bound method: it can be pickled
            setattr(module, name, functools.partial(FORWARDS[MODULES[stock.__module__].norm], module))
    return len(found)


def revert_model(model: torch.nn.Module) -> None:
    for module in norms(model):
        stock, name = _stock(type(module)), _forward_attribute(module)
        module.__class__ = stock
        if not _is_ours(module.__dict__.get(name)):
            continue
        if name == "forward":
            del module.forward
        else:
            setattr(module, name, types.MethodType(stock.forward, module))


@functools.cache
def _fused_class(stock: type) -> type:
    """A subclass with our forward. A copy or a pickle is made by way of the stock class, which pickle finds by name."""

    def __reduce_ex__(self, protocol):
        _, _, state, *_ = stock.__reduce_ex__(self, 2)
        return _new, (stock,), state

    parts = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    parts |= {"_packing_ops_stock": stock, "__reduce_ex__": __reduce_ex__}
    return type(stock.__name__, (stock,), {**parts, "forward": FORWARDS[MODULES[stock.__module__].norm]})


def _new(stock: type) -> torch.nn.Module:
    cls = _fused_class(stock)
    return cls.__new__(cls)


def _stock(cls: type) -> type:
    return vars(cls).get("_packing_ops_stock", cls)


def _forward_attribute(module) -> str | None:
    """Where a forward of this module stands; accelerate's hooks move the one that they wrap to ``_old_forward``."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    forward = module.__dict__.get(name)
    of_class = getattr(getattr(forward, "__func__", None), "__module__", None) == type(module).__module__
    return name if forward is None or of_class or _is_ours(forward) else None  # somebody else's stays


def _is_ours(forward) -> bool:
    """A partial of this file, or a bound method of a class of ours."""
    function = function_of(forward)
    return function in FORWARDS.values() or hasattr(function, "packing_ops")
