"""``attn_implementation="packing_ops"``: varlen attention behind transformers' attention and mask interfaces."""

import functools
import inspect
import re
import sys

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import dtype_name
from packing_ops._runtime.batch_cache import dense_cu_seqlens
from packing_ops.integrations import _additions, _advice
from packing_ops.integrations._patching import Patch, kept_with_class
from packing_ops.integrations._walks import DOCUMENTS
from packing_ops.integrations.transformers import (
    checkpoints,
    continuous_batching,
    fused_loss,
    layer_documents,
    masks,
    positions,
    sequence_group,
    versions,
)
from packing_ops.integrations.transformers.call import NAMES, REQUESTS, call_of_layers, watched
from packing_ops.integrations.transformers.documents import refuse_one_result, rows_of
from packing_ops.integrations.transformers.other_attention import OtherCall, guard, patches_of_trainer
from packing_ops.integrations.transformers.states import cached, linear_attention, stateful
from packing_ops.integrations.transformers.versions import (
    CACHE,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    sdpa_attention_forward,
)
from packing_ops.invariance import mode
from packing_ops.keys import keys_of_tree
from packing_ops.varlen.attention import DTYPES, attend
from packing_ops.varlen.masks import visible_mask
from packing_ops.varlen.options import checked_options


def register(name: str = "packing_ops") -> None:
    """Make ``attn_implementation=name`` known to transformers, with ``model.set_attn_implementation(name)``.

    Documents of a batch are found in this order, once per forward, and shared by all layers: ``cu_seq_lens_q`` /
    ``cu_seq_lens_k`` passed to the model (no host synchronisation); the 2-D attention_mask (left, right, holes; numbers
    above 1 start a document where they change) and position_ids, which start one in each row and where they stop
    growing (one synchronisation); else each row is one. A model that takes one document in each row (an
    encoder-decoder, a head with one result for a row) synchronises again to refuse several. Causal and full attention,
    sliding windows, softcap, sinks, grouped heads and scaling follow the model. Everything else runs by SDPA with a
    mask of the same meaning, after one warning that says why: a KV cache, 4-D masks (models that read theirs), dropout,
    head_dim over 512. A second call changes nothing.

    What this adds to transformers and torch stays until revert_registration(name): the name in its two tables, and
    wrappers around PreTrainedModel.__call__, which remembers position_ids for models that pass them to no mask, around
    the preparation of masks, around both forms of torch.utils.checkpoint, which take the documents along, and around
    Trainer.__setattr__: a model of model_init refuses rows of several documents if the Trainer's model before had this
    attention (a Trainer that is imported later is watched from the next model with this attention on); in models, the
    forward of layers that carry a state. The wrappers in transformers leave models with another attn_implementation as
    they are. A process that unpickles a model with this attention under another name must call register(name) first.

    Args:
        name: of the implementation; without "flash", "sdpa" and "flex", which transformers treats specially.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> register()
        >>> config = LlamaConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="packing_ops")
        >>> model(torch.arange(5)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1]])).logits.shape  # two documents
        torch.Size([1, 5, 16])

    Raises:
        ImportError: transformers is not installed, or too old to have the interfaces.
        ValueError: a name that transformers treats specially. Then, in the forward: several documents in a row for a
            layer with a state that reads tokens ahead or calls attention inside, or for a layer of which nothing says
            whether it mixes tokens (see declare), or beside a cache for a model of layers with a state alone;
            cu_seqlens that do not end at the batch's tokens, an attention_mask with padding or other documents in the
            batch, position_ids that do not restart where cu_seqlens start a document, or that restart inside of one,
            documents of the keys that are not those of the queries. On CUDA these are found in a later call, or in the
            same one under ``PACKING_OPS_CHECK=1``. At the end of a forward: several documents that no attention knows
            of, or that no layer has called this attention with (not in a process that has compiled a layer with it).
            At the start of one: past_key_values (5.24: cache) that were filled with several documents of a row,
            that no call here filled and that hold more tokens than position_ids count, or that hold tokens beside
            several documents of a row, the first of which starts at position 0. A compiled graph asserts these on the
            device: RuntimeError on the CPU, a device-side assertion on CUDA.
        NotImplementedError: in the forward, an option of attention that is not known (``block_indices``, say).
    """
    taken = [word for word in ("flash", "sdpa", "flex", "eager", "paged", "/") if word in name]
    if taken or not name:
        raise ValueError(f"name: expected one without {taken or 'being empty'}, got {name!r}")
    for patch in (masks.PATCH, OWN_ATTENTION, _additions.patch_of_peft(), *checkpoints.PATCHES, *patches_of_trainer()):
        patch.pin()
    NAMES.add(name)
    for patch in continuous_batching.PATCHES:
        patch.apply()
    AttentionInterface.register(name, packing_ops_attention)
    AttentionMaskInterface.register(name, masks.packing_ops_mask)
    # PreTrainedModel.__call__ is left as it is where transformers defines one itself. What another library put over an
    # earlier wrapper of ours is wrapped again.
    if CALLS.pinned or CALLS.layers or PreTrainedModel.__call__ is torch.nn.Module.__call__:
        CALLS.pin()
    else:
        versions.log_once("this transformers calls models in another way, what only a call says is not known")


