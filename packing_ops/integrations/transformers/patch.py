"""apply_packing_ops and revert_packing_ops: packing_ops inside a transformers model, and out again."""

import functools
import importlib
import warnings

import torch

from packing_ops.integrations.transformers import _rms_norm, _rotary
from packing_ops.integrations.transformers._host import PreTrainedModel
from packing_ops.integrations.transformers.attention import register, unknown_options

IMPLEMENTATION = "packing_ops"
_STATE = "_packing_ops_attention"


class Applied:
    """In a model with our attention: what it was before, or None. A process that unpickles the model gets to know ours."""

    def __init__(self, before=None):
        register()
        self.before = before

    def __reduce__(self):
        return Applied, (self.before,)


def apply_packing_ops(
    model: torch.nn.Module | type | None = None,
    *,
    rope: bool = True,
    attention: bool = True,
    rms_norm: bool = False,
    fp32_cos_sin: bool = False,
) -> bool:
    """Swap a model's RoPE, attention and, if asked, RMSNorm for fused ones. Applying twice is applying once.

    Args:
        model: an instance (a PEFT or DDP wrapper around one will do): it alone changes, others of its class do not.
            A model class: all models of its modelling module, those that exist and those to come. None: all models of
            every known module, which imports them.
        rope: q and k are rotated by one call of packing_ops.apply_rotary_qk, in fp32 inside and rounded once.
        attention: registers ``"packing_ops"`` and sets it as attn_implementation of the instance. For a class it is
            the default of models made from then on.
        rms_norm: RMSNorm modules call torch.nn.functional.rms_norm. In bf16 and fp16 the stock formula of Llama, Qwen
            and Mistral rounds the normalised value and then its product with the weight; this one rounds once. Gemma
            and gpt-oss round once either way; Gemma's ``1 + weight`` stays in fp32. Dtypes of results are the stock's.
        fp32_cos_sin: keep cos and sin in fp32 where the model casts them to its own dtype.

    RoPE that scales with the length (dynamic NTK, longrope) takes the largest position, so with position_ids that
    restart the longest document counts, not the row. An instance that gets ``cu_seq_lens_q`` alone, batch 1, is given
    such position_ids. Multimodal ones are given them with attention swapped; then position_ids ``[batch, seqlen]`` tell
    documents there too, as they do in text models.

    Apply before torch.compile: a compiled model need not notice. What is off stays as it is, so that calls add up.
    Copies of the model keep what was applied, and so does a pickled one in the process that loads it.

    Returns:
        True, or False with a warning that names the model if any wish cannot be met; then nothing was changed.

    Raises:
        ImportError: transformers is missing (``pip install packing_ops[hf]``).
        TypeError: model is neither.

    Example:
        >>> model = AutoModelForCausalLM.from_config(Qwen3Config())  # doctest: +SKIP
        >>> apply_packing_ops(model, rms_norm=True)  # doctest: +SKIP
        True

    RoPE families: Llama, Mistral, Ministral, Mixtral, Qwen 2, 2.5 and 3 with their MoE, Qwen2-VL, Qwen2.5-VL, Qwen3-VL
    (text), Gemma 1 to 3, gpt-oss, Phi, Phi-3, GLM, GLM-4, StableLM.
    """
    if model is None or isinstance(model, type):
        return _apply_to_classes(model, rope, attention, rms_norm, fp32_cos_sin)
    _check_model(model)
    refused = _refusal(model, rope, rms_norm)
    if refused is None and attention:
        refused = _set_attention(model)
    if refused is not None:
        return _leave_alone(model, refused)
    if rope:
        _rotary.apply_to_model(model, fp32_cos_sin)
    if rms_norm:
        _rms_norm.apply_to_model(model)
    return True


def revert_packing_ops(model: torch.nn.Module | type | None = None) -> None:
    """Undo apply_packing_ops with the same model: an instance, a class, or None for all classes.

    What other calls swapped stays. Outputs are those of before to the bit; nothing is left in the modelling module
    once no model needs it. What register adds to transformers stays for other models under its name, its docstring
    says what that is. Reverting what was never applied does nothing.

    Raises:
        TypeError: model is neither an instance nor a class nor None.
    """
    if model is None or isinstance(model, type):
        for name in [name for name in _class_swaps if model is None or name == model.__module__]:
            _revert_classes(name)
        return
    _check_model(model)
    _rotary.revert_model(model)
    _rms_norm.revert_model(model)
    for host in _hosts(model):
        applied = host.__dict__.get(_STATE)
        if applied is not None and applied.before is not None:
            del host.__dict__[_STATE]
            host.set_attn_implementation(applied.before)


def _check_model(model) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, a model class or None, got {type(model).__name__}")


def _leave_alone(model, reason, stacklevel=3) -> bool:
    name = getattr(model, "__name__", None) or " in ".join(
        dict.fromkeys([*(type(host).__name__ for host in _hosts(model)), type(model).__name__])
    )
    warnings.warn(f"apply_packing_ops leaves {name} as it is: {reason}", stacklevel=stacklevel)
    return False


