"""``attn_implementation="packing_ops"``: varlen attention behind transformers' attention and mask interfaces."""

import torch

from packing_ops import _ops
from packing_ops.attention import varlen_attention
from packing_ops.integrations._attention_options import AttentionOptions
from packing_ops.integrations.transformers import (
    fallback,
    mask_preparation,
    masks,
    model_call,
    own_attention,
    sequence_group,
    served,
    stateful_layers,
)
from packing_ops.integrations.transformers.documents import find_documents
from packing_ops.integrations.transformers.gathered_rows import documents_of_pattern, refuse_dropped_mask
from packing_ops.integrations.transformers.imports import PAGED, AttentionInterface, AttentionMaskInterface


def register(name: str = "packing_ops") -> None:
    """Makes ``attn_implementation=name`` known to transformers, with ``model.set_attn_implementation(name)``.

    Documents of a batch are found in this order, once per forward, and shared by all layers: ``cu_seq_lens_q`` /
    ``cu_seq_lens_k`` passed to the model (no host synchronisation); the 2-D attention_mask (left, right, holes; numbers
    above 1 start a document where they change) and position_ids, which start one in each row and where they stop growing
    (one synchronisation); else each row is one. Causal and full attention, sliding windows, softcap, sinks, grouped heads
    and scaling follow the model. Everything else runs by SDPA with a mask of the same meaning, after one warning that says
    why: a KV cache, 4-D masks (models that read theirs), dropout, head_dim over 512. A second call changes nothing.

    What this adds to transformers stays until unregister(name): the name in its two tables, and wrappers around
    PreTrainedModel.__call__, which remembers position_ids for models that pass them to no mask, and around the preparation
    of masks; in models, the forward of layers that carry a state. Both wrappers leave models with another
    attn_implementation alone. A process that unpickles a model with this attention must call register first, unless
    apply_packing_ops set it.

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
        ValueError: a name that transformers would treat as its own. Then, in the forward: several documents in a row for a
            layer with a state that reads tokens ahead or calls attention inside; cu_seqlens that do not end at the batch's
            tokens, an attention_mask with padding or other documents beside them, position_ids that never restart beside
            cu_seqlens of several documents or that restart inside of one (0, 1 after more than 1), documents of the keys
            that are not those of the queries. On CUDA these are found in a later call, or in the same one under
            ``PACKING_OPS_CHECK=1``. At the end of a forward: several documents that no attention knows of. At the start of
            one: past_key_values (5.24: cache) that were filled with several documents of a row. A compiled graph asserts
            these two on the device: RuntimeError on the CPU, a device-side assertion on CUDA.
        NotImplementedError: in the forward, an option of attention that is not known (``block_indices``, say).
    """
    taken = [word for word in ("flash", "sdpa", "flex", "eager", "paged", "/") if word in name]
    if taken or not name:
        raise ValueError(f"name: expected one without {taken or 'being empty'}, got {name!r}")
    mask_preparation.carry()
    model_call.NAMES.add(name)
    if not own_attention.PATCH.pinned:
        own_attention.PATCH.apply()
    AttentionInterface.register(name, packing_ops_attention)
    AttentionMaskInterface.register(name, mask_preparation.mask_function())
    if not model_call.watch_calls():
        fallback.log_once("this transformers calls models in another way, what only a call says is not known")


