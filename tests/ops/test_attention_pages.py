"""varlen_attention(block_table=, seqused_k=): keys in pages have the bits of keys end to end."""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of
from helpers.attention_case import OPEN, Case, assert_close
from helpers.pages_case import Pages, paged_case, shared_pages
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import attention as oracle

ops = torch.ops.packing_ops
EDGES = [0, 1, 63, 127, 128, 129, 255, 256, 257, 300, 385]


def contiguous(case):
    return po.varlen_attention(
        case.q, case.k, case.v, *case.cu_seqlens, return_lse=True, sinks=case.sinks, **case.options
    )


def paged(case, pages, **others):
    options = {**case.options, **others}
    given = {**pages.keywords(), "sinks": case.sinks, "return_lse": True, **options}
    return po.varlen_attention(case.q, pages.k, pages.v, case.cu_seqlens[0], **given)


def assert_same_bits(case, pages, **others):
    for found, expected in zip(paged(case, pages, **others), contiguous(case), strict=True):
        assert_same(found, expected)


def test_worked_values(device):
    k = torch.zeros(3, 128, 1, 2, device=device)
    v = torch.full((3, 128, 1, 2), torch.nan, device=device)
    v[2, :3, 0], v[0, :1, 0] = torch.tensor([1.0, 3.0, 8.0], device=device)[:, None], 5.0
    table, used = torch.tensor([[2, 9], [0, 9]], device=device).int(), torch.tensor([3, 1], device=device).int()
    q, cu_seqlens = torch.zeros(3, 1, 2, device=device), cu_seqlens_of([2, 1], device)
    out, lse = po.varlen_attention(q, k, v, cu_seqlens, block_table=table, seqused_k=used, return_lse=True)
    assert out[:, 0, 0].tolist() == [2.0, 4.0, 5.0]
    torch.testing.assert_close(lse[0].exp().cpu(), torch.tensor([2.0, 3.0, 1.0]))


