"""Trains on packed rows with transformers' Trainer in several processes: every rank has the same number of rows.

    torchrun --nproc-per-node 2 examples/ddp_sft.py
    python examples/ddp_sft.py                          one process, the same steps and the same losses

A step takes ``--rows-per-step`` packed rows, dealt to the ranks. ``bins_multiple_of`` makes the last step as full as the
others: no rank waits for one that has no row left, and no row is seen twice to make up for it.
"""

from common.options import needs, parser_of


def parse_arguments():
    parser = parser_of(__doc__, documents=128, writes="demo_ddp_PROCESSES.json")
    parser.add_argument("--capacity", type=int, default=1024, help="slots of a packed row")
    parser.add_argument("--rows-per-step", type=int, default=2, help="a multiple of the number of processes")
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", options=parse_arguments)

import os

import torch
import torch.distributed as dist
import transformers
from common.hf_setup import documents_for, new_model, one_pass, packed_inputs, swap
from common.results import save_results

import packing_ops as po


class MeasuredTrainer(transformers.Trainer):
    """A Trainer that writes down its share of the loss of every row."""

    def __init__(self, **options):
        super().__init__(**options)
        self.row_losses = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.row_losses.append(loss.item())
        return loss


def main():
    arguments = parse_arguments()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.rows_per_step % world_size:
        raise SystemExit(
            f"--rows-per-step: expected a multiple of {world_size} processes, got {arguments.rows_per_step}"
        )
    model = new_model(arguments.model, arguments.capacity, arguments.seed)
    if not arguments.stock:
        swap(model)
    documents, _ = documents_for(arguments.model, arguments.data, arguments.documents, arguments.capacity)
    packing = po.pack_sequences(
        [len(d) for d in documents], arguments.capacity, bins_multiple_of=arguments.rows_per_step
    )
    order = torch.randperm(packing.num_bins, generator=torch.Generator().manual_seed(arguments.seed))
    rows = [[documents[i] for i in packing.bins[b]] for b in order.tolist()]

    # In order: rank r takes rows r, r + world_size, ...
    settings = one_pass(
        arguments,
        str(arguments.out / "ddp_checkpoints"),
        gradient_accumulation_steps=arguments.rows_per_step // world_size,
        ddp_backend="gloo" if arguments.device == "cpu" and world_size > 1 else None,
        ddp_find_unused_parameters=False,
    )
    trainer = MeasuredTrainer(
        model=model,
        args=settings,
        train_dataset=rows,
        data_collator=lambda rows: packed_inputs(rows[0]),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()

    # A step's loss: over its rows on this rank, then the mean over ranks, as DDP takes the mean of their gradients.
    losses = torch.tensor(trainer.row_losses).view(-1, settings.gradient_accumulation_steps).sum(1)
    norm = torch.stack([p.detach().norm() for p in trainer.model.parameters()]).norm().item()
    gathered = [(trainer.state.global_step, losses, norm)]
    if world_size > 1:
        mine, gathered = gathered[0], [None] * world_size
        dist.all_gather_object(gathered, mine)
    if settings.process_index == 0:
        results = {
            "processes": world_size,
            "rows": len(rows),
            "steps_per_rank": [steps for steps, _, _ in gathered],
            "losses": torch.stack([losses for _, losses, _ in gathered]).mean(0).tolist(),
            "parameter_norm_per_rank": [norm for _, _, norm in gathered],
        }
        print(
            f"{world_size} processes, {len(rows)} rows, steps {results['steps_per_rank']}; "
            f"loss {results['losses'][0]:.3f} to {results['losses'][-1]:.3f}"
        )
        save_results(arguments.out / f"demo_ddp_{world_size}.json", results, arguments.device)
    # What DDP holds goes first: freed after its process group, it can wait forever for gloo's threads.
    del trainer, model
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
