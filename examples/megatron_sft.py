"""Trains a GPTModel of megatron-core on the same documents twice, padded and packed, without TransformerEngine.

    python examples/megatron_sft.py                                               one process on the CPU
    torchrun --nproc-per-node 2 examples/megatron_sft.py                          data parallel
    torchrun --nproc-per-node 2 examples/megatron_sft.py --context-parallel 2     documents shared by two processes
    python examples/megatron_sft.py --data chat.jsonl --device cuda

What a Megatron script changes: ``patch_rope()`` before the config is made, ``use_packing_ops(spec)``, and the batch,
which comes from ``preprocess_packed_seqs`` and ``next_token_targets``. Padded: batches of 8 documents, each padded to
the longest. Packed: rows of 2048 slots filled first-fit-decreasing, ``--rows-per-step`` of them a step, dealt to the
ranks: the losses are the same for any number of processes.
"""

import argparse
from pathlib import Path

from common.options import add_device, needs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL of chats or prompt/completion pairs; default: docstrings")
    parser.add_argument("--documents", type=int, default=512, help="at most this many documents")
    parser.add_argument("--capacity", type=int, default=2048, help="slots of a packed row")
    parser.add_argument("--batch-size", type=int, default=8, help="documents of a padded batch")
    parser.add_argument("--rows-per-step", type=int, default=2, help="packed rows of a step, dealt to the ranks")
    parser.add_argument("--context-parallel", type=int, default=1, help="processes that share a row")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo_megatron_DEVICE.json, .png")
    return parser.parse_args()


if __name__ == "__main__":
    needs("megatron.core", "matplotlib", "rich", options=parse_arguments)

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common.report_packed import save_report
from common.runs import Run, groups_of, peak_mib
from common.text_data import IGNORE, VOCAB_SIZE, Document, load_documents
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from rich.progress import track

from packing_ops.integrations.megatron.data import next_token_targets, preprocess_packed_seqs
from packing_ops.integrations.megatron.rope import patch_rope
from packing_ops.integrations.megatron.spec import use_packing_ops


@dataclass
class Batch:
    """This rank's part of some documents: tensors [1, total / context_parallel], or [batch, seqlen] without packing."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    packed_seq_params: PackedSeqParams | None


def batch_of(documents: list[Document], arguments, *, packed: bool) -> Batch:
    """Rows padded on the right; packed by their mask, or as they are, padding and all."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([d.input_ids for d in documents], batch_first=True).to(arguments.device)
    labels = pad([d.labels for d in documents], batch_first=True, padding_value=IGNORE).to(arguments.device)
    lengths = torch.tensor([len(d) for d in documents], device=arguments.device)
    mask = torch.arange(ids.shape[1], device=arguments.device) < lengths[:, None]
    if not packed:
        mask = torch.ones_like(mask)
    cp_size, cp_rank = arguments.context_parallel, parallel_state.get_context_parallel_rank()
    row, params = preprocess_packed_seqs(ids, mask, cp_size=cp_size, cp_rank=cp_rank)
    total = row.shape[1] * cp_size
    targets, loss_mask = next_token_targets(labels, params, mask, cp_size=cp_size, cp_rank=cp_rank, total=total)
    if packed or cp_size > 1:
        return Batch(row, targets, loss_mask, params)
    return Batch(*(t.view(ids.shape) for t in (row, targets, loss_mask)), packed_seq_params=None)


def new_model(arguments) -> GPTModel:
    torch.manual_seed(arguments.seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=192,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=True,
        context_parallel_size=arguments.context_parallel,
        use_cpu_initialization=True,
        # What needs Apex or TransformerEngine is off.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        use_packing_ops(get_gpt_layer_local_spec()),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=arguments.capacity,
        position_embedding_type="rope",
    )
    return model.to(arguments.device)


def summed_loss(model: GPTModel, batch: Batch) -> torch.Tensor:
    """Over this rank's target tokens. Positions come with the rotary embedding, the mask with the core attention."""
    losses = model(
        batch.input_ids, None, None, labels=batch.targets, packed_seq_params=batch.packed_seq_params
    )  # [1, total / context_parallel]
    return (losses * batch.loss_mask).sum()


def summed_over_ranks(*values: float | torch.Tensor) -> list[float]:
    total = torch.stack([torch.as_tensor(value, dtype=torch.float64).cpu() for value in values])
    if dist.get_backend() == "nccl":
        total = total.cuda()
    dist.all_reduce(total)
    return total.tolist()


