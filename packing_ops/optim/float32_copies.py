"""Float32 copies of half weights, which an optimizer changes in place of them.

The groups hold the weights; only a step finds copies there. So whatever else reads the groups finds the weights of the
model: zero_grad, GradScaler, clipping, accelerate, torch.distributed.checkpoint. Between steps a copy is an entry of
its weight's state, so that a state_dict holds it. A copy is made in the first step in which its weight has a gradient.
"""

import functools
import types
from typing import Any

import torch

COPY = "float32_copy"
NEW = "new"
HALF = (torch.bfloat16, torch.float16)


def keep_float32(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer change float32 copies of its bfloat16 and float16 weights, and round them into the weights.

    A half weight rounds a small step away: AdamW's at a learning rate of 1e-6, for weights above 0.0005. With copies
    each step has the bits of the same optimizer on float32 weights with the same gradients. The loop stays as it is:
    groups hold the weights and their options, gradients are the weights', and schedulers, clipping, zero_grad, closures
    and GradScaler work as before. Weights of other types stay as they are.

    Checkpoints: after its first step a copy is ``optimizer.state[weight]["float32_copy"]``. So
    ``optimizer.state_dict()`` holds it, and a resumed run has the bits of one that went on. A weight without a copy in
    the state_dict begins at the weight. So does an element whose copy does not round to its weight, which somebody
    wrote. ``copy.deepcopy((model, optimizer))`` and a pickle of both keep float32. As in torch they leave out hooks,
    and what a scheduler has put over ``step``.

    Step pre-hooks registered after this call find the copies and their gradients in the groups. What they write into
    the weights' gradients is lost. Writes into weights are an error, and so are states that they save or load. A
    closure computes its loss: a backward of an earlier one may raise torch's "modified by an inplace operation". Steps
    inside torch.compile were not tested.

    A Trainer with model_init makes another optimizer in train(): call this in an override of its create_optimizer.

    Args:
        optimizer: any torch.optim.Optimizer before its first step and before load_state_dict. A second call
            before them changes nothing. Its weights may become DTensors, as in FSDP2, until the first step.

    Returns:
        The same optimizer.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        >>> optimizer = keep_float32(torch.optim.SGD([weight], lr=0.001))
        >>> for _ in range(3):
        ...     weight.sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.state[weight]["float32_copy"]
        tensor([0.9970, 0.9970])
        >>> weight  # steps of 0.001 alone would round to 1 again
        tensor([0.9961, 0.9961], dtype=torch.bfloat16, requires_grad=True)

    Raises:
        TypeError: no torch.optim.Optimizer, one around another (accelerate's, ZeroRedundancyOptimizer), or one that
            loads states by a method of its class (bitsandbytes).
        ValueError: an optimizer with state, which Adagrad has from the start; a weight that is in the groups twice.
        RuntimeError: in the first step, where no weight has a gradient: the model has other weights by now. In a CUDA
            graph, where a weight has its first step: take one before the capture. In a pre-hook of step or
            load_state_dict that saves or loads states: register it before this call. In a step that writes into
            weights, not into what is in the groups, which shows unless it writes by ``.data``.

    Determinism: bitwise, if the optimizer is.
    Synchronises: no.
    Memory: 4 bytes for each half weight with gradients, and states of the optimizer are float32. During a step another
        4 bytes, for gradients.
    Gradients: none; it reads those of the weights.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: {type(optimizer).__name__} steps another optimizer, optimizer.{name}: call "
                f"keep_float32(optimizer.{name})"
            )
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        raise TypeError(
            "optimizer: expected torch's load_state_dict, which leaves copies in float32, got "
            f"{type(optimizer).__name__}'s"
        )
    if optimizer.state:
        raise ValueError("optimizer: expected one without state, before its first step and before load_state_dict")
    weights = _weights(optimizer)
    if len({*map(id, weights)}) < len(weights):
        raise ValueError("optimizer: a weight is in its groups twice, which steps it twice")
    _Copies(optimizer)
    return optimizer


def _copied(cls: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    """Make what deepcopy and pickle make of an optimizer with copies: torch's method leaves hooks out."""
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    _Copies(optimizer)
    return optimizer


def _restore_behind(optimizer: torch.optim.Optimizer, name: str, copies: "_Copies") -> None:
    """Put the weights into the groups behind a method, also if it raises: no hook runs then."""
    stock = getattr(optimizer, name)  # of the class, or what a scheduler has put over it

    @functools.wraps(stock)
    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(*args, **kwargs)
        finally:
            copies.restore(self)

    setattr(optimizer, name, types.MethodType(method, optimizer))


class _Copies:
    """What the hooks of one optimizer share."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # While a step or a load runs: (weight, what is in the groups for it, its state's copy or NEW; None of a load,
        # which brings the copies; the weight's version).
        self.pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | str | None, int]] = []
        self.first = True  # no step had gradients yet
        optimizer.register_step_pre_hook(self.before_step)
        hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict: others run behind it, and find the weights
        hooks.move_to_end(optimizer.register_step_post_hook(self.after_step).id, last=False)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.restore, prepend=True)
        optimizer.register_state_dict_pre_hook(self.before_save)
        for name in ("step", "load_state_dict"):
            _restore_behind(optimizer, name, self)
        vars(optimizer).update(
            keeps_float32=True,  # for the Trainer, which may drop it
            __reduce_ex__=lambda _: (_copied, (type(optimizer), optimizer.__getstate__())),
        )

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put the copies of weights with gradients into the groups."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._refuse_none(optimizer)
        self._take(optimizer, closure is not None)
        if closure is None:
            return None

        def of_the_weights() -> Any:
            self._round(optimizer)  # the closure may read the states, and gradients of copies would take memory
            loss = closure()
            self._refuse_none(optimizer)
            self._take(optimizer, True)
            return loss

        return (*args[:1], of_the_weights, *args[2:]), {n: value for n, value in kwargs.items() if n != "closure"}

    def _take(self, optimizer: torch.optim.Optimizer, also_without_gradients: bool) -> None:
        for weight in _weights(optimizer):
            # LBFGS moves what is frozen now by earlier gradients.
            moves = also_without_gradients and (weight.requires_grad or COPY in optimizer.state.get(weight, ()))
            if weight.dtype in HALF and (weight.grad is not None or moves):
                copy = self._begin(optimizer, weight)
                copy.grad = None if weight.grad is None else weight.grad.float()
                # Marks of a loop, which its optimizer reads. A weight that wraps its values has them there too.
                vars(copy).update(vars(weight) | vars(copy))
        _exchange(optimizer, {weight: copy for weight, copy, *_ in self.pairs})

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> torch.Tensor:
        """Find or make the copy of a weight, and give it the weight's state."""
        known = optimizer.state.get(weight, {}).get(COPY)
        if (
            known is None
            and weight.grad is not None  # without one the copy is not kept
            and weight.is_cuda
            and torch.cuda.is_current_stream_capturing()
        ):
            raise RuntimeError(
                "keep_float32: the first step of a weight is in a CUDA graph, each replay of which would make its copy "
                "again: take a step before the capture"
            )
        copy = (weight.detach().float() if known is None else known.detach()).requires_grad_(weight.requires_grad)
        if known is not None:  # somebody may have written into the weight. In place, as in a CUDA graph
            known.copy_(torch.where(known.to(weight.dtype) == weight, known, weight.float()))
        # Behind what may run out of memory.
        self.pairs.append((weight, copy, NEW if known is None else known, weight._version))
        state = optimizer.state.pop(weight, {})
        if state.keys() - {COPY}:  # an optimizer that begins looks for none; a state_dict that is kept shares it
            state.pop(COPY, None)
            optimizer.state[copy] = state
        return copy

    @torch.no_grad()
    def _round(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the copies into the weights, and put these into the groups."""
        for weight, copy, *_ in self.pairs:
            weight.copy_(copy)
        self.restore(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(weight._version != version for weight, _, _, version in self.pairs):  # not of writes by .data
            raise RuntimeError(
                f"keep_float32: {type(optimizer).__name__}, or a hook of it, wrote into weights in place of what is in "
                "the groups in a step, so that it would be lost"
            )
        self._round(optimizer)  # also what has no gradient now: LBFGS moves it by earlier ones

    def _refuse_none(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError where no step had gradients yet, and half weights that want them have none."""
        weights = _weights(optimizer)
        if (
            self.first
            and all(weight.grad is None for weight in weights)
            and any(weight.dtype in HALF and weight.requires_grad for weight in weights)
        ):
            raise RuntimeError(
                "keep_float32: no weight of the optimizer has a gradient in this step: make the optimizer of the "
                "weights that the model has, after fully_shard and after what replaces them"
            )
        self.first = False

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the weights into the groups again, and the copies into their states."""
        _exchange(optimizer, {copy: weight for weight, copy, *_ in self.pairs})
        for weight, copy, known, _ in self.pairs:
            state = optimizer.state.pop(copy, {})
            # A copy that was never stepped is its weight; some optimizers refuse states that only have others' entries.
            if known is not None and (known is not NEW or weight.grad is not None):
                state[COPY] = copy.detach() if known is NEW else known
            if state:
                optimizer.state[weight] = state
        self.pairs = []

    def before_save(self, *_: Any) -> None:
        """Refuse states inside a step or a load, whose weights would be in the groups for the rest of it."""
        if self.pairs:
            inside = "load" if self.pairs[0][2] is None else "step"
            raise RuntimeError(
                f"keep_float32: states are saved or loaded inside a {inside}: register the pre-hook before keep_float32"
            )

    def before_load(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        """Put float32 tensors into the groups: load_state_dict rounds states to the type of what it finds there."""
        self.before_save()
        self.pairs = [
            (weight, torch.empty(0, dtype=torch.float32, device=weight.device), None, 0)
            for weight in _weights(optimizer)
            if weight.dtype in HALF
        ]
        _exchange(optimizer, {weight: stand_in for weight, stand_in, *_ in self.pairs})


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _exchange(optimizer: torch.optim.Optimizer, others: dict[torch.Tensor, torch.Tensor]) -> None:
    for group in optimizer.param_groups if others else ():  # in place: LBFGS keeps the list
        group["params"][:] = [others.get(weight, weight) for weight in group["params"]]
