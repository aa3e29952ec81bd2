"""GRPO in one process with one model: sampled by continuous batching, trained on packed rows, with the same bits.

    python examples/grpo_same_bits.py                 a tiny Qwen3, on the CPU in two minutes
    python examples/grpo_same_bits.py --device cuda   Qwen3-0.6B's shape, random weights

generate_batch of transformers samples several answers to each prompt: prefill, chunks and decoding by packing_ops'
attention. It hands back the log-probability of each token. The update takes them again, from packed rows. Their
difference is what the first ratio of GRPO makes of two ways to compute one thing: with apply_packing_ops(model,
invariant=True) it is 0.0 for every token of every step. The same loop runs without the mode beside it. An answer's
reward is the share of its tokens that are even numbers.
"""

import argparse
import os
import time
from pathlib import Path

from common.options import add_device, needs

os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # torch before 2.13 reads it once, at its first product on a GPU


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each loop (default: 4, on a GPU 20)")
    parser.add_argument("--prompts", type=int, default=4, help="of each step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("demo_out"), help="folder for grpo_same_bits_DEVICE.json and .png"
    )
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", "matplotlib", options=parse_arguments)

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from common.results import save_results
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

SIZES = {
    "cpu": {
        **{"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "initializer_range": 0.1},
    },
    "cuda": {
        **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "tie_word_embeddings": True},
    },
}
STEPS, LEARNING_RATE = {"cpu": 4, "cuda": 20}, {"cpu": 1e-3, "cuda": 1e-5}
LONGEST = {"cpu": (100, 32), "cuda": (512, 256)}  # prompt, and answer
STEP_TOKENS = {"cpu": 64, "cuda": 1024}  # of continuous batching: longer prompts are prefilled in chunks
PAGE, BLOCKS = 256, 256  # tokens of a page of the KV cache, and how many the cache has
CAPACITY = 4096  # tokens of a packed row of the update


def new_model(arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(arguments.seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES[arguments.device]))
    return model.to(arguments.device, torch.bfloat16 if arguments.device == "cuda" else torch.float32)


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Each as often as it is answered."""
    vocab, longest = SIZES[arguments.device]["vocab_size"], LONGEST[arguments.device][0]
    lengths = torch.randint(1, longest + 1, (arguments.prompts,)).tolist()
    return [prompt for n in lengths for prompt in [torch.randint(vocab, (n,)).tolist()] * arguments.samples]


def rollout(
    model: torch.nn.Module, prompts: list[list[int]], device: str
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Answers, and their log-probabilities. One token in 64 ends an answer."""
    ends = list(range(0, SIZES[device]["vocab_size"], 64))
    sampled = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=LONGEST[device][1], eos_token_id=ends, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=BLOCKS, max_batch_tokens=STEP_TOKENS[device], return_logprobs=True
    )
    out = model.generate_batch(
        prompts, generation_config=sampled, continuous_batching_config=batching, progress_bar=False
    ).values()
    return [each.generated_tokens for each in out], [torch.tensor(each.logprobs) for each in out]


