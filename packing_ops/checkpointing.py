"""Selective checkpointing: what a checkpointed layer keeps of its forward, so that less of it is computed again."""

import math
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from packing_ops._runtime import library
from packing_ops._runtime.arguments import integer

Contexts = tuple[torch.utils._python_dispatch.TorchDispatchMode, torch.utils._python_dispatch.TorchDispatchMode]

SHARE_OF_FREE = 0.5  # "auto": what else a step needs for a while (logits, a gathered layer, workspaces) has the rest
_aten = torch.ops.aten
# Of each, where its first factor is among the arguments. Their cost for a byte that is kept is the width that they sum
# over.
PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten._grouped_mm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
# Of each, the arguments whose rows and whose last dimension its out has; next to it are as many float32 numbers as
# rows.
ATTENTION = dict.fromkeys(
    (
        _aten._flash_attention_forward.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ),
    (0, 2),
)
if not library.MISSING:
    for _name, _out in {
        "varlen_attention": (0, 2), "prefix_attention": (0, 2), "gated_delta_rule": (2, 2), "mamba2_scan": (0, 0)
    }.items():  # fmt: skip
        ATTENTION[getattr(torch.ops.packing_ops, _name).default] = _out


def checkpoint_policy(
    model: torch.nn.Module, budget: int | Literal["auto"] = "auto", *, layers: int | None = None
) -> Callable[[], Contexts]:
    """Return a ``context_fn`` for torch.utils.checkpoint that keeps what is dear to compute again, within a budget.

    Attention's out and lse are first. Then matrix products, those that sum over the most features first: a byte of them
    takes as many multiplications. All else is computed again, and a layer's last product, before which torch stops.
    Losses and gradients have the bits that they have with full checkpointing.

    Args:
        model: whose layers are checkpointed, as it is trained. It is looked at in the first forward: put it on its
            device, add adapters, shard it before.
        budget: bytes for all layers together, on this rank, beyond what full checkpointing keeps. "auto": half of the
            memory that is free in the first forward, after the gradients and two optimizer states of all trained
            parameters.
        layers: the checkpointed calls of one forward, each of which gets the same part of the budget. Without it the
            modules in the outermost ModuleLists of the model.

    Returns:
        A function for ``checkpoint(..., use_reentrant=False, context_fn=...)`` and for transformers'
        ``gradient_checkpointing_enable({"use_reentrant": False, "context_fn": ...})``. Use it for every layer of this
        model. Its attribute ``explain`` is a function that says in a sentence what the last layer keeps. The first
        layer of each kind keeps only attention: it shows which products the next ones have. Under torch.compile, where
        the checkpoint is in the graph, they are known when the graph is made, and a graph for rows of any length keeps
        what fits for the row that it is made with: give it the longest first. Around a compiled layer torch shows no
        products, and only attention is kept (pytorch issue 161889).

    Raises:
        TypeError: model is no torch.nn.Module.
        ValueError: a budget that is no positive number of bytes; a model without a ModuleList, and no ``layers``. In a
            forward: a budget that is too small for attention; it says how much is needed.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))] * 3)
        >>> policy = checkpoint_policy(layers, budget=3 * 4 * 16 * 4)
        >>> x = torch.ones(4, 8, requires_grad=True)
        >>> for layer in layers:
        ...     x = checkpoint(layer, x, use_reentrant=False, context_fn=policy)
        >>> x.sum().backward()
        >>> policy.explain()
        'each of 3 layers keeps 256 bytes of 256: 0 of attention, 256 of 1 of 2 products'

    Determinism: losses and gradients have the bits of full checkpointing.
    Synchronises: never; "auto" asks the GPU for its free memory once.
    Memory: at most the budget beyond full checkpointing.
    Gradients: those of the model; second derivatives as torch.utils.checkpoint has them.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if budget != "auto" and not (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0):
        raise ValueError(f'budget: expected a positive number of bytes or "auto", got {budget!r}')
    layers = _layers_of(model) if layers is None else integer(layers, "layers")
    if layers < 1:
        raise ValueError(
            f"layers: expected the number of checkpointed calls of a forward, at least 1, got {layers} in "
            f"{type(model).__name__}"
        )
    policy = _Policy(weakref.ref(model), budget, layers)

    def context_fn() -> Contexts:  # torch.compile takes only functions
        return create_selective_checkpoint_contexts(policy.region())

    context_fn.explain = policy.explain  # type: ignore[attr-defined]
    return context_fn


def _layers_of(model: torch.nn.Module) -> int:
    """Return the modules in the outermost ModuleLists."""
    if isinstance(model, torch.nn.ModuleList):
        return len(model)
    return sum(map(_layers_of, model.children()))


class _Product(NamedTuple):
    size: int  # bytes of its result
    width: int  # that it sums over


class _Policy:
    """What is known of a model's layers: of each kind, by its first product, the region that ran last."""

    def __init__(self, model: "weakref.ref[torch.nn.Module]", budget: int | str, layers: int):
        self.model, self.budget, self.layers = model, budget, layers
        self.part = -1  # of the budget, for each layer; not known before the first forward
        self.last: _Region | None = None
        self.known: dict[tuple[int, ...], _Region] = {}

    def region(self) -> "_Region":
        """Return the contexts of a checkpointed call and of its recomputation."""
        if self.part < 0:
            budget = _auto(self.model()) if isinstance(self.budget, str) else self.budget
            self.part = budget // self.layers
        if self.last is not None and self.last.products:
            self.known[self.last.kind] = self.last
        self.last = _Region(self)
        return self.last

    def explain(self) -> str:
        """Return what the last checkpointed call kept, in a sentence."""
        if (last := self.last) is None:
            return f"nothing ran yet; {self.layers} layers"
        kept = [product.size for i, product in enumerate(last.products) if i in last.chosen]
        return (
            f"each of {self.layers} layers keeps {sum(kept) + last.attention:,} bytes of {self.part:,}: "
            f"{last.attention:,} of attention, {sum(kept):,} of {len(kept)} of {len(last.products)} products"
        )


