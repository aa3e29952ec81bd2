"""packing_ops in Megatron-core: packed (thd) training without TransformerEngine.

A model:
    spec.py              use_packing_ops puts the core attention into a layer or block spec, and a MambaMixer for packed
                         rows into that of a hybrid model.
    core_attention.py    PackingDotProductAttention, the module that every layer calls; what attn_mask_type, window_size
                         and an attention_mask hide from its queries.
    varlen_call.py       Where the documents of a batch are, for one varlen call; made once per batch.
    context_parallel.py  The same call over the keys of all context-parallel ranks.
    rope.py              patch_rope, the rotation of queries and keys under apply_rope_fusion.

    router.py            patch_router, the balance losses of a mixture of experts by document; replay_routing, experts
                         that another program has chosen.
    prefix_tree.py       segment_parents: slots of a prefix tree, rotated by their depths.
A batch:
    data.py              Padded rows as one thd row and back, PackedSeqParams, next-token targets.

    packing_ops/data/context_parallel.py   Alignment and zigzag indices, which need no megatron-core.

Three lines of a training script change; examples/first/megatron_step.py is a whole one:
    patch_rope()  # before the config: apply_rope_fusion=True works
    model = GPTModel(config, use_packing_ops(get_gpt_layer_local_spec()), ...)
    losses = model(input_ids, None, None, labels=targets, packed_seq_params=packed_seq_params)
"""

from typing import TYPE_CHECKING

from packing_ops._runtime.lazy import lazy_names
from packing_ops.data.context_parallel import packed_alignment, thd_inverse_indices, thd_partition_indices

if TYPE_CHECKING:  # what type checkers and docs/api read
    from packing_ops.integrations.megatron.context_parallel import context_parallel_attention
    from packing_ops.integrations.megatron.core_attention import PackingDotProductAttention
    from packing_ops.integrations.megatron.data import (
        next_token_targets,
        packed_seq_params,
        postprocess_packed_seqs,
        preprocess_packed_seqs,
    )
    from packing_ops.integrations.megatron.rope import patch_rope, revert_rope
    from packing_ops.integrations.megatron.router import patch_router, replay_routing, revert_router
    from packing_ops.integrations.megatron.spec import use_packing_ops

_MODULES = {
    "PackingDotProductAttention": "core_attention",
    "use_packing_ops": "spec",
    "context_parallel_attention": "context_parallel",
    "patch_rope": "rope",
    "revert_rope": "rope",
    "patch_router": "router",
    "revert_router": "router",
    "replay_routing": "router",
    "packed_seq_params": "data",
    "preprocess_packed_seqs": "data",
    "postprocess_packed_seqs": "data",
    "next_token_targets": "data",
}
__all__ = [
    "PackingDotProductAttention",
    "context_parallel_attention",
    "next_token_targets",
    "packed_alignment",
    "packed_seq_params",
    "patch_rope",
    "patch_router",
    "postprocess_packed_seqs",
    "preprocess_packed_seqs",
    "replay_routing",
    "revert_rope",
    "revert_router",
    "thd_inverse_indices",
    "thd_partition_indices",
    "use_packing_ops",
]
__getattr__, __dir__ = lazy_names(
    globals(),
    _MODULES,
    "megatron",
    "needs megatron-core: pip install 'megatron-core>=0.13'",
    {"unpatch_rope": "revert_rope", "unpatch_router": "revert_router"},
)
