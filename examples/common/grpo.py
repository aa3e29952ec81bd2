"""A step of GRPO on packed rows, and how far the rollout's log-probabilities are from the trainer's."""

import time
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import packing_ops as po

CAPACITY = 4096  # tokens of a packed row of the update
Answers = tuple[list[list[int]], list[torch.Tensor]]  # token ids, and their log-probabilities


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


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rollout: Callable[..., Answers],
              prompts: list[list[int]], samples: int) -> dict:  # fmt: skip
    """One step: answers by ``rollout(model, prompts)``, an update, and what was measured."""
    start = time.perf_counter()
    answers, old = rollout(model, prompts)
    sampled = time.perf_counter()
    model.train()
    apart, reward = update(model, prompts, answers, old, samples)
    optimizer.step()
    optimizer.zero_grad()
    not_0, largest = int((apart != 0).sum()), float(apart.max())
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = {"rollout": round(sampled - start, 3), "update": round(time.perf_counter() - sampled, 3)}
    return {"tokens": len(apart), "not_0": not_0, "largest": largest, "reward": reward, "seconds": seconds}


def told(step: dict) -> str:
    return (
        f"{step['not_0']} of {step['tokens']} log-probs differ, by up to {step['largest']:.1e}; "
        f"reward {step['reward']:.3f}"
    )


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
    ours = list(measured)[1]
    axes[0].set_title(f"{shares[0]:.0f}% of rollout log-probs differ from the trainer's;\nwith {ours} {shares[1]:.0f}%")
    axes[1].set_title(f"They differ by up to {largest[0]:.2g};\nwith {ours} by {largest[1]:.2g}")
    for axis, name in zip(axes, ("% of tokens that differ", "largest difference of a step"), strict=True):
        axis.set_xlabel("step", fontsize=11)
        axis.set_ylabel(name, fontsize=11)
        axis.set_ylim(0, None)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize=11)
    figure.savefig(path, dpi=120)
