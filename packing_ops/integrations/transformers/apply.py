"""apply_packing_ops puts packing_ops into a transformers model, revert_packing_ops takes it out."""

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from packing_ops.integrations._patching import put_around, take_out, take_out_function
from packing_ops.integrations.transformers import fused_loss as fused_loss_patch
from packing_ops.integrations.transformers import rms_norm as rms_norm_patch
from packing_ops.integrations.transformers import rope as rope_patch
from packing_ops.integrations.transformers import sequence_group as sequence_patch
from packing_ops.integrations.transformers import vision as vision_patch
from packing_ops.integrations.transformers.attention import in_tables, register, unknown_options
from packing_ops.integrations.transformers.call import GUARD, NAMES
from packing_ops.integrations.transformers.other_attention import Kept, guard
from packing_ops.integrations.transformers.states import linear_attention as linear_attention_patch
from packing_ops.integrations.transformers.states import stateful
from packing_ops.integrations.transformers.versions import PreTrainedModel, code_has, models_in
from packing_ops.invariance import few_rows, mode
from packing_ops.invariance.api import check_invariance
from packing_ops.invariance.refusals import refusals

# --- Applied ---


@dataclass(frozen=True)
class Applied:
    """What apply_packing_ops swapped and what it left, calls before it included. True as a bool if anything is swapped.

    Attributes:
        attention, rope, rms_norm: the number of modules that run ours.
        fused_loss: the number of models that compute their loss from hidden states.
        vision: the number of attention modules in vision and audio towers that take all images in one call.
        linear_attention: the number of layers whose convolution, gated delta rule or scan was swapped.
        skipped: {part: why all or some of it was not swapped}.
    """

    attention: int = 0
    rope: int = 0
    rms_norm: int = 0
    fused_loss: int = 0
    vision: int = 0
    linear_attention: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(count for part, count in vars(self).items() if part != "skipped")


def _name_of(model: torch.nn.Module) -> str:
    return " in ".join(dict.fromkeys(type(each).__name__ for each in (*hosts(model), model)))


def _without(part: str) -> str:
    return "attention=False" if part == "vision" else f"{part}=False"


def _refuse(model: torch.nn.Module, skipped: Mapping[str, str], strict: bool) -> None:
    if strict and skipped:
        what = "; ".join(f"{part}: {reason} (or pass {_without(part)})" for part, reason in skipped.items())
        raise ValueError(f"strict: expected to swap all that was asked for, but in {_name_of(model)} {what}")


def _warn(model: torch.nn.Module, skipped: Mapping[str, str]) -> None:
    for part, reason in skipped.items():
        is_left = "is not claimed" if part == "invariant" else "was not swapped"
        warnings.warn(
            f"apply_packing_ops: {part} of {_name_of(model)} {is_left}: {reason}"
            + ("" if "keep documents apart" in reason else f". Pass {_without(part)} to silence this"),
            stacklevel=3,
        )


# --- apply and revert ---


