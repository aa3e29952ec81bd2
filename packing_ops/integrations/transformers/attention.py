"""``attn_implementation="packing_ops"``: varlen attention behind transformers' attention and mask interfaces."""

import functools
import inspect
import re

import torch

from packing_ops import _ops
from packing_ops._arguments import dtype_name
from packing_ops.attention import varlen_attention
from packing_ops.integrations.transformers import _call, _preparation, fallback, masks
from packing_ops.integrations.transformers._host import AttentionInterface, AttentionMaskInterface
from packing_ops.integrations.transformers.layout import find_layout

# Options that SDPA serves.
_SDPA = frozenset(("cache", "output_attentions", "position_bias"))
# Keywords that reach attention and do not change its result, collected from the models of transformers: those of
# TransformersKwargs, generate, trainers and outer models, and deterministic, which our backward always is.
_HARMLESS = frozenset({
    "cache_position", "deterministic", "encoder_attention_mask", "encoder_hidden_states", "ignore_index",
    "input_ids", "inputs_embeds", "labels", "logits_to_keep", "max_length_k", "max_length_q",
    "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "packed_seq_lengths", "past_key_values", "return_dict", "seq_idx", "shift_labels", "token_type_ids",
    "use_cache",
})  # fmt: skip


def register(name: str = "packing_ops") -> None:
    """Makes ``attn_implementation=name`` known to transformers, with ``model.set_attn_implementation(name)``.

    Documents of a batch are found in this order, once per forward, and shared by all layers:
    ``cu_seq_lens_q`` / ``cu_seq_lens_k`` passed to the model (no host synchronisation); the 2-D attention_mask (left,
    right, holes) and position_ids, which start a document in each row and where they stop growing (one
    synchronisation); else each row is one. Causal and full attention, sliding windows, softcap, sinks, grouped heads
    and scaling follow the model. Everything else runs by SDPA with a mask of the same meaning, after one warning that
    says why: decoding with a KV cache, 4-D masks (images that see ahead, models that read their masks), dropout,
    head_dim over 256. A second call changes nothing.

    What this adds to transformers stays until the process ends: the name in its two tables, and wrappers around
    PreTrainedModel.__call__, which remembers position_ids for models that pass them to no mask, and around the
    preparation of masks. Both leave models with another attn_implementation alone. A process that unpickles a model
    with this attention must call register first, unless apply_packing_ops set it.

    Args:
        name: of the implementation; without "flash", "sdpa" and "flex", which transformers treats on their own.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> register()
        >>> config = LlamaConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="packing_ops")
        >>> model(torch.arange(5)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1]])).logits.shape  # two documents
        torch.Size([1, 5, 16])

    Raises:
        ImportError: transformers is not installed, or too old to have the interfaces.
        ValueError: a name that transformers would treat as its own. Then, in the forward: cu_seqlens that do not end
            at the batch's tokens, an attention_mask with padding beside them, position_ids that never restart beside
            cu_seqlens of several documents or that restart inside of one (0, 1 after more than 1), documents of the
            keys that are not those of the queries. On CUDA these are found in a later call, or in the same one under
            ``PACKING_OPS_CHECK=1``. At the end of a forward: several documents of which no attention was told.
            At the start of one: past_key_values that were filled with several documents of a row. A compiled graph
            asserts these two on the device: RuntimeError on the CPU, a device-side assertion on CUDA.
        NotImplementedError: in the forward, an option of attention that is not known (``block_indices``, say).
    """
    taken = [word for word in ("flash", "sdpa", "flex", "eager", "paged", "/") if word in name]
    if taken or not name:
        raise ValueError(f"name: expected one without {taken or 'being empty'}, got {name!r}")
    _preparation.carry()
    _call.NAMES.add(name)
    AttentionInterface.register(name, packing_ops_attention)
    AttentionMaskInterface.register(name, _preparation.mask_function())
    if not _call.watch_calls():
        fallback.tell_once("this transformers calls models in another way, what a call alone tells is not seen")


