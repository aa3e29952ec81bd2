"""The records of a file, one after the other, each with its place (file and line, element or row)."""

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from packing_ops.report.chats import Unreadable
from packing_ops.report.examples import KEYS
from packing_ops.report.json_array import elements

ROWS = 1024  # read at a time
LONGEST = 2**26  # bytes of a line, characters of an element: no example has as many
PARQUET, GZIP, BYTE_ORDER_MARK = b"PAR1", b"\x1f\x8b", b"\xef\xbb\xbf"
STDIN = Path("-")

Advance = Callable[[float], None]
Records = Iterator[tuple[str, object]]  # each with its place


def records(path: Path, advance: Advance, columns: Collection[str] = KEYS) -> Records:
    """Yield (place, record) of every record of a file; for a line that is no JSON the record is an Unreadable.

    ``advance`` gets the part of the file, 0 to 1, that was read since the last call. ``columns``: the only ones
    that are read of files which have columns; the others are None in their records.
    """
    if path == STDIN:
        if sys.stdin is None:
            raise ValueError("stdin: expected a file or a pipe, got none: it is closed")
        yield from _opened(path, "stdin", sys.stdin.buffer, advance, columns)
    elif path.is_dir():
        yield from _saved_dataset(path, advance, columns)
    else:
        with path.open("rb") as file:
            yield from _opened(path, str(path), file, advance, columns)


def _opened(path: Path, name: str, source: BinaryIO, advance: Advance, columns: Collection[str]) -> Records:
    head, file = _peeked(source)
    if head.startswith(PARQUET) or path.suffix == ".parquet":
        if path == STDIN or not source.seekable():
            raise ValueError(f"{name}: expected a file for Parquet, which is read from its end, got a pipe")
        yield from _parquet(path, advance, columns)
        return
    tick = _progress_of(source, advance)
    try:
        if head.startswith(GZIP):
            head, file = _peeked(gzip.GzipFile(fileobj=file))
        is_array = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
        yield from (_json_array if is_array else _json_lines)(name, file, tick)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: damaged gzip: {error}") from error
    tick()


class _After(io.RawIOBase):
    """``head``, which was read to detect the format, followed by the rest of ``source``: a pipe has no seek."""

    def __init__(self, head: bytes, source: Any) -> None:  # anything with read1
        self.head, self.source = head, source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.head[: len(buffer)] or self.source.read1(len(buffer))
        self.head = self.head[len(data) :]
        buffer[: len(data)] = data
        return len(data)


def _peeked(source: BinaryIO | gzip.GzipFile) -> tuple[bytes, io.BufferedReader]:
    """Return the first bytes, up to one that is not blank, and a file that starts with them again."""
    head = source.read(len(PARQUET))
    while not head.removeprefix(BYTE_ORDER_MARK).strip() and len(head) < ROWS and (more := source.read(1)):
        head += more
    return head, io.BufferedReader(_After(head, source), 1 << 20)


def _progress_of(source: BinaryIO, advance: Advance) -> Callable[[], None]:
    """Return a function that reports to ``advance`` how far ``source`` is read; for a pipe it does nothing."""
    size, before = os.fstat(source.fileno()).st_size if source.seekable() else 0, 0

    def tick() -> None:
        nonlocal before
        if size:
            now = source.tell()
            advance((now - before) / size)
            before = now

    return tick


def _json_lines(name: str, file: io.BufferedReader, tick: Callable[[], None]) -> Records:
    for number, line in enumerate(_lines(file), start=1):
        if number % ROWS == 0:
            tick()
        if line is not None and not line.strip():
            continue
        try:
            if line is None:
                raise ValueError(f"expected a line of at most {LONGEST:,} bytes, got more")
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of brackets
            record = Unreadable("corrupt", str(error))
        yield f"{name}, line {number}", record


def _lines(file: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield every line; None for one over LONGEST, of which no more is in memory at once."""
    while line := file.readline(LONGEST + 1):
        if len(line) <= LONGEST or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST + 1)
        yield None


def _json_array(name: str, file: io.BufferedReader, tick: Callable[[], None]) -> Records:
    number = 0
    try:
        for number, record in enumerate(elements(file, LONGEST), start=1):
            if number % ROWS == 0:
                tick()
            yield f"{name}, element {number}", record
    except (ValueError, RecursionError) as error:  # where the next element begins nobody knows
        raise ValueError(f"{name}: damaged JSON array after element {number}: {error}") from error


def _parquet(path: Path, advance: Advance, columns: Collection[str]) -> Records:
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from error
    try:
        with pa.parquet.ParquetFile(path) as table:
            num_rows, names = table.metadata.num_rows, table.schema_arrow.names
            yield from _rows(
                str(path),
                names,
                columns,
                num_rows,
                lambda known: table.iter_batches(batch_size=ROWS, columns=known),
                lambda rows: advance(rows / num_rows),
            )
    except (pa.ArrowException, OSError) as error:  # no Parquet, or damaged further on
        raise ValueError(f"{path}: {error}") from error


def _saved_dataset(path: Path, advance: Advance, columns: Collection[str]) -> Records:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{path}: a saved dataset needs datasets: pip install datasets") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, IndexError) as error:  # IndexError: saved without rows
        raise ValueError(f"{path}: datasets cannot load it: {error}") from error
    splits = {"": loaded} if isinstance(loaded, datasets.Dataset) else loaded
    num_rows = sum(split.num_rows for split in splits.values())
    for split_name, split in splits.items():

        def read(known: list[str], split: Any = split) -> Any:
            return split.select_columns(known).with_format("arrow").iter(ROWS)

        yield from _rows(
            str(path / split_name),
            split.column_names,
            columns,
            split.num_rows,
            read,
            lambda rows: advance(rows / num_rows),
        )


def _rows(
    path: str,
    names: list[str],
    columns: Collection[str],
    num_rows: int,
    read: Callable[[list[str]], Any],
    advance: Advance,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows of the batches of Arrow columns that ``read`` gives: of ``names`` those that are in ``columns``."""
    if not num_rows:
        return
    known = [name for name in names if name in columns]
    if not known:  # batches without columns have no rows
        yield from ((f"{path}, row {row}", dict.fromkeys(names)) for row in range(num_rows))
        advance(num_rows)
        return
    first, unread = 0, dict.fromkeys(names)
    for batch in read(known):
        values_of = [_values(column) for column in batch.columns]
        for row, values in enumerate(zip(*values_of, strict=True), start=first):
            yield f"{path}, row {row}", unread | dict(zip(batch.schema.names, values, strict=True))
        first += batch.num_rows
        advance(batch.num_rows)


def _values(column: Any) -> list[Any]:
    """Return Python values; lists of numbers as numpy arrays, which is many times faster."""
    import pyarrow as pa
    import pyarrow.compute

    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    numbers = lists and pa.types.is_primitive(column.type.value_type)
    if numbers and not pa.compute.list_flatten(column).null_count:  # one null would make floats of all rows' numbers
        return list(column.to_numpy(zero_copy_only=False))
    return column.to_pylist()
