"""packing_ops in Hugging Face transformers: attention by name, and kernels swapped into a model."""

import importlib
import importlib.util

_FILES = {
    "Applied": "patch",
    "apply_packing_ops": "patch",
    "info": "model_info",
    "register": "attention",
    "revert_packing_ops": "patch",
    "unregister": "attention",
}
__all__ = list(_FILES)


def __getattr__(name):  # transformers is imported by the one who asks for a name
    if name in _FILES:
        return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *(_FILES if importlib.util.find_spec("transformers") else ())})
