"""Plans of packing_ops.parallel.plan_step beside groups of one size: python benchmarks/simulate_plan.py [--steps 20]

Counted by the plan's cost, nothing is measured. Each step draws documents of one of four kinds of lengths until
``--rows`` rows of ``capacity`` for each rank are full. Groups of one size, for all steps: every row lies on the fewest
ranks that hold the longest document, as where context parallelism is set once, or on the size that costs least over all
steps, which is known only afterwards. Two sizes: documents over capacity on groups of the fewest ranks, others on
single ranks (token_budget_microbatches with sp_size). The least: no plan costs less than documents that are spread
evenly in as few rows as their tokens fill, with only those over capacity sent. Writes results/plan_cpu.csv.
"""

import argparse
import collections
import math
import random

import torch
from harness import RESULTS, commit, write_csv

from packing_ops.data import token_budget_microbatches
from packing_ops.packing import cost_coefficients
from packing_ops.parallel import plan_step
from packing_ops.parallel.plan import ROW, SENT

# Log-normal: the median, sigma, the longest, and the share of documents that are drawn evenly up to the longest.
KINDS = {
    "sft": (300, 0.9, 4096, 0.0),
    "chat": (900, 1.2, 32_768, 0.0),
    "long-tail 256k": (2000, 1.4, 262_144, 0.01),
    "RL": (6000, 0.8, 65_536, 0.02),
}


def lengths_of(kind: str, total: int, draws: random.Random) -> list[int]:
    median, sigma, longest, tail = KINDS[kind]
    lengths: list[int] = []
    while sum(lengths) < total:
        even = draws.random() < tail
        length = draws.randint(longest // 8, longest) if even else round(draws.lognormvariate(math.log(median), sigma))
        lengths.append(min(max(16, length), longest))
    return lengths


def cost_of(lengths: list[int], rows: list, size: int) -> float:
    """Of one rank's row, as plan_step counts it."""
    per_token, per_square = cost_coefficients("flops", "cost")
    sent = 1 + SENT if size > 1 else 1
    return sum(per_token * sent * lengths[i] + per_square * lengths[i] ** 2 for i in rows) / size + per_token * ROW


def one_size(lengths: list[int], ranks: int, capacity: int, size: int) -> float:
    groups = token_budget_microbatches(lengths, capacity * size, dp_size=ranks // size, cost="flops")
    return sum(max(cost_of(lengths, group[step], size) for group in groups) for step in range(len(groups[0])))


def two_sizes(lengths: list[int], ranks: int, capacity: int, size: int) -> float:
    of_ranks, shared = token_budget_microbatches(
        lengths, capacity, dp_size=ranks // size, sp_size=size, cost="flops", return_statistics=True
    )
    steps = range(len(of_ranks[0]))
    return sum(
        max(cost_of(lengths, rank[s], size if s < shared.shared_steps else 1) for rank in of_ranks) for s in steps
    )


def least(lengths: list[int], ranks: int, capacity: int) -> float:
    """No plan costs less."""
    per_token, per_square = cost_coefficients("flops", "cost")
    tokens = sum(length * (1 + SENT * (length > capacity)) for length in lengths)
    spread = per_token * tokens + per_square * sum(length * length for length in lengths)
    return spread / ranks + math.ceil(sum(lengths) / (ranks * capacity)) * per_token * ROW


def simulated(kind: str, ranks: int, capacity: int, steps: int, rows: int) -> dict:
    """Sums over the steps, in multiples of the plans'."""
    draws = random.Random(f"{kind} {ranks}")
    fewest = 1 << (-(-KINDS[kind][2] // capacity) - 1).bit_length()
    sizes = [size for size in (1 << i for i in range(ranks.bit_length())) if fewest <= size <= ranks]
    found: dict = collections.Counter()
    for _ in range(steps):
        lengths = lengths_of(kind, ranks * capacity * rows, draws)
        plan = plan_step(lengths, ranks, capacity)
        within = plan_step(lengths, ranks, capacity, max_size=fewest)
        found.update({"plan": plan.cost, "within": within.cost, "ideal": plan.ideal})
        found.update({"least": least(lengths, ranks, capacity), "two": two_sizes(lengths, ranks, capacity, fewest)})
        found.update({size: one_size(lengths, ranks, capacity, size) for size in sizes})
    times = {name: f"{value / found['plan']:.3f}" for name, value in found.items()}
    best = min(sizes, key=found.__getitem__)
    return {
        "kind": kind, "ranks": ranks, "capacity": capacity, "static_size": fewest, "steps": steps,
        "of_ideal": times["ideal"], "of_least": times["least"], "one_size_times_plan": times[fewest],
        "one_size_times_least": f"{found[fewest] / found['least']:.3f}", "two_sizes_times_plan": times["two"],
        "best_size": best, "best_size_times_plan": times[best],
        "one_size_times_plan_of_that_size": f"{found[fewest] / found['within']:.3f}",
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2, help="of each rank and step")
    arguments = parser.parse_args()
    where = {"device": "counted", "torch": torch.__version__, "commit": commit()}
    rows = [
        simulated(kind, ranks, capacity, arguments.steps, arguments.rows) | where
        for kind in KINDS
        for ranks, capacity in ((16, 32_768), (64, 16_384))
    ]
    write_csv(RESULTS / "plan_cpu.csv", rows)


if __name__ == "__main__":
    main()
