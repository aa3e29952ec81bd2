"""Files to records, one after the other, each with the place where it stands."""

import json
import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path

from packing_ops.report.examples import KEYS, Unreadable

ROWS = 1024  # read at a time
LONGEST = 2**26  # bytes of a line: no example has as many
PARQUET = b"PAR1"


def records(path: Path, advance: Callable[[float], None]) -> Iterator[tuple[str, object]]:
    """(place, record) of every record of a file; an Unreadable in the place of a line that is no JSON.

    ``advance`` is told what part of the file, 0 to 1, was read since it was last called.
    """
    return _saved_dataset(path, advance) if path.is_dir() else _file(path, advance)


def _file(path: Path, advance) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        is_parquet = path.suffix == ".parquet"
        if file.seekable():  # what is read of a pipe is gone
            is_parquet = file.read(len(PARQUET)) == PARQUET or is_parquet
            file.seek(0)
        yield from _parquet(path, file, advance) if is_parquet else _json_lines(path, file, advance)


def _json_lines(path: Path, file: BufferedReader, advance) -> Iterator[tuple[str, object]]:
    size, read = os.fstat(file.fileno()).st_size, 0  # 0 for a pipe: nobody knows which part of it is read
    for number, (line, length) in enumerate(_lines(file), start=1):
        read += length
        if number % ROWS == 0:
            advance(read / size if size else 0)
            read = 0
        if number == 1 and line is not None and line.startswith(PARQUET):
            raise _no_pipe(path)
        if line is not None and not line.strip():
            continue
        try:
            record = _too_long() if line is None else json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of brackets
            record = Unreadable("corrupt", str(error))
        yield f"{path}, line {number}", record
    advance(read / size if size else 0)


def _lines(file: BufferedReader) -> Iterator[tuple[bytes | None, int]]:
    """Every line and how many bytes it was; None for one over LONGEST, of which no more is in memory at once."""
    while line := file.readline(LONGEST + 1):
        length = len(line)
        if length <= LONGEST or line.endswith(b"\n"):
            yield line, length
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST + 1)
            length += len(line)
        yield None, length


def _too_long() -> Unreadable:
    return Unreadable("corrupt", f"expected a line of at most {LONGEST:,} bytes, got more")


def _no_pipe(path: Path) -> ValueError:
    return ValueError(f"{path}: expected a file for Parquet, which is read from its end, got a pipe")


def _parquet(path: Path, file: BufferedReader, advance) -> Iterator[tuple[str, object]]:
    if not file.seekable():
        raise _no_pipe(path)
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs pyarrow: pip install packing_ops[data]") from error
    try:
        with pa.parquet.ParquetFile(path) as table:
            num_rows, names = table.metadata.num_rows, table.schema_arrow.names
            yield from _rows(
                str(path),
                names,
                num_rows,
                lambda known: table.iter_batches(batch_size=ROWS, columns=known),
                lambda rows: advance(rows / num_rows),
            )
    except (pa.ArrowException, OSError) as error:  # no Parquet, or damaged further on
        raise ValueError(f"{path}: {error}") from error


def _saved_dataset(path: Path, advance) -> Iterator[tuple[str, object]]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{path}: a saved dataset needs datasets: pip install packing_ops[data]") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, IndexError) as error:  # IndexError: saved without rows
        raise ValueError(f"{path}: datasets cannot load it: {error}") from error
    splits = {"": loaded} if isinstance(loaded, datasets.Dataset) else loaded
    num_rows = sum(split.num_rows for split in splits.values())
    for split_name, split in splits.items():
        yield from _rows(
            str(path / split_name),
            split.column_names,
            split.num_rows,
            lambda known, split=split: split.select_columns(known).with_format("arrow").iter(ROWS),
            lambda rows: advance(rows / num_rows),
        )


def _rows(path: str, names: list[str], num_rows: int, read: Callable, advance) -> Iterator[tuple[str, dict]]:
    """``read(columns)`` gives batches of Arrow columns; the others are never read."""
    if not num_rows:
        return
    known = [name for name in names if name in KEYS]
    if not known:  # batches without columns have no rows
        yield from ((f"{path}, row {row}", dict.fromkeys(names)) for row in range(num_rows))
        advance(num_rows)
        return
    first = 0
    for batch in read(known):
        columns = [_values(column) for column in batch.columns]
        for row, values in enumerate(zip(*columns, strict=True), start=first):
            yield f"{path}, row {row}", dict(zip(batch.schema.names, values, strict=True))
        first += batch.num_rows
        advance(batch.num_rows)


def _values(column) -> list:
    """Python values; lists of numbers as numpy arrays, which is many times faster."""
    import pyarrow as pa

    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if lists and pa.types.is_primitive(column.type.value_type):
        return list(column.to_numpy(zero_copy_only=False))
    return column.to_pylist()
