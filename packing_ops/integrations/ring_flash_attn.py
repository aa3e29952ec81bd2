"""Keep the old name of packing_ops.contrib.ring_flash_attn."""

from packing_ops.contrib.ring_flash_attn import *  # noqa: F403
from packing_ops.contrib.ring_flash_attn import __all__ as __all__
