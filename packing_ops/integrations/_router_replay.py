"""Experts that another program has chosen, in a transformers model: training routes as sampling did.

Which module is a router is seen in a trial: it is run on a few rows, with its experts and with others in their place.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

from packing_ops._runtime.arguments import check_tensor, described
from packing_ops.integrations._trial import attempt, numbers

_TOPK = (torch.topk, torch.Tensor.topk)


class _Chosen(TorchFunctionMode):
    """Puts ``experts`` int64 ``[tokens, k]``, where they are not -1, in place of a topk over all experts."""

    def __init__(self, experts: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts, self.num_experts, self.calls = experts, num_experts, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if (
            func not in _TOPK
            or args[0].shape[-1] != self.num_experts
            or found.indices.shape[-1] != self.experts.shape[-1]
        ):
            return found
        if found.indices.shape != self.experts.shape:
            raise ValueError(
                f"routed_experts: expected {found.indices.shape[0]} tokens as the router has, got {len(self.experts)}"
            )
        self.calls += 1
        experts = torch.where(self.experts < 0, found.indices, self.experts)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


@contextlib.contextmanager
def replay_routing(model: torch.nn.Module, routed_experts: torch.Tensor) -> Iterator[None]:
    """Inside of the block, every router of the model sends tokens to these experts, with the weights that it gives them now.

    Weights and gradients are those of the present model: only the choice is that of the sampler.

    Args:
        model: a transformers model with a mixture of experts, whose routers return the experts that they choose.
        routed_experts: integers ``[1, total, layers, k]`` or ``[total, layers, k]``, as PaddingFreeCollator returns them.
            ``layers`` are all decoder layers, or those with a router. -1 (padding, or not known) leaves the choice to
            the router.

    Example:
        A model of one layer with three experts; the second token's is not known.

        >>> class Router(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.eye(3))
        ...
        ...     def forward(self, rows):
        ...         return tuple(torch.topk((rows @ self.weight.T).softmax(-1), 1))
        >>> model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Router()])})
        >>> with replay_routing(model, torch.tensor([[[2]], [[-1]]])):
        ...     weights, experts = model["layers"][0](torch.eye(3)[:2])
        >>> experts.tolist()
        [[2], [1]]

    The backward belongs inside of the block where gradient checkpointing runs routers again.

    Raises:
        NotImplementedError: no router is found. transformers 5 has them; in 4.57 most blocks choose experts themselves.
        ValueError: another shape, another number of layers or of experts, an expert that the router does not have (on
            the CPU), other tokens than the model gets.
    """
    check_tensor(routed_experts, "routed_experts")
    if routed_experts.dim() not in (3, 4) or routed_experts.is_floating_point() or routed_experts.is_complex():
        raise ValueError(f"routed_experts: expected integers [1, total, layers, k], got {described(routed_experts)}")
    by_layer = routed_experts.reshape(-1, *routed_experts.shape[-2:]).long().unbind(1)
    with contextlib.ExitStack() as stack:
        for router, num_experts, k, layer in _places(model, len(by_layer)):
            experts = by_layer[layer].to(router.weight.device)
            if experts.shape[1] != k:
                raise ValueError(f"routed_experts: expected k={k} experts of a token, got {experts.shape[1]}")
            if experts.is_cpu and experts.numel() and not -1 <= experts.min() <= experts.max() < num_experts:
                raise ValueError(f"routed_experts: expected -1 to {num_experts - 1}, got {experts.aminmax()}")
            stack.enter_context(_replaying(router, experts, num_experts))
        yield


@contextlib.contextmanager
def _replaying(router, experts, num_experts):
    own = router.__dict__.get("forward")
    router.forward = functools.partial(_forward, router.forward, experts, num_experts)
    try:
        yield
    finally:
        del router.forward
        if own is not None:
            router.forward = own


def _forward(stock, experts, num_experts, *args, **kwargs):
    with _Chosen(experts, num_experts):
        return stock(*args, **kwargs)


def _places(model, layers):
    """(router, its experts, experts of a token, index into the layers that were given) of every router."""
    verdicts: dict[tuple, tuple[int, int] | None] = {}
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    stack = max(lists, key=lambda each: sum(_router_of(layer, verdicts) is not None for layer in each), default=())
    found = [(index, _router_of(layer, verdicts)) for index, layer in enumerate(stack)]
    routers = [(index, *place) for index, place in found if place is not None]
    if not routers:
        raise NotImplementedError(
            f"model: expected routers that return the experts they choose, got none in {type(model).__name__}"
        )
    if layers not in (len(routers), len(stack)):
        raise ValueError(
            f"routed_experts: expected {len(routers)} layers with a router, or all {len(stack)}, got {layers}"
        )
    whole = layers == len(stack)
    return [(router, n, k, index if whole else place) for place, (index, router, n, k) in enumerate(routers)]


def _router_of(layer, verdicts):
    """(router, its experts, experts of a token) of a decoder layer; None if it has none."""
    for module in layer.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or type(module).__module__.startswith("torch."):
            continue
        key = (type(module), tuple(weight.shape), getattr(module, "top_k", None))
        if key not in verdicts:
            verdicts[key] = _tried(module, weight)
        if verdicts[key] is not None:
            return module, *verdicts[key]
    return None


def _tried(module, weight):
    """(experts, experts of a token) if the module returns its experts, and others that are put in their place."""
    rows = numbers(3, weight.shape[1]).to(weight.device, weight.dtype)
    with torch.no_grad():
        own = _experts_in(attempt(module, rows))
        if own is None:
            return None
        others = (own + 1) % weight.shape[0]
        with _Chosen(others, weight.shape[0]) as mode:
            replayed = attempt(module, rows)
    found = _experts_in(replayed)
    if mode.calls != 1 or found is None or not torch.equal(found, others):
        return None
    return weight.shape[0], own.shape[1]


def _experts_in(result):
    """The one int64 tensor ``[3, k]`` of a router's result."""
    tensors = [each for each in result if isinstance(each, torch.Tensor)] if isinstance(result, tuple) else []
    found = [each for each in tensors if each.dtype == torch.int64 and each.dim() == 2 and len(each) == 3]
    return found[0] if len(found) == 1 else None
