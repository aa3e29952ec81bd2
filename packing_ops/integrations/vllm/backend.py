"""vLLM's attention backend "CUSTOM": varlen_attention over the pages of its cache, which it also writes."""

import functools
from dataclasses import dataclass, field

import torch
from vllm._custom_ops import reshape_and_cache_flash
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from packing_ops.integrations.vllm.layers import PATCHES
from packing_ops.integrations.vllm.refusals import BLOCK, refusals, refuse_layers
from packing_ops.invariance import mode
from packing_ops.keys import KeyPages, plan_for
from packing_ops.varlen.attention import attend
from packing_ops.varlen.options import checked_options


class Backend(AttentionBackend):
    """What vLLM asks before it builds layers."""

    forward_includes_kv_cache_update = True
    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32")

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(BLOCK)]

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        """Of vLLM before 0.32; later ones have this shape for every backend."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


@dataclass
class Metadata:
    """Of a step, as vLLM gives it. A CUDA graph of the layers begins with what the first one makes of it."""

    given: CommonAttentionMetadata
    page_size: int
    plans: dict[tuple[object, ...], torch.Tensor | None] = field(default_factory=dict)

    @functools.cached_property
    def queries(self) -> tuple[torch.Tensor, KeyPages]:
        """cu_seqlens of the queries, and the pages of their keys."""
        given, count = self.given, self.given.num_reqs
        return given.query_start_loc[: count + 1], KeyPages(given.block_table_tensor[:count], given.seq_lens[:count])

    def plan(self, q, k_pages, v_pages, options) -> torch.Tensor | None:
        """Of the first layer with this geometry: in a CUDA graph nothing else is kept for the others."""
        geometry = *(tuple(each.shape) for each in (q, k_pages, v_pages)), options.window_size
        if geometry not in self.plans:
            self.plans[geometry] = plan_for(q, k_pages, v_pages, *self.queries, options)
        return self.plans[geometry]

    @functools.cached_property
    def at(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and row of each new key, on the CPU."""
        slots = self.given.slot_mapping[: self.given.num_actual_tokens].long().clamp(min=0)  # -1: page 0, of no request
        return slots // self.page_size, slots % self.page_size


class Builder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = kv_cache_spec.block_size
        refuse_layers(vllm_config.compilation_config.static_forward_context, Attention)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        if common_attn_metadata.causal is not True:
            raise NotImplementedError(f"causal: expected True, got {common_attn_metadata.causal}")
        return Metadata(common_attn_metadata, self.page_size)


class Impl(AttentionImpl):
    """Of one layer. As long as one lives, the layers of PATCHES run as a trainer's do, and the mode invariant() is
    on.
    """

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
        **others,
    ):
        given = {"alibi_slopes": alibi_slopes, "kv_sharing_target_layer_name": kv_sharing_target_layer_name, **others}
        odd = [f"{name}: expected None" for name, value in given.items() if value is not None]
        if attn_type != AttentionType.DECODER:
            odd.append(f"attn_type: expected {AttentionType.DECODER}, got {attn_type}")
        if odd := [*refusals(get_current_vllm_config()), *odd]:
            raise NotImplementedError("packing_ops in vLLM: " + "; ".join(odd))
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.sliding_window, self.sinks = scale, sliding_window, sinks
        left = -1 if sliding_window is None else sliding_window - 1
        self.options = checked_options(True, scale, (left, 0 if left >= 0 else -1), logits_soft_cap or 0.0, sinks, None)
        mode.hold(self)
        for patch in PATCHES:
            patch.apply(self)

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        """``[tokens, num_heads, head_size]``, written into ``output``.

        Args:
            kv_cache: ``[pages, num_kv_heads, page_size, 2 * head_size]``, keys beside values, any strides.
            attn_metadata: Metadata; None in a run that finds out how much memory there is.
        """
        if attn_metadata is None:
            return output.zero_()
        given, options = attn_metadata.given, self.options
        total, query = given.num_actual_tokens, query[: given.num_actual_tokens]
        k_pages, v_pages = kv_cache.transpose(1, 2).split(self.head_size, -1)
        if kv_cache.is_cuda:  # one kernel; vLLM has none for the CPU
            scales = layer._k_scale, layer._v_scale
            reshape_and_cache_flash(key, value, k_pages, v_pages, given.slot_mapping[:total], "auto", *scales)
        else:
            k_pages.index_put_(attn_metadata.at, key[:total])
            v_pages.index_put_(attn_metadata.at, value[:total])
        plan = attn_metadata.plan(query, k_pages, v_pages, options)
        out, _ = attend(query, k_pages, v_pages, *attn_metadata.queries, options, plan=plan)
        output[:total].copy_(out.view_as(output[:total]))
        return output
