"""Whole models in training, beside what else one can set: python benchmarks/bench_whole.py [--part 8b lora]
[--only NAME ...] [--repeats 3] [--list] [--limit 540]

Cases of a part and of equally many ranks share a program, where they take turns: the repeats of each are apart. A
program of several ranks is torchrun's, and programs of one GPU run side by side, one on each. A row is written as soon
as it is measured. A case that fails or does not fit has its error in the place of a time and is not repeated; what is
left of its program gets another. After --limit seconds nothing starts any more and what runs is ended: the rows of the
CSV that were not measured again stay. Tokens are those of documents, without padding. MFU: 6 operations for each
parameter and token (4 with LoRA, which has no gradients of the others), and attention's, over the dense bf16 peak.
Losses are those of the first step. Needs transformers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from harness import bench_parser, measured_on, write_csv
from result_rows import rows_before, with_row
from whole_cases import CASES, ERROR, PARTS, Case, add_options, chosen

Turn = tuple[int, int]  # the number of a repeat, and the index of its case


class Running:
    """A program at work on one turn after another, and where its output goes."""

    def __init__(self, turns: list[Turn], gpus: list[str], arguments: argparse.Namespace, folder: Path):
        self.left, self.gpus, ranks = list(turns), gpus, CASES[turns[0][1]].ranks
        self.log, self.start = folder / "{}_{}.log".format(*turns[0]), time.perf_counter()
        command = [sys.executable, "-W", "ignore"]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--device", arguments.device, *["--tiny"] * arguments.tiny]
        command += ["--turns", *(f"{repeat}:{index}" for repeat, index in turns)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        self.process = subprocess.Popen(
            command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()

    def found(self) -> dict[Turn, dict]:
        """What it printed since the last call, by turn; of a program that has failed also why it printed no more."""
        failed = self.process.poll() not in (None, 0)
        lines = self.log.read_text().splitlines()
        results = [
            json.loads(line.removeprefix("RESULT "))
            for line in lines
            if line.startswith("RESULT {") and line[-1] == "}"
        ]
        rows = {(row.pop("repeat"), row.pop("index")): row for row in results}
        unsaid = [turn for turn in self.left if turn not in rows]
        if failed and unsaid:
            errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
            rows[unsaid[0]] = {"error": " ".join((errors or lines or ["no output"])[-1].split())[:ERROR]}
        new = {turn: rows[turn] for turn in self.left if turn in rows}
        failed = {index for (_, index), row in new.items() if "error" in row}
        self.left = [turn for turn in self.left if turn not in new and turn[1] not in failed]
        return new


def programs(cases: list[int], repeats: int) -> list[list[Turn]]:
    """The turns of each program. Cases of a part share one: they find compiled code again."""
    found: dict = {}
    for repeat in range(1, repeats + 1):
        for index in cases:
            found.setdefault((CASES[index].part, CASES[index].ranks), []).append((repeat, index))
    return list(found.values())


def setting_of(case: Case) -> dict:
    """The columns that say what a row is of."""
    return {
        "case": case.name, "part": case.part, "model": case.model, "provider": case.provider, "ranks": case.ranks,
        "wrapper": case.wrapper, "row": case.row, "documents": case.documents, "compiled": int(case.compiled),
        "checkpointing": case.checkpointing, "lora": int(case.lora), "dynamic": int(case.dynamic),
        "vocabulary": case.vocabulary or "", "fused_loss": int(case.fused_loss and case.provider == "ours"),
        "weights": "float32" if case.float32 else "bfloat16",
    }  # fmt: skip


RESULT = ("tokens_per_second_a_gpu", "mfu", "peak_gib", "step_ms", "loss", "warm_up_s", "tokens", "kept", "error")


def visible_gpus(device: str) -> list[str]:
    """Those of CUDA_VISIBLE_DEVICES, so that two of these programs can share a machine; on the CPU two names."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count() if device == "cuda" else 2
    return given.split(",")[:count] if given else list(map(str, range(count)))


def measure(arguments: argparse.Namespace, cases: list[Case], gpus: list[str]) -> None:
    path = arguments.out / f"whole_{arguments.device}.csv"
    rows, where = rows_before(path), measured_on(arguments.device)
    for case in cases:
        if case.ranks > len(gpus):
            print(f"{case.name}: left out, {len(gpus)} of {case.ranks} GPUs", flush=True)
    ahead = [CASES.index(case) for case in cases if case.ranks <= len(gpus)]
    waiting, running, free = programs(ahead, arguments.repeats), [], list(gpus)
    deadline = time.perf_counter() + arguments.limit
    with tempfile.TemporaryDirectory() as folder:
        while (waiting or running) and time.perf_counter() < deadline:
            while waiting and CASES[waiting[0][0][1]].ranks <= len(free):
                taken = [free.pop(0) for _ in range(CASES[waiting[0][0][1]].ranks)]
                running.append(Running(waiting.pop(0), taken, arguments, Path(folder)))
            time.sleep(0.2)
            for each in list(running):
                ended = each.process.poll() is not None
                for (repeat, index), found in each.found().items():
                    setting = setting_of(CASES[index]) | {"repeat": repeat}
                    rows = with_row(rows, {**setting, **dict.fromkeys(RESULT, ""), **found, **where})
                    write_csv(path, rows, show=False)
                    took = f"{time.perf_counter() - each.start:.0f} s"
                    print(f"{CASES[index].name}, repeat {repeat}: {found} ({took})", flush=True)
                    if "error" in found:
                        print(each.log.read_text()[-3000:] if arguments.verbose else "", flush=True)
                if ended:
                    running.remove(each)
                    free = sorted([*free, *each.gpus])
                    if each.left:
                        waiting.insert(0, each.left)
        for each in running:
            each.end()
            print(f"{names_of(each.left)}: ended by --limit", flush=True)
        print(f"not started: {names_of(turn for turns in waiting for turn in turns)}", flush=True)


def names_of(turns: Iterable[Turn]) -> list[str]:
    return [f"{CASES[index].name}, repeat {repeat}" for repeat, index in turns]


def turn_of(text: str) -> Turn:
    repeat, index = map(int, text.split(":"))
    return repeat, index


def main():
    parser = bench_parser(__doc__)
    add_options(parser, repeats=1)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--verbose", action="store_true", help="the end of what a case printed that failed")
    parser.add_argument("--turns", type=turn_of, nargs="+", help=argparse.SUPPRESS)  # in a program of them
    arguments = parser.parse_args()
    if arguments.turns:
        from whole_model import run

        run(arguments.turns, CASES, arguments.device, arguments.tiny)
        return
    cases = chosen(parser, arguments, [case for case in CASES if case.part in arguments.part])
    if cases:
        measure(arguments, cases, visible_gpus(arguments.device))


if __name__ == "__main__":
    main()
