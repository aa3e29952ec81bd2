"""For code that imports ring_flash_attn: its llama3 functions and its substitution in transformers, and an alias.

    llama3.py   The functions, over packing_ops.parallel: windows, sinks and softcap too.
    hf.py       substitute_hf_flash_attn: transformers' "flash_attention_2" over a group.
    alias.py    Lets ``import ring_flash_attn`` find them.

from packing_ops.contrib.ring_flash_attn import install_ring_flash_attn_alias

install_ring_flash_attn_alias()  # before the code that imports ring_flash_attn
"""

from packing_ops.contrib.ring_flash_attn.alias import install_ring_flash_attn_alias, revert_ring_flash_attn_alias
from packing_ops.contrib.ring_flash_attn.hf import (
    revert_hf_flash_attn,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from packing_ops.contrib.ring_flash_attn.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "install_ring_flash_attn_alias",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "revert_hf_flash_attn",
    "revert_ring_flash_attn_alias",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
]
