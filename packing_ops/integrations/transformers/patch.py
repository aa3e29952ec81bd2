"""apply_packing_ops and revert_packing_ops: packing_ops inside a transformers model, and out again."""

import torch

from packing_ops.integrations.transformers import attn_implementation as attention_patch
from packing_ops.integrations.transformers import fused_loss as fused_loss_patch
from packing_ops.integrations.transformers import rms_norm as rms_norm_patch
from packing_ops.integrations.transformers import rope as rope_patch
from packing_ops.integrations.transformers import sequence_group as sequence_patch
from packing_ops.integrations.transformers import vision as vision_patch
from packing_ops.integrations.transformers.applied import Applied, refuse, warn


def apply_packing_ops(
    model: torch.nn.Module,
    *,
    rope: bool = True,
    attention: bool = True,
    rms_norm: bool = False,
    fused_loss: bool = False,
    fp32_cos_sin: bool = False,
    strict: bool = False,
    sequence_group: "torch.distributed.ProcessGroup | torch.distributed.DeviceMesh | None" = None,
    sequence_scheme: str = "contiguous",
) -> Applied:
    """Swap a model's attention and RoPE, and on request RMSNorm and loss, for those of packing_ops.

    Args:
        model: an instance, also inside a PEFT or DDP wrapper. No other model changes.
        rope: rotate q and k by one call of apply_rotary_qk, which computes in fp32 and rounds once; in the attention of
            vision towers that is given cu_seqlens too.
        attention: register ``"packing_ops"`` and set it as attn_implementation. Attention of a vision tower that is given
            cu_seqlens (Qwen-VL and its like) then takes all images in one call. A model whose attention has no such name keeps
            it, after a warning: from then on a call with several documents in a row is an error, unless layers with a state
            (Mamba, RWKV) keep them apart.
        rms_norm: RMSNorm modules call torch.nn.functional.rms_norm. In bf16 and fp16 the stock formula of Llama, Qwen
            and Mistral rounds the normalised value and then its product with the weight; this one rounds once. Gemma
            and gpt-oss round once either way; Gemma's ``1 + weight`` stays in fp32. Dtypes of results are the stock's.
        fused_loss: in training with labels the loss is chunked_cross_entropy of the hidden states,
            without the logits, and the output's are None: who reads them, as TRL's SFTTrainer does for its metrics,
            cannot have it. Apply before others wrap forward. Another lm_head (resized, LoRA): stock, after a warning.
        fp32_cos_sin: keep cos and sin in fp32 where the model casts them to its own dtype.
        sequence_group: ranks that share each row. The model then takes what
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
        TypeError: model is no instance of torch.nn.Module: a class, for example.
        ValueError: ``strict`` and something cannot be swapped in this model; a sequence_group for a model whose rows cannot lie on several ranks (RoPE scaled by the row's longest position,
            images), or whose attention cannot be swapped. Then, in the forward: a call that is not what shard_packed
            gives, or labels without num_items_in_batch, since the mean over one rank's targets is not that of the row.

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
    _check_model(model)
    # What cannot be swapped: nothing has changed until all of it is known.
    hosts, skipped = attention_patch.hosts(model), {}
    if attention and (reason := attention_patch.why_not(model)):
        skipped["attention"] = reason
    if attention and not skipped and (reason := vision_patch.why_not(model)):
        skipped["vision"] = reason
    if rope and (reason := rope_patch.why_not(model)):
        skipped["rope"] = reason
    if rms_norm and (reason := rms_norm_patch.why_not(model)):
        skipped["rms_norm"] = reason
    losses = [host for host in hosts if fused_loss and fused_loss_patch.refusal(host) is None]
    if fused_loss and (reason := fused_loss_patch.why_not(hosts)):
        skipped["fused_loss"] = reason
    if sequence_group is not None:
        sequence_patch.check(hosts, skipped.get("attention") or (None if attention else "attention=False"))
    refuse(model, skipped, strict)
    # Attention, which a model may still refuse
    if attention and "attention" not in skipped and (left := attention_patch.set_ours(model)):
        if sequence_group is not None:
            sequence_patch.check(hosts, left)
        skipped.pop("vision", None)
        skipped["attention"] = left
        refuse(model, skipped, strict)
    if "attention" in skipped and attention_patch.guard(model, skipped["attention"]):
        skipped["attention"] += "; rows of several documents are an error where no layer keeps them apart"
    attends = attention and "attention" not in skipped
    vision = vision_patch.apply_to_model(model) if attends else 0
    if sequence_group is not None:
        sequence_patch.apply_to_model(hosts, attention_patch.attentions(model), sequence_group, sequence_scheme)
    # The rest
    rotated = rope_patch.apply_to_model(model, fp32_cos_sin) if rope else 0
    normed = rms_norm_patch.apply_to_model(model) if rms_norm else 0
    for host in losses:
        fused_loss_patch.apply_to_model(host)
    warn(model, skipped)
    attending = len(attention_patch.attentions(model)) if attends else 0
    return Applied(attending, rotated, normed, len(losses), vision, skipped)


def revert_packing_ops(model: torch.nn.Module) -> None:
    """Undo apply_packing_ops in a model.

    Outputs are again those of before, to the bit. The modelling module is restored once no model needs the swap; what
    register added to transformers stays until unregister. Reverting what was never applied does nothing.

    Raises:
        TypeError: model is no instance of torch.nn.Module.
    """
    _check_model(model)
    sequence_patch.revert_model(model)
    rope_patch.revert_model(model)
    rms_norm_patch.revert_model(model)
    vision_patch.revert_model(model)
    for host in attention_patch.hosts(model):
        fused_loss_patch.revert_model(host)
    attention_patch.revert(model)


def _check_model(model: object) -> None:
    if isinstance(model, type):
        raise TypeError(
            f"model: expected a torch.nn.Module, got the class {model.__name__}: pass each model made of it"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}: pass the model itself")
