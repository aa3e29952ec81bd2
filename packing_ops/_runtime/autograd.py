"""Gradients of the ops, at half the host's time of torch.library.register_autograd; more derivatives than it has.

torch (2.13) reads an op's schema again for each of its arguments in each forward that wants a gradient: 26 us for the
twelve of varlen_attention, more than the rest of the call. It also drops forward-mode tangents without a word and
refuses torch.func; here every derivative is right or refused under the op's name.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch.autograd import forward_ad

from packing_ops._runtime import library

_registrations = torch.library.Library("packing_ops", "IMPL")
# What torch's registration is made of. A torch that has renamed it gets that one, and the gate refuses tangents.
_PARTS = (
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._after_autograd_keyset",
    "torch._C._any_requires_grad",
    "torch._C._are_functorch_transforms_active",
    "torch._functorch.utils.enable_single_level_autograd_function",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "torch.autograd.function._SingleLevelFunction",
)


def _found(path: str) -> bool:
    return reduce(lambda at, name: getattr(at, name, None), path.split(".")[1:], torch) is not None


OWN = all(map(_found, _PARTS))


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents: inside torch.func.jvp or forward_ad.dual_level."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_lost_tangents(name: str, args: tuple) -> None:
    """Raise NotImplementedError for tangents where torch's registration (not OWN) would drop them."""
    tensors = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
    if any(isinstance(each, torch.Tensor) and has_tangent(each) for each in tensors):
        raise NotImplementedError(f"packing_ops::{name} has no forward-mode derivative in torch {torch.__version__}")


def call_below_autograd(op: Callable, *args):
    """Call op(*args) below autograd, which saves 6 us of host time, when no input requires a gradient."""
    if (
        not OWN
        or torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))
        or in_forward_mode()
        or torch._C._are_functorch_transforms_active()
    ):
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def implements(name: str) -> Callable[[Callable[..., tuple]], Callable[..., tuple]]:
    """Register a function as the op of this name on the CPU and on CUDA, without autocast and without autograd: its
    gradient is registered.
    """

    def registered(function):
        def op(*args):
            tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
            with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
                return function(*args)

        for device in ("CPU", "CUDA"):
            _registrations.impl(name, op, device)
        return op

    return registered


