"""One record of a file as training examples: their texts, or their token ids when it has them. Messages of a chat are
texts, whose lengths are known without a tokenizer, and what a chat template takes.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from packing_ops.data._examples import TARGETS

ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}  # of ShareGPT


class Unreadable(ValueError):
    """Why a record is no example. ``kind`` is the count that it goes to."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def checked_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise Unreadable("wrong type", f"{name}: expected a string, got {type(value).__name__}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        raise Unreadable("corrupt", f"{name}: {error}") from None
    return value


def texts_of(messages: object, name: str) -> tuple[list[str], bool]:
    """Return the text of every message, and whether the assistant says anything.

    Raises:
        Unreadable: of the kind corrupt, missing keys, wrong type, or images and other parts.
    """
    if not isinstance(messages, list):
        raise Unreadable("wrong type", f"{name}: expected a list of messages, got {type(messages).__name__}")
    texts, has_target = [], False
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise Unreadable("wrong type", f"{name}[{i}]: expected an object, got {type(message).__name__}")
        role = role_of(message)
        if role is None or not {"content", "value", "tool_calls"} & message.keys():
            keys = ", ".join(message) or "nothing"
            raise Unreadable("missing keys", f"{name}[{i}]: expected role and content, or from and value, got {keys}")
        # The content, whole or in parts, and calls of tools as JSON
        content = _content(message)
        if isinstance(content, list):
            text = "".join(_checked_part(part, f"{name}[{i}].content[{j}]") for j, part in enumerate(content))
        else:
            text = "" if content is None else checked_text(content, f"{name}[{i}].content")
        texts.append(text + as_json(message["tool_calls"]) if message.get("tool_calls") else text)
        has_target = has_target or (role == "assistant" and bool(texts[-1]))
    return texts, has_target


def role_of(message: Mapping[str, Any]) -> Any:
    """Return the role, None without one; what ShareGPT calls human is user."""
    if message.get("role") is not None:
        return message["role"]
    given = message.get("from")
    return ROLES.get(given, given) if isinstance(given, str) else given


def _content(message: Mapping[str, Any]) -> Any:
    return message.get("value") if message.get("content") is None else message["content"]


def _checked_part(part: Any, name: str) -> str:
    text = _part(part)
    if text is None and isinstance(part, Mapping) and part.get("type") not in (None, "text"):
        raise Unreadable("images and other parts", f"{name}: expected text, got a part of type {part['type']!r}")
    return checked_text(text, f"{name}.text")


def _part(part: Any) -> Any:
    """Return the text of {"type": "text", "text": ...}; None of an image."""
    return part.get("text") if isinstance(part, Mapping) else part


