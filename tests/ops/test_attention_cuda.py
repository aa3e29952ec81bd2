"""What only the CUDA kernels have: tiles, plans, graphs, errors that are found on the GPU."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_error_within, assert_same, captured, cu_seqlens_of, has_every_instance, pytest_of_its_own
from helpers.attention_case import Case, assert_close, document_alone, document_results

import packing_ops as po
from packing_ops._runtime import batch_cache
from packing_ops.keys import plan_for
from packing_ops.reference import attention as oracle
from packing_ops.reference.attention import visible
from packing_ops.varlen.options import AttentionOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 700]
CROSS = ([0, 5, 100, 64, 300, 1, 0, 70, 257], [7, 0, 100, 300, 64, 200, 0, 129, 1000])


def packed(lengths, dim=64, heads=(4, 2), dtype=torch.bfloat16):
    shapes = [(sum(lengths), count, dim) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def out_and_gradients(q, k, v, dout, cu_seqlens, **options):
    out = po.varlen_attention(q, k, v, cu_seqlens, **options)
    return (out, *torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_error_around_tile_edges(dim, heads, causal):
    lengths = [length for length in EDGES if length > 0]
    case = Case(lengths, heads=heads, dim=dim, dtype=torch.bfloat16, device="cuda", causal=causal)
    case.dlse.zero_()
    ours, exact, theirs = case.ours(), case.exact(), case.sdpa()
    for name in ("out", "dq", "dk", "dv"):
        assert_error_within(ours[name], theirs[name], exact[name])


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"softcap": 50.0}, {"softcap": 0.5}, {"softcap": 3e38}, {"softmax_scale": -0.1}, {"softcap": 2.0, "softmax_scale": -0.1}],
    ids=str,
)  # fmt: skip
def test_error_of_transformed_scores(options, dtype, dim):
    """At most twice the error of the oracle's operations in the low precision."""
    case = Case([1, 63, 64, 65, 129, 300, 700], heads=(4, 2), dim=dim, dtype=dtype, device="cuda", **options)
    low = copy.copy(case)
    if options.get("softcap", 0) > 1e30:
        low.options = {}  # a cap that the low precision cannot hold, and that changes nothing
    ours, exact, theirs = case.ours(), case.exact(), low.results_of(oracle.varlen_attention)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_error_within(ours[name], theirs[name], exact[name])


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window_size": (40, 0)}, {"causal": False, "window_size": (10, 20)}, {"softcap": 3.0}],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 2), (8, 2)], ids=str)
def test_lengths_of_q_and_k_differ(options, heads):
    case = Case(*CROSS, heads=heads, dim=128, dtype=torch.float16, device="cuda", tail=3, **options)
    ours, exact = case.ours(), case.exact()
    for name in ("out", "dq", "dk", "dv"):
        assert (ours[name].double() - exact[name].double()).norm() <= 1e-3 * exact[name].double().norm()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str)
def test_documents_keep_their_bits(dims):
    lengths = [129, 0, 64, 1000, 3, 200, 65]
    case = Case(lengths, heads=(4, 1), dim=dims[0], dim_v=dims[1], dtype=torch.bfloat16, device="cuda")
    whole, again = case.ours(), case.ours()
    for name in whole:
        assert_same(again[name], whole[name])
    start = 0
    for length in lengths:
        alone = document_alone(case, start, start + length)
        for name, value in document_results(alone.ours(), 0, length).items():
            assert_same(value, document_results(whole, start, start + length)[name])
        start += length


@pytest.mark.parametrize(
    ("heads", "filling"), [((1, 1), 98_304), ((4, 1), 24_576), ((12, 4), 8064), ((64, 1), 1536)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"window_size": (150, 0), "sinks": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [96, 128])
def test_units_differ_by_the_number_of_tokens_and_bits_do_not(dim, dtype, options, heads, filling):
    """On Hopper a document of a small call has units of two tiles of rows, and next to many tokens of three."""
    lengths, total = [700, 33, 129, 256], 1118
    many = Case([*lengths, filling], [*lengths, 0], heads=heads, dim=dim, dtype=dtype, device="cuda", **options)
    few = document_alone(many, 0, total)
    few.cu_seqlens = tuple(each[:-1] for each in many.cu_seqlens)
    found = document_results(many.ours(), 0, total)
    for name, value in document_results(few.ours(), 0, total).items():
        assert_same(value, found[name])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [163 << 10, 99 << 10])
