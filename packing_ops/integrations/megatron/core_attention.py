"""``PackingDotProductAttention``: varlen attention as the core attention of megatron-core."""

import functools

import torch
from megatron.core import parallel_state
from megatron.core.transformer import utils
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule

from packing_ops import unpad_input
from packing_ops._runtime import gate
from packing_ops._runtime.arguments import one_of
from packing_ops._runtime.batch_cache import dense_cu_seqlens, kept_with
from packing_ops.integrations.megatron.prefix_tree import TreeParams, tree_in
from packing_ops.integrations.megatron.varlen_call import DocumentSpans, field_of, spans_of, varlen_call_of
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.gathered import attention_over_keys, refuse_window
from packing_ops.varlen.attention import attend
from packing_ops.varlen.options import checked_options, wide_sinks

_UNSERVED = ("qk_clip", "log_max_attention_logit", "fp8_dot_product_attention", "fp8_multi_head_attention")


class PackingDotProductAttention(MegatronModule):
    """Softmax attention as megatron-core 0.13 to 0.16 builds and calls it; put into a spec by use_packing_ops.

    Args:
        config: TransformerConfig; attention_dropout must be 0, ``softmax_type`` (vanilla, off-by-one, learnable) and
            ``window_size`` with ``window_attn_skip_freq`` are followed.
        layer_number: from 1; tells which layers have the window.
        attn_mask_type: causal, padding_causal, causal_bottom_right, no_mask or padding; forward may name another.
        softmax_scale: without it ``head_dim ** -0.5``. apply_query_key_layer_scaling changes no value in float32
            scores, which these are.
        cp_comm_type: any; keys and values are gathered (context_parallel.py).
        pg_collection: process groups ``tp`` and ``cp``; without it those of parallel_state. megatron-core 0.13
            and 0.14 call it model_comm_pgs.

    Raises:
        NotImplementedError: dropout, qk_clip, log_max_attention_logit, attention in fp8.
        ValueError: heads or query groups that tensor parallelism does not divide, an unknown softmax_type.
        AttributeError: a field that this version of megatron-core does not have.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        num_splits=None,
        cp_comm_type=None,
        pg_collection=None,
        model_comm_pgs=None,
    ):
        super().__init__(config=config)
        # Ranks.
        groups = pg_collection if pg_collection is not None else model_comm_pgs
        self.tp_group = _group(groups, "tp", parallel_state.get_tensor_model_parallel_group)
        self.cp_group = None
        if field_of(config, "context_parallel_size") > 1:
            self.cp_group = _group(groups, "cp", parallel_state.get_context_parallel_group)
        # What is refused.
        dropout = field_of(config, "attention_dropout") if attention_dropout is None else attention_dropout
        if dropout:
            raise NotImplementedError(
                f"attention_dropout: expected 0.0, dropout in attention is not supported, got {dropout}"
            )
        for name in _UNSERVED:
            if getattr(config, name, False):
                raise NotImplementedError(f"{name}: expected False, it is not supported, got {getattr(config, name)}")
        ranks = self.tp_group.size()
        for name in ("num_attention_heads", "num_query_groups"):
            if field_of(config, name) % ranks:
                raise ValueError(
                    f"{name}: expected a multiple of the tensor parallel size {ranks}, got {getattr(config, name)}"
                )
        # What forward reads.
        self.layer_number = max(1, layer_number)
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.softmax_scale = softmax_scale
        self.window_size = window_of(config, self.layer_number)
        # Sinks.
        kind, offset = getattr(config, "softmax_type", "vanilla"), None
        one_of(kind, ("vanilla", "off-by-one", "learnable"), "softmax_type")
        if kind != "vanilla":
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            offset = torch.zeros(config.num_attention_heads // ranks, device=device, dtype=config.params_dtype)
        if kind == "learnable":
            self.softmax_offset = torch.nn.Parameter(offset)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            self.register_buffer("softmax_offset", offset, persistent=False)

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
        num_splits=None,
    ):
        """Attend inside each document, or inside each column of a batch.

        Args:
            query: ``[T, num_heads, head_dim]`` for thd, ``[S, B, num_heads, head_dim]`` for sbhd: this rank's heads
                and, under context parallelism, its chunks of each document. float32, bfloat16, float16.
            key, value: the same with this rank's query groups; value may have another head_dim (multi-latent
                attention).
            attention_mask: not looked at for thd, nor with a window; for sbhd None or, bool with True for hidden, what
                attn_mask_type says and padding (tokens_of; looked at once per mask: one synchronisation). Padding has
                out 0 and takes no gradient.
            packed_seq_params: ``qkv_format``, ``cu_seqlens_q`` and ``cu_seqlens_kv`` of the whole batch, int
                ``[num_documents + 1]``, and, if there are gaps between documents, ``cu_seqlens_q_padded`` and
                ``cu_seqlens_kv_padded``: padding has out 0 and takes no gradient. Under context parallelism each
                document's slots are a multiple of ``2 * cp_size``. ``cp_group`` and ``local_cp_size`` are followed.
                With ``segment_parents`` it is a prefix tree, from a layer that patch_rope has patched. Or
                PackedMetadata, where this module is called by itself: megatron-core's RoPE reads PackedSeqParams, which
                ``packed_seq_params(metadata)`` makes.

        Returns:
            ``[T, num_heads * head_dim]`` or ``[S, B, num_heads * head_dim]``, value's head_dim. No synchronisation per
            layer; varlen_call.py says when there is one per batch.

        Example: a query ``[16, 4, 8]`` with cu_seqlens ``[0, 5, 8, 16]`` (5, 3 and 8 tokens) gives ``[16, 32]``.

        Raises:
            NotImplementedError: attn_mask_type arbitrary, another mask, attention_bias; under context parallelism a
                window without causality, padding in sbhd.
            ValueError: qkv_format other than thd and sbhd, tensors of another format, cu_seqlens that are missing or
                do not fit each other or the context parallel size.
        """
        if attention_bias is not None:
            raise NotImplementedError("attention_bias: expected None, a bias is not supported")
        # Options.
        mask_type = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        causal, window = causal_and_window(mask_type, self.window_size)
        options = checked_options(causal, self.softmax_scale, window, sinks=self.softmax_offset)
        # Ranks.
        params, heads = packed_seq_params, (query, key, value)
        group = getattr(params, "cp_group", None)
        if group is None and getattr(params, "local_cp_size", None) != 1:
            group = self.cp_group
        if group is not None and (group.size() == 1 or len(query) == len(key) == 0):
            group = None  # nothing to exchange
        tree = None
        if isinstance(params, (TreeParams, PackedMetadata)) or getattr(params, "segment_parents", None) is not None:
            tree = tree_in(params, group)
        # sbhd
        qkv_format = "sbhd" if params is None else getattr(params, "qkv_format", "thd")  # PackedMetadata has none
        if qkv_format == "sbhd":
            return self._attend_sbhd(*heads, attention_mask, mask_type, options, group).flatten(2)
        # thd
        if qkv_format != "thd":
            raise ValueError(
                f"packed_seq_params.qkv_format: expected 'thd' or 'sbhd' for all of q, k and v, got {qkv_format!r}"
            )
        _expect(heads, "[total, num_heads, head_dim]", 3)
        call = (tree, tree)
        if tree is None:
            documents = spans_of(params)
            if group is not None:
                return self._attend_over_ranks(*heads, documents, options, group).flatten(1)
            call = varlen_call_of(documents, len(key), causal=causal)
        return attend(*heads, *call, options)[0].flatten(1)

    def _attend_sbhd(self, query, key, value, attention_mask, mask_type, options, group):
        _expect((query, key, value), "[seqlen, batch, num_heads, head_dim]", 4)
        if options.causal and len(query) != len(key):
            raise ValueError(f"key: expected the {len(query)} rows of query under a causal mask, got {len(key)}")
        # Padding: the tokens packed, and put back.
        tokens = None
        if attention_mask is not None and not self.window_size:
            tokens = tokens_of(attention_mask, query, key, mask_type)
        if tokens is not None:
            if group is not None:
                raise NotImplementedError(
                    "attention_mask: expected no padding in sbhd under context parallelism, got some"
                )
            indices, cu_seqlens = tokens
            packed = gate.gather_rows_many([t.transpose(0, 1) for t in (query, key, value)], indices, len(indices))
            out = attend(*packed, cu_seqlens, cu_seqlens, options)[0]
            return gate.scatter_rows(out, indices, query.shape[1], query.shape[0]).transpose(0, 1).contiguous()
        # The columns of the batch as more heads: no copy, and each query group keeps its queries.
        if self.softmax_offset is not None:
            options = options._replace(sinks=wide_sinks(self.softmax_offset.repeat(query.shape[1])))
        ranks = 1 if group is None else group.size()
        sides = ((query, "query"), (key, "key"))
        cu_seqlens = [dense_cu_seqlens(1, ranks * len(tensor), tensor, name) for tensor, name in sides]
        heads = [t.flatten(1, 2) for t in (query, key, value)]
        if group is None:
            out = attend(*heads, *cu_seqlens, options)[0]
        else:
            out = self._attend_over_ranks(*heads, DocumentSpans(*cu_seqlens, *cu_seqlens), options, group)
        return out.view(*query.shape[:3], out.shape[-1])

    def _attend_over_ranks(self, q, k, v, documents, options, group):
        if len(q) != len(k):
            raise ValueError(f"key: expected the {len(q)} rows of query under context parallelism, got {len(k)}")
        ranks = {"cp_rank": group.rank(), "cp_size": group.size()}
        call = varlen_call_of(documents, len(k), causal=options.causal, **ranks)
        refuse_window(options)
        return attention_over_keys(q, k, v, call, group, options)[0]

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return a learnable sink's part of a distributed checkpoint, as megatron-core's attention writes it."""
        return DotProductAttention.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def _group(groups, name, of_all):
    return of_all() if groups is None else field_of(groups, name)


