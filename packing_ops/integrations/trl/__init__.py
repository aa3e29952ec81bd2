"""For TRL: attention of its trainers, packing over the whole dataset, log-probs of packed documents, rows on several
ranks, prefix trees.
"""

from packing_ops._runtime.lazy import old_names
from packing_ops.integrations.trl.attention import register, revert_registration
from packing_ops.integrations.trl.logps import packed_logps
from packing_ops.integrations.trl.packing import pack_dataset, patch_pack_dataset, revert_pack_dataset
from packing_ops.integrations.trl.padding_free import enable_padding_free, revert_padding_free
from packing_ops.integrations.trl.sequence_parallel import enable_sequence_parallel, revert_sequence_parallel
from packing_ops.integrations.trl.trees import enable_tree_attention, revert_tree_attention

__all__ = [
    "enable_padding_free",
    "enable_sequence_parallel",
    "enable_tree_attention",
    "pack_dataset",
    "packed_logps",
    "patch_pack_dataset",
    "register",
    "revert_pack_dataset",
    "revert_padding_free",
    "revert_registration",
    "revert_sequence_parallel",
    "revert_tree_attention",
]
__getattr__ = old_names(
    globals(),
    {
        "disable_padding_free": "revert_padding_free",
        "disable_sequence_parallel": "revert_sequence_parallel",
        "disable_tree_attention": "revert_tree_attention",
        "unpatch_pack_dataset": "revert_pack_dataset",
        "unregister": "revert_registration",
    },
)
