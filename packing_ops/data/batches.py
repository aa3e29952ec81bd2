"""The old name of rows.py, for one minor version: its functions are in packing_ops.data."""

from packing_ops._lazy import moved_names

_MOVED = [
    "empty_like_batch",
    "num_rows",
    "pad_batch_to_multiple",
    "select_rows",
    "slice_batch",
]
__getattr__ = moved_names(__name__, dict.fromkeys(_MOVED, "packing_ops.data"))
