"""python benchmarks/bench_boundaries.py [--device cpu|cuda]"""

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


def cases(device):
    lengths = torch.tensor(lengths_of(TOTAL), device=device)
    cu_seqlens = po.cu_seqlens_from_lengths(lengths)
    labels = torch.randint(0, 32000, (TOTAL,), device=device)
    values = torch.randn(TOTAL, device=device)
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
        Case("position_ids_from_cu_seqlens", "T=8 docs=2 (call overhead)", "int64", {
            "packing_ops": lambda: po.position_ids_from_cu_seqlens(tiny, 8),
        }),
    ]  # fmt: skip


if __name__ == "__main__":
    run("boundaries", cases)
