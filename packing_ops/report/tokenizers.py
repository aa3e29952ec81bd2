"""Examples to tokens: how many each has, or which, or why the tokenizer refused it."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from packing_ops.report.chats import Unreadable, for_template
from packing_ops.report.examples import Example

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
