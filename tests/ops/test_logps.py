"""packing_ops.losses.logps against packing_ops.reference.logps."""

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, lengths_strategy, non_contiguous
from helpers.logps_case import LENGTHS, LOW, batch, leaves, results_and_gradients
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import logps as oracle

ops = torch.ops.packing_ops

# --- values ---


def test_worked_values(device):
    hidden = torch.tensor([[0.0], [1.0], [2.0], [3.0]], device=device)
    weight, labels = torch.tensor([[0.0], [1.0]], device=device), torch.tensor([0, 1, 1, 0], device=device)
    logps, entropy = po.token_logps(hidden, weight, labels, cu_seqlens_of([3, 1], device), entropy=True)
    torch.testing.assert_close(logps.exp().cpu(), torch.tensor([0.5, 0.7310586, 1.0, 1.0]))
    torch.testing.assert_close(entropy.cpu(), torch.tensor([0.6931472, 0.5822032, 0.0, 0.0]))
    halved = po.token_logps(hidden, weight, labels, cu_seqlens_of([3, 1], device), temperature=0.5)
    torch.testing.assert_close(halved.exp().cpu(), torch.tensor([0.5, 0.8807971, 1.0, 1.0]))
    loss = po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens_of([3, 1], device))
    torch.testing.assert_close(loss.cpu(), torch.tensor(-(0.5 * 0.7310586)).neg().log().neg() / 2)


