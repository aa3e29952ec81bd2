"""mamba2_scan against packing_ops.reference.scan: a loop over tokens in float64, and torch's formula in chunks."""

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
NAMES = ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state"]
ROWS = ["x", "dt", "B", "C", "z"]  # of tokens
INFINITY = float("inf")


def inputs_of(device, dtype, *, heads=(1, 2), dims=(64, 64), lengths=LENGTHS, state=True):
    """The tensors of NAMES as a layer has them, a tenth of a state among them, and their cu_seqlens. dims are those of
    the state and of x, heads those of B and of x.
    """
    total, (groups, num_heads), (dim_s, dim) = sum(lengths) + PADDING, heads, dims
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    found = {
        "x": numbers(total, num_heads, dim).to(dtype),
        "dt": numbers(total, num_heads).to(sums),
        "A": -(0.02 + torch.rand(num_heads, device=device)).to(sums),
        "B": (numbers(total, groups, dim_s) * dim_s**-0.5).to(dtype),
        "C": numbers(total, groups, dim_s).to(dtype),
        "D": numbers(num_heads).to(sums),
        "z": torch.randn(total, num_heads, dim, generator=torch.Generator().manual_seed(0)).to(device, dtype),
        "dt_bias": (numbers(num_heads) - 2).to(sums),
        "initial_state": 0.1 * numbers(len(lengths), num_heads, dim, dim_s).to(sums) if state else None,
    }
    return found, cu_seqlens_of(lengths, device)


def called(scan, tensors, cu_seqlens, *, dt_softplus=True, **options):
    return scan(**tensors, cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, **options)


def ours(tensors, cu_seqlens, **options):
    return called(po.mamba2_scan, tensors, cu_seqlens, output_final_state=True, **options)


def theirs(tensors, cu_seqlens, **options):
    return called(oracle.mamba2_scan, tensors, cu_seqlens, **options)


def results_of(scan, tensors, cu_seqlens, gradients, **options):
    """{"out", "final_state" and the names of the tensors that were given: its gradient}."""
    tensors = {name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()}
    found = scan(tensors, cu_seqlens, **options)
    given = [gradient.to(result.dtype) for gradient, result in zip(gradients, found, strict=True)]
    wanted = {name: t for name, t in tensors.items() if t is not None}
    return dict(
        zip(
            ["out", "final_state", *wanted],
            [*found, *torch.autograd.grad(found, [*wanted.values()], given)],
            strict=True,
        )
    )


def gradients_of(tensors, documents):
    x, state = tensors["x"], tensors["B"].shape[-1]
    return torch.randn_like(x), 0.1 * torch.randn(documents, *x.shape[1:], state, device=x.device)


def terms_of(tensors, cu_seqlens, gradients, *, dt_softplus=True, dt_limit=(0.0, INFINITY)):
    """The sizes of what tokens add to the gradients of A, D and dt_bias, one or two numbers each: these may cancel, and
    the rounding of the terms stays.
    """
    *given, z, bias, state = (None if t is None else t.cpu() for t in tensors.values())
    dout, dfinal = (t.double().cpu() for t in gradients)
    dout, given = dout if z is None else dout * torch.nn.functional.silu(z), [*given, bias]
    _, ddt, to_dA, _, _, to_dD, _ = torch.ops.packing_ops.mamba2_scan_backward(
        dout, dfinal, *given, cu_seqlens.cpu(), state, dt_softplus, *dt_limit
    )
    return {name: t.abs().sum(0) for name, t in {"A": to_dA, "D": to_dD, "dt_bias": ddt}.items()}