def apply_packing_ops(
    model: torch.nn.Module,
    *,
    rope: bool = True,
    attention: bool = True,
    linear_attention: bool = True,
    rms_norm: bool | None = None,
    fused_loss: bool = False,
    balance_loss: Literal["batch", "document", False] = False,
    fp32_cos_sin: bool = False,
    invariant: bool = False,
    strict: bool = False,
    sequence_group: "torch.distributed.ProcessGroup | torch.distributed.DeviceMesh | None" = None,
    sequence_scheme: str = "contiguous",
) -> Applied:
    """Swap a model's attention, RoPE and RMSNorm, and on request loss and balance loss, for those of packing_ops.

    Args:
        model: a model, also inside a PEFT or DDP wrapper. Other models do not change.
        rope: rotate q and k by one call of apply_rotary_qk, which computes in fp32 and rounds once. This includes
            attention of vision towers that takes cu_seqlens.
        attention: register ``"packing_ops"`` and set it as attn_implementation. Attention of vision towers that takes
            cu_seqlens (as in Qwen-VL) then runs once for all images. A model whose attention cannot be set keeps it,
            after a warning. A call of it with several documents in a row is an error from then on, unless layers with
            a state (Mamba, RWKV) keep them apart. So is one with another attn_implementation that is set later, unless
            transformers' masks keep them apart. With False such a call is no error: the model's attention must then
            keep documents apart.
        linear_attention: short convolutions, gated delta rules and scans of Mamba-2 in hybrid models (Qwen3-Next,
            Qwen3.5, OLMo-Hybrid, LFM2, Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2) run by causal_conv1d,
            gated_delta_rule and mamba2_scan, which get the documents of the rows. It needs attention, which finds them.
            Of Kimi Linear and bailing_hybrid only the convolutions are ours: the decay of each channel stays
            transformers', with documents as rows of batches.
            Layers that call another recurrence run as before, each document as a row of a batch.
        rms_norm: RMSNorm modules call torch.nn.functional.rms_norm, where a trial shows it at least as near to float64
            as the stock formula. In bf16 and fp16 the stock formula of Llama, Qwen and Mistral rounds twice: the
            normalised value, then its product with the weight. This one rounds once. Gemma and gpt-oss round once
            either way; Gemma's ``1 + weight`` stays in fp32. Dtypes stay those of stock. Under torch.compile the stock
            formula runs, which the compiler fuses. None, the default, leaves other modules without a word; True names
            them in ``skipped``.
        fused_loss: in training with labels the loss is chunked_cross_entropy of the hidden states. The logits are never
            made, and the output has None for them: do not use this where something reads them. TRL 1.16's trainers
            compute their losses themselves: it changes nothing there. Apply before others wrap forward. If lm_head is
            replaced later (resized, LoRA), the loss is the stock one again, after a warning.
        balance_loss: what a mixture of experts adds to its loss (``output_router_logits=True``, ``aux_loss``).
            "document": the mean over the documents of each document's loss. "batch": the loss of the tokens of all
            documents, as transformers has it of padded rows. Padding counts nowhere: neither the padding of a 2-D
            attention_mask, nor the end of a packed row, after the ``num_tokens`` of PackedMetadata.to_transformers. It
            needs attention, and no sequence_group.
        fp32_cos_sin: keep cos and sin in fp32 where the model casts them to its dtype.
        sequence_group: the ranks that share each row: a ProcessGroup, or a DeviceMesh of one dimension. The model then
            takes the batches of packing_ops.parallel.shard_packed, and attention runs over the group
            (varlen_attention_over). DDP and FSDP2 wrap the model as usual.
        sequence_scheme: the scheme that shard_packed was called with.
        invariant: the mode packing_ops.invariant() until it is reverted: a token's results have the same bits in any
            pack and micro-batch. check_invariance runs the model once to prove it. ``skipped`` names the layer for
            which it cannot be claimed, and what to set. On a GPU RMSNorm is swapped too, whose stock formula depends on
            the number of rows, and routers and adapters run at least 16 rows. Layers that are compiled afterwards, on
            a GPU and without max-autotune, keep it if check_invariance says so of them. On the CPU each product that
            adds terms up has 16 rows, and torch.compile of the model is an error.
        strict: if anything cannot be swapped, raise and change nothing. Otherwise the rest is swapped, and a warning
            names what was not.

    A later call adds to an earlier one: False does not revert what was swapped. Apply before torch.compile, which may
    miss a later change. Copies and pickles of the model keep what was applied; ``save_pretrained`` does not: apply
    again to what ``from_pretrained`` makes. ``print(info(model))`` shows what runs.

    RoPE that scales with the length (dynamic NTK, longrope) takes the length of each document, not of the longest. A
    model that is called with ``cu_seq_lens_q`` or only a numbered mask gets position_ids made from it (with
    attention=False by ``cu_seq_lens_q``, batch 1). So does a multimodal model whose attention is swapped, by
    ``cu_seq_lens_q``; position_ids ``[batch, seqlen]`` then start its documents as in text models, and with images each
    document gets the axes that the model's ``get_rope_index`` gives it in a separate call.

    Returns:
        Applied.

    Raises:
        ImportError: transformers is missing (``pip install 'transformers>=5.17'``).
        TypeError: model is not a torch.nn.Module, for example a class.
        ValueError: ``strict``, and something cannot be swapped. A sequence_group, and attention cannot be swapped, or
            rows cannot be spread over several ranks (images, RoPE that scales with the longest position of a row). In a
            forward with a sequence_group: a batch that shard_packed did not make; labels without num_items_in_batch,
            since the mean over the targets of one rank is not the mean over those of the row. balance_loss that is not
            "batch", "document" or False; in a forward, with a sequence_group, or where no attention had the rows of the
            router (a prefix tree).

    Example:
        >>> from transformers import AutoModelForCausalLM, Qwen3Config
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        >>> model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes))
        >>> apply_packing_ops(model)
        Applied(attention=2, rope=2, rms_norm=9, fused_loss=0, vision=0, linear_attention=0, skipped={})
        >>> revert_packing_ops(model)

    RoPE and RMSNorm need no list of families: the functions of a modelling module run next to ours once in a process,
    on small tensors on the CPU, and are swapped if both agree to the last rounding. Attention is swapped in every model
    that takes attn_implementation.
    """
    # Find what cannot be swapped, before anything changes
    check_model(model)
    found = hosts(model)
    reasons = {
        "attention": why_not_attention(model) if attention else None,
        "rope": rope_patch.why_not(model) if rope else None,
        "rms_norm": rms_norm_patch.why_not(model) if rms_norm else None,
        "fused_loss": fused_loss_patch.why_not(found) if fused_loss else None,
        "balance_loss": fused_loss_patch.why_not_balanced(model, balance_loss, attention) if balance_loss else None,
        "invariant": _why_not_invariant(model) if invariant else None,
    }
    if attention and reasons["attention"] is None:
        reasons["vision"] = vision_patch.why_not(model)
    skipped = {part: reason for part, reason in reasons.items() if reason}
    losses = [host for host in found if fused_loss and fused_loss_patch.refusal(host) is None]
    if sequence_group is not None:
        without = skipped.get("attention") or (None if attention else "attention=False")
        on_ranks = stateful.why_not_on_ranks(found, sequence_scheme, linear_attention)
        sequence_patch.check(model, without or on_ranks)
    _refuse(model, skipped, strict)
    # Attention: set_attn_implementation may still refuse
    if attention and "attention" not in skipped and (left := _set_attention(model)):
        if sequence_group is not None:
            sequence_patch.check(model, left)
        skipped.pop("vision", None)
        skipped["attention"] = left
        _refuse(model, skipped, strict)
    if "attention" in skipped and guard(model, register, f"keeps its attention: {skipped['attention']}"):
        skipped["attention"] += (
            ", and keep documents apart. With attention=False they do not"
            if all(map(has_states_alone, found))
            else "; rows of several documents are an error where no layer keeps them apart. With attention=False they "
            "are none: the model's own attention must then keep them apart"
        )
    # Vision towers and sequence groups, which need this attention
    attends = attention and "attention" not in skipped
    if balance_loss and not attends:
        skipped.setdefault("balance_loss", "it needs this attention, which finds the documents")
    if attends:
        vision_patch.apply_to_model(model)
    if sequence_group is not None:
        sequence_patch.apply_to_model(model, stateful.attentions(model), sequence_group, sequence_scheme)
    # RoPE, RMSNorm, loss
    if rope:
        rope_patch.apply_to_model(model, fp32_cos_sin)
    if linear_attention and attends:
        linear_attention_patch.apply_to_model(model)
    claimed = invariant and "invariant" not in skipped
    if claimed and any(p.is_cuda for p in model.parameters()):
        rms_norm = True  # the stock formula's mean has other bits in fewer than 16 rows
    if rms_norm is not False:
        rms_norm_patch.apply_to_model(model, any_order=claimed)
    for host in losses:
        fused_loss_patch.apply_to_model(host)
    if balance_loss and "balance_loss" not in skipped:
        fused_loss_patch.balance(model, balance_loss)
    # The mode, last: its proof runs the model as it is now
    if claimed and (reason := _apply_invariant(model, sequence_group)):
        skipped["invariant"] = reason
        if strict:
            revert_packing_ops(model)
        _refuse(model, skipped, strict)
    _warn(model, skipped)
    return _in_effect(model, skipped)