def _expect(heads, shape, dim):
    for name, tensor in zip(("query", "key", "value"), heads, strict=True):
        if tensor.dim() != dim:
            qkv_format = "thd" if dim == 3 else "sbhd"
            raise ValueError(f"{name}: expected {shape} for qkv_format {qkv_format}, got {list(tensor.shape)}")


# --- what a layer hides from its queries ---


# TransformerEngine's names; in thd its two padding types mean documents, in sbhd a mask of padding.
_IS_CAUSAL = {"causal": True, "padding_causal": True, "causal_bottom_right": True, "no_mask": False, "padding": False}


def window_of(config, layer_number: int) -> tuple[int, int] | None:
    """Return the window of this layer; None without one."""
    window = field_of(config, "window_size")
    is_windowed = getattr(utils, "is_layer_window_attention", None)  # since 0.15
    if is_windowed is not None and not is_windowed(window, config.window_attn_skip_freq, layer_number):
        return None
    return window and tuple(window)


@functools.lru_cache
def causal_and_window(mask_type: str, window_size: tuple[int, int] | None) -> tuple[bool, tuple[int, int]]:
    """Return ``causal`` and ``window_size`` of varlen_attention."""
    if mask_type not in _IS_CAUSAL:
        raise NotImplementedError(f"attn_mask_type: expected one of {', '.join(_IS_CAUSAL)}, got {mask_type}")
    causal = _IS_CAUSAL[mask_type]
    if not window_size:
        return causal, (-1, -1)
    left, right = window_size
    if right == 0:
        return True, (left, 0)
    if causal and right > 0:
        raise ValueError(f"window_size: expected no keys to the right under {mask_type}, got {window_size}")
    return causal, (left, 0 if causal else right)


