"""python benchmarks/bench_demo.py [--device cpu|cuda]: examples/train_packed.py, padded against packed training.

Writes results/demo_<device>.json and its picture.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from provenance import ROOT, add_commit
from result_rows import RESULTS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and the picture")
    arguments, options = parser.parse_known_args()  # the others are the example's
    example = ROOT / "examples" / "train_packed.py"
    command = [sys.executable, example, "--device", arguments.device, "--out", arguments.out, *options]
    subprocess.run(list(map(str, command)), check=True)
    add_commit(arguments.out / f"demo_{arguments.device}.json")


if __name__ == "__main__":
    main()