def packing_ops_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    position_ids=None,
    **kwargs,
):
    """query ``[batch, num_heads, seqlen, head_dim]`` -> (``[batch, seqlen, num_heads, head_dim]``, None)."""
    batch, _, seqlen, _ = query.shape
    pattern = attention_mask if isinstance(attention_mask, masks.MaskPattern) else None
    cu_seqlens = (cu_seq_lens_q, cu_seq_lens_k)
    reason = "" if _HARMLESS.issuperset(kwargs) else _option_for_sdpa(kwargs)
    if pattern is not None:
        causal, window = pattern.causal, pattern.window
        if not seqlen == key.shape[2] == pattern.length:
            lengths = f"{seqlen} queries and {key.shape[2]} keys"
            raise ValueError(f"key: expected the {pattern.length} slots that the mask was made for, got {lengths}")
        layout = pattern.layout(query, cu_seqlens, position_ids).on(query.device)
        reason = reason or _why_not(query, key, value, dropout)
    else:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        window = (-1, -1) if sliding_window is None or sliding_window > key.shape[2] else (sliding_window - 1, 0)
        no_layout = _why_not_without_pattern(query, key, attention_mask, causal, window)
        layout = None
        if no_layout and (cu_seq_lens_q is not None or cu_seq_lens_k is not None) and kwargs.get("cache") is None:
            raise ValueError(f"cu_seq_lens_q: expected a row of its own documents, got {no_layout}")
        reason = reason or no_layout or _why_not(query, key, value, dropout)
        if not no_layout:
            masks.take(*cu_seqlens, position_ids)
            layer = getattr(module, "layer_idx", None)
            padding = attention_mask if attention_mask is None else _call.numbered(attention_mask)
            layout = find_layout(query, cu_seqlens, padding, position_ids, layer).on(query.device)
    if not reason and layout.holes and window != (-1, -1):
        reason = "a sliding window over padding that may lie inside a row"
    if reason:
        fallback.warn_once(reason)
        mask = attention_mask if layout is None else fallback.mask_of(layout, batch, seqlen, causal, window)
        return fallback.attend(
            *(module, query, key, value, mask),
            dropout=dropout,
            scaling=scaling,
            softcap=softcap,
            sinks=s_aux,
            causal=causal,
            options=kwargs,
        )
    return _varlen(query, key, value, layout, causal, window, scaling, softcap, s_aux), None


def _varlen(query, key, value, layout, causal, window, scaling, softcap, sinks):
    """Runs in every layer: keep the host's time below that of a small kernel."""
    query, key, value = _one_dtype(query, key, value)
    batch, _, seqlen, _ = query.shape
    one_row = batch == 1 and layout.indices is None
    if one_row:  # heads first, without views, each of which autograd would record
        rows = query, key, value
    else:
        rows = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if layout.indices is None:
            rows = [tensor.flatten(0, 1) for tensor in rows]
        else:
            rows = _ops.gather_rows_many(rows, layout.indices, layout.indices.shape[0])
    out = varlen_attention(
        *rows,
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        causal=causal,
        softmax_scale=scaling,
        window_size=window,
        softcap=softcap or 0.0,
        sinks=sinks,
        layout="bhsd" if one_row else None,
    )
    if one_row:
        return out
    if layout.indices is None:
        return out.unflatten(0, (batch, seqlen))
    return _ops.scatter_rows(out, layout.indices, batch, seqlen)


def _one_dtype(query, key, value):
    """Autocast's dtype, as it would choose for SDPA; else that of value, which the output projection expects."""
    dtype, device = value.dtype, "cuda" if query.is_cuda else "cpu"
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if query.dtype == key.dtype == value.dtype == dtype:  # no call of .to, which costs the host half a microsecond
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _why_not_without_pattern(query, key, mask, causal, window):
    if mask is not None and mask.dim() != 2:
        why = "decoding with a KV cache" if query.shape[2] != key.shape[2] else "a mask that is neither causal nor full"
        return f"{why} (mask of {mask.dim()} dimensions)"
    if query.shape[2] != key.shape[2]:
        return "decoding with a KV cache or attention to another sequence"
    if not causal and window != (-1, -1):
        return "a sliding window without causality and without its mask"
    return ""


def _option_for_sdpa(kwargs):
    """Why SDPA must serve these options, or an empty string."""
    given = sorted(
        name for name, option in kwargs.items() if name not in _HARMLESS and option is not None and option is not False
    )
    for name in given:
        if name not in _SDPA:
            raise NotImplementedError(
                f"{name}: expected no option that packing_ops attention does not know, got {type(kwargs[name]).__name__}; "
                "leave it out of the model's call or load the model with another attn_implementation"
            )
    return f"{given[0]} is not supported" if given else ""


_CALL = re.compile(r"\battention_interface\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")


@functools.cache
def unknown_options(cls: type) -> frozenset[str]:
    """Options that modules of this class pass to attention by name and packing_ops_attention refuses."""
    try:
        calls = _CALL.findall(inspect.getsource(cls.forward))
    except (OSError, TypeError):  # no source
        return frozenset()
    passed = re.findall(r"^\s*(\w+)=", "\n".join(calls), re.M)
    known = {"head_mask"}  # None unless somebody asks for one, which is refused then
    return frozenset(passed) - _HARMLESS - _SDPA - known - set(inspect.signature(packing_ops_attention).parameters)


def _why_not(query, key, value, dropout):
    """Why varlen_attention cannot serve this call, or an empty string."""
    if dropout:
        return f"dropout {dropout} in attention"
    head_dim, cuda = query.shape[-1], query.is_cuda
    if not (cuda or query.is_cpu):
        return f"no kernel for {query.device.type}"
    if value.shape[-1] != head_dim:
        return f"head_dim {head_dim} of query and key, {value.shape[-1]} of value"
    if head_dim > 256:
        return f"head_dim {head_dim}, expected at most 256"
    if cuda and value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {dtype_name(value.dtype)}"
    if cuda and head_dim % 8 and value.dtype != torch.float32:
        return f"head_dim {head_dim} in {dtype_name(value.dtype)}, expected a multiple of 8"
    return ""
