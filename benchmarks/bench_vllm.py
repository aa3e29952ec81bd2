"""python benchmarks/bench_vllm.py [--device cpu|cuda]: tokens that vLLM samples in a second, and whether a trainer
computes the same log-probabilities. --profile: what a decoding step takes, by kernel.

vLLM with packing_ops (by PACKING_OPS_VLLM=1), with its own backend, and in its own batch-invariant mode, each eager and
with CUDA graphs: of compiled layers, and with packing_ops of the decoding steps as they are. On a GPU a Qwen3 of 0.6B's
shape with random weights. Each provider is a process of its own with the engine in it, in its default settings but for
those of the table. All import vLLM at the same time and then take turns. A row is the best of --repeats runs after a
shorter one that is not timed. The column log_probs_differ counts those of all timed runs, next to token_logps of packed
rows of a trainer in the mode.

--profile writes profile_vllm_cuda.csv too: of each provider and number of requests the microseconds of a decoding step
that is not profiled, and of one that is those of each kernel, of all, and those in which none runs (the GPU waits for
the host).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from bench_generate import MODELS as OF_GENERATE
from harness import bench_parser, measured_on, write_csv
from parallel_timing import covered, kernels

MODELS = {**OF_GENERATE, "cpu": OF_GENERATE["cpu"] | {"head_dim": 32}}  # vLLM's attention on the CPU has no 16
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
REQUESTS = {"cuda": (64, 256), "cpu": (4, 8)}
LONGEST, ANSWER = {"cuda": 256, "cpu": 32}, {"cuda": 200, "cpu": 16}  # tokens of a prompt, at most, and of an answer
PACK = 32  # documents that the trainer takes in one row

SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
INVARIANT, EAGER, COMPILED = {"VLLM_BATCH_INVARIANT": "1"}, {"enforce_eager": True}, {"compilation_config": SIZES}
PROVIDERS = {  # options of the engine, environment
    "packing_ops": (COMPILED, {"PACKING_OPS_VLLM": "1"}),
    "vLLM": (COMPILED, {}),
    "packing_ops, temperature 0.7": (COMPILED | {"logprobs_mode": "processed_logprobs"}, {"PACKING_OPS_VLLM": "1"}),
    "packing_ops, eager": ({"attention_backend": "CUSTOM", **EAGER}, {}),
    "vLLM batch-invariant": (COMPILED, INVARIANT),
    "vLLM, eager": (EAGER, {}),
    "vLLM batch-invariant, eager": (EAGER, INVARIANT),
}
TEMPERATURES = {"packing_ops, temperature 0.7": 0.7}  # of others 1
ON = {"cuda": tuple(PROVIDERS), "cpu": ("packing_ops, eager", "vLLM, eager")}
LIMIT = 120  # seconds of a provider
KERNEL, SMALL = 100, 10  # characters of a kernel's name; microseconds of a step below which it is one of the others
STEPS = 16  # of decoding, timed and then profiled


def prompts_of(device: str, count: int) -> list[list[int]]:
    draw, longest, vocab = random.Random(count), LONGEST[device], MODELS[device]["vocab_size"]
    return [[draw.randrange(1, vocab) for _ in range(draw.randint(longest // 8, longest))] for _ in range(count)]


def profile(engine, sampling, prompts: list[list[int]]) -> list[dict]:
    """Calls and microseconds in a decoding step of all prompts, by kernel."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)

    def steps() -> None:
        for _ in range(STEPS):
            engine.step()

    steps()
    start = time.perf_counter()
    steps()
    step, found = time.perf_counter() - start, kernels(steps)
    while engine.has_unfinished_requests():
        engine.step()
    spans = [(start, end) for _, start, end in found]
    busy, by_name = covered(spans), defaultdict(list)
    for name, start, end in found:
        by_name[name[:KERNEL]].append(end - start)
    for name in [name for name, each in by_name.items() if sum(each) < SMALL * STEPS]:
        by_name["others"] += by_name.pop(name)
    rows = [
        ("a step", STEPS, step * 1e6),
        ("all kernels", len(found), busy),
        ("no kernel", 0, max(end for _, end in spans) - min(start for start, _ in spans) - busy),
        *sorted(((name, len(each), sum(each)) for name, each in by_name.items()), key=lambda row: -row[2]),
    ]
    return [{"kernel": n, "calls": f"{c / STEPS:.1f}", "us": f"{us / STEPS:.1f}"} for n, c, us in rows]