def assert_right(tensors, cu_seqlens, *, factor=2.0, scan=ours, **options):
    """At most twice the error of the formula in chunks whose products are in x's dtype; the rest of it is in
    float32.
    """
    gradients = gradients_of(tensors, len(cu_seqlens) - 1)
    found = results_of(scan, tensors, cu_seqlens, gradients, **options)
    low = results_of(theirs, tensors, cu_seqlens, gradients, chunk=64, **options)
    doubled = {name: None if t is None else t.double() for name, t in tensors.items()}
    exact = results_of(theirs, doubled, cu_seqlens, gradients, **options)
    terms = terms_of(doubled, cu_seqlens, gradients, **options)
    for name, mine in found.items():
        wanted = exact[name]
        assert (mine.dtype, mine.shape) == (low[name].dtype, wanted.shape), name
        roundings = 512 if mine.dtype == torch.float64 else 4  # both formulas round in float64
        unit = roundings * torch.finfo(mine.dtype).eps
        wide = name in ("dt", "A", "dt_bias") or (name == "D" and tensors["z"] is not None)
        if wide:  # the states that these are products of are kept in x's dtype, as the formula's are not; D's are gated
            unit = max(unit, torch.finfo(tensors["x"].dtype).eps)
        size = terms.get(name, wanted)
        floor = unit * size.abs().max().item() if wanted.numel() else 0
        assert_error_within(mine, low[name], wanted, factor=2 * factor if wide else factor, floor=floor)
    return found


# --- values ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True])
def test_equals_reference(device, dtype, state):
    tensors, cu_seqlens = inputs_of(device, dtype, state=state)
    found = assert_right(tensors, cu_seqlens)
    for name in ("out", *ROWS):
        assert not found[name][-PADDING:].any()


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (128, 128), (256, 64), (16, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dims(device, dims, dtype):
    assert_right(*inputs_of(device, dtype, dims=dims, heads=(1, 1), lengths=[65, 3]))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (1, 3), (3, 6)], ids=str)
def test_groups(device, heads):
    assert_right(*inputs_of(device, torch.float32, heads=heads, lengths=[70, 3]))


def test_any_dims_and_float64_on_the_cpu():
    for dims in ((3, 1), (5, 3), (24, 40)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            assert_right(*inputs_of("cpu", dtype, dims=dims, lengths=[70, 0, 2]))


@pytest.mark.parametrize("missing", [("D",), ("z",), ("dt_bias",), ("D", "z", "dt_bias")], ids=str)
def test_without_a_bias_skip_or_gate(device, missing):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, lengths=[70, 3])
    assert_right({**tensors, **dict.fromkeys(missing)}, cu_seqlens)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, INFINITY), (0.05, 0.2), (0.0, 0.1), (0.1, 0.1)], ids=str)
def test_limits_of_a_step(device, softplus, limit):
    """The gradient of a step outside them is 0, and none is lost inside."""
    tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=[70, 3])
    tensors["dt"] = (tensors["dt"] * 4 if softplus else tensors["dt"].abs() / 4 + 2).contiguous()
    # Equal steps: token by token on the CPU a state's decays round alike 70 times, the formula's sum of them once.
    found = assert_right(tensors, cu_seqlens, dt_softplus=softplus, dt_limit=limit, factor=8.0)
    step = tensors["dt"] + tensors["dt_bias"]
    step = torch.nn.functional.softplus(step) if softplus else step
    outside = (step < limit[0]) | (step > limit[1])
    assert not found["dt"][outside].any()
    assert outside.all() or found["dt"][:73][~outside[:73]].any()


