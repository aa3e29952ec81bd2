"""packing_ops.losses.logps inside torch: compiled, checkpointed, under autocast, counted; its ops themselves."""

import numpy as np
import pytest
import torch
from helpers import assert_same
from helpers.logps_case import FLOATS, batch, leaves
from torch.utils.checkpoint import checkpoint

import packing_ops as po

ops = torch.ops.packing_ops


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(hidden, weight, bias, labels, metadata):
        logps, entropy = po.token_logps(
            torch.tanh(hidden), weight, labels, metadata, bias=bias, entropy=True, temperature=0.8
        )
        loss = po.chunked_cross_entropy(hidden, weight, labels, metadata, chunk=64)
        return logps.exp().sum() + 0.1 * entropy.sum() + loss

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        hidden, weight, labels, cu_seqlens, bias = batch(device, lengths=lengths)
        metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=hidden.shape[0])
        eager, traced = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        step(*eager, labels, metadata).backward()
        compiled(*traced, labels, metadata).backward()
        for actual, expected in zip(traced, eager, strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_compiles_with_an_integer_of_numpy(device, fresh_compile):
    """Which a trace takes for a tensor."""
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    for function in (po.token_logps, po.chunked_cross_entropy):
        compiled = torch.compile(function, backend="aot_eager")
        found = compiled(hidden, weight, labels, cu_seqlens, chunk=np.int64(64))
        torch.testing.assert_close(found, function(hidden, weight, labels, cu_seqlens, chunk=64))


def test_checkpointed(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    plain, again = leaves(hidden, weight), leaves(hidden, weight)
    po.token_logps(*plain, labels, cu_seqlens).sum().backward()
    checkpoint(lambda h, w: po.token_logps(h, w, labels, cu_seqlens), *again, use_reentrant=False).sum().backward()
    for actual, expected in zip(again, plain, strict=True):
        assert_same(actual.grad, expected.grad)


def test_autocast(device):
    """As a linear layer: products of half types, gradients of the parameters' dtype."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, dtype=torch.float32)
    tensors = leaves(hidden, weight, bias)
    with torch.autocast(device, dtype=torch.bfloat16):
        logps = po.token_logps(*tensors[:2], labels, cu_seqlens, bias=tensors[2])
        logps.sum().backward()  # inside: products of the backward are of half types, too
    half = [t.bfloat16() for t in (hidden, weight, bias)]
    assert_same(logps.detach(), po.token_logps(*half[:2], labels, cu_seqlens, bias=half[2]))
    assert all(t.grad.dtype == torch.float32 for t in tensors)
    with torch.autocast(device, dtype=torch.bfloat16):
        double = po.token_logps(hidden.double(), weight.double(), labels, cu_seqlens)
    assert double.dtype == torch.float64


def test_inference_and_no_gradient(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    expected = po.token_logps(hidden, weight, labels, cu_seqlens)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_same(po.token_logps(*leaves(hidden, weight), labels, cu_seqlens), expected)


def test_products_are_counted(device):
    """By FlopCounterMode: those that torch would make of the logits, and in backward the logits once more."""
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight, labels, cu_seqlens, _ = batch(device)
    rows = int((po.shift_labels(labels, cu_seqlens) != -100).sum()) if device == "cpu" else len(labels)
    product = 2 * rows * weight.numel()
    po.register_flop_formulas()
    for needed, products, keep in (
        ((True, True), 4, 0),
        ((True, True), 3, 2**30),
        ((True, False), 3, 0),
        ((True, False), 2, 2**30),
        ((False, False), 1, 0),
    ):
        tensors = [t.requires_grad_(need) for t, need in zip(leaves(hidden, weight), needed, strict=True)]
        with FlopCounterMode(display=False) as counter:
            loss = po.token_logps(*tensors, labels, cu_seqlens, chunk=50, keep_logits=keep).sum()
            if any(needed):
                loss.backward()
        assert counter.get_total_flops() == products * product


def test_second_derivatives_are_refused(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    (leaf,) = leaves(hidden)
    (grad,) = torch.autograd.grad(po.token_logps(leaf, weight, labels, cu_seqlens).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"token_logps.*second derivative"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"token_logps has no forward-mode derivative.*hidden"):
        torch.func.jvp(lambda h: po.token_logps(h, weight, labels, cu_seqlens), (hidden,), (hidden,))


def op_samples(device):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 40, 6, dtype=torch.float32)
    targets = ops.logps_targets(labels, cu_seqlens, -100, 40)
    temperature = torch.rand(hidden.shape[0], device=device) + 0.5
    options = 1.0, 0.0, 16, None
    lse, kept = ops.token_logps(hidden, weight, bias, targets, None, *options, 2**20, True, None)[1::5]
    two = 2 * 4 * 16 * hidden.shape[0]  # bytes of whole chunks: what is kept has no memory that is not set
    logits = hidden @ weight.t()
    state, slopes = torch.zeros(7, *targets.shape, device=device), torch.rand(5, *targets.shape, device=device)
    backward = slopes, hidden, weight, bias, targets, temperature, lse
    return [
        (ops.logps_targets, (labels, cu_seqlens, -100, 40)),
        (ops.logps_rows, (targets, 30)),
        (ops.logps_chunk_, (logits, bias, targets, 0, temperature, 0.3, state)),
        (ops.logps_chunk_, (logits[:, 1:8], None, targets, 1, temperature, 0.0, state[:3])),
        (ops.logps_chunk_backward_, (logits, bias, targets, 0, temperature, 0.3, lse, slopes)),
        (ops.logps_chunk_backward_, (logits.clone(), None, targets, 0, temperature, 0.0, lse, slopes[:2])),
        (ops.token_logps, (*leaves(hidden, weight, bias), targets, temperature, *options, 0, True, None)),
        # Without gradients: an eager backward would write over the logits before they are compared.
        (ops.token_logps, (hidden, weight, bias, targets.clamp(min=0), temperature, *options, two, True, None)),
        (ops.token_logps, (*leaves(hidden, weight), None, targets, None, 0.5, 0.3, None, 30, 0, False, None)),
        (ops.token_logps_backward, (*backward, kept[:0], *options, None, True, False, True)),
        (ops.token_logps_backward, (*backward, kept, *options, None, True, True, False)),
        (ops.token_logps_backward_, (*backward, kept, *options, None, True, True, True)),
    ]


@pytest.mark.parametrize("sample", range(12))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_at_any_address(device, dtype):
    """The ops themselves on views: heads and tails of every length around the vectors of 16 bytes."""
    rows = 5
    memory = torch.randn(rows, 80, device=device).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = torch.randn(80, device=device, dtype=wide)
    targets = torch.tensor([-1, 0, 2, 5, 12], dtype=torch.int32, device=device)
    grads = torch.randn(rows, device=device, dtype=wide)
    half = torch.full((rows,), 0.5, device=device, dtype=wide)
    for start in range(9):
        for columns in (1, 2, 7, 8, 9, 16, 17, 63):
            logits = memory[:, start : start + columns]
            z = (logits.to(wide) + bias[:columns]) * 0.5
            state = torch.zeros(7, rows, device=device, dtype=wide)
            state[0] = -torch.inf
            ops.logps_chunk_(logits, bias[:columns], targets, 0, half, 0.0, state)
            kept = targets >= 0
            lse = z.logsumexp(1)
            torch.testing.assert_close((state[0] + state[1].log())[kept], lse[kept])
            torch.testing.assert_close(state[5][kept], z.sum(1)[kept], rtol=1e-5, atol=1e-5)
            assert_same(state[6][kept].long(), z.argmax(1)[kept])
            inside = kept & (targets < columns)
            torch.testing.assert_close(state[2][inside], z[inside, targets[inside].long()])
            changed = memory.clone()
            part = changed[:, start : start + columns]
            ops.logps_chunk_backward_(part, bias[:columns], targets, 0, half, 0.0, lse, torch.stack([grads, grads]))
            one_hot = torch.zeros_like(z)
            one_hot[inside, targets[inside].long()] = 1
            expected = torch.where(kept[:, None], grads[:, None] * (one_hot - z.softmax(1)) * 0.5, 0)
            torch.testing.assert_close(part, expected.to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6)
            changed[:, start : start + columns] = memory[:, start : start + columns]
            assert_same(changed, memory)  # nothing but them


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bias_at_any_address(device, dtype):
    """The same bits: next to whole grains of logits it is read in vectors of 16 bytes where these begin at one."""
    columns, wide = 2100, torch.float64 if dtype == torch.float64 else torch.float32
    logits, memory = (
        torch.randn(3, columns, device=device).to(dtype),
        torch.randn(columns + 3, device=device, dtype=wide),
    )
    targets, ones = (
        torch.tensor([0, 5, 2099], dtype=torch.int32, device=device),
        torch.ones(3, device=device, dtype=wide),
    )
    for start in (1, 2, 3):
        found = []
        for bias in (memory[start : start + columns], memory[start : start + columns].clone()):
            state = torch.zeros(7, 3, device=device, dtype=wide)
            ops.logps_chunk_(logits, bias, targets, 0, ones, 0.0, state)
            found.append((state, ops.kl_rows(logits, bias, logits, None, targets, 1.0, 1.0, 0.5)))
        for one, other in zip(*found, strict=True):
            assert_same(one, other)
        lse = (logits.to(wide) + memory[start : start + columns]).logsumexp(1)
        torch.testing.assert_close(found[0][1][1], lse)