def for_template(messages: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages that ``texts_of`` has read, with role and content; parts are joined, which templates of text
    expect.
    """
    found = []
    for message in messages:
        own = {key: without_none(value) for key, value in message.items() if key not in ("from", "value")}
        own = {key: value for key, value in own.items() if value is not None}
        content = _content(message)
        content = "".join(map(_part, content)) if isinstance(content, list) else content
        found.append({**own, "role": role_of(message), "content": content})
    return found


def as_json(value: object) -> str:
    return json.dumps(without_none(value), default=str)  # a column of Parquet may hold times


def without_none(value: Any) -> Any:
    """Return objects without None: in one column of Parquet all have the same keys, None where a row had no such
    key.
    """
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


# --- records ---


if TYPE_CHECKING:
    import numpy as np


IGNORE = -100
PER_TOKEN = ("labels", "attention_mask", *TARGETS, "position_ids", "token_type_ids")  # as long as input_ids
FORMS = (  # the one or two columns that each needs; the first that is there is read
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("chosen", "rejected"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("text",),
)
BESIDE = (*PER_TOKEN, "prompt", "input", "history", "system", "tools", "chat_template_kwargs")
KEYS = tuple(dict.fromkeys([*(key for form in FORMS for key in form), *BESIDE]))  # all that is ever read

Record = dict[str, Any]  # by our names for its columns


class Example(NamedTuple):
    """One document, as a trainer would have it."""

    texts: list[str]
    has_target: bool
    messages: list[Mapping[str, Any]] | None = None  # the same texts as a chat, for a tokenizer with a template
    num_tokens: int | None = None  # instead of texts, as the next
    ids: "np.ndarray[Any, Any] | None" = None
    tools: list[Any] | None = None  # for the template, as template_options
    template_options: Mapping[str, Any] = {}


class FormReader:
    """Records to their documents.

    Args:
        columns: how the file calls what has another name here. Where a column of FORMS is among them, only the forms
            that it belongs to are looked for.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.forms = [form for form in FORMS if columns.keys() & form] or FORMS
        self.names = {key: columns.get(key, key) for key in KEYS}
        own = {name: key for key, name in self.names.items() if key not in columns}
        self.keys = own | {name: key for key, name in columns.items()}  # by the file's names

    def examples_of(self, record: object) -> list[Example]:
        """Return the examples of a record by the first form that it has: a preference pair is two documents, anything
        else is one.

        Raises:
            Unreadable: of the kind corrupt, missing keys, wrong type or lists of different length.
        """
        if not isinstance(record, Mapping):
            raise Unreadable("corrupt", f"expected an object, got {type(record).__name__}")
        keys = self.keys
        given = {keys[name]: value for name, value in record.items() if value is not None and name in keys}
        if form := next((form for form in self.forms if form[0] in given and form[-1] in given), None):
            found = _READ[form](given)
            if form == ("input_ids",) or ("tools" not in given and "chat_template_kwargs" not in given):
                return found
            tools, options = _tools(given), given.get("chat_template_kwargs", {})
            if not isinstance(options, Mapping):
                raise Unreadable(
                    "wrong type", f"chat_template_kwargs: expected an object, got {type(options).__name__}"
                )
            found = [example._replace(template_options=without_none(options)) for example in found]
            # Tools are of a chat; they are text too, if no template writes them.
            return [
                example._replace(tools=tools, texts=[*example.texts, as_json(tools)])
                if tools and example.messages is not None and any(example.texts)
                else example
                for example in found
            ]
        expected = ", or ".join(" and ".join(self.names[key] for key in form) for form in self.forms)
        got = ", ".join(f"{key} (null)" if key in keys and record[key] is None else str(key) for key in record)
        raise Unreadable("missing keys", f"expected {expected} (or --columns), got {got or 'nothing'}")


def _chat(messages: Any, name: str) -> Example:
    texts, has_target = texts_of(messages, name)
    return Example(texts, has_target, messages)


def _preference(given: Record) -> list[Example]:
    """Return the two documents of a pair. Without a prompt of text, chats begin with it themselves."""
    prompt = given.get("prompt", "")
    return [
        _chat(given[key], key)
        if isinstance(given[key], list) and not isinstance(prompt, list)
        else _pair(prompt, given[key], key)
        for key in ("chosen", "rejected")
    ]


def _pair(prompt: object, completion: object, name: str) -> Example:
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, answered = _chat(prompt, "prompt"), _chat(completion, name)
        return Example(asked.texts + answered.texts, any(answered.texts), prompt + completion)
    texts = [checked_text(prompt, "prompt"), checked_text(completion, name)]
    return Example(texts, bool(texts[1]))


def _alpaca(given: Record) -> list[Example]:
    asked = [checked_text(given.get(key, ""), key) for key in ("instruction", "input")]
    history = given.get("history", [])
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Unreadable("wrong type", f"history: expected [question, answer] in a list, got {type(history).__name__}")
    turns = [*history, ["\n".join(filter(None, asked)), checked_text(given["output"], "output")]]
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return [_chat(_with_system(given, messages), "instruction")]


def _with_system(given: Record, messages: Any) -> Any:
    """Return ``messages`` with the record's ``system`` in front, unless they have one."""
    system = checked_text(given.get("system", ""), "system")
    if not system or not isinstance(messages, list):
        return messages
    if messages and isinstance(messages[0], Mapping) and role_of(messages[0]) == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


_READ = {
    ("input_ids",): lambda given: [_tokenized(given)],
    ("messages",): lambda given: [_chat(given["messages"], "messages")],
    ("conversations",): lambda given: [_chat(_with_system(given, given["conversations"]), "conversations")],
    ("chosen", "rejected"): _preference,
    ("prompt", "completion"): lambda given: [_pair(given["prompt"], given["completion"], "completion")],
    ("instruction", "output"): _alpaca,
    ("text",): lambda given: [Example([checked_text(given["text"], "text")], bool(given["text"]))],
}


def _tools(given: Record) -> list[Any] | None:
    tools = given.get("tools")
    if isinstance(tools, str):  # Parquet has no other column for objects of many kinds
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise Unreadable("corrupt", f"tools: {error}") from None
    if tools is not None and not isinstance(tools, list):
        raise Unreadable("wrong type", f"tools: expected a list, or a list as JSON, got {type(tools).__name__}")
    return without_none(tools) or None


def _tokenized(given: Record) -> Example:
    columns = {key: _numbers(given[key], key) for key in ("input_ids", *PER_TOKEN) if key in given}
    lengths = {key: len(column) for key, column in columns.items()}
    num_tokens = lengths["input_ids"]
    if set(lengths.values()) != {num_tokens}:
        found = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise Unreadable("lists of different length", f"expected {num_tokens} like input_ids, got {found}")
    trained = columns.get("labels", columns["input_ids"]) != IGNORE
    for key in TARGETS:
        if key in columns:
            trained = trained & (columns[key] != 0)
    ids = columns["input_ids"]
    if "attention_mask" in columns:  # padding that is in the file already
        ids = ids[columns["attention_mask"] != 0]
    return Example([], bool(trained.any()), num_tokens=len(ids), ids=ids)


def _numbers(value: object, name: str) -> "np.ndarray[Any, Any]":
    """Return a list, or an array of a file that has arrays, as an array."""
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError(f"{name}: token ids need numpy: pip install numpy") from error
    if not isinstance(value, list | np.ndarray):
        raise Unreadable("wrong type", f"{name}: expected a list, got {type(value).__name__}")
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different length inside
        array = np.asarray(value, dtype=object)
    kinds = "iubf" if name in TARGETS else "iub"
    if array.size and (array.ndim != 1 or array.dtype.kind not in kinds):
        raise Unreadable("wrong type", f"{name}: expected a list of integers, got {array.dtype} {list(array.shape)}")
    if array.dtype.kind == "u" and array.size and array.max() >= 2**63:
        raise Unreadable("wrong type", f"{name}: expected integers that fit int64, got {array.max()}")
    return array
