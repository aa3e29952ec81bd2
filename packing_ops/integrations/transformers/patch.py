"""apply_packing_ops and revert_packing_ops: packing_ops inside a transformers model, and out again."""

import importlib
import warnings
from dataclasses import dataclass, field

import torch

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers import attn_implementation as attention_patch
from packing_ops.integrations.transformers import fused_loss as fused_loss_patch
from packing_ops.integrations.transformers import rms_norm as rms_norm_patch
from packing_ops.integrations.transformers import rope as rope_patch
from packing_ops.integrations.transformers import sequence_group as sequence_patch
from packing_ops.integrations.transformers.attention import register
from packing_ops.integrations.transformers.imports import PreTrainedModel
from packing_ops.integrations.transformers.models import FAMILIES, MODULES


@dataclass(frozen=True)
class Applied:
    """What apply_packing_ops swapped and what it left. True as a bool if anything was swapped.

    attention, rope, rms_norm: how many modules were swapped (classes, if a class or None was given).
    fused_loss: how many models make their loss from hidden states.
    skipped: {option: why it was left as it is}.
    """

    attention: int = 0
    rope: int = 0
    rms_norm: int = 0
    fused_loss: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.attention + self.rope + self.rms_norm + self.fused_loss > 0

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
    sequence_group: torch.distributed.ProcessGroup | None = None,
    sequence_scheme: str = "contiguous",
) -> Applied:
    """Swap a model's attention and RoPE, and on request RMSNorm and loss, for those of packing_ops.

    Args:
        model: an instance, also inside a PEFT or DDP wrapper: no other model changes. A model class: all models of its
            modelling module, present and future. None: all models of every known module, which imports them.
        rope: rotate q and k by one call of apply_rotary_qk, which computes in fp32 and rounds once.
        attention: register ``"packing_ops"`` and set it as attn_implementation of the instance; for a class, make it
            the default of new models.
        rms_norm: RMSNorm modules call torch.nn.functional.rms_norm. In bf16 and fp16 the stock formula of Llama, Qwen
            and Mistral rounds the normalised value and then its product with the weight; this one rounds once. Gemma
            and gpt-oss round once either way; Gemma's ``1 + weight`` stays in fp32. Dtypes of results are the stock's.
        fused_loss: of an instance: in training with labels the loss is chunked_cross_entropy of the hidden states,
            without the logits, and the output's are None: who reads them, as TRL's SFTTrainer does for its metrics,
            cannot have it. Apply before others wrap forward. Another lm_head (resized, LoRA): stock, after a warning.
        fp32_cos_sin: keep cos and sin in fp32 where the model casts them to its own dtype.
        sequence_group: of an instance: ranks that share each row. The model then takes what
            packing_ops.parallel.shard_packed gives, and its attention runs over the group (varlen_attention_over); with DDP
            or FSDP2 around it as around any model. A DeviceMesh of one dimension too.
        sequence_scheme: the scheme of shard_packed.
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
        ValueError: ``strict`` and something cannot be swapped in this model; fused_loss or sequence_group of a class;
            a sequence_group for a model whose rows cannot lie on several ranks (RoPE scaled by the row's longest position,
            images), or whose attention cannot be swapped. Then, in the forward: a call that is not what shard_packed
            gives, or labels without num_items_in_batch, since the mean over one rank's targets is not that of the row.

    Example:
        >>> from transformers import AutoModelForCausalLM, Qwen3Config
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        >>> model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes))
        >>> apply_packing_ops(model)
        Applied(attention=2, rope=2, rms_norm=0, fused_loss=0, skipped={})
        >>> revert_packing_ops(model)

    RoPE and RMSNorm families: Llama, Mistral, Ministral, Mixtral, Qwen 2, 2.5 and 3 with their MoE, Qwen2-VL, Qwen2.5-VL,
    Qwen3-VL (text), Gemma 1 to 3, gpt-oss, Phi, Phi-3, GLM, GLM-4, StableLM. Attention: every model that takes
    attn_implementation.
    """
    if model is None or isinstance(model, type):
        if fused_loss:
            raise ValueError(f"fused_loss: expected an instance of a model, got {_name_of(model) if model else None}")
        if sequence_group is not None:
            got = _name_of(model) if model else None
            raise ValueError(f"sequence_group: expected an instance of a model, got {got}")
        return _apply_to_classes(model, rope, attention, rms_norm, fp32_cos_sin, strict)
    _check_model(model)
    skipped = {}
    if attention and (reason := attention_patch.why_not(model)):
        skipped["attention"] = reason
    if rope and not rope_patch.owners(model):
        skipped["rope"] = f"it is none of {', '.join(FAMILIES)}"
    if rms_norm and not rms_norm_patch.norms(model):
        skipped["rms_norm"] = f"it has no RMSNorm of {', '.join(FAMILIES)}"
    losses = [host for host in attention_patch.hosts(model) if fused_loss and fused_loss_patch.refusal(host) is None]
    if fused_loss and not losses:
        reasons = map(fused_loss_patch.refusal, attention_patch.hosts(model))
        skipped["fused_loss"] = next(reasons, "there is no transformers model in it")
    if sequence_group is not None:
        without = skipped.get("attention") or (None if attention else "attention=False")
        sequence_patch.check(attention_patch.hosts(model), without)
    _refuse(model, skipped, strict)
    if attention and "attention" not in skipped and (reason := attention_patch.set_ours(model)):
        skipped["attention"] = reason
        _refuse(model, skipped, strict)
    _warn(model, skipped)
    if sequence_group is not None:
        hosts = attention_patch.hosts(model)
        sequence_patch.apply_to_model(hosts, attention_patch.attentions(model), sequence_group, sequence_scheme)
    return Applied(
        len(attention_patch.attentions(model)) if attention and "attention" not in skipped else 0,
        rope_patch.apply_to_model(model, fp32_cos_sin) if rope else 0,
        rms_norm_patch.apply_to_model(model) if rms_norm else 0,
        len([fused_loss_patch.apply_to_model(host) for host in losses]),
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
        for name in [name for name in _class_patches if model is None or name == model.__module__]:
            for patch in _class_patches.pop(name).values():
                patch.revert()
        return
    _check_model(model)
    sequence_patch.revert_model(model)
    rope_patch.revert_model(model)
    rms_norm_patch.revert_model(model)
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

_class_patches: dict[str, dict] = {}  # {modelling module: {(owner, attribute): Patch}}


def _apply_to_classes(cls, rope, attention, rms_norm, fp32_cos_sin, strict) -> Applied:
    skipped = {}
    if cls is not None:
        known, none = cls.__module__ in MODULES, f"its module is none of {', '.join(FAMILIES)}"
        if attention and not _bases(cls.__module__):
            skipped["attention"] = "its module has no model of transformers"
        if rope and not known:
            skipped["rope"] = none
        if rms_norm and not any(rms_norm_patch.is_norm(value) for value in _classes(cls.__module__)):
            skipped["rms_norm"] = "its module has no RMSNorm" if known else none
        _refuse(cls, skipped, strict)
        _warn(cls, skipped, stacklevel=4)
    if attention:
        register()
    counts = dict.fromkeys(("attention", "rope", "rms_norm"), 0)
    for name in [cls.__module__] if cls is not None else MODULES:
        if rope and "rope" not in skipped:
            _pin(name, rope_patch.patch_of(name))
            counts["rope"] += 1
        for value in _classes(name):
            if rope and fp32_cos_sin and rope_patch.is_rotary(value):
                _pin(name, Patch(value, "forward", rope_patch.fp32_forward))
            if rms_norm and rms_norm_patch.is_norm(value):
                _pin(name, Patch(value, "forward", lambda _, value=value: rms_norm_patch.forward_of(value)))
                counts["rms_norm"] += 1
        for value in _bases(name) if attention else ():
            _pin(name, Patch(value, "_check_and_adjust_attn_implementation", attention_patch.with_our_default))
            counts["attention"] += 1
    return Applied(**counts, skipped=skipped)


def _classes(module_name) -> list[type]:
    values = vars(importlib.import_module(module_name)).values()
    return [value for value in values if isinstance(value, type) and value.__module__ == module_name]


def _bases(module_name) -> list[type]:
    found = [value for value in _classes(module_name) if issubclass(value, PreTrainedModel)]
    return [value for value in found if PreTrainedModel in value.__bases__]


def _pin(module_name, patch) -> None:
    _class_patches.setdefault(module_name, {}).setdefault((patch.owner, patch.name), patch).apply()
