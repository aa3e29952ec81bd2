"""Real text for the examples: the standard library's own docstrings, or a JSONL file in the field's chat formats."""

import ast
import json
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

BOS, EOS, VOCAB_SIZE = 256, 257, 258  # a byte tokenizer: 0..255 are bytes
IGNORE = -100


@dataclass
class Document:
    """One training example: int64 ``input_ids`` [length] and raw ``labels`` [length], the prompt masked."""

    input_ids: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return self.input_ids.numel()


def encode(pieces: list[tuple[str, bool]]) -> Document:
    """Bytes of every (text, is_target) piece between BOS and EOS; only targets are learnt."""
    ids, labels = [BOS], [IGNORE]
    for text, is_target in pieces:
        tokens = list(text.encode())
        ids += tokens
        labels += tokens if is_target else [IGNORE] * len(tokens)
    return Document(torch.tensor([*ids, EOS]), torch.tensor([*labels, EOS]))


def docstring_pairs(limit: int) -> list[tuple[str, str]]:
    """(signature, docstring) of the installed standard library, parsed and never imported."""
    # Parsing takes longer than a short training run, and every process of one wants them.
    kept = Path(__file__).resolve().parents[2] / "build" / f"docstrings-{platform.python_version()}.json"
    if kept.exists():
        pairs = [tuple(pair) for pair in json.loads(kept.read_text())]
    else:
        pairs = parsed_docstring_pairs()
        kept.parent.mkdir(exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(pairs))
        unfinished.replace(kept)
    # Evenly over the library, so that a smaller limit sees the same mix.
    step = max(1, len(pairs) // limit)
    return pairs[::step][:limit]


def parsed_docstring_pairs() -> list[tuple[str, str]]:
    pairs = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            docstring = ast.get_docstring(node)
            if not docstring:
                continue
            bases = getattr(node, "bases", None)
            inner = ast.unparse(node.args) if bases is None else ", ".join(map(ast.unparse, bases))
            pairs.append((f"{path.stem}.{node.name}({inner})\n", docstring))
    return pairs


def read_jsonl(path: Path) -> list[list[tuple[str, bool]]]:
    """Pieces per line of ``{"messages": [{"role", "content"}, ...]}`` or ``{"prompt", "completion"}``."""
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "messages" in record:
                turns = [(m["role"], m["content"]) for m in record["messages"]]
                documents.append([(f"<{role}>\n{text}\n", role == "assistant") for role, text in turns])
            else:
                documents.append([(record["prompt"], False), (record["completion"], True)])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected messages or prompt and completion: {error!r}") from error
    return documents


def load_documents(data: Path | None, limit: int, max_length: int, encode=encode) -> tuple[list[Document], int]:
    """Documents of at most ``max_length`` tokens, and how many had to be cut to fit."""
    if data is None:
        pieces = [[(prompt, False), (answer, True)] for prompt, answer in docstring_pairs(limit)]
    else:
        pieces = read_jsonl(data)[:limit]
    documents = [encode(p) for p in pieces]
    cut = sum(len(document) > max_length for document in documents)
    return [Document(d.input_ids[:max_length], d.labels[:max_length]) for d in documents], cut
