"""Files to records, one after the other, each with the place where it stands."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from packing_ops.report.examples import KEYS, Unreadable

ROWS = 1024  # read at a time


def records(path: Path, advance: Callable[[float], None]) -> Iterator[tuple[str, object]]:
    """(place, record) of every record of a file; an Unreadable in the place of a line that is no JSON.

    ``advance`` is told what part of the file, 0 to 1, was read since it was last called.
    """
    if path.is_dir():
        return _saved_dataset(path, advance)
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    return _parquet(path, advance) if is_parquet or path.suffix == ".parquet" else _json_lines(path, advance)


def _json_lines(path: Path, advance) -> Iterator[tuple[str, object]]:
    size, read = path.stat().st_size, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            read += len(line)
            if number % ROWS == 0:
                advance(read / size)
                read = 0
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of brackets
                record = Unreadable("corrupt", str(error))
            yield f"{path}, line {number}", record
    advance(read / max(size, 1))


def _parquet(path: Path, advance) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs pyarrow: pip install packing_ops[data]") from error
    try:
        with pa.parquet.ParquetFile(path) as file:
            num_rows, names = file.metadata.num_rows, file.schema_arrow.names
            yield from _rows(
                str(path),
                names,
                num_rows,
                lambda known: file.iter_batches(batch_size=ROWS, columns=known),
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