def revert_registration(name: str = "packing_ops") -> None:
    """Revert register(name), and with the last name what it wrapped in transformers.

    Models with this attn_implementation need another one before they are called again. A second call does nothing.

    Example:
        >>> register("my_attention")
        >>> revert_registration("my_attention")
    """
    if name in NAMES:
        NAMES.remove(name)
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(name, None)
    if not NAMES:
        for patch in (
            masks.PATCH,
            OWN_ATTENTION,
            CALLS,
            _additions.WHEN_MADE,
            _additions.patch_of_peft(),
            *patches_of_trainer(),
            *continuous_batching.PATCHES,
            *checkpoints.PATCHES,
        ):
            patch.revert()
        stateful.revert()


def _begin(model, call, args, kwargs):
    """Return the arguments that the model gets, and find the documents of its layers with a state."""
    if not isinstance(call, OtherCall):
        _additions.noise_by_document(model, call)
    if call.by_states:
        args, kwargs = positions.with_positions(model, call, args, kwargs)
        kwargs = stateful.find_documents_of(model, call, args, kwargs)
        if call.mask_of_tokens is not None:
            args, kwargs = call.put("attention_mask", call.mask_of_tokens, args, kwargs)
    elif call.by_masks:  # looked at in the end: all else is as in stock models
        refuse_one_result(model, call, kwargs, call.position_ids, rows_of(args, kwargs)[0])
        return args, kwargs
    else:  # before a row that is longer than its table of positions fails
        call.refuse_unconsumed(args, kwargs)
    if not call.traced:
        call.layers = checkpoints.Layers(() if call.row_documents is None else stateful.layers_apart(call, model))
        checkpoints.note(call)
    args, kwargs = positions.with_axes_of_images(model, call, args, kwargs)
    args, kwargs = fused_loss.without_first_labels(model, call, args, kwargs)
    return args, linear_attention.with_documents(model, call, kwargs)


def _end(model, call, kwargs, outputs):
    """Look at what the model returned. Its pooler_output, made of one token of a row (BERT: the first, SigLIP: the
    last), is None where a row has several documents. A model around this one, whose head reads it, is refused by name
    at its own end.
    """
    _advice.advise(model, call, kwargs, outputs)
    cached.note(call, kwargs, outputs)
    seen, pooled = call.seen, getattr(outputs, "pooler_output", None)
    if call.outer is not None or seen is None or seen.documents <= seen.rows:
        return
    if isinstance(pooled, torch.Tensor) and pooled.dim() == 2 and len(pooled) == seen.rows:
        outputs["pooler_output"] = None
        versions.log_once(
            f"pooler_output of {call.name} is None: expected one document in each row, got several, and it is made of "
            "one token of the row; take last_hidden_state where documents start"
        )


