"""flash_attn_varlen_func(block_table=) and flash_attn_with_kvcache: the bits of keys end to end, caches that are
written.
"""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of
from helpers.attention_case import Case
from helpers.pages_case import Pages, paged_case

import packing_ops as po

KEYS = [300, 7, 128, 0, 129]  # in the cache before the call


def test_flash_attn_varlen_func(device):
    case, pages = paged_case([(9, 300), (1, 40), (0, 128)], heads=(4, 2), dim=64, dtype=torch.bfloat16, device=device)
    options = {"causal": True, "window_size": (200, 0), "softcap": 3.0}
    expected = po.varlen_attention(case.q, case.k, case.v, *case.cu_seqlens, return_lse=True, **options)
    given = case.q, pages.k, pages.v, *case.cu_seqlens, 9, 300
    out, lse, _ = po.flash_attn_varlen_func(*given, block_table=pages.block_table, return_attn_probs=True, **options)
    assert_same(out, expected[0])
    assert_same(lse, expected[1])
    longs = *given[:4], case.cu_seqlens[1].long(), 9, 300
    assert_same(po.flash_attn_varlen_func(*longs, block_table=pages.block_table, **options), out)
    with pytest.raises(ValueError, match="cu_seqlens_k: expected int32 or int64"):
        po.flash_attn_varlen_func(*given[:4], None, 9, 300, block_table=pages.block_table)


def decode_case(new, device, **options):
    """Queries of the last ``new`` keys of each sequence; all keys end to end, those of the cache and the new ones."""
    case = Case([new] * len(KEYS), [keys + new for keys in KEYS], heads=(4, 2), dim=64, device=device, **options)
    ends = case.cu_seqlens[1][1:].tolist()
    rows = torch.cat([torch.arange(end - new, end) for end in ends]).to(device)
    shape = len(KEYS), new
    return case, case.q.unflatten(0, shape), case.k[rows].unflatten(0, shape), case.v[rows].unflatten(0, shape)


def cache_of(case, seqlen, device, tokens=0):
    """Separate rows, NaN where no key is; the last ``tokens`` keys of each sequence are not there yet."""
    starts, lengths = case.cu_seqlens[1].tolist(), case.cu_seqlens[1].diff().tolist()
    caches = []
    for given in (case.k, case.v):
        cache = torch.full((len(lengths), seqlen, *given.shape[1:]), torch.nan, dtype=given.dtype, device=device)
        for i, length in enumerate(lengths):
            cache[i, : length - tokens] = given[starts[i] : starts[i] + length - tokens]
        caches.append(cache)
    return caches


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (100, 0)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.3},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("new", [1, 3, 130])
@pytest.mark.parametrize("seqlen", [512, 435])
def test_a_contiguous_cache(device, new, options, dtype, seqlen):
    case, q, k, v = decode_case(new, device, dtype=dtype, **options)
    expected, lse = po.varlen_attention(
        case.q, case.k, case.v, *case.cu_seqlens, return_lse=True, **{"causal": False, **options}
    )
    lengths = torch.tensor(KEYS, dtype=torch.int32, device=device)
    caches = cache_of(case, seqlen, device, new)
    out, found = po.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, return_softmax_lse=True, **options)
    assert_same(out.flatten(0, 1), expected)
    assert_same(found.transpose(0, 1).flatten(1), lse)
    for cache, whole in zip(caches, cache_of(case, seqlen, device), strict=True):
        assert_same(cache, whole)
    # The keys are there: nothing to write.
    assert_same(po.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths + new, **options), out)