# --- an instance ---


def _hosts(model) -> list[PreTrainedModel]:
    """The outermost transformers models in it."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [host for child in model.children() for host in _hosts(child)]


def _refusal(model, rope, rms_norm) -> str | None:
    if rope and not _rotary.owners(model):
        return f"its RoPE is none of {', '.join(_rotary.FAMILIES)} (rope=False swaps the rest)"
    if rms_norm and not _rms_norm.norms(model):
        return f"it has no RMSNorm of {', '.join(_rotary.FAMILIES)} (rms_norm=False swaps the rest)"
    return None


def _set_attention(model) -> str | None:
    """All hosts or none; the reason if none."""
    hosts = _hosts(model)
    if not hosts:
        return "there is no transformers model in it to set attn_implementation on (attention=False swaps the rest)"
    for cls in {type(module) for host in hosts for module in host.modules()}:
        if options := sorted(unknown_options(cls)):
            return f"{cls.__name__} has attention with {', '.join(options)} (attention=False swaps the rest)"
    register()
    before = [_attn_implementations(host.config) for host in hosts]
    try:
        for host in hosts:
            host.set_attn_implementation(IMPLEMENTATION)
        refused = [type(host).__name__ for host in hosts if host.config._attn_implementation != IMPLEMENTATION]
    except BaseException:
        _restore(hosts, before)
        raise
    if refused:
        _restore(hosts, before)
        return f"{', '.join(refused)} cannot change its attn_implementation (attention=False swaps the rest)"
    for host, implementations in zip(hosts, before, strict=True):
        host.__dict__.setdefault(_STATE, Applied(implementations))
    return None


def _restore(hosts, before) -> None:
    for host, implementations in zip(hosts, before, strict=True):
        host.set_attn_implementation(implementations)


def _attn_implementations(config) -> dict:
    """What set_attn_implementation takes to bring a model and its sub-models back."""
    found = {"": config._attn_implementation}
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if sub_config is not None:
            nested = _attn_implementations(sub_config)
            found[key] = nested if len(nested) > 1 else nested[""]
    return found


# --- classes ---

_class_swaps: dict[str, dict] = {}  # {modelling module: {(class, attribute): what stood there, or None}}


def _apply_to_classes(cls, rope, attention, rms_norm, fp32_cos_sin) -> bool:
    if cls is not None and cls.__module__ not in _rotary.MODULES:
        return _leave_alone(cls, f"its module is none of {', '.join(_rotary.FAMILIES)}", stacklevel=4)
    if cls is not None and rms_norm and not any(_rms_norm.is_norm(value) for value in _classes(cls.__module__)):
        return _leave_alone(cls, "its module has no RMSNorm (rms_norm=False swaps the rest)", stacklevel=4)
    if attention:
        register()
    for name in [cls.__module__] if cls is not None else _rotary.MODULES:
        done = _class_swaps.setdefault(name, {})
        if rope:
            _rotary.swap_of(name).everywhere = True
            _rotary.swap_of(name).install()
        for value in _classes(name):
            if rope and fp32_cos_sin and _rotary.is_rotary(value):
                _set(done, value, "forward", _fp32_forward)
            if rms_norm and _rms_norm.is_norm(value):
                _set(done, value, "forward", lambda _, value=value: _rms_norm.forward_of(value))
            if attention and issubclass(value, PreTrainedModel) and PreTrainedModel in value.__bases__:
                _set(done, value, "_check_and_adjust_attn_implementation", _with_our_default)
    return True


def _classes(module_name) -> list[type]:
    values = vars(importlib.import_module(module_name)).values()
    return [value for value in values if isinstance(value, type) and value.__module__ == module_name]


def _set(done, cls, attribute, make) -> None:
    if (cls, attribute) not in done:
        done[cls, attribute] = vars(cls).get(attribute)
        setattr(cls, attribute, make(getattr(cls, attribute)))


def _revert_classes(name) -> None:
    for (cls, attribute), before in _class_swaps.pop(name).items():
        if before is None:
            delattr(cls, attribute)
        else:
            setattr(cls, attribute, before)
    _rotary.swap_of(name).everywhere = False
    _rotary.swap_of(name).remove_if_unused()


def _fp32_forward(stock):
    @functools.wraps(stock)
    def forward(self, x, *args, **kwargs):
        return stock(self, _rotary.in_fp32(x), *args, **kwargs)

    return forward


def _with_our_default(stock):
    """Where transformers settles the implementation of a new model."""

    @functools.wraps(stock)
    def check(self, attn_implementation, *args, **kwargs):
        if not attn_implementation:
            self.__dict__.setdefault(_STATE, Applied())
        return stock(self, attn_implementation or IMPLEMENTATION, *args, **kwargs)

    return check
