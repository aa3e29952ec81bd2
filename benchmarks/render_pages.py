"""The figures of README.md and docs/, from benchmarks/results: python benchmarks/render_pages.py [--check]

Whatever stands between ``<!-- results: NAME -->`` and ``<!-- end -->`` is what render_tables.py makes of the result
files; --check changes nothing and fails where it is something else.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from render_tables import made

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)


def rewritten(text: str, page: Path) -> tuple[str, list[str]]:
    """The text of a page with today's figures, and the regions that had others."""
    changed = []
    results = os.path.relpath(ROOT / "benchmarks" / "results", page.parent)

    def replace(match: re.Match) -> str:
        begin, name, before, end = match.groups()
        after = f"{made(name)}\n".replace("](benchmarks/results/", f"]({results}/")  # as the page reaches them
        if after != before:
            changed.append(name)
        return begin + after + end

    return REGION.sub(replace, text), changed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for page in PAGES:
        name = page.relative_to(ROOT)
        text, changed = rewritten(page.read_text(), page)
        stale += [f"{name}: not what benchmarks/results says: {', '.join(changed)}"] if changed else []
        if changed and not arguments.check:
            page.write_text(text)
            print(f"{name}: rewritten: {', '.join(changed)}")
    if stale and arguments.check:
        sys.exit("\n".join([*stale, "make readme writes them again"]))
    if not stale:
        print("README.md and docs: are what benchmarks/results says")


if __name__ == "__main__":
    main()
