"""Attention in bfloat16 beside torch's in float64: python examples/first/check_attention.py"""

import sys

import torch
import torch.nn.functional as F

import packing_ops as po

device, lengths = "cuda" if torch.cuda.is_available() else "cpu", [300, 700, 24]
row = po.PackedMetadata.from_lengths(lengths, device=device)
shape = (row.total, 8, 128)
q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
print(f"{device}:", po.select_attention_backend(q, k, explain=True)[1]["kernels"])
out = po.varlen_attention(q, k, v, row)
out.float().square().sum().backward()

exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
documents = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in exact), strict=True)
expected = torch.cat([F.scaled_dot_product_attention(*each, is_causal=True) for each in documents], dim=1)
expected.square().sum().backward()
pairs = {"output": (out.detach(), expected.detach().transpose(0, 1))}
pairs |= {f"d{name}": (x.grad, y.grad) for name, x, y in zip("qkv", (q, k, v), exact, strict=True)}
errors = {name: float((ours - theirs).norm() / theirs.norm()) for name, (ours, theirs) in pairs.items()}
print("relative errors:", ", ".join(f"{name} {error:.4f}" for name, error in errors.items()))
if not all(error < 0.01 for error in errors.values()):  # what rounding to bfloat16 explains
    sys.exit("WRONG: expected errors below 0.01. Please report it with the output of python -m packing_ops info")
print("right")