CALLS = Patch(PreTrainedModel, "__call__", functools.partial(watched, OtherCall, _begin, _end))


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
    segment_parents=None,
    **kwargs,
):
    """Attend: query ``[batch, num_heads, seqlen, head_dim]`` -> (``[batch, seqlen, num_heads, head_dim]``, None)."""
    layer_documents.note_attention(unread=False)
    # Options: a MaskPattern says what the mask would, else the layer does.
    cu_seqlens, sequence, batched = (cu_seq_lens_q, cu_seq_lens_k), sequence_group.of(module), REQUESTS in kwargs
    reason = "" if HARMLESS.issuperset(kwargs) else option_for_sdpa(kwargs)
    pattern = attention_mask if isinstance(attention_mask, masks.MaskPattern) else None
    if pattern is not None:
        causal, window = pattern.causal, pattern.window
    else:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        sees_all = sliding_window is None or (not batched and sequence is None and sliding_window > key.shape[2])
        window = (-1, -1) if sees_all else (sliding_window - 1, 0)
    options = checked_options(causal, scaling, window, softcap or 0.0, sinks=s_aux)
    refused = reason or why_not(query, value, dropout)
    heads, layout, batch, seqlen = _one_dtype(query, key, value), "bhsd", query.shape[0], query.shape[2]

    # Where the keys are: along the paths of a prefix tree, in the cache of requests, or in documents.
    if segment_parents is not None and causal and not batched:  # not a vision tower, which has other documents
        refused = refused or why_no_tree(query, key, attention_mask, pattern)
        documents, keys = _tree(cu_seqlens, segment_parents, refused)
    elif batched:
        heads, documents, keys = continuous_batching.with_keys(module, heads, cu_seqlens, refused, kwargs)
    elif sequence is not None:  # rows spread over several ranks
        if pattern is not None and pattern.blocks is not None:
            refused = refused or "a mask with blocks that see ahead"
        mask = None if pattern is not None else attention_mask
        return sequence.attend_over_ranks(heads, mask, cu_seq_lens_q, options, refused), None
    else:
        found, visible_end, none = layer_documents.find(
            module, query, key, attention_mask, pattern, cu_seqlens, position_ids, options
        )
        options = options if visible_end is None else options._replace(visible_end=visible_end)
        reason = reason or none or refused
        if not reason and found.has_interior_padding and window != (-1, -1):
            reason = "a sliding window over padding that may lie inside a row"
        step = reason == layer_documents.STEP and mode.active()
        if reason and not step:
            versions.warn_once(reason)
            mask = attention_mask if found is None else _dense_mask(found, query, options, pattern)
            return _by_sdpa(module, (query, key, value), mask, options, dropout, kwargs)
        if step:  # of generate: each row's new token and all of its keys
            documents, keys = (dense_cu_seqlens(batch, length, value, "key") for length in (seqlen, key.shape[2]))
        else:
            documents = keys = found.cu_seqlens
        indices = None if step else found.indices
        if batch > 1 or step or indices is not None:  # else heads first, no view: autograd would record each
            layout, heads = None, [tensor.transpose(1, 2) for tensor in heads]
            if indices is None:
                heads = [tensor.flatten(0, 1) for tensor in heads]
            else:
                heads = gate.gather_rows_many(heads, indices, indices.shape[0])

    out, _ = attend(*heads, documents, keys, options, layout=layout)
    if layout is None and indices is not None:
        return gate.scatter_rows(out, indices, batch, seqlen), None
    return (out if layout else out.unflatten(0, (batch, seqlen))), None


def _tree(cu_seqlens, parents, reason):
    """Return the segments of a prefix tree, and parents as attend takes them."""
    if reason:
        raise NotImplementedError(f"segment_parents: expected a call that varlen attention serves, got {reason}")
    segments, of_keys = cu_seqlens
    if segments is None or not (of_keys is None or of_keys.shape == segments.shape):
        raise ValueError(
            "cu_seq_lens_q: expected the segments of the tree beside segment_parents, also as cu_seq_lens_k"
        )
    if (call := call_of_layers()) is not None:
        call.mark_consumed_by("segment_parents", segments)
    return segments, keys_of_tree(parents)


def _one_dtype(query, key, value):
    """Return one dtype for q, k and v: autocast's, as it would choose for SDPA; else value's, which the output
    projection expects.
    """
    dtype, device = value.dtype, "cuda" if query.is_cuda else "cpu"
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if query.dtype == key.dtype == value.dtype == dtype:  # no call of .to, which costs the host half a microsecond
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


# --- what varlen attention serves: why other calls run by SDPA, and options that are refused ---

# Options that SDPA serves.
SDPA = frozenset(("output_attentions", "position_bias"))
# Keywords that reach attention and do not change its result, collected from the models of transformers: those of
# TransformersKwargs, generate, generate_batch, trainers and outer models, and deterministic, which our backward always
# is.
HARMLESS = frozenset({
    CACHE, "block_table", "cache", "cache_position", "deterministic", "encoder_attention_mask", "encoder_hidden_states",
    "ignore_index", "input_ids", "inputs_embeds", "k_cache", "labels", "logits_indices", "logits_processor_args",
    "logits_to_keep", "margin", "max_length_k", "max_length_q", "mm_token_type_ids", "num_items_in_batch",
    "num_targets", "num_tokens", "output_hidden_states", "output_router_logits", "packed_seq_lengths",
    "past_key_values", "read_index", "return_dict", "seq_idx", "shift_labels", "token_type_ids", "use_cache", "v_cache",
    REQUESTS, DOCUMENTS,
})  # fmt: skip


def option_for_sdpa(kwargs):
    """Return why SDPA must serve these options, or an empty string."""
    given = {name for name, option in kwargs.items() if option is not None and option is not False} - HARMLESS
    for name in sorted(given - SDPA):
        raise NotImplementedError(
            f"{name}: expected no option that packing_ops attention does not know, got {type(kwargs[name]).__name__}; "
            "leave it out of the model's call or load the model with another attn_implementation"
        )
    return f"{min(given)} is not supported" if given else ""


