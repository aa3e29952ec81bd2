"""Cases of bench_whole.py, in separate processes: a model, its setting, a few training steps, a line of JSON."""

import contextlib
import datetime
import functools
import gc
import json
import os
import traceback

import torch
import torch.distributed as dist
from e2e_batches import Batches, documents_of, packed_rows, padded_batches
from e2e_providers import COMPILE, torch_fa2
from harness import seconds
from parallel_wrappers import WRAPPERS
from torch.utils.checkpoint import checkpoint
from whole_cases import ATTENTION, ERROR, LIGER, SHAPES, TINY, Case

import packing_ops as po

MOST_LEFT = 2**30  # bytes that a case may leave: with more the next one starts in another program
PEAK = 989e12  # dense bf16 operations a second of an H100 and an H200


def documents(case: Case, vocabulary: int) -> list[torch.Tensor]:
    """Of one rank and step. All cases with so many tokens have the same ones; ranks have other tokens."""
    if case.documents == "sft":
        found = documents_of(case.tokens, case.longest, vocabulary)
        return sorted(found, key=len) if case.provider == "sorted" else found
    length = min(case.longest, 4096)
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, vocabulary, (case.tokens // length, length), generator=generator))


def batches(case: Case, vocabulary: int, rank: int, device: str) -> tuple[Batches, int, float]:
    """The batches of a step, its tokens without padding, and the sum of the documents' squared lengths."""
    found = [(document + rank) % vocabulary for document in documents(case, vocabulary)]
    made = packed_rows(found, case.row, True) if case.row else padded_batches(found, case.batch)
    placed = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()} for batch in made.batches]
    return made._replace(batches=placed), sum(map(len, found)), float(sum(len(document) ** 2 for document in found))


def shape_of(case: Case, tiny: bool) -> dict:
    shape = {**SHAPES[case.model], **({"vocab_size": case.vocabulary} if case.vocabulary else {})}
    return {name: TINY.get(name, value) if tiny else value for name, value in shape.items()}


def random_model(shape: dict, attention: str, device: str, dtype: torch.dtype):
    """A Qwen3 of transformers with random weights, the same ones in each call."""
    import transformers
    from transformers.masking_utils import AttentionMaskInterface

    transformers.AttentionInterface.register("torch_fa2", torch_fa2)
    AttentionMaskInterface.register("torch_fa2", lambda *args, **kwargs: None)  # it has cu_seqlens
    family = family_of(shape)
    config = getattr(transformers, f"{family}Config")(**shape, max_position_embeddings=40_960, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")
        return model._from_config(config, attn_implementation=attention, dtype=dtype).train()


def family_of(shape: dict) -> str:
    return "Qwen3Moe" if "moe_intermediate_size" in shape else "Qwen3"


@contextlib.contextmanager
def stock_modules():
    """Puts back in the end what Liger replaces in transformers' modules."""
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    stock = [(vars(module), dict(vars(module))) for module in (modeling_qwen3, modeling_qwen3_moe)]
    try:
        yield
    finally:
        for names, before in stock:
            names.update(before)


def model_of(case: Case, device: str, tiny: bool, undo: contextlib.ExitStack):
    """The model as the case trains it, on this rank, and the parameters that a token is multiplied with. What was
    changed outside of it is undone by the stack.
    """
    shape = shape_of(case, tiny)
    family = family_of(shape)
    dtype = torch.bfloat16 if device == "cuda" and not case.float32 else torch.float32
    model = random_model(shape, ATTENTION[case.provider], device, dtype)
    if case.provider in LIGER:
        import liger_kernel.transformers as liger

        undo.enter_context(stock_modules())
        patches = {"Qwen3": "apply_liger_kernel_to_qwen3", "Qwen3Moe": "apply_liger_kernel_to_qwen3_moe"}
        getattr(liger, patches[family])(model=model, **LIGER[case.provider])
    multiplied = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    if shape.get("tie_word_embeddings"):
        multiplied += model.get_input_embeddings().weight.numel()
    if family == "Qwen3Moe":
        of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        multiplied -= of_experts - of_experts * shape["num_experts_per_tok"] // shape["num_experts"]
    if case.provider == "ours":
        from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops, revert_registration

        undo.callback(revert_registration)
        undo.callback(revert_packing_ops, model)
        print(apply_packing_ops(model, fused_loss=case.fused_loss), flush=True)
    return prepared(model, case, device), multiplied


def prepared(model, case: Case, device: str):
    """With adapters, checkpoints, compiled layers and its wrapper."""
    layers, policy = model.model.layers, None
    if case.lora:
        import peft

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        targets += [] if case.part == "moe" else ["gate_proj", "up_proj", "down_proj"]
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets)
        outer = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    else:
        outer = model
    if case.checkpointing:
        budget = case.checkpointing if isinstance(case.checkpointing, str) else int(case.checkpointing * 2**30)
        contexts = {} if budget == "full" else {"context_fn": po.checkpoint_policy(model, budget)}
        policy = contexts.get("context_fn")
        for layer in layers:
            put_checkpoint(layer, contexts)
    for layer in layers if case.compiled else ():
        dynamic = {"dynamic": True} if case.dynamic else {}
        of_one_graph = {} if case.provider.startswith("liger") else COMPILE  # Liger's functions break the graph
        layer.compile(**of_one_graph, **dynamic, backend="inductor" if device == "cuda" else "aot_eager")
    model.policy = policy
    return WRAPPERS[case.wrapper](outer, device)


