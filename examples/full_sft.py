"""Fine-tunes a causal language model on chats, packed, on one GPU or several; an interrupted run goes on to the bit.

    torchrun --nproc-per-node 8 examples/full_sft.py --model Qwen/Qwen3-8B --data chats.jsonl --device cuda --compile \\
        --row 16384 --rows-per-step 4 --checkpointing auto --out run
    torchrun ... --resume                       the same arguments: from the newest checkpoint in the folder
    python examples/full_sft.py --model folder --data chats.jsonl --lora 16 --device cuda
    python examples/full_sft.py                 a tiny Llama on docstrings, to see that it runs

--model: a name or folder of transformers; weights are random where the folder has none. --data: lines of {"messages":
[{"role", "content"}, ...]}; what assistants say is learnt. Writes a log and checkpoints, and in the end the model or
its adapters.
"""

import argparse
from pathlib import Path

from common.options import add_device, at_least, checkpointing, needs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: a tiny Llama over bytes")
    parser.add_argument("--data", type=Path, help="default: docstrings of the standard library")
    parser.add_argument("--held-out", type=at_least(1), default=16, help="of the chats, for evaluation")
    parser.add_argument("--row", type=at_least(2), default=2048, help="tokens of a packed row; longer chats are cut")
    parser.add_argument("--rows-per-step", type=at_least(1), default=1, help="of each rank")
    parser.add_argument("--epochs", type=at_least(1), default=1)
    parser.add_argument("--wrapper", choices=["fsdp2", "ddp"], default="fsdp2")
    parser.add_argument(
        "--lora", type=at_least(0), default=0, metavar="R", help="rank of adapters on all linear layers"
    )
    parser.add_argument("--mixed", action="store_true", help="weights in float32, which compute in bfloat16")
    parser.add_argument("--compile", action="store_true", help="torch.compile of each layer")
    parser.add_argument("--checkpointing", type=checkpointing, help='"full", or a checkpoint_policy: "auto" or GiB')
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--warm-up", type=at_least(0), default=10, help="steps")
    parser.add_argument("--save-every", type=at_least(1), default=100, help="steps; evaluates too")
    parser.add_argument("--stop-after", type=at_least(1), help="ends after so many steps, as an interruption would")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo_out/full_sft"))
    add_device(parser)
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", options=parse_arguments)

import contextlib
import json
import math
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common.chats import chat_examples
from common.hf_setup import new_model
from common.training import cosine, mfu, over_ranks, put_checkpoints, start_processes
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM

import packing_ops as po
from packing_ops.data import PackedBatchSampler, PaddingFreeCollator
from packing_ops.integrations.transformers import apply_packing_ops

OF_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)

# --- the model ---


def model_of(arguments):
    """The model on its device, wrapped, and its layers' policy."""
    dtype = torch.bfloat16 if arguments.device == "cuda" and not arguments.mixed else torch.float32
    if arguments.model is None:
        model = new_model(None, arguments.row, arguments.seed)
    elif any(Path(arguments.model).glob("*.safetensors")) or not Path(arguments.model).is_dir():
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, use_cache=False)
    else:
        torch.manual_seed(arguments.seed)
        config = AutoConfig.from_pretrained(arguments.model, use_cache=False)
        with torch.device(arguments.device):  # on a GPU random weights take no time
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(arguments.device).train()
    applied = apply_packing_ops(model, fused_loss=True)
    layers, outer = model.get_decoder().layers, model
    if arguments.lora:
        import peft

        torch.manual_seed(arguments.seed)
        adapters = peft.LoraConfig(r=arguments.lora, lora_alpha=2 * arguments.lora, target_modules="all-linear")
        outer = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if arguments.checkpointing:
        put_checkpoints(layers, model, arguments.checkpointing)
    for layer in layers if arguments.compile else ():
        layer.compile()
    return over_ranks(outer, layers, arguments.wrapper, arguments.mixed), applied


# --- training ---


