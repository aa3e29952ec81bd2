"""Batches for SFT and RL: collators, samplers, micro-batches, losses. Plain dicts of tensors in and out.

A batch is made in:
    padding_free.py, packed.py   the collators: one row of any length; rows of one capacity
    stream.py                    rows of a stream, which is read once
    sampler.py, token_budget.py  which examples share a batch; which share a micro-batch
and used in:
    rows.py                      select, slice, pad rows of a batch that is there
    context_parallel.py          the slots of each context-parallel rank
    mini_batches.py, losses.py, counts.py   RL mini-batches, losses, counts of tokens
    async_collator.py            collation during the training step
"""

from packing_ops.data.async_collator import AsyncBatchCollator, AsyncBatchCollatorMisuse, prefetch
from packing_ops.data.context_parallel import (
    PackedAlignment,
    packed_alignment,
    thd_inverse_indices,
    thd_partition_indices,
)
from packing_ops.data.counts import TokenCounts, count_tokens, packing_advice
from packing_ops.data.losses import masked_loss, sequence_logps
from packing_ops.data.mini_batches import normalize_advantages, stage_chunks, validate_batch_sizes
from packing_ops.data.packed import PackedCollator
from packing_ops.data.padding_free import PaddingFreeCollator, PaddingFreeDPOCollator
from packing_ops.data.rows import empty_like_batch, num_rows, pad_batch_to_multiple, select_rows, slice_batch
from packing_ops.data.sampler import PackedBatchSampler
from packing_ops.data.stream import PackedStream, StreamProgress, image_sizes
from packing_ops.data.token_budget import MicrobatchStatistics, count_within_token_budget, token_budget_microbatches
from packing_ops.padding_batches import iter_microbatches, trim_padding

__all__ = [
    "AsyncBatchCollator",
    "AsyncBatchCollatorMisuse",
    "MicrobatchStatistics",
    "PackedAlignment",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedStream",
    "PaddingFreeCollator",
    "PaddingFreeDPOCollator",
    "StreamProgress",
    "TokenCounts",
    "count_tokens",
    "count_within_token_budget",
    "empty_like_batch",
    "image_sizes",
    "iter_microbatches",
    "masked_loss",
    "normalize_advantages",
    "num_rows",
    "packed_alignment",
    "packing_advice",
    "pad_batch_to_multiple",
    "prefetch",
    "select_rows",
    "sequence_logps",
    "slice_batch",
    "stage_chunks",
    "thd_inverse_indices",
    "thd_partition_indices",
    "token_budget_microbatches",
    "trim_padding",
    "validate_batch_sizes",
]
