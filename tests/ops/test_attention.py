"""packing_ops.attention against packing_ops.reference.attention."""

import copy
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, non_contiguous
from helpers.attention_case import INF, OPEN, Case, assert_close, document_results, drawn_case, packed_with
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po

ops = torch.ops.packing_ops
NAN = float("nan")


def skip_float64_on_cuda(device, dtype=torch.float64):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 has CPU kernels only")


# --- values ---


def test_worked_values(device):
    q = k = torch.zeros(3, 1, 2, device=device)
    v = torch.tensor([[[1.0, 2.0]], [[5.0, 6.0]], [[7.0, 8.0]]], device=device)
    cu_seqlens = cu_seqlens_of([2, 1], device)
    out, lse = po.varlen_attention(q, k, v, cu_seqlens, return_lse=True)
    assert out.tolist() == [[[1.0, 2.0]], [[3.0, 4.0]], [[7.0, 8.0]]]
    torch.testing.assert_close(lse, torch.tensor([[0.0, math.log(2), 0.0]], device=device))
    # A sink with score 0 is one more key with value 0.
    sunk, lse = po.varlen_attention(q, k, v, cu_seqlens, sinks=torch.zeros(1, device=device), return_lse=True)
    torch.testing.assert_close(sunk.flatten().tolist(), [0.5, 1.0, 2.0, 8 / 3, 3.5, 4.0])
    torch.testing.assert_close(lse, torch.log(torch.tensor([[2.0, 3.0, 2.0]], device=device)))