def test_softplus_of_large_numbers(device):
    tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=[8])
    tensors["dt"][:8, 0] = torch.tensor([-200.0, -30.0, 0.0, 19.9, 20.1, 30.0, 60.0, 90.0])
    assert_right({**tensors, "A": tensors["A"] / 16}, cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("a", [0.0, -1e-30, -50.0, -1e30])
@pytest.mark.parametrize("dt", [0.0, 0.5])
def test_extreme_decays(device, dtype, a, dt):
    tensors, cu_seqlens = inputs_of(device, dtype, lengths=[130, 3])
    tensors = {**tensors, "A": torch.full_like(tensors["A"], a), "dt": torch.full_like(tensors["dt"], dt)}
    # That of A, 1e30 off what a step has, is 0 to both formulas' rounding.
    tensors["dt_bias"] = torch.zeros_like(tensors["dt_bias"])
    assert_right(tensors, cu_seqlens, dt_softplus=False)


# --- bits ---


def pieces_of(tensors, cu_seqlens, i, rows, state=None):
    """The tensors of rows of only document i."""
    start = cu_seqlens[i].item()
    parts = {name: tensors[name][start + rows.start : start + rows.stop] for name in ROWS}
    return {**tensors, **parts, "initial_state": state}


@given(lengths=lengths_strategy, seed=st.integers(0, 99))
@settings(max_examples=10)
def test_bits_of_a_document_are_those_that_it_has_alone(device, lengths, seed):
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16):
        tensors, cu_seqlens = inputs_of(device, dtype, heads=(1, 1), lengths=lengths)
        dout, dfinal = gradients_of(tensors, len(lengths))
        packed = results_of(ours, tensors, cu_seqlens, (dout, dfinal))
        for i, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths, strict=False)):
            of_document, of_tokens = slice(i, i + 1), slice(start, start + length)
            given = pieces_of(tensors, cu_seqlens, i, slice(0, length), tensors["initial_state"][of_document])
            gradients = dout[of_tokens], dfinal[of_document]
            alone = results_of(ours, given, cu_seqlens_of([length], device), gradients)
            for name in ("out", *ROWS):
                assert_same(packed[name][of_tokens], alone[name])
            for name in ("final_state", "initial_state"):
                assert_same(packed[name][of_document], alone[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_calls_that_go_on(device, dtype):
    """At multiples of 64 with the state passed on; rows of an open chunk run again, as decoding does."""
    tensors, cu_seqlens = inputs_of(device, dtype, lengths=[300], state=False)
    whole, last = ours(tensors, cu_seqlens)
    found, state, start = [], None, 0
    for length in (64, 128, 64, 0, 44):
        rows = pieces_of(tensors, cu_seqlens, 0, slice(start, start + length), state)
        out, state = ours(rows, cu_seqlens_of([length], device))
        found.append(out)
        start += length
    assert_same(torch.cat(found), whole[:300])
    assert_same(state, last)
    _, state = ours(pieces_of(tensors, cu_seqlens, 0, slice(0, 192)), cu_seqlens_of([192], device))
    for end in (193, 200, 255):
        rows = pieces_of(tensors, cu_seqlens, 0, slice(192, end), state)
        out, _ = ours(rows, cu_seqlens_of([end - 192], device))
        assert_same(out, whole[192:end])


def test_bits_of_prefixes(device):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, lengths=[200], state=False)
    whole, _ = ours(tensors, cu_seqlens)
    for length in (1, 63, 64, 65, 127, 128, 199):
        part, _ = ours(pieces_of(tensors, cu_seqlens, 0, slice(0, length)), cu_seqlens_of([length], device))
        assert_same(part, whole[:length])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_document(device, value):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, lengths=[70, 66, 7])
    gradients = gradients_of(tensors, 3)
    clean = results_of(ours, tensors, cu_seqlens, gradients)
    others = [*range(70), *range(136, tensors["x"].shape[0])]
    for name in ROWS:
        broken = {**tensors, name: tensors[name].clone()}
        broken[name][70:136:3], broken[name][-PADDING:] = value, value
        found = results_of(ours, broken, cu_seqlens, gradients)
        for row in ("out", *ROWS):
            assert_same(found[row][others], clean[row][others])
        for document in ("final_state", "initial_state"):
            assert_same(found[document][[0, 2]], clean[document][[0, 2]])
        assert not found["out"][70:136].isfinite().all()


def test_same_bits_again(device):
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, heads=(2, 4), lengths=[500, 77])
    gradients = gradients_of(tensors, 2)
    first = results_of(ours, tensors, cu_seqlens, gradients)
    for _ in range(3):
        assert_same(results_of(ours, tensors, cu_seqlens, gradients), first)


# --- the surface ---


