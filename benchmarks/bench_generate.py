"""python benchmarks/bench_generate.py [--device cpu|cuda]: tokens that a transformers model samples in a second.

generate_batch, its continuous batching, and generate, on a padded batch, each with packing_ops' attention and
transformers' own; greedy, every answer of the same length. On a GPU a Qwen3 of 0.6B's shape with random weights. Each
row is the best of --repeats runs that take turns, after one that is not timed. Needs transformers 5.23 or later.
"""

import random
import time
from collections.abc import Callable

import torch
from harness import bench_parser, measured_on, write_csv

MODELS = {
    "cuda": {
        **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    },
    "cpu": {
        **{"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    },
}
REQUESTS = {"cuda": (32, 512, 128), "cpu": (8, 64, 16)}  # prompts, the longest, and tokens of an answer
STEP_TOKENS, PAGES = {"cuda": 1024, "cpu": 64}, {"cuda": 160, "cpu": 64}
# For each call its providers: attn_implementation, and whether continuous batching makes CUDA graphs (None: it
# decides).
PROVIDERS = {
    "generate_batch": {
        "packing_ops": ("packing_ops", None),
        "packing_ops, no CUDA graphs": ("packing_ops", False),
        "sdpa": ("sdpa", None),
        "eager": ("eager", None),
    },
    "generate": {"packing_ops": ("packing_ops", None), "sdpa": ("sdpa", None)},
}


def model_of(implementation: str, device: str) -> torch.nn.Module:
    import transformers

    import packing_ops.integrations.transformers

    packing_ops.integrations.transformers.register()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**MODELS[device], eos_token_id=None, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def prompts_of(device: str) -> list[list[int]]:
    draw, (count, longest, _) = random.Random(0), REQUESTS[device]
    vocab = MODELS[device]["vocab_size"]
    return [[draw.randrange(1, vocab) for _ in range(draw.randint(longest // 8, longest))] for _ in range(count)]


def continuous(model: torch.nn.Module, prompts: list[list[int]], device: str, graphs: bool | None) -> int:
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    new = REQUESTS[device][2]
    generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        num_blocks=PAGES[device], max_batch_tokens=STEP_TOKENS[device], use_cuda_graph=graphs
    )
    out = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    return sum(len(each.generated_tokens) for each in out.values())


def padded(model: torch.nn.Module, prompts: list[list[int]], device: str, graphs: bool | None) -> int:
    longest, new = max(map(len, prompts)), REQUESTS[device][2]
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new)
    return (out.shape[1] - ids.shape[1]) * len(prompts)


CALLS = {"generate_batch": continuous, "generate": padded}


def timed(call: Callable[[], int]) -> tuple[int, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def rows_of(name: str, device: str, repeats: int) -> list[dict]:
    prompts, best = prompts_of(device), {}
    expected = len(prompts) * REQUESTS[device][2]
    models = {each: model_of(each, device) for each, _ in PROVIDERS[name].values()}
    for turn in range(repeats + 1):
        for provider, (implementation, graphs) in PROVIDERS[name].items():
            with torch.no_grad():
                made, seconds = timed(lambda: CALLS[name](models[implementation], prompts, device, graphs))  # noqa: B023
            print(f"{name}, {provider}: {made} tokens in {seconds:.2f} s", flush=True)
            if made != expected:
                raise SystemExit(f"{provider}: expected {expected} tokens, got {made}")
            if turn > 0:
                best[provider] = min(seconds, best.get(provider, seconds))
    return [
        {
            **{"call": name, "provider": provider, "requests": len(prompts), "prompt_tokens": sum(map(len, prompts))},
            **{"new_tokens": expected, "tokens_per_second": round(expected / seconds, 1)},
            **{"times_of_ours": round(seconds / best["packing_ops"], 3)},
            **measured_on(device),
        }
        for provider, seconds in best.items()
    ]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", choices=sorted(CALLS))
    arguments = parser.parse_args()
    rows = []
    for way in [arguments.only] if arguments.only else CALLS:
        rows += rows_of(way, arguments.device, arguments.repeats)
        write_csv(arguments.out / f"generate_{arguments.device}.csv", rows)


if __name__ == "__main__":
    main()
