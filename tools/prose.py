"""Counts the words of comments, docstrings and pages that a stranger reads twice: ``python tools/prose.py [-v]``.

Prints dialect words per 1,000 words of a folder, the share of function docstrings that begin with a verb, and lines of
prose over 120 characters. ``-v`` lists where they are. ``tests/project/test_prose.py`` holds the figures.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "packing_ops": ["packing_ops/**/*.py"],
    "csrc": ["csrc/**/*.cpp", "csrc/**/*.cu", "csrc/**/*.cuh", "csrc/**/*.h", "csrc/**/*.md"],
    "docs": ["docs/**/*.md", "README.md", "CONTRIBUTING.md"],
    "tests": ["tests/**/*.py", "tests/**/*.cpp", "tests/**/*.h", "tests/**/*.cuh"],
}
LONGEST = 120
# Words of a dialect, each with a plain one in its place: "its own stream" is "a separate stream", "told" is "passed".
DIALECT = re.compile(
    r"\b(none|(?i:own|alone|beside|told|lies?|lay|lying|stands?(?!-ins?)|stood|comes?|came|so many|that of|as ever"
    r"|where there (?:is|are)|what [^.;:]{1,60} is what))\b"
)
VERBS = {*re.findall(
    r"\w+",
    """
    accept accumulate add advance align allocate allow apply ask assemble assign attach attend average begin bind
    block break broadcast build cache call cast check choose clear clone close collate collect combine compare compile
    compute concatenate configure confirm convert convolve copy correct count cover create cumulate cut decide declare
    decode define delegate derive describe detach detect disable discard distribute divide do download draw drop emit
    empty enable end ensure enter estimate evaluate even exchange exclude execute exit expand explain expose extend
    fail fetch fill filter find fit flatten follow force format forward free fuse gather generate get give group guard
    guess handle hash hide hold identify ignore import index infer initialize insert inspect install invert iterate
    join keep launch lay leave let limit list load locate log look make map mark mask match mean measure merge mix
    move multiply name normalize note open order override pack pad parse partition pass pick place plan point pool
    predict prefetch prepare prevent print probe process project propagate prove put quantize queue raise read rebuild
    receive recompute record reduce refer refuse register reject release remember remove rename render reorder repeat
    replace replay report require reset reshape resolve restore restrict resume return reuse revert rotate round run
    sample save say scale scan scatter search select send separate serialize set shard shift show shuffle sign skip
    slice solve sort split stack start state step stop store stream substitute subtract sum suppress swap switch take
    tell test time trace transform translate trim truncate try turn undo unfuse unify unpack unpad unregister unshard
    unwrap update use validate verify visit wait walk warn watch weigh widen wrap write yield zero
    """,
)}  # fmt: skip


def docstrings(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, docstring, whether it is a function's) of Python source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            place, document = node.body[0], ast.get_docstring(node, clean=False)
            yield place.lineno, document, isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line of prose: comments and docstrings, or a page without its code."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
        yield from ((number, line) for number, line in enumerate(text.split("\n"), 1) if not line.startswith("    "))
    elif path.suffix == ".py":
        for first, document, _ in docstrings(text):
            lines = enumerate(document.split("\n"), first)
            yield from ((number, line) for number, line in lines if not re.match(r"\s*(>>>|\.\.\.) ", line))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    else:
        for comment in re.finditer(r"//[^\n]*|/\*.*?\*/", text, re.S):
            first = text.count("\n", 0, comment.start()) + 1
            yield from enumerate(comment[0].split("\n"), first)


def files(folder: str) -> list[Path]:
    """Return the files of a folder of FOLDERS, sorted."""
    return sorted(path for pattern in FOLDERS[folder] for path in ROOT.glob(pattern))


def dialect(folder: str) -> tuple[int, list[str]]:
    """Count the words of a folder, and return its lines that have words of DIALECT, once for each."""
    words, found = 0, []
    for path in files(folder):
        for number, line in prose(path):
            line = re.sub(r"``.*?``|`[^`]*`", " code ", line)
            words += len(re.findall(r"[A-Za-z][\w'-]*", line))
            found += [f"{path.relative_to(ROOT)}:{number}: {word}: {line.strip()}" for word in DIALECT.findall(line)]
    return words, found


def first_words() -> list[tuple[str, str]]:
    """Return (place, first word) of the docstrings of packing_ops' functions."""
    return [
        (f"{path.relative_to(ROOT)}:{line}", document.split()[0])
        for path in files("packing_ops")
        for line, document, of_function in docstrings(path.read_text())
        if of_function
    ]


def without_verb() -> list[str]:
    """Return the places of the docstrings that do not begin with a verb, with their first words."""
    return [f"{place}: {word}" for place, word in first_words() if word.rstrip(".,:;").lower() not in VERBS]


def long_lines() -> list[str]:
    """Return the lines of comments and docstrings in Python that are over LONGEST characters, as ruff's W505 does."""
    found = []
    for path in (path for folder in ("packing_ops", "tests") for path in files(folder) if path.suffix == ".py"):
        lines = path.read_text().split("\n")
        numbers = {n for n, line in prose(path) if not line.startswith("#") or lines[n - 1].lstrip().startswith("#")}
        found += [f"{path.relative_to(ROOT)}:{n}" for n in sorted(numbers) if len(lines[n - 1]) > LONGEST]
    return found


def main() -> None:
    """Print the figures, and with -v where they are from."""
    verbose = "-v" in sys.argv[1:]
    for folder in FOLDERS:
        words, found = dialect(folder)
        print(f"{folder}: {1000 * len(found) / words:.1f} dialect words per 1,000 of {words:,}")
        if verbose:
            print(*found, sep="\n")
    places, without = first_words(), without_verb()
    print(
        f"docstrings of functions that begin with a verb: {100 * (1 - len(without) / len(places)):.0f}% of "
        f"{len(places)}"
    )
    long = long_lines()
    print(f"lines of prose over {LONGEST} characters: {len(long)}")
    if verbose:
        print(*without, *long, sep="\n")


if __name__ == "__main__":
    main()
