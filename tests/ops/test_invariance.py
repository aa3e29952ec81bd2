"""The mode packing_ops.invariant(): log-probabilities, losses and gradients of inputs keep their bits in any pack."""

import os

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, rows_of_products
from hypothesis import given, settings
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data.losses import sequence_logps
from packing_ops.invariance import mode as _invariant

LOW = [torch.float32, torch.bfloat16, torch.float16]
VOCAB, SIZE = 9001, 24
packs = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=4)
chunks = st.sampled_from([None, 1, 77, 4096, 5000, 8192, 100_000])


def documents(lengths, dtype, device="cpu"):
    """(hidden, labels) of each; the same length twice has other numbers."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        (
            torch.randn(n, SIZE, generator=generator).to(device, dtype),
            torch.randint(VOCAB, (n,), generator=generator).to(device),
        )
        for n in lengths
    ]


def head(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(VOCAB, SIZE, generator=generator), torch.randn(VOCAB, generator=generator)
    return weight.to(device, dtype), bias.to(device, dtype)


def in_one_row(items, weight, bias, **options):
    """logps, entropy and the gradient of hidden, by document."""
    hidden = torch.cat([h for h, _ in items]).requires_grad_()
    labels = torch.cat([labels for _, labels in items])
    lengths = [len(labels) for _, labels in items]
    cu_seqlens = cu_seqlens_of(lengths, hidden.device)
    logps, entropy = po.token_logps(hidden, weight, labels, cu_seqlens, bias=bias, entropy=True, **options)
    scale = torch.cat([torch.arange(n, device=hidden.device) - 3.0 for n in lengths])
    (logps * scale + entropy * (2 - scale)).sum().backward()
    return list(zip(*(t.detach().split(lengths) for t in (logps, entropy, hidden.grad)), strict=True))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@given(packs=packs, chunk=chunks, other=chunks, tail=st.integers(0, 3))
@settings(max_examples=15)
def test_log_probabilities_of_any_pack_and_chunk(device, dtype, packs, chunk, other, tail):
    weight, bias = head(dtype, device)
    items = documents([n for pack in packs for n in pack], dtype, device)
    with po.invariant():
        whole = in_one_row(items, weight, bias, chunk=chunk)
        start = 0
        for pack in packs:
            rows = in_one_row(items[start : start + len(pack)][::-1], weight, bias, chunk=other)[::-1]
            for ours, wanted in zip(rows, whole[start:], strict=False):
                for a, b in zip(ours, wanted, strict=True):
                    assert_same(a, b)
            start += len(pack)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [809, 9001])
def test_few_rows_of_a_vocabulary_that_is_no_multiple_of_8(device, dtype, vocab):
    """cuBLASLt has other kernels for 1 to 16 rows of it."""
    hidden = torch.randn(128, 256, device=device, dtype=dtype)
    weight = torch.randn(vocab, 256, device=device, dtype=dtype)
    labels = torch.randint(vocab, (128,), device=device)

    def found(rows):
        h = hidden[:rows].clone().requires_grad_()
        cu_seqlens = cu_seqlens_of([rows], device)
        logps = po.token_logps(h, weight, labels[:rows], cu_seqlens)
        kl = po.token_kl(h, weight, hidden[:rows] * 2, weight, labels[:rows], cu_seqlens)
        (logps - kl)[: rows - 1].sum().backward()
        return torch.stack([logps, kl]).detach()[:, : rows - 1], h.grad[: rows - 1]

    with po.invariant():
        whole, gradient = found(128)
        for rows in (2, 3, 9, 13, 16, 17, 100):
            values, grad = found(rows)
            assert_same(values, whole[:, : rows - 1])
            assert_same(grad, gradient[: rows - 1])


def test_without_the_mode_they_differ():
    """What the test above would say if the mode did nothing."""
    weight, bias = head(torch.float32)
    items = documents([3, 40, 7, 5], torch.float32)
    whole = in_one_row(items, weight, bias, chunk=None)
    alone = [in_one_row([item], weight, bias, chunk=4000)[0] for item in items]
    assert any(
        not torch.equal(a, b) for one, other in zip(alone, whole, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_gradients_are_not_needed_for_the_same_bits(device):
    weight, bias = head(torch.float32, device)
    ((hidden, labels),) = documents([7], torch.float32, device)
    cu_seqlens = cu_seqlens_of([7], device)
    with po.invariant():
        with_graph = po.token_logps(hidden.clone().requires_grad_(), weight, labels, cu_seqlens, bias=bias)
        with torch.no_grad():
            assert_same(po.token_logps(hidden, weight, labels, cu_seqlens, bias=bias), with_graph.detach())
        with torch.inference_mode():
            assert_same(po.token_logps(hidden, weight, labels, cu_seqlens, bias=bias).clone(), with_graph.detach())


@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_losses_by_token_and_by_document(device, lengths):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # float32 layers are not claimed there
    # A product of the caller's: no columns are padded.
    weight = head(dtype, device)[0][: VOCAB // 8 * 8]
    items = [(h, labels % len(weight)) for h, labels in documents(lengths, dtype, device)]
    hidden, labels = (torch.cat(parts) for parts in zip(*items, strict=True))
    cu_seqlens = cu_seqlens_of(lengths, device)
    with po.invariant():
        losses = po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, reduction="none")
        of_documents = po.segment_sum(losses, cu_seqlens)
        logits = torch.nn.functional.linear(hidden, weight)
        of_sequences = sequence_logps(logits, labels, cu_seqlens)
        for i, (h, tokens) in enumerate(items):
            one = cu_seqlens_of([len(tokens)], device)
            alone = po.chunked_cross_entropy(h, weight, tokens, one, reduction="none")
            assert_same(alone, losses[cu_seqlens[i] : cu_seqlens[i + 1]])
            assert_same(po.segment_sum(alone, one)[0], of_documents[i])
            assert_same(sequence_logps(torch.nn.functional.linear(h, weight), tokens, one)[0], of_sequences[i])


def test_chunks_are_whole_grains():
    from packing_ops.losses.chunks import chunk_of

    def chunk(asked, vocab=151_936):
        return chunk_of(asked, 1_000_000, torch.empty(0, 1), vocab)

    assert chunk(5000) == 5000
    with po.invariant():
        assert [chunk(n) for n in (1, 5000, 10_000, 200_000)] == [4096, 4096, 8192, 151_936]
        assert chunk(None) == 4096
        assert chunk(None, 100) == 104  # rows of whole 16 bytes


@pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)
def test_values_in_the_mode_are_those_without(device, dtype):
    weight, bias = head(dtype, device)
    items = documents([5, 1, 17], dtype, device)
    without = in_one_row(items, weight, bias)
    with po.invariant():
        within = in_one_row(items, weight, bias, chunk=4096)
    for ours, wanted in zip(within, without, strict=True):
        for a, b in zip(ours, wanted, strict=True):
            torch.testing.assert_close(a, b, **({"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}))


def losses(name, hidden, labels):
    """A function of the library, of rows whose every token has a target, and its gradient of only hidden."""
    weight, bias = head(hidden.dtype)
    cu_seqlens = cu_seqlens_of([len(labels)])
    if name == "token_logps":
        return po.token_logps(hidden, weight, labels, cu_seqlens, bias=bias, keep_logits=len(labels) * 20_000)
    if name == "token_kl":
        keep = len(labels) * 20_000
        return po.token_kl(hidden, weight, hidden.detach() * 2, weight, labels, cu_seqlens, bias=bias, keep_logits=keep)
    return po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, bias=bias)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ["token_logps", "token_kl", "chunked_cross_entropy"])
@pytest.mark.parametrize("rows", [2, 16, 33, 200])
def test_every_product_of_the_library_has_16_rows(name, rows, dtype):
    """Which numbers of rows have other bits depends on the CPU and on the threads; of one number there is no other."""
    ((hidden, labels),) = documents([rows], dtype)
    hidden.requires_grad_()
    with po.invariant():
        found = rows_of_products(lambda: losses(name, hidden, labels).sum().backward())
    assert len(found) >= 4  # the logits, unless they are kept again in backward, and of three grains the gradient
    assert set(found) == {_invariant.ROWS}


# --- sums over a row ---

SUM_DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@given(
    size=st.integers(1, 5000),
    spread=st.sampled_from([0, 3, 30]),
    scale=st.sampled_from([1e-30, 1e-12, 1, 1e12, 1e28]),
    seed=st.integers(0, 99),
)
def test_no_order_changes_a_sum(device, dtype, size, spread, scale, seed):
    """Terms of both signs and many sizes; the error is the one of rounding each of them once or twice."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, size, generator=generator, dtype=torch.float64)
    factors = 10.0 ** (-spread * torch.rand(3, size, generator=generator, dtype=torch.float64))
    x = (normal * factors * scale).to(device, dtype)
    found = _invariant.order_invariant_sum(x)
    assert found.shape == (3, 1)
    assert found.dtype == dtype
    order = torch.randperm(size, generator=generator).to(device)
    assert_same(_invariant.order_invariant_sum(x[:, order]), found)
    assert_same(_invariant.order_invariant_sum(x[:1]), found[:1])
    exact = x.double().sum(-1, keepdim=True)
    lost = size * 2.0**-46 * x.double().abs().amax(-1, keepdim=True) + size * 2.0**-146
    rounded = 2 * torch.finfo(dtype).eps * x.double().abs().sum(-1, keepdim=True)
    assert ((found.double() - exact).abs() <= lost + rounded).all()


