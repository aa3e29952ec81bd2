"""Trains on packed rows with FSDP2 in several processes, and with rows that lie on several ranks: the losses are those
of one.

    torchrun --nproc-per-node 4 examples/fsdp2_sft.py                          4 rows at a time
    torchrun --nproc-per-node 4 examples/fsdp2_sft.py --sequence-parallel 2    2 rows at a time, each on 2 ranks
    torchrun --nproc-per-node 4 examples/fsdp2_sft.py --sequence-parallel 4 --device cuda
    python examples/fsdp2_sft.py                                               one process, the same steps

gloo on CPUs, NCCL on GPUs. Parameters are sharded over all ranks; gradients are reduced once per step, after its last
row.
"""

from common.options import needs, parser_of


def parse_arguments():
    parser = parser_of(__doc__, documents=96, writes="demo_fsdp2_PROCESSES_SEQUENCE.json")
    parser.add_argument("--capacity", type=int, default=1024, help="slots of a packed row, over all of its ranks")
    parser.add_argument("--rows-per-step", type=int, default=4, help="a multiple of processes / sequence-parallel")
    parser.add_argument("--sequence-parallel", type=int, default=1, metavar="RANKS", help="ranks that share each row")
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", options=parse_arguments)

import os

import torch
import torch.distributed as dist
from common.hf_setup import documents_for, new_model, packed_inputs
from common.results import save_results
from common.text_data import IGNORE
from common.training import start_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops
from packing_ops.parallel import shard_packed


def sharded_model(arguments, mesh):
    """Parameters over all ranks; attention over those that share a row."""
    model = new_model(arguments.model, arguments.capacity, arguments.seed).to(arguments.device)
    apply_packing_ops(model, sequence_group=mesh["sequence"] if arguments.sequence_parallel > 1 else None)
    everything = mesh["rows", "sequence"]._flatten("everything")
    for layer in model.model.layers:
        fully_shard(layer, mesh=everything)
    return fully_shard(model, mesh=everything)


def losses_of_steps(model, steps, arguments, mesh) -> list[float]:
    """One pass; the loss of each step is that of all its rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    world_size, groups = dist.get_world_size(), mesh["rows"].size()
    losses = []
    for rows in steps:
        targets = sum(int((d.labels[1:] != IGNORE).sum()) for row in rows for d in row)
        mine, total = rows[mesh["rows"].get_local_rank() :: groups], torch.zeros((), device=arguments.device)
        for row in mine:
            batch = to_device(packed_inputs(row), arguments.device)
            if arguments.sequence_parallel > 1:
                batch = shard_packed(batch, mesh["sequence"])
            model.set_requires_gradient_sync(row is mine[-1])
            # FSDP takes the mean over all ranks.
            loss = model(**batch, num_items_in_batch=targets / world_size).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def to_device(batch: dict, device: str) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def main():
    arguments = parse_arguments()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % arguments.sequence_parallel:
        raise SystemExit(
            f"--sequence-parallel: expected a divisor of {world_size} processes, got {arguments.sequence_parallel}"
        )
    groups = world_size // arguments.sequence_parallel
    if arguments.rows_per_step % groups:
        raise SystemExit(f"--rows-per-step: expected a multiple of {groups} groups, got {arguments.rows_per_step}")
    start_processes(arguments.device)
    mesh = init_device_mesh(
        arguments.device, (groups, arguments.sequence_parallel), mesh_dim_names=("rows", "sequence")
    )
    documents, _ = documents_for(arguments.model, arguments.data, arguments.documents, arguments.capacity)
    packing = po.pack_sequences(
        [len(d) for d in documents], arguments.capacity, bins_multiple_of=arguments.rows_per_step
    )
    rows = [[documents[i] for i in items] for items in packing.bins]
    steps = [rows[first : first + arguments.rows_per_step] for first in range(0, len(rows), arguments.rows_per_step)]
    model = sharded_model(arguments, mesh)
    losses = losses_of_steps(model, steps, arguments, mesh)
    norm = sum(p.full_tensor().detach().square().sum() for p in model.parameters()).sqrt().item()
    if dist.get_rank() == 0:
        shared = arguments.sequence_parallel
        print(f"{world_size} processes, {shared} a row, {len(rows)} rows; loss {losses[0]:.3f} to {losses[-1]:.3f}")
        results = {"processes": world_size, "sequence_parallel": shared, "losses": losses, "parameter_norm": norm}
        save_results(arguments.out / f"demo_fsdp2_{world_size}_{shared}.json", results, arguments.device)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
