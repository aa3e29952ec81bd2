"""Shortens the output of a build to progress and compiler messages; all of it goes to a log file."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

STEP = re.compile(r"(\[\d+/\d+\]) .* -c (\S+) -o ")
COUNTED = re.compile(r"\[(\d+)/(\d+)\] ")
LINK = re.compile(r"\S+ .*-shared .* -o (\S+)")


def shown(lines: Iterable[str], root: Path) -> Iterator[str]:
    """The lines of `ninja -v` and of the linker, with each command replaced by the file that it compiles or links."""
    command_follows = False
    for line in lines:
        step = STEP.match(line)
        if step:
            yield f"{step[1]} {os.path.relpath(step[2], root)}\n"
        elif link := LINK.match(line):
            yield f"linking {os.path.relpath(link[1])}\n"
        elif not command_follows:
            yield line
        command_follows = line.startswith("FAILED: ")  # ninja repeats the command of a step that failed


def brief(lines: Iterable[str], in_place: bool) -> Iterator[str]:
    """On a terminal each step's line overwrites the one before; elsewhere there is one line for every quarter of the
    steps.
    """
    quarter, is_open = 0, False
    for line in lines:
        step = COUNTED.match(line)
        if step and in_place:
            yield f"\r{line.rstrip()}\x1b[K"
        elif step:
            before, quarter = quarter, 4 * int(step[1]) // int(step[2])
            if quarter > before:
                yield line
        else:
            yield f"\n{line}" if is_open else line
        is_open = in_place and bool(step)
    if is_open:
        yield "\n"


def _copy(pipe: int, terminal: int, log: Path, root: Path) -> None:
    def logged() -> Iterator[str]:
        with log.open("w") as file, open(pipe, errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(OSError):  # no room: compilers, which wait for us, say so themselves
                    file.write(line)
                    file.flush()
                yield line

    for line in brief(shown(logged(), root), in_place=os.isatty(terminal)):
        os.write(terminal, line.encode(errors="replace"))


@contextlib.contextmanager
def progress(log: Path, root: Path) -> Iterator[None]:
    """Redirects stdout and stderr, of child processes too, to ``log``, and prints a short form on stdout. The linker
    writes its errors to stderr.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal, errors = os.dup(1), os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    reader = threading.Thread(target=_copy, args=(read, terminal, log, root))
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(terminal, 1)
        os.dup2(errors, 2)
        reader.join()
        os.close(terminal)
        os.close(errors)
