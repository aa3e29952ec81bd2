"""attn_implementation of a model and its parts: what it is, ours in its place, and back."""

import functools
import inspect

import torch

from packing_ops.integrations.transformers import model_call, stateful_layers
from packing_ops.integrations.transformers.attention import packing_ops_attention, register
from packing_ops.integrations.transformers.imports import PreTrainedModel, not_causal
from packing_ops.integrations.transformers.served import unknown_options
from packing_ops.integrations.transformers.stateful_kinds import reads_text

IMPLEMENTATION = "packing_ops"
STATE = "_packing_ops_attention"


class AttentionBefore:
    """In a model with our attention: what it was, or None. A process that unpickles the model gets to know ours."""

    def __init__(self, before=None):
        register()
        self.before = before

    def __reduce__(self):
        return AttentionBefore, (self.before,)


class Guard:
    """In a model that keeps its attention: why, and whether it has layers with a state, which keep documents apart.

    A process that unpickles the model watches its calls too.
    """

    def __init__(self, why: str, has_state: bool):
        register()
        self.why, self.has_state = why, has_state

    def __reduce__(self):
        return Guard, (self.why, self.has_state)


def hosts(model) -> list[PreTrainedModel]:
    """The outermost transformers models in it."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [host for child in model.children() for host in hosts(child)]


@functools.cache
def calls_attention(cls: type) -> bool:
    """A module of this class calls the attention that attn_implementation names."""
    try:  # a subclass may call the forward above it
        sources = [inspect.getsource(vars(base)["forward"]) for base in cls.__mro__ if "forward" in vars(base)]
    except (OSError, TypeError):  # no source
        return cls.__name__.endswith("Attention")
    return any("attention_interface(" in source or "ALL_ATTENTION_FUNCTIONS" in source for source in sources)


def attentions(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if calls_attention(type(module))]


def why_not(model) -> str | None:
    """Why our attention cannot be set, as far as it can be told without trying."""
    found = hosts(model)
    if not found:
        return "there is no transformers model in it to set attn_implementation on"
    for cls in {type(module) for host in found for module in host.modules()}:
        if options := sorted(unknown_options(cls, packing_ops_attention)):
            return f"{cls.__name__} has attention with {', '.join(options)}"
    if reasons := [why for host in found for module in host.modules() if (why := _not_causal(module))]:
        return reasons[0]
    if not any(attentions(host) for host in found):
        return f"{type(found[0]).__name__} has an attention of its own, which no attn_implementation names"
    return None


def _not_causal(module):
    return not_causal(module) if isinstance(module, PreTrainedModel) else None


def set_ours(model) -> str | None:
    """In all hosts or in none; the reason if in none."""
    found = hosts(model)
    register()
    before = [implementations_of(host.config) for host in found]
    try:
        for host in found:
            host.set_attn_implementation(IMPLEMENTATION)
        refused = [type(host).__name__ for host in found if host.config._attn_implementation != IMPLEMENTATION]
    except BaseException:
        _restore(found, before)
        raise
    if refused:
        _restore(found, before)
        return f"{', '.join(refused)} cannot change its attn_implementation"
    for host, implementations in zip(found, before, strict=True):
        host.__dict__.setdefault(STATE, AttentionBefore(implementations))
    return None


def guard(model, why: str) -> bool:
    """Whether calls of it with several documents in a row are an error from now on, where no layer keeps them apart."""
    found = [module for host in hosts(model) for module in host.modules() if _is_of_text(module)]
    for module in found:
        module.__dict__[model_call.GUARD] = Guard(why, bool(stateful_layers.stateful_layers(module)))
    return bool(found)


def _is_of_text(module) -> bool:
    return isinstance(module, PreTrainedModel) and reads_text(type(module))


def revert(model) -> None:
    for module in model.modules():
        if module.__dict__.pop(model_call.GUARD, None) is not None:
            stateful_layers.revert(module)
    for host in hosts(model):
        kept = host.__dict__.get(STATE)
        if kept is not None and kept.before is not None:
            del host.__dict__[STATE]
            host.set_attn_implementation(kept.before)
            stateful_layers.revert(host)


def _restore(found, before) -> None:
    for host, implementations in zip(found, before, strict=True):
        host.set_attn_implementation(implementations)


def implementations_of(config) -> dict:
    """What set_attn_implementation takes to bring a model and its sub-models back."""
    found = {"": config._attn_implementation}
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if sub_config is not None and sub_config._attn_implementation is not None:  # some audio parts have none
            nested = implementations_of(sub_config)
            found[key] = nested if len(nested) > 1 else nested[""]
    return found
