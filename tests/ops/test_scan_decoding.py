"""OpenChunk: a token at a time has the bits of one call over the whole sequence."""

import functools
import re

import pytest
import torch
from helpers import assert_same, captured, cu_seqlens_of

import packing_ops as po

PROMPTS, TOKENS = [0, 1, 63, 64, 65, 130], 66  # of each sequence; each goes past the end of a chunk


def delta_rule(device, dtype, total):
    q, k = (torch.randn(total, 1, 64, device=device).to(dtype) for _ in range(2))
    v = torch.randn(total, 2, 64, device=device).to(dtype)
    g, beta = -0.3 * torch.rand(total, 2, device=device), torch.rand(total, 2, device=device)
    return functools.partial(po.gated_delta_rule, use_qk_l2norm=True), [q, k, v, g, beta]


def mamba2(device, dtype, total):
    x = torch.randn(total, 2, 64, device=device).to(dtype)
    dt, A = torch.randn(total, 2, device=device), -torch.rand(2, device=device)
    B, C = (0.2 * torch.randn(total, 1, 64, device=device).to(dtype) for _ in range(2))

    def scan(x, dt, B, C, z, cu_seqlens, **states):
        return po.mamba2_scan(x, dt, A, B, C, cu_seqlens, D=torch.ones_like(A), z=z, dt_softplus=True, **states)

    return scan, [x, dt, B, C, torch.randn_like(x)]


def of_prompts(tensor, steps=0):
    """The prompts' rows of sequences that are TOKENS longer, end to end, and those of the steps after them."""
    sequences = tensor.split([n + TOKENS for n in PROMPTS])
    return torch.cat([each[: n + steps] for n, each in zip(PROMPTS, sequences, strict=True)])


def of_step(tensor, step):
    sequences = tensor.split([n + TOKENS for n in PROMPTS])
    return torch.stack([each[n + step] for n, each in zip(PROMPTS, sequences, strict=True)])


@pytest.mark.parametrize("made", [delta_rule, mamba2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_bits_of_the_forward(made, dtype, with_state, device):
    lengths = [n + TOKENS for n in PROMPTS]
    scan, rows = made(device, dtype, sum(lengths))
    state = 0.1 * torch.randn(len(PROMPTS), 2, 64, 64, device=device) if with_state else None
    wanted, _ = scan(*rows, cu_seqlens_of(lengths, device), initial_state=state)
    chunk = po.OpenChunk(scan, [of_prompts(x) for x in rows], cu_seqlens_of(PROMPTS, device), initial_state=state)
    assert_same(chunk.out, of_prompts(wanted))
    for step in range(TOKENS):
        assert_same(chunk.step(*(of_step(x, step) for x in rows)), of_step(wanted, step))


def test_sequences_that_go_on(device):
    """Chosen ones, some twice, have the bits that all have."""
    scan, rows = delta_rule(device, torch.float32, sum(PROMPTS) + len(PROMPTS) * TOKENS)
    chosen = torch.tensor([5, 2, 2, 3, 0, 1, 1], device=device)
    whole = po.OpenChunk(scan, [of_prompts(x) for x in rows], cu_seqlens_of(PROMPTS, device))
    some = whole.select(chosen)
    for step in range(3):
        given = [of_step(x, step) for x in rows]
        assert_same(some.step(*(x[chosen] for x in given)), whole.step(*given)[chosen])


def test_nan_of_a_chunk_that_is_over_says_nothing(device):
    scan, rows = delta_rule(device, torch.float32, 65)
    rows[0][:64] = torch.nan  # queries: they reach no state
    chunk = po.OpenChunk(scan, [x[:63] for x in rows], torch.tensor([0, 63], device=device))
    assert chunk.step(*(x[63:64] for x in rows)).isnan().all()
    assert not chunk.step(*(x[64:] for x in rows)).isnan().any()


def test_a_step_in_a_cuda_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    scan, rows = delta_rule("cuda", torch.bfloat16, 100)
    wanted, _ = scan(*rows, cu_seqlens_of([100], "cuda"))
    chunk = po.OpenChunk(scan, [x[:60] for x in rows], cu_seqlens_of([60], "cuda"))
    given = [x[60:61].clone() for x in rows]
    before = [chunk.state.clone(), chunk.length.clone(), *(x.clone() for x in chunk.rows)]
    graph, out = captured(lambda: chunk.step(*given))
    for buffer, value in zip([chunk.state, chunk.length, *chunk.rows], before, strict=True):
        buffer.copy_(value)
    for t in range(60, 100):
        for static, x in zip(given, rows, strict=True):
            static.copy_(x[t : t + 1])
        graph.replay()
        assert_same(out, wanted[t : t + 1])


def test_bad_arguments_are_named():
    scan, rows = delta_rule("cpu", torch.float32, 5)
    with pytest.raises(TypeError, match=r"rows\[1\]: expected a tensor"):
        po.OpenChunk(scan, [rows[0], None, *rows[2:]], torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"rows\[2\]: expected \[5, \.\.\.\] as rows\[0\], got \[4, 2, 64\]"):
        po.OpenChunk(scan, [*rows[:2], rows[2][:4], *rows[3:]], torch.tensor([0, 5]))
    chunk = po.OpenChunk(scan, rows, torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match=r"rows: expected 5 tensors as the prompts have, got 4"):
        chunk.step(*(x[:2] for x in rows[:4]))
    with pytest.raises(
        ValueError, match=r"rows\[0\]: expected float32 \[2, 1, 64\] on cpu, got float32 \[1, 1, 64\] on cpu"
    ):
        chunk.step(*(x[:1] for x in rows))


@pytest.mark.parametrize("made", [delta_rule, mamba2])
def test_no_sequences(made, device):
    scan, rows = made(device, torch.float32, 3)
    chunk = po.OpenChunk(scan, [x[:0] for x in rows], cu_seqlens_of([], device))
    assert chunk.step(*(x[:0] for x in rows)).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: None, r"TypeError: rows\[2\]: expected a tensor, got None"),
        (lambda x: x.double(), r"rows\[2\]: expected float32 \[2, 2, 64\] on cpu, got float64 \[2, 2, 64\] on cpu"),
        (lambda x: x.to("meta"), r"rows\[2\]: expected float32 \[2, 2, 64\] on cpu, got float32 \[2, 2, 64\] on meta"),
        (lambda x: x[0], r"rows\[2\]: expected float32 \[2, 2, 64\] on cpu, got float32 \[2, 64\] on cpu"),
    ],
)
def test_rows_of_a_step_are_like_the_prompts(change, message):
    """Values that are cast, or of no memory, would be decoded as others."""
    scan, rows = delta_rule("cpu", torch.float32, 5)
    chunk = po.OpenChunk(scan, rows, torch.tensor([0, 3, 5]))
    given = [x[:2] for x in rows]
    given[2] = change(given[2])
    with pytest.raises((TypeError, ValueError)) as raised:
        chunk.step(*given)
    assert re.search(message, f"{raised.type.__name__}: {raised.value}")


