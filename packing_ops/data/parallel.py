"""The old name of context_parallel.py, for one minor version: its functions are in packing_ops.data."""

from packing_ops._lazy import moved_names

_MOVED = [
    "packed_alignment",
    "thd_inverse_indices",
    "thd_partition_indices",
]
__getattr__ = moved_names(__name__, dict.fromkeys(_MOVED, "packing_ops.data"))
