"""gated_delta_rule against packing_ops.reference.scan: a loop over tokens in float64, and torch's formula in chunks."""

import pytest
import torch
from helpers import assert_error_within, assert_same, captured, cu_seqlens_of, lengths_strategy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import packing_ops as po
import packing_ops.scan
from packing_ops._runtime import gate
from packing_ops.reference import scan as oracle

LENGTHS = [1, 63, 0, 64, 65, 129]
PADDING = 5
NAMES = ["q", "k", "v", "g", "beta", "initial_state"]


def inputs_of(device, dtype, *, heads=(1, 2), dims=(64, 64), lengths=LENGTHS, state=True):
    """The tensors of NAMES as a layer has them, a tenth of a state among them, and their cu_seqlens."""
    total, (k_heads, v_heads), (dim, dim_v) = sum(lengths) + PADDING, heads, dims
    q, k = (torch.randn(total, k_heads, dim, device=device).to(dtype) for _ in range(2))
    v = torch.randn(total, v_heads, dim_v, device=device).to(dtype)
    g, beta = -0.3 * torch.rand(total, v_heads, device=device), torch.rand(total, v_heads, device=device)
    initial = 0.1 * torch.randn(len(lengths), v_heads, dim, dim_v, device=device)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [q, k, v, g.to(sums), beta.to(sums), initial.to(sums) if state else None]
    return tensors, cu_seqlens_of(lengths, device)


def ours(*args, **options):
    return po.gated_delta_rule(*args, output_final_state=True, **options)


def results_of(rule, tensors, cu_seqlens, gradients, **options):
    """out, final_state and every gradient."""
    tensors = [None if t is None else t.detach().requires_grad_() for t in tensors]
    found = rule(*tensors[:5], cu_seqlens, initial_state=tensors[5], **options)
    given = [gradient.to(result.dtype) for gradient, result in zip(gradients, found, strict=True)]
    return [*found, *torch.autograd.grad(found, [t for t in tensors if t is not None], given)]


def assert_right(tensors, cu_seqlens, *, factor=2.0, **options):
    """At most twice the error of the formula in chunks whose products are in v's dtype; the rest of it is in
    float32.
    """
    v, documents = tensors[2], len(cu_seqlens) - 1
    dout = torch.randn_like(v)
    dfinal = 0.1 * torch.randn(documents, v.shape[1], tensors[0].shape[2], v.shape[2], device=v.device)
    gradients = dout, dfinal
    found = results_of(ours, tensors, cu_seqlens, gradients, **options)
    low = results_of(oracle.gated_delta_rule, tensors, cu_seqlens, gradients, chunk=64, **options)
    doubled = [None if t is None else t.double() for t in tensors]
    exact = results_of(oracle.gated_delta_rule, doubled, cu_seqlens, gradients, **options)
    names = ["out", "final_state", *NAMES]
    for name, mine, theirs, wanted in zip(names, found, low, exact, strict=False):
        assert (mine.dtype, mine.shape) == (theirs.dtype, wanted.shape), name
        roundings = 512 if mine.dtype == torch.float64 else 4  # both formulas round in float64
        floor = roundings * torch.finfo(mine.dtype).eps * wanted.abs().max().item() if wanted.numel() else 0
        # The states that dg is a product of are kept in v's dtype, as the formula's are not.
        assert_error_within(mine, theirs, wanted, factor=2 * factor if name == "g" else factor, floor=floor)
    return found


# --- values ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_equals_reference(device, dtype, l2norm, state):
    tensors, cu_seqlens = inputs_of(device, dtype, state=state)
    if not l2norm:
        tensors[:2] = (oracle.l2norm(t.float()).to(dtype) for t in tensors[:2])
    found = assert_right(tensors, cu_seqlens, use_qk_l2norm=l2norm)
    for i in (0, 2, 3, 4, 5, 6):
        assert not found[i][-PADDING:].any()


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (128, 128), (256, 256), (64, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dims(device, dims, dtype):
    assert_right(*inputs_of(device, dtype, dims=dims, heads=(1, 1), lengths=[65, 3]), use_qk_l2norm=True)


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (1, 3), (3, 6)], ids=str)
def test_heads(device, heads):
    assert_right(*inputs_of(device, torch.float32, heads=heads, lengths=[70, 3]), use_qk_l2norm=True, scale=0.5)


