"""apply_packing_ops and revert_packing_ops: packing_ops inside a transformers model, and out again."""

import functools
import importlib
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers import attn_implementation as attention_patch
from packing_ops.integrations.transformers import fused_loss as fused_loss_patch
from packing_ops.integrations.transformers import rms_norm as rms_norm_patch
from packing_ops.integrations.transformers import rope as rope_patch
from packing_ops.integrations.transformers import vision as vision_patch
from packing_ops.integrations.transformers.attention import register
from packing_ops.integrations.transformers.imports import PreTrainedModel


@dataclass(frozen=True)
class Applied:
    """What apply_packing_ops swapped and what it left. True as a bool if anything was swapped.

    attention, rope, rms_norm: how many modules were swapped (classes, if a class or None was given).
    fused_loss: how many models make their loss from hidden states.
    vision: how many attention modules of vision and audio towers attend to all images in one call.
    skipped: {option: why it, or a part of it, was left as it is}.
    """

    attention: int = 0
    rope: int = 0
    rms_norm: int = 0
    fused_loss: int = 0
    vision: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.attention + self.rope + self.rms_norm + self.fused_loss + self.vision > 0

    def __radd__(self, count):
        return count + bool(self)  # sum() over several models counts those that were changed


def apply_packing_ops(
    model: torch.nn.Module | type | None = None,
    *,
    rope: bool = True,
    attention: bool = True,
    rms_norm: bool = False,
    fused_loss: bool = False,
    fp32_cos_sin: bool = False,
    strict: bool = False,
) -> Applied:
    """Swap a model's attention and RoPE, and on request RMSNorm and loss, for those of packing_ops.

    Args:
        model: an instance, also inside a PEFT or DDP wrapper: no other model changes. A model class: all models of its
            modelling module, present and future. None: all models of every modelling module, those that are imported
            by now and those of which a model is made later.
        rope: rotate q and k by one call of apply_rotary_qk, which computes in fp32 and rounds once.
        attention: register ``"packing_ops"`` and set it as attn_implementation of the instance; for a class, make it
            the default of new models. Attention of an instance's vision tower that is given cu_seqlens (Qwen-VL and its
            like) then takes all images in one call.
        rms_norm: RMSNorm modules call torch.nn.functional.rms_norm. In bf16 and fp16 the stock formula of Llama, Qwen
            and Mistral rounds the normalised value and then its product with the weight; this one rounds once. Gemma
            and gpt-oss round once either way; Gemma's ``1 + weight`` stays in fp32. Dtypes of results are the stock's.
        fused_loss: of an instance: in training with labels the loss is chunked_cross_entropy of the hidden states,
            without the logits, and the output's are None: who reads them, as TRL's SFTTrainer does for its metrics,
            cannot have it. Apply before others wrap forward. Another lm_head (resized, LoRA): stock, after a warning.
        fp32_cos_sin: keep cos and sin in fp32 where the model casts them to its own dtype.
        strict: raise, and change nothing, if any option cannot be applied. Otherwise what can be is swapped, and a
            warning names what is left.

    Calls add up: an option that is off leaves what an earlier call swapped. Apply before torch.compile, which may miss
    a later change. Copies and pickles of the model keep what was applied. ``print(info(model))`` shows what runs.

    RoPE that scales with the length (dynamic NTK, longrope) takes the largest position: with position_ids that restart
    that is the longest document, not the row. A model called with ``cu_seq_lens_q`` alone, batch 1, gets position_ids
    made from it; a multimodal one too, if its attention is swapped: position_ids ``[batch, seqlen]`` then start its
    documents as in text models.

    Returns:
        Applied.

    Raises:
        ImportError: transformers is missing (``pip install packing_ops[hf]``).
        TypeError: model is no instance, class or None.
        ValueError: ``strict`` and something cannot be swapped in this model; fused_loss of a class.

    Example:
        >>> from transformers import AutoModelForCausalLM, Qwen3Config
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        >>> model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes))
        >>> apply_packing_ops(model)
        Applied(attention=2, rope=2, rms_norm=0, fused_loss=0, vision=0, skipped={})
        >>> revert_packing_ops(model)

    No list of families is behind RoPE and RMSNorm. What a modelling module has for them is run beside ours once in a
    process, on small tensors of its own on the CPU, and is swapped where both agree to the last rounding. Attention:
    every model that takes
    attn_implementation.
    """
    if model is None or isinstance(model, type):
        if fused_loss:
            raise ValueError(f"fused_loss: expected an instance of a model, got {_name_of(model) if model else None}")
        return _apply_to_classes(model, _Options(rope, attention, rms_norm, fp32_cos_sin), strict)
    _check_model(model)
    skipped = {}
    if attention and (reason := attention_patch.why_not(model)):
        skipped["attention"] = reason
    if rope and (reason := rope_patch.why_not(model)):
        skipped["rope"] = reason
    if rms_norm and (reason := rms_norm_patch.why_not(model)):
        skipped["rms_norm"] = reason
    losses = [host for host in attention_patch.hosts(model) if fused_loss and fused_loss_patch.refusal(host) is None]
    if fused_loss and not losses:
        reasons = map(fused_loss_patch.refusal, attention_patch.hosts(model))
        skipped["fused_loss"] = next(reasons, "there is no transformers model in it")
    _refuse(model, skipped, strict)
    if attention and "attention" not in skipped and (reason := attention_patch.set_ours(model)):
        skipped["attention"] = reason
        _refuse(model, skipped, strict)
    vision = 0
    if attention and "attention" not in skipped:
        vision, reason = vision_patch.apply_to_model(model)
        skipped |= {"vision": reason} if reason else {}
    _warn(model, skipped)
    return Applied(
        len(attention_patch.attentions(model)) if attention and "attention" not in skipped else 0,
        rope_patch.apply_to_model(model, fp32_cos_sin) if rope else 0,
        rms_norm_patch.apply_to_model(model) if rms_norm else 0,
        len([fused_loss_patch.apply_to_model(host) for host in losses]),
        vision,
        skipped,
    )


