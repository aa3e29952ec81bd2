"""python benchmarks/bench_demo.py [--device cpu|cuda] [--only demo|same_bits|grpo_same_bits|grpo_tree|grpo_vllm]: the
examples whose figures README and docs show.

- demo: examples/train_packed.py, padded against packed training.
- same_bits: examples/same_bits.py, ratios of a GRPO step with the mode invariant=True and without.
- grpo_same_bits: examples/grpo_same_bits.py, log-probs of rollouts by continuous batching and of the update, with the
  mode and without.
- grpo_tree: examples/grpo_tree.py, a GRPO step on samples that share their prompts, as samples and as a prefix tree.
- grpo_vllm: examples/grpo_vllm.py, grpo_same_bits with vLLM as the sampler; with --only alone, on the CPU in the
  environment of make test-vllm.

Writes results/NAME_<device>.json and its picture. With --only, other options are the example's.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from provenance import ROOT, add_commit
from result_rows import RESULTS

EXAMPLES = {"demo": "train_packed.py"} | {n: f"{n}.py" for n in ("same_bits", "grpo_same_bits", "grpo_tree")}
ALONE = {"grpo_vllm": "grpo_vllm.py"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=EXAMPLES | ALONE, help="one of them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and the picture")
    arguments, options = parser.parse_known_args()
    if options and arguments.only is None:
        parser.error(f"--only: expected, since {options[0]} is an option of one example")
    for name in [arguments.only] if arguments.only else EXAMPLES:
        example = ROOT / "examples" / (EXAMPLES | ALONE)[name]
        command = [sys.executable, example, "--device", arguments.device, "--out", arguments.out, *options]
        subprocess.run(list(map(str, command)), check=True)
        add_commit(arguments.out / f"{name}_{arguments.device}.json")


if __name__ == "__main__":
    main()
