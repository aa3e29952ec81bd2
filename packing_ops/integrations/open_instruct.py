"""Keep the old name of packing_ops.contrib.open_instruct."""

from packing_ops.contrib.open_instruct import *  # noqa: F403
from packing_ops.contrib.open_instruct import __all__ as __all__
