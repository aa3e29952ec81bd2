"""For TRL: attention of its trainers, packing over the whole dataset, log-probs of packed documents."""

from packing_ops.integrations.trl.attention import register, unregister
from packing_ops.integrations.trl.logps import packed_logps
from packing_ops.integrations.trl.packing import pack_dataset, patch_pack_dataset, unpatch_pack_dataset
from packing_ops.integrations.trl.padding_free import disable_padding_free, enable_padding_free

__all__ = [
    "disable_padding_free",
    "enable_padding_free",
    "pack_dataset",
    "packed_logps",
    "patch_pack_dataset",
    "register",
    "unpatch_pack_dataset",
    "unregister",
]
