"""packing_ops: padding, packing, boundaries, RoPE, varlen attention and log-probabilities for packed training.

A packed row is documents end to end. cu_seqlens (cumulated lengths, int32 ``[num_documents + 1]``) tells where they
are; PackedMetadata holds it with all that is made from it.

Subpackages, imported at their first use:
    data: collators, samplers, mini-batches and losses.
    parallel: rows spread over several ranks, and attention over them.
    optim: optimizers for weights in bfloat16 and float16.
    integrations: transformers, trl, megatron, flash_attn.
    contrib: unsloth, ring_flash_attn, open_instruct, whose names are those of one project each.
    reference: the ops in plain torch, which the tests compare with.

Without a compiled library (macOS, a clone that was not built) packing_ops.data and what it needs run in plain torch,
slower; every other op says what is missing.
"""

from packing_ops._runtime import lazy
from packing_ops._runtime.flops import register_flop_formulas
from packing_ops._runtime.library import VERSION, build_info
from packing_ops.boundaries import (
    count_target_tokens,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    last_token_indices,
    mask_boundary_labels,
    mask_boundary_labels_shifted_,
    position_ids_from_cu_seqlens,
    seq_idx_from_cu_seqlens,
    shift_labels,
    shift_values,
)
from packing_ops.checkpointing import checkpoint_policy
from packing_ops.conv import causal_conv1d
from packing_ops.invariance.api import Invariance, LayerInvariance, check_invariance, invariant, is_invariant
from packing_ops.keys import FORK_ALIGNMENT, PrefixPaths, PrefixTree
from packing_ops.losses.kl import token_kl
from packing_ops.losses.logps import chunked_cross_entropy, token_logps
from packing_ops.metadata import PackedMetadata
from packing_ops.packing import Packing, pack_ffd, pack_sequences
from packing_ops.padding import pad_input, pad_inputs, unpad_input, unpad_inputs
from packing_ops.padding_batches import iter_microbatches, trim_padding
from packing_ops.prefix_tree import pack_prefix_tree, prefix_token_logps, prefix_tree_metadata
from packing_ops.prompts import (
    compute_prompt_boundaries,
    compute_prompt_end_indices,
    compute_prompt_mini_batch_boundaries,
)
from packing_ops.rope import apply_rotary_qk
from packing_ops.router import load_balancing_loss, router_statistics
from packing_ops.scan import OpenChunk, gated_delta_rule, mamba2_scan
from packing_ops.segments import gae, segment_broadcast, segment_mean, segment_std, segment_sum
from packing_ops.varlen.attention import attention_plan, varlen_attention
from packing_ops.varlen.backends import attention, select_attention_backend
from packing_ops.varlen.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from packing_ops.varlen.masks import block_causal_mask, xformers_bias
from packing_ops.varlen.visible_ends import (
    visible_end_from_blocks,
    visible_end_from_causal,
    visible_end_from_prefix_lengths,
)

__version__ = VERSION  # the library's, which is checked
__getattr__, __dir__ = lazy.lazy_modules(
    globals(), dict.fromkeys(("contrib", "data", "integrations", "optim", "parallel", "reference"), "torch")
)

__all__ = [
    "FORK_ALIGNMENT",
    "Invariance",
    "LayerInvariance",
    "OpenChunk",
    "PackedMetadata",
    "Packing",
    "PrefixPaths",
    "PrefixTree",
    "apply_rotary_qk",
    "attention",
    "attention_plan",
    "block_causal_mask",
    "build_info",
    "causal_conv1d",
    "check_invariance",
    "checkpoint_policy",
    "chunked_cross_entropy",
    "compute_prompt_boundaries",
    "compute_prompt_end_indices",
    "compute_prompt_mini_batch_boundaries",
    "count_target_tokens",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "gae",
    "gated_delta_rule",
    "invariant",
    "is_invariant",
    "iter_microbatches",
    "last_token_indices",
    "load_balancing_loss",
    "mamba2_scan",
    "mask_boundary_labels",
    "mask_boundary_labels_shifted_",
    "pack_ffd",
    "pack_prefix_tree",
    "pack_sequences",
    "pad_input",
    "pad_inputs",
    "position_ids_from_cu_seqlens",
    "prefix_token_logps",
    "prefix_tree_metadata",
    "register_flop_formulas",
    "router_statistics",
    "segment_broadcast",
    "segment_mean",
    "segment_std",
    "segment_sum",
    "select_attention_backend",
    "seq_idx_from_cu_seqlens",
    "shift_labels",
    "shift_values",
    "token_kl",
    "token_logps",
    "trim_padding",
    "unpad_input",
    "unpad_inputs",
    "varlen_attention",
    "visible_end_from_blocks",
    "visible_end_from_causal",
    "visible_end_from_prefix_lengths",
    "xformers_bias",
]