def revert_packing_ops(model: torch.nn.Module | type | None = None) -> None:
    """Undo apply_packing_ops with the same model: an instance, a class, or None for all classes.

    Outputs are again those of before, to the bit. The modelling module is restored once no model needs the swap; what
    register added to transformers stays until unregister. Reverting what was never applied does nothing.

    Raises:
        TypeError: model is neither an instance nor a class nor None.
    """
    if model is None or isinstance(model, type):
        for name in [name for name in [*_class_patches] if model is None or name == model.__module__]:
            for patch in _class_patches.pop(name).values():
                patch.revert()
        return
    _check_model(model)
    rope_patch.revert_model(model)
    rms_norm_patch.revert_model(model)
    vision_patch.revert_model(model)
    for host in attention_patch.hosts(model):
        fused_loss_patch.revert_model(host)
    attention_patch.revert(model)


def _check_model(model) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, a model class or None, got {type(model).__name__}")


def _name_of(model) -> str:
    if isinstance(model, type):
        return model.__name__
    inside = (type(host).__name__ for host in attention_patch.hosts(model))
    return " in ".join(dict.fromkeys([*inside, type(model).__name__]))


def _refuse(model, skipped, strict) -> None:
    if strict and skipped:
        what = "; ".join(f"{option}: {reason} ({option}=False leaves it)" for option, reason in skipped.items())
        raise ValueError(f"strict: expected to swap all that was asked for, but in {_name_of(model)} {what}")


def _warn(model, skipped, stacklevel=3) -> None:
    for option, reason in skipped.items():
        left = f"{option} of {_name_of(model)} as it is: {reason}"
        warnings.warn(f"apply_packing_ops leaves {left} ({option}=False says nothing)", stacklevel=stacklevel)


# --- classes ---

_class_patches: dict[str | None, dict] = {}  # {modelling module, None for all: {(owner, attribute): Patch}}


class _Options(NamedTuple):
    """What is swapped in all models of a module."""

    rope: bool
    attention: bool
    rms_norm: bool
    fp32_cos_sin: bool


