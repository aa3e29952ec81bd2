"""A function in several processes of one gloo group, on the CPU."""

import fresh_process
import torch
import torch.distributed
import torch.multiprocessing


def spawn(worker, world_size, folder):
    """What ``worker()`` returns in each of so many processes of one group; its exception is raised here."""
    fresh_process.start_server()
    arguments = world_size, folder, worker
    torch.multiprocessing.start_processes(_process, arguments, nprocs=world_size, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _process(rank, world_size, folder, worker):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save(worker(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