def sample(arguments: argparse.Namespace) -> None:
    """One provider's process: seconds of each run and what was sampled, into a file."""
    from vllm import LLM, SamplingParams

    from packing_ops.integrations.vllm import register

    if not sys.stdin.readline():  # its turn, or the end
        return
    register()
    device, provider, folder = arguments.device, arguments.provider, arguments.folder
    options, answer = PROVIDERS[provider][0], ANSWER[device]
    if device == "cuda":
        options = options | {"gpu_memory_utilization": 0.3}
    sizes = {"max_model_len": LONGEST[device] + answer, "max_num_seqs": max(REQUESTS[device])}
    dtype = str(DTYPES[device]).removeprefix("torch.")
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype=dtype, **sizes, **options)

    def of_length(tokens: int) -> SamplingParams:
        options = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        return SamplingParams(temperature=TEMPERATURES.get(provider, 1.0), **options)

    def run(prompts: list[list[int]], tokens: int) -> tuple[float, list[tuple[list[int], list[float]]]]:
        llm.reset_prefix_cache()
        given, start = [{"prompt_token_ids": prompt} for prompt in prompts], time.perf_counter()
        found = llm.generate(given, of_length(tokens), use_tqdm=False)
        seconds, answers = time.perf_counter() - start, [each.outputs[0] for each in found]
        logps = [[place[t].logprob for place, t in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
        return seconds, [([*p, *a.token_ids], lp) for p, a, lp in zip(prompts, answers, logps, strict=True)]

    found, profiles = {}, []
    for count in REQUESTS[device]:
        prompts = prompts_of(device, count)
        run(prompts, min(answer, 32))
        runs = [run(prompts, answer) for _ in range(arguments.repeats)]
        found[count] = [seconds for seconds, _ in runs], [each for _, sampled in runs for each in sampled]
        print(f"{provider}, {count} requests: {count * answer / min(found[count][0]):,.0f} tokens/s", flush=True)
        if arguments.profile:
            of_all = {"provider": provider, "requests": count}
            profiles += [of_all | row for row in profile(llm.llm_engine, of_length(4 * STEPS), prompts)]
    (folder / f"{provider}.json").write_text(json.dumps([found, profiles]))


@torch.no_grad()
def differ(model: torch.nn.Module, sampled: list, temperature: float | None = None) -> tuple[int, int]:
    """(log-probabilities that are not the trainer's, all of them)."""
    import packing_ops as po

    found = []
    for part in range(0, len(sampled), PACK):
        documents, logps = zip(*sampled[part : part + PACK], strict=True)
        lengths = [len(each) for each in documents]
        metadata = po.PackedMetadata.from_lengths(lengths, device=model.device)
        row = torch.tensor([token for document in documents for token in document], device=model.device)
        of_row = {"input_ids": row[None], "position_ids": metadata.position_ids[None], **metadata.to_transformers()}
        hidden = model.model(**of_row, use_cache=False).last_hidden_state
        scaled = {"temperature": torch.full([len(row)], temperature, device=model.device)} if temperature else {}
        ours = po.token_logps(hidden, model.lm_head.weight, row, metadata, **scaled)
        ours = ours.cpu().split(lengths)
        found += [mine[-len(lp) - 1 : -1] != torch.tensor(lp) for mine, lp in zip(ours, logps, strict=True)]
    return int(torch.cat(found).sum()), sum(map(len, found))


def rows_of(model: torch.nn.Module, provider: str, measured: dict, device: str) -> list[dict]:
    rows = []
    for requests, (seconds, sampled) in measured.items():
        different, of = differ(model, sampled, TEMPERATURES.get(provider))
        new = int(requests) * ANSWER[device]
        prompt_tokens = sum(map(len, prompts_of(device, int(requests))))
        rows.append(
            {
                **{"provider": provider, "requests": requests, "prompt_tokens": prompt_tokens, "new_tokens": new},
                **{"tokens_per_second": round(new / min(seconds), 1), "log_probs_differ": different, "log_probs": of},
                **measured_on(device),
            }
        )
        print({name: rows[-1][name] for name in ("provider", "requests", "tokens_per_second")}, different, "of", of)
    return rows


def measure(arguments: argparse.Namespace) -> int:
    import transformers

    from packing_ops.integrations.transformers import apply_packing_ops

    device, rows, profiles, failed = arguments.device, [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), {}
        again = [sys.executable, __file__, "--device", device, "--repeats", str(arguments.repeats), "--folder", name]
        again += ["--profile"] * arguments.profile
        for provider in arguments.only or ON[device]:
            environment = {**os.environ, **PROVIDERS[provider][1], "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            command = [*again, "--provider", provider]
            processes[provider] = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**MODELS[device])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[device]).to(device)
        model.save_pretrained(folder)
        assert (applied := apply_packing_ops(model, invariant=True)).skipped == {}, applied.skipped
        for provider, process in processes.items():
            start = time.perf_counter()
            try:
                process.communicate("go\n", timeout=LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print(f"{provider}: {time.perf_counter() - start:.0f} s in all", flush=True)
            if process.returncode != 0:
                failed.append(provider)
                continue
            found, of_steps = json.loads((folder / f"{provider}.json").read_text())
            rows += rows_of(model, provider, found, device)
            write_csv(arguments.out / f"vllm_{device}.csv", rows)
            profiles += [row | measured_on(device) for row in of_steps]
            if profiles:
                write_csv(arguments.out / f"profile_vllm_{device}.csv", profiles)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=sorted(PROVIDERS))
    parser.add_argument("--profile", action="store_true", help="decoding steps by kernel, on a GPU")
    parser.add_argument("--provider", help="a process of its own: measure this one")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.provider is None:
        sys.exit(measure(arguments))
    sample(arguments)


if __name__ == "__main__":
    main()
