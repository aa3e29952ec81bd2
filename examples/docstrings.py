"""Writes the docstrings of the standard library as JSONL of prompts and completions: text for a first report.

python examples/docstrings.py --out docstrings.jsonl
python -m packing_ops report docstrings.jsonl --capacity 2048 --dp 8
"""

import argparse
import json
from pathlib import Path

from common.text_data import docstring_pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out/docstrings.jsonl"), help="file to write")
    parser.add_argument("--documents", type=int, default=10**9, help="at most this many documents; default: all")
    arguments = parser.parse_args()
    pairs = docstring_pairs(arguments.documents)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in pairs)
    print(f"written: {arguments.out}, {len(pairs)} documents")


if __name__ == "__main__":
    main()
