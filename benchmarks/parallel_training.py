"""A whole model in training on several GPUs: what bench_parallel.py measures of it, and bench_parallel_host.py
on one GPU with ranks that are made up."""

import functools
import itertools
import statistics
import time

import torch
import torch.distributed as dist
from bench_e2e import SHAPE, TINY
from e2e_providers import COMPILE
from parallel_timing import profiled, sft_lengths, timed_together
from parallel_wrappers import WRAPPERS
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops


def model_for(device, tiny, compiled=True):
    torch.manual_seed(0)
    config = Qwen3Config(**(TINY if tiny else SHAPE), max_position_embeddings=40_960, use_cache=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    apply_packing_ops(model, fused_loss=True)
    for layer in model.model.layers if compiled else ():
        layer.compile(**COMPILE)
    return model


def rows_of_rank(tokens, capacity, device, vocabulary):
    """Full rows of ``capacity`` slots with sft lengths, other documents on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = [min(length, capacity) for length in sft_lengths(tokens * ranks)]
    packing = po.pack_sequences(lengths, capacity, bins_multiple_of=ranks)
    batches = []
    for row in packing.bins[rank::ranks]:
        metadata = po.PackedMetadata.from_lengths([lengths[i] for i in row], total=capacity)
        generator = torch.Generator().manual_seed(len(batches) + 1000 * rank)
        ids = torch.randint(vocabulary, (1, capacity), generator=generator)
        batch = {"input_ids": ids, "labels": ids, "position_ids": metadata.position_ids[None]}
        batch |= {**metadata.to_transformers(), "num_items_in_batch": capacity}
        batches.append({n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()})
    return batches


def training_step(model, optimizer, batches, made_up=False):
    """Of each row: gradients are reduced and the optimizer steps after every one."""
    for batch in batches:
        model(**batch).loss.backward()
        if made_up:
            zero_what_nobody_sent(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def zero_what_nobody_sent(model):
    """Gradients of sharded parameters, which torch 2.11's fake reduce-scatter leaves as the memory was."""
    gradients = [each.grad for each in model.parameters() if isinstance(each.grad, DTensor)]
    if gradients:
        torch._foreach_zero_([each.to_local() for each in gradients])


def host_milliseconds(step, device: str, runs: int = 3) -> float:
    """Median until the host has enqueued it all: where that is as long as the step, the GPU waits for the host."""
    synchronize, samples = torch.cuda.synchronize if device == "cuda" else dist.barrier, []
    for _ in range(runs):
        synchronize()
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e3)
    synchronize()
    return statistics.median(samples)


def train_rows(results, device, tiny, wrappers=tuple(WRAPPERS)):
    tokens, capacity = (2048, 512) if tiny else (131_072, 16_384)
    batches, one = rows_of_rank(tokens, capacity, device, (TINY if tiny else SHAPE)["vocab_size"]), 0.0
    for name in wrappers:
        torch._dynamo.reset()
        model = WRAPPERS[name](model_for(device, tiny), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        step = functools.partial(training_step, model, optimizer, batches)
        us = timed_together(step, device, 3)
        host = host_milliseconds(step, device)
        if dist.get_rank() == 0:
            print(f"training, {name}: host={host:.0f} ms of {us / 1e3:.0f} ms", flush=True)
        shape = f"{'tiny' if tiny else 'Qwen3-0.6B'}: {len(batches)} rows of {capacity} a rank, sft lengths"
        shape += ", rms_norm, fused_loss, layers compiled"
        if name == "one rank":
            one = us * dist.get_world_size()  # what all ranks do together takes one so long
            times, tokens_of_all, ranks = (0.0, us), len(batches) * capacity, 1
        else:
            times, ranks = (one, us), dist.get_world_size()
            tokens_of_all = len(batches) * capacity * ranks
        results.add(f"training, {name}", shape, *times, step, tokens=tokens_of_all, ranks=ranks)
        del model, optimizer, step
        torch.cuda.empty_cache()


def host_rows(results, device, tiny, layers):
    """One process as rank 0 of several whose collectives wait for nobody: what host and kernels take."""
    tokens, capacities = (4096, (1024, 2048)) if tiny else (65_536, (8192, 16_384))
    for of_layers, capacity in itertools.product(layers, capacities):
        batches, one = rows_of_rank(tokens, capacity, device, (TINY if tiny else SHAPE)["vocab_size"]), 0.0
        batches = batches[: tokens // capacity]
        for name, wrap in WRAPPERS.items():
            torch._dynamo.reset()
            model = wrap(model_for(device, tiny, of_layers == "compiled"), device)
            if name.startswith("DDP"):  # whose reducer takes no result of the fake group
                model.register_comm_hook(None, noop_hook)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            step = functools.partial(training_step, model, optimizer, batches, made_up=name != "one rank")
            us = timed_together(step, device, 3, warm_up=1)
            one = one or us
            case = {
                "model": "tiny" if tiny else "Qwen3-0.6B",
                "layers": of_layers,
                "rows": f"{len(batches)} x {capacity}",
            }
            case |= {"provider": name, "fake_ranks": 1 if name == "one rank" else dist.get_world_size()}
            figures = {"p50_us": f"{us:.1f}", "efficiency": f"{one / us:.3f}"}
            figures["tokens_per_second"] = f"{len(batches) * capacity / us * 1e6:.0f}"
            figures["host_us"] = f"{1e3 * host_milliseconds(step, device):.1f}"
            figures["gpu_busy_us"] = profiled(step, device).get("busy_us", "")
            results.add_case(case, figures)
            del model, optimizer, step
            torch.cuda.empty_cache()
