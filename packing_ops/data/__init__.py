"""The data path of SFT and RL on top of the ops: collators, mini-batches, balance. Plain dicts of tensors in and out."""

from packing_ops.data.packed import PackedCollator
from packing_ops.data.padding_free import PaddingFreeCollator, PaddingFreeDPOCollator, count_within_token_budget

__all__ = ["PackedCollator", "PaddingFreeCollator", "PaddingFreeDPOCollator", "count_within_token_budget"]
