"""packing_ops in Hugging Face transformers: attention by name, and kernels swapped into a model."""

from packing_ops.integrations.transformers.attention import register

__all__ = ["apply_packing_ops", "register", "revert_packing_ops"]


def __getattr__(name):
    if name in ("apply_packing_ops", "revert_packing_ops"):
        from packing_ops.integrations.transformers import patch

        return getattr(patch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
