"""varlen_attention(visible_end=): who sees how far ahead, as a value of each query; and what makes such values."""

import dataclasses
import itertools

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, non_contiguous
from helpers.attention_case import OPEN, Case, assert_close, document_alone, document_results, drawn_ends
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import packing_ops as po
from packing_ops.contrib import unsloth
from packing_ops.reference import attention as oracle

ops = torch.ops.packing_ops
LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129]


def ends_case(lengths, lengths_k=None, *, share=0.3, tail=0, device="cpu", **options):
    ends = drawn_ends(lengths, lengths_k, share=share, tail=tail, device=device)
    return Case(lengths, lengths_k, tail=tail, device=device, visible_end=ends, **options)


def with_ends(case, ends, **options):
    """The same case with other options."""
    other = Case.__new__(Case)
    other.__dict__ = {**case.__dict__, "options": {**options} if ends is None else {**options, "visible_end": ends}}
    return other


def causal_ends(case):
    (q, k), total = (cu.tolist() for cu in case.cu_seqlens), case.q.shape[0]
    spans = zip(itertools.pairwise(q), itertools.pairwise(k), strict=True)
    own = [torch.arange(b - a) + (d - c) - (b - a) + 1 for (a, b), (c, d) in spans]
    return torch.cat([*own, torch.zeros(total - q[-1], dtype=torch.int64)]).int().to(case.q.device)


# --- values ---


def test_worked_values(device):
    q = k = torch.zeros(4, 1, 2, device=device)
    v = torch.tensor([1.0, 3.0, 8.0, 5.0], device=device)[:, None, None].repeat(1, 1, 2)
    cu_seqlens, ends = cu_seqlens_of([3, 1], device), torch.tensor([2, 2, 3, 1], dtype=torch.int32, device=device)
    out, lse = po.varlen_attention(q, k, v, cu_seqlens, visible_end=ends, return_lse=True)
    assert out[:, 0, 0].tolist() == [2.0, 2.0, 4.0, 5.0]
    torch.testing.assert_close(lse[0].exp().cpu(), torch.tensor([2.0, 2.0, 3.0, 1.0]))
    windowed = po.varlen_attention(q, k, v, cu_seqlens, visible_end=ends, window_size=(0, -1))
    assert windowed[:, 0, 0].tolist() == [2.0, 3.0, 8.0, 5.0]  # the left side still cuts


