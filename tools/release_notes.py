"""Prints the section of CHANGELOG.md for a tag: python3 tools/release_notes.py v0.2.0. Fails if the tag is not the
version in packing_ops/_runtime/library.py, or if the changelog has no dated section for it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes(tag: str, library: str, changelog: str) -> str:
    version = re.search(r'^VERSION = "(.+?)"', library, re.M)[1]
    if tag != f"v{version}":
        sys.exit(
            f"tools/release_notes.py: expected the tag v{version}, that of packing_ops/_runtime/library.py, got {tag}"
        )
    section = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if section is None:
        sys.exit(f"tools/release_notes.py: expected a heading '## [{version}] - <date>' in CHANGELOG.md")
    return section[1].strip() + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/release_notes.py v<version>")
    texts = [(ROOT / name).read_text() for name in ("packing_ops/_runtime/library.py", "CHANGELOG.md")]
    print(notes(sys.argv[1], *texts), end="")
