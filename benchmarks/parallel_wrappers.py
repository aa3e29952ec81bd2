"""A model for training on several GPUs, as docs/parallel.md says to set it: what bench_parallel.py compares."""

import functools
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrapped_by_ddp(model, device, bucket_mib=None, blocks=0):
    """blocks: of NCCL's kernels, at most. The backward beside them has the other multiprocessors."""
    ids, group = [torch.cuda.current_device()] if device == "cuda" else None, None
    if blocks and dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = blocks
        group = dist.new_group(pg_options=options)
    return DistributedDataParallel(
        model, device_ids=ids, process_group=group, bucket_cap_mb=bucket_mib, broadcast_buffers=False,
        gradient_as_bucket_view=True, static_graph=True,
    )  # fmt: skip


def wrapped_by_fsdp2(model, device, reshard=True, together=1):
    """Shards so many layers together: with more there are fewer and larger collectives, and less for the host to do.
    Float32 weights compute in bfloat16.
    """
    mixed = device == "cuda" and next(model.parameters()).dtype == torch.float32
    dtypes = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    mesh, layers = init_device_mesh(device, (dist.get_world_size(),)), list(model.model.layers)
    units = [layers[first : first + together] for first in range(0, len(layers), together)]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=dtypes, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=dtypes, reshard_after_forward=False)
    firsts = [unit[0] for unit in units]
    for module, following in itertools.pairwise([model, *firsts]):
        module.set_modules_to_forward_prefetch([following])
    for module, following in itertools.pairwise([model, *reversed(firsts)]):
        module.set_modules_to_backward_prefetch([following])
    return model


WRAPPERS = {
    "one rank": lambda model, _: model,
    "DDP": wrapped_by_ddp,
    "DDP, buckets of 100 MiB": functools.partial(wrapped_by_ddp, bucket_mib=100),
    "DDP, NCCL on 8 blocks": functools.partial(wrapped_by_ddp, blocks=8),
    "FSDP2": wrapped_by_fsdp2,
    "FSDP2, layers not resharded": functools.partial(wrapped_by_fsdp2, reshard=False),
    "FSDP2, 7 layers together": functools.partial(wrapped_by_fsdp2, together=7),
    "FSDP2, 7 layers together, not resharded": functools.partial(wrapped_by_fsdp2, reshard=False, together=7),
}
