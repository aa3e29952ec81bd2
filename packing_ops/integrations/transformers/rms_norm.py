"""RMSNorm of transformers by torch.nn.functional.rms_norm, with the formula of the model's module.

Under torch.compile the modules run the stock formula, which the compiler fuses with what is around it. In the mode
invariant=True they have the attribute ANY_ORDER: torch.compile picks the order of sums by the number of rows, so they
then take sums that no order changes.
"""

import copy
import functools
import inspect

import torch
import torch.nn.functional as F

from packing_ops.integrations._patching import function_of, kept_with_class, put, put_class, stock_class, stock_of
from packing_ops.integrations._trial import agree, alike, attempt, bare, numbers, quiet, with_gradients
from packing_ops.integrations.transformers.rope import HOSTS
from packing_ops.invariance.mode import ANY_ORDER, rms_norm_in_any_order


def _stock_in_a_graph(ours):
    @functools.wraps(ours)
    def forward(self, hidden_states):
        if torch.compiler.is_compiling() and not getattr(self, ANY_ORDER, False):
            return stock_class(self).forward(self, hidden_states)
        return ours(self, hidden_states)

    return forward


@_stock_in_a_graph
def _weight(self, hidden_states):
    # Stock: the normalised value is rounded to the dtype of the input, then the product with the weight.
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    return _rms_norm(self, hidden_states.to(dtype), self.weight.to(dtype))


@_stock_in_a_graph
def _weight_in_fp32(self, hidden_states):
    return _weight(self, hidden_states).to(hidden_states.dtype)  # rounded once in the stock module too


@_stock_in_a_graph
def _one_plus_weight(self, x):
    # fp32, since 1 + weight in a half type loses most of a small weight.
    return _rms_norm(self, x.float(), 1.0 + self.weight.float()).to(x.dtype)


@_stock_in_a_graph
def _no_weight(self, x):
    return _rms_norm(self, x, None)


def _rms_norm(self, x, weight):
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    if torch.compiler.is_compiling():
        return rms_norm_in_any_order(x, weight, eps)
    # Rows, since torch's fake kernel gives the gradient the strides of x while the CUDA kernel gives it those of rows:
    # in a compiled model a view of it would fail.
    return F.rms_norm(x.reshape(-1, x.shape[-1]), x.shape[-1:], weight, eps).view(x.shape)


def is_gated(module: torch.nn.Module) -> bool:
    """Return whether it is an RMSNorm of transformers that takes a gate: none is swapped."""
    cls = stock_of(type(module))
    return cls.__module__.startswith(HOSTS) and cls.__name__.endswith("NormGated")


FORWARDS = {
    "weight": _weight,
    "weight_in_fp32": _weight_in_fp32,
    "one_plus_weight": _one_plus_weight,
    "no_weight": _no_weight,
}
_EPS_NAMES = ("variance_epsilon", "eps")
# Attributes that are tried otherwise, or are no part of a formula: torch's, and those that FSDP and accelerate leave in
# a module.
_LEFT_OUT = frozenset((*vars(torch.nn.Module()), *_EPS_NAMES, "weight", "forward", "_old_forward", "_hf_hook"))
WIDTH = 8


def is_norm(cls: type) -> bool:
    """Return whether it has the name of an RMSNorm, and the forward of its modelling module."""
    home = cls.__module__
    return cls.__name__.endswith("RMSNorm") and home.startswith(HOSTS) and cls.forward.__module__ == home


def _formulas(model: torch.nn.Module) -> dict[torch.nn.Module, tuple[str | None, str]]:
    """Return {module: formula_of it}, of RMSNorm modules that run the forward of their modelling module, or ours, also
    inside accelerate's hooks.
    """
    found = {}
    for module in model.modules():
        stock, forward = stock_of(type(module)), function_of(_forward_of(module))
        # What runs ours is not tried again: its class may have changed, or have another forward by now.
        running = [name for name, ours in FORWARDS.items() if ours is forward]
        if running or (is_norm(stock) and _forward_attribute(module) is not None):
            found[module] = (running[0], "") if running else formula_of(stock, module)
    return found


def why_not(model: torch.nn.Module) -> str | None:
    """Return why RMSNorm modules of this model cannot be swapped; None if all can."""
    found = _formulas(model)
    if not found:
        return "it has no RMSNorm that runs the forward of its modelling module"
    return "; ".join(dict.fromkeys(reason for _, reason in found.values() if reason)) or None


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """Return (RMSNorm modules that run ours, those that can)."""
    found = _formulas(model)
    ours = sum(_is_ours(_forward_of(module)) for module in found)
    return ours, sum(formula is not None for formula, _ in found.values())


def apply_to_model(model: torch.nn.Module, any_order: bool = False) -> None:
    """Let RMSNorm modules run ours from now on. any_order: with ANY_ORDER."""
    found = {module: FORWARDS[formula] for module, (formula, _) in _formulas(model).items() if formula is not None}
    for module, forward in found.items():
        if any_order:
            vars(module)[ANY_ORDER] = True
        name = _forward_attribute(module)
        if name not in vars(module):
            put_class(module, forward)
        elif not _is_ours(vars(module)[name]):
            put(module, name, forward)


def _forward_attribute(module) -> str | None:
    """Return the attribute to put ours in: accelerate's hooks keep the forward in ``_old_forward``. None: leave the
    module.
    """
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    forward = module.__dict__.get(name)
    of_class = getattr(getattr(forward, "__func__", None), "__module__", None) == type(module).__module__
    return name if forward is None or of_class or _is_ours(forward) else None  # another library's


def _forward_of(module):
    return module.__dict__.get(_forward_attribute(module), module.forward)