class Run:
    """A training and its place in the data: what a checkpoint holds."""

    def __init__(self, arguments):
        self.arguments, self.rank, self.world = arguments, dist.get_rank(), dist.get_world_size()
        examples = chat_examples(arguments.model, arguments.data, arguments.row)
        self.train, self.held_out = examples[arguments.held_out :], examples[: arguments.held_out]
        if not self.train:
            raise SystemExit(f"--held-out: expected fewer than the {len(examples)} chats, got {arguments.held_out}")
        self.sampler = PackedBatchSampler(
            [len(example["input_ids"]) for example in self.train], arguments.row, self.rank, self.world, arguments.seed,
            cost="flops", drop_last=True,
        )  # fmt: skip
        self.collate = PaddingFreeCollator(capacity=arguments.row, return_seq_idx=False)
        self.model, applied = model_of(arguments)
        self.inner = getattr(self.model, "module", self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        fused = arguments.device == "cuda"
        self.optimizer = torch.optim.AdamW(trained, lr=arguments.learning_rate, weight_decay=0.0, fused=fused)
        self.per_epoch = len(self.sampler) // arguments.rows_per_step
        self.step, self.steps = 0, self.per_epoch * arguments.epochs
        if self.steps == 0:
            raise SystemExit(f"--rows-per-step: expected at most the {len(self.sampler)} rows of a rank")
        if self.rank == 0:
            print(
                f"{applied}\n{len(self.train)} chats, {self.steps} steps of {self.world * arguments.rows_per_step} rows"
            )

    def to_device(self, examples: list[dict]) -> dict:
        batch, device = self.collate(examples), self.arguments.device
        return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}

    def train_step(self, batches: list[dict], rate: float) -> torch.Tensor:
        """The mean loss over the targets of all ranks and rows."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        targets = torch.tensor(float(sum(batch["num_targets"] for batch in batches)), device=self.arguments.device)
        dist.all_reduce(targets)
        total = torch.zeros((), device=self.arguments.device)
        for i, batch in enumerate(batches):
            last, alone = i + 1 == len(batches), contextlib.nullcontext()
            if self.arguments.wrapper == "fsdp2":
                self.model.set_requires_gradient_sync(last)
            elif not last:
                alone = self.model.no_sync()
            with alone:  # gradients are reduced with the last row, to their mean over the ranks
                loss = self.model(**batch, num_items_in_batch=targets / self.world).loss
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return total / self.world

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out loss. In training mode, in which no logits are made; there is no dropout."""
        bins = po.pack_sequences([len(each["input_ids"]) for each in self.held_out], self.arguments.row).bins
        sums = torch.zeros(2, device=self.arguments.device)
        for i in range(self.rank, math.ceil(len(bins) / self.world) * self.world, self.world):
            batch = self.to_device([self.held_out[j] for j in bins[i % len(bins)]])  # all ranks run as many
            counts = float(batch["num_targets"] * (i < len(bins)))
            sums += torch.stack([self.model(**batch).loss * counts, torch.tensor(counts, device=sums.device)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def state(self) -> dict:
        """As torch.distributed.checkpoint takes it: of adapters alone, where there are any."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=OF_TRAINED)
        done = (self.step - self.sampler.epoch * self.per_epoch) * self.arguments.rows_per_step
        return {"model": model, "optimizer": optimizer, "step": self.step, "sampler": self.sampler.state_dict(done)}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.sampler.load_state_dict(state["sampler"])  # ValueError for other data, rows or ranks
        self.step = state["step"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=OF_TRAINED,
        )  # fmt: skip

    def run(self, progress: Progress, log) -> None:
        bar = progress.add_task("training", total=self.steps, completed=self.step, said="", visible=self.rank == 0)
        last = min(self.steps, self.arguments.stop_after or self.steps)
        per_step = self.arguments.rows_per_step
        while self.step < last:
            self.sampler.set_epoch(self.step // self.per_epoch)
            rows = iter(self.sampler)
            for _ in range(self.step % self.per_epoch, self.per_epoch):
                if self.step >= last:
                    break
                start, wanted = time.perf_counter(), self.arguments
                rate = wanted.learning_rate * cosine(self.step, wanted.warm_up, self.steps)
                batches = [self.to_device([self.train[i] for i in next(rows)]) for _ in range(per_step)]
                loss = self.train_step(batches, rate).item()  # waits for the step
                seconds, self.step = time.perf_counter() - start, self.step + 1
                said = {"step": self.step, "loss": loss, "learning_rate": rate, "seconds": seconds}
                said["tokens_per_second"] = sum(b["input_ids"].numel() for b in batches) * self.world / seconds
                said |= mfu(self.inner, batches, seconds, frozen=self.arguments.lora > 0)
                if self.step % self.arguments.save_every == 0 or self.step == self.steps:
                    said["held_out_loss"] = self.evaluate()
                    dcp.save(self.state(), checkpoint_id=self.arguments.out / "checkpoints" / f"{self.step:08}")
                if self.rank == 0:
                    log.write(json.dumps(said) + "\n")
                    log.flush()
                    short = ", ".join(f"{name} {value:.4g}" for name, value in said.items() if name != "step")
                    progress.update(bar, completed=self.step, said=short)

    def save_model(self) -> None:
        """For from_pretrained: the model, or its adapters."""
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank == 0:
            self.inner.save_pretrained(self.arguments.out / "model", state_dict=whole)


def main():
    arguments = parse_arguments()
    start_processes(arguments.device)
    run = Run(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    saved = sorted((arguments.out / "checkpoints").glob("*"))
    if arguments.resume and saved:
        run.load(saved[-1])
    elif arguments.resume and run.rank == 0:
        print(f"--resume: no checkpoint in {arguments.out}, so from the first step")
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}")
    with Progress(*columns) as progress, (arguments.out / "log.jsonl").open("a") as log:
        run.run(progress, log)
    if run.step == run.steps:
        run.save_model()
    del run
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
