"""info: what runs in a transformers model, in a few lines."""

from collections import Counter
from typing import Any

import torch
import transformers

from packing_ops.integrations.transformers import (
    attn_implementation,
    fallback,
    fused_loss,
    model_call,
    rms_norm,
    rope,
    vision_rope,
)


def info(model: torch.nn.Module) -> str:
    """Whether packing_ops runs in a model: attention, RoPE, RMSNorm, loss, and how documents are found.

    Args:
        model: an instance, or a wrapper around one.

    Returns:
        One line for each; a last line has the reasons why attention ran by SDPA in this process, if it did.

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
        rms_norm: stock in 9 modules, swapped by apply_packing_ops(model, rms_norm=True)
        loss: stock, swapped by apply_packing_ops(model, fused_loss=True)
        documents: cu_seq_lens_q, else position_ids that restart and a 2-D attention_mask (0 is padding, above 1 the
          number of a document)...

    Raises:
        TypeError: model is no torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    hosts = attn_implementation.hosts(model)
    name = type(hosts[0] if hosts else model).__name__
    lines = [f"{name}, transformers {transformers.__version__}"]
    lines += [f"attention: {_attention(model, hosts)}", f"rope: {_rope(model)}", f"rms_norm: {_norm(model)}"]
    lines.append(f"loss: {_loss(hosts)}")
    lines += [f"documents: {_documents(hosts)}", *fallback.sdpa_reasons()]
    return "\n".join(lines)


def _attention(model: Any, hosts: list[Any]) -> str:
    found: Counter[str] = Counter()
    for host in hosts:
        for module in attn_implementation.attentions(host):
            found[getattr(module, "config", host.config)._attn_implementation] += 1
    text = ", ".join(f"{implementation} in {_modules(count)}" for implementation, count in found.items())
    if found and found.keys() <= model_call.NAMES:
        return text
    reason = attn_implementation.why_not(model)
    return (f"{text}, " if text else "") + (reason or "swapped by apply_packing_ops(model)")


def _rope(model: Any) -> str:
    found, towers = rope.owners(model), vision_rope.attentions(model)
    if not found and not towers:
        return f"stock, {rope.why_not(model)}"
    ours = rope.count([each for each in found if rope.rotates(each.rotary)]) + sum(map(vision_rope.rotates, towers))
    return _parts(ours, rope.count(found) + len(towers), "apply_packing_ops(model)")


def _norm(model: Any) -> str:
    every = len(rms_norm.norms(model))
    if not every:
        return f"stock, {rms_norm.why_not(model)}"
    return _parts(len(rms_norm.fused(model)), every, "apply_packing_ops(model, rms_norm=True)")


def _loss(hosts: list[Any]) -> str:
    changed = [fused_loss.since(host) for host in hosts if fused_loss.is_fused(host)]
    if None in changed:
        return "packing_ops, from hidden states, in training with labels"
    if changed:
        return f"stock: {changed[0]}"
    reasons = [fused_loss.refusal(host) for host in hosts]
    if None in reasons:
        return "stock, swapped by apply_packing_ops(model, fused_loss=True)"
    return f"stock: {reasons[0]}" if reasons else "stock"


def _parts(ours: int, every: int, swap: str) -> str:
    parts = [f"packing_ops in {_modules(ours)}"] if ours else []
    if ours < every:
        parts.append(f"stock in {_modules(every - ours)}, swapped by {swap}")
    return ", ".join(parts)


def _modules(count: int) -> str:
    return f"{count} module{'s' * (count != 1)}"


def _documents(hosts: list[Any]) -> str:
    ours = [host for host in hosts if host.config._attn_implementation in model_call.NAMES]
    if any(model_call.guard_of(host) is not None for host in hosts):
        return "one in each row; several are an error where no layer keeps them apart"
    if not ours:
        return "found by transformers, for the attention above"
    if any(model_call.mixes_tokens(host.config) for host in ours):
        return "one in each row, as tokens mix beside attention; several are an error"
    return (
        "cu_seq_lens_q, else position_ids that restart and a 2-D attention_mask (0 is padding, above 1 the number of a "
        "document)"
    )