def test_kernels_for_less_shared_memory(limit):
    """Those that sm_80 and sm_89 take, where this GPU has more."""
    pytest_of_its_own([__file__], "edges or differ or bits", PACKING_OPS_SHARED_MEMORY=str(limit))


@pytest.mark.parametrize("dim", [64, 128, 512])
def test_kernels_that_are_not_in_the_library_are_named(dim):
    if has_every_instance():
        pytest.skip("the library has the kernels of every GPU")
    q = f"torch.randn(8, 1, {dim}, device='cuda', dtype=torch.bfloat16, requires_grad=True)"
    call = f"q = {q}; po.varlen_attention(q, q, q, torch.tensor([0, 8], device='cuda', dtype=torch.int32)).sum().backward()"
    command = [sys.executable, "-c", f"import torch, packing_ops as po; {call}"]
    environment = {**os.environ, "PACKING_OPS_SHARED_MEMORY": str(99 << 10)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0  # -6 too: a thread of torch's backward may outlive Python's end
    assert (
        "PACKING_OPS_SHARED_MEMORY: expected a size of the GPUs that this library was built for ( 227 KB)"
        in done.stderr
    )


def test_a_row_heads_first_shares_the_plan():
    q, k, _, _ = packed([70, 5])
    cu_seqlens = cu_seqlens_of([70, 5], "cuda")
    plans = [
        plan_for(*rows, cu_seqlens, cu_seqlens, AttentionOptions())
        for rows in ((q, k, k), [t[None].transpose(1, 2) for t in (q, k, k)])
    ]
    assert plans[0] is not None
    assert plans[1] is plans[0]


def test_graph_replays_with_other_lengths():
    lengths = [70, 130, 0, 5, 300]
    q, k, v, dout = packed(lengths)
    cu_seqlens = cu_seqlens_of(lengths, "cuda")
    graph, replayed = captured(lambda: out_and_gradients(q, k, v, dout, cu_seqlens))
    for other in (lengths, [1, 4, 500, 0, 0], [505, 0, 0, 0, 0], [101] * 5):
        cu_seqlens.copy_(cu_seqlens_of(other, "cuda"))
        graph.replay()
        for got, wanted in zip(replayed, out_and_gradients(q, k, v, dout, cu_seqlens_of(other, "cuda")), strict=True):
            assert_same(got, wanted)


def test_a_dense_graph_keeps_nothing_of_its_own():
    """Memory of a graph is written again in its replay, so a later call must not get cu_seqlens that are there."""
    given = [torch.randn(3, 41, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = po.flash_attn_func(*given, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    batch_cache._kept_cu_seqlens.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = po.flash_attn_func(*given, causal=True)
    assert batch_cache._kept_cu_seqlens.cache_info().currsize == 0
    graph.replay()
    assert_same(captured, expected)


@pytest.mark.parametrize("values", [[0, 50, 30, 64], [0, 100], [2, 64], [0, -4, 64]], ids=str)
def test_wrong_cu_seqlens_give_zeros_and_an_error(values, monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    q, k, v, dout = packed([64])
    cu_seqlens = torch.tensor(values, dtype=torch.int32, device="cuda")
    plan = po.attention_plan(cu_seqlens, total_q=64, num_heads=4, num_kv_heads=2, head_dim=64)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        po.varlen_attention(q, k, v, cu_seqlens_of([64], "cuda"))
    for result in out_and_gradients(q, k, v, dout, cu_seqlens, plan=plan):
        assert (result == 0).all()


def test_one_plan_for_many_calls():
    lengths = [100, 1, 300]
    q, k, v, dout = packed(lengths)
    cu_seqlens = cu_seqlens_of(lengths, "cuda")
    plan = po.attention_plan(cu_seqlens, total_q=401, num_heads=4, num_kv_heads=2, head_dim=64)
    for got, wanted in zip(
        out_and_gradients(q, k, v, dout, cu_seqlens, plan=plan),
        out_and_gradients(q, k, v, dout, cu_seqlens),
        strict=True,
    ):
        assert_same(got, wanted)
    with pytest.raises(ValueError, match="plan: expected what attention_plan made"):
        po.varlen_attention(q[:64], k[:64], v[:64], cu_seqlens_of([64], "cuda"), plan=plan)


def test_changed_cu_seqlens_get_a_new_plan():
    q, k, v, dout = packed([100, 60])
    cu_seqlens = cu_seqlens_of([100, 60], "cuda")
    out_and_gradients(q, k, v, dout, cu_seqlens)
    cu_seqlens[1] = 30
    for got, wanted in zip(
        out_and_gradients(q, k, v, dout, cu_seqlens),
        out_and_gradients(q, k, v, dout, cu_seqlens_of([30, 130], "cuda")),
        strict=True,
    ):
        assert_same(got, wanted)


def test_unaligned_views():
    case = Case([70, 30], heads=(2, 1), dim=64, dtype=torch.bfloat16, device="cuda")
    wanted = po.varlen_attention(case.q, case.k, case.v, case.cu_seqlens[0])
    shifted = torch.zeros(case.q.numel() + 1, dtype=case.q.dtype, device="cuda")[1:].view(case.q.shape).copy_(case.q)
    assert_same(po.varlen_attention(shifted, case.k, case.v, case.cu_seqlens[0]), wanted)


@pytest.mark.parametrize(
    ("dim", "dtype", "message"),
    [(60, torch.bfloat16, "multiples of 8"), (64, torch.float64, "expected bfloat16, float16 or float32")],
)
def test_what_cuda_does_not_take(dim, dtype, message):
    q, k, v, _ = packed([4], dim=dim, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        po.varlen_attention(q, k, v, cu_seqlens_of([4], "cuda"))


def test_too_many_heads_to_a_kv_head():
    q, k, v, _ = packed([5], dim=8, heads=(1025, 1))
    with pytest.raises(ValueError, match="num_heads: expected at most 1024 to a kv head on CUDA, got 1025"):
        po.varlen_attention(q, k, v, cu_seqlens_of([5], "cuda"))


# --- NaN and Inf in the half types: a hidden weight is 0, and 0 * NaN is NaN ---


def grains_that_meet(seen):
    """bool like ``seen``: less than 192 rows away some row sees some key of the key's tile of 128."""
    tiles = torch.nn.functional.pad(seen, (0, -seen.shape[1] % 128)).unflatten(1, (-1, 128)).any(2)
    near = torch.nn.functional.max_pool1d(tiles.T.float(), 383, stride=1, padding=191).T.bool()
    return near.repeat_interleave(128, 1)[:, : seen.shape[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("lengths", "heads", "options"),
    [
        ((100, 100), (2, 2), {}),
        ((300, 300), (6, 2), {}),
        ((700, 700), (1, 1), {"window_size": (30, 0)}),
        ((700, 700), (4, 1), {"window_size": (30, 0)}),
        ((200, 330), (5, 1), {"causal": False, "window_size": (10, 20)}),
    ],
    ids=str,
)
def test_a_poisoned_key_reaches_only_rows_near_those_that_see_it(dtype, dim, lengths, heads, options):
    (num_q, num_k), start = lengths, 70
    case = Case([start, num_q, 129], [start, num_k, 129], heads=heads, dim=dim, dtype=dtype, device="cuda", **options)
    clean, rows, keys = case.ours(), slice(start, start + num_q), slice(start, start + num_k)
    seen = visible(num_q, num_k, options.get("causal", True), options.get("window_size", (-1, -1)), "cuda")
    reached = grains_that_meet(seen)

    def changed(name, inside):
        """Of the rows of the document; no other row is."""
        found = (ours[name] != clean[name]).flatten(1).any(1)
        assert not found[: inside.start].any()
        assert not found[inside.stop :].any()
        return found[inside]

    for at in (0, 40, 64, num_k - 1):
        kept = case.k[start + at].clone(), case.v[start + at].clone()
        case.k[start + at], case.v[start + at] = float("inf"), float("nan")
        ours = case.ours()
        case.k[start + at], case.v[start + at] = kept
        for name in ("out", "dq"):
            assert not (changed(name, rows) & ~reached[:, at]).any(), name
        assert ours["out"][rows][seen[:, at]].isnan().all()
        assert not ((ours["lse"] != clean["lse"]).any(0)[rows] & ~seen[:, at]).any()
        if options == {}:  # as the page of packing_ops.attention says it
            assert ours["out"][start : start + max(0, at // 128 * 128 - 191)].isfinite().all()
    for at in (0, 40, num_q - 1):
        for tensor in (case.q, case.dout):
            kept = tensor[start + at].clone()
            tensor[start + at] = float("nan")
            ours = case.ours()
            tensor[start + at] = kept
            for name in ("dk", "dv"):
                assert not (changed(name, keys) & ~reached[at]).any(), name


def test_float32_is_not_tf32():
    case = Case([300, 65], heads=(4, 2), dim=64, device="cuda", dtype=torch.float32, sinks=True, softcap=5.0)
    assert_close(case.ours(), case.exact(), 1e-5)


def test_100k_documents():
    q, k, v, dout = packed([1] * 100_000)
    out, _, _, dv = out_and_gradients(q, k, v, dout, cu_seqlens_of([1] * 100_000, "cuda"))
    assert_same(out, v.repeat_interleave(2, dim=1))
    torch.testing.assert_close(dv, dout.view(-1, 2, 2, 64).sum(2), rtol=1e-2, atol=1e-2)


# --- dq's partial sums, which go around in less memory than all of them need ---


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [[40_000], [129] * 300, [700, 130, 9000, 2, 200] * 4, [*range(100, 400, 7)] * 4],
    ids=["one", "many short", "mixed", "ragged"],
)
def test_heads_keep_their_bits_when_sums_go_around(lengths, causal):
    """Those of one head fit."""
    q, k, v, dout = packed(lengths, dim=64, heads=(8, 8))
    cu_seqlens = cu_seqlens_of(lengths, "cuda")
    together = out_and_gradients(q, k, v, dout, cu_seqlens, causal=causal)
    for again, first in zip(out_and_gradients(q, k, v, dout, cu_seqlens, causal=causal), together, strict=True):
        assert_same(again, first)
    for head in range(8):
        rows = (t[:, head : head + 1].detach().requires_grad_() for t in (q, k, v))
        alone = out_and_gradients(*rows, dout[:, head : head + 1], cu_seqlens, causal=causal)
        for found, expected in zip(together, alone, strict=True):
            assert_same(found[:, head : head + 1], expected)


@pytest.mark.parametrize("lengths", [[4096] * 8, [300] * 109, [100] * 327], ids=["4096", "300", "100"])
def test_memory_of_the_backward(lengths):
    """Bytes per element of q next to the gradients."""
    q, k, v, dout = packed(lengths, dim=128, heads=(32, 8))
    out = po.varlen_attention(q, k, v, cu_seqlens_of(lengths, "cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in gradients)
    assert extra <= 4 * q.numel()


@pytest.mark.parametrize("options", [{}, {"window_size": (40, 0), "softcap": 5.0, "sinks": True}], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *((torch.bfloat16, dims) for dims in ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))),
        (torch.float32, (64, 64)),
        (torch.float32, (24, 264)),
    ],
    ids=str,
)
def test_one_pass_for_the_sanitizer(dtype, dims, options):
    """Small enough for tools that slow a kernel down a thousand times; other tests look at the values."""
    sizes = {"heads": (4, 2), "dim": dims[0], "dim_v": dims[1]}
    case = Case([3, 0, 64, 65, 130, 1], **sizes, dtype=dtype, device="cuda", tail=2, **options)
    for name, value in case.ours().items():
        assert not value.isnan().any(), name


@pytest.mark.slow
def test_more_than_2_31_elements():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    length, documents, heads, dim = 300, 2000, 32, 128  # q has 2.46e9 elements
    lengths = [length] * documents
    q, k, v, dout = packed(lengths, dim=dim, heads=(heads, 1))
    assert q.numel() > 2**31
    whole = out_and_gradients(q, k, v, dout, cu_seqlens_of(lengths, "cuda"))
    # The first, the one that element 2**31 of q is in, the last.
    for document in (0, 2**31 // (length * heads * dim), documents - 1):
        rows = slice(document * length, (document + 1) * length)
        leaves = [t.detach()[rows].clone().requires_grad_() for t in (q, k, v)]
        alone = out_and_gradients(*leaves, dout[rows].clone(), cu_seqlens_of([length], "cuda"))
        for part, wanted in zip(whole, alone, strict=True):
            assert_same(part[rows], wanted)