def logps_of(model: torch.nn.Module, prompts: list[list[int]], answers: list[list[int]]) -> list[torch.Tensor]:
    """Of the answers' tokens, from one packed row."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    metadata = po.PackedMetadata.from_lengths(lengths, device=model.device)
    row = torch.tensor([t for p, a in zip(prompts, answers, strict=True) for t in p + a], device=model.device)
    hidden = model.model(
        input_ids=row[None], position_ids=metadata.position_ids[None], **metadata.to_transformers(), use_cache=False
    ).last_hidden_state
    logps = po.token_logps(hidden, model.lm_head.weight, row, metadata).split(lengths)
    return [each[len(prompt) - 1 : -1] for prompt, each in zip(prompts, logps, strict=True)]  # slot t predicts t + 1


def update(model: torch.nn.Module, prompts: list[list[int]], answers: list[list[int]], old: list[torch.Tensor],
           samples: int) -> tuple[torch.Tensor, float]:  # fmt: skip
    """Gradients of GRPO's loss; |rollout log-prob - trainer log-prob| of every token, and the mean reward."""
    rewards = torch.tensor([sum(t % 2 == 0 for t in answer) / len(answer) for answer in answers])
    groups = rewards.view(-1, samples)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    tokens, apart = sum(map(len, answers)), []
    packing = po.pack_sequences(
        torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]), CAPACITY
    )
    for bin in packing.item_indices.split(packing.bin_offsets.diff().tolist()):
        row, losses = bin.tolist(), []
        for i, new in zip(row, logps_of(model, [prompts[i] for i in row], [answers[i] for i in row]), strict=True):
            before = old[i].to(new.device)
            ratio = (new - before).exp()
            clipped = ratio.clamp(0.8, 1.2)
            losses.append(-torch.minimum(ratio * advantages[i], clipped * advantages[i]).sum() / tokens)
            apart.append((new.detach() - before).abs().cpu())
        torch.stack(losses).sum().backward()
    return torch.cat(apart), float(rewards.mean())


def train(arguments: argparse.Namespace, mode: bool) -> list[dict]:
    """The loop: what each step measured."""
    model = new_model(arguments)
    applied = apply_packing_ops(model, invariant=mode)
    if applied.skipped:
        print(f"not claimed: {applied.skipped}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[arguments.device])
    steps = []
    for step in range(arguments.steps or STEPS[arguments.device]):
        torch.manual_seed(arguments.seed + step)
        prompts = prompts_of(arguments)
        start = time.perf_counter()
        answers, old = rollout(model, prompts, arguments.device)
        sampled = time.perf_counter()
        model.train()
        apart, reward = update(model, prompts, answers, old, arguments.samples)
        optimizer.step()
        optimizer.zero_grad()
        not_0, largest = int((apart != 0).sum()), float(apart.max())
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        seconds = {"rollout": round(sampled - start, 3), "update": round(time.perf_counter() - sampled, 3)}
        steps.append({"tokens": len(apart), "not_0": not_0, "largest": largest, "reward": reward, "seconds": seconds})
        print(
            f"{'invariant' if mode else 'default'}, step {step}: {steps[-1]['not_0']} of {len(apart)} log-probs differ, by "
            f"up to {steps[-1]['largest']:.1e}; reward {reward:.3f}"
        )
    revert_packing_ops(model)
    return steps


def save_picture(path: Path, measured: dict[str, list[dict]]) -> None:
    """Draws by step how many log-probs differ and by how much; the titles say it of all steps."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    shares, largest = [], []
    for (title, steps), color, marker in zip(measured.items(), ("#D55E00", "#0072B2"), "os", strict=True):
        share = [100 * step["not_0"] / step["tokens"] for step in steps]
        for axis, values in zip(axes, (share, [step["largest"] for step in steps]), strict=True):
            axis.plot(values, marker=marker, color=color, label=title)
        shares.append(100 * sum(step["not_0"] for step in steps) / sum(step["tokens"] for step in steps))
        largest.append(max(step["largest"] for step in steps))
    axes[0].set_title(
        f"{shares[0]:.0f}% of rollout log-probs differ from the trainer's;\nwith invariant=True {shares[1]:.0f}%"
    )
    axes[1].set_title(f"They differ by up to {largest[0]:.2g};\nwith invariant=True by {largest[1]:.2g}")
    for axis, name in zip(axes, ("% of tokens that differ", "largest difference of a step"), strict=True):
        axis.set_xlabel("step", fontsize=11)
        axis.set_ylabel(name, fontsize=11)
        axis.set_ylim(0, None)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize=11)
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = parse_arguments()
    measured = {
        title: train(arguments, mode) for title, mode in (("without the mode", False), ("invariant=True", True))
    }
    save_results(arguments.out / f"grpo_same_bits_{arguments.device}.json", measured, arguments.device)
    save_picture(arguments.out / f"grpo_same_bits_{arguments.device}.png", measured)


if __name__ == "__main__":
    main()
