"""apply_packing_ops(model, invariant=True): the mode of packing_ops.invariant() for a model, and its proof."""

from typing import Any

import torch

from packing_ops import _invariant
from packing_ops._invariance_refusals import refusals
from packing_ops.integrations._patching import WeakPartial, put
from packing_ops.invariance import check_invariance

HELD = "_packing_ops_invariant"


def why_not(model: torch.nn.Module) -> str | None:
    """Why it cannot be claimed, whatever the bits are."""
    found = refusals(model, training=True)
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return next((f"{name or type(model).__name__}: {reason}{more}" for name, reason in found.items()), None)


def apply_to_model(model: torch.nn.Module, sequence_group: object = None) -> str | None:
    """The mode from now on; a sentence where its proof fails."""
    vars(model).setdefault(HELD, _invariant.Held())
    for module in model.modules():
        before = vars(module).get("forward")
        if _has_products_on_cpu(module) and not _is_ours(before):
            put(module, "forward", _in_whole_blocks, before)
    return _why_not_proven(model, over_a_group=sequence_group is not None)


def revert_model(model: torch.nn.Module) -> None:
    """take_out does the forwards."""
    held = vars(model).pop(HELD, None)
    if held is not None:
        _invariant.release(held)


def _why_not_proven(model: torch.nn.Module, over_a_group: bool) -> str | None:
    """Runs the model; a sentence where the layers differ or it could not be run."""
    by_hand = "call packing_ops.check_invariance(model, run)"
    if over_a_group:
        return f"rows lie on several ranks: {by_hand} with rows of shard_packed"
    if any(parameter.is_meta for parameter in model.parameters()):
        return f"its parameters are on the meta device: {by_hand} when they are loaded"
    try:
        found = check_invariance(model, gradients=False)
    except Exception as error:  # of any model that is not called with text
        return f"it could not be run on random text ({type(error).__name__}: {str(error)[:200]}): {by_hand}"
    return None if found.packs else found.why_not()[0]


def _has_products_on_cpu(module: torch.nn.Module) -> bool:
    weights = [t for t in module.parameters(recurse=False) if t.dim() > 1 and t.is_cpu]
    return bool(weights) and not isinstance(module, torch.nn.Embedding)


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, WeakPartial) and forward.func is _in_whole_blocks


def _in_whole_blocks(module: torch.nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "apply_packing_ops(invariant=True): torch.compile is not served on the CPU, where the sums that it makes "
            "depend on the number of rows"
        )
    with _invariant.WholeBlocks():
        return before(*args, **kwargs) if before is not None else type(module).forward(module, *args, **kwargs)
