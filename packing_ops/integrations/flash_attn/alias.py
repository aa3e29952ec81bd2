"""``import flash_attn`` where it is not installed: an import finder that answers with this package's modules.

It is last in sys.meta_path, so a real flash-attn is always found first. It also answers importlib.metadata, because
transformers asks for the distribution "flash-attn" and its version before it uses flash_attn at all.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

# The interface that is served; the local part says by whom, as flash-attn's wheels say what they were built for.
VERSION = "2.8.3+packing.ops"

_HERE = "packing_ops.integrations.flash_attn"
_MODULES = {
    "flash_attn": f"{_HERE}.flash_attn_interface",
    "flash_attn.flash_attn_interface": f"{_HERE}.flash_attn_interface",
    "flash_attn.bert_padding": f"{_HERE}.bert_padding",
    "flash_attn.layers": f"{_HERE}.layers",
    "flash_attn.layers.rotary": f"{_HERE}.layers.rotary",
    "flash_attn.ops": None,
    "flash_attn.ops.triton": None,
    "flash_attn.ops.triton.rotary": f"{_HERE}.layers.rotary",
}
_PACKAGES = {name.rpartition(".")[0] for name in _MODULES}


def install_flash_attn_alias() -> bool:
    """Let ``import flash_attn`` find packing_ops, in this process and only where flash-attn is not installed.

    Call it before the code that imports flash_attn; a transformers that has already looked for it looks again.
    Harmless when called twice.

    Served: flash_attn (the functions of flash_attn_interface), flash_attn.bert_padding, flash_attn.layers.rotary
    (apply_rotary_emb), flash_attn.ops.triton.rotary (apply_rotary), ``__version__`` and the metadata of a
    distribution "flash-attn". Anything else of flash_attn is a ModuleNotFoundError that says so.

    Returns:
        True with the alias in place; False where flash_attn is there already: a warning, and nothing is changed.

    Example:
        >>> install_flash_attn_alias()
        True
        >>> from flash_attn.bert_padding import unpad_input
        >>> revert_flash_attn_alias()
    """
    if _finder in sys.meta_path:
        return True
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        warnings.warn("flash_attn is installed and stays in use: no alias of packing_ops was made", stacklevel=2)
        return False
    sys.meta_path.append(_finder)
    for name in _MODULES:
        importlib.import_module(name)
    _make_transformers_look_again()
    return True


def revert_flash_attn_alias() -> None:
    """Revert install_flash_attn_alias: its finder and its modules go. What was imported from them keeps working.

    Example:
        >>> revert_flash_attn_alias()
        >>> importlib.util.find_spec("flash_attn") is None
        True
    """
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in _MODULES:
        if isinstance(getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None), _Loader):
            del sys.modules[name]
    _make_transformers_look_again()


class _Loader(Loader):
    """What makes the modules that revert_flash_attn_alias may take away."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        path = _MODULES[name]
        if path is not None:
            source = importlib.import_module(path)
            module.__file__ = source.__file__
            module.__doc__ = source.__doc__
            public = getattr(source, "__all__", None) or [n for n in vars(source) if n.startswith("flash_attn_")]
            module.__dict__.update({n: getattr(source, n) for n in public})
        if name == "flash_attn":
            module.__dict__["__version__"] = VERSION


_METADATA = {
    "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
    "Summary: flash-attn's functions by packing_ops (install_flash_attn_alias)\n",
    "top_level.txt": "flash_attn\n",
}


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a flash-attn that nobody installed; its summary says what it is."""

    def read_text(self, filename: str) -> str | None:
        return _METADATA.get(str(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


_Context = importlib.metadata.DistributionFinder.Context


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _MODULES:
            return ModuleSpec(fullname, _Loader(), origin=_HERE, is_package=fullname in _PACKAGES)
        if fullname.startswith("flash_attn."):
            # No name= here: with it, "from flash_attn import x" would replace this message.
            raise ModuleNotFoundError(
                f"{fullname} is not served by packing_ops' alias of flash_attn, which has {', '.join(_MODULES)}; "
                "install flash-attn itself for the rest"
            )
        return None

    def find_distributions(self, context: _Context = _Context()) -> Iterator[importlib.metadata.Distribution]:  # noqa: B008
        if context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == "flash-attn":
            yield _Distribution()


_finder = _Finder()


def _make_transformers_look_again() -> None:
    """Make transformers look again: it remembers what it found."""
    checks = sys.modules.get("transformers.utils.import_utils")
    mapping = getattr(checks, "PACKAGE_DISTRIBUTION_MAPPING", {})  # transformers 5.17 makes it at its import
    mapping.pop("flash_attn", None)
    if _finder in sys.meta_path:
        mapping["flash_attn"] = ["flash-attn"]
    for name in ("_package_distribution_mapping", *(n for n in dir(checks) if n.startswith("is_flash_attn"))):
        forget = getattr(getattr(checks, name, None), "cache_clear", None)
        if forget is not None:
            forget()