def _in_effect(model: torch.nn.Module, skipped: dict[str, str]) -> Applied:
    """Count what runs ours, by earlier calls too."""
    found = hosts(model)
    return Applied(
        attention=sum(name in NAMES for name in names_in(found)),
        rope=rope_patch.counts(model)[0],
        rms_norm=rms_norm_patch.counts(model)[0],
        fused_loss=sum(fused_loss_patch.is_fused(host) and not fused_loss_patch.since(host) for host in found),
        vision=vision_patch.count(model),
        linear_attention=linear_attention_patch.counts(model)[0],
        skipped=skipped,
    )


def revert_packing_ops(model: torch.nn.Module) -> None:
    """Revert apply_packing_ops in a model.

    Outputs are those of before to the bit. What enable_padding_free put into it is reverted too. The modelling module
    is reverted when no model needs the swap any more. What register added to transformers stays until
    revert_registration. A model to which nothing was applied does not change. Call backward first: through gradient
    checkpoints, which run layers with our attention again, a later one is a RuntimeError.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    check_model(model)
    befores = {host: kept.value for host in hosts(model) if (kept := host.__dict__.get(STATE)) is not None}
    if (held := vars(model).pop(HELD, None)) is not None:
        mode.release(held)
    for host, before in befores.items():
        _set_implementation(host, before)
    for module in model.modules():
        take_out(module, PACKAGE)
    for host in hosts(model):
        if host.config._attn_implementation in NAMES:  # as it was loaded
            guard(host, register)
    rope_patch.release(model)
    linear_attention_patch.release(model)


def check_model(model: object) -> None:
    if isinstance(model, type):
        raise TypeError(
            f"model: expected a torch.nn.Module, got the class {model.__name__}: pass each model made of it"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}: pass the model itself")


# --- attn_implementation ---

IMPLEMENTATION = "packing_ops"
PACKAGE = "packing_ops.integrations"
STATE = "_packing_ops_attention"
_hosts: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()  # those that have or had it


def hosts(model: torch.nn.Module) -> list[PreTrainedModel]:
    """Return the transformers models in it, without those inside of them."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [host for child in model.children() for host in hosts(child)]


