"""The indented Python of README and docs, block by block."""

import ast
import re
import textwrap

from helpers import ROOT

PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def is_python(text):
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a command, an error
        return False
    return any(isinstance(node, (ast.Call, ast.Import, ast.ImportFrom)) for node in ast.walk(tree))


def blocks_of(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.S | re.M)
    found = re.findall(r"(?:^    .*\n(?:^ *\n(?=    ))*)+", text, re.M)
    return [block for block in map(textwrap.dedent, found) if is_python(block)]


def block_with(page, text):
    (found,) = (block for block in blocks_of(page) if text in block)
    return found


def block_for(page, text, model):
    """The block with this text, with the model of a folder."""
    return block_with(page, text).replace("Qwen/Qwen3-0.6B", str(model))


def in_place_of(there, here, block):
    assert block.count(there) == 1
    return block.replace(there, here)


# Examples for a collator, which a model of 258 tokens takes
ROWS = [{"input_ids": [3 + i] * (2 + 7 * i % 29), "labels": [3 + i] * (2 + 7 * i % 29)} for i in range(40)]


def tiny_llama(attention="sdpa", **overrides):
    from helpers.hf_models import tiny_model

    return tiny_model("llama", vocab_size=258, attn_implementation=attention, **overrides)
