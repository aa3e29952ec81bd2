"""Losses of many training steps on real text: python benchmarks/bench_curve.py [--only ours fa2] [--steps 300]

Qwen3-0.6B's shape from one random initialisation, in float32, computing in bfloat16 by autocast. Documents are the
docstrings of the standard library, a token a byte, cut at 2,048. They are packed into rows once, and each optimizer
step trains on one row. The rows and their order are the same for all: padded has the documents of a row, sorted by
length, in batches of 8, whose gradients it accumulates. fa2_again is fa2 once more: how far two equal runs differ.

Each provider runs in a separate process, and as many side by side as there are GPUs. It starts no step after --limit
seconds of its steps, so that its curve may be shorter. Writes results/curve_<device>.csv: of each step its loss, how
far that is from ours, its seconds and speed; the first steps compile. Rows of other providers stay.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from bench_whole import visible_gpus
from e2e_batches import Batches, packed_rows, padded_batches
from harness import bench_parser, measured_on, seconds, write_csv
from provenance import ROOT
from result_rows import rows_before
from whole_cases import Case
from whole_model import model_of, step

import packing_ops as po

PROVIDERS = {  # in the order in which they start
    "ours": "ours",
    "fa2": "fa2",
    "fa2_liger_loss": "fa2_liger_loss",
    "fa2_again": "fa2",
    "padded": "padded",
}
RISING = 30  # steps in which the learning rate rises
ROW = 16_384


def rows_of_documents(text: Path, slots: int) -> list[list[torch.Tensor]]:
    """The documents of each row. The end of a document is a byte of 0."""
    lines = [json.loads(line) for line in text.read_text(encoding="utf-8").splitlines()]
    documents = [(line["prompt"] + line["completion"]).encode()[: slots // 8 - 1] + b"\0" for line in lines]
    tensors = [torch.tensor(list(document)) for document in documents]
    return [[tensors[i] for i in items] for items in po.pack_sequences([len(each) for each in tensors], slots).bins]


def batches_of(documents: list[torch.Tensor], case: Case, device: str) -> Batches:
    made = packed_rows(documents, case.row, True) if case.row else padded_batches(sorted(documents, key=len))
    placed = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()} for batch in made.batches]
    return made._replace(batches=placed)


def trained(name: str, arguments: argparse.Namespace) -> list[dict]:
    """A row for each step."""
    device, tiny, packed = arguments.device, arguments.tiny, name != "padded"
    slots = ROW // 16 if tiny else ROW
    case = Case("curve", "Qwen3-0.6B", PROVIDERS[name], slots * packed, compiled=packed, float32=True)
    rows, order = rows_of_documents(arguments.text, slots), []
    while len(order) < arguments.steps:  # each epoch in another order
        order += torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(order))).tolist()
    order = order[: arguments.steps]
    made = {i: batches_of(rows[i], case, device) for i in dict.fromkeys(order)}
    losses, times = [], []
    with contextlib.ExitStack() as undo:
        model, _ = model_of(case, device, tiny, undo)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, (at + 1) / RISING))

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        optimizer.register_step_pre_hook(clip)

        def once(i):
            losses.append(step(model, optimizer, made[i], mixed=True))
            schedule.step()

        for i in order:
            if sum(times) < arguments.limit:
                times.append(seconds(lambda i=i: once(i), device))
    tokens = [sum(map(len, rows[i])) for i in order]
    return [
        {"step": at, "loss": f"{float(loss):.5f}", "seconds": f"{took:.4f}", "tokens_per_second": f"{count / took:.0f}"}
        for at, (loss, took, count) in enumerate(zip(losses, times, tokens, strict=False), 1)
    ]


def in_a_process(name: str, gpus: queue.Queue, text: Path, arguments: argparse.Namespace) -> list[dict]:
    """What trained returns in a process that has one GPU, with the provider's name. None of its rows if it fails."""
    gpu, out = gpus.get(), text.with_name(f"{name}.json")
    options = {"--device": arguments.device, "--steps": arguments.steps, "--limit": arguments.limit}
    options |= {"--of": name, "--text": text, "--out": out}
    command = [sys.executable, "-W", "ignore", __file__, *["--tiny"] * arguments.tiny]
    command += [str(part) for option in options.items() for part in option]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    gpus.put(gpu)
    found = json.loads(out.read_text()) if ran.returncode == 0 else []
    said = f"{len(found)} steps, last loss {found[-1]['loss']}" if found else f"failed\n{ran.stdout[-3000:]}"
    print(f"{name}: {said}", flush=True)
    return [{"provider": name, **row} for row in found]


def with_differences(rows: list[dict]) -> list[dict]:
    """How far each loss is from ours of the same step, and from FlashAttention-2's."""
    for column, provider in (("apart", "ours"), ("apart_from_fa2", "fa2")):
        its = {str(row["step"]): float(row["loss"]) for row in rows if row["provider"] == provider}
        for row in rows:
            loss = its.get(str(row["step"]))
            row[column] = "" if loss is None else f"{abs(float(row['loss']) - loss):.5f}"
    return rows


def main():
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit", type=float, default=75, help="seconds of a provider's steps")
    parser.add_argument("--tiny", action="store_true", help="a small model and short rows, to see that it runs")
    parser.add_argument("--of", choices=PROVIDERS, help=argparse.SUPPRESS)  # in its process
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of:
        arguments.out.write_text(json.dumps(trained(arguments.of, arguments)))
        return
    gpus: queue.Queue = queue.Queue()
    for gpu in visible_gpus(arguments.device):
        gpus.put(gpu)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(gpus.qsize()) as pool:
        text = Path(folder) / "docstrings.jsonl"
        subprocess.run([sys.executable, ROOT / "examples" / "docstrings.py", "--out", text], check=True)
        runs = list(pool.map(lambda name: in_a_process(name, gpus, text, arguments), arguments.only))
    path, where = arguments.out / f"curve_{arguments.device}.csv", measured_on(arguments.device)
    found = [row | where for run in runs for row in run]
    measured = {row["provider"] for row in found}
    kept = [row for row in rows_before(path) if row["provider"] not in measured]
    write_csv(path, with_differences(found + kept), show=False)
    if len(measured) < len(arguments.only):
        sys.exit(f"failed: {[name for name in arguments.only if name not in measured]}")


if __name__ == "__main__":
    main()
