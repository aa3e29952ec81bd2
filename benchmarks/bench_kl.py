"""python benchmarks/bench_kl.py [--device cpu|cuda]

token_kl, forward and with backward, of the forward KL (beta 0) and of the Jensen-Shannon divergence (beta 0.5), for a
student and a teacher of some hidden sizes; every slot counts, or half of them do. The floor, "bare matmuls", is cuBLAS
alone on logits that are there in full: a product for each head in forward, those again and two gradients in backward;
"bare matmuls, logits kept" does not make the logits again. Ours runs with nothing kept, with all of d(logits), and with
3 GiB of it: with hidden sizes of 4,096 that is no more memory than TRL's takes.
Beside it torch, and where they are installed Liger's fused linear JSD (a scalar, gradients made in its forward) and
TRL's chunked divergence. The most memory that a call takes beside its arguments, gradients included, is in the column
peak_mib.
"""

import functools

import torch
import torch.nn.functional as F
from bench_boundaries import lengths_of
from compiled_code import compiled_alone
from harness import Case, fits, matmuls, run

import packing_ops as po

# slots, entries of the vocabulary, hidden sizes of student and teacher
SIZES = {"cuda": (16_384, 151_936, ((1024, 2048), (2048, 4096), (4096, 4096))), "cpu": (256, 16_384, ((256, 384),))}
NAMES = {0.0: "forward KL", 0.5: "JSD"}
KEPT = {"all logits kept": 2**40, "keep_logits=3 GiB": 3 << 30}


def eager_divergence(hidden, weight, teacher_hidden, teacher_weight, kept, beta):
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    logq = F.linear(teacher_hidden, teacher_weight).float().log_softmax(-1)
    if beta == 0:
        return torch.where(kept, F.kl_div(logp, logq, reduction="none", log_target=True).sum(-1), 0)
    mixture = torch.logsumexp(
        torch.stack([logp + torch.log1p(-torch.tensor(beta)), logq + torch.tensor(beta).log()]), 0
    )
    of_teacher, of_student = (F.kl_div(mixture, x, reduction="none", log_target=True).sum(-1) for x in (logq, logp))
    return torch.where(kept, beta * of_teacher + (1 - beta) * of_student, 0)


def liger_jsd():
    """Liger's fused linear JSD, or None where it is not installed."""
    try:
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction
    except ImportError:
        return None
    return lambda heads, targets, beta: LigerFusedLinearJSDFunction.apply(*heads, targets, beta)


def trl_divergence():
    """TRL's chunked divergence of the slots that count, or None where it is not installed."""
    try:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    except ImportError:
        return None

    def divergence(heads, kept, beta):
        hidden, weight, teacher_hidden, teacher_weight = heads
        if not kept.all():  # as its trainer does: it waits for the GPU
            hidden, teacher_hidden = hidden[kept], teacher_hidden[kept]
        return ChunkedDivergenceFunction.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, beta)[0]

    return divergence


def gradients_of(function, leaves):
    return lambda: torch.autograd.grad(function().sum(), leaves)


def without_gradient(function):
    def call():
        with torch.no_grad():
            return function()

    return call


def batch(device, sizes):
    total, vocab, _ = SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = []
    for size in sizes:
        heads.append(torch.randn(total, size, device=device, dtype=dtype))
        heads.append(0.02 * torch.randn(vocab, size, device=device, dtype=dtype))
    for tensor in heads[:2]:
        tensor.requires_grad_()
    return heads, po.PackedMetadata.from_lengths(lengths_of(total), device=device)


def functions_of(heads, labels, metadata, beta):
    """{provider: a call that gives what it has of the divergence}."""
    device, targets = heads[0].device.type, po.shift_labels(labels, metadata.cu_seqlens)
    kept = targets != -100
    count = int(kept.sum())  # which a collator knows
    compiled, liger, trl = compiled_alone(eager_divergence), liger_jsd(), trl_divergence()
    functions = {
        "packing_ops": functools.partial(po.token_kl, *heads, labels, metadata, beta=beta, max_targets=count),
        "torch eager": lambda: eager_divergence(*heads, kept, beta),
    }
    if device == "cuda":
        functions["torch.compile"] = lambda: compiled(*heads, kept, beta)
    if trl is not None:
        functions["TRL's chunked divergence"] = lambda: trl(heads, kept, beta)
    if liger is not None and device == "cuda":  # its kernels are Triton's
        functions["Liger's fused linear JSD"] = lambda: liger(heads, targets, beta)
    return functions


def with_gradients(functions, heads):
    """{provider: forward and backward}, of those that fit; ours also where it keeps d(logits)."""
    ours = functions["packing_ops"]
    kept = {f"packing_ops, {name}": functools.partial(ours, keep_logits=keep) for name, keep in KEPT.items()}
    calls = {name: gradients_of(f, heads[:2]) for name, f in {**functions, **kept}.items()}
    return {name: call for name, call in calls.items() if fits(call)}


def cases_of_size(device, sizes):
    heads, metadata = batch(device, sizes)
    total, vocab, _ = SIZES[device]
    labels = torch.randint(0, vocab, (total,), device=device)
    masked = torch.where(torch.arange(total, device=device) % 256 < 128, labels, -100)
    logits = torch.empty(total, vocab, device=device, dtype=heads[0].dtype)
    shape, dtype = f"T={total} V={vocab} hidden={sizes[0]}, {sizes[1]}", str(heads[0].dtype).removeprefix("torch.")
    for beta, name in NAMES.items():
        functions = functions_of(heads, labels, metadata, beta)
        forward = {name: without_gradient(f) for name, f in functions.items() if not name.startswith("Liger")}
        forward = {name: call for name, call in forward.items() if fits(call)}
        forward["bare matmuls"] = matmuls([heads[:2], heads[2:]], logits, 1, False)
        yield Case(f"token_kl, {name}, forward", shape, dtype, forward, runs=11)
        both = with_gradients(functions, heads)
        both["bare matmuls"] = matmuls([heads[:2], heads[2:]], logits, 2, True)
        both["bare matmuls, logits kept"] = matmuls([heads[:2], heads[2:]], logits, 1, True)
        yield Case(f"token_kl, {name}, forward and backward", shape, dtype, both, runs=11)
    half = with_gradients(functions_of(heads, masked, metadata, 0.5), heads)
    yield Case("token_kl, JSD, half of the slots count, forward and backward", shape, dtype, half, runs=11)


def cases(device):
    for sizes in SIZES[device][2]:
        yield from cases_of_size(device, sizes)
        torch.cuda.empty_cache() if device == "cuda" else None


if __name__ == "__main__":
    run("kl", cases)