@pytest.mark.parametrize("new", [1, 3, 130])
@pytest.mark.parametrize("page_size", [128, 256])
def test_a_cache_in_pages(device, new, page_size):
    case, q, k, v = decode_case(new, device, dtype=torch.bfloat16)
    expected = po.varlen_attention(case.q, case.k, case.v, *case.cu_seqlens)
    pages = Pages(case, page_size)
    caches = [pages.k.clone(), pages.v.clone()]
    for i, keys in enumerate(KEYS):
        for key in range(keys, keys + new):
            for cache in caches:
                cache[pages.block_table[i, key // page_size], key % page_size] = torch.nan
    lengths = torch.tensor(KEYS, dtype=torch.int32, device=device)
    given = {"cache_seqlens": lengths, "block_table": pages.block_table, "causal": True}
    assert_same(po.flash_attn_with_kvcache(q, *caches, k, v, **given).flatten(0, 1), expected)
    assert_same(caches[0], pages.k)
    assert_same(caches[1], pages.v)


def test_rows_of_a_larger_cache_and_numbers(device):
    k, v = torch.randn(2, 5, 200, 2, 16, device=device)
    q, at = torch.randn(2, 1, 4, 16, device=device), torch.tensor([3, 1], dtype=torch.int32, device=device)
    out = po.flash_attn_with_kvcache(q, k, v, cache_seqlens=150, cache_batch_idx=at)
    rows = [t[at.long(), :150].flatten(0, 1) for t in (k, v)]
    expected = po.varlen_attention(q[:, 0], *rows, cu_seqlens_of([1, 1], device), cu_seqlens_of([150, 150], device))
    assert_same(out[:, 0], expected)
    whole = po.flash_attn_with_kvcache(q, k[:2], v[:2])
    assert_same(whole, po.flash_attn_func(q, k[:2], v[:2]))


def test_sinks_and_head_dim_of_v(device):
    sinks, q = torch.randn(4, device=device), torch.randn(2, 3, 4, 24, device=device)
    k, v = torch.randn(2, 200, 2, 24, device=device), torch.randn(2, 200, 2, 16, device=device)
    out = po.flash_attn_with_kvcache(q, k, v, s_aux=sinks, causal=True)
    assert_same(out, po.flash_attn_func(q, k, v, s_aux=sinks, causal=True))


REFUSED = ["rotary_cos", "rotary_sin", "cache_leftpad", "alibi_slopes"]


def test_what_is_not_supported_is_named():
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 128, 2, 8)
    for name in REFUSED:
        with pytest.raises(NotImplementedError, match=f"{name}: expected None"):
            po.flash_attn_with_kvcache(q, cache, cache, **{name: torch.zeros(1)})
    with pytest.raises(NotImplementedError, match="num_splits: expected 0 or 1"):
        po.flash_attn_with_kvcache(q, cache, cache, num_splits=2)
    out = po.flash_attn_with_kvcache(q.requires_grad_(), cache, cache, num_splits=1)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        out.sum().backward()


Q, CACHE = torch.zeros(2, 1, 2, 8), torch.zeros(2, 256, 1, 8)
NEW, LENGTHS = torch.zeros(2, 1, 1, 8), torch.tensor([3, 4], dtype=torch.int32)
WRONG = {
    "no lengths": ({"k": NEW, "v": NEW}, "cache_seqlens: expected a number or int32 .* beside k"),
    "lengths of int64": (
        {"cache_seqlens": LENGTHS.long()},
        r"cache_seqlens: expected a number or int32 \[batch=2\], got int64",
    ),
    "text": ({"cache_seqlens": "3"}, "cache_seqlens: expected an integer"),
    "no v": ({"k": NEW, "cache_seqlens": LENGTHS}, "v: expected a tensor, got None"),
    "no k": ({"v": NEW, "cache_seqlens": LENGTHS}, "k: expected a tensor, got None"),
    "k of other heads": (
        {"k": NEW.expand(-1, -1, 2, -1), "v": NEW, "cache_seqlens": LENGTHS},
        r"k: expected \[batch=2, seqlen_new=1, num_kv_heads, head_dim\] like its cache",
    ),
    "v of other tokens": (
        {"k": NEW, "v": NEW.expand(-1, 2, -1, -1), "cache_seqlens": LENGTHS},
        r"v: expected \[batch=2, seqlen_new=1, num_kv_heads, head_dim\] like its cache",
    ),
    "half k": ({"k": NEW.half(), "v": NEW, "cache_seqlens": LENGTHS}, "k: expected .* like its cache"),
    "full": ({"k": NEW, "v": NEW, "cache_seqlens": 256}, "seqused_k: expected 0 to 256 keys.*got 257"),
    "too many": ({"cache_seqlens": 257}, "cache_seqlens: expected 0 to the cache's 256 keys, got 257"),
    "both tables": (
        {"cache_batch_idx": LENGTHS, "block_table": LENGTHS[:, None]},
        "cache_batch_idx: expected None beside block_table",
    ),
    "row of no cache": ({"cache_batch_idx": LENGTHS}, "block_table: expected 0 to 1, the pages of k"),
    "other batch": ({"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, "k_cache: expected a batch of 2 like q"),
    "table": ({"block_table": LENGTHS}, r"block_table: expected int32 \[batch=2, pages\]"),
    "v_cache of other rows": ({"v_cache": CACHE[:, :128]}, r"v_cache: expected \[2, 256, 1, 8\] like k_cache"),
    "q of three": ({"q": Q[0]}, "q: expected four dimensions"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_bad_input_is_named(wrong):
    changes, message = wrong
    given = {"q": Q, "k_cache": CACHE.clone(), "v_cache": CACHE.clone(), **changes}
    with pytest.raises((ValueError, TypeError), match=message):
        po.flash_attn_with_kvcache(**given)
    assert not given["k_cache"].any()


def test_compiles_fullgraph(device, fresh_compile):
    def step(q, k_cache, v_cache, k, v, lengths):
        return po.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for new in (1, 3):
        case, q, k, v = decode_case(new, device)
        lengths = torch.tensor(KEYS, dtype=torch.int32, device=device)
        expected = step(q, *cache_of(case, 512, device, new), k, v, lengths)
        caches = cache_of(case, 512, device, new)
        assert_same(compiled(q, *caches, k, v, lengths), expected)
        assert_same(caches[0], cache_of(case, 512, device)[0])


@pytest.mark.parametrize("wrong", [{"cache_seqlens": 128}, {"page": 9}])
def test_a_row_without_a_place_erases_no_other(wrong):
    """Of sequence 0 page 0, row 0, which rows that are left out must not touch."""
    cache = torch.zeros(2, 3, 128, 1, 8)
    new, q = torch.ones(2, 1, 1, 8), torch.randn(2, 1, 2, 8)
    table = torch.tensor([[0], [wrong.get("page", 1)]], dtype=torch.int32)
    lengths = torch.tensor([0, wrong.get("cache_seqlens", 0)], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seqused_k|block_table"):
        po.flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=lengths, block_table=table, causal=True)
    assert (cache[:, 0, 0] == 1).all()
    assert cache.sum() == 2 * 8


@pytest.mark.parametrize("lengths", [-2, 2**40, [0, -1]])
def test_lengths_below_0_and_beyond_the_cache_are_named(lengths):
    cache, new, q = torch.zeros(2, 3, 128, 1, 8), torch.ones(2, 2, 1, 8), torch.randn(2, 2, 2, 8)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    given = torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths
    with pytest.raises(ValueError, match=r"^cache_seqlens: expected"):
        po.flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=given, block_table=table)
    assert not cache.any()


def test_new_keys_that_need_a_gradient_are_refused():
    cache, q = torch.zeros(2, 1, 128, 1, 8), torch.randn(1, 1, 2, 8)
    new = torch.ones(1, 1, 1, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^k: expected a tensor without requires_grad"):
        po.flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=0)
    with torch.no_grad():
        po.flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=0)


@pytest.mark.parametrize("ends", [[0, 2**32 + 130, 2**32 + 137], [5, 135, 142]])
def test_cumulated_lengths_beside_a_table_are_checked(ends):
    k, table = torch.randn(4, 128, 1, 8), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    cu_seqlens_q = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_k: expected to start at 0|seqused_k: expected"):
        po.flash_attn_varlen_func(torch.randn(2, 2, 8), k, k, cu_seqlens_q, torch.tensor(ends), 1, 1, block_table=table)
