"""``use_packing_ops``: our core attention in a layer or block spec of megatron-core."""

import copy
import dataclasses
import functools
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from packing_ops.integrations.megatron.core_attention import PackingDotProductAttention
from packing_ops.integrations.megatron.mamba import is_mixer, mixer_of


def use_packing_ops(spec: Any) -> Any:
    """Return a copy of ``spec`` with PackingDotProductAttention for core attention; all else as it was.

    In hybrid models MambaMixer is replaced too: packed rows train by causal_conv1d and mamba2_scan.

    Args:
        spec: ModuleSpec of a layer or a block, or submodules of one: local, TransformerEngine, mixture of experts,
            multi-latent attention, layers that differ. Or a function that makes one, as ``transformer_layer_spec``
            of Megatron-Bridge's providers.

    Returns:
        The copy; ``spec`` itself is not changed. For a function, a function with its signature.

    Example:
        >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        >>> spec = use_packing_ops(get_gpt_layer_local_spec())
        >>> spec.submodules.self_attention.submodules.core_attention.__name__
        'PackingDotProductAttention'

    Raises:
        ValueError: no core attention in ``spec``.
        NotImplementedError: core attention that is neither megatron-core's DotProductAttention nor TransformerEngine's
            TEDotProductAttention: a subclass or another class may compute anything (Megatron-Bridge's of Gemma 2 caps
            scores). Core attention with submodules (DeepSeek sparse attention, say). A MambaMixer before megatron-core
            0.16, which is not given where documents are.
    """
    if callable(spec) and not isinstance(spec, (ModuleSpec, type)):
        return functools.wraps(spec)(lambda *args, **kwargs: use_packing_ops(spec(*args, **kwargs)))
    replaced: list[Any] = []
    copied = _copied(spec, replaced)
    if not replaced:
        raise ValueError(f"spec: expected a layer or block spec with core_attention in it, got {spec!r:.200}")
    return copied


def _copied(part: Any, replaced: list[Any]) -> Any:
    """Copy the containers. What they hold (classes, functions, numbers) is not copied."""
    if isinstance(part, dict):
        return {key: _copied(value, replaced) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return type(part)(_copied(each, replaced) for each in part)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    new = copy.copy(part)
    for name in (field.name for field in dataclasses.fields(part)):
        old = getattr(part, name)
        if name == "core_attention" and old is not None:
            replaced.append(old)
            setattr(new, name, _core_attention(old))
        elif is_mixer(old):
            setattr(new, name, mixer_of(old))
        else:
            setattr(new, name, _copied(old, replaced))
    return new


# Whose softmax attention ours computes, by the module that defines it: TransformerEngine's is not always there.
_SERVED = (
    ("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
    (PackingDotProductAttention.__module__, PackingDotProductAttention.__name__),
)


def _core_attention(old: Any) -> Any:
    if isinstance(old, functools.partial):
        _refuse_others(old.func)
        return functools.partial(PackingDotProductAttention, *old.args, **old.keywords)
    if not isinstance(old, ModuleSpec):
        _refuse_others(old)
        return PackingDotProductAttention
    if old.submodules is not None:
        raise NotImplementedError(f"core_attention: expected one without submodules, got {old.module}")
    _refuse_others(old.module)
    return ModuleSpec(PackingDotProductAttention, dict(old.params))


def _refuse_others(made_by: Any) -> None:
    """Raise NotImplementedError for a class or a builder that may compute more; a pair is where ModuleSpec imports
    it from.
    """
    found = made_by if isinstance(made_by, tuple) else tuple(getattr(made_by, at, "") for at in _NAMED_BY)
    if found not in _SERVED:
        served = " or ".join(name for _, name in _SERVED)
        got = ".".join(found) if all(found) else repr(made_by)
        raise NotImplementedError(f"core_attention: expected {served}, which ours computes, got {got}")


_NAMED_BY = ("__module__", "__qualname__")
