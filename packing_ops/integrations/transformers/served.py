"""Which calls of attention varlen_attention serves: the reason for those that run by SDPA, and options that are refused."""

import functools
import inspect
import re
from collections.abc import Callable

import torch

from packing_ops._arguments import dtype_name
from packing_ops.integrations.transformers.imports import CACHE, PAGED

# Options that SDPA serves.
SDPA = frozenset(("output_attentions", "position_bias", *([PAGED] if PAGED else [])))
# Keywords that reach attention and do not change its result, collected from the models of transformers: those of
# TransformersKwargs, generate, trainers and outer models, and deterministic, which our backward always is.
HARMLESS = frozenset({
    CACHE, "cache_position", "deterministic", "encoder_attention_mask", "encoder_hidden_states", "ignore_index",
    "input_ids", "inputs_embeds", "labels", "logits_to_keep", "margin", "max_length_k", "max_length_q",
    "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "packed_seq_lengths", "past_key_values", "return_dict", "seq_idx", "shift_labels", "token_type_ids",
    "use_cache",
})  # fmt: skip


def why_no_documents(query, key, mask, causal, window):
    """Why the documents of a call without a MaskPattern cannot be found, or an empty string."""
    if mask is not None and mask.dim() != 2:
        why = "decoding with a KV cache" if query.shape[2] != key.shape[2] else "a mask that is neither causal nor full"
        return f"{why} (mask of {mask.dim()} dimensions)"
    if query.shape[2] != key.shape[2]:
        return "decoding with a KV cache or attention to another sequence"
    if not causal and window != (-1, -1):
        return "a sliding window without causality and without its mask"
    return ""


def option_for_sdpa(kwargs):
    """Why SDPA must serve these options, or an empty string."""
    given = sorted(
        name for name, option in kwargs.items() if name not in HARMLESS and option is not None and option is not False
    )
    for name in given:
        if name not in SDPA:
            raise NotImplementedError(
                f"{name}: expected no option that packing_ops attention does not know, got {type(kwargs[name]).__name__}; "
                "leave it out of the model's call or load the model with another attn_implementation"
            )
    return f"{given[0]} is not supported" if given else ""


_CALL = re.compile(r"\battention_interface\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")


@functools.cache
def unknown_options(cls: type, attention: Callable) -> frozenset[str]:
    """Options that modules of this class pass to attention by name and ``attention`` refuses."""
    try:
        calls = _CALL.findall(inspect.getsource(cls.forward))
    except (OSError, TypeError):  # no source
        return frozenset()
    passed = re.findall(r"^\s*(\w+)=", "\n".join(calls), re.M)
    known = {"head_mask"}  # None unless somebody asks for one, which is refused then
    return frozenset(passed) - HARMLESS - SDPA - known - set(inspect.signature(attention).parameters)


def why_not(query, key, value, dropout):
    """Why varlen_attention cannot serve this call, or an empty string."""
    if dropout:
        return f"dropout {dropout} in attention"
    cuda = query.is_cuda
    if not (cuda or query.is_cpu):
        return f"no kernel for {query.device.type}"
    if cuda and value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {dtype_name(value.dtype)}"
    for head_dim in (query.shape[-1], value.shape[-1]):
        if head_dim > 512:
            return f"head_dim {head_dim}, expected at most 512"
        if cuda and head_dim % 8 and value.dtype != torch.float32:
            return f"head_dim {head_dim} in {dtype_name(value.dtype)}, expected a multiple of 8"
    return ""