@given(
    pairs=st.lists(st.tuples(*[st.sampled_from(LENGTHS)] * 2), min_size=1, max_size=4),
    cross=st.booleans(),
    share=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (7, 1)]),
    dims=st.sampled_from([(8, 8), (40, 40), (64, 64), (24, 16), (8, 264)]),
    left=st.sampled_from([-1, -1, 0, 5, 70]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    sinks=st.booleans(),
    tail=st.integers(0, 3),
)
def test_equals_oracle(device, pairs, cross, share, heads, dims, left, softcap, sinks, tail):
    lengths = [pair[0] for pair in pairs]
    dtype = torch.float32 if device == "cuda" else torch.float64
    case = ends_case(
        lengths, [pair[1] for pair in pairs] if cross else None, share=share, tail=tail, device=device, heads=heads,
        dim=dims[0], dim_v=dims[1], dtype=dtype, sinks=sinks, softcap=softcap, window_size=(left, -1),
    )  # fmt: skip
    assert_close(case.ours(), case.exact(), 1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("dims", [*((dim, dim) for dim in (64, 96, 128, 192, 256, 512)), (192, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_torch(device, dtype, dims):
    case = ends_case([300, 200, 65], share=0.02, heads=(4, 2), dim=dims[0], dim_v=dims[1], dtype=dtype, device=device)
    case.dlse.zero_()
    ours, exact, theirs = case.ours(), case.exact(), case.sdpa()
    for name in ("out", "dq", "dk", "dv"):
        # Either may be rounded to the other side of the exact value, which of a few largest elements decides the error.
        step = torch.finfo(dtype).eps * exact[name].abs().max().item() / 2
        assert_error_within(ours[name], theirs[name], exact[name], floor=step)


BITS = {"plain": {}, "features": {"softcap": 3.0, "sinks": True}, "window": {"window_size": (40, -1)}}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", BITS.values(), ids=BITS)
@pytest.mark.parametrize("lengths_k", [None, [0, 30, 129, 200, 64]], ids=["own keys", "other keys"])
def test_causal_ends_have_the_bits_of_causal(device, options, lengths_k, dtype):
    case = Case([5, 17, 129, 64, 130], lengths_k, heads=(4, 2), dim=64, dtype=dtype, device=device, tail=2, **options)
    found = with_ends(case, causal_ends(case), **case.options).ours()
    for name, value in case.ours().items():
        assert_same(found[name], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths_k", [None, [0, 30, 129, 200, 64]], ids=["own keys", "other keys"])
def test_whole_ends_have_the_bits_of_full_attention(device, lengths_k, dtype):
    case = Case([5, 17, 129, 64, 130], lengths_k, heads=(4, 2), dim=64, dtype=dtype, device=device, causal=False)
    lengths = [cu.diff() for cu in case.cu_seqlens]
    found = with_ends(case, lengths[1].repeat_interleave(lengths[0].long()).int()).ours()
    for name, value in case.ours().items():
        assert_same(found[name], value)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)], ids=str)
@pytest.mark.parametrize("window", [OPEN, (50, -1)])
def test_documents_keep_their_bits(device, dtype, dim, window):
    lengths, keys = [3, 0, 129, 64, 300, 1], [5, 2, 129, 30, 300, 0]
    case = ends_case(lengths, keys, share=0.02, heads=(6, 2), dim=dim, dtype=dtype, device=device, window_size=window)
    whole = case.ours()
    for (a, b), (c, d) in zip(*(itertools.pairwise(cu.tolist()) for cu in case.cu_seqlens), strict=True):
        alone = document_results(document_alone(case, a, b, (c, d)).ours(), 0, b - a, (0, d - c))
        for name, value in document_results(whole, a, b, (c, d)).items():
            assert_same(value, alone[name])


# Documents of several tiles of 128 keys: on Hopper these are the kernels of wgmma. Groups of 3 leave a row of each
# tile.
LONG = [700, 1, 513, 129]
SHAPES = [((4, 1), 64), ((4, 1), 128), ((3, 1), 128), ((5, 1), 72)]


@pytest.mark.parametrize("window", [OPEN, (200, -1)], ids=str)
@pytest.mark.parametrize(("heads", "dim"), SHAPES, ids=str)
def test_images_across_tiles(device, heads, dim, window):
    case = Case(LONG, heads=heads, dim=dim, dtype=torch.bfloat16, device=device, window_size=window)
    case.dlse.zero_()
    positions = po.position_ids_from_cu_seqlens(case.cu_seqlens[0], case.q.shape[0])
    ends = po.visible_end_from_blocks((positions + 60) // 256 % 2, case.cu_seqlens[0])
    case = with_ends(case, ends, **case.options)
    ours, again, exact, theirs = case.ours(), case.ours(), case.exact(), case.sdpa()
    for name in ("out", "dq", "dk", "dv"):
        assert_same(again[name], ours[name])
        assert_error_within(ours[name], theirs[name], exact[name])


@pytest.mark.parametrize("lengths_k", [None, [650, 3, 900, 140]], ids=["own keys", "other keys"])
@pytest.mark.parametrize(("heads", "dim"), SHAPES, ids=str)
def test_long_documents_have_the_bits_of_causal(device, heads, dim, lengths_k):
    case = Case(LONG, lengths_k, heads=heads, dim=dim, dtype=torch.bfloat16, device=device, tail=2)
    found = with_ends(case, causal_ends(case), **case.options).ours()
    for name, value in case.ours().items():
        assert_same(found[name], value)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_kernels_are_those_of_causal_attention(device, dim):
    if device == "cpu":
        pytest.skip("the CPU has one folder of kernels")
    q, k = torch.zeros(2, 200, 4, dim, dtype=torch.bfloat16, device=device)
    ends = torch.arange(1, 201, dtype=torch.int32, device=device)
    told = [po.select_attention_backend(q, k, visible_end=e, explain=True)[1]["kernels"] for e in (None, ends)]
    assert told[0] == told[1]


def test_nothing_before_the_end_leaks(device):
    """Keys from a row's end on, and rows that do not see a key, hold NaN."""
    ends = torch.tensor([2, 2, 3, 6, 6, 6], dtype=torch.int32, device=device)
    case = with_ends(Case([6], heads=(2, 1), dim=16, device=device), ends)
    wanted = case.ours()
    case.k[3:], case.v[3:] = float("nan"), float("nan")
    found = po.varlen_attention(case.q, case.k, case.v, case.cu_seqlens[0], visible_end=ends)
    assert_same(found[:3], wanted["out"][:3])
    assert found[3:].isnan().all()


# --- where it is from, where it goes ---


def test_strided_and_from_metadata(device):
    case = ends_case([9, 0, 20], heads=(2, 1), dim=8, device=device)
    ends = case.options["visible_end"]
    metadata = dataclasses.replace(po.PackedMetadata.from_cu_seqlens(case.cu_seqlens[0]), visible_end=ends)
    rows = case.q, case.k, case.v
    wanted = po.varlen_attention(*rows, case.cu_seqlens[0], visible_end=ends)
    assert_same(po.varlen_attention(*rows, case.cu_seqlens[0], visible_end=non_contiguous(ends)), wanted)
    assert_same(po.varlen_attention(*rows, metadata), wanted)
    assert_same(po.attention(*rows, metadata), wanted)
    plan = metadata.attention_plan(num_heads=2, num_kv_heads=1, head_dim=8)
    assert_same(po.varlen_attention(*rows, metadata, plan=plan), wanted)
    other = torch.full_like(ends, 1).cumsum(0).int()
    other[9:] -= 9
    assert_same(po.varlen_attention(*rows, metadata, visible_end=other), po.varlen_attention(*rows, case.cu_seqlens[0]))
    for call in (po.varlen_attention, po.attention):
        assert_same(call(*rows, metadata, metadata), wanted)  # the same documents, named twice
    assert_same(po.flash_attn_varlen_func(*rows, metadata, metadata, 20, 20, causal=True), wanted)
    with pytest.raises(NotImplementedError, match="sdpa has no visible_end"):
        po.attention(*rows, metadata, backend="sdpa")


@pytest.mark.parametrize("host", ["transformers", "megatron", "unsloth"])
def test_hosts_that_do_not_take_it_say_so(host):
    metadata = dataclasses.replace(po.PackedMetadata.from_lengths([2]), visible_end=torch.tensor([2, 2]).int())
    with pytest.raises(ValueError, match=r"visible_end: expected None .* got int32 \[2\]"):
        getattr(metadata, f"to_{host}")()
    getattr(dataclasses.replace(metadata, visible_end=None), f"to_{host}")()


@pytest.mark.parametrize("make", [po.block_causal_mask, unsloth.sdpa_mask, unsloth.xformers_mask])
def test_causal_masks_are_not_made_of_it(make):
    metadata = dataclasses.replace(po.PackedMetadata.from_lengths([2]), visible_end=torch.tensor([2, 2]).int())
    with pytest.raises(ValueError, match=r"visible_end: expected None .* got int32 \[2\]"):
        make(metadata)
    make(dataclasses.replace(metadata, visible_end=None))


def test_changed_values_are_seen(device):
    case = Case([40, 9], heads=(2, 1), dim=16, device=device)
    ends = causal_ends(case)
    with_ends(case, ends).ours()
    ends[:40] = 40
    found, wanted = with_ends(case, ends).ours(), with_ends(case, ends.clone()).ours()
    for name, value in wanted.items():
        assert_same(found[name], value)


def test_flops_count_the_visible_pairs(device):
    case = ends_case([9, 0, 20], [12, 3, 9], heads=(4, 2), dim=8, dim_v=24, device=device, window_size=(3, -1))
    ends = case.options["visible_end"]
    spans = zip(*(itertools.pairwise(cu.tolist()) for cu in case.cu_seqlens), strict=True)
    pairs = sum(int(oracle.visible(b - a, d - c, True, (3, -1), device, visible_end=ends[a:b]).sum())
                for (a, b), (c, d) in spans)  # fmt: skip
    po.register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        case.ours()
    assert counter.get_total_flops() == 2 * 4 * pairs * (8 + 24 + 3 * 8 + 2 * 24)


# --- errors ---

WRONG = {
    "float": (lambda e: e.float(), {}, "visible_end: expected int32, got float32"),
    "short": (lambda e: e[1:], {}, r"visible_end: expected \[total_q\] = \[11\], got int32 \[10\]"),
    "rank": (lambda e: e[None], {}, r"visible_end: expected \[total_q\] = \[11\], got int32 \[1, 11\]"),
    "full": (lambda e: e, {"causal": False}, "visible_end: expected causal=True, .* got causal=False"),
    "right": (lambda e: e, {"window_size": (3, 0)}, r"window_size: expected -1 to the right .* got \(3, 0\)"),
}
WRONG_VALUES = {
    "own": ([1, 2, 3, 4, 5, 1, 2, 3, 3, 5, 6], "at least .*(at index 8|index 8)"),
    "past": ([1, 2, 3, 4, 6, 1, 2, 3, 4, 5, 6], "at most .*index 4"),
    "decreasing": ([1, 5, 3, 4, 5, 1, 2, 3, 4, 5, 6], "never to decrease .*index 2"),
    "negative": ([-1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6], "at least .*index 0"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_contradicts_is_refused(device, kind):
    change, options, message = WRONG[kind]
    case = Case([5, 6], heads=(2, 1), dim=8, device=device)
    with pytest.raises(ValueError, match=message):
        po.varlen_attention(
            case.q, case.k, case.v, case.cu_seqlens[0], visible_end=change(causal_ends(case)), **options
        )
    if kind in ("float", "full", "right"):
        sizes = {"total_q": 11, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
        with pytest.raises(ValueError, match=message):
            po.attention_plan(case.cu_seqlens[0], visible_end=change(causal_ends(case)), **sizes, **options)


@pytest.mark.parametrize("kind", WRONG_VALUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_values_are_refused(device, kind, dtype, monkeypatch):
    values, message = WRONG_VALUES[kind]
    monkeypatch.setenv("PACKING_OPS_CHECK", "1")  # on CUDA in this call
    case = Case([5, 6], heads=(2, 1), dim=8, device=device, dtype=dtype, tail=1)
    ends = torch.tensor([*values, -3], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="visible_end: expected " + message):
        po.varlen_attention(case.q, case.k, case.v, case.cu_seqlens[0], visible_end=ends)


def test_wrong_values_give_zeros_and_an_error_later(device, monkeypatch):
    if device == "cpu":
        pytest.skip("the CPU raises at once")
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    for dtype in DTYPES:
        case = Case([5, 6], heads=(2, 1), dim=8, device=device, dtype=dtype)
        ends = torch.full((11,), 99, dtype=torch.int32, device=device)
        torch.cuda._sleep(100_000_000)  # else the call may see what the kernel of its plan has found
        out = po.varlen_attention(case.q, case.k, case.v, case.cu_seqlens[0], visible_end=ends)
        torch.cuda.synchronize()
        assert (out == 0).all()
        with pytest.raises(ValueError, match="visible_end: expected at most the document's keys"):
            po.varlen_attention(case.q, case.k, case.v, case.cu_seqlens[0])


def test_a_plan_of_other_ends(device, monkeypatch):
    """The plan's values count, and the next call says that they are others."""
    if device == "cpu":
        pytest.skip("the CPU needs no plan")
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    case = Case([5, 6], heads=(2, 1), dim=8, device=device, dtype=torch.bfloat16)
    ends, rows = causal_ends(case), (case.q, case.k, case.v)
    sizes = {"total_q": 11, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    plan = po.attention_plan(case.cu_seqlens[0], visible_end=ends, **sizes)
    other = drawn_ends([5, 6], share=1.0, device=device)
    out = po.varlen_attention(*rows, case.cu_seqlens[0], visible_end=other, plan=plan)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="plan: expected one made for this visible_end"):
        po.varlen_attention(*rows, case.cu_seqlens[0])
    assert_same(out, po.varlen_attention(*rows, case.cu_seqlens[0], visible_end=ends))
    with pytest.raises(ValueError, match="plan: expected"):  # of another size
        po.varlen_attention(*rows, case.cu_seqlens[0], plan=plan)


# --- torch.library ---


@pytest.mark.parametrize("sample", ["plan", "forward", "backward"])
def test_opcheck(device, sample):
    case = ends_case([3, 0, 2], [3, 1, 4], dim=8, device=device)
    leaves = [t.requires_grad_() for t in (case.q, case.k, case.v)]
    ends, options = case.options["visible_end"], (None, True, 0.3, 2, -1, 0.0, None)
    args = (*leaves, *case.cu_seqlens, *options, ends)
    with torch.no_grad():
        results = ops.varlen_attention(*args)
    rows = [t.detach() for t in leaves]
    op, given = {
        "plan": (ops.attention_plan, (*case.cu_seqlens, 5, 8, 2, 1, 8, True, 2, -1, None, ends)),
        "forward": (ops.varlen_attention, args),
        "backward": (
            ops.varlen_attention_backward,
            (case.dout, case.dlse, *rows, *results, *case.cu_seqlens, *options, ends),
        ),
    }[sample]
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(op, given, test_utils=utils + (["test_aot_dispatch_dynamic"] if sample != "plan" else []))


@pytest.mark.parametrize("options", [{}, {"window_size": (1, -1)}, {"softcap": 1.5, "sinks": True}], ids=str)
def test_gradcheck(device, options):
    if device == "cuda":
        pytest.skip("float64 has CPU kernels only")
    case = ends_case([3, 0, 5], [4, 2, 5], heads=(4, 2), dim=3, dtype=torch.float64, **options)
    leaves = [t.requires_grad_() for t in (case.q, case.k, case.v, *([case.sinks] if case.sinks is not None else []))]

    def call(q, k, v, sinks=None):
        return po.varlen_attention(q, k, v, *case.cu_seqlens, sinks=sinks, return_lse=True, **case.options)

    assert torch.autograd.gradcheck(call, leaves)


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(q, k, v, cu_seqlens, blocks, prefixes):
        ends = po.visible_end_from_blocks(blocks, cu_seqlens)
        ends = torch.maximum(ends, po.visible_end_from_prefix_lengths(prefixes, cu_seqlens, q.shape[0]))
        ends = torch.maximum(ends, po.visible_end_from_causal(prefixes != 2, cu_seqlens, q.shape[0]))
        return po.varlen_attention(q * 2, k, v, cu_seqlens, visible_end=ends, window_size=(9, -1)).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        case = Case(lengths, heads=(4, 2), dim=8, device=device)
        blocks = (torch.rand(sum(lengths), device=device) < 0.5).long()
        prefixes = torch.arange(len(lengths), device=device)
        grads = []
        for call in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
            grads.append(torch.autograd.grad(call(*leaves, case.cu_seqlens[0], blocks, prefixes), leaves))
        for traced, eager in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)


# --- what makes it ---


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    tail=st.integers(0, 3),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.bool]),
    as_metadata=st.booleans(),
)
def test_makers_equal_their_references(device, lengths, tail, seed, dtype, as_metadata):
    torch.manual_seed(seed)
    cu_seqlens, end = cu_seqlens_of(lengths, device), sum(lengths)
    total, count = end + tail, len(lengths)
    documents = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=total) if as_metadata else cu_seqlens
    blocks = torch.randint(0, 3, (total,), device=device).to(dtype)
    prefixes = torch.randint(-1, 12, (count,), device=device)
    causal = torch.rand(count, device=device) < 0.5
    found = {
        "blocks": po.visible_end_from_blocks(blocks, documents),
        "prefix": po.visible_end_from_prefix_lengths(prefixes, documents, total),
        "causal": po.visible_end_from_causal(causal, documents, total),
    }
    wanted = {
        "blocks": oracle.visible_end_from_blocks(blocks, cu_seqlens),
        "prefix": oracle.visible_end_from_prefix_lengths(prefixes, cu_seqlens, total),
        "causal": oracle.visible_end_from_causal(causal, cu_seqlens, total),
    }
    for name, ends in found.items():
        assert ends.dtype == torch.int32
        assert ends.shape == (total,)
        assert_same(ends[:end], wanted[name][:end])
    rows = torch.zeros(total, 1, 4, device=device)
    for ends in (*found.values(), torch.maximum(found["blocks"], found["prefix"])):
        po.varlen_attention(rows, rows, rows, cu_seqlens, visible_end=ends)  # values that it takes


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda cu: po.visible_end_from_blocks(torch.zeros(3), cu), ValueError, "block_ids: expected integer or bool"),
        (lambda cu: po.visible_end_from_blocks(torch.zeros(2, 3, dtype=torch.int64), cu), ValueError, "block_ids: expected"),
        (lambda cu: po.visible_end_from_prefix_lengths(torch.zeros(3).long(), cu, 3), ValueError, r"\[num_documents=2\]"),
        (lambda cu: po.visible_end_from_prefix_lengths(torch.zeros(2), cu, 3), ValueError, "prefix_lengths: expected int32"),
        (lambda cu: po.visible_end_from_prefix_lengths(torch.zeros(2).long(), cu), TypeError, "total: expected"),
        (lambda cu: po.visible_end_from_causal([True, False], cu, 3), TypeError, "causal: expected a tensor"),
        (lambda cu: po.visible_end_from_causal(torch.ones(5).bool(), cu, 3), ValueError, "causal: expected bool"),
    ],
)  # fmt: skip
def test_makers_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.tensor([0, 2, 3], dtype=torch.int32))
