"""A model that apply_packing_ops or register() has seen, while its attention is another one than ours.

It was set later, was written into the config, came back with the revert of a model of the same config, is kept by
layers that no attn_implementation of ours reaches, or is that of a model which a Trainer has made anew. Rows of several
documents are then an error, unless something else keeps the documents apart: see OtherCall.
"""

import functools
import sys

from packing_ops.integrations._patching import Patch
from packing_ops.integrations._walks import kept_with_model
from packing_ops.integrations.transformers import versions
from packing_ops.integrations.transformers.call import GUARD, NAMES, PackedCall, mixes_tokens
from packing_ops.integrations.transformers.states import stateful


class Kept:
    """A value that a model keeps, and its copies.

    value: of a model with our attention, its implementations before. Of a guarded one: what an error says if it keeps
        its attention; empty if it may get another one than ours later.
    register: the function of attention.py. Copying and unpickling call it: calls are watched by process.
    """

    def __init__(self, register, value):
        self.register, self.value = register, value
        register(*[*NAMES][:1])  # again: where a Trainer may have this model, it is imported by now

    def __reduce__(self):
        return type(self), (self.register, self.value)


def guard(model, register, keeps="") -> bool:
    """Let the calls of its text models be OtherCalls while their attention is not ours. Return False if it has none."""
    found = [module for module in versions.models_in(model) if versions.reads_text(type(module))]
    for module in found:
        module.__dict__[GUARD] = Kept(register, keeps)
    return bool(found)


_NOT_OURS = (
    "has an attn_implementation that is not packing_ops' any more: set it again, by apply_packing_ops or "
    "set_attn_implementation"
)


_MADE_ANEW = (
    "was made by model_init without packing_ops, which trainer.model had: call apply_packing_ops in model_init, before "
    "it returns"
)


class OtherCall(PackedCall):
    """One call of a guarded model, whose attention is another one than ours.

    Layers with a state keep its documents apart if it has no attention (by_states). Else transformers' masks may, or an
    attention that finds documents itself (by_masks), unless layers beside it mix tokens, or the model keeps attention
    that nothing is known of.
    """

    def __init__(self, model, args, kwargs, outer, sequence):
        super().__init__(model, args, kwargs, outer, None)
        keeps = model.__dict__[GUARD].value
        self.why = f"{self.name} {keeps or _NOT_OURS}"
        if keeps == _MADE_ANEW:  # rows of one document train on, without fused_loss, invariant and the rest
            versions.log_once(self.why)
        if sequence is not None and self.cu_seqlens is not None:  # attention would see only this rank's part
            raise ValueError(
                f"cu_seq_lens_q: expected a row of this rank alone, got a sequence_group's, and {self.why}"
            )
        self.by_states, mixes = _beside_attention(self, model)
        is_set = not (keeps or self.by_states)
        self.by_masks = self.takes_positions = is_set and not mixes
        if is_set and mixes:
            self.mixes = True
            self.unconsumed.add("position_ids")
        elif self.by_masks and self._may_read(self.given("position_ids", args, kwargs), kwargs):
            self.unconsumed.discard("position_ids")

    def _may_read(self, positions, kwargs) -> bool:
        """Return whether its attention may find documents itself. FlashAttention does so in one row, and reads
        cu_seqlens beside the lengths of the longest one.
        """
        others = self.config._attn_implementation not in ("eager", "sdpa", "flex_attention")
        given = (
            self.cu_seqlens is None or positions is not None or all(map(kwargs.get, ("max_length_q", "max_length_k")))
        )
        return others and given and (positions is None or positions.shape[-2] == 1)


@kept_with_model
def _beside_attention(model) -> tuple[bool, bool]:
    """Return whether it has layers with a state and no attention, and whether any of its layers mix tokens."""
    layers = stateful.layers_of(model)
    return (
        stateful.StateKind.RECURRENT in layers.values() and not stateful.attentions(model),
        bool(layers) or mixes_tokens(model.config),
    )


# --- a Trainer with model_init: train() makes a new model, which is guarded if the one before was, and an optimizer ---


def patches_of_trainer() -> list[Patch]:
    """Return what watches a Trainer's model and optimizer, once it is imported: before that there is none."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return [_patch(trainer)] if trainer else []


@functools.cache
def _patch(cls) -> Patch:
    return Patch(cls, "__setattr__", _watched)


def _watched(stock):
    """Guard the new model instead of an error: a callback may still apply to it, before it is called."""

    @functools.wraps(stock)
    def __setattr__(trainer, name, value):
        has = vars(trainer)
        if name == "model" and (before := has.pop(GUARD, None) or (has.get("model") and _guard_in(has["model"]))):
            if value is None:  # as in trials of Ray, which pickles the trainer
                has[GUARD] = before
            elif has.get("is_in_train") and trainer.model_init and not _guard_in(value):
                guard(value, before.register, _MADE_ANEW)
        if name == "optimizer" and value is None and has.get("is_in_train") and trainer.model_init:
            has["_packing_ops_dropped"] = has.get(name)
        if (  # of create_optimizer, maybe inside accelerate's
            name == "lr_scheduler"
            and value is not None
            and hasattr(dropped := has.pop("_packing_ops_dropped", None), "keeps_float32")
            and not hasattr(getattr(has["optimizer"], "optimizer", has["optimizer"]), "keeps_float32")
        ):
            has["optimizer"] = dropped  # for train() once more
            raise ValueError(
                "optimizer: expected one that train() steps, but with model_init it makes another one, without the "
                "copies of keep_float32: call keep_float32 in an override of create_optimizer"
            )
        stock(trainer, name, value)

    return __setattr__


def _guard_in(model) -> Kept | None:
    return next(
        (
            vars(each)[GUARD]
            for each in (versions.models_in(model) if hasattr(model, "modules") else ())
            if GUARD in vars(each)
        ),
        None,
    )
