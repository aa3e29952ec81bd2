"""A function in several processes of one group: gloo on the CPU, NCCL on GPUs."""

import contextlib
import ctypes
import datetime
import os

import torch
import torch.distributed
import torch.multiprocessing

from helpers import fresh_process


def spawn(worker, world_size, folder):
    """What ``worker()`` returns in each of that many processes of one group; its exception is raised here, behind what
    the processes have printed.

    They end without torch's teardown, in which a process of the start method "spawn" aborts now and then.
    """
    fresh_process.start_server()
    arguments = world_size, folder, worker
    try:
        torch.multiprocessing.start_processes(_process, arguments, nprocs=world_size, start_method="forkserver")
    except Exception:
        for rank in range(world_size):
            print(f"--- rank {rank} ---", *fresh_process.printed_by(folder, rank), sep="\n")
        raise
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def nccl_ranks():
    """As many as there are GPUs; two on one GPU, which NCCL takes from 2.30 on; else 1."""
    gpus = torch.cuda.device_count()
    if gpus != 1 or not torch.distributed.is_nccl_available():
        return gpus
    version = ctypes.c_int()
    with contextlib.suppress(OSError):  # torch tells the one that it was built with
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return 2 if version.value >= 23000 else 1


def spawn_on_gpus(worker, world_size, folder):
    """The same over NCCL, a GPU for each process if there are enough; not forks, which could not use them."""
    arguments = world_size, folder, worker
    torch.multiprocessing.start_processes(_gpu_process, arguments, nprocs=world_size, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _gpu_process(rank, world_size, folder, worker):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if world_size > torch.cuda.device_count():
        os.environ.update({"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"})
    store = f"file://{folder}/store"
    timeout = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("nccl", store, timeout=timeout, rank=rank, world_size=world_size)
    torch.save(worker(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _process(rank, world_size, folder, worker):
    fresh_process.print_into(folder, rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save(worker(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def message_of(call):
    """Of the exception that it must raise."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def as_launched(bf16=False):
    """Sets what torchrun sets in a process of two. accelerate takes FSDP2's arguments then, as it does on GPUs."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    rank, init = str(torch.distributed.get_rank()), AcceleratorState.__init__
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})

    def with_plugin(self, *args, fsdp_plugin=None, **options):
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            if bf16:
                fsdp_plugin.set_mixed_precision("bf16")
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_plugin
