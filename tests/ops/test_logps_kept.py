"""token_logps that keeps logits from forward to backward: the same bits, in less time and more memory."""

import contextlib
import gc

import pytest
import torch
from helpers import assert_same, only_generation_0
from helpers.logps_case import LOW, batch, leaves
from torch.utils.checkpoint import checkpoint

import packing_ops as po
from packing_ops.losses.chunks import Gradients

ops = torch.ops.packing_ops
ALL = 2**40
CHUNK = 64


def gradients(keep, tensors, labels, cu_seqlens, **options):
    """Of hidden, weight and bias, all outputs in use."""
    tensors = leaves(*tensors)
    found = po.token_logps(
        *tensors[:2],
        labels,
        cu_seqlens,
        bias=tensors[2],
        chunk=CHUNK,
        keep_logits=keep,
        outputs=("logps", "entropy", "sum_p2"),
        **options,
    )
    sum(found).sin().sum().backward()
    return [*(each.detach() for each in found), *(t.grad for t in tensors if t is not None)]


def chunk_bytes(rows, dtype):
    return rows * CHUNK * dtype.itemsize


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunks", [1, 2, 100])
def test_bits_of_kept_and_recomputed(device, dtype, softcap, chunks):
    hidden, weight, labels, cu_seqlens, bias = batch(device, dtype=dtype)
    bound = None if device == "cpu" else int((labels != -100).sum())
    for of_mode in (False, True):
        tensors = hidden, weight, bias if of_mode else None
        keep = chunks * chunk_bytes(48, dtype)
        with po.invariant() if of_mode else torch.enable_grad():
            options = {"softcap": softcap, "max_targets": bound}
            none, kept = (gradients(each, tensors, labels, cu_seqlens, **options) for each in (0, keep))
        for actual, expected in zip(kept, none, strict=True):
            assert_same(actual, expected)


@pytest.mark.parametrize(("keep", "chunks"), [(0, 0), (1, 0), (2, 2), (ALL, 5)])
def test_whole_chunks_that_fit(device, keep, chunks):
    hidden, weight, labels, cu_seqlens, _ = batch(device, dtype=torch.float32)
    keep = 2 * chunk_bytes(hidden.shape[0], torch.float32) + 99 if keep == 2 else keep
    targets = ops.logps_targets(labels, cu_seqlens, -100, 301)
    found = ops.token_logps(hidden, weight, None, targets, None, 1.0, 0.0, CHUNK, None, keep, False, None)[-1]
    assert found.shape == ((chunks, hidden.shape[0], CHUNK) if keep else (0, 0, 0))


