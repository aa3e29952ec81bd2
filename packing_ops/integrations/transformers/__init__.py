"""packing_ops in Hugging Face transformers: attention by name, and kernels swapped into a model.

attn_implementation="packing_ops":
    attention.py            register, and the function that every layer calls.
    model_call.py           The arguments of a model's call that tell its documents; keywords.py refuses misspelt ones,
                            running.py knows which call runs in this thread.
    mask_preparation.py     Brings these arguments to where transformers makes masks.
    masks.py                MaskPattern, which layers get in place of a mask tensor.
    gathered_rows.py        Under another library's Ulysses, which calls attention with rows of several ranks.
    documents.py            Where the documents of a batch lie; document_checks.py: whether a row has several.
    fallback.py             SDPA, for calls that varlen attention does not serve.
    kv_cache.py             Refuses a KV cache that holds several documents in a row.
apply_packing_ops(model):
    patch.py                apply and revert, for a model, a class or all; model_info.py says what runs.
    sequence_group.py       A model whose rows lie on several ranks, by packing_ops.parallel.
    attn_implementation.py  Sets a model's attn_implementation, and sets it back.
    models.py               The model families, and which formula of RoPE and RMSNorm each has.
    rope.py, rms_norm.py, fused_loss.py   How each of these is put into a model; positions.py gives RoPE positions that
                            restart with each document.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and docs/api read
    from packing_ops.integrations.transformers.attention import register, unregister
    from packing_ops.integrations.transformers.model_info import info
    from packing_ops.integrations.transformers.patch import Applied, apply_packing_ops, revert_packing_ops

from packing_ops._lazy import lazy_names

_MODULES = {
    "Applied": "patch",
    "apply_packing_ops": "patch",
    "info": "model_info",
    "register": "attention",
    "revert_packing_ops": "patch",
    "unregister": "attention",
}
__all__ = ["Applied", "apply_packing_ops", "info", "register", "revert_packing_ops", "unregister"]
__getattr__, __dir__ = lazy_names(
    globals(), _MODULES, "transformers", "needs transformers: pip install packing_ops[hf]"
)
