"""packing_ops.router against packing_ops.reference.router."""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, lengths_strategy, non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import router as oracle

ops = torch.ops.packing_ops
LENGTHS = [3, 0, 12, 1]


def row(device, lengths=LENGTHS, tail=3, experts=6, dtype=torch.float64):
    """Probabilities and cu_seqlens; what is after the last document is NaN."""
    total = sum(lengths) + tail
    probabilities = torch.randn(total, experts, device=device, dtype=torch.float64).softmax(-1).to(dtype)
    probabilities[sum(lengths) :] = torch.nan
    return probabilities, cu_seqlens_of(lengths, device)


def balance(tokens_per_expert, sums, tokens):
    """The loss by its definition."""
    return sums.shape[-1] * (tokens_per_expert / tokens * sums / tokens).sum()


@given(lengths=lengths_strategy, tail=st.integers(0, 5), experts=st.integers(1, 9), data=st.data())
def test_equals_reference(device, lengths, tail, experts, data):
    top_k = data.draw(st.integers(1, experts))
    probabilities, cu_seqlens = row(device, lengths, tail, experts)
    copies = torch.randint(0, 4, (probabilities.shape[0],), device=device)
    for given_copies in (None, copies, copies.double()[None]):
        actual = po.router_statistics(probabilities, cu_seqlens, top_k=top_k, copies=given_copies)
        counted = None if given_copies is None else given_copies.reshape(-1)
        torch.testing.assert_close(actual, oracle.router_statistics(probabilities, cu_seqlens, top_k, counted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_summed_in_float32(device, dtype):
    probabilities, cu_seqlens = row(device, [300, 20], dtype=dtype)
    actual = po.router_statistics(probabilities, cu_seqlens, top_k=2)
    assert {t.dtype for t in actual} == {torch.float32}
    expected = oracle.router_statistics(probabilities, cu_seqlens, 2)
    torch.testing.assert_close(actual, tuple(t.float() for t in expected), rtol=1e-5, atol=1e-5)


def test_the_loss_is_that_of_the_documents(device):
    """Of all of them without the padding, and of each separately, to the bit."""
    probabilities, cu_seqlens = row(device)
    loss = po.load_balancing_loss(probabilities, cu_seqlens, top_k=2)
    kept = probabilities[: sum(LENGTHS)]
    chosen = torch.zeros_like(kept).scatter(1, kept.topk(2).indices, 1.0)
    torch.testing.assert_close(loss, balance(chosen.sum(0), kept.sum(0), kept.shape[0]))
    by_document = po.load_balancing_loss(probabilities, cu_seqlens, top_k=2, by_document=True)
    for i, part in enumerate(kept.split(LENGTHS)):
        one = cu_seqlens_of([len(part)], device)
        assert_same(po.load_balancing_loss(part, one, top_k=2, by_document=True)[0], by_document[i])
        assert_same(po.load_balancing_loss(part, one, top_k=2), by_document[i])
    assert by_document[1] == 0


def test_layers_are_one_mean(device):
    layers = [row(device)[0] for _ in range(3)]
    _, cu_seqlens = row(device)
    kept = torch.cat([layer[: sum(LENGTHS)] for layer in layers])
    expected = po.load_balancing_loss(kept, cu_seqlens_of([len(kept)], device), top_k=2)
    torch.testing.assert_close(po.load_balancing_loss(layers, cu_seqlens, top_k=2), expected)
    maps = [torch.zeros_like(p, dtype=torch.bool).scatter(1, p.topk(2).indices, True) for p in layers]
    torch.testing.assert_close(po.load_balancing_loss(layers, cu_seqlens, routed=maps), expected)


def test_copies_are_so_many_tokens(device):
    probabilities, _ = row(device, [5], 0)
    copies = torch.tensor([2, 1, 0, 3, 1], device=device)
    repeated = probabilities.repeat_interleave(copies, 0)
    expected = po.load_balancing_loss(repeated, cu_seqlens_of([7], device), top_k=2)
    probabilities[2] = torch.nan  # represents no token
    actual = po.load_balancing_loss(probabilities, cu_seqlens_of([5], device), top_k=2, copies=copies)
    torch.testing.assert_close(actual, expected)


def test_copies_of_a_prefix_tree(device):
    """The loss of a tree's rows is the one of its samples, one after the other."""
    samples = [[*(5, 6, 7, 8) * 80, 1], [*(5, 6, 7, 8) * 80, 2, 3], [*(5, 6, 7, 8) * 80, 4]]
    tokens = torch.tensor([t for sample in samples for t in sample])
    tree = po.pack_prefix_tree(tokens, cu_seqlens_of([len(s) for s in samples]))
    router = torch.randn(9, 6, dtype=torch.float64).softmax(-1)  # by token
    of_samples = po.load_balancing_loss(router[tokens], cu_seqlens_of([len(tokens)]), top_k=2)
    rows = router[tokens[tree.token_of_slot]]
    assert len(rows) < len(tokens)
    copies = po.load_balancing_loss(rows, tree.cu_seqlens, top_k=2, copies=tree.copies)
    torch.testing.assert_close(copies, of_samples)


@pytest.mark.parametrize("by_document", [False, True])
def test_gradcheck(device, by_document):
    probabilities, cu_seqlens = row(device, tail=0)
    copies = torch.rand(probabilities.shape[0], device=device, dtype=torch.float64) + 0.5
    routed = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, probabilities.topk(2).indices, True)

    def loss(p):
        return po.load_balancing_loss(p, cu_seqlens, routed=routed, copies=copies, by_document=by_document)

    leaf = probabilities.requires_grad_()
    assert torch.autograd.gradcheck(loss, leaf)
    assert torch.autograd.gradgradcheck(lambda p: loss(p).square(), leaf)


def test_no_gradient_of_padding(device):
    probabilities, cu_seqlens = row(device)
    leaf = probabilities.requires_grad_()
    po.load_balancing_loss(leaf, cu_seqlens, top_k=2).backward()
    assert leaf.grad[: sum(LENGTHS)].all()
    assert not leaf.grad[sum(LENGTHS) :].any()


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(logits, copies, metadata):
        statistics = po.router_statistics(logits.softmax(-1), metadata, top_k=2, copies=copies)[1].sum()
        return statistics + po.load_balancing_loss(logits.softmax(-1), metadata, top_k=2, by_document=True).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        logits = torch.randn(sum(lengths) + 2, 6, device=device)
        copies = torch.randint(1, 4, (sum(lengths) + 2,), device=device)
        metadata = po.PackedMetadata.from_lengths(lengths, total=len(logits), device=device)
        eager, traced = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        step(eager, copies, metadata).backward()
        compiled(traced, copies, metadata).backward()
        torch.testing.assert_close(traced.grad, eager.grad)


def test_strided_and_runs_equal(device):
    probabilities, cu_seqlens = row(device)
    expected = po.router_statistics(probabilities, cu_seqlens, top_k=2)
    for same in (probabilities, non_contiguous(probabilities), probabilities.t().contiguous().t()):
        for actual, wanted in zip(po.router_statistics(same, cu_seqlens, top_k=2), expected, strict=True):
            assert_same(actual, wanted)


def samples(device):
    probabilities, cu_seqlens = row(device, dtype=torch.float32)
    probabilities = probabilities.nan_to_num()
    routed, copies = probabilities > 0.2, torch.rand(len(probabilities), device=device)
    return [
        (probabilities, routed, cu_seqlens, None),
        (probabilities.clone().requires_grad_(), routed, cu_seqlens, copies),
        (probabilities[:0], routed[:0], cu_seqlens_of([], device), None),
    ]


@pytest.mark.parametrize("sample", range(3))
def test_opcheck(device, sample):
    torch.library.opcheck(ops.router_sums, samples(device)[sample])


def bad_calls(device):
    probabilities, cu_seqlens = row(device, [3, 2], 1, 4, torch.float32)
    routed = torch.ones(6, 4, dtype=torch.bool, device=device)

    def call(probabilities=probabilities, cu_seqlens=cu_seqlens, top_k=2, **options):
        return lambda: po.load_balancing_loss(probabilities, cu_seqlens, top_k=top_k, **options)

    return {
        "rank": (call(probabilities[None]), r"probabilities: expected floating \[total, experts\], got float32 \[1, 6"),
        "dtype": (call(probabilities.long()), "probabilities: expected floating"),
        "top_k": (call(top_k=5), "top_k: expected 1 to 4 experts, got 5"),
        "no top_k": (call(top_k=0), "top_k: expected 1 to 4 experts, got 0"),
        "neither": (call(top_k=None), "top_k: expected exactly one of top_k and routed"),
        "both": (call(routed=routed), "top_k: expected exactly one of top_k and routed"),
        "routed": (call(top_k=None, routed=routed[:-1]), r"routed: expected bool \[total=6, experts=4\]"),
        "routed dtype": (call(top_k=None, routed=routed.long()), "routed: expected bool"),
        "layers": (call([]), "routed: expected one for each of 1 or more layers"),
        "layers of routed": (call([probabilities] * 2, top_k=None, routed=[routed]), "routed: .* got 1 for 2"),
        "no layer": (call(3), "probabilities: expected a tensor, got 3"),
        "no routed": (call(top_k=None, routed=3), "routed: expected a tensor, got 3"),
        "copies": (call(copies=torch.ones(5, device=device)), r"copies: expected \[total=6\]"),
        "copies device": (call(copies=torch.ones(6, device="meta")), "copies: expected .* got float32 .* on meta"),
        "cu_seqlens": (call(cu_seqlens=cu_seqlens + 1), "cu_seqlens: expected to start at 0"),
        "metadata": (call(cu_seqlens=po.PackedMetadata.from_lengths([3, 2])), "cu_seqlens: expected total=6"),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()
