"""What a plain training loop needs beside its steps: processes, checkpoints in layers, a figure of how busy the GPU
is.
"""

import functools
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import packing_ops as po

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16 operations a second


def start_processes(device: str) -> None:
    """As torchrun says, or this process alone."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def put_checkpoint(layer, **options):
    """Inside of the layer, where it is in the graph of a compiled one."""
    stock = layer.forward

    def forward(*args, **kwargs):
        return checkpoint(functools.partial(stock, **kwargs), *args, use_reentrant=False, **options)

    layer.forward = forward


def put_checkpoints(layers, model, how: str) -> None:
    """ "full", "auto" or GiB of a checkpoint_policy."""
    budget = how if how in ("full", "auto") else int(float(how) * 2**30)
    options = {} if how == "full" else {"context_fn": po.checkpoint_policy(model, budget)}
    for layer in layers:
        put_checkpoint(layer, **options)


def over_ranks(model, layers, wrapper: str, mixed: bool):
    """Wrap the model by "ddp" or "fsdp2". mixed: its weights stay in float32 and compute in bfloat16."""
    if wrapper == "ddp":
        if mixed:
            device = next(model.parameters()).device.type
            model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    # Inputs are not cast: num_items_in_batch would be rounded to bfloat16.
    dtypes = (
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False} if mixed else {}
    )
    for layer in layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**dtypes))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**dtypes))


def cosine(step: int, first: int, steps: int) -> float:
    """Share of the learning rate: it rises over the first steps, then falls to a tenth."""
    rise = min(1.0, (step + 1) / max(1, first))
    fall = max(0, step - first) / max(1, steps - first)
    return rise * (0.1 + 0.45 * (1 + math.cos(math.pi * fall)))


def mfu(model, batches: list[dict], seconds: float, frozen: bool) -> dict[str, float]:
    """{"mfu": ...} of forward and backward on this rank, where the peak of its GPU is known: products, and attention's.

    frozen: most parameters have no gradients.
    """
    name = torch.cuda.get_device_name() if batches[0]["input_ids"].is_cuda else ""
    peak = next((peak for gpu, peak in PEAKS.items() if gpu in name), None)
    if peak is None:
        return {}
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    squares = sum(batch["cu_seq_lens_q"].diff().double().square().sum().item() for batch in batches)
    multiplied = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim * squares
    return {"mfu": ((4 if frozen else 6) * multiplied * tokens + attention) / seconds / peak}
