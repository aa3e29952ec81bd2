"""Training steps of TRL's SFTTrainer: python benchmarks/bench_trl.py [--only NAME ...] [--repeats 3] [--list]

On several GPUs: torchrun --standalone --nproc-per-node 2 benchmarks/bench_trl.py. It measures the cases of as many
ranks as it is started with. accelerate wraps the model, rank 0 writes trl_ranks_cuda.csv, and what fails on a rank
ends them all.

Qwen3's shapes. Weights are random and float32, as SFTTrainer loads a model that it gets by name. bf16=True
(autocast) and gradient checkpointing are TRL's defaults, and so is every setting that settings_of does not name. No
case cuts a document. ours: patch_pack_dataset(), packing=True, then apply_packing_ops(trainer.model). LoRA: adapters of
rank 16 on every linear layer, of bfloat16 weights.

sdpa: packed rows with the attention that a model has by default. The mask of its documents is made by transformers.
sorted: padded batches of a data set that is sorted by length. transformers' "group_by_length" comes near it in large
data sets, and sorts only 32 documents at a time of so few.

A repeat trains a new model by trainer.train(). The first epoch warms up, and the others are timed, 3 of padded batches,
of SDPA and of 8B, 10 of other rows: steps of the optimizer, the trainer's batches, all that it does beside. Tokens are
those of an epoch's documents, without padding; peak memory is rank 0's.
Cases take turns, so that the repeats of each are apart; each repeat is a row of the CSV, written as soon as it is
measured. A case that fails has its error in the place of a time and is not repeated. After --limit seconds no repeat
starts, and a case that none was started of keeps the CSV's rows.
Needs trl and datasets, and downloads nothing.
"""

import argparse
import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from unittest import mock

import datasets
import peft
import torch
import torch.distributed as dist
import transformers
import trl
from bench_e2e import release
from bench_whole import setting_of
from harness import bench_parser, measured_on, write_csv
from result_rows import rows_before, with_row
from tokenizers import Tokenizer, models
from whole_cases import ATTENTION, ERROR, Case, add_options, chosen
from whole_model import documents, random_model, shape_of, stock_modules

from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops, revert_registration
from packing_ops.integrations.trl import patch_pack_dataset, revert_pack_dataset


def _case(provider: str, row: int = 16_384, model: str = "Qwen3-0.6B", **more) -> Case:
    return Case("trl", model, provider, row, tokens=65_536, **{"compiled": False, "checkpointing": "full", **more})


CASES = [
    _case("padded", 0),
    _case("sorted", 0),
    *(_case(provider, 0, batch=32) for provider in ("padded", "sorted")),
    *(_case("sdpa", checkpointing=kept) for kept in ("full", "")),
    _case("fa2"),
    _case("liger"),
    _case("ours"),
    *(_case(provider, compiled=True) for provider in ("fa2", "liger", "ours")),
    *(_case(provider, model="Qwen3-8B", lora=True) for provider in ("fa2", "liger", "ours")),
    *(_case(provider, model="Qwen3-8B", lora=True, compiled=True) for provider in ("fa2", "liger", "ours")),
    *(_case(provider, checkpointing="") for provider in ("fa2", "liger", "ours")),
    *(_case(provider, compiled=True, checkpointing="") for provider in ("fa2", "liger", "ours")),
    *(_case(provider, wrapper="DDP", ranks=2) for provider in ("fa2", "liger", "ours")),
    *(_case(provider, wrapper="DDP", ranks=2, compiled=True) for provider in ("fa2", "ours")),
    *(_case(provider, model="Qwen3-8B", wrapper="FSDP2", ranks=2) for provider in ("fa2", "liger", "ours")),
]
ADAPTERS = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
FIGURES = ("tokens_per_second_a_gpu", "peak_gib", "step_ms", "steps", "epochs", "loss", "warm_up_s", "tokens", "error")


def epochs_of(case: Case) -> int:
    """How many are trained. The first warms up."""
    return 11 if case.row and case.model == "Qwen3-0.6B" and case.provider != "sdpa" else 4


