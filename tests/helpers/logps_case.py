"""A packed row for the tests of packing_ops.losses.logps."""

import torch

import packing_ops as po
from helpers import assert_error_within, cu_seqlens_of
from packing_ops.reference import logps as oracle

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LOW = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 5, 1, 17, 0, 9]


def batch(device, vocab=301, size=24, lengths=LENGTHS, tail=3, dtype=torch.float64, scale=1.0):
    """hidden, weight, labels, cu_seqlens, bias; some labels are ignored."""
    cu_seqlens, total = cu_seqlens_of(lengths, device), sum(lengths) + tail
    hidden = torch.randn(total, size, device=device, dtype=torch.float64).to(dtype)
    weight = (scale * torch.randn(vocab, size, device=device, dtype=torch.float64)).to(dtype)
    bias = torch.randn(vocab, device=device, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (total,), device=device)
    labels[torch.rand(total, device=device) < 0.2] = -100
    return hidden, weight, labels, cu_seqlens, bias


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def results_and_gradients(function, hidden, weight, bias, grads, **options):
    """logps, entropy and the gradients of hidden, weight and bias."""
    hidden, weight, bias = leaves(hidden, weight, bias)
    logps, entropy = function(hidden, weight, bias=bias, **options)
    (logps * grads[0] + entropy * grads[1]).sum().backward()
    return [logps.detach(), entropy.detach(), *(t.grad for t in (hidden, weight, bias) if t is not None)]


def assert_outputs_and_gradients(hidden, weight, labels, cu_seqlens, names, chunk, **options):
    """Of token_logps: within twice the error of torch in that dtype, of all logits at once."""
    grads = torch.randn(len(names), hidden.shape[0], device=hidden.device, dtype=torch.float64)

    def results(function, *tensors):
        tensors = leaves(*tensors)
        found = function(*tensors)
        sum((each * grad).sum() for each, grad in zip(found, grads, strict=True)).backward()
        return [*(each.detach() for each in found), *(t.grad for t in tensors)]

    def ours(h, w):
        return po.token_logps(h, w, labels, cu_seqlens, chunk=chunk, outputs=names, **options)

    def torchs(h, w):
        found = oracle.token_outputs(h, w, labels, cu_seqlens, **options)
        return [found[name] for name in names]

    exact = results(torchs, hidden.double(), weight.double())
    for each in zip(results(ours, hidden, weight), results(torchs, hidden, weight), exact, strict=True):
        assert_error_within(*each, floor=8 * torch.finfo(torch.float32).eps * each[2].abs().max().item())