def test_any_dims_and_float64_on_the_cpu():
    for dims in ((3, 1), (5, 3), (24, 40)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            assert_right(*inputs_of("cpu", dtype, dims=dims, lengths=[70, 0, 2]), use_qk_l2norm=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("g", "beta"), [(0.0, 1.0), (0.0, 0.0), (-50.0, 1.0), (-50.0, 0.5), (-1e30, 1.0)])
def test_extreme_gates(device, dtype, g, beta):
    tensors, cu_seqlens = inputs_of(device, dtype, lengths=[130, 3])
    tensors[3], tensors[4] = torch.full_like(tensors[3], g), torch.full_like(tensors[4], beta)
    assert_right(tensors, cu_seqlens, use_qk_l2norm=True)


def test_keys_and_queries_of_zeros(device):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16)
    tensors[0][5:], tensors[1][::2] = 0, 0
    found = assert_right(tensors, cu_seqlens, use_qk_l2norm=True)
    assert all(t.isfinite().all() for t in found)


# --- bits ---


def pieces_of(tensors, cu_seqlens, i, rows):
    """The tensors of rows of only document i."""
    start = cu_seqlens[i].item()
    return [t[start + rows.start : start + rows.stop] for t in tensors[:5]]


@given(lengths=lengths_strategy, seed=st.integers(0, 99))
@settings(max_examples=10)
def test_bits_of_a_document_are_those_that_it_has_alone(device, lengths, seed):
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16):
        tensors, cu_seqlens = inputs_of(device, dtype, heads=(1, 1), lengths=lengths)
        dout = torch.randn_like(tensors[2])
        dfinal = torch.randn_like(tensors[5])
        packed = results_of(ours, tensors, cu_seqlens, (dout, dfinal), use_qk_l2norm=True)
        for i, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths, strict=False)):
            given = [*pieces_of(tensors, cu_seqlens, i, slice(0, length)), tensors[5][i : i + 1]]
            gradients = dout[start : start + length], dfinal[i : i + 1]
            alone = results_of(ours, given, cu_seqlens_of([length], device), gradients, use_qk_l2norm=True)
            for whole, part in zip(packed, alone, strict=True):
                of_documents = whole.shape[0] == len(lengths) and whole.dim() == 4
                assert_same(whole[i : i + 1] if of_documents else whole[start : start + length], part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_calls_that_go_on(device, dtype):
    """At multiples of 64 with the state passed on; rows of an open chunk run again, as decoding does."""
    tensors, cu_seqlens = inputs_of(device, dtype, lengths=[300], state=False)
    whole, last = ours(*tensors[:5], cu_seqlens, use_qk_l2norm=True)
    found, state, start = [], None, 0
    for length in (64, 128, 64, 0, 44):
        rows = pieces_of(tensors, cu_seqlens, 0, slice(start, start + length))
        out, state = ours(*rows, cu_seqlens_of([length], device), initial_state=state, use_qk_l2norm=True)
        found.append(out)
        start += length
    assert_same(torch.cat(found), whole[:300])
    assert_same(state, last)
    rows = pieces_of(tensors, cu_seqlens, 0, slice(0, 192))
    _, state = ours(*rows, cu_seqlens_of([192], device), use_qk_l2norm=True)
    for end in (193, 200, 255):
        rows = pieces_of(tensors, cu_seqlens, 0, slice(192, end))
        out, _ = ours(*rows, cu_seqlens_of([end - 192], device), initial_state=state, use_qk_l2norm=True)
        assert_same(out, whole[192:end])


def test_bits_of_prefixes(device):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, lengths=[200], state=False)
    whole, _ = ours(*tensors[:5], cu_seqlens)
    for length in (1, 63, 64, 65, 127, 128, 199):
        part, _ = ours(*pieces_of(tensors, cu_seqlens, 0, slice(0, length)), cu_seqlens_of([length], device))
        assert_same(part, whole[:length])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_document(device, value):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, lengths=[70, 66, 7])
    gradients = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    clean = results_of(ours, tensors, cu_seqlens, gradients, use_qk_l2norm=True)
    for i in range(3):
        broken = list(tensors)
        broken[i] = tensors[i].clone()
        broken[i][70:136:3], broken[i][-PADDING:] = value, value
        found = results_of(ours, broken, cu_seqlens, gradients, use_qk_l2norm=True)
        others = [*range(70), *range(136, tensors[0].shape[0])]
        for mine, wanted in zip(found, clean, strict=True):
            rows = [0, 2] if mine.dim() == 4 else others
            assert_same(mine[rows], wanted[rows])
        assert not found[0][70:136].isfinite().all()


def test_same_bits_again(device):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, heads=(2, 4), lengths=[500, 77])
    gradients = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    first = results_of(ours, tensors, cu_seqlens, gradients, use_qk_l2norm=True)
    for _ in range(3):
        assert_same(results_of(ours, tensors, cu_seqlens, gradients, use_qk_l2norm=True), first)


# --- the surface ---