class Clock(transformers.TrainerCallback):
    """Times the epochs after the first."""

    def __init__(self, device: str, epochs: int):
        self.device, self.last, self.epochs, self.times = device, epochs, 0, []

    def now(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def on_train_begin(self, *_, **__):
        self.now()

    def on_epoch_begin(self, args, state, control, **_):
        self.epochs += 1
        if self.epochs == 2:
            self.first = state.global_step
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.now()

    def on_epoch_end(self, args, state, control, **_):
        if self.epochs == self.last:
            self.now()
            self.steps = (state.global_step - self.first) // (self.last - 1)


def settings_of(case: Case, device: str, folder: str) -> trl.SFTConfig:
    packed = {"packing": True} if case.row else {}
    full, sharded = bool(case.checkpointing), case.wrapper == "FSDP2"
    fsdp = {"fsdp": True, "fsdp_config": {"activation_checkpointing": full}}  # of FSDP2, each layer
    return trl.SFTConfig(
        folder, max_length=case.row or None, num_train_epochs=epochs_of(case),
        per_device_train_batch_size=1 if case.row else case.batch, **packed,
        **({} if full and not sharded else {"gradient_checkpointing": False}),
        **(fsdp if sharded else {}),
        **({"use_liger_kernel": True} if case.provider == "liger" else {}),
        **({"train_sampling_strategy": "sequential"} if case.provider == "sorted" else {}),
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, use_cpu=device == "cpu",
    )  # fmt: skip


@contextlib.contextmanager
def trainer_of(case: Case, device: str, tiny: bool):
    """The trainer as a user sets it up; what was changed outside of its model is undone in the end."""
    shape = shape_of(case, tiny)
    rows = [document.tolist() for document in documents(case, shape["vocab_size"])]
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>"))  # documents are token ids: nothing is tokenized
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>")
    with contextlib.ExitStack() as undo:
        undo.enter_context(stock_modules())
        undo.enter_context(mock.patch.dict(os.environ))  # transformers says there how accelerate wraps a model
        model = random_model(shape, ATTENTION[case.provider], device, torch.bfloat16 if case.lora else torch.float32)
        if case.provider == "ours":
            undo.callback(revert_pack_dataset)
            patch_pack_dataset()
        trainer = trl.SFTTrainer(
            model,
            settings_of(case, device, undo.enter_context(tempfile.TemporaryDirectory())),
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer,
            peft_config=ADAPTERS if case.lora else None,
        )
        if case.provider == "ours":
            undo.callback(revert_registration)
            undo.callback(revert_packing_ops, trainer.model)
            print(apply_packing_ops(trainer.model), flush=True)
        compile_layers(trainer.model, case, device)
        yield trainer


def compile_layers(model: torch.nn.Module, case: Case, device: str) -> None:
    for layer in model.get_decoder().layers if case.compiled else ():
        layer.compile(backend="inductor" if device == "cuda" else "aot_eager")


def measured(case: Case, device: str, tiny: bool) -> dict:
    """What the CSV has of a repeat beside its setting."""
    clock = Clock(device, epochs_of(case))
    with trainer_of(case, device, tiny) as trainer:
        trainer.add_callback(clock)
        loss = trainer.train().training_loss
        tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    return timed(clock, tokens, case.ranks) | {"loss": f"{loss:.4f}"}


def timed(clock: Clock, tokens: int, ranks: int = 1) -> dict:
    """The figures of a training that a clock has timed. tokens: of an epoch."""
    begin, warm, end = clock.times
    epoch = (end - warm) / (clock.last - 1)
    peak = torch.cuda.max_memory_allocated() / 2**30 if clock.device == "cuda" else 0.0
    return {
        "tokens_per_second_a_gpu": f"{tokens / epoch / ranks:.0f}", "peak_gib": f"{peak:.1f}",
        "step_ms": f"{epoch / clock.steps * 1e3:.1f}", "steps": clock.steps, "epochs": clock.last - 1,
        "warm_up_s": f"{warm - begin:.1f}", "tokens": tokens,
    }  # fmt: skip


def late(deadline: float, device: str) -> bool:
    """Whether the time is over, on any rank."""
    found = torch.tensor(float(time.perf_counter() > deadline), device=device)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def main():
    parser = bench_parser(__doc__)
    add_turns(parser)
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    named = chosen(parser, arguments, CASES)
    cases = [case for case in named if case.ranks == ranks]
    if named and not cases:
        parser.error(f"--only: expected a case of {ranks} ranks, got {named[0].name!r}: start it by torchrun")
    if arguments.device == "cuda" and ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    stem = "trl" if ranks == 1 else "trl_ranks"
    take_turns(cases, arguments, stem, measured, FIGURES)
    if dist.is_initialized():
        dist.destroy_process_group()


def add_turns(parser: argparse.ArgumentParser) -> None:
    """The options of take_turns."""
    add_options(parser, repeats=3)
    parser.add_argument("--first", type=int, default=1, help="number of the first repeat: 4 keeps three of another run")


def take_turns(
    cases: list[Case],
    arguments: argparse.Namespace,
    stem: str,
    measured: Callable[[Case, str, bool], dict],
    figures: tuple[str, ...],
) -> None:
    """Measure the repeats of cases in turns. Rank 0 writes the rows."""
    device, deadline = arguments.device, time.perf_counter() + arguments.limit
    ranks, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    path = arguments.out / f"{stem}_{device}.csv"
    rows = rows_before(path)
    where = measured_on(device) | {"transformers": transformers.__version__, "trl": trl.__version__}
    datasets.disable_progress_bars()
    failed = set()
    for repeat in range(arguments.first, arguments.first + arguments.repeats):
        for case in cases:
            if case in failed or late(deadline, device):
                print(f"{case.name}, repeat {repeat}: left out", flush=True)
                continue
            try:
                found = measured(case.small() if arguments.tiny else case, device, arguments.tiny)
            except Exception as error:  # one that cannot run here says nothing about the others
                if ranks > 1:  # the other ranks wait
                    raise
                traceback.print_exc()
                found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:ERROR]}
                failed.add(case)
            if first:
                weights = "bfloat16" if case.lora else "float32"
                setting = setting_of(case) | {"fused_loss": "TRL", "weights": weights, "repeat": repeat}
                rows = with_row(rows, {**setting, **dict.fromkeys(figures, ""), **found, **where})
                print(f"{case.name}, repeat {repeat}: {found}", flush=True)
                write_csv(path, rows, show=False)
            release(device)


if __name__ == "__main__":
    main()