def _apply_to_classes(cls, options, strict) -> Applied:
    if options.attention:
        register()
    if cls is not None:
        skipped = _why_not_class(cls, options)
        _refuse(cls, skipped, strict)
        _warn(cls, skipped, stacklevel=4)
        return Applied(**_swap_module(cls.__module__, options, key=cls.__module__), skipped=skipped)
    counts = Counter(attention=0, rope=0, rms_norm=0)
    for name in [name for name in sys.modules if _is_modelling(name)]:
        counts.update(_swap_module(name, options, key=None))
    _pin(None, Patch(PreTrainedModel, "__init__", functools.partial(_swapping_its_module, options)))
    return Applied(**counts)


def _is_modelling(name) -> bool:
    return name.startswith(rope_patch.HOSTS) and ".modeling_" in name


def _why_not_class(cls, options) -> dict[str, str]:
    skipped, name = {}, cls.__module__
    if options.attention and not _bases(name):
        skipped["attention"] = "its module has no model of transformers"
    if options.rope and (reason := rope_patch.refusal_of_module(name)):
        skipped["rope"] = f"its module is not served: {reason}"
    if options.rms_norm:
        verdicts = [rms_norm_patch.formula_of_class(value) for value in _norms(name)]
        if reasons := [reason for formula, reason in verdicts if formula is None]:
            skipped["rms_norm"] = "; ".join(reasons)
        elif not verdicts:
            skipped["rms_norm"] = "its module has no RMSNorm"
    return skipped


def _swap_module(name, options, key) -> dict[str, int]:
    """How many classes, and 1 for RoPE, are swapped in a modelling module, under ``key`` of _class_patches."""
    counts = dict.fromkeys(("attention", "rope", "rms_norm"), 0)
    patches = rope_patch.patches_of(name) if options.rope else {}
    for patch in patches.values():
        _pin(key, patch)
        counts["rope"] = 1
    for value in _classes(name):
        if patches and options.fp32_cos_sin and rope_patch.is_rotary(value):
            _pin(key, Patch(value, "forward", _fp32_forward))
    for value in _norms(name) if options.rms_norm else ():
        formula, _ = rms_norm_patch.formula_of_class(value)
        if formula is not None:
            make = functools.partial(_fused_forward, value, formula)
            _pin(key, Patch(value, "forward", make))
            counts["rms_norm"] += 1
    for value in _bases(name) if options.attention else ():
        _pin(key, Patch(value, "_check_and_adjust_attn_implementation", _with_our_default))
        counts["attention"] += 1
    return counts


def _fused_forward(cls, formula, stock):
    return rms_norm_patch.forward_of(cls, formula)


def _swapping_its_module(options, stock):
    """Wraps the constructor that all models call: their module is swapped when the first of them is made."""

    @functools.wraps(stock)
    def __init__(self, *args, **kwargs):
        name = type(self).__module__
        if _is_modelling(name):
            _swap_module(name, options, key=None)
        return stock(self, *args, **kwargs)

    return __init__


def _norms(module_name) -> list[type]:
    return [value for value in _classes(module_name) if rms_norm_patch.is_norm(value)]


def _classes(module_name) -> list[type]:
    values = vars(importlib.import_module(module_name)).values()
    return [value for value in values if isinstance(value, type) and value.__module__ == module_name]


def _bases(module_name) -> list[type]:
    found = [value for value in _classes(module_name) if issubclass(value, PreTrainedModel)]
    return [value for value in found if PreTrainedModel in value.__bases__]


def _pin(key, patch) -> None:
    _class_patches.setdefault(key, {}).setdefault((patch.owner, patch.name), patch).apply()


def _fp32_forward(stock):
    @functools.wraps(stock)
    def forward(self, x, *args, **kwargs):
        return stock(self, rope_patch.in_fp32(x), *args, **kwargs)

    return forward


def _with_our_default(stock):
    """Wraps the method that picks the attn_implementation of a new model."""

    @functools.wraps(stock)
    def check(self, attn_implementation, *args, **kwargs):
        if not attn_implementation:
            self.__dict__.setdefault(attention_patch.STATE, attention_patch.AttentionBefore())
        return stock(self, attn_implementation or attention_patch.IMPLEMENTATION, *args, **kwargs)

    return check
