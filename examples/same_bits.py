"""A step of GRPO whose first ratio is exactly 1: log-probabilities by sequence, in micro-batches, and packed anyhow.

    python examples/same_bits.py                 a tiny Qwen3, on the CPU in a few seconds
    python examples/same_bits.py --device cuda

Log-probabilities of the samples are taken one sequence at a time, as a rollout takes them. The update takes them again,
in micro-batches of 1, 2 and 8 sequences and with all in one row in random order. The ratio of both is what PPO and GRPO
clip. Before the first optimizer step it should be 1. It is with apply_packing_ops(model, invariant=True), and it is not
quite without. The picture shows how far off it is, token by token.
"""

import argparse
import os
from pathlib import Path

from common.options import add_device, needs

os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # torch before 2.13 reads it once, at its first product on a GPU


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="for each of 4 prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for same_bits_DEVICE.json and .png")
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", "matplotlib", options=parse_arguments)

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from common.results import save_results

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

PROMPTS, PROMPT = 4, 2  # how many, and their length
LONGEST = {"cpu": 60, "cuda": 600}  # response
COLORS = ("#D55E00", "#0072B2")  # without the mode, with it
SIZES = {
    "cpu": {"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16},
    "cuda": {
        **{"vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
        **{"head_dim": 128},
    },
}


def new_model(arguments: argparse.Namespace) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        **SIZES[arguments.device], num_hidden_layers=4, num_key_value_heads=2, initializer_range=0.1, use_cache=False
    )
    torch.manual_seed(arguments.seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(arguments.device, torch.bfloat16 if arguments.device == "cuda" else torch.float32)


def samples_of(arguments: argparse.Namespace) -> list[torch.Tensor]:
    """Token ids of prompts and responses; most responses are short."""
    vocab, longest = SIZES[arguments.device]["vocab_size"], LONGEST[arguments.device]
    samples = []
    for _ in range(PROMPTS):
        prompt = torch.randint(vocab, (PROMPT,))
        for length in (longest ** torch.rand(arguments.samples)).round().int().tolist():
            samples.append(torch.cat([prompt, torch.randint(vocab, (length,))]).to(arguments.device))
    return samples


def logps_of(model: torch.nn.Module, samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the response tokens of samples that share one packed row."""
    lengths = [len(sample) for sample in samples]
    row = torch.cat(samples)
    cu_seqlens = po.cu_seqlens_from_lengths(torch.tensor(lengths)).to(row.device)
    positions = po.position_ids_from_cu_seqlens(cu_seqlens, len(row))
    hidden = model.model(input_ids=row[None], position_ids=positions[None]).last_hidden_state
    logps = po.token_logps(hidden, model.lm_head.weight, row, cu_seqlens)
    return [part[PROMPT - 1 : -1] for part in logps.split(lengths)]  # slot t predicts token t + 1


def layouts(count: int) -> dict[str, list[list[int]]]:
    """{name: rows of indices of samples}"""
    found = {
        f"micro-batches of {size}": [list(range(i, min(i + size, count))) for i in range(0, count, size)]
        for size in (1, 2, 8)
    }
    found["all in one row, in random order"] = [torch.randperm(count).tolist()]
    return found


def ratios(model: torch.nn.Module, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """{layout: ratio of every response token}, and a gradient of the GRPO loss of the last layout in the model."""
    with torch.no_grad():
        old = [logps_of(model, [sample])[0] for sample in samples]
    advantages = torch.randn(len(samples), device=samples[0].device)
    tokens = sum(map(len, old))
    found = {}
    for name, rows in layouts(len(samples)).items():
        model.zero_grad()
        ratio_of = {}
        for row in rows:
            losses = []
            for i, new in zip(row, logps_of(model, [samples[i] for i in row]), strict=True):
                ratio = (new - old[i]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                losses.append(-torch.minimum(ratio * advantages[i], clipped * advantages[i]).sum() / tokens)
                ratio_of[i] = ratio.detach()
            torch.stack(losses).sum().backward()
        found[name] = torch.cat([ratio_of[i] for i in range(len(samples))]).cpu()
    return found


def save_picture(path: Path, results: dict[str, dict[str, dict]]) -> None:
    """Bars of how many ratios are not 1, by layout, with the mode and without."""
    figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for place, (title, by_layout) in enumerate(results.items()):
        y = [i + 0.38 * place for i in range(len(by_layout))]
        bars = axis.barh(y, [each["not_1"] for each in by_layout.values()], 0.36, label=title, color=COLORS[place])
        axis.bar_label(bars, padding=3, fontsize=11)
        axis.set_yticks([i + 0.19 for i in range(len(by_layout))], list(by_layout), fontsize=11)
    without, within = (max(each["not_1"] for each in by_layout.values()) for by_layout in results.values())
    tokens = max(each["tokens"] for each in by_layout.values())
    figure.suptitle(
        f"In a first GRPO step up to {without} of {tokens} ratios are not 1; in the mode {within}", fontsize=12
    )
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.set_xlabel(f"ratios that are not 1, of {tokens}", fontsize=11)
    axis.legend(fontsize=11)
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = parse_arguments()
    model = new_model(arguments)
    measured = {}
    for title, mode in (("without the mode", False), ("invariant=True", True)):
        torch.manual_seed(arguments.seed)
        samples = samples_of(arguments)
        apply_packing_ops(model, invariant=mode)
        measured[title] = ratios(model, samples)
        revert_packing_ops(model)
        for name, ratio in measured[title].items():
            off = (ratio.double() - 1).abs()
            print(f"{title}, {name}: {int((off > 0).sum())} of {len(off)} ratios are not 1, by up to {off.max():.1e}")
    results = {
        title: {
            name: {
                "tokens": len(ratio),
                "not_1": int((ratio != 1).sum()),
                "largest": float((ratio.double() - 1).abs().max()),
            }
            for name, ratio in by_layout.items()
        }
        for title, by_layout in measured.items()
    }
    save_results(arguments.out / f"same_bits_{arguments.device}.json", results, arguments.device)
    save_picture(arguments.out / f"same_bits_{arguments.device}.png", results)


if __name__ == "__main__":
    main()
