"""causal_conv1d against packing_ops.reference.conv: torch's convolution of each document."""

import pytest
import torch
from helpers import assert_error_within, assert_same, captured, cu_seqlens_of, lengths_strategy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import packing_ops as po
from packing_ops.reference import conv as oracle

LENGTHS = [3, 0, 300, 1, 2, 70, 16]
PADDING = 5
HALVES = [torch.bfloat16, torch.float16]


def floats(device):
    return [torch.float32, *HALVES, *([torch.float64] if device == "cpu" else [])]


def inputs_of(device, dtype, channels, width, *, lengths=LENGTHS, state=True):
    """x, weight, bias, initial_state, and their cu_seqlens."""
    total = sum(lengths) + PADDING
    shapes = (total, channels), (channels, width), (channels,), (len(lengths), channels, width - 1)
    tensors = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    return [*tensors[:3], tensors[3] if state else None], cu_seqlens_of(lengths, device)


def results_of(conv, tensors, cu_seqlens, activation, gradients):
    """out, final_state and every gradient."""
    tensors = [None if t is None else t.detach().requires_grad_() for t in tensors]
    x, weight, bias, state = tensors
    found = conv(x, weight, bias, cu_seqlens, activation=activation, initial_state=state)
    given = [gradient.to(found[0].dtype) for gradient in gradients]
    return [*found, *torch.autograd.grad(found, [t for t in tensors if t is not None], given)]


def ours(*args, **options):
    return po.causal_conv1d(*args, output_final_state=True, **options)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("state", [False, True])
def test_equals_reference(device, width, activation, state):
    for dtype in floats(device):
        for channels in (72, 33):
            tensors, cu_seqlens = inputs_of(device, dtype, channels, width, state=state)
            out, final_state = oracle.causal_conv1d(tensors[0], tensors[1], None, cu_seqlens)
            gradients = torch.randn_like(out), torch.randn_like(final_state)
            found = results_of(ours, tensors, cu_seqlens, activation, gradients)
            low = results_of(oracle.causal_conv1d, tensors, cu_seqlens, activation, gradients)
            doubled = [None if t is None else t.double() for t in tensors]
            exact = results_of(oracle.causal_conv1d, doubled, cu_seqlens, activation, gradients)
            for mine, theirs, wanted in zip(found, low, exact, strict=True):
                assert (mine.dtype, mine.shape) == (dtype, wanted.shape)
                roundings = 64 if dtype == torch.float64 else 4  # the formula is exact in float64
                floor = roundings * torch.finfo(dtype).eps * wanted.abs().max().item() if wanted.numel() else 0
                assert_error_within(mine, theirs, wanted, floor=floor)
            assert not found[0][-PADDING:].any()
            assert not found[2][-PADDING:].any()


@given(lengths=lengths_strategy, seed=st.integers(0, 99))
def test_bits_of_a_document_are_those_that_it_has_alone(device, lengths, seed):
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16):
        tensors, cu_seqlens = inputs_of(device, dtype, 24, 4, lengths=lengths)
        x, weight, bias, state = (t.detach() for t in tensors)
        packed, states = ours(x, weight, bias, cu_seqlens, activation="silu", initial_state=state)
        for i, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths, strict=False)):
            given = x[start : start + length], weight, bias, cu_seqlens_of([length], device)
            alone = ours(*given, activation="silu", initial_state=state[i : i + 1])
            assert_same(packed[start : start + length], alone[0])
            assert_same(states[i : i + 1], alone[1])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_bits_of_calls_that_go_on(device, width):
    """Pieces of any length, a row at a time among them, each with the state that the one before left."""
    tensors, _ = inputs_of(device, torch.bfloat16, 16, width, lengths=[100], state=False)
    x, weight, bias, _ = tensors
    whole, last = ours(x[:100], weight, bias, cu_seqlens_of([100], device), activation="silu")
    found, state, start = [], None, 0
    for length in (1, 1, 1, 40, 0, 2, 54, 1):
        given = x[start : start + length], weight, bias, cu_seqlens_of([length], device)
        out, state = ours(*given, activation="silu", initial_state=state)
        found.append(out)
        start += length
    assert_same(torch.cat(found), whole)
    assert_same(state, last)


def test_nan_and_infinity_stay_in_their_document(device):
    (x, weight, bias, _), cu_seqlens = inputs_of(device, torch.float32, 8, 4, lengths=[5, 6, 7], state=False)
    x = x.detach()
    clean = results_of(
        ours, [x, weight, bias, None], cu_seqlens, "silu", (torch.ones_like(x), torch.ones(3, 8, 3, device=device))
    )
    x = x.clone()
    x[5:11:2], x[6], x[-PADDING:] = torch.nan, torch.inf, torch.nan
    found = results_of(
        ours, [x, weight, bias, None], cu_seqlens, "silu", (torch.ones_like(x), torch.ones(3, 8, 3, device=device))
    )
    others = [*range(5), *range(11, x.shape[0])]
    for i in (0, 2):
        assert_same(found[i][others], clean[i][others])
    assert found[0][5:11].isnan().any()


def test_any_rows(device):
    """Rows of a wider tensor, gradients that are expanded, addresses that no vector access may have."""
    (x, weight, bias, _), cu_seqlens = inputs_of(device, torch.bfloat16, 64, 4, state=False)
    wanted = ours(x, weight, bias, cu_seqlens)
    wide = torch.cat([x.detach(), x.detach(), x.detach()], 1)
    for first in (64, 63, 1):
        part = wide.roll(first - 64, 1)[:, first : first + 64].requires_grad_()
        found = ours(part, weight, bias, cu_seqlens)
        assert_same(found, wanted)
        (gradient,) = torch.autograd.grad(found[0].sum(), part)
        assert_same(gradient, torch.autograd.grad(ours(x, weight, bias, cu_seqlens)[0], x, torch.ones_like(x))[0])
    assert_same(ours(x.detach().T.contiguous().T, weight, bias, cu_seqlens), wanted)


