"""The old name of token_budget.py, for one minor version: its functions are in packing_ops.data."""

from packing_ops._lazy import moved_names

_MOVED = ["token_budget_microbatches"]
__getattr__ = moved_names(__name__, dict.fromkeys(_MOVED, "packing_ops.data"))
