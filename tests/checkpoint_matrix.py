"""Gradient checkpointing with compiled layers, in every setting of a training: loss and gradients against eager ones.

On a GPU, or without one on the CPU:

    python tests/checkpoint_matrix.py [--part 1/8] [--only llama layers] [--out table.md] [--all]

On several GPUs, next to a wrapper:

    torchrun --standalone --nproc-per-node 2 tests/checkpoint_matrix.py --around fsdp2 [--out table.md]

Several parts may run side by side on the same GPUs, each with its --out: --standalone gives each torchrun a port.
--seconds 200 begins no other setting after that many; those that are left are counted as not run. The table is written
before and after each setting: the one in progress is "unfinished". --done table.md leaves out those that earlier tables
finished.

A row of the table is one setting, with what resulted: "same bits", "as exact" (another order of sums: against float64
the error is at most twice that of eager code), "refused" with the first words of the error, before anything is trained,
"not ours" with an error that the model raises without packing_ops too, or what is wrong, on any rank. Below it are the
counts, and each refusal by its text. The exit status is 1 where a row is wrong. Where one rank fails and another one
waits for it, all end after WAIT.
"""

import argparse
import datetime
import functools
import importlib.util
import itertools
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# Before torch: the compiler's workers would import torch for a few kernels, in each process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import transformers  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops  # noqa: E402


class Setting(NamedTuple):
    """One of each axis of AXES."""

    family: str
    compiled: str
    checkpointing: str
    documents: str
    loss: str
    trained: str
    swapped: str

    def __str__(self):
        return " | ".join(self)


AXES = {
    "family": ["llama", "moe", "hybrid", "vlm"],
    "compiled": ["eager", "layers", "layers dynamic", "model"],
    # around: torch's checkpoint around each layer, where transformers up to 5.22 puts it; later ones put another
    # inside
    "checkpointing": ["none", "reentrant", "non-reentrant", "selective", "policy", "around"],
    "documents": ["position_ids", "cu_seq_lens_q", "numbered mask"],
    "loss": ["stock loss", "fused loss"],
    "trained": ["full", "LoRA"],
    "swapped": ["plain", "rms_norm", "invariant"],
}
SWAPPED = {"plain": {}, "rms_norm": {"rms_norm": True}, "invariant": {"invariant": True}}
LENGTHS = [[5, 9, 2, 16], [30], [7] * 4]  # of the documents of each step: other numbers, other totals
WAIT = datetime.timedelta(seconds=180)  # of a rank for another one, which may still compile
UNFINISHED = "unfinished"

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# All experts of a token: a router's choice would differ by a rounding.
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4, "experts_implementation": "batched_mm"}
_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}


def config_of(family):
    if family == "llama":
        return transformers.LlamaConfig(**_SIZES)
    if family == "moe":
        return transformers.MixtralConfig(**_SIZES, **_EXPERTS)
    if family == "hybrid":
        return transformers.Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    axes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {**_SIZES, "rope_parameters": axes}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=_VISION, tie_word_embeddings=False)


def model_of(family, device, dtype):
    """The same weights for every setting, in train mode."""
    config = config_of(family)
    text = config.get_text_config()
    text.use_cache = config.use_cache = False
    auto = transformers.AutoModelForImageTextToText if family == "vlm" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(device, dtype).train()


def layers_of(model):
    return next(module for name, module in model.named_modules() if name.endswith("layers") and "visual" not in name)


def settings(every=False):
    """Of the first four axes everything, each time with one of the twelve combinations of the others in turn; or all of
    them.
    """
    axes = list(AXES.values())
    if every:
        return [Setting(*each) for each in itertools.product(*axes)]
    others, found = list(itertools.product(*axes[4:])), []
    for family, compiled in itertools.product(*axes[:2]):
        turns = itertools.cycle(random.Random(f"{family} {compiled}").sample(others, len(others)))
        found += [Setting(family, compiled, *each, *next(turns)) for each in itertools.product(*axes[2:4])]
    return found


# --- a training of one setting ---


