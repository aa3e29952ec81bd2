"""Adapters for Unsloth: its packed_seq_lengths in and out, its attention, masks and rope call, collators that pack.

A packed batch is one row ``[1, total]`` without attention_mask; ``packed_seq_lengths`` int32 ``[num_documents]`` says
where its documents end. Nothing here imports Unsloth.
"""

from packing_ops.contrib.unsloth.attention import packed_attention, prefix_attention
from packing_ops.contrib.unsloth.metadata import packed_metadata, sdpa_mask, xformers_mask
from packing_ops.contrib.unsloth.packing_collator import PackingCollator, enable_packing
from packing_ops.contrib.unsloth.rope import fast_rope_embedding

__all__ = [
    "PackingCollator",
    "enable_packing",
    "fast_rope_embedding",
    "packed_attention",
    "packed_metadata",
    "prefix_attention",
    "sdpa_mask",
    "xformers_mask",
]