def step(model: GPTModel, documents: list[list[Document]], arguments, *, packed: bool) -> tuple[float, int]:
    """Gradients of one step's documents, dealt to the ranks in lots; the loss of all ranks and the slots they
    filled.
    """
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = documents[rank::ranks]
    # A rank that got none goes along with another's, for nothing: the others wait for it.
    batch = batch_of([d for lot in mine or documents[:1] for d in lot], arguments, packed=packed)
    loss = summed_loss(model, batch) * bool(mine)
    loss.backward()
    loss, targets, slots = summed_over_ranks(
        loss.detach(), batch.loss_mask.sum() * bool(mine), batch.input_ids.numel() * bool(mine)
    )
    for parameter in model.parameters():  # megatron-core's DistributedDataParallel does it in buckets
        dist.all_reduce(parameter.grad)
        parameter.grad /= targets
    return loss / targets, int(slots)


def lots_of(mode: str, lengths: list[int], arguments) -> list[list[list[int]]]:
    """The documents of every step, in lots that stay together: one document padded, one row packed."""
    groups = groups_of(mode, lengths, arguments)
    if mode == "padded":
        return [[[i] for i in group] for group in groups]
    return [groups[i : i + arguments.rows_per_step] for i in range(0, len(groups), arguments.rows_per_step)]


def train(mode: str, documents: list[Document], arguments) -> Run:
    """One pass over the documents."""
    steps = [
        [[documents[i] for i in lot] for lot in lots] for lots in lots_of(mode, [len(d) for d in documents], arguments)
    ]
    packed = mode == "packed"
    model = new_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step(model, steps[0], arguments, packed=packed)  # warm-up
    optimizer.zero_grad()
    run = Run(mode)
    start = time.perf_counter()
    for lots in track(steps, f"{mode:>7}", disable=dist.get_rank() > 0):
        loss, slots = step(model, lots, arguments, packed=packed)
        optimizer.step()
        optimizer.zero_grad()
        run.steps += 1
        run.real_tokens += sum(len(d) for lot in lots for d in lot)
        run.slots += slots
        run.losses.append(loss)
        run.tokens_seen.append(run.real_tokens)
        run.seconds_seen.append(time.perf_counter() - start)
    run.seconds = time.perf_counter() - start
    run.peak_mib = peak_mib(arguments.device)
    return run


def first_step_losses(documents: list[Document], arguments) -> dict[str, float]:
    """The same 8 documents padded, packed, and one at a time: one number, normalised by target tokens."""
    model, losses = new_model(arguments), {}
    cases = {
        "padded": ([documents], False),
        "packed": ([documents], True),
        "unpacked": ([[document] for document in documents], False),
    }
    for name, (batches, packed) in cases.items():
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in (batch_of(each, arguments, packed=packed) for each in batches):
            with torch.no_grad():
                sums += torch.stack([summed_loss(model, batch), batch.loss_mask.sum()]).cpu()
        loss, targets = summed_over_ranks(*sums)
        losses[name] = loss / targets
    return losses


def start_processes(arguments) -> None:
    """This process's place among those that torchrun started, or alone."""
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.cuda.current_device = lambda: "cpu"  # megatron-core asks where its tensors shall be
    alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)
    if dist.get_world_size() % arguments.context_parallel:
        raise SystemExit(
            f"--context-parallel: expected a divisor of {dist.get_world_size()} processes, "
            f"got {arguments.context_parallel}"
        )
    parallel_state.initialize_model_parallel(context_parallel_size=arguments.context_parallel)


def main():
    arguments = parse_arguments()
    start_processes(arguments)
    patch_rope()
    documents, cut = load_documents(arguments.data, arguments.documents, arguments.capacity)
    lengths = [len(d) for d in documents]
    losses = first_step_losses(documents[: arguments.batch_size], arguments)
    # Packed first: the peak of a process only grows.
    packed, padded = (train(mode, documents, arguments) for mode in ("packed", "padded"))
    if dist.get_rank() == 0:
        data_parallel = parallel_state.get_data_parallel_world_size()
        name = f"demo_megatron_{arguments.device}"
        if dist.get_world_size() > 1:
            name += f"_dp{data_parallel}_cp{arguments.context_parallel}"
        more = {
            "megatron_core": megatron_version,
            "data_parallel": data_parallel,
            "context_parallel": arguments.context_parallel,
        }
        save_report(arguments.out / name, lengths, cut, arguments, [padded, packed], losses, **more)
        print(f"one document at a time: first-step loss {losses['unpacked']:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
