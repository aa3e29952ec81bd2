"""Optimizers for weights in bfloat16 and float16.

float32_copies.py  The optimizer changes float32 copies, which are rounded into the weights.
"""

from packing_ops.optim.float32_copies import keep_float32

__all__ = ["keep_float32"]