def test_a_plain_sum_has_other_bits_in_another_order():
    """What the test above would say of it."""
    x = torch.randn(50, 1024)
    order = torch.randperm(1024)
    assert not torch.equal(sum(x.unbind(1)), sum(x[:, order].unbind(1)))
    assert_same(_invariant.order_invariant_sum(x), _invariant.order_invariant_sum(x[:, order]))


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_sums_of_what_is_no_number_and_of_nothing(device, dtype):
    inf, nan, most = torch.inf, torch.nan, torch.finfo(dtype).max
    sums = {
        (0.0, 0.0, 0.0): 0.0,
        (1.0, inf, -1.0): inf,
        (-inf, 1.0, 2.0): -inf,
        (inf, -most, -most): inf,  # in another order these would be inf - inf
        (-inf, -inf, most): -inf,
        (inf, -inf, 1.0): nan,
        (1.0, nan, inf): nan,
        (most, most, 0.0): inf,
        (-most, -most, 0.0): -inf,
        (most, -most, 1.0): 0.0,  # 1 is less than what the largest term is rounded by
        (most / 2, -most, most / 4): -most / 4,
        (-most / 256, -most / 256, 0.0): -most / 128,
    }
    found = _invariant.order_invariant_sum(torch.tensor(list(sums), dtype=dtype, device=device))[:, 0]
    expected = torch.tensor(list(sums.values()), dtype=dtype, device=device)
    torch.testing.assert_close(found, expected, equal_nan=True)
    turned = torch.tensor([terms[::-1] for terms in sums], dtype=dtype, device=device)
    torch.testing.assert_close(_invariant.order_invariant_sum(turned)[:, 0], found, rtol=0, atol=0, equal_nan=True)
    assert _invariant.order_invariant_sum(torch.zeros(0, 8, dtype=dtype, device=device)).shape == (0, 1)
    assert_same(_invariant.order_invariant_sum(torch.ones(1, 4096, dtype=dtype)), torch.full((1, 1), 4096, dtype=dtype))


