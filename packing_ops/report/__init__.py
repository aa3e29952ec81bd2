"""What packing would save on a user's data (``python -m packing_ops report``), and what is installed (``info``).

readers.py      JSON lines and arrays, Parquet, saved datasets -> records
examples.py     a record -> the texts or tokens of its documents, or why it cannot be read
corpus.py       files -> lengths or tokens, and what was wrong with which line
statistics.py   lengths -> histogram, layouts, estimated time; tokens -> what prefix trees would save
tables.py, picture.py, info.py
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packing_ops._runtime.arguments import at_least
from packing_ops.packing import Overlong
from packing_ops.report.corpus import read_corpus
from packing_ops.report.statistics import layouts, length_statistics, savings


def make_report(
    files: Sequence[Path],
    *,
    tokenizer: str = "bytes",
    columns: Mapping[str, str] | None = None,
    capacity: int = 4096,
    batch_size: int = 8,
    dp: int = 1,
    overlong: Overlong = "truncate",
    hidden_size: int = 4096,
    prefix_trees: bool = False,
    group_by: str | None = None,
    buffer: int | None = None,
) -> dict[str, Any]:
    """Return everything that ``python -m packing_ops report`` prints, as plain numbers, strings, lists and dicts.

    Args:
        files: JSON lines or one JSON array (pipes, ``-`` for stdin and gzip too), Parquet files, or folders written by
            ``Dataset.save_to_disk``. An example is read by the first key that it has of ``input_ids``, ``messages``,
            ``conversations`` (ShareGPT), ``chosen`` and ``rejected`` (two documents), ``prompt`` and ``completion``,
            ``instruction`` and ``output`` (Alpaca), ``text``.
        tokenizer: ``"bytes"``, or the folder of a tokenizer that transformers loads, or a model's name, whose tokenizer
            is loaded from the Hugging Face Hub. Its chat template is given the
            ``tools`` and ``chat_template_kwargs`` of an example.
        columns: names of the file's columns where they differ from these: ``{"prompt": "question"}``.
        capacity: tokens of a packed row.
        batch_size: documents of a padded batch, per rank.
        dp: data-parallel ranks.
        overlong: what to do with documents over the capacity, as in pack_sequences.
        hidden_size: of the model whose FLOPs are estimated.
        prefix_trees: also compare the documents' tokens: what they share from the first one on, computed once.
        group_by: the same among examples with the same value in this column (a prompt, its id).
        buffer: also the rows of a PackedStream, in which that many examples wait.

    Returns:
        dict with ``settings``, ``examples`` (how many were read, and their documents), ``in_bytes`` (documents whose
        length is in bytes), ``unreadable`` and ``noted`` (examples by problem, each with ``count`` and the first
        ``where``, the unreadable ones with ``errors``), ``lengths``, ``overlong``, ``layouts``, and with prefix_trees
        or group_by ``prefix_trees`` (tokens, rows and visible pairs, ``alone`` and ``shared``).

    Example:
        >>> _ = Path("two.jsonl").write_text('{"text": "hello"}\\n{"text": "hi"}\\n')
        >>> report = make_report([Path("two.jsonl")], capacity=8, batch_size=2)
        >>> report["layouts"]["padded"]["fill"], report["layouts"]["ffd"]["fill"]
        (0.7, 0.875)

    Raises:
        ImportError: a library that a file or the tokenizer needs is not installed, with the extra that brings it.
        OSError: a file that cannot be opened.
        ValueError: a damaged Parquet file, gzip file or JSON array, an unknown column or option, a document over the
            capacity with ``overlong="error"``.
    """
    sizes = {"capacity": capacity, "batch_size": batch_size, "dp": dp, "hidden_size": hidden_size}
    for name, value in sizes.items():
        at_least(value, name, 1)
    options: dict[str, Any] = {**sizes, "overlong": overlong}
    if buffer is not None:
        options["buffer"] = at_least(buffer, "buffer", 1, "example")
    prefix_trees = prefix_trees or group_by is not None
    corpus = read_corpus(files, tokenizer, columns, keep_ids=prefix_trees, group_by=group_by)
    report = {
        "settings": {
            "files": [str(f) for f in files],
            "tokenizer": tokenizer,
            "columns": {**(columns or {})},
            **options,
        },
        "examples": {"read": corpus.num_read, "documents": corpus.lengths.numel(), "tokens": int(corpus.lengths.sum())},
        "in_bytes": corpus.num_bytes,
        "unreadable": corpus.unreadable,
        "noted": corpus.noted,
        "lengths": length_statistics(corpus.lengths),
        **layouts(corpus.lengths, **options),
    }
    if corpus.tokens is not None:
        found = savings(corpus.tokens, corpus.lengths, corpus.groups, capacity=capacity, overlong=overlong)
        report["prefix_trees"] = {"group_by": group_by, **found}
    return report


def save_json(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")
