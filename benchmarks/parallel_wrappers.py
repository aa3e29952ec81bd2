"""A model for training on several GPUs, as docs/parallel.md says to set it: what bench_parallel.py compares."""

import functools
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrapped_by_ddp(model, device):
    ids = [torch.cuda.current_device()] if device == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
    )


def wrapped_by_fsdp2(model, device, reshard=True):
    mesh, layers = init_device_mesh(device, (dist.get_world_size(),)), model.model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module, following in itertools.pairwise([model, *layers]):
        module.set_modules_to_forward_prefetch([following])
    for module, following in itertools.pairwise([model, *reversed(layers)]):
        module.set_modules_to_backward_prefetch([following])
    return model


WRAPPERS = {
    "one rank": lambda model, _: model,
    "DDP": wrapped_by_ddp,
    "FSDP2": wrapped_by_fsdp2,
    "FSDP2, layers not resharded": functools.partial(wrapped_by_fsdp2, reshard=False),
}
