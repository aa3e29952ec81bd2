"""Lengths or tokens of all documents in the files, and which examples were wrong, where and why."""

import itertools
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from packing_ops._runtime.arguments import buffer_tensor
from packing_ops.report.examples import KEYS, Example, FormReader, Unreadable, as_json, for_template
from packing_ops.report.readers import ROWS, STDIN, records
from packing_ops.report.tables import printable, progress

Ids = Sequence[int]
Counter = Callable[[list[Example]], Sequence[int | Ids | Unreadable]]


def token_counter(tokenizer: str, *, keep_ids: bool = False) -> Counter:
    """Return a function that counts tokens: ``"bytes"`` counts the UTF-8 bytes of the texts, no template and no special
    tokens; else a folder or a model's name.

    With ``keep_ids`` the counter gives the tokens themselves.

    Raises:
        ImportError: transformers is not installed.
        OSError: no such folder or model, or no tokenizer in it.
        ValueError: a tokenizer that is code of its folder, which is not run.
    """
    if tokenizer == "bytes":
        return _bytes_of if keep_ids else _count_bytes
    return _pretrained(tokenizer, keep_ids)


def without_code(auto: Any, source: str | Path, name: str, **options: Any) -> Any:
    """Call ``auto.from_pretrained(source)`` of a class of transformers, which then neither runs code of the source nor
    asks on stdin.

    Raises:
        ValueError: what needs such code; starts with ``name``.
    """
    try:
        return auto.from_pretrained(source, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        wanted = f"{name}: expected one that transformers loads without code of its folder, which is not run here"
        raise ValueError(f"{wanted}, got {str(source)!r}") from None


def _bytes_of(examples: list[Example]) -> list[Ids]:
    return ["".join(example.texts).encode() if example.ids is None else example.ids.tolist() for example in examples]


def _count_bytes(examples: list[Example]) -> list[int]:
    return [
        sum(len(text) if text.isascii() else len(text.encode()) for text in example.texts)
        if example.num_tokens is None
        else example.num_tokens
        for example in examples
    ]


def _loaded(source: str) -> Any:
    is_folder = Path(source).is_dir()
    wanted = f"tokenizer: expected bytes, a tokenizer's folder or a model's name, got {source!r}"
    if not is_folder and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise FileNotFoundError(wanted)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError("tokenizer: it needs transformers: pip install 'transformers>=5.17'") from error
    try:
        return without_code(AutoTokenizer, source, "tokenizer", local_files_only=is_folder)
    except OSError as error:
        if is_folder:
            raise
        raise FileNotFoundError(f"{wanted}: {str(error).partition(chr(10))[0]}") from None


def _pretrained(source: str, keep_ids: bool) -> Counter:
    """Count with the tokenizer's special tokens; chats through its template when it has one."""
    tokenizer = _loaded(source)
    tokenizer.model_max_length = int(1e30)  # it would warn about every long text

    def templated(example: Example) -> str | Unreadable:
        try:
            return tokenizer.apply_chat_template(
                for_template(example.messages or []), tools=example.tools, tokenize=False, **example.template_options
            )
        except Exception as error:  # a template is a program of its author's, and raises what it likes
            return Unreadable("refused by the tokenizer", f"chat template: {error}")

    def count(examples: list[Example]) -> list[int | Ids | Unreadable]:
        counts: list[int | Ids | Unreadable] = [[] if keep_ids else 0] * len(examples)
        plain: dict[int, str] = {}  # texts by index
        chats: dict[int, str] = {}
        for i, example in enumerate(examples):
            if example.ids is not None:
                counts[i] = example.ids.tolist() if keep_ids else len(example.ids)
            elif not any(example.texts):
                continue  # only special tokens are no example
            elif not (example.messages and tokenizer.chat_template):
                plain[i] = "".join(example.texts)
            elif isinstance(text := templated(example), Unreadable):
                counts[i] = text
            else:
                chats[i] = text
        for texts, special_tokens in ((plain, True), (chats, False)):  # a template writes special tokens itself
            if texts:
                encoded = tokenizer(list(texts.values()), add_special_tokens=special_tokens)["input_ids"]
                for i, ids in zip(texts, encoded, strict=True):
                    counts[i] = ids if keep_ids else len(ids)
        return counts

    return count


# --- files to lengths ---


NAMED = 100  # places, and different errors, that are listed per kind; all are counted

Problems = dict[str, dict[str, Any]]  # by kind


@dataclass
class Corpus:
    """Lengths of documents in the order of the files, and ``{kind: {"count", "where"}}`` of examples with problems.

    Attributes:
        lengths: int64 ``[num_documents]``, tokens, each at least 1.
        num_read: examples in the files, the unreadable ones and those without tokens among them.
        num_bytes: documents whose length is in bytes.
        unreadable: examples that are in no length: corrupt, missing keys, wrong type, images and other parts,
            lists of different length, refused by the tokenizer. Each kind has ``errors`` too: those that differ in more
            than numbers, with ``error``, ``count`` and the ``first`` place.
        noted: "empty" (no token: in no length) and "no target" (every label ignored, or nothing answered: counted).
        tokens: int64, those of the documents, end to end; only with ``keep_ids``.
        groups: int64 ``[num_documents]``, equal where the field of ``group_by`` is; only with it.
    """

    lengths: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    num_read: int = 0
    num_bytes: int = 0
    unreadable: Problems = field(default_factory=dict)
    noted: Problems = field(default_factory=dict)
    tokens: torch.Tensor | None = None
    groups: torch.Tensor | None = None


def read_corpus(
    files: Sequence[Path],
    tokenizer: str = "bytes",
    columns: Mapping[str, str] | None = None,
    *,
    keep_ids: bool = False,
    group_by: str | None = None,
) -> Corpus:
    """Read every file; what cannot be read is listed on stderr at the end, equal errors in one line.

    Args:
        files, tokenizer, columns: as make_report.
        keep_ids: keep the tokens, not only their number.
        group_by: a column of any values, which every example must have.

    Raises:
        ImportError, OSError, ValueError: as make_report.
    """
    files, columns = [Path(file) for file in files], columns or {}
    if unknown := [key for key in columns if key not in KEYS]:
        raise ValueError(f"columns: expected {', '.join(KEYS)} to the left of =, got {unknown[0]!r}")
    # Every file is there before the first is read.
    sizes = [
        0 if file == STDIN else sum(each.stat().st_size for each in (file.rglob("*") if file.is_dir() else [file]))
        for file in files
    ]
    counter = token_counter(tokenizer, keep_ids=keep_ids)
    reader = _Reader(counter, columns, tokenizer == "bytes", group_by=group_by)
    names = reader.forms.keys.keys() | ({group_by} if group_by is not None else set())
    try:
        with progress(sum(sizes)) as advance:
            for file, size in zip(files, sizes, strict=True):
                found = records(file, lambda part, size=size: advance(part * size), names)  # type: ignore[misc]
                while batch := list(itertools.islice(found, ROWS)):
                    reader.add(batch)
    finally:
        _print_errors(reader.corpus.unreadable)
    corpus = reader.corpus
    corpus.lengths = buffer_tensor(reader.lengths, torch.int64)
    corpus.tokens = buffer_tensor(reader.tokens, torch.int64) if keep_ids else None
    corpus.groups = buffer_tensor(reader.groups, torch.int64) if group_by is not None else None
    return corpus


class _Reader:
    """Records to lengths, and to tokens and groups where these are asked for."""

    def __init__(
        self, count_tokens: Counter, columns: Mapping[str, str], in_bytes: bool, *, group_by: str | None
    ) -> None:
        self.count_tokens, self.forms, self.in_bytes = count_tokens, FormReader(columns), in_bytes
        self.corpus, self.lengths, self.tokens, self.groups = Corpus(), array("q"), array("q"), array("q")
        self.group_by = group_by
        self.group_numbers: dict[str, int] = {}

    def add(self, batch: list[tuple[str, object]]) -> None:
        self.corpus.num_read += len(batch)
        found = []
        for place, record in batch:
            try:
                if isinstance(record, Unreadable):
                    raise record
                examples, group = self.forms.examples_of(record), 0
                if self.group_by is not None:
                    value = record.get(self.group_by)  # type: ignore[attr-defined]  # a dict, as it was read
                    if value is None:
                        got = ", ".join(map(str, record))  # type: ignore[call-overload]
                        raise Unreadable("missing keys", f"expected {self.group_by} (--group-by), got {got}")
                    group = self.group_numbers.setdefault(as_json(value), len(self.group_numbers))
                found.append((place, examples, group))
            except Unreadable as error:
                self._refuse(error, place)
            except RecursionError as error:  # brackets in brackets that the JSON decoder has let pass
                self._refuse(Unreadable("corrupt", str(error)), place)
        counts = iter(self.count_tokens([example for _, examples, _ in found for example in examples]))
        for place, examples, group in found:
            self._add(place, examples, list(itertools.islice(counts, len(examples))), group)

    def _add(self, place: str, examples: list[Example], counts: list[int | Ids | Unreadable], group: int) -> None:
        """Add the documents of a record: all of them or nothing."""
        if refused := next((tokens for tokens in counts if isinstance(tokens, Unreadable)), None):
            self._refuse(refused, place)
            return
        lengths = [tokens if isinstance(tokens, int) else len(tokens) for tokens in counts]  # type: ignore[arg-type]
        if not all(lengths):
            _note(self.corpus.noted, "empty", place)
            return
        self.lengths.extend(lengths)
        for tokens in counts:
            self.tokens.extend(() if isinstance(tokens, int) else tokens)  # type: ignore[arg-type]
        if self.group_by is not None:
            self.groups.extend([group] * len(lengths))
        self.corpus.num_bytes += sum(self.in_bytes and example.num_tokens is None for example in examples)
        if not examples[0].has_target:
            _note(self.corpus.noted, "no target", place)

    def _refuse(self, error: Unreadable, place: str) -> None:
        problem, text = _note(self.corpus.unreadable, error.kind, place), printable(str(error), most=500)
        errors = problem.setdefault("errors", {})
        alike = re.sub(r"\d+", "0", text)
        if alike in errors:
            errors[alike]["count"] += 1
        elif len(errors) < NAMED:
            errors[alike] = {"error": text, "count": 1, "first": place}


def _note(problems: Problems, kind: str, place: str) -> dict[str, Any]:
    problem = problems.setdefault(kind, {"count": 0, "where": []})
    problem["count"] += 1
    if problem["count"] <= NAMED:
        problem["where"].append(place)
    return problem


def _print_errors(unreadable: Problems) -> None:
    """Print one line per error, with its first place; turn ``errors`` into a list."""
    for kind, problem in unreadable.items():
        problem["errors"] = list(problem["errors"].values())
        for error in problem["errors"]:
            more = f" ({error['count'] - 1:,} more like this)" if error["count"] > 1 else ""
            print(f"{printable(error['first'])}: {kind}: {error['error']}{more}", file=sys.stderr)
        others = problem["count"] - sum(error["count"] for error in problem["errors"])
        if others:
            print(f"{kind}: {others:,} others are counted, not named", file=sys.stderr)
