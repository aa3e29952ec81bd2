"""Whole models in training, beside what else one can set: python benchmarks/bench_whole.py [--part 8b lora] [--limit
540]

Each case of several ranks runs in a separate program of torchrun; those of one GPU share a program for each part and
provider, and programs of one GPU run side by side, one on each. A row is written as soon as it is measured, and one
that fails or does not fit has its error in the place of a time; what is left of its program gets another. After --limit
seconds nothing starts any more and what runs is ended: the rows of the CSV that were not measured again stay. Tokens
are those of documents, without padding. MFU: 6 operations for each parameter and token (4 with LoRA, which has no
gradients of the others), and attention's, over the dense bf16 peak. Losses are those of the first step. Needs
transformers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import RESULTS, bench_parser, measured_on, write_csv
from result_rows import read_rows
from whole_cases import CASES, ERROR, PARTS, Case


class Running:
    """A program at work on one case, or on several one after another, and where its output goes."""

    def __init__(self, cases: list[int], gpus: list[str], arguments: argparse.Namespace, folder: Path):
        self.left, self.gpus, self.ranks = list(cases), gpus, CASES[cases[0]].ranks
        self.log, self.start = folder / f"{cases[0]}.log", time.perf_counter()
        command = [sys.executable, "-W", "ignore"]
        if self.ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        command += [__file__, "--case", *map(str, cases), "--device", arguments.device, *["--tiny"] * arguments.tiny]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        self.process = subprocess.Popen(
            command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()

    def found(self) -> dict[int, dict]:
        """What it printed since the last call, by case; of a program that has failed also why it printed no more."""
        failed = self.process.poll() not in (None, 0)
        lines = self.log.read_text().splitlines()
        results = [
            json.loads(line.removeprefix("RESULT "))
            for line in lines
            if line.startswith("RESULT {") and line[-1] == "}"
        ]
        rows = {row.pop("index"): row for row in results}
        unsaid = [index for index in self.left if index not in rows]
        if failed and unsaid:
            errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
            rows[unsaid[0]] = {"error": " ".join((errors or lines or ["no output"])[-1].split())[:ERROR]}
        new = {index: rows[index] for index in self.left if index in rows}
        self.left = [index for index in self.left if index not in new]
        return new


def programs(cases: list[int]) -> list[list[int]]:
    """A program for each case of several ranks; those of one share it by part and provider: it finds compiled code
    again.
    """
    found: dict = {}
    for index in cases:
        case = CASES[index]
        found.setdefault((case.part, case.provider) if case.ranks == 1 else index, []).append(index)
    return list(found.values())


def setting_of(case: Case) -> dict:
    """The columns that say what a row is of."""
    return {
        "case": case.name, "part": case.part, "model": case.model, "provider": case.provider, "ranks": case.ranks,
        "wrapper": case.wrapper, "row": case.row, "documents": case.documents, "compiled": int(case.compiled),
        "checkpointing": case.checkpointing, "lora": int(case.lora), "dynamic": int(case.dynamic),
        "vocabulary": case.vocabulary or "", "fused_loss": int(case.fused_loss and case.provider == "ours"),
    }  # fmt: skip


RESULT = ("tokens_per_second_a_gpu", "mfu", "peak_gib", "step_ms", "loss", "warm_up_s", "tokens", "kept", "error")


def visible_gpus(device: str) -> list[str]:
    """Those of CUDA_VISIBLE_DEVICES, so that two of these programs can share a machine; on the CPU two names."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count() if device == "cuda" else 2
    return given.split(",")[:count] if given else list(map(str, range(count)))


def measure(arguments: argparse.Namespace, gpus: list[str]) -> list[dict]:
    """All rows, the kept ones too."""
    path = arguments.out / f"whole_{arguments.device}.csv"
    before = path if path.exists() else RESULTS / path.name
    rows = {row["case"]: row for row in read_rows(before)} if before.exists() else {}
    where = measured_on(arguments.device)
    ahead = [i for i, case in enumerate(CASES) if case.part in arguments.part and case.ranks <= len(gpus)]
    ahead = [i for i in ahead if not arguments.only or any(part in CASES[i].name for part in arguments.only)]
    waiting, running, free, deadline = programs(ahead), [], list(gpus), time.perf_counter() + arguments.limit
    with tempfile.TemporaryDirectory() as folder:
        while (waiting or running) and time.perf_counter() < deadline:
            while waiting and CASES[waiting[0][0]].ranks <= len(free):
                taken = [free.pop(0) for _ in range(CASES[waiting[0][0]].ranks)]
                running.append(Running(waiting.pop(0), taken, arguments, Path(folder)))
            time.sleep(0.2)
            for each in list(running):
                ended = each.process.poll() is not None
                for index, found in each.found().items():
                    case, empty = CASES[index], dict.fromkeys(RESULT, "")
                    rows[case.name] = {**setting_of(case), **empty, **found, **where}
                    write_csv(path, list(rows.values()), show=False)
                    print(f"{case.name}: {found} ({time.perf_counter() - each.start:.0f} s)", flush=True)
                    if "error" in found:
                        print(each.log.read_text()[-3000:] if arguments.verbose else "", flush=True)
                if ended:
                    running.remove(each)
                    free = sorted([*free, *each.gpus])
                    if each.left:
                        waiting.insert(0, each.left)
        for each in running:
            each.end()
            print(f"{[CASES[index].name for index in each.left]}: ended by --limit", flush=True)
        print(f"not started: {[CASES[index].name for each in waiting for index in each]}", flush=True)
    return list(rows.values())


def main():
    parser = bench_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name contains one of these")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--verbose", action="store_true", help="the end of what a case printed that failed")
    parser.add_argument("--case", type=int, nargs="+", help=argparse.SUPPRESS)  # in its own program
    arguments = parser.parse_args()
    if arguments.case is not None:
        from whole_model import run

        run({index: CASES[index] for index in arguments.case}, arguments.device, arguments.tiny)
        return
    measure(arguments, visible_gpus(arguments.device))


if __name__ == "__main__":
    main()
