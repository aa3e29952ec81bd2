"""The same on GPUs over NCCL: to the bit where that is promised, in float32 as near as sums in another order are."""

import contextlib

import pytest
import torch
from helpers.processes import nccl_ranks, spawn_on_gpus
from test_parallel_attention import ATTENTION, OPTIONS, compared
from test_parallel_overlap import in_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(nccl_ranks() < 2, reason="needs two GPUs, or NCCL 2.30"),
]
LENGTHS = [700, 0, 2500, 1, 30, 1800]
CASES = [
    (name, scheme, options, dtype, parts)
    for name in ATTENTION
    for scheme in ("contiguous", "zigzag")
    for options in ("causal", "full", "window", "sinks")
    for dtype in (torch.float32, torch.bfloat16)
    for parts in (1, 4)
]


def every_case():
    found = {}
    for name, scheme, options, dtype, parts in CASES:
        given = {"lengths": LENGTHS, "dtype": dtype, "device": "cuda"}
        with contextlib.nullcontext() if parts == 1 else in_parts():
            found[name, scheme, options, dtype, parts] = compared(name, scheme, (16, 8), OPTIONS[options], **given)
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    return spawn_on_gpus(every_case, nccl_ranks(), tmp_path_factory.mktemp("ranks"))


def within(case, found):
    """Whether (difference, same bits) is what is promised."""
    name, _, _, dtype, _ = case
    difference, same_bits = found
    return same_bits if name == "ulysses" else difference <= (1e-4 if dtype == torch.float32 else 0.25)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_gpus(case, by_rank):
    for found in by_rank:
        assert within(case, found[case]), found[case]
