"""Chats as examples of packed training: the tokens of a chat template, with what assistants say as labels."""

import json
from pathlib import Path

from .hf_setup import byte_tokenizer
from .text_data import IGNORE, docstring_pairs


def tokenized(messages: list[dict], tokenizer, longest: int) -> dict:
    """input_ids and labels: what is before an assistant's turn, and what opens it, is not learnt."""
    ids, labels = [], []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            opened = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False)
            ids = tokenizer.apply_chat_template(messages[: i + 1], return_dict=False)
            labels += [IGNORE] * (len(opened) - len(labels)) + ids[len(opened) :]
    return {"input_ids": ids[:longest], "labels": labels[:longest]}


def chats_of(path: Path) -> list[list[dict]]:
    """The chats of a JSONL file."""
    chats, lines = [], path.read_text(encoding="utf-8").split("\n")  # other ends of lines may stand in a text
    for i, line in enumerate(lines, 1):
        try:
            found = json.loads(line) if line.strip() else {"messages": []}
        except ValueError:
            raise SystemExit(f"--data: expected JSON in line {i} of {path}") from None
        chat = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(chat, list) or not all(
            isinstance(each, dict) and {"role", "content"} <= {*each} for each in chat
        ):
            raise SystemExit(f'--data: expected {{"messages": [{{"role", "content"}}, ...]}} in line {i} of {path}')
        chats.append(chat)
    return chats


def chat_examples(model: str | None, data: Path | None, longest: int) -> list[dict]:
    """Those of a JSONL file, or docstrings, in which something is learnt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model) if model else byte_tokenizer()
    if data is None:
        pairs = [(("user", prompt), ("assistant", answer)) for prompt, answer in docstring_pairs(200)]
        chats = [[{"role": role, "content": text} for role, text in pair] for pair in pairs]
    else:
        chats = chats_of(data)
    examples = [tokenized(chat, tokenizer, longest) for chat in chats]
    return [example for example in examples if any(label != IGNORE for label in example["labels"][1:])]