def test_any_rows(device):
    """x, B, C and z as views of one projection, gradients that are expanded, odd addresses, other numbers in half
    types.
    """
    tensors, cu_seqlens = inputs_of(device, torch.bfloat16, heads=(2, 2), state=False)
    rounded = {name: tensors[name].bfloat16() for name in ("dt", "A", "D", "dt_bias")}
    wanted = ours({**tensors, **{name: t.float() for name, t in rounded.items()}}, cu_seqlens)
    total = tensors["x"].shape[0]
    for more in (0, 8, 1):
        parts = [torch.zeros(total, more, device=device).bfloat16(), *(tensors[name].flatten(1) for name in "xBCz")]
        views = [t.unflatten(1, (2, 64)) for t in torch.cat(parts, 1)[:, more:].split(128, 1)]
        given = {**tensors, **rounded, **dict(zip("xBCz", views, strict=True))}
        assert_same(ours(given, cu_seqlens), wanted)
        strided = {**given, "dt": given["dt"].repeat_interleave(2, 1)[:, ::2]}
        assert_same(ours(strided, cu_seqlens), wanted)
    for z in (None, tensors["z"]):
        x = tensors["x"].clone().requires_grad_()
        out = ours({**tensors, "x": x, "z": z}, cu_seqlens)[0]
        (found,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert_same(found, torch.autograd.grad(out, x, torch.ones_like(x))[0])


def test_without_documents_or_tokens(device):
    for lengths, total in (([], 0), ([], 3), ([0, 0], 0), ([0], 2)):
        tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=lengths)
        tensors = {**tensors, **{name: tensors[name][:total] for name in ROWS}}
        state = tensors["initial_state"]
        found = results_of(ours, tensors, cu_seqlens, (torch.ones_like(tensors["x"]), torch.ones_like(state)))
        assert_same(found.pop("final_state"), state)
        assert_same(found.pop("initial_state"), torch.ones_like(state))
        assert_same(found.pop("out"), torch.zeros_like(tensors["x"]))
        assert_same(found, {name: torch.zeros_like(tensors[name]) for name in found})


def test_metadata(device):
    tensors, cu_seqlens = inputs_of(device, torch.float32, state=False)
    wanted, none = called(po.mamba2_scan, tensors, cu_seqlens)
    assert none is None
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=tensors["x"].shape[0])
    assert_same(ours(tensors, metadata)[0], wanted)
    assert_same(ours(tensors, cu_seqlens.long())[0], wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(4, 64)}, "x: expected 3 dimensions"),
        ({"x": torch.ones(4, 2, 64, dtype=torch.int32)}, "x: expected float32"),
        ({"B": torch.randn(3, 1, 64)}, "B: expected .total=4"),
        ({"B": torch.randn(4, 0, 64)}, "B: expected .* groups that divide the 2 heads"),
        ({"B": torch.randn(4, 3, 64), "C": torch.randn(4, 3, 64)}, "B: expected .* groups that divide the 2 heads"),
        ({"B": torch.randn(4, 1, 64).bfloat16()}, "B: expected float32 like x"),
        ({"C": torch.randn(4, 1, 32)}, "C: expected .* like B"),
        ({"dt": torch.randn(4, 1)}, "dt: expected .*num_heads"),
        ({"A": torch.randn(2, 64)}, "A: expected .*num_heads"),
        ({"D": torch.randn(3)}, "D: expected .*num_heads"),
        ({"z": torch.randn(4, 128)}, "z: expected 3 dimensions"),
        ({"z": torch.randn(4, 1, 64)}, "z: expected .* like x"),
        ({"z": torch.randn(4, 2, 64).bfloat16()}, "z: expected float32 like x"),
        ({"dt_bias": torch.randn(1)}, "dt_bias: expected .*num_heads"),
        ({"initial_state": torch.randn(2, 2, 32, 64)}, "initial_state: expected .*head_dim, state_dim"),
        ({"initial_state": torch.randn(2, 2, 64, 64).bfloat16()}, "initial_state: expected float32"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, "cu_seqlens: expected to end at most at total=4"),
        ({"dt_limit": (1.0, 0.5)}, r"dt_limit: expected \(min, max\) with min <= max, got \(1, 0.5\)"),
    ],
)
def test_errors(changes, message):
    given = {
        "x": torch.randn(4, 2, 64),
        "dt": torch.zeros(4, 2),
        "A": -torch.ones(2),
        "B": torch.randn(4, 1, 64),
        "C": torch.randn(4, 1, 64),
        "cu_seqlens": torch.tensor([0, 3, 4]),
    }
    with pytest.raises(ValueError, match=message):
        po.mamba2_scan(**{**given, **changes})