def test_any_rows(device):
    """q, k and v as views of one projection, gradients that are expanded, odd addresses, g and beta in half types."""
    (q, k, v, g, beta, _), cu_seqlens = inputs_of(device, torch.bfloat16, heads=(2, 2), state=False)
    g, beta = g.bfloat16(), beta.bfloat16()
    wanted = ours(q, k, v, g.float(), beta.float(), cu_seqlens)
    for more in (0, 8, 1):
        rows = torch.cat(
            [torch.zeros(q.shape[0], more, device=device).bfloat16(), *(t.flatten(1) for t in (q, k, v))], 1
        )
        parts = [t.unflatten(1, (2, 64)) for t in rows[:, more:].split(128, 1)]
        assert_same(ours(*parts, g, beta, cu_seqlens), wanted)
    q = q.clone().requires_grad_()
    (found,) = torch.autograd.grad(ours(q, k, v, g, beta, cu_seqlens)[0].sum(), q)
    assert_same(found, torch.autograd.grad(ours(q, k, v, g, beta, cu_seqlens)[0], q, torch.ones_like(v))[0])


def test_without_documents_or_tokens(device):
    for lengths, total in (([], 0), ([], 3), ([0, 0], 0), ([0], 2)):
        tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=lengths)
        tensors[:5] = (t[:total] for t in tensors[:5])
        gradients = torch.ones_like(tensors[2]), torch.ones_like(tensors[5])
        out, state, *found, dinitial = results_of(ours, tensors, cu_seqlens, gradients)
        assert_same([out, state], [torch.zeros_like(tensors[2]), tensors[5]])
        assert_same(found, [torch.zeros_like(t) for t in tensors[:5]])
        assert_same(dinitial, gradients[1])


def test_metadata(device):
    tensors, cu_seqlens = inputs_of(device, torch.float32, state=False)
    wanted, none = po.gated_delta_rule(*tensors[:5], cu_seqlens)
    assert none is None
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=tensors[0].shape[0])
    assert_same(po.gated_delta_rule(*tensors[:5], metadata)[0], wanted)
    assert_same(po.gated_delta_rule(*tensors[:5], cu_seqlens.long())[0], wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.randn(4, 64)}, "q: expected 3 dimensions"),
        ({"k": torch.randn(4, 1, 32)}, "k: expected .* like q"),
        ({"k": torch.randn(4, 1, 64).bfloat16()}, "k: expected float32 like q"),
        ({"v": torch.randn(3, 2, 64)}, "v: expected .total=4"),
        ({"v": torch.randn(4, 0, 64)}, "v: expected .* a multiple of the 1"),
        (
            {"q": torch.randn(4, 2, 64), "k": torch.randn(4, 2, 64), "v": torch.randn(4, 3, 64)},
            "v: expected .* a multiple of the 2",
        ),
        ({"g": torch.randn(4, 1)}, "g: expected .*num_v_heads"),
        ({"beta": torch.randn(4, 2, 1)}, "beta: expected .*num_v_heads"),
        ({"initial_state": torch.randn(2, 2, 64, 32)}, "initial_state: expected .*num_documents, num_v_heads"),
        ({"initial_state": torch.randn(2, 2, 64, 64).bfloat16()}, "initial_state: expected float32"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, "cu_seqlens: expected to end at most at total=4"),
    ],
)
def test_errors(changes, message):
    q, v = torch.randn(4, 1, 64), torch.randn(4, 2, 64)
    given = {
        "q": q,
        "k": q,
        "v": v,
        "g": torch.zeros(4, 2),
        "beta": torch.ones(4, 2),
        "cu_seqlens": torch.tensor([0, 3, 4]),
    }
    with pytest.raises(ValueError, match=message):
        po.gated_delta_rule(**{**given, **changes})


