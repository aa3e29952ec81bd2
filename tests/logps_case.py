"""A packed row for the tests of packing_ops.logps."""

import torch
from helpers import cu_seqlens_of

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