@given(lengths=lengths_strategy, tail=st.integers(0, 5), vocab=st.integers(1, 90), chunk=st.integers(1, 100))
def test_equals_reference_at_any_size(device, lengths, tail, vocab, chunk):
    hidden, weight, labels, cu_seqlens, bias = batch(device, vocab, 7, lengths, tail)
    expected = oracle.token_logps(hidden, weight, labels, cu_seqlens, bias=bias, temperature=0.7)
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=hidden.shape[0])
    options = {"bias": bias, "temperature": 0.7, "entropy": True, "chunk": chunk}
    for actual in (
        po.token_logps(hidden, weight, labels, metadata, **options),
        po.token_logps(hidden[None], weight, labels[None].int(), cu_seqlens, **options),
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("chunk", [None, 77, 4])  # 4: sums over chunks are not rounded to a half type
def test_values_and_gradients(device, dtype, biased, chunk):
    """Within twice the error of torch in that dtype, of all logits at once."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, 1003, 48, [0, 40, 1, 90, 0, 120], dtype=dtype, scale=0.3)
    bias = bias if biased else None
    grads = torch.randn(2, hidden.shape[0], device=device, dtype=torch.float64)
    run = {
        "ours": lambda h, w, bias, **options: po.token_logps(
            h, w, labels, cu_seqlens, bias=bias, entropy=True, chunk=chunk, **options
        ),
        "torch": lambda h, w, bias, **options: oracle.token_logps(h, w, labels, cu_seqlens, bias=bias, **options),
    }
    exact = results_and_gradients(
        run["torch"], hidden.double(), weight.double(), None if bias is None else bias.double(), grads, temperature=1.3
    )
    low = results_and_gradients(run["torch"], hidden, weight, bias, grads.float(), temperature=1.3)
    ours = results_and_gradients(run["ours"], hidden, weight, bias, grads.float(), temperature=1.3)
    assert [t.dtype for t in ours] == [torch.float32, torch.float32, dtype, dtype, *([dtype] if biased else [])]
    for each in zip(ours, low, exact, strict=True):
        assert_error_within(*each, floor=4 * torch.finfo(torch.float32).eps * each[2].abs().max().item())


def test_gradcheck(device):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 13, 3, [3, 0, 4], 1)
    tensors = leaves(hidden, weight, bias)
    for entropy in (False, True):
        for chunk in (None, 5):

            def function(h, w, b, entropy=entropy, chunk=chunk):
                return po.token_logps(h, w, labels, cu_seqlens, bias=b, temperature=0.6, entropy=entropy, chunk=chunk)

            assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("needed", ["hidden", "weight", "bias"])
def test_only_the_gradient_that_is_asked_for(device, needed):
    hidden, weight, labels, cu_seqlens, bias = batch(device)
    tensors = dict(zip(["hidden", "weight", "bias"], leaves(hidden, weight, bias), strict=True))
    po.token_logps(tensors["hidden"], tensors["weight"], labels, cu_seqlens, bias=tensors["bias"]).sum().backward()
    expected = tensors[needed].grad
    alone = {name: t.detach().requires_grad_(name == needed) for name, t in tensors.items()}
    po.token_logps(alone["hidden"], alone["weight"], labels, cu_seqlens, bias=alone["bias"]).sum().backward()
    assert_same(alone[needed].grad, expected)
    assert all(t.grad is None for name, t in alone.items() if name != needed)


def test_gradient_of_the_entropy_alone(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    ours, theirs = leaves(hidden, weight), leaves(hidden, weight)
    po.token_logps(*ours, labels, cu_seqlens, entropy=True)[1].sum().backward()
    oracle.token_logps(*theirs, labels, cu_seqlens)[1].sum().backward()
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_no_document_reaches_another(device):
    """The label that opens a document is nobody's target; slots without one have no gradient."""
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    before = po.token_logps(hidden, weight, labels, cu_seqlens)
    starts = [start for start, length in zip(cu_seqlens.tolist(), LENGTHS, strict=False) if length]
    labels[starts] = (labels[starts].clamp(min=0) + 1) % 301
    assert_same(po.token_logps(hidden, weight, labels, cu_seqlens), before)
    (leaf,) = leaves(hidden)
    po.token_logps(leaf, weight, labels, cu_seqlens).sum().backward()
    targets = po.shift_labels(labels, cu_seqlens)
    assert_same(leaf.grad.any(1), targets != -100)
    assert_same(before[targets == -100], torch.zeros_like(before[targets == -100]))


def test_logits_far_from_zero_and_shut_entries(device):
    """A softmax that overflows without its maximum; entries that a bias of -inf shuts, whole chunks of them."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, 40, scale=300.0)
    bias[8:24] = -torch.inf
    labels[(labels >= 8) & (labels < 24)] = 3
    options = {"bias": bias, "entropy": True}
    expected = oracle.token_logps(hidden, weight, labels, cu_seqlens, bias=bias)
    assert (expected[0] < -1000).any()
    for chunk in (None, 8):
        tensors = leaves(hidden, weight)
        actual = po.token_logps(*tensors, labels, cu_seqlens, chunk=chunk, **options)
        torch.testing.assert_close(actual, expected)
        sum(actual).sum().backward()
        assert all(t.grad.isfinite().all() for t in tensors)


def test_nan_stays_in_its_row(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    labels[:] = labels.clamp(min=0)
    hidden[7] = torch.nan
    assert po.token_logps(hidden, weight, labels, cu_seqlens).isnan().nonzero().tolist() == [[7]]


def test_ignore_index_of_the_vocabulary(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    labels[labels == -100] = 0
    actual = po.token_logps(hidden, weight, labels, cu_seqlens, ignore_index=0)
    torch.testing.assert_close(actual, oracle.token_logps(hidden, weight, labels, cu_seqlens, ignore_index=0)[0])


def test_strided_hidden_and_weight(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    grad = torch.randn(hidden.shape[0], device=device, dtype=torch.float64)
    expected = results_and_gradients(
        lambda h, w, bias: (po.token_logps(h, w, labels, cu_seqlens), 0 * h.sum()), hidden, weight, None, (grad, 0)
    )
    for stride in (non_contiguous, lambda t: t.t().contiguous().t()):
        ours = results_and_gradients(
            lambda h, w, bias, stride=stride: (po.token_logps(stride(h), stride(w), labels, cu_seqlens), 0 * h.sum()),
            hidden,
            weight,
            None,
            (grad, 0),
        )
        for actual, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("total", [0, 1, 2])
def test_few_slots(device, total):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 5, 3, [total] if total else [], 0)
    labels[:] = 2
    tensors = leaves(hidden, weight, bias)
    logps, entropy = po.token_logps(*tensors[:2], labels, cu_seqlens, bias=tensors[2], entropy=True)
    assert logps.shape == entropy.shape == (total,)
    assert logps.count_nonzero() == max(total - 1, 0)
    (logps.sum() + entropy.sum()).backward()
    assert [t.grad.shape for t in tensors] == [t.shape for t in tensors]
    assert total == 2 or not any(t.grad.any() for t in tensors)
    assert po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens).isfinite()


def test_runs_are_equal_to_the_bit(device):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 1003, dtype=torch.bfloat16)
    grads = torch.ones(2, hidden.shape[0], device=device)

    def run():
        return results_and_gradients(
            lambda h, w, bias: po.token_logps(h, w, labels, cu_seqlens, bias=bias, entropy=True, chunk=100),
            hidden,
            weight,
            bias,
            grads,
        )

    for first, second in zip(run(), run(), strict=True):
        assert_same(first, second)


# --- memory ---


def test_one_chunk_of_logits_in_memory(device):
    """No tensor of the forward or the backward is larger than the chunk, but for what has the size of an argument."""
    from torch.utils._python_dispatch import TorchDispatchMode

    hidden, weight, labels, cu_seqlens, bias = batch(device, 4000, 8, [200, 100], dtype=torch.float32)
    chunk, largest = 64, 0
    allowed = max(chunk * hidden.shape[0], weight.numel())

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // 4)
            return out

    # Below the op, where its products are seen.
    from packing_ops.losses import op as module

    targets = ops.logps_targets(labels, cu_seqlens, -100, 4000)
    options = 1.0, 0.0, chunk, None
    with Largest():
        found = module._token_logps(hidden, weight, bias, targets, None, *options, 0, True, None)
        slopes = torch.ones(5, hidden.shape[0], device=device)
        module._backward(
            slopes, hidden, weight, bias, targets, None, found[1], found[-1], *options, None, True, True, True
        )
    assert 0 < largest <= allowed
    assert largest < hidden.shape[0] * 4000 // 10


def test_chunk_by_default():
    """As docstrings tell: 64 MiB of logits on the CPU, equal chunks, at least 512 entries, at most all of them."""
    from packing_ops.losses.chunks import chunk_of

    def chunk(total, vocab):
        return chunk_of(None, total, torch.empty(total, 1), vocab)

    assert chunk(1024, 151_936) == 15_232  # ten, where 16,384 would fit
    assert chunk(1024, 1000) == 1000
    assert 512 <= chunk(1_000_000, 151_936) < 1024
    assert chunk(0, 151_936) == 151_936


@pytest.mark.gpu
def test_memory_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    hidden, weight, labels, cu_seqlens, _ = batch("cuda", 32_768, 64, [4096], 0, dtype=torch.bfloat16)
    tensors = leaves(hidden, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    po.token_logps(*tensors, labels, cu_seqlens, chunk=1024).sum().backward()
    of_logits = 4096 * 32_768 * 2
    assert torch.cuda.max_memory_allocated() - before < of_logits // 4


# --- chunked_cross_entropy ---


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_equals_torch(device, reduction):
    hidden, weight, labels, cu_seqlens, bias = batch(device)
    ours, theirs = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    loss = po.chunked_cross_entropy(*ours[:2], labels, cu_seqlens, bias=ours[2], reduction=reduction, chunk=50)
    logits = torch.nn.functional.linear(*theirs)
    targets = po.shift_labels(labels, cu_seqlens)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    loss.square().sum().backward()
    expected.square().sum().backward()
    for actual, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)


def test_cross_entropy_over_the_items_of_the_batch(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    total = po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, reduction="sum")
    for items in (40, 40.0, torch.tensor(40), torch.tensor([40.0], device=device)):
        loss = po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, num_items_in_batch=items)
        assert loss.shape == ()
        torch.testing.assert_close(loss, total / 40)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_nothing_is_zero(device, reduction):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    (leaf,) = leaves(hidden)
    loss = po.chunked_cross_entropy(leaf, weight, torch.full_like(labels, -100), cu_seqlens, reduction=reduction)
    loss.sum().backward()
    assert not loss.any()
    assert not loss.signbit().any()
    assert not leaf.grad.any()


# --- bad input ---


def bad_calls(device):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 10, 4, [3, 2], 1, torch.float32)

    def call(hidden=hidden, weight=weight, labels=labels, cu_seqlens=cu_seqlens, **options):
        return lambda: po.token_logps(hidden, weight, labels, cu_seqlens, **options)

    def cross_entropy(**options):
        return lambda: po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, **options)

    labels[1] = 3
    hot = torch.ones(6, device=device)
    hot[0] = 0
    wrong, negative = labels.clone(), labels.clone()
    wrong[2], negative[1] = 10, -1
    return {
        "hidden rank": (call(hidden[None, None]), r"hidden: expected .*\[total, hidden\].*got float32 \[1, 1, 6, 4\]"),
        "hidden dtype": (call(hidden.long()), "hidden: expected float32.*got int64"),
        "weight shape": (call(weight=weight.t()), r"weight: expected \[vocab, hidden=4\], got float32 \[4, 10\]"),
        "weight dtype": (call(weight=weight.double()), "weight: expected float32 like hidden, got float64"),
        "weight device": (call(weight=weight.to("meta")), "weight: expected on .* like hidden.*meta"),
        "weight empty": (call(weight=weight[:0]), "weight: expected 1 to .* got 0"),
        "bias shape": (call(bias=bias[:-1]), r"bias: expected \[vocab=10\] like weight, got float32 \[9\]"),
        "bias dtype": (call(bias=bias.double()), "bias: expected float32 like hidden, got float64"),
        "labels shape": (call(labels=labels[:-1]), r"labels: expected \[total=6\] or \[1, total\] like hidden"),
        "labels dtype": (call(labels=labels.float()), "labels: expected int64 or int32, got float32"),
        "labels device": (call(labels=labels.to("meta")), "labels: expected on .* like hidden"),
        "label over": (call(labels=wrong), "labels: .* at index 2"),
        "label below": (call(labels=negative), "labels: .* at index 1"),
        "cu_seqlens": (call(cu_seqlens=cu_seqlens + 1), "cu_seqlens: expected to start at 0"),
        "metadata total": (call(cu_seqlens=po.PackedMetadata.from_lengths([3, 2])), "cu_seqlens: expected total=6"),
        "temperature": (call(temperature=0.0), "temperature: expected a number above 0, got 0.0"),
        "temperature nan": (call(temperature=float("nan")), "temperature: expected a number above 0"),
        "temperature shape": (call(temperature=torch.ones(5, device=device)), r"temperature: expected .*total=6"),
        "temperature dtype": (call(temperature=labels), r"temperature: expected .*floating.* got int64"),
        "temperature device": (call(temperature=torch.ones(6, device="meta")), "temperature: expected on .*meta"),
        "temperature grad": (
            call(temperature=torch.ones(6, device=device, requires_grad=True)),
            "temperature: expected a tensor without requires_grad",
        ),
        "temperatures": (call(temperature=hot), "temperature: expected .*above 0.* index 0"),
        "scale": (call(scale=0), "scale: expected a number above 0, got 0"),
        "softcap": (call(softcap=-1), "softcap: expected a number above 0, or 0 or inf for none, got -1"),
        "outputs": (call(outputs=("logps", "top5")), r"outputs: expected .*mean_logit.* got \('logps', 'top5'\)"),
        "outputs, none": (call(outputs=()), r"outputs: expected .* got \(\)"),
        "outputs, a name": (call(outputs="logps"), "outputs: expected .* got 'logps'"),
        "outputs, entropy": (call(outputs=("logps",), entropy=True), "outputs: expected .* beside entropy=True"),
        "max_targets": (call(max_targets=-1), "max_targets: expected at least 0, got -1"),
        "max_targets, few": (call(labels=labels.clamp(min=0), max_targets=2), "max_targets: expected at least"),
        "keep_logits": (call(keep_logits=-1), "keep_logits: expected at least 0 bytes, got -1"),
        "keep_logits, a word": (call(keep_logits="all"), "keep_logits: expected bytes or 'auto', got 'all'"),
        "chunk": (call(chunk=0), "chunk: expected at least 1 entry of the vocabulary, got 0"),
        "ignore_index": (
            call(labels=labels.int(), ignore_index=2**40),
            "ignore_index: expected a number that int32 holds",
        ),
        "reduction": (cross_entropy(reduction="average"), "reduction: expected 'mean', 'sum' or 'none', got 'average'"),
        "items": (cross_entropy(reduction="sum", num_items_in_batch=3), "num_items_in_batch: expected None"),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    if device == "cuda" and case == "max_targets, few":
        pytest.skip("rows go by whole tiles there: all six are multiplied; see test_too_small_a_bound_is_named")
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_types_are_named(device):
    hidden, weight, labels, _, _ = batch(device)
    with pytest.raises(TypeError, match=r"cu_seqlens: expected PackedMetadata or its cu_seqlens, got \[0, 3\]"):
        po.token_logps(hidden, weight, labels, [0, 3])
    for name in ("hidden", "weight", "labels", "bias"):
        tensors = {"hidden": hidden, "weight": weight, "labels": labels, name: [1.0]}
        with pytest.raises(TypeError, match=f"{name}: expected a tensor"):
            po.token_logps(**tensors, cu_seqlens=cu_seqlens_of(LENGTHS, device))
    for temperature in ([1.0], "1", None):
        with pytest.raises(TypeError, match="temperature: expected a number, got "):
            po.token_logps(hidden, weight, labels, cu_seqlens_of(LENGTHS, device), temperature=temperature)
    with pytest.raises(TypeError, match="chunk: expected an integer"):
        po.token_logps(hidden, weight, labels, cu_seqlens_of(LENGTHS, device), chunk=1.5)
