"""A router that goes on with given experts: the result of its topk is replaced while it runs."""

import contextlib
import functools
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from packing_ops._runtime.arguments import described

_TOPK = (torch.topk, torch.Tensor.topk)


class Choice(NamedTuple):
    """The topk by which a router chooses: over how many experts, how many of them, and the axes of its scores."""

    num_experts: int
    k: int
    dim: int

    @classmethod
    def of(cls, scores: torch.Tensor, indices: torch.Tensor) -> "Choice":
        return cls(scores.shape[-1], indices.shape[-1], indices.dim())


class Chosen(TorchFunctionMode):
    """Puts ``experts`` int64 ``[tokens, k]``, where they are not -1, in place of a topk over all experts."""

    def __init__(self, experts: torch.Tensor, choice: Choice) -> None:
        super().__init__()
        self.experts, self.choice, self.calls = experts, choice, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or Choice.of(args[0], found.indices) != self.choice:
            return found
        if found.indices.numel() != self.experts.numel():
            tokens = found.indices.numel() // self.choice.k
            raise ValueError(f"routed_experts: expected {tokens} tokens as the router has, got {len(self.experts)}")
        self.calls += 1
        given = self.experts.view_as(found.indices)
        experts = torch.where(given < 0, found.indices, given)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


class Seen(TorchFunctionMode):
    """The (scores, indices) of every topk."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.calls.append((args[0], found.indices))
        return found


def check_experts(routed_experts) -> None:
    integers = not routed_experts.is_floating_point() and not routed_experts.is_complex()
    if routed_experts.dim() not in (3, 4) or not integers:
        raise ValueError(f"routed_experts: expected integers [1, total, layers, k], got {described(routed_experts)}")


def of_layer(experts, choice, device):
    """Return the experts ``[tokens, k]`` of one router, checked."""
    if experts.shape[1] != choice.k:
        raise ValueError(f"routed_experts: expected k={choice.k} experts of a token, got {experts.shape[1]}")
    if experts.is_cpu and experts.numel() and not -1 <= experts.min() <= experts.max() < choice.num_experts:
        raise ValueError(f"routed_experts: expected -1 to {choice.num_experts - 1}, got {experts.aminmax()}")
    return experts.to(device)


@contextlib.contextmanager
def replaying(router, method, experts, choice):
    """Let the router's method that chooses continue with these experts, within the block."""
    own = router.__dict__.get(method)
    setattr(router, method, functools.partial(_run, getattr(router, method), experts, choice))
    try:
        yield
    finally:
        delattr(router, method)
        if own is not None:
            setattr(router, method, own)


def _run(stock, experts, choice, *args, **kwargs):
    with Chosen(experts, choice):
        return stock(*args, **kwargs)