def test_without_documents_or_tokens(device):
    weight = torch.randn(8, 4, device=device, requires_grad=True)
    for lengths, total in (([], 0), ([], 3), ([0, 0], 0), ([0], 2)):
        x = torch.randn(total, 8, device=device, requires_grad=True)
        out, state = ours(x, weight, None, cu_seqlens_of(lengths, device))
        assert_same(out, torch.zeros_like(x))
        assert_same(state, x.new_zeros(len(lengths), 8, 3))
        gradients = torch.autograd.grad(out, [x, weight], torch.ones_like(out))
        assert_same(gradients, (torch.zeros_like(x), torch.zeros_like(weight)))


def test_metadata_and_other_names(device):
    (x, weight, bias, _), cu_seqlens = inputs_of(device, torch.float32, 8, 4, state=False)
    wanted, none = po.causal_conv1d(x, weight, bias, cu_seqlens, activation="silu")
    assert none is None
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=x.shape[0])
    assert_same(po.causal_conv1d(x, weight, bias, metadata, activation="swish")[0], wanted)
    assert_same(po.causal_conv1d(x, weight, bias, cu_seqlens.long(), activation="silu")[0], wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(4, 8, 1)}, "x: expected 2 dimensions"),
        ({"x": torch.ones(4, 8, dtype=torch.int32)}, "x: expected float32"),
        ({"weight": torch.randn(8, 9)}, "weight: expected .* a width from 1 to 8"),
        ({"weight": torch.randn(7, 4)}, "weight: expected .*channels.* = "),
        ({"weight": torch.randn(8, 4, dtype=torch.float64)}, "weight: expected float32 like x"),
        ({"bias": torch.randn(4)}, r"bias: expected \[channels\]"),
        ({"initial_state": torch.randn(2, 8, 4)}, "initial_state: expected .*width - 1"),
        ({"initial_state": torch.randn(2, 8, 3).bfloat16()}, "initial_state: expected float32 like x"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, "cu_seqlens: expected to end at most at total=4"),
        ({"activation": "gelu"}, 'activation: expected "silu"'),
    ],
)
def test_errors(changes, message):
    given = {"x": torch.randn(4, 8), "weight": torch.randn(8, 4), "bias": None, "cu_seqlens": torch.tensor([0, 3, 4])}
    with pytest.raises(ValueError, match=message):
        po.causal_conv1d(**{**given, **changes})


def test_opcheck(device):
    ops = torch.ops.packing_ops
    (x, weight, bias, state), cu_seqlens = inputs_of(device, torch.float32, 8, 4, lengths=[3, 0, 9])
    options = x, weight, bias, cu_seqlens, state, True, True
    torch.library.opcheck(ops.causal_conv1d, options)
    torch.library.opcheck(ops.causal_conv1d, (x, weight, None, cu_seqlens, None, False, False))
    dout, dfinal, *_ = (t.detach() for t in (x, state))
    detached = [t.detach() for t in (x, weight, bias)]
    for arguments in (
        (dout, dfinal, *detached, cu_seqlens, state.detach(), True),
        (dout, None, *detached[:2], None, cu_seqlens, None, True),
    ):
        torch.library.opcheck(ops.causal_conv1d_backward, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradcheck(activation):
    (x, weight, bias, state), cu_seqlens = inputs_of("cpu", torch.float64, 2, 3, lengths=[4, 1, 0])
    call = lambda x, weight, bias, state: ours(x, weight, bias, cu_seqlens, activation=activation, initial_state=state)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, weight, bias, state))
    (gradient,) = torch.autograd.grad(call(x, weight, bias, state)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="causal_conv1d has no second derivative"):
        gradient.sum().backward()


def test_compiled_with_dynamic_sizes(device, fresh_compile):
    weight = torch.randn(8, 4, device=device)

    def layer(x, cu_seqlens):
        return po.causal_conv1d(x, weight, None, cu_seqlens, activation="silu")[0]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 9], [3, 4, 20], [100]):
        x = torch.randn(sum(lengths), 8, device=device, requires_grad=True)
        cu_seqlens = cu_seqlens_of(lengths, device)
        found, wanted = compiled(x, cu_seqlens), layer(x, cu_seqlens)
        assert_same(found, wanted)
        assert_same(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_in_a_graph():
    tensors, cu_seqlens = inputs_of("cuda", torch.bfloat16, 64, 4)
    gradients = torch.randn_like(tensors[0]), torch.randn_like(tensors[3])
    call = lambda: results_of(ours, tensors, cu_seqlens, "silu", gradients)  # noqa: E731
    wanted = call()
    graph, found = captured(call)
    graph.replay()
    assert_same(found, wanted)


def test_operations_are_counted():
    """A product for each tap; in backward three, one of which is the sum before the activation again."""
    po.register_flop_formulas()
    (x, weight, bias, _), cu_seqlens = inputs_of("cpu", torch.float32, 8, 4, lengths=[6], state=False)
    with FlopCounterMode(display=False) as counter:
        ours(x, weight, bias, cu_seqlens, activation="silu")[0].sum().backward()
    assert counter.get_total_flops() == (1 + 3) * 2 * (6 + PADDING) * 8 * 4
