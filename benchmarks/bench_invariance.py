"""python benchmarks/bench_invariance.py [--device cpu|cuda] [--tokens 1000000] [--steps 10] [--layers eager compiled]
[--models "Qwen3.5's shape, 8 layers"]

The mode apply_packing_ops(model, invariant=True) beside the same model without it, each in a process of its own, since
torch reads the workspace of cuBLASLt once. The processes count side by side, and time one after the other. Two
questions:

- How many of the log-probabilities of --tokens tokens, and of their entropies, have other bits in another row:
  documents in random order, in rows of random capacity down to one document, with random chunks of the vocabulary,
  beside the first row that each was in. "claimed" is what check_invariance says of the layers as they run.
- What a training step costs, forward and backward of one row, eager and with compiled decoder layers.
"""

import argparse
import contextlib
import fcntl
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import measured_on, write_csv
from result_rows import read_rows

import packing_ops as po

RESULTS = Path(__file__).resolve().parent / "results"
# Of Qwen3's configuration where nothing else is said; the 8B model with fewer layers.
_QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960}
_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # 3 of 4 layers: delta nets
_BAMBA = {"model_type": "bamba", "attn_layer_indices": [2], "num_attention_heads": 16, "num_key_value_heads": 4}
MODELS = {
    "cuda": {
        "0.6B": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
        "8B, 6 layers": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 6,
                         "num_attention_heads": 32},
        "Qwen3.5's shape, 8 layers": {**_QWEN3_5, "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3584,
                                      "num_hidden_layers": 8, "head_dim": 256, "linear_num_key_heads": 16,
                                      "linear_num_value_heads": 16},
        "Bamba's shape, 4 layers": {**_BAMBA, "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 7168,
                                    "num_hidden_layers": 4, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128},
    },
    "cpu": {
        "tiny": {"vocab_size": 9000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
                 "num_attention_heads": 4, "num_key_value_heads": 2},
        "tiny hybrid": {**_QWEN3_5, "vocab_size": 9000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
                        "linear_value_head_dim": 16},
    },
}  # fmt: skip
LONGEST = {"cuda": 4096, "cpu": 60}
CAPACITIES = {"cuda": (4096, 8192, 20_000), "cpu": (30, 100)}  # of rows, beside every document alone
CHUNKS = (None, 1000, 4096, 12_000, 65_536)
ROW = {"cuda": 16_384, "cpu": 128}  # tokens of a training step
ROUNDS = 8
LAYERS = ["eager", "compiled"]


def model_of(name: str, device: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"model_type": "qwen3", **MODELS[device][name], "use_cache": False, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**sizes)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


def documents_of(tokens: int, vocab: int, device: str) -> list[torch.Tensor]:
    draw, found = random.Random(0), []
    while tokens > 0:
        length = min(tokens, max(1, round(LONGEST[device] ** draw.random())))
        found.append(torch.randint(vocab, (length,), device=device))
        tokens -= length
    return found


def packs(documents: list[torch.Tensor], capacity: int, draw: random.Random) -> list[list[int]]:
    """Indices of documents, row by row, in random order; a capacity of 0 is every document alone."""
    rows, total = [], 0
    for i in draw.sample(range(len(documents)), len(documents)):
        if not rows or total + len(documents[i]) > capacity:
            rows.append([])
            total = 0
        rows[-1].append(i)
        total += len(documents[i])
    return rows


def hidden_of(model: torch.nn.Module, documents: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """(hidden states, ids, cu_seqlens) of documents in one row."""
    ids = torch.cat(documents)
    lengths = torch.tensor([0, *map(len, documents)])
    cu_seqlens = lengths.cumsum(0).to(ids.device, torch.int32)
    positions = po.position_ids_from_cu_seqlens(cu_seqlens, len(ids))
    longest = max(map(len, documents))
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest}
    out = model.model(input_ids=ids[None], position_ids=positions[None], **told)
    return out.last_hidden_state[0], ids, cu_seqlens


