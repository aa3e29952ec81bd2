"""Names that a package finds when they are asked for: subpackages, what needs another library, older names."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any


def old_names(package: dict[str, Any], renamed: dict[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package, whose ``globals()`` are given, that finds functions by older names too,
    and warns of it. renamed: {older name: name}.
    """
    module = package["__name__"]
    return lambda name: getattr(sys.modules[module], _newer(name, renamed, f"module {module!r}"))


def old_attributes(renamed: dict[str, str]) -> Callable[[object, str], object]:
    """Return the ``__getattr__`` of a class that finds attributes by older names too, and warns of it."""
    return lambda self, name: getattr(self, _newer(name, renamed, f"{type(self).__name__!r} object"))


def _newer(name: str, renamed: dict[str, str], owner: str) -> str:
    """Return what an older name is called now, with a warning; AttributeError for a name that never was."""
    if name not in renamed:
        raise AttributeError(f"{owner} has no attribute {name!r}")
    warnings.warn(f"{name}: it is called {renamed[name]} now", DeprecationWarning, stacklevel=3)
    return renamed[name]


def lazy_names(
    package: dict[str, Any], modules: dict[str, str], library: str, needs: str, renamed: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its names at their first use.

    Args:
        package: its ``globals()``.
        modules: {name: module of the package that defines it}.
        library: what these modules import; the package lists its names where it is installed.
        needs: the end of the error where it is missing.
        renamed: {older name: name}, for old_names.
    """
    older = old_names(package, renamed)

    def __getattr__(name: str) -> object:
        if name not in modules:
            return older(name)
        try:
            return getattr(importlib.import_module(f"{package['__name__']}.{modules[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != library:
                raise
            raise ImportError(f"{name} {needs}") from error

    return __getattr__, lambda: sorted({*package, *(modules if importlib.util.find_spec(library) else ())})


def lazy_modules(
    package: dict[str, Any], libraries: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its subpackages at their first use, and lists
    those whose library is installed. libraries: {subpackage: its library}.
    """

    def __getattr__(name: str) -> object:
        if name not in libraries:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        return importlib.import_module(f"{package['__name__']}.{name}")

    def __dir__() -> list[str]:
        return sorted({*package, *(name for name, library in libraries.items() if importlib.util.find_spec(library))})

    return __getattr__, __dir__
