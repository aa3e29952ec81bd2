"""Whether a layer passes anything from token to token, told by a call of its own: where the model's call cannot show it.

That is in a graph, in layers that are compiled, and where a part of the weights is on another rank. The call is on small
numbers, with weights that are numbers too: none of the layer's are read, gathered or copied.
"""

import contextlib
import functools
import inspect

import torch
from torch.nn.utils.stateless import _reparametrize_module

from packing_ops.integrations._patching import WeakPartial
from packing_ops.integrations._trial import attempt, numbers, quiet
from packing_ops.integrations.transformers.stateful_arguments import ROWS, differ, token_tensors
from packing_ops.integrations.transformers.stateful_kinds import by_themselves, learned, not_settled

TOKENS, BOUNDARY = 12, 6
_CLOSE = 1e-3  # of the norm, in float32


@torch.compiler.disable
def settle(layer: torch.nn.Module, hidden_size: int | None) -> bool:
    """Puts a layer among ``learned`` or ``by_themselves``; False where the call cannot be made: it takes more
    than hidden states and position_ids, or a mask."""
    if layer in learned or layer in by_themselves or layer in not_settled:
        return layer not in not_settled
    widths = [hidden_size, *(each.shape[-1] for each in layer.parameters() if each.dim())]
    for width in [each for each in dict.fromkeys(widths) if each][:4]:
        mixes = _mixes(layer, width)
        if mixes is not None:
            (learned if mixes else by_themselves).add(layer)
            return True
    not_settled.add(layer)
    return False


def _mixes(layer, width) -> bool | None:
    """Whether other tokens change the results of those after them; None where it does not run."""
    run = _forward_of(layer)
    parameters = list(inspect.signature(run).parameters.values())
    needed = [each.name for each in parameters if each.default is inspect.Parameter.empty and each.kind < 2]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        needed = needed or ["*"]
    if not needed or any("mask" in each.name for each in parameters):
        return None  # attention of its own, which reads the masks of all documents
    device = next((each.device for each in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    with quiet(), _in_evaluation(layer), _reparametrize_module(layer, _tensors_of(layer, device)):
        positions = torch.arange(TOKENS, device="cpu")[None]
        given = [numbers(1, TOKENS, width, start=float(place)) for place in range(len(needed))]
        others = [torch.cat([numbers(1, BOUNDARY, width, start=3.5), each[:, BOUNDARY:]], 1) for each in given]
        calls = [
            [(positions if name == "position_ids" else x).to(device) for name, x in zip(needed, each, strict=True)]
            for each in (given, others)
        ]
        found = [token_tensors(attempt(run, *each), (1, TOKENS), ROWS) for each in calls]
        if not all(bool(each.isfinite().all()) for tensors in found for each in tensors):
            return None
        return differ(*found, positions.to(device) >= BOUNDARY, _CLOSE)


def _forward_of(layer):
    """The stock one, also of an instance that has one of its own: below ours, and below accelerate's hooks."""
    forward = vars(layer).get("_old_forward", vars(layer).get("forward"))
    forward = forward.args[0] if isinstance(forward, WeakPartial) else forward
    return functools.partial(type(layer).forward, layer) if forward is None else forward


def _tensors_of(layer, device) -> dict[str, torch.Tensor]:
    """Numbers in place of all floating-point weights, buffers and other tensors of its modules. Each is a view of a vector: element i + j of it is at
    row i and column j, so that the weights of many experts take no memory."""
    found = {}
    for name, each in (*layer.named_parameters(), *layer.named_buffers(), *_views_of(layer)):
        shape = getattr(each, "ds_shape", each.shape)  # of a shard of ZeRO-3; that of FSDP2's has the whole shape
        if each.is_floating_point():
            vector = numbers(sum(shape) + 1, start=float(len(found))).to(device)
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            found[name] = (vector * scale).as_strided(tuple(shape), (1,) * len(shape))
        elif each.is_meta:
            found[name] = torch.zeros(tuple(shape), dtype=each.dtype, device=device)
    return found


def _views_of(layer):
    """Tensors that are attributes alone: what FSDP1 has in place of weights, views of one flat parameter."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


@contextlib.contextmanager
def _in_evaluation(layer):
    """Without dropout, and without hooks: who watches the modules inside sees the model's own calls alone."""
    names = "training", "_forward_hooks", "_forward_pre_hooks"
    kept = [(each, {name: each.__dict__[name] for name in names}) for each in layer.modules()]
    for each, _ in kept:
        each.__dict__.update(training=False, _forward_hooks={}, _forward_pre_hooks={})
    try:
        yield
    finally:
        for each, before in kept:
            each.__dict__.update(before)