def tokens_of(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, mask_type: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return which slots of an sbhd batch hold tokens; None if all do. Looked at once per mask: a synchronisation.

    Layers that are recomputed in backward are given a separate mask, so each looks again.

    Args:
        mask: True for hidden, ``[1 or batch, 1, seqlen, seqlen]``: what mask_type hides and, besides, keys that are
            padding; of the padding types also ``[batch, 1, 1, seqlen]``, only the padding. It may be anywhere.
        query, key: ``[seqlen, batch, num_heads, head_dim]``; padding needs as many keys as queries.

    Returns:
        indices int64 ``[tokens]`` into ``[batch * seqlen]``, and cu_seqlens of the columns' tokens.

    Raises:
        NotImplementedError: another mask.
    """
    seqlen, batch = query.shape[:2]
    keys = key.shape[0]

    def make():
        hidden, causal = mask.bool(), _IS_CAUSAL[mask_type]
        expected = hidden.new_ones(seqlen, keys).triu(1) if causal else hidden.new_zeros(())
        is_whole = hidden.shape[-2:] == (seqlen, keys)
        if (is_whole or not causal) and (hidden == expected).all():
            return None
        if hidden.shape[-2] == 1 and mask_type in ("padding", "padding_causal"):
            padding, agrees = hidden, True
        else:
            padding = hidden.all(-2, keepdim=True)
            # Which keys a query of padding attends to does not matter.
            agrees = is_whole and bool(((hidden == (expected | padding)) | padding.mT).all())
        if not agrees or seqlen != keys or padding.shape not in {(1, 1, 1, seqlen), (batch, 1, 1, seqlen)}:
            kind = "causal mask" if causal else "mask that hides nothing"
            raise NotImplementedError(
                f"attention_mask: expected None or a {kind}, with padding or without, got another; pack documents as "
                "thd"
            )
        real = ~padding[:, 0, 0].expand(batch, seqlen)
        _, indices, cu_seqlens, _, _ = unpad_input(real, real)
        return None if real.all() else (indices, cu_seqlens)

    return kept_with((mask,), ("tokens", mask_type, seqlen, batch, keys), make)