def put_checkpoint(layer, contexts: dict) -> None:
    """Inside of the layer, where it is in the graph of a compiled one."""

    def forward(*args, stock=layer.forward, **kwargs):
        return checkpoint(functools.partial(stock, **kwargs), *args, use_reentrant=False, **contexts)

    layer.forward = forward


def step(model, optimizer, made: Batches, mixed: bool = False) -> torch.Tensor:
    """Gradients of several batches are reduced once, with the last. mixed: computes in bfloat16 by autocast."""
    total, device = 0.0, made.batches[0]["input_ids"].device.type
    for i, (batch, share) in enumerate(zip(made.batches, made.shares, strict=True)):
        last = i + 1 == len(made.batches)
        no_sync = contextlib.nullcontext()
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        elif hasattr(model, "no_sync") and not last:
            no_sync = model.no_sync()
        with no_sync:
            with torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext():
                loss = model(**batch).loss * share
            loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def measured(case: Case, device: str, tiny: bool, undo: contextlib.ExitStack) -> dict:
    """What the CSV has of a case beside its setting."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, multiplied = model_of(case, device, tiny, undo)
    inner = model.module if hasattr(model, "module") else model
    config = inner.config
    made, tokens, squares = batches(case, config.vocab_size, rank, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
    losses = []

    def once():
        losses.append(step(model, optimizer, made, case.float32 and not case.wrapper.startswith("FSDP2")))

    warm_up = sum(seconds(once, device) for _ in range(case.warm_ups))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = sorted(seconds(once, device) for _ in range(case.steps))
    time_of_step = times[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    if dist.is_initialized():
        dist.all_reduce(losses[0], op=dist.ReduceOp.SUM)
        losses[0] /= dist.get_world_size()
    passes = 4 if case.lora else 6  # frozen weights have no gradients
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * squares / 2
    policy = getattr(inner, "policy", None)
    return {
        "tokens_per_second_a_gpu": f"{tokens / time_of_step:.0f}",
        "mfu": f"{(passes * multiplied * tokens + attention) / time_of_step / PEAK:.4f}",
        "peak_gib": f"{peak:.1f}", "step_ms": f"{time_of_step * 1e3:.1f}", "loss": f"{float(losses[0]):.4f}",
        "warm_up_s": f"{warm_up:.0f}", "tokens": tokens, "kept": policy.explain() if policy else "",
    }  # fmt: skip


def run(turns: list[tuple[int, int]], cases: list[Case], device: str, tiny: bool) -> None:
    """Repeats of cases, (repeat, index) each, in a separate process, or one of torchrun's: rank 0 prints a line for
    each. A case that fails is not repeated.
    """
    ranks, failed = cases[turns[0][1]].ranks, set()
    if ranks > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=120))
    for repeat, index in turns:
        if index in failed:
            continue
        try:
            with contextlib.ExitStack() as undo:
                found = measured(cases[index].small() if tiny else cases[index], device, tiny, undo)
        except Exception as error:
            if ranks > 1:  # the other ranks wait
                raise
            traceback.print_exc()
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:ERROR]}
            failed.add(index)
        if ranks == 1 or dist.get_rank() == 0:
            print("\nRESULT " + json.dumps({"repeat": repeat, "index": index, **found}), flush=True)
        if not released(device):
            break
    if ranks > 1:
        dist.destroy_process_group()


def released(device: str) -> bool:
    """Return whether the memory of a case is free again, on all ranks."""
    torch._dynamo.reset()
    gc.collect()
    left = torch.zeros((), device=device)
    if device == "cuda":
        torch.cuda.empty_cache()
        left += torch.cuda.memory_allocated()
    if dist.is_initialized():
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
    return float(left) <= MOST_LEFT
