"""python benchmarks/bench_report.py: the report on the docstrings of the standard library, results/report_docstrings.*

    python benchmarks/bench_report.py --large

also times ``python -m packing_ops report`` on a million generated documents: results/report_cpu.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import RESULTS, device_name, measured_on, write_csv
from provenance import ROOT, add_commit


def write_lines(path, records):
    with path.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def report(file: Path, *options) -> float:
    """Seconds of the whole command, the start of Python included."""
    command = [sys.executable, "-m", "packing_ops", "report", file.name, *map(str, options)]
    start = time.perf_counter()
    subprocess.run(command, cwd=file.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return time.perf_counter() - start


def docstrings(folder: Path, out: Path) -> None:
    file = folder / "docstrings.jsonl"
    subprocess.run([sys.executable, str(ROOT / "examples" / "docstrings.py"), "--out", str(file)], check=True)
    name = out.resolve() / "report_docstrings"
    outputs = "--json", f"{name}.json", "--plot", f"{name}.png"
    report(file, "--capacity", 2048, "--dp", 8, *outputs)
    add_commit(Path(f"{name}.json"), device=device_name("cpu"), torch=torch.__version__)


def generated(form: str, count: int):
    """Log-normal lengths, median 300 bytes."""
    lengths = (torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.9).exp().mul(300).long()
    letters = "the quick brown fox jumps over the lazy dog " * 200
    for length in lengths.clamp(2, len(letters)).tolist():
        text = letters[:length]
        if form == "text":
            yield {"text": text}
        else:
            question, answer = text[: length // 2], text[length // 2 :]
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def speed(folder: Path, form: str, count: int) -> dict:
    file = folder / f"{form}.jsonl"
    write_lines(file, generated(form, count))
    seconds = report(file, "--dp", 8)
    size = file.stat().st_size
    file.unlink()
    return {
        "documents": count, "form": form, "megabytes": round(size / 1e6), "seconds": f"{seconds:.1f}",
        "documents_per_second": round(count / seconds),
        **measured_on("cpu"),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also a million documents, half a gigabyte for a minute")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        docstrings(Path(folder), arguments.out)
        if arguments.large:
            rows = [speed(Path(folder), form, 1_000_000) for form in ("text", "messages")]
            write_csv(arguments.out / "report_cpu.csv", rows)


if __name__ == "__main__":
    main()