def unregister(name: str = "packing_ops") -> None:
    """Undo register(name), and with the last name what it wrapped in transformers.

    Models with this attn_implementation need another one before they are called again. A second call does nothing.

    Example:
        >>> register("my_attention")
        >>> unregister("my_attention")
    """
    if name in model_call.NAMES:
        model_call.NAMES.remove(name)
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(name, None)
    if not model_call.NAMES:
        mask_preparation.PATCH.revert()
        own_attention.PATCH.revert()
        model_call.unwatch_calls()
        stateful_layers.revert()


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
    cu_seqlens, sequence = (cu_seq_lens_q, cu_seq_lens_k), sequence_group.of(module)
    reason, visible_end = "" if served.HARMLESS.issuperset(kwargs) else served.option_for_sdpa(kwargs), None
    pattern = attention_mask if isinstance(attention_mask, masks.MaskPattern) else None
    if pattern is not None:
        causal, window = pattern.causal, pattern.window
    else:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        sees_all = sliding_window is None or (sequence is None and sliding_window > key.shape[2])
        window = (-1, -1) if sees_all else (sliding_window - 1, 0)
    options = AttentionOptions(causal, scaling, window, softcap, s_aux)
    if sequence is not None:
        reason = reason or served.why_not(query, key, value, dropout)
        if pattern is not None and pattern.blocks is not None:
            reason = reason or "a mask with blocks that see ahead"
        mask = None if pattern is not None else attention_mask
        return sequence.attend(_one_dtype(query, key, value), mask, cu_seq_lens_q, options, reason), None
    if pattern is not None:
        documents = documents_of_pattern(module, pattern, query, key, cu_seqlens, position_ids)
        visible_end, none = (None, "the last queries of a row") if pattern.last else pattern.visible_end(documents)
        reason = reason or none
    else:
        if attention_mask is None and position_ids is not None:
            refuse_dropped_mask(module, query, cu_seqlens, position_ids, causal, window)
        none = served.why_no_documents(query, key, attention_mask, causal, window)
        told = cu_seq_lens_q is not None or cu_seq_lens_k is not None
        masked = model_call.has_masked(cu_seq_lens_q) or masks.has_documents_of(cu_seq_lens_q, attention_mask)
        if none and told and kwargs.get(PAGED) is None and not masked:
            raise ValueError(f"cu_seq_lens_q: expected a row of its own documents, got {none}")
        documents = None if none else _without_pattern(module, query, attention_mask, cu_seqlens, position_ids)
        reason = reason or none
    reason = reason or served.why_not(query, key, value, dropout)
    if not reason and documents.holes and window != (-1, -1):
        reason = "a sliding window over padding that may lie inside a row"
    if not reason:
        return _varlen((query, key, value), documents, causal, scaling, window, softcap, s_aux, visible_end), None
    fallback.warn_once(reason)
    mask = attention_mask if documents is None else fallback.mask_of(documents, query, options, attention_mask)
    return fallback.attend(module, query, key, value, mask, options, dropout, kwargs)


def _without_pattern(module, query, mask, cu_seqlens, position_ids):
    masks.mark_used(*cu_seqlens, position_ids)
    padding = mask if mask is None else model_call.numbered(mask)
    return find_documents(query, cu_seqlens, padding, position_ids, getattr(module, "layer_idx", None)).on(query.device)


def _varlen(heads, documents, causal, scaling, window, softcap, sinks, visible_end=None):
    """Host-latency critical: runs in every layer."""
    query, key, value = _one_dtype(*heads)
    batch, _, seqlen, _ = query.shape
    indices = documents.indices
    one_row = batch == 1 and indices is None
    if one_row:  # heads-first, no view: autograd would record each
        rows = query, key, value
    else:
        rows = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if indices is None:
            rows = [tensor.flatten(0, 1) for tensor in rows]
        else:
            rows = _ops.gather_rows_many(rows, indices, indices.shape[0])
    out = varlen_attention(
        *rows,
        documents.cu_seqlens_q,
        documents.cu_seqlens_k,
        causal=causal,
        softmax_scale=scaling,
        window_size=window,
        softcap=softcap or 0.0,
        sinks=sinks,
        visible_end=visible_end,
        layout="bhsd" if one_row else None,
    )
    if one_row:
        return out
    if indices is None:
        return out.unflatten(0, (batch, seqlen))
    return _ops.scatter_rows(out, indices, batch, seqlen)


def _one_dtype(query, key, value):
    """Autocast's dtype, as it would choose for SDPA; else that of value, which the output projection expects."""
    dtype, device = value.dtype, "cuda" if query.is_cuda else "cpu"
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if query.dtype == key.dtype == value.dtype == dtype:  # no call of .to, which costs the host half a microsecond
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)
