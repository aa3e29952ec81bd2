"""Models that choose among attention classes of their own, which no attn_implementation of ours reaches (Falcon, GPT-J)."""

import functools
import inspect
import sys

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers import model_call
from packing_ops.integrations.transformers.imports import PreTrainedModel


def _names_of(cls) -> list[str]:
    """The attn_implementations in the table of a text model's module, or none."""
    if {"input_ids", "inputs_embeds"}.isdisjoint(inspect.signature(cls.forward).parameters):
        return []
    tables = [
        table
        for name, table in vars(sys.modules[cls.__module__]).items()
        if name.endswith("_ATTENTION_CLASSES") and "VISION" not in name and isinstance(table, dict)
    ]
    return sorted(set().union(*tables))


def _checked(stock):
    """Wraps the method that picks the attn_implementation of a new model."""

    @functools.wraps(stock)
    def check(self, attn_implementation, *args, **kwargs):
        names = _names_of(type(self)) if attn_implementation in model_call.NAMES else None
        if names and attn_implementation not in names:
            raise ValueError(
                f"attn_implementation: expected one of {', '.join(names)} for {type(self).__name__}, which has attention of "
                f"its own, got {attn_implementation!r}; load it with one of these, and give each document a row of its own"
            )
        return stock(self, attn_implementation, *args, **kwargs)

    return check


PATCH = Patch(PreTrainedModel, "_check_and_adjust_attn_implementation", _checked)
