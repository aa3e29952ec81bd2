"""The records of a file, one after the other, each with its place (file and line, element or row)."""

import codecs
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from packing_ops.report.examples import KEYS, Unreadable

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
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if number % ROWS == 0:
            tick()
        too_long = len(line) > LONGEST and not line.endswith(b"\n")
        while too_long and line and not line.endswith(b"\n"):  # no more of it is in memory at once
            line = file.readline(LONGEST + 1)
        if not too_long and not line.strip():
            continue
        try:
            if too_long:
                raise ValueError(f"expected a line of at most {LONGEST:,} bytes, got more")
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of brackets
            record = Unreadable("corrupt", str(error))
        yield f"{name}, line {number}", record


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
            known = [name for name in names if name in columns]
            batches = table.iter_batches(batch_size=ROWS, columns=known) if known else ()
            yield from _rows(path, names, num_rows, batches, advance, 1 / max(num_rows, 1))
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
        known = [name for name in split.column_names if name in columns]
        batches = split.select_columns(known).with_format("arrow").iter(ROWS) if known else ()
        yield from _rows(path / split_name, split.column_names, split.num_rows, batches, advance, 1 / max(num_rows, 1))


def _rows(
    path: Path, names: list[str], num_rows: int, batches: Any, advance: Advance, part: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of batches of Arrow columns, which have some of ``names`` or none, and so no rows. part: of the
    file, that a row is.
    """
    row, unread = 0, dict.fromkeys(names)
    for batch in batches if num_rows else ():
        for values in zip(*map(_values, batch.columns), strict=True):
            yield f"{path}, row {row}", unread | dict(zip(batch.schema.names, values, strict=True))
            row += 1
        advance(batch.num_rows * part)
    if row < num_rows:
        yield from ((f"{path}, row {row}", dict(unread)) for row in range(num_rows))
        advance(num_rows * part)


def _values(column: Any) -> list[Any]:
    """Return Python values; lists of numbers as numpy arrays, which is many times faster."""
    import pyarrow as pa
    import pyarrow.compute

    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    numbers = lists and pa.types.is_primitive(column.type.value_type)
    if numbers and not pa.compute.list_flatten(column).null_count:  # one null would make floats of all rows' numbers
        return list(column.to_numpy(zero_copy_only=False))
    return column.to_pylist()


# --- the elements of a JSON array, one after the other ---


CHUNK = 1 << 20  # bytes read at a time, at first
BLANKS = re.compile(r"[ \t\r\n]*")


class _Text:
    """What is read of a file and not yet used: ``text[at:]``."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.decoder = file, codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.ended = "", 0, False

    def more(self, size: int = 0) -> bool:
        """Read on; return False at the end of the file."""
        data = b"" if self.ended else self.file.read(size or CHUNK)
        self.ended = not data
        self.text, self.at = self.text[self.at :] + self.decoder.decode(data, final=not data), 0
        return not self.ended

    def next(self) -> str:
        """Return the next character that is no blank, which stays; "" at the end."""
        while True:
            self.at = BLANKS.match(self.text, self.at).end()  # type: ignore[union-attr]  # none is a match too
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def expect(self, wanted: str) -> str:
        """Take the next character, which is one of ``wanted``."""
        found = self.next()
        if not found or found not in wanted:
            raise ValueError(f"expected {' or '.join(wanted)}, got {self.text[self.at : self.at + 20] or 'the end'!r}")
        self.at += 1
        return found


def elements(file: BinaryIO, longest: int) -> Iterator[object]:
    """Yield every element of the array that ``file`` (bytes, UTF-8) is, decoded.

    A file of gigabytes is never in memory.

    Example:
        >>> import io
        >>> list(elements(io.BytesIO(b'[{"text": "a"}, 2]'), 100))
        [{'text': 'a'}, 2]

    Raises:
        ValueError: no JSON, more behind the array, an element of more than ``longest`` characters.
        RecursionError: brackets in brackets, thousands of them.
    """
    text, decode = _Text(file), json.JSONDecoder().raw_decode
    text.expect("[")
    after = text.expect("]") if text.next() == "]" else ","
    while after == ",":
        text.next()
        size = CHUNK
        while True:  # read on until it can be decoded and something follows: 12 may be the beginning of 123
            record, error = None, ""
            try:
                record, end = decode(text.text, text.at)
            except json.JSONDecodeError as failed:
                error, end = f"{failed.msg}, got {text.text[failed.pos : failed.pos + 20]!r}", len(text.text)
            if end - text.at > longest:
                raise ValueError(
                    f"expected an element of at most {longest:,} characters, got more ({error or 'it is complete'})"
                )
            if (not error and end < len(text.text)) or not text.more(size):
                break
            size *= 2  # of a long element, so that decoding it anew takes no longer than reading it
        if error:
            raise ValueError(error)
        text.at = end
        yield record
        after = text.expect(",]")
    if text.next():
        raise ValueError(f"expected nothing behind the array, got {text.text[text.at : text.at + 20]!r}")
