"""For TRL: attention of its trainers, packing over the whole dataset, log-probs of packed documents, rows on several
ranks, prefix trees.
"""

from packing_ops.integrations.trl.attention import register, unregister
from packing_ops.integrations.trl.logps import packed_logps
from packing_ops.integrations.trl.packing import pack_dataset, patch_pack_dataset, unpatch_pack_dataset
from packing_ops.integrations.trl.padding_free import disable_padding_free, enable_padding_free
from packing_ops.integrations.trl.sequence_parallel import disable_sequence_parallel, enable_sequence_parallel
from packing_ops.integrations.trl.trees import disable_tree_attention, enable_tree_attention

__all__ = [
    "disable_padding_free",
    "disable_sequence_parallel",
    "disable_tree_attention",
    "enable_padding_free",
    "enable_sequence_parallel",
    "enable_tree_attention",
    "pack_dataset",
    "packed_logps",
    "patch_pack_dataset",
    "register",
    "unpatch_pack_dataset",
    "unregister",
]
