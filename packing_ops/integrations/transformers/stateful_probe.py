"""Whether a layer passes anything from token to token, told by a call of its own: where the model's call cannot show it.

That is in a graph, in layers that are compiled, and where a part of the weights is on another rank. The call is on small
numbers, with weights that are numbers too: none of the layer's are read, gathered or copied.
"""

import contextlib
import inspect

import torch
from torch.nn.utils.stateless import _reparametrize_module

from packing_ops.integrations.transformers.stateful_kinds import by_themselves, learned, not_settled
from packing_ops.integrations.transformers.trial import attempt, numbers, quiet

TOKENS, BOUNDARY = 12, 6
_CLOSE = 1e-3  # of the norm, in float32


@torch.compiler.disable
def settle(layer: torch.nn.Module, hidden_size: int | None) -> bool:
    """Puts the class of a layer among ``learned`` or ``by_themselves``; False where the call cannot be made: it takes more
    than hidden states and position_ids, or a mask."""
    cls = type(layer)
    if cls in learned or cls in by_themselves or cls in not_settled:
        return cls not in not_settled
    widths = [hidden_size, *(each.shape[-1] for each in layer.parameters() if each.dim())]
    for width in [each for each in dict.fromkeys(widths) if each][:4]:
        mixes = _mixes(layer, width)
        if mixes is not None:
            (learned if mixes else by_themselves).add(cls)
            return True
    not_settled.add(cls)
    return False


def _mixes(layer, width) -> bool | None:
    """Whether other tokens change the results of those after them; None where it does not run."""
    needed = [
        name
        for name, each in inspect.signature(type(layer).forward).parameters.items()
        if each.default is inspect.Parameter.empty and each.kind < 2
    ][1:]
    if not needed or any("mask" in name for name in inspect.signature(type(layer).forward).parameters):
        return None  # attention of its own, which reads the masks of all documents
    device = next((each.device for each in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    run = type(layer).forward
    with quiet(), _in_evaluation(layer), _reparametrize_module(layer, _tensors_of(layer, device)):
        x = numbers(1, TOKENS, width)
        other = torch.cat([numbers(1, BOUNDARY, width, start=3.0), x[:, BOUNDARY:]], 1)
        more = [torch.arange(TOKENS, device="cpu")[None] if name == "position_ids" else x for name in needed[1:]]
        more = [each.to(device) for each in more]
        found = [_first(attempt(run, layer, each.to(device), *more)) for each in (x, other)]
    if not all(each is not None and each.shape[:2] == (1, TOKENS) and bool(each.isfinite().all()) for each in found):
        return None
    first, second = (each[0, BOUNDARY:].float().flatten(1) for each in found)
    norms = first.norm(dim=-1)
    return bool(((first - second).norm(dim=-1) > _CLOSE * torch.maximum(norms, 0.01 * norms.mean())).any())


def _first(result) -> torch.Tensor | None:
    result = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(result, torch.Tensor) or result.dim() < 2:
        return None
    return torch.view_as_real(result) if result.is_complex() else result


def _tensors_of(layer, device) -> dict[str, torch.Tensor]:
    """Numbers in place of all floating-point weights and buffers. Each is a view of a vector: element i + j of it is at
    row i and column j, so that the weights of many experts take no memory."""
    found = {}
    for name, each in (*layer.named_parameters(), *layer.named_buffers()):
        shape = getattr(each, "ds_shape", each.shape)  # of a shard of ZeRO-3; that of FSDP2's has the whole shape
        if each.is_floating_point():
            vector = numbers(sum(shape) + 1, start=float(len(found))).to(device)
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            found[name] = (vector * scale).as_strided(tuple(shape), (1,) * len(shape))
        elif each.is_meta:
            found[name] = torch.zeros(tuple(shape), dtype=each.dtype, device=device)
    return found


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