def selective():
    """Products are kept, everything else is computed again."""

    def policy(_, function, *args, **kwargs):
        kept = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def prepared(model, setting, backend, ours=True):
    """The model as a user sets it up: swapped, with adapters, compiled, checkpointed."""
    if ours:
        fused_loss = setting.loss == "fused loss"
        assert apply_packing_ops(model, fused_loss=fused_loss, strict=True, **SWAPPED[setting.swapped]).attention
    if setting.trained == "LoRA":
        import peft

        targets = ["q_proj", "v_proj", "in_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        model.enable_input_require_grads()  # of reentrant checkpoints
    layers = layers_of(model)
    if setting.compiled.startswith("layers"):
        for layer in layers:
            layer.compile(backend=backend, dynamic=True if setting.compiled == "layers dynamic" else None)
    how = setting.checkpointing
    if how == "around":
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    elif how != "none":
        options = {"use_reentrant": how == "reentrant"}
        if how in ("selective", "policy"):
            options["context_fn"] = selective if how == "selective" else po.checkpoint_policy(model, budget=2**20)
        model.gradient_checkpointing_enable(options)
    if setting.compiled == "model":
        model.compile(backend=backend)
    return model


def batch_of(lengths, documents, seed, device):
    generator = torch.Generator().manual_seed(seed)
    metadata = po.PackedMetadata.from_lengths(lengths)
    ids = torch.randint(3, 90, (1, metadata.total), generator=generator)
    labels = ids.masked_fill(metadata.position_ids[None] == 0, -100)
    batch = {"input_ids": ids, "labels": labels}
    if documents == "numbered mask":
        batch["attention_mask"] = metadata.seq_idx.long()[None] + 1
    else:
        batch["position_ids"] = metadata.position_ids[None].long()
    if documents == "cu_seq_lens_q":
        batch |= metadata.to_transformers()
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def in_a_thread(function):
    """As some loops run their backward: what a forward left in its thread is not there."""
    raised, gpu = [], torch.cuda.current_device() if torch.cuda.is_available() else None

    def run():
        try:
            if gpu is not None:  # a new thread would use the first one
                torch.cuda.set_device(gpu)
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def trained(setting, device, dtype, backend="inductor", around=None, ours=True):
    """(losses of the steps, gradients by name), in float64 on the CPU; the backward of the second step in another
    thread.
    """
    torch._dynamo.reset()
    # Beside DDP torch compiles some layers in parts, which fails under a checkpoint's contexts: docs/parallel-cases.md
    torch._dynamo.config.optimize_ddp = setting.checkpointing not in ("selective", "policy")
    torch.fx.traceback.current_meta.clear()  # a compilation that failed leaves its marks
    torch.manual_seed(1)
    model = prepared(model_of(setting.family, device, dtype), setting, backend, ours)
    outer = wrapped(model, around)
    try:
        losses = []
        for step, lengths in enumerate(LENGTHS):
            loss = outer(**batch_of(lengths, setting.documents, step, device)).loss
            (in_a_thread if step == 1 and around is None else lambda call: call())(loss.backward)
            losses.append(loss.detach().double().cpu())
        gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
        return torch.stack(losses), {
            name.replace("_checkpoint_wrapped_module.", ""): each for name, each in gradients.items()
        }
    finally:
        torch._dynamo.config.optimize_ddp = True
        revert_packing_ops(model)


def wrapped(model, around):
    if around == "ddp":
        for name, parameter in model.named_parameters():
            if "visual" in name:  # no batch has images, and DDP waits for all gradients
                parameter.requires_grad_(False)
        return torch.nn.parallel.DistributedDataParallel(model)
    if around == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers_of(model):
            fully_shard(layer)
        return fully_shard(model)
    return model


def whole(gradient):
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return gradient.double().cpu()


# --- against eager code ---


@functools.cache
def expected(setting, device, dtype):
    return trained(setting._replace(compiled="eager", checkpointing="none"), device, dtype)


def exact(setting, device):
    """In float64, of the plain model: what swaps change is a rounding."""
    return expected(setting._replace(loss="stock loss", swapped="plain"), device, torch.float64)


def error_of(found, wanted):
    """Of all gradients and losses, relative to their norm."""
    values = [
        torch.cat([losses, *(gradients[name].flatten() for name in sorted(wanted[1]))])
        for losses, gradients in (found, wanted)
    ]
    return ((values[0] - values[1]).norm() / values[1].norm()).item()


def verdict(setting, device, dtype, backend="inductor", around=None, host=None):
    """What the last column of a setting's row says; host: the group of the ranks for values of the CPU."""
    said = kind = None
    try:
        found = trained(setting, device, dtype, backend, around)
    except Exception as error:
        said, kind = why(error), type(error).__name__
    each = on_ranks((kind, said), host)
    if len({kind for kind, _ in each}) > 1:  # nobody waits for a rank that has left
        return "WRONG: " + ", ".join(f"rank {rank}: {said or 'trained'}" for rank, (_, said) in enumerate(each))
    if said is not None:
        if said.startswith("refused: "):
            return said
        try:
            trained(setting, device, dtype, backend, around, ours=False)
        except Exception as stock:
            return f"not ours: {said}" if type(stock).__name__ == kind else f"WRONG: {said}"
        return f"WRONG: {said}"
    wanted = expected(setting, device, dtype)
    if found[1].keys() != wanted[1].keys():
        return f"WRONG: gradients of {sorted(found[1].keys() ^ wanted[1].keys())[:3]} are missing"
    others = [name for name, each in wanted[1].items() if not torch.equal(found[1][name], each)]
    if not others and torch.equal(found[0], wanted[0]):
        return "same bits"
    errors = [error_of(each, exact(setting, device)) for each in (found, wanted)]
    may_differ = setting.compiled != "eager" or all(".experts." in name for name in others)  # transformers' atomics
    if may_differ and errors[0] <= 2 * errors[1]:
        return "as exact"
    return f"WRONG: error {errors[0]:.2g}, eager code has {errors[1]:.2g}"


def why(error):
    """What a row says of an error: "refused: ..." of one that names what is wanted, else its class and text."""
    first = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, (NotImplementedError, ValueError)):
        return f"refused: {first[:110]}"
    if first.startswith("NotImplementedError: apply_packing_ops("):  # which torch.compile has wrapped
        return f"refused: {first[21:131]}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# --- ranks: what the host knows goes over gloo, also where NCCL waits for a rank ---


