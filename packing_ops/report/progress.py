"""Progress of reading, on stderr: rich's bar where rich is installed and stderr is a terminal, else nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: float, what: str = "reading") -> Iterator[Callable[[float], None]]:
    """Return a function to call with how much more of ``total`` is done."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda amount: None
        return
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)