@given(
    lengths=st.lists(
        st.tuples(*[st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129])] * 2), min_size=1, max_size=4
    ),
    cross=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 1), (3, 3), (7, 1), (71, 1)]),
    dim=st.sampled_from([1, 8, 40, 64, 80]),
    causal=st.booleans(),
    window=st.sampled_from([OPEN, (0, 0), (5, 0), (70, -1), (-1, 0), (3, 9), (-1, 20)]),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    sinks=st.booleans(),
    tail=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_equals_oracle(device, lengths, cross, heads, dim, causal, window, softcap, sinks, tail, dtype):
    if device == "cuda":
        dtype = torch.float32
    case = drawn_case(
        lengths, cross, heads=heads, dim=dim, device=device, dtype=dtype, tail=tail, sinks=sinks, causal=causal,
        window=window, softcap=softcap,
    )  # fmt: skip
    assert_close(case.ours(), case.exact(), 1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_torch(device, dtype, dim):
    case = Case([500, 300, 65], heads=(4, 2), dim=dim, dtype=dtype, device=device)
    case.dlse.zero_()
    ours, exact, theirs = case.ours(), case.exact(), case.sdpa()
    for name in ("out", "dq", "dk", "dv"):
        assert_error_within(ours[name], theirs[name], exact[name])
    # Tensor cores cut the tail of each sum off, so scores of the half types are a few ulp further away there.
    floor = 1e-6 if device == "cuda" and dtype != torch.float32 else 0.0
    assert_error_within(ours["lse"], case.plain_torch()["lse"], exact["lse"], floor=floor)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": True},
        {"softcap": 5.0},
        {"softcap": 50.0, "softmax_scale": 0.5},
        {"window_size": (30, 0), "sinks": True},
        {"causal": False, "window_size": (9, 70), "softcap": 20.0},
    ],
    ids=str,
)
def test_error_of_features_is_at_most_twice_that_of_torch(device, options):
    case = Case([200, 65, 130], heads=(4, 2), dim=64, device=device, **options)
    ours, exact, theirs = case.ours(), case.exact(), case.plain_torch()
    for name in exact:
        assert_error_within(ours[name], theirs[name], exact[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_rounds_only_what_it_returns(device, dtype):
    case = Case([150, 33], heads=(4, 1), dim=48, dtype=dtype, device=device, sinks=True, softcap=10.0)
    ours, exact, inside_float32 = case.ours(), case.exact(), case.plain_torch()
    for name in ("out", "dq", "dk", "dv"):
        assert ours[name].dtype == dtype
        assert_error_within(ours[name], inside_float32[name].to(dtype), exact[name])
    assert ours["lse"].dtype == torch.float32


def test_large_scores_do_not_overflow(device):
    case = Case([70, 3], heads=(1, 1), dim=16, device=device, softmax_scale=300.0)
    ours, exact = case.ours(), case.exact()
    torch.testing.assert_close(ours["lse"].double(), exact["lse"], rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(ours["out"].double(), exact["out"], rtol=1e-3, atol=1e-3)
    assert all(value.isfinite().all() for value in ours.values())


# --- edges of the contract ---


def test_rows_past_the_end_and_rows_that_see_nothing(device):
    # Three queries over one key, bottom-right aligned: only the last sees it. The second document has no key at all.
    case = Case([3, 2], [1, 0], heads=(2, 1), tail=4, device=device)
    case.q[5:], case.k[1:], case.v[1:], case.dout[5:] = NAN, NAN, NAN, NAN
    ours = case.ours()
    assert (ours["out"][[0, 1, *range(3, 9)]] == 0).all()
    assert (ours["lse"][:, [0, 1, *range(3, 9)]] == -INF).all()
    assert_same(ours["out"][2], case.v[0].expand(2, -1))
    assert (ours["dq"][[0, 1, *range(3, 9)]] == 0).all()
    assert (ours["dk"][1:] == 0).all()
    assert (ours["dv"][1:] == 0).all()
    torch.testing.assert_close(ours["dv"][0, 0], case.dout[2].sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40, 2**62, sys.maxsize])
def test_windows_longer_than_any_document(device, window, dtype):
    skip_float64_on_cuda(device, dtype)
    for causal, wide in ((True, (window, 0)), (False, (window, window)), (False, (window, 3)), (False, (3, window))):
        given = Case([3, 150], [4, 150], heads=(2, 1), dtype=dtype, device=device, causal=causal, window_size=wide)
        open_ = copy.copy(given)
        open_.options = {"causal": causal, "window_size": tuple(-1 if side == window else side for side in wide)}
        found, wanted = given.ours(), open_.ours()
        for name, value in wanted.items():
            assert_same(found[name], value)
        other = po.attention(given.q, given.k, given.v, *given.cu_seqlens, **given.options, backend="sdpa")
        torch.testing.assert_close(other, wanted["out"])


@pytest.mark.parametrize("softcap", [INF, 1e300, 3e38, 1e30])
def test_softcap_beyond_the_scores_is_none(device, softcap):
    case = Case([70, 3], dim=16, device=device)
    wanted = case.ours()
    case.options["softcap"] = softcap
    for name, value in case.ours().items():
        torch.testing.assert_close(value, wanted[name], msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_softcap_too_small_to_divide_by(device):
    case = Case([3], dim=16, device=device, softcap=1e-40)
    with pytest.raises(ValueError, match=r"softcap: expected 0 \(off\) or a bound .* at least 1.17549e-38, got 1e-40"):
        case.ours()
    case.options["softcap"] = 1e-30  # all scores alike
    torch.testing.assert_close(case.ours()["out"][-1], case.v.mean(0).expand(2, -1))


def test_sink_alone(device):
    case = Case([3], [0], heads=(2, 1), tail=1, sinks=True, device=device)
    ours = case.ours()
    assert (ours["out"] == 0).all()
    assert_same(ours["lse"][:, :3], case.sinks[:, None].expand(-1, 3))
    assert (ours["lse"][:, 3] == -INF).all()
    torch.testing.assert_close(ours["dsinks"], case.dlse[:, :3].sum(1))


def test_a_sink_of_minus_infinity_is_no_sink(device):
    case = Case([20, 5], [20, 0], sinks=True, device=device)
    case.sinks.fill_(-INF)
    with_sinks = case.ours()
    assert (with_sinks.pop("dsinks") == 0).all()
    case.sinks = None
    for name, value in case.ours().items():
        assert_same(with_sinks[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1000, 65_536])
def test_one_token_documents(device, count, dtype):
    case = Case([1] * count, heads=(3, 1), dim=32, dtype=dtype, device=device)
    case.dlse.zero_()
    ours = case.ours()
    assert_same(ours["out"], case.v.expand(-1, 3, -1))
    torch.testing.assert_close(ours["lse"], (case.q.float() * case.k.float()).sum(-1).T / math.sqrt(32))
    dv = case.dout.float().sum(1, keepdim=True).to(dtype)
    torch.testing.assert_close(ours["dv"], dv, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)
    # One weight of 1 whatever the score: no gradient beyond the rounding of dout . v.
    for name in ("dq", "dk"):
        assert ours[name].abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_at_all(device, lengths, dtype):
    for tail in (0, 2):
        ours = Case(lengths, tail=tail, sinks=True, dtype=dtype, device=device).ours()
        assert ours["out"].shape == (tail, 2, 16)
        assert ours["lse"].shape == (2, tail)
        assert all((ours[name] == 0).all() for name in ("out", "dq", "dk", "dv", "dsinks"))


def test_strided_views_and_expanded_gradients(device):
    """Views into a fused projection and a stride-0 gradient give the bits of contiguous copies."""
    cu_seqlens = cu_seqlens_of([70, 5], device)
    fused = torch.randn(75, 4 * 40, device=device)
    views = [t.unflatten(-1, (-1, 40)) for t in fused.split([80, 40, 40], dim=-1)]
    assert not views[0].is_contiguous()
    results = []
    for tensors in (views, [t.contiguous() for t in views]):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = po.varlen_attention(*leaves, cu_seqlens)
        grads = torch.autograd.grad(out.sum(), leaves)
        results.append([out, *grads])
    by_heads = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in views]
    results.append([po.varlen_attention(*by_heads, cu_seqlens)])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=False):
            assert_same(actual, expected)


def test_sinks_in_low_precision(device):
    case = Case([9], dtype=torch.bfloat16, sinks=True, device=device)
    sinks = case.sinks.bfloat16().requires_grad_()
    po.varlen_attention(case.q, case.k, case.v, case.cu_seqlens[0], sinks=sinks).sum().backward()
    assert sinks.grad.dtype == torch.bfloat16
    assert sinks.grad.abs().sum() > 0


# --- packing invariance, to the bit ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window_size": (20, 0), "softcap": 5.0}, {"causal": False, "sinks": True}], ids=str
)
def test_document_is_the_same_in_any_pack(device, dtype, options):
    skip_float64_on_cuda(device, dtype)
    for length in (1, 2, 17, 64, 65, 200):
        case = Case([length], heads=(3, 1), dim=24, dtype=dtype, device=device, **options)
        alone = document_results(case.ours(), 0, length)
        for before, after in (([5, 0, 33], [300, 2]), ([1], []), ([129, 64, 64], [1] * 9)):
            packed, start = packed_with(case, before, after)
            found = document_results(packed.ours(), start, start + length)
            for name, value in alone.items():
                assert_same(found[name], value)


