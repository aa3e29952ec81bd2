"""The same on GPUs over NCCL: to the bit where that is promised, in float32 as near as sums in another order are."""

import pytest
import torch
from processes import spawn_on_gpus
from test_parallel_attention import ATTENTION, OPTIONS, compared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LENGTHS = [700, 0, 2500, 1, 30, 1800]
CASES = [
    (name, scheme, options, dtype)
    for name in ATTENTION
    for scheme in ("contiguous", "zigzag")
    for options in ("causal", "full", "window", "sinks")
    for dtype in (torch.float32, torch.bfloat16)
]


def every_case():
    found = {}
    for name, scheme, options, dtype in CASES:
        given = {"lengths": LENGTHS, "dtype": dtype, "device": "cuda"}
        found[name, scheme, options, dtype] = compared(name, scheme, (16, 8), OPTIONS[options], **given)
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    return spawn_on_gpus(every_case, torch.cuda.device_count(), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_gpus(case, by_rank):
    name, _, _, dtype = case
    for found in by_rank:
        difference, same_bits = found[case]
        if name == "ulysses":
            assert same_bits
        else:
            assert difference <= (1e-4 if dtype == torch.float32 else 0.25)
