"""python benchmarks/bench_vision.py [--device cpu|cuda]

The vision tower of Qwen2.5-VL on images of mixed size, forward and backward: one call of attention and one of RoPE in
each layer, under apply_packing_ops, against transformers' loop of one SDPA call for each image, and for each window in
windowed layers.
Cases are one attention layer of either kind (its projections and its rotary embedding too), and four blocks, one of
which attends to whole images. Before anything is timed, outputs and gradients of both are compared.
"""

import random

import torch
from harness import Case, run
from transformers import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from packing_ops.integrations.transformers import apply_packing_ops

SIDES = {"cuda": (16, 24, 32, 40, 48, 64), "cpu": (8, 16)}  # patches of 14 pixels: from 224 to 896
WIDTHS = {  # of the tower
    "cuda": {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
    "cpu": {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64},
}
IMAGES = {"cuda": 64, "cpu": 4}


def grid_of(device: str) -> torch.Tensor:
    """[images, 3]: one frame each, and its rows and columns of patches."""
    draw, sides = random.Random(0), SIDES[device]
    grid = [[1, draw.choice(sides), draw.choice(sides)] for _ in range(IMAGES[device])]
    return torch.tensor(grid, device=device)


def towers(device: str) -> dict[str, torch.nn.Module]:
    """Two with the same weights."""
    config = Qwen2_5_VLVisionConfig(depth=4, fullatt_block_indexes=[3], **WIDTHS[device])
    config._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    stock = Qwen2_5_VisionTransformerPretrainedModel(config).to(device, dtype)
    ours = Qwen2_5_VisionTransformerPretrainedModel(config).to(device, dtype)
    ours.load_state_dict(stock.state_dict())
    applied = apply_packing_ops(ours)
    assert applied.vision == applied.rope == 4
    return {"packing_ops": ours, "transformers, SDPA in a loop": stock}


def trained(module, x, *args, **kwargs):
    """A call that gives (output, gradients of x, where it wants one, and of every weight)."""
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    grad = []

    def call():
        out = module(x, *args, **kwargs)
        out = out if isinstance(out, torch.Tensor) else out.last_hidden_state
        if not grad:
            torch.manual_seed(2)
            grad.append(torch.randn_like(out))
        wanted = [tensor for tensor in (x, *weights) if tensor.requires_grad]
        return out, torch.autograd.grad(out, wanted, grad[0], allow_unused=True)

    return call


def check(calls) -> None:
    """Both give the same, as far as their dtype tells."""
    (ours, our_grads), (stock, stock_grads) = (call() for call in calls)
    for found, wanted in ((ours, stock), (our_grads[0], stock_grads[0])):  # of x, or of the weights that see pixels
        apart = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert apart < 8 * torch.finfo(wanted.dtype).eps, f"results apart by {apart:.2g}"


def cases(device):
    grid, both = grid_of(device), towers(device)
    tower = both["packing_ops"]
    lengths = grid[:, 1] * grid[:, 2]
    total, patch, dtype = int(lengths.sum()), 3 * 2 * 14 * 14, next(tower.parameters()).dtype
    images = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    windows = torch.arange(
        0, total + 1, 64, device=device, dtype=torch.int32
    )  # 8 x 8 patches, of which every image is made
    angles = torch.rand(total, tower.blocks[0].attn.head_dim, device=device, dtype=dtype)
    x = torch.randn(total, tower.config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    shape, dtype_name = f"{IMAGES[device]} images T={total}", str(dtype).removeprefix("torch.")
    for kind, cu_seqlens in (("images", images), ("windows", windows)):
        calls = {
            name: trained(each.blocks[0].attn, x, cu_seqlens, position_embeddings=(angles.cos(), angles.sin()))
            for name, each in both.items()
        }
        check(calls.values())
        yield Case(f"attention layer, {kind}", shape, dtype_name, calls, runs=7)
    pixels = torch.randn(total, patch, device=device, dtype=dtype)  # training wants no gradient of them
    calls = {name: trained(each, pixels, grid_thw=grid) for name, each in both.items()}
    check(calls.values())
    yield Case("four blocks", shape, dtype_name, calls, runs=7)


if __name__ == "__main__":
    run("vision", cases)