@pytest.mark.parametrize("lengths", [[300, 7, 64, 128, 0, 33], [4200, 100]])
def test_threads_and_runs_change_no_bit(device, lengths):
    """The second pack has a document that backward visits twice, once by queries and once by keys."""
    case = Case(lengths, heads=(2, 1), dim=16, device=device, sinks=True, window_size=(700, 0))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(case.ours())
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for name, value in results[0].items():
            assert_same(result[name], value)


def test_long_documents(device):
    case = Case([100, 40], [4500, 9], heads=(2, 1), dim=8, device=device, sinks=True)
    assert_close(case.ours(), case.exact(), 1e-4)
    case = Case([4200], heads=(1, 1), dim=8, device=device, window_size=(99, 0))
    packed, start = packed_with(case, [50], [9])
    found = document_results(packed.ours(), start, start + 4200)
    for name, value in document_results(case.ours(), 0, 4200).items():
        assert_same(found[name], value)


def test_two_python_threads_at_once(device):
    cases = [Case([200, 90], dim=32, device=device) for _ in range(2)]
    alone = [case.ours() for case in cases]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(Case.ours, cases * 4))
    for found, expected in zip(together, alone * 4, strict=True):
        for name, value in expected.items():
            assert_same(found[name], value)


# --- NaN and Inf stay where they are ---


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
def test_a_poisoned_document_changes_no_other(device, name, poison):
    case = Case([70, 65, 3], [70, 65, 3], heads=(2, 1), device=device)
    clean = case.ours()
    tensor = getattr(case, name)
    (tensor.T if name == "dlse" else tensor)[70:135] = poison
    ours = case.ours()
    for start, end in ((0, 70), (135, 138)):
        expected = document_results(clean, start, end)
        for key, value in document_results(ours, start, end).items():
            assert_same(value, expected[key])


# The half types on a GPU: test_attention_cuda.py.
EXACT = [("cpu", dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)]
EXACT += [("cuda", torch.float32)] if torch.cuda.is_available() else []
exact = pytest.mark.parametrize(("device", "dtype"), EXACT, ids=str)


@exact
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("at", [0, 40, 77, 129])
def test_a_poisoned_key_reaches_only_rows_that_see_it(device, dtype, at, poison):
    case = Case([130], heads=(3, 1), dim=20, device=device, dtype=dtype, window_size=(30, 0))
    clean = case.ours()
    case.v[at], case.k[at] = poison, poison
    ours = case.ours()
    blind = [row for row in range(130) if not at <= row <= at + 30]
    for name in ("out", "dq"):
        assert_same(ours[name][blind], clean[name][blind])
    assert_same(ours["lse"][:, blind], clean["lse"][:, blind])
    assert not ours["out"][at].isfinite().any()