@pytest.mark.parametrize("limit", [0.1, (0.1,), (0.0, 0.1, 0.2), None, "ab", (0.0, "b")], ids=str)
def test_what_is_no_pair_of_limits_is_named(limit):
    tensors, cu_seqlens = inputs_of("cpu", torch.float32, lengths=[3])
    with pytest.raises(TypeError, match=r"dt_limit: expected a (pair|number)"):
        ours(tensors, cu_seqlens, dt_limit=limit)


def test_a_limit_that_would_lose_its_gradient_is_refused():
    tensors, cu_seqlens = inputs_of("cpu", torch.float32, lengths=[3])
    limit = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(ValueError, match="dt_limit: expected a number or a tensor without requires_grad"):
        ours(tensors, cu_seqlens, dt_limit=(0.0, limit))
    assert_same(
        ours(tensors, cu_seqlens, dt_limit=[0, limit.detach()]), ours(tensors, cu_seqlens, dt_limit=(0.0, float(limit)))
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_is_named(name):
    tensors, cu_seqlens = inputs_of("cpu", torch.float32, lengths=[3])
    with pytest.raises(TypeError, match=f"{name}: expected a tensor"):
        ours({**tensors, name: [1.0]}, cu_seqlens)


@pytest.mark.parametrize("dims", [(16, 64), (64, 96), (1, 200), (64, 64)], ids=str)
def test_other_dims_are_padded(device, dims):
    """The rows that are added to a state add nothing. On the CPU, which has any dims, the sums are of other lengths."""
    tensors, cu_seqlens = inputs_of(device, torch.float32, dims=dims, lengths=[70, 3])
    # With one column B has 73 gradients, each a sum of 400 terms: which of two orders of it errs least is luck.
    assert_right(tensors, cu_seqlens, factor=6.0 if dims[0] == 1 else 2.0)
    tensors["z"] = None
    *given, _, bias, state = tensors.values()
    given = [*given, bias, cu_seqlens, state, True, 0.0, INFINITY, True]
    found = po.scan._widened(gate.mamba2_scan, given, *po.scan.MAMBA)
    wanted = ours(tensors, cu_seqlens)
    torch.testing.assert_close(found, wanted)
    assert all(each.is_contiguous() for each in (*found, *wanted))
    if dims == (64, 64):
        assert_same(found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_wide_heads_are_refused_on_cuda():
    for dims, name in (((320, 64), "B"), ((64, 300), "x")):
        tensors, cu_seqlens = inputs_of("cuda", torch.bfloat16, dims=dims)
        with pytest.raises(ValueError, match=f"{name}: expected a head_dim of 64, 128 or 256 on CUDA"):
            ours(tensors, cu_seqlens)


def test_opcheck(device):
    ops = torch.ops.packing_ops
    tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=[3, 0, 70])
    for t in tensors.values():
        t.requires_grad_()
    z = tensors.pop("z")
    *given, state = tensors.values()
    options = True, 0.01, INFINITY
    torch.library.opcheck(ops.mamba2_scan, (*given, cu_seqlens, state, *options, True))
    torch.library.opcheck(ops.mamba2_scan, (*given[:5], None, None, cu_seqlens, None, *options, False))
    *given, state = (t.detach() for t in tensors.values())
    for dfinal, initial in ((state, state), (None, None)):
        arguments = given[0], dfinal, *given, cu_seqlens, initial, *options
        torch.library.opcheck(ops.mamba2_scan_backward, arguments, test_utils=["test_schema", "test_faketensor"])
    torch.library.opcheck(ops.mamba2_gate, (tensors["x"], z, cu_seqlens))
    arguments = *3 * [z.detach()], cu_seqlens
    torch.library.opcheck(ops.mamba2_gate_backward, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.parametrize("limit", [(0.0, INFINITY), (0.12, 0.5)], ids=str)
def test_gradcheck(limit):
    tensors, cu_seqlens = inputs_of("cpu", torch.float64, dims=(3, 2), lengths=[4, 1, 0])
    tensors = [t.requires_grad_() for t in tensors.values()]

    def call(*tensors):
        return ours(dict(zip(NAMES, tensors, strict=True)), cu_seqlens, dt_limit=limit)

    assert torch.autograd.gradcheck(call, tensors)
    (gradient,) = torch.autograd.grad(call(*tensors)[0].sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="mamba2_scan has no second derivative"):
        gradient.sum().backward()


def test_compiled_with_dynamic_sizes(device, fresh_compile):
    def layer(x, dt, A, B, C, D, z, dt_bias, cu_seqlens):
        return po.mamba2_scan(x, dt, A, B, C, cu_seqlens, D=D, z=z, dt_bias=dt_bias, dt_softplus=True)[0]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 9], [3, 4, 70], [100]):
        tensors, cu_seqlens = inputs_of(device, torch.float32, lengths=lengths, state=False)
        given = [t.requires_grad_() for t in [*tensors.values()][:-1]]
        found, wanted = compiled(*given, cu_seqlens), layer(*given, cu_seqlens)
        assert_same(found, wanted)
        assert_same(torch.autograd.grad(found.sum(), given), torch.autograd.grad(wanted.sum(), given))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_in_a_graph():
    tensors, cu_seqlens = inputs_of("cuda", torch.bfloat16)
    gradients = gradients_of(tensors, len(LENGTHS))
    call = lambda: [*results_of(ours, tensors, cu_seqlens, gradients).values()]  # noqa: E731
    wanted = call()
    graph, found = captured(call)
    graph.replay()
    assert_same(found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes on a CPU")
def test_a_long_document():
    tensors, cu_seqlens = inputs_of("cuda", torch.bfloat16, heads=(1, 2), dims=(128, 64), lengths=[100_000, 300])
    tensors["initial_state"] = None
    out, _ = ours(tensors, cu_seqlens)
    _, state = ours(pieces_of(tensors, cu_seqlens, 0, slice(0, 99_072)), cu_seqlens_of([99_072], "cuda"))
    tail = pieces_of(tensors, cu_seqlens, 0, slice(99_072, 100_000), state)
    doubled = {name: t.double() for name, t in tail.items()}
    wanted, _ = theirs(doubled, cu_seqlens_of([928]), chunk=64)
    assert (out[99_072:100_000] - wanted).abs().max() <= 2**-6 * wanted.abs().max()


def test_operations_are_counted():
    """2 products with the state for a token, and 5 in backward."""
    po.register_flop_formulas()
    tensors, cu_seqlens = inputs_of("cpu", torch.float32, dims=(3, 5), lengths=[6], state=False)
    tensors["x"].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        called(po.mamba2_scan, tensors, cu_seqlens)[0].sum().backward()
    assert counter.get_total_flops() == (2 + 5) * 2 * (6 + PADDING) * 2 * 3 * 5


@pytest.mark.parametrize("name", ["dt", "A", "D", "dt_bias"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64], ids=str)
def test_steps_are_floating(name, dtype):
    """A cast would drop what an integer cannot say, or the imaginary part."""
    tensors, cu_seqlens = inputs_of("cpu", torch.float32, lengths=[3])
    with pytest.raises(
        ValueError, match=f"{name}: expected float32, float64, bfloat16 or float16, got {str(dtype)[6:]}"
    ):
        ours({**tensors, name: tensors[name].to(dtype)}, cu_seqlens)
