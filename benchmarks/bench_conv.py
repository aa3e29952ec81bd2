"""python benchmarks/bench_conv.py [--device cpu|cuda]"""

import torch
from compiled_code import compiled_alone
from harness import Case, run

import packing_ops as po

WIDTH = 4


def shifted(x, weight, bias, position_ids):
    """The formula in torch: a product for each tap, with what a document does not have masked."""
    out = bias + weight[:, -1] * x
    for i in range(1, weight.shape[1]):
        rows = torch.nn.functional.pad(x[:-i], (0, 0, i, 0))
        out = out + torch.where((position_ids >= i)[:, None], rows, 0) * weight[:, -1 - i]
    return torch.nn.functional.silu(out)


def inputs_of(device, total, channels, length, dtype):
    x, dout = (torch.randn(total, channels, device=device).to(dtype) for _ in range(2))
    weight, bias = torch.randn(channels, WIDTH, device=device).to(dtype), torch.randn(channels, device=device).to(dtype)
    metadata = po.PackedMetadata.from_lengths([length] * (total // length), device=device)
    return x, weight, bias, metadata, dout, f"T={total} C={channels} W={WIDTH} documents of {length}"


def forward_case(device, *sizes):
    x, weight, bias, metadata, _, shape = inputs_of(device, *sizes)
    position_ids = metadata.position_ids
    providers = {
        "packing_ops": lambda: po.causal_conv1d(x, weight, bias, metadata, activation="silu"),
        "torch formula": lambda: shifted(x, weight, bias, position_ids),
    }
    if device == "cuda":
        compiled = compiled_alone(shifted)
        providers["torch formula, torch.compile"] = lambda: compiled(x, weight, bias, position_ids)
    return Case("forward", shape, str(sizes[-1])[6:], providers, bytes=2 * x.nbytes)


def backward_case(device, *sizes):
    x, weight, bias, metadata, dout, shape = inputs_of(device, *sizes)
    options = metadata.cu_seqlens, None, True
    providers = {
        "packing_ops": lambda: torch.ops.packing_ops.causal_conv1d_backward(dout, None, x, weight, bias, *options)
    }
    if device == "cuda":
        given = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = compiled_alone(shifted)(*given, metadata.position_ids)
        providers["torch formula, torch.compile"] = lambda: torch.autograd.grad(out, given, dout, retain_graph=True)
    return Case("backward", shape, str(sizes[-1])[6:], providers, bytes=3 * x.nbytes)


def cases(device):
    total, channels = (65_536, 8192) if device == "cuda" else (2048, 512)
    wide = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = [(total, total, wide), (total, 512, wide)]
    sizes += [(total // 2, 512, torch.float32)] if device == "cuda" else []
    return [
        case(device, tokens, channels, length, dtype)
        for tokens, length, dtype in sizes
        for case in (forward_case, backward_case)
    ]


if __name__ == "__main__":
    run("conv", cases)
