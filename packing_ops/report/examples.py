"""One record of a file as a training example: its texts, or its token ids when it has them."""

import json
from collections.abc import Mapping
from typing import NamedTuple

IGNORE = -100
TARGETS = ("loss_mask", "completion_mask", "assistant_masks")  # 1 where a token is learnt
PER_TOKEN = ("labels", "attention_mask", *TARGETS, "position_ids", "token_type_ids")  # as long as input_ids
KEYS = ("input_ids", *PER_TOKEN, "messages", "prompt", "completion", "text")  # all that is ever read


class Unreadable(ValueError):
    """Why a record is no example. ``kind`` is the count that it goes to."""

    def __init__(self, kind: str, why: str):
        super().__init__(why)
        self.kind = kind


class Example(NamedTuple):
    texts: list[str]
    has_target: bool
    messages: list[dict] | None = None  # the same texts as a chat, for a tokenizer with a template
    num_tokens: int | None = None  # instead of texts


def example_of(record) -> Example:
    """Reads the first that is there of ``input_ids``, ``messages``, ``prompt`` and ``completion``, ``text``.

    Raises:
        Unreadable: of the kind corrupt, missing keys, wrong type or lists of different length.
    """
    if not isinstance(record, Mapping):
        raise Unreadable("corrupt", f"expected an object, got {type(record).__name__}")
    given = {key: record[key] for key in KEYS if record.get(key) is not None}
    if "input_ids" in given:
        return _tokenized(given)
    if "messages" in given:
        return _chat(given["messages"], "messages")
    if "prompt" in given and "completion" in given:
        return _pair(given["prompt"], given["completion"])
    if "text" in given:
        text = _text(given["text"], "text")
        return Example([text], bool(text))
    raise Unreadable(
        "missing keys",
        f"expected input_ids, messages, prompt and completion, or text, got {', '.join(map(str, record)) or 'nothing'}",
    )


def _text(value, name: str) -> str:
    if not isinstance(value, str):
        raise Unreadable("wrong type", f"{name}: expected a string, got {type(value).__name__}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        raise Unreadable("corrupt", f"{name}: {error}") from None
    return value


def _pair(prompt, completion) -> Example:
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, answered = _chat(prompt, "prompt"), _chat(completion, "completion")
        return Example(asked.texts + answered.texts, any(answered.texts), prompt + completion)
    texts = [_text(prompt, "prompt"), _text(completion, "completion")]
    return Example(texts, bool(texts[1]))


def _chat(messages, name: str) -> Example:
    if not isinstance(messages, list):
        raise Unreadable("wrong type", f"{name}: expected a list of messages, got {type(messages).__name__}")
    texts, has_target = [], False
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise Unreadable("wrong type", f"{name}[{i}]: expected an object, got {type(message).__name__}")
        if message.get("role") is None or not {"content", "tool_calls"} & message.keys():
            keys = ", ".join(message) or "nothing"
            raise Unreadable("missing keys", f"{name}[{i}]: expected role and content, got {keys}")
        text = _message_text(message, f"{name}[{i}]")
        texts.append(text)
        has_target = has_target or (message["role"] == "assistant" and bool(text))
    return Example(texts, has_target, messages)


def _message_text(message: Mapping, name: str) -> str:
    """Content, whole or in parts, and calls of tools as JSON."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        text = "".join(_text(part, f"{name}.content[{i}].text") for i, part in enumerate(parts))
    else:
        text = "" if content is None else _text(content, f"{name}.content")
    return text + json.dumps(message["tool_calls"]) if message.get("tool_calls") else text


def _tokenized(given: dict) -> Example:
    columns = {key: _numbers(given[key], key) for key in ("input_ids", *PER_TOKEN) if key in given}
    lengths = {key: len(column) for key, column in columns.items()}
    num_tokens = lengths["input_ids"]
    if set(lengths.values()) != {num_tokens}:
        told = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise Unreadable("lists of different length", f"expected {num_tokens} like input_ids, got {told}")
    learnt = columns.get("labels", columns["input_ids"]) != IGNORE
    for key in TARGETS:
        if key in columns:
            learnt = learnt & (columns[key] != 0)
    if "attention_mask" in columns:  # padding that is in the file already
        num_tokens = int((columns["attention_mask"] != 0).sum())
    return Example([], bool(learnt.any()), num_tokens=num_tokens)


def _numbers(value, name: str):
    """A list, or an array of a file that has arrays, as an array."""
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError(f"{name}: token ids need numpy: pip install packing_ops[data]") from error
    if not isinstance(value, list | np.ndarray):
        raise Unreadable("wrong type", f"{name}: expected a list, got {type(value).__name__}")
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different length inside
        array = np.asarray(value, dtype=object)
    kinds = "iubf" if name in TARGETS else "iub"
    if array.size and (array.ndim != 1 or array.dtype.kind not in kinds):
        raise Unreadable("wrong type", f"{name}: expected a list of integers, got {array.dtype} {list(array.shape)}")
    return array
