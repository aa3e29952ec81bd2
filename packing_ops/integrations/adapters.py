"""Show adapters for other libraries what they may use besides the public names; packing_ops.contrib has only this.

Checks of arguments with the package's errors; ``kept_with``, which finds something once a batch; and attention over the
keys that the ranks of a group hold.
"""

from packing_ops._runtime.arguments import (
    at_least,
    check_cu_seqlens,
    check_cumulated,
    check_tensor,
    index_tensor,
    int32_cu_seqlens,
    integer,
    sides_of_flash_attn,
    sides_of_keys,
)
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.metadata import check_causal
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import process_group
from packing_ops.parallel.gathered import attention_over_keys, refuse_window
from packing_ops.parallel.key_layout import KeyLayout
from packing_ops.varlen.options import checked_options

__all__ = [
    "KeyLayout",
    "at_least",
    "attention_over_keys",
    "check_agreement",
    "check_causal",
    "check_cu_seqlens",
    "check_cumulated",
    "check_tensor",
    "checked_options",
    "index_tensor",
    "int32_cu_seqlens",
    "integer",
    "kept_with",
    "process_group",
    "refuse_window",
    "sides_of_flash_attn",
    "sides_of_keys",
]
