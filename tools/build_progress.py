"""ninja's output as its progress and what compilers say; all of it in a log."""

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
    """Of `ninja -v` and what links: the file of each command in place of the command."""
    command_follows = False
    for line in lines:
        step = STEP.match(line)
        if step:
            yield f"{step[1]} {os.path.relpath(step[2], root)}\n"
        elif link := LINK.match(line):
            yield f"linking {os.path.relpath(link[1])}\n"
        elif not command_follows:
            yield line
        command_follows = line.startswith("FAILED: ")  # once more, as it came with its step


def brief(lines: Iterable[str], in_place: bool) -> Iterator[str]:
    """Each step's line in place of the one before, as a terminal can; or one line for every quarter of the steps."""
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
    """What is written to file descriptor 1 meanwhile, by other processes too, goes to ``log``, and in brief on."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    terminal = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    reader = threading.Thread(target=_copy, args=(read, terminal, log, root))
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)
        reader.join()
        os.close(terminal)