def names_in(hosts: list[PreTrainedModel]) -> list[str]:
    """Return the attn_implementation of each of these modules."""
    return [
        getattr(module, "config", host.config)._attn_implementation
        for host in hosts
        for module in stateful.attentions(host)
    ]


def why_not_attention(model: torch.nn.Module) -> str | None:
    """Return why our attention cannot be set; None if only set_attn_implementation can say."""
    found = hosts(model)
    if not found:
        return "there is no transformers model in it to set attn_implementation on"
    for cls in {type(module) for host in found for module in host.modules()}:
        if options := sorted(unknown_options(cls)):
            return f"{cls.__name__} has attention with {', '.join(options)}"
    # Ours can run in every layer that carries a state, or in attention.
    served = any(
        stateful.attentions(host)
        or (has_states_alone(host) and {*linear_attention_patch.layers_in(host).values()} == {None})
        for host in found
    )
    if served and not any(in_tables(type(module)) for module in models_in(model)):
        return None
    return f"{type(found[0]).__name__} " + (
        "has no attention that attn_implementation reaches: its layers carry a state"
        if all(map(has_states_alone, found))
        else "has an attention of its own, which no attn_implementation of ours reaches"
    )


def has_states_alone(host: PreTrainedModel) -> bool:
    """Return whether it has no attention, and layers that carry a state."""
    attends = stateful.attentions(host) or any(
        code_has(type(module), r"softmax\(|scaled_dot_product_attention\(") for module in host.modules()
    )
    return not attends and stateful.StateKind.RECURRENT in stateful.layers_of(host).values()


def _set_attention(model: torch.nn.Module) -> str | None:
    """Set our attention in all hosts, or in no host; then the reason."""
    found = hosts(model)
    register()
    shared = _befores()
    before, is_set = {host: implementations_of(host.config, shared) for host in found}, False
    current = {host: implementations_of(host.config, {}) for host in found}
    guards = {module: vars(module).get(GUARD) for host in found for module in models_in(host)}
    try:
        for host in found:
            _set_implementation(host, IMPLEMENTATION)
        refused = [type(host).__name__ for host in found if host.config._attn_implementation != IMPLEMENTATION]
        is_set = not refused
    finally:
        if not is_set:
            for host, implementations in current.items():
                _set_implementation(host, implementations)
            for module, kept in guards.items():
                vars(module).pop(GUARD, None)
                vars(module).update({GUARD: kept} if kept else {})
    if not is_set:
        return f"{', '.join(refused)} cannot change its attn_implementation"
    for host, implementations in before.items():
        host.__dict__.setdefault(STATE, Kept(register, implementations))
        _hosts.add(host)
        guard(host, register)
    return None


