"""The data path of SFT and RL on top of the ops: collators, mini-batches, balance. Plain dicts of tensors in and out."""
# ruff: noqa: F401

from packing_ops.data.async_collator import AsyncBatchCollator, AsyncBatchCollatorMisuse