@pytest.mark.parametrize("rows", [[], (), None, torch.zeros(3, 1)], ids=str)
def test_rows_are_tensors_in_a_sequence(rows):
    with pytest.raises(TypeError, match="rows: expected tensors in a list or tuple, got "):
        po.OpenChunk(po.gated_delta_rule, rows, torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, -5, 5], "never to decrease, got -5 after 0 at index 1"),
        ([0, 5, 2, 5], "never to decrease, got 2 after 5 at index 2"),
        ([1, 5], "to start at 0, got 1"),
        ([0, 6], "to end at most at total=5, got 6"),
        ([0.0, 5.0], r"int32 or int64 \[num_documents \+ 1\], got float32 \[2\]"),
        ([], r"int32 or int64 \[num_documents \+ 1\], got float32 \[0\]"),
    ],
)
def test_errors_have_the_numbers_that_came(cu_seqlens, message):
    scan, rows = delta_rule("cpu", torch.float32, 5)
    with pytest.raises(ValueError, match=f"cu_seqlens: expected {message}"):
        po.OpenChunk(scan, rows, torch.tensor(cu_seqlens))


@pytest.mark.parametrize("state", [torch.zeros(2, 2, 64, 64), torch.tensor(0.0), [0.0]], ids=lambda x: str(type(x)))
def test_the_state_is_of_each_prompt(state):
    scan, rows = delta_rule("cpu", torch.float32, 5)
    message = (
        r"initial_state: expected (\[1, \.\.\.\], one for each prompt, got float32 \[(2, 2, 64, 64)?\]|a tensor, got)"
    )
    with pytest.raises((TypeError, ValueError), match=message):
        po.OpenChunk(scan, rows, torch.tensor([0, 5]), initial_state=state)


@pytest.mark.parametrize(
    "sequences", [torch.tensor(0), torch.tensor([0.0]), torch.tensor([True]), slice(0, 1)], ids=str
)
def test_sequences_are_numbers(sequences):
    """A slice would share the buffers that step writes to."""
    scan, rows = delta_rule("cpu", torch.float32, 5)
    chunk = po.OpenChunk(scan, rows, torch.tensor([0, 5]))
    with pytest.raises((TypeError, ValueError), match="sequences: expected "):
        chunk.select(sequences)
