"""Random packs: each document has the bits that it has in a separate row, and each run those of the run before."""

import itertools
import random

import torch
from helpers.attention_case import OPEN, Case, document_alone, document_results, drawn_ends

PACKS = {"cuda": 1000, "cpu": 300}
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129]  # on both sides of every tile edge
HEADS = [(1, 1), (2, 1), (4, 2), (3, 3), (6, 2), (8, 1)]
DIMS = [8, 32, 64, 72, 96, 128, 160, 192, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_pack(seed, device):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    count, causal = draw.randint(1, 6), draw.random() < 0.7
    lengths = draw.choices(LENGTHS, k=count)
    left, right = draw.choice([OPEN, OPEN, (0, 0), (16, 0), (70, -1), (5, 20)])
    lengths_k, tail, ends = draw.choices(LENGTHS, k=count) if draw.random() < 0.3 else None, draw.choice([0, 0, 3]), {}
    if causal and draw.random() < 0.3:
        right = -1
        ends["visible_end"] = drawn_ends(lengths, lengths_k, share=draw.choice([0.02, 0.3]), tail=tail, device=device)
    return Case(
        lengths,
        lengths_k,
        heads=draw.choice(HEADS),
        dim=draw.choice(DIMS),
        dtype=draw.choice(DTYPES),
        device=device,
        tail=tail,
        sinks=draw.random() < 0.3,
        causal=causal,
        window_size=(left, min(right, 0) if causal else right),
        softcap=draw.choice([0.0, 0.0, 4.0]),
        **ends,
    )


def assert_same_results(actual, expected, where):
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=lambda m: f"{where}, {name}: {m}")  # noqa: B023


def test_random_packs_keep_their_bits(device):
    for seed in range(PACKS[device]):
        case = random_pack(seed, device)
        packed = case.ours()
        assert_same_results(case.ours(), packed, f"pack {seed} again")
        spans_q, spans_k = (list(itertools.pairwise(cu_seqlens.tolist())) for cu_seqlens in case.cu_seqlens)
        for i, ((start, end), keys) in enumerate(zip(spans_q, spans_k, strict=True)):
            alone = document_alone(case, start, end, keys)
            found = document_results(packed, start, end, keys)
            expected = document_results(alone.ours(), 0, end - start, (0, keys[1] - keys[0]))
            assert_same_results(found, expected, f"pack {seed}, document {i}")