def register_autograd(name: str, backward: Callable, *, setup_context: Callable, linear: int = 0) -> None:
    """Register gradients as torch.library.register_autograd does, and forward-mode derivatives and torch.func.

    Args:
        name: of the op, without its namespace: it has no keyword-only arguments, and only its first argument may be a
            list of tensors.
        backward, setup_context: as torch has them; gradients that do not exist are None.
        linear: leading arguments in which the op is linear: its tangent is the op of theirs. 0: it is not linear.
    """
    if library.MISSING:
        return None  # plain torch has it
    op = getattr(torch.ops.packing_ops, name).default
    if not OWN:
        if op._schema.is_mutable:  # which torch's refuses. Ours are backwards, called where nothing is recorded.
            return None
        return torch.library.register_autograd(f"packing_ops::{name}", backward, setup_context=setup_context)
    names = [argument.name for argument in op._schema.arguments]
    defaults = tuple(argument.default_value for argument in op._schema.arguments)
    of_list = "List[Tensor]" in str(op._schema.arguments[0].type)
    several = len(op._schema.returns) > 1

    def below(keyset, *args):
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def below_level(keyset, *args):
        """Call the op with recording on: Function.apply has switched it off, and other levels of torch.func
        may need it.
        """
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return below(keyset, *args)

    class Recorded(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx, *args_and_call):
            # The call last, so that ctx.needs_input_grad counts as the op's arguments do.
            *args, (call, keyset, count) = args_and_call
            if of_list:
                ctx.count, args = count, [args[:count], *args[count:]]
            ctx.set_materialize_grads(False)
            output = call(keyset, *args)
            setup_context(ctx, args, output)
            if in_forward_mode():
                ctx.save_for_forward(*(a if isinstance(a, torch.Tensor) else None for a in args_and_call))
                ctx.rest = [None if isinstance(a, torch.Tensor) else a for a in args_and_call]
            if of_list:
                return (*output[0], *output[1:]) if several else tuple(output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            if not of_list:
                return *backward(ctx, *grads), None
            # As torch has them: lists in and out.
            count, needed = ctx.count, ctx.needs_input_grad
            ctx.needs_input_grad = (needed[:count], *needed[count:-1])
            of_tensors, *others = backward(ctx, grads[:count], *grads[count:])
            ctx.needs_input_grad = needed
            return *of_tensors, *others, None

        @staticmethod
        def jvp(ctx, *tangents):
            args = [a if a is not None else b for a, b in zip(ctx.saved_tensors, ctx.rest, strict=True)][:-1]
            follows = ctx.count if of_list else linear
            for i, tangent in enumerate(tangents[:-1]):
                if i < follows and isinstance(args[i], torch.Tensor):
                    args[i] = torch.zeros_like(args[i]) if tangent is None else tangent.contiguous()
                elif tangent is not None:
                    argument = names[max(i - ctx.count + 1, 0)] if of_list else names[i]
                    raise NotImplementedError(
                        f"packing_ops::{name} has no forward-mode derivative with respect to {argument}"
                    )
            if of_list:
                args = [args[: ctx.count], *args[ctx.count :]]
            output = op(*args)
            if of_list:
                output = (*output[0], *output[1:]) if several else tuple(output)
            one = isinstance(output, torch.Tensor)
            found = [t if t.is_floating_point() or t.is_complex() else None for t in ([output] if one else output)]
            return found[0] if one else tuple(found)

    def recorded(call, keyset, args):
        if not of_list:
            return Recorded.apply(*args, (call, keyset, None))
        count = len(args[0])
        flat = Recorded.apply(*args[0], *args[1:], (call, keyset, count))
        return (list(flat[:count]), *flat[count:]) if several else list(flat)

    def autograd(keyset, *args):
        args += defaults[len(args) :]  # torch strips what equals its default
        if (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)) or in_forward_mode():
            if not torch._C._are_functorch_transforms_active():
                return recorded(below, keyset, args)
            # The dispatcher has reached one level of torch.func: this is its autograd, as the ops of torch have it.
            with torch._functorch.utils.enable_single_level_autograd_function():
                return recorded(below_level, keyset, args)
        return below(keyset, *args)

    Recorded.__name__ = Recorded.__qualname__ = f"{name}_backward"
    _registrations.impl(name, autograd, "Autograd", with_keyset=True)


def register_no_autograd(name: str, of: str = "", *, why: str = "") -> None:
    """Register an op whose backward raises: one that computes the gradient of the op ``of``, or one with a reason."""
    message = why or f"packing_ops::{of} has no second derivative (packing_ops::{name} has no gradient)"

    def backward(ctx, *grads):
        raise NotImplementedError(message)

    register_autograd(name, backward, setup_context=lambda ctx, inputs, output: None)


def register_recurrence(
    name: str, op: Callable, *, tensors: int, like: int = 0, gradients: Callable | None = None
) -> None:
    """Register the gradients of an op that returns out and final_state, and no second derivative.

    Args:
        name: of the op: its first arguments are ``tensors``, the last two of these cu_seqlens and initial_state, its
            last one output_final_state.
        op: of the gradients, which takes those of out and final_state, the tensors and all other arguments but the
            last.
        like: the tensor whose shape and dtype out has.
        gradients: of all tensors but the last two, from these tensors and what op returns, without the gradient of
            initial_state. Without it they are what op returns.
    """

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:tensors])
        *ctx.options, ctx.with_state = inputs[tensors:]

    def backward(ctx, dout, dfinal_state):
        given = ctx.saved_tensors
        dout = torch.zeros_like(given[like]) if dout is None else dout
        dfinal_state = dfinal_state if ctx.with_state else None
        *found, dinitial_state = call_below_autograd(op, dout, dfinal_state, *given, *ctx.options)
        found = [*(found if gradients is None else gradients(given, *found)), None, dinitial_state]
        found = (None if tensor is None else grad for tensor, grad in zip(given, found, strict=True))
        return *found, *[None] * (len(ctx.options) + 1)

    register_autograd(name, backward, setup_context=setup_context)
    register_no_autograd(f"{name}_backward", of=name)
