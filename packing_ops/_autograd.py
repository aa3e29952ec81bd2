"""Gradients of the ops that every layer of a model calls, at half the host's time of torch.library.register_autograd.

torch (2.13) reads an op's schema anew for each of its arguments in each forward that wants a gradient: 26 us for the
twelve of varlen_attention, more than the rest of the call. Our schemas have no default values that it would fill in.
"""

from collections.abc import Callable

import torch

_library = torch.library.Library("packing_ops", "IMPL")
# What torch's own registration is made of; a torch that has renamed it gets that one.
_PARTS = ("_AutoDispatchBelowAutograd", "_after_autograd_keyset", "_any_requires_grad")


def register_autograd(name: str, backward: Callable, *, setup_context: Callable) -> None:
    """torch.library.register_autograd for an op of tensors, without lists of them and without keyword-only arguments.

    Args:
        name: of the op, without its namespace.
        backward, setup_context: as torch has them.
    """
    if not all(hasattr(torch._C, part) for part in _PARTS):
        return torch.library.register_autograd(f"packing_ops::{name}", backward, setup_context=setup_context)
    op = getattr(torch.ops.packing_ops, name).default

    def below(keyset, *args):
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args_and_keyset):
            *args, keyset = args_and_keyset  # last, so that ctx.needs_input_grad counts as the op's arguments do
            output = below(keyset, *args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return *backward(ctx, *grads), None

    def autograd(keyset, *args):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Recorded.apply(*args, keyset)
        return below(keyset, *args)

    Recorded.__name__ = Recorded.__qualname__ = f"{name}_backward"
    _library.impl(name, autograd, "Autograd", with_keyset=True)