@exact
@pytest.mark.parametrize("name", ["q", "dout"])
@pytest.mark.parametrize("at", [0, 40, 77, 129])
def test_a_poisoned_row_reaches_only_keys_that_it_sees(device, dtype, at, name):
    case = Case([130], heads=(3, 1), dim=20, device=device, dtype=dtype, window_size=(30, 0))
    clean = case.ours()
    getattr(case, name)[at] = NAN
    ours = case.ours()
    unseen = [key for key in range(130) if not at - 30 <= key <= at]
    for gradient in ("dk", "dv"):
        assert_same(ours[gradient][unseen], clean[gradient][unseen])
        assert ours[gradient][at].isnan().any()
    assert_same(ours["dq"][unseen], clean["dq"][unseen])


# --- memory ---


def test_memory_grows_with_tokens_not_with_their_square(device):
    """20,000 tokens: the scores of one head would be 1.6 GB."""
    if device == "cpu":
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak starts again from now
        except OSError as error:
            pytest.skip(f"the peak of resident memory cannot be reset here: {error}")
    else:
        torch.cuda.reset_peak_memory_stats()

    def peak():
        if device != "cpu":
            return torch.cuda.max_memory_allocated()
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    case = Case([100] * 200, heads=(2, 1), dim=32, device=device)
    before = peak()
    case.ours()
    inputs = 4 * 20_000 * 32 * 4
    assert peak() - before < 16 * inputs  # leaves, out, gradients and their copies


# --- torch.library ---


def op_samples(device):
    def sample(*args, grad=True, **options):
        case = Case(*args, device=device, dim=8, **options)
        leaves = [t.requires_grad_(grad) for t in (case.q, case.k, case.v)]
        return case, (*leaves, *case.cu_seqlens, None if case.sinks is None else case.sinks.requires_grad_(grad))

    plain, args = sample([3, 0, 2])
    _, sunk = sample([3, 2], [5, 1], sinks=True, tail=1, dtype=torch.float32 if device == "cuda" else torch.float64)
    strided = tuple(t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in args[:3])
    forward = ops.varlen_attention
    with torch.no_grad():
        out, lse = forward(*args, True, 0.3, -1, -1, 0.0, None)
    tensors = [t.detach() for t in args[:3]]
    backward = (*tensors, out, lse, *plain.cu_seqlens)
    options = (True, 0.3, -1, -1, 0.0, None)
    plan = (*plain.cu_seqlens, plain.q.shape[0], plain.k.shape[0], plain.q.shape[1], plain.k.shape[1], 8, True, -1, -1)
    return [
        (ops.attention_plan, plan),
        (forward, (*args, *options[:-1], ops.attention_plan(*plan))),
        (forward, (*args, *options)),
        (forward, (*sunk, False, 0.3, 2, 1, 4.0, None)),
        (forward, (*strided, *args[3:], *options)),
        (ops.varlen_attention_backward, (plain.dout, None, *backward, None, *options)),
        (
            ops.varlen_attention_backward,
            (non_contiguous(plain.dout), plain.dlse, *backward, torch.zeros(2, device=device), *options),
        ),
    ]


@pytest.mark.parametrize("sample", range(7))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    # A plan's entries of equal cost are in any order, so two plans are not compared.
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    utils += [] if op is ops.attention_plan else ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, arguments, test_utils=utils)


@pytest.mark.parametrize("result", ["out", "lse", "both"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False, "window_size": (2, 1)}, {"softcap": 1.5, "sinks": True}, {"window_size": (1, 0)}],
    ids=str,
)
def test_gradcheck(device, options, result):
    skip_float64_on_cuda(device)
    case = Case([3, 0, 5], heads=(4, 2), dim=3, dtype=torch.float64, device=device, **options)
    leaves = [t.requires_grad_() for t in (case.q, case.k, case.v, *([case.sinks] if case.sinks is not None else []))]

    def call(q, k, v, sinks=None):
        results = po.varlen_attention(q, k, v, case.cu_seqlens[0], sinks=sinks, return_lse=True, **case.options)
        return {"out": results[0], "lse": results[1], "both": results}[result]

    assert torch.autograd.gradcheck(call, leaves)


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(q, k, v, sinks, cu_seqlens):
        out, lse = po.varlen_attention(q * 2, k, v, cu_seqlens, window_size=(9, 0), sinks=sinks, return_lse=True)
        return out.square().sum() + lse.sum() + po.attention(q, k, v, cu_seqlens).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        case = Case(lengths, heads=(4, 2), dim=8, sinks=True, device=device)
        given = [case.q, case.k, case.v, case.sinks]
        grads = []
        for call in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in given]
            grads.append(torch.autograd.grad(call(*leaves, case.cu_seqlens[0]), leaves))
        for traced, eager in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)
