"""Names that a module gives at their first use: those that need another library, and those that have moved."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any


def lazy_names(
    package: dict[str, Any], modules: dict[str, str], library: str, needs: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``globals()``.
        modules: {name: module of the package that defines it}.
        library: what these modules import; the package lists its names where it is installed.
        needs: the end of the error where it is missing.
    """

    def __getattr__(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package['__name__']}.{modules[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != library:
                raise
            raise ImportError(f"{name} {needs}") from error

    def __dir__() -> list[str]:
        return sorted({*package, *(modules if importlib.util.find_spec(library) else ())})

    return __getattr__, __dir__


def moved_names(module: str, homes: dict[str, str]) -> Callable[[str], object]:
    """``__getattr__`` of a module that names have moved away from, for one minor version: {name: package that has it}."""

    def __getattr__(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warning = f"{module}.{name} goes with the next minor version: import {name} from {homes[name]}"
        warnings.warn(warning, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(homes[name]), name)

    return __getattr__