# --- the mode ---


def test_on_and_off():
    assert not po.is_invariant()
    with po.invariant(), po.invariant():
        assert po.is_invariant()
    assert not po.is_invariant()
    with pytest.raises(RuntimeError, match="stop"), po.invariant():
        raise RuntimeError("stop")
    assert not po.is_invariant()


def test_one_object_may_be_entered_again_and_decorates():
    mode = po.invariant()
    with mode:
        with mode:
            pass
        assert po.is_invariant()

    @mode
    def inside():
        """Named."""
        return po.is_invariant()

    assert inside()
    assert inside.__doc__ == "Named."
    assert not po.is_invariant()


class Settings:
    """Replaces torch.backends.cuda."""

    def __init__(self, setter):
        self.library, self.size = "cublas", 4096
        if setter:
            self.cublaslt_workspace_size = self.workspace

    def preferred_blas_library(self, library=None):
        self.library = library or self.library
        return self.library

    def workspace(self, size=None):
        self.size = self.size if size is None else size
        return self.size


@pytest.mark.parametrize("setter", [False, True])
def test_what_is_set_on_a_gpu(monkeypatch, setter):
    from torch._inductor import config

    def of_compiler():
        return [
            getattr(config, name) for name in ("emulate_precision_casts", "batch_invariant") if hasattr(config, name)
        ]

    assert of_compiler()
    limit = torch._dynamo.config.recompile_limit
    cuda = Settings(setter)
    monkeypatch.setattr(torch.backends, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "")
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE")
    with po.invariant():
        assert cuda.library == "cublaslt"
        assert (cuda.size == 1024) == setter
        assert (os.environ.get("CUBLASLT_WORKSPACE_SIZE") == "1") != setter
        assert all(of_compiler())
        assert torch._dynamo.config.recompile_limit > limit
    assert torch._dynamo.config.recompile_limit == limit
    assert (cuda.library, cuda.size) == ("cublas", 4096)
    assert not any(of_compiler())
    with config.patch(emulate_precision_casts=True):
        with po.invariant():
            pass
        assert config.emulate_precision_casts
    with torch._dynamo.config.patch(recompile_limit=1000), po.invariant():
        assert torch._dynamo.config.recompile_limit == 1000


@pytest.mark.parametrize("last", ["first", "second"])
def test_a_holder_that_goes_takes_the_mode_along(monkeypatch, last):
    cuda = Settings(setter=True)
    monkeypatch.setattr(torch.backends, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    holders = {"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)}
    for name in ("first", "second", "first"):  # twice is once
        _invariant.hold(holders[name])
    holders = {last: holders[last]}
    assert po.is_invariant()
    assert cuda.library == "cublaslt"
    holders.clear()
    assert not po.is_invariant()
    assert (cuda.library, cuda.size) == ("cublas", 4096)
