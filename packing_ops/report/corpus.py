"""Files to lengths, and to what was wrong where."""

import itertools
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from packing_ops._args import buffer_tensor
from packing_ops.report.examples import Unreadable, example_of
from packing_ops.report.progress import progress
from packing_ops.report.readers import ROWS, records
from packing_ops.report.tables import printable
from packing_ops.report.tokenizers import token_counter

NAMED = 100  # places of one kind that are named; all are counted


@dataclass
class Corpus:
    """Lengths of documents in the order of the files; ``{kind: {"count", "where"}}`` of what was not as it should be.

    Attributes:
        lengths: int64 ``[num_documents]``, tokens, none of them 0.
        num_read: examples in the files, the unreadable ones and those without tokens among them.
        unreadable: examples that are in no length: corrupt, missing keys, wrong type, lists of different length,
            refused by the tokenizer.
        noted: "empty" (no token: in no length) and "no target" (every label ignored, or nothing answered: counted).
    """

    lengths: torch.Tensor | None = None
    num_read: int = 0
    unreadable: dict = field(default_factory=dict)
    noted: dict = field(default_factory=dict)


def read_corpus(files: Sequence[Path], tokenizer: str = "bytes") -> Corpus:
    """Reads every file; what cannot be read is named on stderr.

    Raises:
        ImportError, OSError, ValueError: as make_report.
    """
    files = [Path(file) for file in files]
    sizes = [_size(file) for file in files]  # every file is there before the first is read
    count_tokens = token_counter(tokenizer)
    corpus, lengths = Corpus(), array("q")
    with progress(sum(sizes)) as advance:
        for file, size in zip(files, sizes, strict=True):
            for batch in _batches(records(file, lambda part, size=size: advance(part * size))):
                _add(batch, count_tokens, corpus, lengths)
    corpus.lengths = buffer_tensor(lengths, torch.int64)
    return corpus


def _add(batch: list[tuple[str, object]], count_tokens, corpus: Corpus, lengths: array) -> None:
    corpus.num_read += len(batch)
    places, examples = [], []
    for place, record in batch:
        try:
            if isinstance(record, Unreadable):
                raise record
            examples.append(example_of(record))
            places.append(place)
        except Unreadable as error:
            _refuse(corpus, error, place)
    for place, example, tokens in zip(places, examples, count_tokens(examples), strict=True):
        if isinstance(tokens, Unreadable):
            _refuse(corpus, tokens, place)
        elif tokens == 0:
            _note(corpus.noted, "empty", place)
        else:
            lengths.append(tokens)
            if not example.has_target:
                _note(corpus.noted, "no target", place)


def _refuse(corpus: Corpus, error: Unreadable, place: str) -> None:
    count = _note(corpus.unreadable, error.kind, place)
    if count <= NAMED:
        print(f"{printable(place)}: {error.kind}: {printable(str(error), most=500)}", file=sys.stderr)
    if count == NAMED + 1:
        print(f"{error.kind}: more of these are counted, not named", file=sys.stderr)


def _note(problems: dict, kind: str, place: str) -> int:
    problem = problems.setdefault(kind, {"count": 0, "where": []})
    problem["count"] += 1
    if problem["count"] <= NAMED:
        problem["where"].append(place)
    return problem["count"]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def _batches(items: Iterator) -> Iterator[list]:
    while batch := list(itertools.islice(items, ROWS)):
        yield batch
