"""For code that imports flash_attn: its functions, and an alias that lets ``import flash_attn`` find them.

from packing_ops.integrations.flash_attn import install_flash_attn_alias

install_flash_attn_alias()  # before the code that imports flash_attn
"""

from packing_ops._runtime.lazy import old_names
from packing_ops.integrations.flash_attn.alias import install_flash_attn_alias, revert_flash_attn_alias
from packing_ops.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install_flash_attn_alias",
    "revert_flash_attn_alias",
]
__getattr__ = old_names(globals(), {"remove_flash_attn_alias": "revert_flash_attn_alias"})