def _set_implementation(host: PreTrainedModel, implementation: str | dict[str, Any]) -> None:
    """Set attn_implementation, also in configs that no model holds: layers which PEFT has copied (layer_replication)
    have copies.
    """
    host.set_attn_implementation(implementation)
    known = {
        id(part)
        for config in (model.config for model in models_in(host))
        for part in (config, *(getattr(config, key, None) for key in config.sub_configs))
    }
    for model in models_in(host):  # the inner ones last
        for module in stateful.attentions(model):
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_attn_implementation") and id(config) not in known:
                config._attn_implementation = model.config._attn_implementation


def implementations_of(config: Any, shared: Mapping[int, Any]) -> dict[str, Any]:
    """Return what set_attn_implementation takes to restore a model and its sub-models. shared: what it takes for
    configs that have ours by now, see _befores.
    """
    set_now = config._attn_implementation
    found = {"": shared.get(id(config), set_now) if set_now in NAMES else set_now}
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if sub_config is not None and sub_config._attn_implementation is not None:  # None: some audio parts
            nested = implementations_of(sub_config, shared)
            found[key] = nested if len(nested) > 1 else nested[""]
    return found


def _befores() -> dict[int, Any]:
    """Return {id of a config: its implementation before ours} of the models to which ours is applied: two models may
    be made of one config.
    """
    found: dict[int, Any] = {}
    for host in _hosts:
        parts = [(host.config, kept.value)] if (kept := vars(host).get(STATE)) is not None else []
        for config, before in parts:  # grows
            each = before if isinstance(before, dict) else {"": before}
            found[id(config)] = each[""]
            parts += [(getattr(config, key), each[key]) for key in each if key]
    return found


# --- the mode of packing_ops.invariant() for a model, and its proof ---

HELD = "_packing_ops_invariant"


def _why_not_invariant(model: torch.nn.Module) -> str | None:
    """Return why the mode cannot be claimed, whatever the bits are."""
    found = refusals(model, training=True)
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return next((f"{name or type(model).__name__}: {reason}{more}" for name, reason in found.items()), None)


def _apply_invariant(model: torch.nn.Module, sequence_group: object) -> str | None:
    """Switch the mode on, and return None or a sentence. It is off if layers differ, on if only the user can run the
    model.
    """
    held = vars(model).setdefault(HELD, mode.ModeHandle())
    for module in model.modules():
        on_cpu = any(t.dim() > 1 and t.is_cpu for t in module.parameters(recurse=False))
        if on_cpu and not isinstance(module, torch.nn.Embedding):
            put_around(module, "forward", _by_blocks)
        elif rms_norm_patch.is_gated(module) or few_rows.is_narrow(module):
            put_around(module, "forward", _in_enough_rows)
    by_hand, held.unclaimed = "call packing_ops.check_invariance(model, run)", ""
    if sequence_group is not None:
        held.unclaimed = f"rows lie on several ranks: {by_hand} with rows of shard_packed"
    elif any(parameter.is_meta for parameter in model.parameters()):
        held.unclaimed = f"its parameters are on the meta device: {by_hand} when they are loaded"
    else:
        try:
            found = check_invariance(model, gradients=False)
        except Exception as error:  # of any model that is not called with text
            failed = f"{type(error).__name__}: {str(error)[:200]}"
            held.unclaimed = f"it could not be run on random text ({failed}): {by_hand}"
        else:
            if not found.packs:
                mode.release(vars(model).pop(HELD))
                for module in model.modules():
                    for ours in (_by_blocks, _in_enough_rows):
                        take_out_function(module, ours)
                return found.why_not()[0]
            held.unclaimed = linear_attention_patch.why_by_place(model) or ""
    return held.unclaimed or None


def _by_blocks(module: torch.nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        _refuse_graph()
    with mode.ProductsByBlocks():
        return before(*args, **kwargs) if before is not None else type(module).forward(module, *args, **kwargs)


def _in_enough_rows(module: torch.nn.Module, before: Any, *args: Any, **kwargs: Any) -> Any:
    return few_rows.in_enough_rows(module, before, *args, **kwargs)


@torch.compiler.assume_constant_result  # called by the compiler: what a traced function raises makes it go on in parts
def _refuse_graph() -> None:
    raise NotImplementedError(
        "apply_packing_ops(invariant=True): torch.compile is not served on the CPU, where the sums that it makes "
        "depend on the number of rows"
    )
