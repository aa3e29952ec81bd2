"""A Trainer with model_init makes a new model in train(): an error, where the one before had our attention."""

import sys
from functools import cache

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers.call import NAMES
from packing_ops.integrations.transformers.versions import models_in


def patches() -> list[Patch]:
    """Return what watches model_init, once the Trainer is imported: before that there is none."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return [_patch(trainer)] if trainer else []


@cache
def _patch(cls) -> Patch:
    return Patch(cls, "call_model_init", _watched)


def _watched(stock):
    def call_model_init(trainer, *args, **kwargs):
        before, model = getattr(trainer, "model", None), stock(trainer, *args, **kwargs)
        if before is not None and _has_ours(before) and not _has_ours(model):
            raise RuntimeError(
                "model_init: expected a model with packing_ops, as trainer.model had, got one without: "
                "call apply_packing_ops in model_init, before it returns"
            )
        return model

    return call_model_init


def _has_ours(model) -> bool:
    return any(each.config._attn_implementation in NAMES for each in models_in(model))
