"""packing_ops in Megatron-core: packed (thd) training without TransformerEngine.

Example:
    >>> from packing_ops.integrations.megatron import use_packing_ops
    >>> model = GPTModel(config, use_packing_ops(get_gpt_layer_local_spec()), ...)
    >>> model(input_ids, position_ids, None, labels=labels, packed_seq_params=packed_seq_params)
"""

import importlib

from packing_ops.data.parallel import packed_alignment, thd_inverse_indices, thd_partition_indices

_HOMES = {
    "PackingDotProductAttention": "core_attention",
    "use_packing_ops": "spec",
    "context_parallel_attention": "context_parallel",
    "patch_rope": "rope",
    "unpatch_rope": "rope",
    "packed_seq_params": "data",
    "preprocess_packed_seqs": "data",
    "postprocess_packed_seqs": "data",
    "next_token_targets": "data",
}
__all__ = [*_HOMES, "packed_alignment", "thd_inverse_indices", "thd_partition_indices"]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        raise ImportError(f"{name} needs megatron-core: pip install packing_ops[megatron]") from error
