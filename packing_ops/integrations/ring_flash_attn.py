"""Keep the old name of packing_ops.contrib.ring_flash_attn."""

from packing_ops._runtime.lazy import old_names
from packing_ops.contrib.ring_flash_attn import *  # noqa: F403
from packing_ops.contrib.ring_flash_attn import __all__ as __all__

__getattr__ = old_names(
    globals(),
    {"remove_ring_flash_attn_alias": "revert_ring_flash_attn_alias", "restore_hf_flash_attn": "revert_hf_flash_attn"},
)