def _is_ours(forward) -> bool:
    return function_of(forward) in FORWARDS.values()


# --- the trial ---


def formula_of(stock: type, module: torch.nn.Module) -> tuple[str | None, str]:
    """Return (key of FORWARDS, ""), or (None, why no formula there is this module's)."""
    # The trial makes a module of the same class and attributes, without the weights, hooks and device of this one.
    if reason := _not_tried(stock, module):
        return None, f"{stock.__name__} {reason}"
    attributes = {name: value for name, value in vars(module).items() if name not in _LEFT_OUT}
    if any(not isinstance(value, (int, float, str, tuple, torch.dtype, type(None))) for value in attributes.values()):
        return None, f"{stock.__name__} has attributes beside numbers"
    key = tuple((name, type(value), value) for name, value in sorted(attributes.items()))
    eps_names = tuple(name for name in _EPS_NAMES if hasattr(module, name))
    weight = getattr(module, "weight", None)
    # The trial has the width of the module: with another one, groups of elements might be the whole. ZeRO-3 keeps the
    # whole size in ds_numel.
    width = 0 if weight is None else getattr(weight, "ds_numel", weight.numel())
    if width == 0 and any(type(value) is int for value in attributes.values()):
        return None, f"{stock.__name__} has numbers, and no weight that has its width"
    formula, reason = _formula(stock, stock.forward, weight is not None, width or WIDTH, eps_names, key)
    return formula, reason and f"{stock.__name__} {reason}"


def _not_tried(stock, module) -> str | None:
    parameters = [
        name if parameter.kind is not inspect.Parameter.VAR_KEYWORD else f"**{name}"
        for name, parameter in list(inspect.signature(stock.forward).parameters.items())[1:]
    ]
    if len(parameters) != 1:
        return f"takes {' and '.join(parameters)}"
    held = {*module._parameters, *module._buffers, *module._modules}
    if held - {"weight"} or "weight" in module._buffers:
        return f"holds {', '.join(sorted(held))}"
    weight = getattr(module, "weight", None)
    shape = getattr(weight, "ds_shape", getattr(weight, "shape", (WIDTH,)))  # a shard of ZeRO-3 has ds_shape
    if len(shape) != 1 or shape[0] == 1:  # a weight per head, or one number
        return f"has a weight of shape {list(shape)}"
    return None if any(hasattr(module, name) for name in _EPS_NAMES) else "has no eps"


@kept_with_class
@torch.compiler.disable
def _formula(stock, forward, has_weight, width, eps_names, attributes) -> tuple[str | None, str]:
    """Find the formula by a trial. Cached by forward and by everything that the trial's module is made of."""
    eps = zip(eps_names, (0.01, 0.3), strict=False)  # one or two names, and our formulas read the first
    probe = bare(stock, [*((name, value) for name, _, value in attributes), *eps])
    with quiet():
        for name, ours in FORWARDS.items():
            if (ours is not _no_weight) == has_weight and all(
                _agrees(probe, forward, ours, width, *dtypes) for dtypes in _DTYPES
            ):
                return name, ""
        wanted = attempt(forward, probe, numbers(3, width))
    if isinstance(wanted, Exception):
        return None, f"raises {wanted!r}"
    return None, "is none of the formulas of rms_norm"


_DTYPES = [  # of the input and of the weight
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
_HALF = frozenset((torch.bfloat16, torch.float16))


def _agrees(probe, forward, ours, width, dtype, weight_dtype) -> bool:
    """Compare on rows of ordinary values, large ones, one as small as eps, and one of zeros."""
    scales = torch.tensor([[[3.0], [0.1], [1.0]], [[2e4], [0.0], [0.01]]], device="cpu")
    x = (numbers(2, 3, width) * scales).to(dtype)
    if ours is not _no_weight:
        probe.weight = torch.nn.Parameter((3.0 * numbers(width, start=5.0)).to(weight_dtype))
    probe.train(dtype != torch.float16)  # one of the dtypes in evaluation
    before = x.clone()
    wanted = attempt(forward, probe, x)
    if not torch.equal(x, before):
        return False  # it writes into its input
    found = attempt(ours, probe, x)
    rounded = {dtype, weight_dtype} & _HALF  # up to three times in a stock module
    if rounded and isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        half = max(rounded, key=lambda each: torch.finfo(each).eps)
        agrees = found.dtype == wanted.dtype and agree(found.float().to(half), wanted.float().to(half), 4)
        return agrees and _is_as_near(probe, forward, x, found, wanted)
    if not agree(found, wanted, 8):
        return False
    # A module may treat heads, long rows or larger batches differently.
    probe.eval()
    for shape in ((3,), (1, 300)):
        x = numbers(*shape, width, start=2.0)
        if not agree(attempt(ours, probe, x), attempt(forward, probe, x), 8):
            return False
    # Gradients of the input and of the weight
    probe.train()
    x, weights = numbers(5, 2, 3, width, start=2.0), list(probe.parameters())
    wanted, found = (with_gradients(functools.partial(each, probe), [x], weights) for each in (forward, ours))
    return alike(found, wanted, 64)


def _is_as_near(probe, forward, x, found, wanted) -> bool:
    """Return whether ours is at least as near to the stock formula in float64, with the same weights, as the stock
    module is.
    """
    exact = attempt(forward, copy.deepcopy(probe).double(), x.double())
    if not isinstance(exact, torch.Tensor):
        return False
    ours, stock = ((each.double() - exact.double()).norm() for each in (found, wanted))
    return bool(ours <= 1.01 * stock)  # a tie of roundings may fall to either side