class _Region:
    """The policy of one checkpointed call: what is kept in it is kept in its recomputation too."""

    def __init__(self, policy: _Policy):
        self.policy = policy
        self.products: list[_Product] = []
        self.kind: tuple[int, ...] = ()
        self.attention = 0  # bytes
        self.chosen: frozenset[int] = frozenset()  # of the products, by their place
        self.kept: list[bool] = []  # of attention and products in their order; torch before 2.13 asks for them again
        self.asked_again = 0

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        first = PRODUCTS.get(op)
        if first is None and op not in ATTENTION:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if ctx.is_recompute:
            kept = self.kept[self.asked_again]
            self.asked_again += 1
        else:
            if first is None:
                rows, width = (args[place] for place in ATTENTION[op])
                kept = self._keeps_attention(_numel(rows.shape[:-1]), _number(width.shape[-1]) * rows.element_size())
            else:
                kept = self._keeps(*args[first : first + 2])
            self.kept.append(kept)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def _keeps(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        size = _numel(a.shape[:-1]) * _number(b.shape[-1]) * a.element_size()
        self.products.append(_Product(size, _number(a.shape[-1])))
        if len(self.products) == 1:
            self.kind = tuple(map(_number, b.shape))
            if (known := self.policy.known.get(self.kind)) is not None:
                self._choose(known, size / max(1, known.products[0].size))
        return len(self.products) - 1 in self.chosen

    def _choose(self, known: "_Region", scale: float) -> None:
        """Choose what to keep by the products of the last region of this kind, which had other rows: but for the
        last one.
        """
        room, chosen = self.policy.part - math.ceil(known.attention * scale), []
        products = list(enumerate(known.products[:-1]))
        for place, product in sorted(products, key=lambda each: -each[1].width):
            size = math.ceil(product.size * scale)
            if size <= room:
                chosen.append(place)
                room -= size
        self.chosen = frozenset(chosen)

    def _keeps_attention(self, rows: int, row: int) -> bool:
        size = rows * (row + 4)
        policy, needed = self.policy, self.attention + size
        if needed > policy.part:
            if policy.budget == "auto":
                return False
            raise ValueError(
                f"budget: expected at least {needed * policy.layers:,} bytes, {needed:,} of attention in each of "
                f"{policy.layers} layers, got {policy.budget:,}"
            )
        self.attention = needed
        return True


def _number(size: Any) -> int:
    """Return a size as a number; in a graph of any size, the size with which it was traced. No guard: a product is
    kept or not for all sizes.
    """
    return size if type(size) is int else int(size.node.hint or 0)


def _numel(shape: Any) -> int:
    return math.prod(map(_number, shape))


def _auto(model: torch.nn.Module | None) -> int:
    """Return half of the memory that is free after gradients and two optimizer states."""
    parameters = [] if model is None else list(model.parameters())
    on = next((p.device for p in parameters), torch.device("cpu"))
    if on.type == "cuda":
        free = torch.cuda.mem_get_info(on)[0] + torch.cuda.memory_reserved(on) - torch.cuda.memory_allocated(on)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for parameter in parameters:
        if parameter.requires_grad:
            local = getattr(parameter, "_local_tensor", parameter)  # to_local() is an op, which a traced graph refuses
            free -= local.nbytes * (2 + (parameter.grad is None))
    return max(0, int(free * SHARE_OF_FREE))
