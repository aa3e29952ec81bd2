"""info(model): what runs in a model, and how documents are found, line by line."""

from collections import Counter
from typing import Any

import torch
import transformers

from packing_ops.integrations._patching import PACKS_ROWS
from packing_ops.integrations.transformers import fused_loss as fused_loss_patch
from packing_ops.integrations.transformers import rms_norm as rms_norm_patch
from packing_ops.integrations.transformers import rope as rope_patch
from packing_ops.integrations.transformers import versions
from packing_ops.integrations.transformers.apply import (
    HELD,
    check_model,
    has_states_alone,
    hosts,
    names_in,
    why_not_attention,
)
from packing_ops.integrations.transformers.call import GUARD, NAMES, LastForward, last_forward, mixes_tokens
from packing_ops.integrations.transformers.states import linear_attention as linear_attention_patch


def info(model: torch.nn.Module) -> str:
    """Say whether packing_ops runs in a model: attention, RoPE, RMSNorm, loss, the invariant mode, how documents are
    found.

    Args:
        model: a model, or a wrapper around one.

    Returns:
        A line for each of these. After a forward, a line says how many rows and documents it had, and which argument
        gave them. If attention ran by SDPA in this process, a last line has the reasons.

    Example:
        >>> from transformers import AutoModelForCausalLM, Qwen3Config
        >>> from packing_ops.integrations.transformers import apply_packing_ops
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
        >>> model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes))
        >>> applied = apply_packing_ops(model)
        >>> print(info(model))
        Qwen3ForCausalLM, transformers ...
        attention: packing_ops in 2 modules
        rope: packing_ops in 2 modules
        rms_norm: packing_ops in 9 modules
        loss: stock; apply_packing_ops(model, fused_loss=True) swaps it
        invariant: off; apply_packing_ops(model, invariant=True) turns it on
        documents: cu_seq_lens_q, else position_ids that restart and a 2-D attention_mask (0 is padding, above 1 the
          number of a document)...

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    check_model(model)
    found = hosts(model)
    name = type(found[0] if found else model).__name__
    lines = [f"{name}, transformers {transformers.__version__}", f"attention: {_attention(model, found)}"]
    lines += [f"rope: {_swapped(rope_patch, model)}", f"rms_norm: {_swapped(rms_norm_patch, model)}"]
    if layers := linear_attention_patch.layers_in(model):
        left = linear_attention_patch.stock_rules(map(type, layers))
        lines.append(f"linear_attention: {_swapped(linear_attention_patch, model)}{left}")
    lines += [f"loss: {_loss(found)}", f"invariant: {_mode(model)}", f"documents: {_documents(found)}"]
    if any(
        PACKS_ROWS in vars(model)
        for host in found
        if host.config._attn_implementation in NAMES
        for model in (host, host.base_model)
    ):
        lines.append("padding: none in a trainer's batches, by enable_padding_free(trainer)")
    # PEFT and a reward model without padding only call the model inside of the host.
    lines += [_last_forward(last) for each in found if (last := last_forward(each) or last_forward(each.base_model))]
    return "\n".join([*lines, *versions.sdpa_reasons()])


def _attention(model: Any, hosts: list[Any]) -> str:
    found = Counter(names_in(hosts))
    text = ", ".join(f"{implementation} in {_counted(count, 'module')}" for implementation, count in found.items())
    if found and found.keys() <= NAMES:
        return text
    reason = why_not_attention(model)
    if not text:
        return "none: its layers carry a state" if hosts and all(map(has_states_alone, hosts)) else str(reason)
    return f"{text}, {reason}" if reason else f"{text}; apply_packing_ops(model) swaps it"


def _swapped(patch: Any, model: Any) -> str:
    ours, every = patch.counts(model)
    if not every:
        return f"stock, {patch.why_not(model)}"
    parts = [f"packing_ops in {_counted(ours, 'module')}"] if ours else []
    if ours < every:
        parts.append(f"stock in {_counted(every - ours, 'module')}; apply_packing_ops(model) swaps it")
    return ", ".join(parts)


def _loss(hosts: list[Any]) -> str:
    changed = [fused_loss_patch.since(host) for host in hosts if fused_loss_patch.is_fused(host)]
    if None in changed:
        return next(fused_loss_patch.runs_in(host) for host in hosts if fused_loss_patch.is_fused(host))
    if changed:
        return f"stock: {changed[0]}"
    reasons = [fused_loss_patch.refusal(host) for host in hosts]
    if None in reasons:
        return "stock; apply_packing_ops(model, fused_loss=True) swaps it"
    return f"stock: {reasons[0]}" if reasons else "stock"


def _mode(model: torch.nn.Module) -> str:
    for held in (vars(module)[HELD] for module in model.modules() if HELD in vars(module)):
        return f"on, but not claimed: {held.unclaimed}" if held.unclaimed else "on, until revert_packing_ops(model)"
    return "off; apply_packing_ops(model, invariant=True) turns it on"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _last_forward(last: LastForward) -> str:
    documents = (
        "one document in each, as no argument said otherwise"
        if last.found_by == "rows"
        else f"{_counted(last.documents, 'document')}, found by {last.found_by}"
    )
    return f"last forward: {_counted(last.rows, 'row')}, {documents}"


def _documents(hosts: list[Any]) -> str:
    alone = bool(hosts) and all(map(has_states_alone, hosts))  # they keep documents apart beside another name, too
    ours = [host for host in hosts if host.config._attn_implementation in NAMES or (alone and GUARD in vars(host))]
    if any(GUARD in vars(host) for host in hosts if host not in ours):
        return "one in each row; several are an error where no layer keeps them apart"
    if not ours:
        return (
            "one in each row; apply_packing_ops(model) keeps several apart"
            if alone
            else "found by transformers, for the attention above"
        )
    if any(mixes_tokens(host.config) for host in ours):
        return "one in each row, as tokens mix beside attention; several are an error"
    return (
        "cu_seq_lens_q, else position_ids that restart and a 2-D attention_mask (0 is padding, above 1 the number of a "
        "document)"
    )