def on_ranks(value, host):
    """The values of all ranks."""
    values = [value] * (dist.get_world_size(host) if host else 1)
    if host:
        dist.all_gather_object(values, value, group=host)
    return values


def worst(verdicts):
    """One verdict of those of all ranks."""
    order = ("WRONG", "not ours", "refused", "as exact", "same bits")
    if any(each.startswith("WRONG") for each in verdicts) and len({*verdicts}) > 1:
        return "WRONG: " + ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(verdicts))
    return min(verdicts, key=lambda each: order.index(each.partition(":")[0]))


def is_over(options, start, host):
    """Whether the time is; all ranks agree, by the clock of the first."""
    return on_ranks(time.monotonic() - start > options.seconds, host)[0]


def summary(found, chosen):
    """How many settings ended how, then what was refused, by its text."""
    kinds = Counter(said.partition(":")[0] for said in found)
    told = Counter(said for said in found if ":" in said)
    counts = [f"{kinds[kind]} {kind}" for kind in ("same bits", "as exact", "refused", "not ours", "WRONG")]
    counts += [f"{chosen - len(found)} not run"] if chosen > len(found) else []
    return [f"{chosen} settings: {', '.join(counts)}", *(f"- {count} {said}" for said, count in told.most_common())]


def finished(tables):
    """The settings that tables have a result of, as text."""
    lines = [line for path in tables for line in path.read_text().splitlines()]
    rows = [line.removeprefix("| ").split(" | ") for line in lines if not line.endswith(f"| {UNFINISHED} |")]
    return {" | ".join(row[: len(AXES)]) for row in rows}


def written(path, lines):
    """Write a table in place of the one before: a process that is ended leaves one or the other."""
    if path:
        part = path.with_name(f"{path.name}.part")
        part.write_text("\n".join(lines) + "\n")
        part.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="i/n: every nth setting from the ith on, for a process each")
    parser.add_argument("--only", nargs="*", default=[], help="values that settings must have")
    parser.add_argument("--all", action="store_true", help="all combinations, not those of settings()")
    parser.add_argument("--around", choices=["ddp", "fsdp2"], help="under torchrun")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--done", type=Path, nargs="*", default=[])
    options, start = parser.parse_args(), time.monotonic()
    rank, host, device = 0, None, "cuda" if torch.cuda.is_available() else "cpu"
    if options.around:
        if device == "cuda":  # before NCCL looks
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=WAIT)
        rank, host = dist.get_rank(), dist.new_group(backend="gloo", timeout=WAIT)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    has_peft = importlib.util.find_spec("peft") is not None
    part, parts = map(int, options.part.split("/"))
    chosen = [
        each for each in settings(options.all) if {*options.only} <= {*each} and (has_peft or each.trained == "full")
    ]
    done = finished(options.done)
    chosen = [each for each in chosen if str(each) not in done][part - 1 :: parts]
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, {name}, {str(dtype)[6:]}, {options.backend}"
        + (f", beside {options.around} on {dist.get_world_size()} ranks" if options.around else "")
        + ("" if has_peft else "; LoRA is left out: there is no peft"),
        "",
        f"| {' | '.join(AXES)} | result |",
        "|---" * (len(AXES) + 1) + "|",
    ]
    found = []
    write = functools.partial(written, options.out if rank == 0 else None)
    for setting in chosen:
        if is_over(options, start, host):
            break
        write([*lines, f"| {setting} | {UNFINISHED} |", "", *summary(found, len(chosen))])
        said = verdict(setting, device, dtype, options.backend, options.around, host)
        found.append(worst(on_ranks(said, host)))
        lines.append(f"| {setting} | {found[-1]} |")
        if rank == 0:
            print(lines[-1], flush=True)
    write([*lines, "", *summary(found, len(chosen))])
    if rank == 0:
        print("\n".join(summary(found, len(chosen))))
    if options.around:
        dist.barrier(host)  # or the rank that ends first ends the others
        dist.destroy_process_group()
    return 1 if any(said.startswith("WRONG") for said in found) else 0


if __name__ == "__main__":
    sys.exit(main())
