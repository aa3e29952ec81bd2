"""Experts that another program has chosen, in a transformers model: training routes as sampling did.

Which module is a router is seen in a trial: a copy of it with other weights is run on a few rows, with its experts and
with others in their place.
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator

import torch

from packing_ops._runtime.arguments import check_tensor
from packing_ops.integrations._chosen_experts import Choice, Chosen, Seen, check_experts, of_layer, replaying
from packing_ops.integrations._trial import attempt, numbers, quiet
from packing_ops.integrations.transformers.versions import source_of

_CALLS_TOPK = re.compile(r"\btopk\(")


@contextlib.contextmanager
def replay_routing(model: torch.nn.Module, routed_experts: torch.Tensor) -> Iterator[None]:
    """Let every router of the model, within the block, send tokens to these experts, with the weights that it gives
    them now.

    Weights and gradients are the present model's: only the choice is the sampler's.

    Args:
        model: a transformers model with a mixture of experts, whose routers choose by one topk over all of them.
        routed_experts: integers ``[1, total, layers, k]`` or ``[total, layers, k]``, as PaddingFreeCollator returns
            them. ``layers`` are all decoder layers, or those with a router. -1 (padding, or not known) leaves the
            choice to the router.

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
        NotImplementedError: no router is found: PhiMoE chooses by other means than a topk. A layer with two of them, as
            JetMoE's.
        ValueError: another shape, another number of layers or of experts, an expert that the router does not have (read
            where routed_experts are on the CPU), other tokens than the model gets.
    """
    check_tensor(routed_experts, "routed_experts")
    check_experts(routed_experts)
    by_layer = routed_experts.reshape(-1, *routed_experts.shape[-2:]).long().unbind(1)
    with contextlib.ExitStack() as stack:
        for router, choice, layer in _places(model, len(by_layer)):
            experts = of_layer(by_layer[layer], choice, next(router.parameters()).device)
            stack.enter_context(replaying(router, "forward", experts, choice))
        yield


def _places(model, layers):
    """Return (router, its choice, index into the layers that were given) of every router."""
    stack = _stack(model)
    routers = [(index, *own[0]) for index, own in enumerate(stack) if own]
    if not routers:
        raise NotImplementedError(
            f"model: expected routers that choose experts by one topk, got none in {type(model).__name__}"
        )
    if several := next((own for own in stack if len(own) > 1), None):
        names = ", ".join(type(router).__name__ for router, _ in several)
        raise NotImplementedError(f"model: expected one router in each layer, got {names} in {type(model).__name__}")
    if layers not in (len(routers), len(stack)):
        raise ValueError(
            f"routed_experts: expected {len(routers)} layers with a router, or all {len(stack)}, got {layers}"
        )
    whole = layers == len(stack)
    return [(router, choice, index if whole else place) for place, (index, router, choice) in enumerate(routers)]


def _stack(model):
    """Return for each decoder layer its (router, choice) pairs: mostly one or zero."""
    verdicts: dict[tuple, Choice | None] = {}
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    found = [[_routers_of(layer, verdicts) for layer in each] for each in lists]
    return max(found, key=lambda each: sum(map(bool, each)), default=[])


def _routers_of(layer, verdicts):
    """Return (router, its choice) of a decoder layer; of routers around each other the innermost."""
    found: list[tuple[torch.nn.Module, Choice]] = []
    for module in reversed([*layer.modules()]):  # inner modules first
        cls = type(module)
        source = "" if cls.__module__.startswith("torch.") else source_of(cls)
        if not (_CALLS_TOPK.search(source) or (not source and module._parameters.get("weight") is not None)):
            continue
        if any(inner is router for inner in module.modules() for router, _ in found):
            continue
        key = (cls, getattr(module, "top_k", None), *(tuple(each.shape) for each in module.parameters()))
        if key not in verdicts:
            with quiet():
                verdicts[key] = _tried(module)
        if (choice := verdicts[key]) is not None:
            found.append((module, choice))
    return found


# --- the trial ---

_MOST = 2**26  # weights of a router; a block of this size that chooses itself is not tried


def _tried(module):
    """Return the Choice of a module whose last topk decides what it returns; None of any other module."""
    matrices = [each for each in module.parameters() if each.dim() == 2]
    if not matrices or sum(each.numel() for each in module.parameters()) > _MOST:
        return None
    probe, width = _with_numbers(module), matrices[0].shape[1]
    for given in _arguments(type(module), width, [each.shape[0] for each in matrices]):
        with Seen() as seen:
            plain = attempt(probe.forward, **given)
        if not isinstance(plain, Exception) and seen.calls:
            break
    else:
        return None
    scores, own = seen.calls[-1]
    choice = Choice.of(scores, own)

    def result_of(experts):
        with Chosen(experts.flatten(0, -2), choice) as mode:
            result = attempt(probe.forward, **given)
        return None if isinstance(result, Exception) or mode.calls != 1 else _tensors_in(result)

    same, others = result_of(own), result_of((own + 1) % choice.num_experts)
    if own.dtype != torch.int64 or same is None or others is None:
        return None
    plain = _tensors_in(plain)
    alike = len(plain) == len(same) and all(map(torch.equal, plain, same))
    return choice if alike and not all(map(torch.equal, plain, others)) else None


def _with_numbers(module):
    """Return a copy with weights of its shapes, in evaluation and without hooks."""
    probe = copy.copy(module)
    probe.__dict__ = {name: each for name, each in vars(module).items() if name != "forward"} | {"training": False}
    for name in [name for name in vars(probe) if name.endswith("_hooks")]:
        probe.__dict__[name] = {}
    made = {
        "_parameters": lambda each: torch.nn.Parameter(numbers(*each.shape) / each.shape[1:].numel() ** 0.5),
        "_buffers": lambda each: torch.zeros(each.shape, dtype=each.dtype, device="cpu"),
        "_modules": _with_numbers,
    }
    for kind, make in made.items():
        held = getattr(module, kind)
        probe.__dict__[kind] = {name: each if each is None else make(each) for name, each in held.items()}
    return probe


def _arguments(cls, width, sizes):
    """Return keywords of its forward to try: three rows, or one batch of them, and a bias of each number of experts."""
    names = list(inspect.signature(cls.forward).parameters.values())[1:]
    needed = [each.name for each in names[1:] if each.default is each.empty and each.kind < 2]
    biases = [each.name for each in names[1:] if "bias" in each.name]
    for rows in (numbers(3, width), numbers(1, 3, width)):
        for given in ([], biases) if biases else ([],):
            for size in (sizes if given else sizes[:1]) if set(needed) <= set(given) else ():
                yield {names[0].name: rows.clone(), **{name: torch.zeros(size, device="cpu") for name in given}}


def _tensors_in(result):
    """Return all tensors of a result, which is one or a tuple of them."""
    return [each for each in (result if isinstance(result, tuple) else [result]) if isinstance(each, torch.Tensor)]