def why_no_tree(query, key, mask, pattern):
    """Return why a call cannot be of a prefix tree, or an empty string."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        return (
            f"a batch of {query.shape[0]}, {query.shape[2]} queries and {key.shape[2]} keys (a tree is one row, "
            "without a cache)"
        )
    if mask is not None and (pattern is None or pattern.blocks is not None or pattern.padding is not None):
        return "a mask that is more than causal or a window"
    return ""


_CALL = re.compile(rf"\battention_interface\({versions.ARGUMENTS}\)")


@kept_with_class
def unknown_options(cls: type) -> frozenset[str]:
    """Return options that modules of this class pass to attention by name and ours refuses."""
    passed = re.findall(r"^\s*(\w+)=", "\n".join(_CALL.findall(versions.source_of(cls.forward))), re.M)
    # head_mask: None unless somebody asks for one, which is refused then.
    return frozenset(passed) - HARMLESS - SDPA - {"head_mask", *inspect.signature(packing_ops_attention).parameters}


def why_not(query, value, dropout):
    """Return why varlen_attention cannot serve this call, or an empty string."""
    if dropout:
        return f"dropout {dropout} in attention"
    cuda = query.is_cuda
    if not (cuda or query.is_cpu):
        return f"no kernel for {query.device.type}"
    if cuda and value.dtype not in DTYPES["cuda"]:
        return f"dtype {dtype_name(value.dtype)}"
    for head_dim in (query.shape[-1], value.shape[-1]):
        if head_dim > 512:
            return f"head_dim {head_dim}, expected at most 512"
        if cuda and head_dim % 8 and value.dtype != torch.float32:
            return f"head_dim {head_dim} in {dtype_name(value.dtype)}, expected a multiple of 8"
    return ""


# --- SDPA of transformers, for calls that varlen attention does not serve ---


def _dense_mask(documents, query, options, pattern):
    """Return bool ``[batch, 1, queries, keys]``, True where visible. Windows count slots, as transformers' masks do."""
    length = query.shape[2] if pattern is None or pattern.last is None else pattern.length
    ids, queries = documents.document_ids(query.shape[0], length), slice(length - query.shape[2], None)
    slots = torch.arange(length, device=ids.device)
    pairs = ids[:, queries, None], ids[:, None, :], slots[queries, None], slots[None, :]
    if pattern is None or pattern.blocks is None:
        visible = visible_mask(*pairs, options.causal, options.window_size)
    else:
        blocks = pattern.blocks.to(ids.device)
        together = (blocks[:, queries, None] == blocks[:, None, :]) & (blocks[:, None, :] >= 0)
        visible = visible_mask(*pairs, False, options.window_size) & ((pairs[3] <= pairs[2]) | together)
    return (visible | torch.eq(*pairs[2:]))[:, None]  # padding attends to itself: its softmax is finite


def _by_sdpa(module, heads, mask, options, dropout, given):
    """Run SDPA as transformers calls it; what it does not have, such as softcap and sinks, by the plain formula."""
    query, key, value = heads
    # SDPA where it has every option.
    causal, scaling, softcap, sinks = options.causal, options.softmax_scale, options.softcap, options.sinks
    if not softcap and sinks is None:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **given
        )

    # The plain formula: scores, mask, sinks.
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.float()
    if given.get("position_bias") is not None:
        scores = scores + given["position_bias"]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        low = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, low) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    out = F.dropout(weights, dropout, module.training) @ value
    return out.transpose(1, 2).contiguous(), None


# --- models with special attention classes, which no attn_implementation of ours reaches (Falcon, GPT-J) ---


def in_tables(cls: type) -> set[str]:
    """Return the attn_implementations that a text model's module has classes for, in separate tables; an empty set
    for other models.
    """
    if not versions.reads_text(cls):
        return set()
    return set().union(
        *(
            table
            for name, table in vars(sys.modules[cls.__module__]).items()
            if name.endswith("_ATTENTION_CLASSES") and "VISION" not in name
        )
    )


def _checked(stock):
    """Wrap the method that picks the attn_implementation of a new model, or another one of a model."""

    @functools.wraps(stock)
    def check(self, attn_implementation, *args, **kwargs):
        names = in_tables(type(self)) if attn_implementation in NAMES else set()
        if names and attn_implementation not in names:
            raise ValueError(
                f"attn_implementation: expected one of {', '.join(sorted(names))} for {type(self).__name__}, which has "
                f"attention of its own, got {attn_implementation!r}; load it with one of these, and give each document "
                "a row of its own"
            )
        name = stock(self, attn_implementation, *args, **kwargs)
        if attn_implementation in NAMES:  # another one may come: set, by a config that is shared, or written into it
            guard(self, register)
        return name

    return check


OWN_ATTENTION = Patch(PreTrainedModel, "_check_and_adjust_attn_implementation", _checked)