@given(
    pairs=st.lists(st.tuples(st.sampled_from([0, 1, 7, 128, 130]), st.sampled_from(EDGES)), min_size=1, max_size=4),
    page_size=st.sampled_from([128, 256, 384]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.sampled_from([(8, 8), (64, 64), (24, 16), (8, 264)]),
    window=st.sampled_from([OPEN, (0, 0), (130, 0), (5, 9)]),
    causal=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    tail=st.integers(0, 2),
)
def test_equals_oracle(device, pairs, page_size, heads, dims, window, causal, softcap, sinks, tail):
    window = (window[0], min(window[1], 0)) if causal else window
    dtype = torch.float32 if device == "cuda" else torch.float64
    case, pages = paged_case(
        pairs, page_size, heads=heads, dim=dims[0], dim_v=dims[1], dtype=dtype, device=device, sinks=sinks, tail=tail,
        causal=causal, window_size=window, softcap=softcap,
    )  # fmt: skip
    table = case.q.double(), pages.k.double(), pages.v.double(), case.cu_seqlens[0], *pages.keywords().values()
    exact = dict(zip(("out", "lse"), oracle.paged_attention(*table, sinks=case.sinks, **case.options), strict=True))
    found = dict(zip(("out", "lse"), paged(case, pages), strict=True))
    assert_close(found, exact, 1e-12 if dtype == torch.float64 else 1e-4)
    assert_same_bits(case, pages)


OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (140, 0)},
    "both sides": {"causal": False, "window_size": (60, 130)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "scale": {"softmax_scale": -0.3},
}
PAIRS = [(n, m) for m in EDGES for n in {0, 1, min(m, 9), m, m + 3}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("page_size", [128, 256, 640])
def test_bits_are_those_of_keys_end_to_end(device, dtype, options, page_size):
    assert_same_bits(*paged_case(PAIRS, page_size, heads=(4, 2), dim=64, dtype=dtype, device=device, tail=2, **options))


DIMS = [(64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (5, 1)], ids=str)
def test_every_head_dim(device, dims, heads):
    pairs = [(1, 700), (130, 513), (3, 129), (129, 129), (40, 64), (2, 0)]
    for options in ({}, {"window_size": (200, 0)}, {"softcap": 2.0}):
        given = {"heads": heads, "dim": dims[0], "dim_v": dims[1], "dtype": torch.bfloat16, **options}
        assert_same_bits(*paged_case(pairs, 256, device=device, **given))


@pytest.mark.parametrize("own", [[1, 128, 5, 129], [40]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_documents_share_pages(device, own, dtype):
    for shared in (1, 3):
        case, pages = shared_pages(shared, own, dim=64, dtype=dtype, device=device)
        assert_same_bits(case, pages)


def test_a_document_of_one_page_may_have_any(device):
    pairs = [(3, 100), (1, 77), (100, 100)]
    assert_same_bits(
        *paged_case(pairs, 100, spare_columns=0, heads=(4, 2), dim=64, dtype=torch.bfloat16, device=device)
    )


@pytest.mark.parametrize("layout", ["thd", "bhsd", "bshd"])
def test_layouts_of_q(device, layout):
    case, pages = paged_case([(9, 300), (1, 128)], heads=(4, 2), dim=64, dtype=torch.bfloat16, device=device)
    expected, lse = contiguous(case)
    q = {"thd": case.q, "bhsd": case.q.transpose(0, 1)[None], "bshd": case.q[None]}[layout]
    given = {**pages.keywords(), "layout": layout, "return_lse": True}
    out = po.varlen_attention(q, pages.k, pages.v, case.cu_seqlens[0], **given)
    assert_same(out[0], expected if layout == "thd" else expected[None])
    assert_same(out[1], lse)
    metadata = po.PackedMetadata.from_cu_seqlens(case.cu_seqlens[0], total=10)
    assert_same(po.varlen_attention(q, pages.k, pages.v, metadata, **given)[0], out[0])


def strided(pages, kind):
    """The same pages where a cache may have them: k next to v, heads before rows, a slice of wider rows."""
    if kind == "k beside v":
        return torch.stack([pages.k, pages.v], dim=1).unbind(1)
    if kind == "heads first":
        return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (pages.k, pages.v))
    return tuple(torch.cat([t, t], dim=-1)[..., : t.shape[-1]] for t in (pages.k, pages.v))


@pytest.mark.parametrize("kind", ["k beside v", "heads first", "wide rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_caches(device, kind, dtype):
    case, pages = paged_case([(9, 300), (1, 128), (5, 257)], heads=(4, 2), dim=64, dtype=dtype, device=device)
    pages.k, pages.v = strided(pages, kind)
    table = torch.full((3, 9), -1, dtype=torch.int32, device=device)
    table[:, : pages.block_table.shape[1]] = pages.block_table
    pages.block_table = table[:, :5]  # rows of a wider one
    assert_same_bits(case, pages)


def test_no_documents_no_queries_no_pages(device):
    q, k = torch.zeros(3, 2, 8, device=device), torch.zeros(0, 128, 1, 8, device=device)
    table, used = (torch.zeros(*shape, dtype=torch.int32, device=device) for shape in ((2, 0), (2,)))
    call = {"block_table": table, "seqused_k": used, "return_lse": True}
    out, lse = po.varlen_attention(q, k, k, cu_seqlens_of([2, 1], device), **call)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    none = {"block_table": table[:0], "seqused_k": used[:0]}
    out = po.varlen_attention(q, k, k, cu_seqlens_of([], device), **none)
    assert not out.any()
    assert po.varlen_attention(q[:0], k, k, cu_seqlens_of([0, 0], device), **call)[0].shape == (0, 2, 8)


def test_a_cache_that_grows_has_the_bits_of_one_forward(device):
    """300 steps of two documents, pages taken when they are needed, against all queries at once."""
    lengths, heads, dim, dtype = (300, 170), (4, 2), 64, torch.bfloat16
    case = Case(lengths, heads=heads, dim=dim, dtype=dtype, device=device)
    whole, whole_lse = contiguous(case)
    starts = case.cu_seqlens[0][:-1].long()
    k, v = torch.full((2, 6, 128, heads[1], dim), torch.nan, dtype=dtype, device=device)
    table = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    used = torch.zeros(2, dtype=torch.int32, device=device)
    free = [4, 0, 5, 2, 1]
    cu_seqlens = cu_seqlens_of([1, 1], device)
    for step in range(300):
        # The shorter document has ended: its last token again, without a new key.
        rows = starts + torch.tensor([min(step, length - 1) for length in lengths], device=device)
        for document, length in enumerate(lengths):
            if step >= length:
                continue
            if step % 128 == 0:
                table[document, step // 128] = free.pop()
            page = int(table[document, step // 128])
            k[page, step % 128], v[page, step % 128] = case.k[rows[document]], case.v[rows[document]]
            used[document] += 1
        out, lse = po.varlen_attention(
            case.q[rows], k, v, cu_seqlens, block_table=table, seqused_k=used, return_lse=True
        )
        assert_same(out, whole[rows])
        assert_same(lse, whole_lse[:, rows])


# --- what is refused ---


def wrong(change):
    def call(device):
        case, pages = paged_case([(2, 130), (1, 5)], heads=(4, 2), dim=16, device=device)
        given = {"q": case.q, "k": pages.k, "v": pages.v, "cu_seqlens_q": case.cu_seqlens[0], **pages.keywords()}
        return po.varlen_attention(**change(given))

    return call


WRONG = {
    "page size": (
        lambda a: a | {"k": a["k"][:, :120], "v": a["v"][:, :120]},
        r"k: expected a page_size that is a multiple of 128, got float32 \[5, 120, 2, 16\]",
    ),
    "rows": (lambda a: a | {"k": a["k"][0]}, r"k: expected \[num_pages, page_size, num_kv_heads, head_dim\], got float32 \[128"),
    "v of other pages": (lambda a: a | {"v": a["v"][1:]}, r"v: expected \[num_pages, .*\] with the pages and heads of k"),
    "strides": (
        lambda a: a | {"v": torch.stack([a["v"], a["v"]], 1)[:, 0]},
        "v: expected pages as many rows apart in k as in v, at least page_size, got strides",
    ),
    "table of int64": (lambda a: a | {"block_table": a["block_table"].long()}, "block_table: expected int32, got int64"),
    "table of one dimension": (lambda a: a | {"block_table": a["block_table"][0]}, "block_table: expected 2 dimensions"),
    "table of one document": (
        lambda a: a | {"block_table": a["block_table"][:1]},
        r"block_table: expected \[num_documents, pages\] with the 2 documents of cu_seqlens_q, got int32 \[1, 3\]",
    ),
    "table strided": (
        lambda a: a | {"block_table": a["block_table"].T.contiguous().T},
        "block_table: expected a contiguous last dimension",
    ),
    "lengths of int64": (lambda a: a | {"seqused_k": a["seqused_k"].long()}, "seqused_k: expected int32, got int64"),
    "lengths of one": (lambda a: a | {"seqused_k": a["seqused_k"][:1]}, r"seqused_k: expected \[num_documents\]"),
    "no lengths": (lambda a: a | {"seqused_k": None}, "seqused_k: expected a tensor beside block_table, got None"),
    "no table": (lambda a: a | {"block_table": None}, "block_table: expected a tensor beside seqused_k, got None"),
    "cu_seqlens_k": (
        lambda a: a | {"cu_seqlens_k": a["cu_seqlens_q"]},
        "cu_seqlens_k: expected None beside block_table, got Tensor",
    ),
    "parents": (lambda a: a | {"parents": a["seqused_k"]}, "parents: expected None beside block_table"),
    "visible_end": (lambda a: a | {"visible_end": a["seqused_k"]}, "visible_end: expected None beside block_table"),
    "layout": (lambda a: a | {"q": a["q"][None]}, "layout: expected 'bhsd' or 'bshd' for a q of four dimensions"),
    "heads": (lambda a: a | {"q": a["q"][:, :3]}, "k: expected a number of heads that divides the 3 heads of q"),
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_bad_input_is_named(device, change):
    with pytest.raises(ValueError, match=change[1]):
        wrong(change[0])(device)


def with_value(name, index, value):
    def change(arguments):
        changed = arguments[name].clone()
        changed[index] = value
        return arguments | {name: changed}

    return change


VALUES = {
    "page past the last": (with_value("block_table", (0, 1), 5), r"block_table: expected 0 to 4.*\[0, 1\], got 5"),
    "page below 0": (with_value("block_table", (1, 0), -1), r"block_table: expected 0 to 4.*\[1, 0\], got -1"),
    "page far away": (
        with_value("block_table", (0, 0), 2**31 - 1),
        r"block_table: expected 0 to 4.*\[0, 0\], got 2147483647",
    ),
    "table too short": (with_value("seqused_k", 1, 385), r"seqused_k: expected 0 to 384 keys.* at index 1, got 385"),
    "length below 0": (with_value("seqused_k", 0, -1), r"seqused_k: expected 0 to 384 keys.* at index 0, got -1"),
}


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
def test_wrong_values_are_named(device, change):
    message = change[1] if device == "cpu" else change[1].partition(":")[0] + ": expected .* wrong value at index"
    with pytest.raises(ValueError, match=message):
        wrong(change[0])(device)


def test_a_gradient_is_refused(device):
    case, pages = paged_case([(2, 130)], heads=(4, 2), dim=16, device=device)
    out, lse = po.varlen_attention(case.q.requires_grad_(), pages.k, pages.v, case.cu_seqlens[0], **pages.keywords(), return_lse=True)  # fmt: skip
    for result in (out, lse):
        with pytest.raises(NotImplementedError, match="packing_ops::paged_attention has no gradient"):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not paged(case, pages)[0].requires_grad


# --- torch ---


@pytest.mark.parametrize("sample", ["plan", "forward"])
def test_opcheck(device, sample):
    case, pages = paged_case([(2, 130), (0, 0), (3, 5)], heads=(4, 2), dim=8, device=device)
    options = (None, True, 0.3, 40, -1, 0.0, None)
    op, arguments = {
        "plan": (ops.paged_attention_plan, (case.cu_seqlens[0], pages.seqused_k, 5, 384, 4, 2, 8, True, 40, -1)),
        "forward": (ops.paged_attention, (case.q, pages.k, pages.v, case.cu_seqlens[0], *pages.keywords().values(), *options)),
    }[sample]  # fmt: skip
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(
        op, arguments, test_utils=utils + (["test_aot_dispatch_dynamic"] if sample == "forward" else [])
    )


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(q, k, v, cu_seqlens, table, used):
        return po.varlen_attention(q * 2, k, v, cu_seqlens, block_table=table, seqused_k=used, window_size=(90, 0)) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for pairs in ([(3, 140), (5, 5)], [(2, 2), (1, 400), (4, 128)], [(20, 20), (1, 1), (1, 1), (1, 1)]):
        case, pages = paged_case(pairs, heads=(4, 2), dim=8, device=device)
        given = case.q, pages.k, pages.v, case.cu_seqlens[0], *pages.keywords().values()
        assert_same(compiled(*given), step(*given))


def test_a_plan_serves_every_table(device):
    case, pages = paged_case([(2, 130), (1, 5)], heads=(4, 2), dim=64, dtype=torch.bfloat16, device=device)
    plan = po.attention_plan(
        case.cu_seqlens[0], total_q=3, total_k=384, num_heads=4, num_kv_heads=2, head_dim=64, seqused_k=pages.seqused_k
    )
    assert plan.numel() == 0 or device == "cuda"
    for _ in range(2):
        assert_same_bits(case, pages, plan=plan)
        other = Pages(case)
        pages.k, pages.v, pages.block_table = other.k, other.v, other.block_table
