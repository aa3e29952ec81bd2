"""packing_ops in Hugging Face transformers: attention by name, and kernels swapped into a model."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and docs/api read
    from packing_ops.integrations.transformers._info import info
    from packing_ops.integrations.transformers.attention import register
    from packing_ops.integrations.transformers.patch import Applied, apply_packing_ops, revert_packing_ops

_FILES = {
    "Applied": "patch",
    "apply_packing_ops": "patch",
    "info": "_info",
    "register": "attention",
    "revert_packing_ops": "patch",
}
__all__ = ["Applied", "apply_packing_ops", "info", "register", "revert_packing_ops"]


def __getattr__(name: str) -> Any:  # transformers is imported by the one who asks for a name
    if name in _FILES:
        return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(_FILES if importlib.util.find_spec("transformers") else ())})
