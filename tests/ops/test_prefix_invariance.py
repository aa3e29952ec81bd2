"""out and lse of a row depend only on the keys that it sees: not on what follows in its document, nor on how many
queries the call has. Gradients depend on the document's length, and not on how many of its last queries the call has.
"""

import pytest
import torch
from helpers.prefix_case import drawn_pieces

import packing_ops as po

SEEDS = {"cuda": 600, "cpu": 200}
DIMS = [8, 32, 64, 72, 96, 128, 160, 192, 200, 256, 320, 512]
DTYPES = {
    "cuda": [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32],
    "cpu": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
}


@pytest.mark.parametrize("part", range(4))
def test_rows_of_prefixes_and_chunks_have_the_document_s_bits(device, part):
    compared, wrong = 0, []
    for seed in range(part, SEEDS[device], 4):
        pieces = drawn_pieces(seed, device, DTYPES[device], DIMS)
        case = pieces.pack()
        out, lse = po.varlen_attention(
            case.q, case.k, case.v, *case.cu_seqlens, sinks=case.sinks, return_lse=True, **case.options
        )
        try:
            compared += pieces.assert_equal_rows(out, lse, f"seed {seed}")
        except AssertionError as error:
            shape = f"{tuple(pieces.case.q.shape)} {tuple(pieces.case.v.shape)} {pieces.case.q.dtype}"
            wrong.append(f"{error} {shape} { ({k: v for k, v in case.options.items() if k != 'visible_end'}) }")
    assert not wrong, "\n".join(wrong)
    assert compared > 50 * SEEDS[device] / 4


@pytest.mark.parametrize("part", range(4))
def test_gradients_of_the_last_queries_have_the_document_s_bits(device, part):
    compared, wrong = 0, []
    for seed in range(part, SEEDS[device] // 2, 4):
        pieces = drawn_pieces(seed, device, DTYPES[device], DIMS, last_queries=True)
        case = pieces.pack()
        try:
            compared += pieces.assert_equal_gradients(case.ours(), f"seed {seed}")
        except AssertionError as error:
            shape = f"{tuple(pieces.case.q.shape)} {tuple(pieces.case.v.shape)} {pieces.case.q.dtype}"
            wrong.append(f"{error} {shape} { ({k: v for k, v in case.options.items() if k != 'visible_end'}) }")
    assert not wrong, "\n".join(wrong)
    assert compared > 50 * SEEDS[device] / 4
