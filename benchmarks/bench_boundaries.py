"""python benchmarks/bench_boundaries.py [--device cpu|cuda]"""

import uuid

import torch
from harness import Case, run

import packing_ops as po

TOTAL = 1_048_576


def lengths_of(total, median=300, seed=0):
    """Lognormal lengths that fill ``total`` exactly."""
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < total:
        lengths.append(max(1, int(torch.exp(torch.randn((), generator=generator) * 0.9) * median)))
    lengths[-1] -= sum(lengths) - total
    return lengths


def eager_position_ids(cu_seqlens, lengths, total):
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths, output_size=total)
    return torch.arange(total, device=cu_seqlens.device) - starts


def eager_seq_idx(lengths, total):
    index = torch.arange(lengths.numel(), dtype=torch.int32, device=lengths.device)
    return torch.repeat_interleave(index, lengths, output_size=total)


def eager_mask(labels, cu_seqlens):
    out = labels.clone()
    out[cu_seqlens[:-1].long()] = -100
    return out


def eager_segment_sum(values, lengths):
    return torch.segment_reduce(values, "sum", lengths=lengths)


def padded_gae(rewards, values, mask, gamma, lam):
    """[batch, seqlen], slot by slot from the right: what PPO trainers have."""
    next_values = next_advantages = torch.zeros_like(rewards[:, 0])
    advantages = torch.empty_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        next_advantages = torch.where(mask[:, t], delta + gamma * lam * next_advantages, next_advantages)
        next_values = torch.where(mask[:, t], values[:, t], next_values)
        advantages[:, t] = next_advantages
    return advantages, advantages + values


def loop_over_uids(uids):
    """The rows of each prompt, as RL trainers find them."""
    seen, boundaries, start = set(), [], 0
    for i, uid in enumerate(uids):
        if i and uid == uids[i - 1]:
            continue
        if uid in seen:
            raise ValueError(f"{uid} comes back at {i}")
        seen.add(uid)
        if i:
            boundaries.append((start, i))
        start = i
    return [*boundaries, (start, len(uids))]


def loop_over_mini_batches(uids, prompts):
    boundaries = loop_over_uids(uids)
    steps = [boundaries[i : i + prompts] for i in range(0, len(boundaries), prompts)]
    return [(step[0][0], step[-1][1]) for step in steps]


def cases(device):
    lengths = torch.tensor(lengths_of(TOTAL), device=device)
    cu_seqlens = po.cu_seqlens_from_lengths(lengths)
    labels = torch.randint(0, 32000, (TOTAL,), device=device)
    values = torch.randn(TOTAL, device=device)
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens)
    rewards, mask = torch.randn(TOTAL, device=device), torch.rand(TOTAL, device=device) > 0.2
    padded = [metadata.pad(row) for row in (rewards, values, mask)]
    long, tokens = (po.cu_seqlens_from_lengths(lengths).to(device) for lengths in ([100_000], [1] * 100_000))
    uids = [str(uuid.UUID(int=row // 8, version=4)) for row in range(1280)]
    tiny = po.cu_seqlens_from_lengths([3, 5]).to(device)

    def case(op, dtype, ours, eager, bytes_per_slot):
        providers = {"packing_ops": ours, "torch eager": eager}
        if device == "cuda":
            providers["torch.compile"] = torch.compile(eager)
        return Case(op, f"T={TOTAL} docs={lengths.numel()}", dtype, providers, bytes=bytes_per_slot * TOTAL)

    return [
        case("position_ids_from_cu_seqlens", "int64",
             lambda: po.position_ids_from_cu_seqlens(cu_seqlens, TOTAL),
             lambda: eager_position_ids(cu_seqlens, lengths, TOTAL), 8),
        case("seq_idx_from_cu_seqlens", "int32",
             lambda: po.seq_idx_from_cu_seqlens(cu_seqlens, TOTAL),
             lambda: eager_seq_idx(lengths, TOTAL), 4),
        case("mask_boundary_labels", "int64",
             lambda: po.mask_boundary_labels(labels, cu_seqlens),
             lambda: eager_mask(labels, cu_seqlens), 16),
        case("segment_sum", "float32",
             lambda: po.segment_sum(values, cu_seqlens),
             lambda: eager_segment_sum(values, lengths), 4),
        Case("gae", f"T={TOTAL} docs={lengths.numel()} padded to {metadata.max_seqlen}", "float32", {
            "packing_ops": lambda: po.gae(rewards, values, metadata, gamma=0.99, lam=0.95, mask=mask),
            "padded loop in torch": lambda: padded_gae(*padded, 0.99, 0.95),
        }, bytes=17 * TOTAL, runs=5),
        *(Case("gae", f"T=100000 docs={cu.numel() - 1}", "float32", {
            "packing_ops": lambda cu=cu: po.gae(rewards[:100_000], values[:100_000], cu, gamma=0.99, lam=0.95),
        }, bytes=1_600_000) for cu in (long, tokens)),
        Case("position_ids_from_cu_seqlens", "T=8 docs=2 (call overhead)", "int64", {
            "packing_ops": lambda: po.position_ids_from_cu_seqlens(tiny, 8),
        }),
        *([] if device == "cuda" else [
            Case("compute_prompt_boundaries", "n=1280 prompts=160", "str", {
                "packing_ops": lambda: po.compute_prompt_boundaries(uids),
                "plain loop in Python": lambda: loop_over_uids(uids),
            }),
            Case("compute_prompt_mini_batch_boundaries", "n=1280 prompts=160", "str", {
                "packing_ops": lambda: po.compute_prompt_mini_batch_boundaries(uids, 16, 160, False, 8),
                "plain loop in Python": lambda: loop_over_mini_batches(uids, 16),
            }),
        ]),
    ]  # fmt: skip


if __name__ == "__main__":
    run("boundaries", cases)
