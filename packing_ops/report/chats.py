"""Messages of a chat: as texts, whose lengths are known without a tokenizer, and as a chat template takes them."""

import json
from collections.abc import Mapping
from typing import Any

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