@torch.no_grad()
def count_differing(model: torch.nn.Module, tokens: int, device: str) -> tuple[int, int]:
    """(log-probabilities that were compared, those of which they or the entropy have other bits)."""
    documents, draw = documents_of(-(-tokens // ROUNDS), model.config.vocab_size, device), random.Random(1)
    capacities = [CAPACITIES[device][-1], 0, *(draw.choice(CAPACITIES[device]) for _ in range(ROUNDS - 1))]
    first: dict[int, torch.Tensor] = {}
    compared = differ = 0
    for capacity in capacities:
        for row in packs(documents, capacity, draw):
            hidden, ids, cu_seqlens = hidden_of(model, [documents[i] for i in row])
            found = po.token_logps(
                hidden, model.lm_head.weight, ids, cu_seqlens, chunk=draw.choice(CHUNKS), entropy=True
            )
            for i, ours in zip(row, torch.stack(found, 1).split([len(documents[i]) for i in row]), strict=True):
                if i not in first:
                    first[i] = ours
                    continue
                compared += len(ours)
                differ += int((ours != first[i]).any(1).sum())
    return compared, differ


def step_times(model: torch.nn.Module, steps: int, device: str) -> list[float]:
    """Milliseconds of a forward and backward of the same row."""
    documents = documents_of(ROW[device], model.config.vocab_size, device)
    times = []
    for _ in range(steps + 3):
        synchronize(device)
        start = time.perf_counter()
        hidden, ids, cu_seqlens = hidden_of(model, documents)
        po.chunked_cross_entropy(hidden, model.lm_head.weight, ids, cu_seqlens).backward()
        model.zero_grad(set_to_none=True)
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return times[3:]


@contextlib.contextmanager
def turn(lock: str | None, kind: int) -> Iterator[None]:
    """Counting (LOCK_SH) goes on beside counting, timing (LOCK_EX) alone."""
    if lock is None:
        yield
        return
    with open(lock) as file:
        fcntl.flock(file, kind)
        yield
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    name: str, device: str, mode: bool, kinds: list[str], tokens: int, steps: int, lock: str | None
) -> list[dict]:
    from packing_ops.integrations.transformers import apply_packing_ops

    model = model_of(name, device)
    why = apply_packing_ops(model, invariant=mode, rms_norm=None if mode else False).skipped.get("invariant", "")
    rows = []
    for layers in kinds:
        if layers == "compiled":
            if device == "cpu":
                break  # not served there
            for layer in model.model.layers:
                layer.compile()
            tokens //= 4
        with turn(lock, fcntl.LOCK_SH):
            compared, differ = count_differing(model, tokens, device)
        with turn(lock, fcntl.LOCK_EX):
            times = sorted(step_times(model, steps, device))
        if mode and layers == "compiled":  # apply_packing_ops saw the eager layers
            why = "; ".join(po.check_invariance(model).why_not())
        rows.append(
            {
                **{"model": name, "mode": "invariant" if mode else "without", "layers": layers},
                **{"compared": compared, "differ": differ, "claimed": "no: " + why if why else "yes" if mode else ""},
                **{
                    "step_ms": round(statistics.median(times), 2),
                    "least_ms": round(times[0], 2),
                    "tokens": ROW[device],
                },
                **measured_on(device),
            }
        )
    return rows


def started(name: str, mode: bool, lock: str, arguments: argparse.Namespace) -> subprocess.Popen:
    # env sets the variables: they must be there before torch's first product on the GPU. A model stays on one GPU.
    variables = ["CUBLASLT_WORKSPACE_SIZE=1"] if mode else []
    if (gpus := torch.cuda.device_count()) > 1:
        variables.append(f"CUDA_VISIBLE_DEVICES={list(MODELS[arguments.device]).index(name) % gpus}")
    command = ["env", *variables, sys.executable, __file__, "--only", name]
    command += ["--device", arguments.device, "--tokens", str(arguments.tokens), "--steps", str(arguments.steps)]
    command += ["--lock", lock, *(["--mode"] if mode else []), "--layers", *arguments.layers]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--layers", nargs="+", choices=LAYERS, default=LAYERS, help="the CSV keeps its rows of the others"
    )
    parser.add_argument("--models", nargs="+", help="some of MODELS; the CSV keeps its rows of the others")
    parser.add_argument("--only", help="one model, in this process: prints its rows as JSON")
    parser.add_argument("--mode", action="store_true", help="with --only: the mode")
    parser.add_argument("--lock", help="with --only: a file that processes beside it lock too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if arguments.only:
        of_run = arguments.layers, arguments.tokens, arguments.steps, arguments.lock
        print(json.dumps(measure(arguments.only, arguments.device, arguments.mode, *of_run)))
        return
    names = arguments.models or [*MODELS[arguments.device]]
    if unknown := {*names} - {*MODELS[arguments.device]}:
        parser.error(f"--models: expected some of {[*MODELS[arguments.device]]}, got {sorted(unknown)}")
    with tempfile.NamedTemporaryFile() as lock:
        runs = [started(name, mode, lock.name, arguments) for name in names for mode in (False, True)]
        path = arguments.results / f"invariance_{arguments.device}.csv"
        kept = read_rows(path) if path.exists() else []
        rows, failed = [row for row in kept if row["layers"] not in arguments.layers or row["model"] not in names], []
        for run in runs:
            output = run.communicate()[0]
            rows += [] if run.returncode else json.loads(output.splitlines()[-1])
            failed += [" ".join(run.args)] if run.returncode else []
            write_csv(path, rows, show=run is runs[-1])
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