def products(monkeypatch, function):
    count, real = [0], torch.mm

    def counted(*args, **given):
        count[0] += 1
        return real(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", counted)
        function()
    return count[0]


def test_products_of_a_backward(device, monkeypatch):
    """The logits of each chunk unless they are kept, and weight's gradient; hidden's are addmm's."""
    hidden, weight, labels, cu_seqlens, _ = batch(device, dtype=torch.float32)
    for keep, wanted in ((0, 10), (2 * chunk_bytes(hidden.shape[0], torch.float32), 8), (ALL, 5)):
        loss = po.token_logps(*leaves(hidden, weight), labels, cu_seqlens, chunk=CHUNK, keep_logits=keep).sum()
        assert products(monkeypatch, loss.backward) == wanted


def kept_of(logps):
    """The logits that the graph of logps holds."""
    return logps.grad_fn.saved_tensors[6]


def test_nothing_is_kept_without_a_gradient(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device, dtype=torch.float32)

    def keeps(h, w):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
            po.token_logps(h, w, labels, cu_seqlens, keep_logits=ALL)
        return max(seen, default=0) >= hidden.shape[0] * 301

    assert keeps(*leaves(hidden, weight))
    assert not keeps(hidden, weight)
    with torch.no_grad():
        assert not keeps(*leaves(hidden, weight))


def test_a_second_backward_makes_the_logits_again(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device, dtype=torch.bfloat16)
    ours = leaves(hidden, weight)
    logps = po.token_logps(*ours, labels, cu_seqlens, chunk=CHUNK, keep_logits=ALL)
    before = kept_of(logps).clone()
    first = torch.autograd.grad(logps.sum(), ours, retain_graph=True)
    assert not torch.equal(kept_of(logps), before)  # their gradient has their place
    grad = torch.randn_like(logps)
    second = torch.autograd.grad(logps, ours, grad, retain_graph=True)
    plain = po.token_logps(*ours, labels, cu_seqlens, chunk=CHUNK)
    for actual, expected in zip(first, torch.autograd.grad(plain.sum(), ours, retain_graph=True), strict=True):
        assert_same(actual, expected)
    for actual, expected in zip(second, torch.autograd.grad(plain, ours, grad), strict=True):
        assert_same(actual, expected)


def test_second_derivatives_are_refused(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    (leaf,) = leaves(hidden)
    logps = po.token_logps(leaf, weight, labels, cu_seqlens, keep_logits=ALL)
    (grad,) = torch.autograd.grad(logps.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"token_logps.*second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(device, reentrant):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    plain, again = leaves(hidden, weight), leaves(hidden, weight)
    po.token_logps(*plain, labels, cu_seqlens).sum().backward()

    def function(h, w):
        return po.token_logps(h, w, labels, cu_seqlens, keep_logits=ALL)

    logps = checkpoint(function, *again, use_reentrant=reentrant)
    logps.sum().backward()
    for actual, expected in zip(again, plain, strict=True):
        assert_same(actual.grad, expected.grad)


def test_compiled(device, fresh_compile):
    """The graph holds the logits and works on copies: a second backward is right, too."""

    def step(hidden, weight, labels, cu_seqlens):
        return po.token_logps(hidden, weight, labels, cu_seqlens, chunk=CHUNK, keep_logits=ALL)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        hidden, weight, labels, cu_seqlens, _ = batch(device, lengths=lengths)
        ours, eager = leaves(hidden, weight), leaves(hidden, weight)
        with torch._functorch.config.patch(donated_buffer=False):
            found = compiled(*ours, labels, cu_seqlens)
            found.sum().backward(retain_graph=True)
            found.sum().backward()
        step(*eager, labels, cu_seqlens).sum().backward()
        for actual, expected in zip(ours, eager, strict=True):
            torch.testing.assert_close(actual.grad, 2 * expected.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_torch_func(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)

    def loss(h, keep=ALL):
        return po.token_logps(h, weight, labels, cu_seqlens, keep_logits=keep).sum()

    assert_same(torch.func.grad(loss)(hidden), torch.func.grad(lambda h: loss(h, 0))(hidden))
    several = torch.stack([hidden, 2 * hidden])
    found = torch.func.vmap(torch.func.grad(loss))(several)
    torch.testing.assert_close(found[1], torch.func.grad(loss)(2 * hidden))


def test_auto_keeps_nothing_on_the_cpu():
    hidden, weight, labels, cu_seqlens, _ = batch("cpu")
    logps = po.token_logps(*leaves(hidden, weight), labels, cu_seqlens, keep_logits="auto")
    assert kept_of(logps).numel() == 0


@pytest.mark.gpu
def test_auto_keeps_what_fits():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    hidden, weight, labels, cu_seqlens, _ = batch("cuda", dtype=torch.bfloat16)
    logps = po.token_logps(*leaves(hidden, weight), labels, cu_seqlens, keep_logits="auto", chunk=CHUNK)
    assert kept_of(logps).shape == (5, hidden.shape[0], CHUNK)


def test_the_float32_gradient_of_hidden_is_gone_before_that_of_weight(device, monkeypatch):
    """It is a quarter of a GB next to 16,384 rows of 4,096."""
    hidden, weight, labels, cu_seqlens, _ = batch(device, dtype=torch.bfloat16)
    rows = int((po.shift_labels(labels, cu_seqlens) != -100).sum()) if device == "cpu" else hidden.shape[0]
    seen, add_weight = [], Gradients._add_weight

    def alive():
        tensors = [t for t in gc.get_objects(generation=0) if type(t) is torch.Tensor and t.device.type == device]
        return any(t.untyped_storage().nbytes() == rows * hidden.shape[1] * 4 for t in tensors)

    def watched(*args):
        seen.append(alive())
        return add_weight(*args)

    monkeypatch.setattr(Gradients, "_add_weight", watched)
    with only_generation_0():
        for keep, wanted in ((0, True), (ALL, False)):
            seen.clear()
            po.token_logps(*leaves(hidden, weight), labels, cu_seqlens, chunk=CHUNK, keep_logits=keep).sum().backward()
            assert seen == [wanted] * 5


@pytest.mark.gpu
def test_memory_with_all_kept():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    hidden, weight, labels, cu_seqlens, _ = batch("cuda", 65_536, 2048, [4096], 0, dtype=torch.bfloat16)
    tensors = leaves(hidden, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    po.token_logps(*tensors, labels, cu_seqlens, keep_logits=ALL).sum().backward()
    of_logits, of_gradients = 4096 * 65_536 * 2, 2 * (hidden.numel() + weight.numel())
    assert torch.cuda.max_memory_allocated() - before < of_logits + of_gradients + (16 << 20)


def test_loss_keeps_logits(device, monkeypatch):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    (leaf,) = leaves(hidden)
    loss = po.chunked_cross_entropy(leaf, weight, labels, cu_seqlens, keep_logits=ALL)
    assert products(monkeypatch, loss.backward) == 0  # of hidden's gradient: an addmm


@pytest.mark.parametrize("chunk", [None, 1000, 4096, 5000])
@pytest.mark.parametrize("within", ["forward", "backward"])
def test_a_backward_in_another_mode_makes_the_logits_again(within, chunk):
    """The mode has other chunks and rows of logits: those that were kept do not fit."""
    hidden, weight, labels, cu_seqlens, _ = batch("cpu", 9000, 8, dtype=torch.float32)
    tensors = leaves(hidden, weight)
    expected = torch.autograd.grad(po.chunked_cross_entropy(*tensors, labels, cu_seqlens), tensors)
    mode = {True: po.invariant, False: contextlib.nullcontext}
    with mode[within == "forward"]():
        loss = po.chunked_cross_entropy(*tensors, labels, cu_seqlens, chunk=chunk, keep_logits=2**30)
    with mode[within == "backward"]():
        torch.testing.assert_close(torch.autograd.grad(loss, tensors), expected)


def test_batched_gradients_of_kept_logits():
    hidden, weight, labels, cu_seqlens, _ = batch("cpu", 61, 8, dtype=torch.float64)
    tensors = leaves(hidden, weight)

    def jacobian(keep_logits):
        logps = po.token_logps(*tensors, labels, cu_seqlens, keep_logits=keep_logits)
        return torch.autograd.grad(logps, tensors, torch.eye(len(labels), dtype=torch.float64), is_grads_batched=True)

    torch.testing.assert_close(jacobian(2**30), jacobian(0))


@pytest.mark.parametrize("total", [0, 3])
def test_no_target_at_all(device, total):
    """Nothing is kept where the host knows that there is no target."""
    hidden = torch.randn(total, 8, device=device, requires_grad=True)
    labels = torch.full((total,), -100, device=device)
    cu_seqlens = torch.tensor([0, total], dtype=torch.int32, device=device)
    weight = torch.randn(16, 8, device=device)
    loss = po.token_logps(hidden, weight, labels, cu_seqlens, keep_logits=10**6, max_targets=0).sum()
    loss.backward()
    assert loss == 0
    assert_same(hidden.grad, torch.zeros_like(hidden))