@pytest.mark.parametrize("dims", [(32, 64), (64, 96), (1, 200), (64, 64)], ids=str)
def test_other_dims_are_padded(device, dims):
    """The rows that are added to a state add nothing. On the CPU, which has any dims, the sums are of other lengths."""
    tensors, cu_seqlens = inputs_of(device, torch.float32, dims=dims, lengths=[70, 3])
    assert_right(tensors, cu_seqlens, use_qk_l2norm=True)
    options = cu_seqlens, tensors[5], 0.5, True, True
    found, wanted = (
        po.scan._widened(gate.gated_delta_rule, [*tensors[:5], *options], *po.scan.DELTA),
        ours(*tensors[:5], cu_seqlens, initial_state=tensors[5], scale=0.5, use_qk_l2norm=True),
    )
    torch.testing.assert_close(found, wanted)
    if dims == (64, 64):
        assert_same(found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_wide_heads_are_refused_on_cuda():
    for dims, name in (((320, 64), "q"), ((64, 300), "v")):
        tensors, cu_seqlens = inputs_of("cuda", torch.bfloat16, dims=dims)
        with pytest.raises(ValueError, match=f"{name}: expected a head_dim of 64, 128 or 256 on CUDA"):
            ours(*tensors[:5], cu_seqlens)


def test_opcheck(device):
    ops = torch.ops.packing_ops
    tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=[3, 0, 70])
    for t in tensors:
        t.requires_grad_()
    *given, state = tensors
    torch.library.opcheck(ops.gated_delta_rule, (*given, cu_seqlens, state, 0.1, True, True))
    torch.library.opcheck(ops.gated_delta_rule, (*given, cu_seqlens, None, 0.1, False, False))
    *given, state = (t.detach() for t in tensors)
    for dfinal, initial in ((state, state), (None, None)):
        arguments = given[2], dfinal, *given, cu_seqlens, initial, 0.1, True
        torch.library.opcheck(ops.gated_delta_rule_backward, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.parametrize("l2norm", [False, True])
def test_gradcheck(l2norm):
    tensors, cu_seqlens = inputs_of("cpu", torch.float64, dims=(3, 2), lengths=[4, 1, 0])
    tensors = [t.requires_grad_() for t in tensors]

    def call(*tensors):
        return ours(*tensors[:5], cu_seqlens, initial_state=tensors[5], use_qk_l2norm=l2norm)

    assert torch.autograd.gradcheck(call, tensors)
    (gradient,) = torch.autograd.grad(call(*tensors)[0].sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="gated_delta_rule has no second derivative"):
        gradient.sum().backward()


def test_compiled_with_dynamic_sizes(device, fresh_compile):
    def layer(q, k, v, g, beta, cu_seqlens):
        return po.gated_delta_rule(q, k, v, g, beta, cu_seqlens, use_qk_l2norm=True)[0]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 9], [3, 4, 70], [100]):
        tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=lengths, state=False)
        given = [t.requires_grad_() for t in tensors[:5]]
        found, wanted = compiled(*given, cu_seqlens), layer(*given, cu_seqlens)
        assert_same(found, wanted)
        assert_same(torch.autograd.grad(found.sum(), given), torch.autograd.grad(wanted.sum(), given))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_in_a_graph():
    tensors, cu_seqlens = inputs_of("cuda", torch.bfloat16)
    gradients = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    call = lambda: results_of(ours, tensors, cu_seqlens, gradients)  # noqa: E731
    wanted = call()
    graph, found = captured(call)
    graph.replay()
    assert_same(found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes on a CPU")
def test_a_long_document():
    tensors, cu_seqlens = inputs_of("cuda", torch.bfloat16, heads=(1, 1), dims=(128, 128), lengths=[100_000, 300])
    out, _ = ours(*tensors[:5], cu_seqlens, use_qk_l2norm=True)
    tail = [t[99_072:100_000] for t in tensors[:5]]
    head = [t[:99_072] for t in tensors[:5]]
    _, state = ours(*head, cu_seqlens_of([99_072], "cuda"), use_qk_l2norm=True)
    wanted, _ = oracle.gated_delta_rule(
        *(t.double() for t in tail), cu_seqlens_of([928]), initial_state=state.double(), use_qk_l2norm=True, chunk=64
    )
    assert (out[99_072:100_000] - wanted).abs().max() <= 2**-6 * wanted.abs().max()


def test_operations_are_counted():
    """3 products with the state for a token, and 8 in backward."""
    po.register_flop_formulas()
    (q, k, v, g, beta, _), cu_seqlens = inputs_of("cpu", torch.float32, dims=(3, 5), lengths=[6], state=False)
    with FlopCounterMode(display=False) as counter:
        out, _ = po.gated_delta_rule(q.requires_grad_(), k, v, g, beta, cu_seqlens)
        out.sum().backward()
    assert counter.get_total_flops() == (3 + 8) * 2 * (6 + PADDING) * 2 * 3 * 5


@pytest.mark.parametrize("name", ["g", "beta"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64], ids=str)
def test_gates_are_floating(name, dtype):
    """A cast would drop what an integer cannot say, or the imaginary part."""
    q = torch.randn(3, 1, 8)
    given = {"q": q, "k": q, "v": q, "g": -torch.rand(3, 1), "beta": torch.rand(3, 1)}
    given[name] = given[name].to(dtype)
    with pytest.raises(
        ValueError, match=f"{name}: expected float32, float64, bfloat16 or float16, got {str(dtype)[6:]}"
    ):
        po.gated_delta_rule(**given, cu_seqlens=torch.tensor([0, 3]))
