"""The figures of README.md, from benchmarks/results: python benchmarks/readme.py [--check]

Whatever stands between ``<!-- results: NAME -->`` and ``<!-- end -->`` is what a function of readme_ops.py or
readme_training.py makes of the result files; --check changes nothing and fails where it is something else.
"""

import argparse
import re
import sys
from pathlib import Path

import readme_ops
import readme_training

TABLES = readme_ops.TABLES | readme_training.TABLES
README = Path(__file__).parent.parent / "README.md"
REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)


def rewritten(text: str) -> tuple[str, list[str]]:
    """The text with today's figures, and the regions that had others."""
    changed = []

    def replace(match):
        begin, name, before, end = match.groups()
        after = f"{TABLES[name]()}\n"
        if after != before:
            changed.append(name)
        return begin + after + end

    return REGION.sub(replace, text), changed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text, changed = rewritten(README.read_text())
    if arguments.check and changed:
        sys.exit(f"README.md: not what benchmarks/results says: {', '.join(changed)}; python benchmarks/readme.py")
    if changed:
        README.write_text(text)
    print(f"README.md: {'rewritten: ' + ', '.join(changed) if changed else 'is what benchmarks/results says'}")


if __name__ == "__main__":
    main()
