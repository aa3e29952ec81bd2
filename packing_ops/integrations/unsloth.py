"""Keep the old name of packing_ops.contrib.unsloth."""

from packing_ops.contrib.unsloth import *  # noqa: F403
from packing_ops.contrib.unsloth import __all__ as __all__
