"""Rows of lists in an Arrow table, put together into packed rows; needs numpy and pyarrow."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

import packing_ops as po
from packing_ops.packing import Overlong


def row_lengths(dataset: Any) -> np.ndarray[Any, Any]:
    """Return int64 ``[num_rows]``; null rows count 0."""
    lengths: list[np.ndarray[Any, Any]] = [np.zeros(0, np.int64)]
    for table in dataset.iter(batch_size=10_000):
        counts = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
                raise TypeError(f"dataset: expected lists in every column, got {column.type} in {name!r}")
            counts.append(pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64))
            if not np.array_equal(counts[-1], counts[0]):
                raise ValueError(
                    f"dataset: expected columns of equal length in every row, got other lengths in {name!r} than in "
                    f"{table.column_names[0]!r}"
                )
        lengths.append(counts[0])
    return np.concatenate(lengths)


def best_fit_bins(
    lengths: np.ndarray[Any, Any], seq_length: int, overlong: Overlong, chunk: int
) -> tuple[np.ndarray[Any, Any], ...]:
    """Return bin_offsets, and row, start, length of every piece."""

    def pack(rows: np.ndarray[Any, Any]) -> po.Packing:
        return po.pack_sequences(torch.from_numpy(lengths[rows]), seq_length, strategy="bfd", overlong=overlong)

    rows = np.flatnonzero(lengths)
    packings, chunks = [pack(rows)], [rows]
    if packings[0].num_bins > packings[0].lower_bound and chunk < len(lengths):
        # No heuristic over the whole is sure to beat one over the parts: take the parts where they do better.
        parts = np.split(rows, np.searchsorted(rows, range(chunk, len(lengths), chunk)))
        packed_parts = [pack(part) for part in parts]
        if sum(p.num_bins for p in packed_parts) < packings[0].num_bins:
            packings, chunks = packed_parts, parts
    sizes = np.concatenate([p.bin_offsets.diff().numpy() for p in packings])
    pieces = [part[p.item_indices.numpy()] for part, p in zip(chunks, packings, strict=True)]
    starts, piece_lengths = ([getattr(p, name).numpy() for p in packings] for name in ("starts", "lengths"))
    return _offsets(sizes), *map(np.concatenate, (pieces, starts, piece_lengths))


def packed_table(dataset: Any, bins: tuple[np.ndarray[Any, Any], ...], first: int, last: int) -> pa.Table:
    """Return bins ``first : last`` as an arrow table, one row each."""
    bin_offsets, rows, starts, lengths = bins
    pieces = slice(bin_offsets[first], bin_offsets[last])
    starts, lengths = starts[pieces], lengths[pieces]
    documents = bin_offsets[first : last + 1] - bin_offsets[first]
    ends = _offsets(lengths)
    wanted, index = np.unique(rows[pieces], return_inverse=True)
    table = dataset[wanted.tolist()].combine_chunks()
    columns = []
    for column in table.columns:
        source = column.chunks[0] if column.num_chunks else pa.array([], column.type)
        offset_type = source.offsets.type.to_pandas_dtype()
        begins = source.offsets.to_numpy()[index] + starts
        tokens = np.repeat(begins - ends[:-1], lengths) + np.arange(ends[-1])
        columns.append(
            type(source).from_arrays(ends[documents].astype(offset_type), source.values.take(pa.array(tokens)))
        )
    counts = pa.array(lengths, pa.from_numpy_dtype(offset_type))
    columns.append(pa.ListArray.from_arrays(documents.astype(np.int32), counts))
    return pa.Table.from_arrays(columns, names=[*table.column_names, "seq_lengths"])


def _offsets(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
