"""Packages that import a public name at its first use, so that they can be imported without the library it needs."""

import importlib
import importlib.util
from collections.abc import Callable


def lazy_names(package: dict, modules: dict[str, str], library: str, needs: str) -> tuple[Callable, Callable]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``globals()``.
        modules: {name: module of the package that defines it}.
        library: what these modules import; the package lists its names where it is installed.
        needs: the end of the error where it is missing.
    """

    def __getattr__(name):
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package['__name__']}.{modules[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != library:
                raise
            raise ImportError(f"{name} {needs}") from error

    def __dir__():
        return sorted({*package, *(modules if importlib.util.find_spec(library) else ())})

    return __getattr__, __dir__
