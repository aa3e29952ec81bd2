"""``import ring_flash_attn`` where it is not installed: modules of its names with this package's functions."""

import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from packing_ops.contrib.ring_flash_attn import hf, llama3

_LLAMA3 = [name for name in vars(llama3) if name.startswith("llama3_")]
_HF = ["substitute_hf_flash_attn", "update_ring_flash_attn_params"]
_MODULES = {
    "ring_flash_attn": [(llama3, _LLAMA3), (hf, _HF)],
    "ring_flash_attn.llama3_flash_attn_varlen": [(llama3, _LLAMA3)],
    "ring_flash_attn.adapters": [(hf, _HF)],
    "ring_flash_attn.adapters.hf_adapter": [(hf, _HF)],
}


class _AliasSpec(ModuleSpec):
    """A spec whose modules revert_ring_flash_attn_alias may take away."""


def install_ring_flash_attn_alias() -> bool:
    """Let ``import ring_flash_attn`` find packing_ops, in this process and only where it is not installed.

    It serves the llama3 functions, substitute_hf_flash_attn and update_ring_flash_attn_params, from the package and
    from the modules that define them. Asking for a ring, zigzag or stripe function is an error that says so. A second
    call does nothing.

    Returns:
        True with the alias in place; False where ring_flash_attn is there already: a warning, and nothing is changed.

    Example:
        >>> install_ring_flash_attn_alias()
        True
        >>> from ring_flash_attn import llama3_flash_attn_varlen_func
        >>> revert_ring_flash_attn_alias()
    """
    present = sys.modules.get("ring_flash_attn")
    if isinstance(getattr(present, "__spec__", None), _AliasSpec):
        return True
    if present is not None or importlib.util.find_spec("ring_flash_attn") is not None:
        warnings.warn("ring_flash_attn is installed and stays in use: no alias of packing_ops was made", stacklevel=2)
        return False
    for name, sources in _MODULES.items():
        module = ModuleType(name, sources[0][0].__doc__)
        module.__spec__ = _AliasSpec(name, None, is_package=any(other.startswith(f"{name}.") for other in _MODULES))
        module.__path__ = []
        vars(module).update({public: getattr(source, public) for source, names in sources for public in names})
        vars(module)["__getattr__"] = _not_served(name)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    return True


def revert_ring_flash_attn_alias() -> None:
    """Revert install_ring_flash_attn_alias. What was imported keeps working.

    Example:
        >>> revert_ring_flash_attn_alias()
        >>> importlib.util.find_spec("ring_flash_attn") is None
        True
    """
    for name in _MODULES:
        if isinstance(getattr(sys.modules.get(name), "__spec__", None), _AliasSpec):
            del sys.modules[name]


def _not_served(module_name: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        served = ", ".join(public for _, names in _MODULES[module_name] for public in names)
        raise ImportError(
            f"{module_name}.{name} is not served by packing_ops' alias of ring_flash_attn, which has {served}; "
            "packing_ops.parallel has attention over a group"
        )

    return __getattr__
