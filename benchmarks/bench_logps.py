"""python benchmarks/bench_logps.py [--device cpu|cuda]

Directions: forward (no gradient), backward (the graph is there already) and both. The floor, "bare matmuls", is cuBLAS
alone on logits that are there in full: forward one product, backward three (the logits once more, and one for each
gradient), both four; "bare matmuls, logits kept" has one less in backward, for one who stores 5 GB of logits. The most
memory that a call takes beside its arguments, gradients included, is in results/logps_memory_<device>.csv.
"""

import torch
import torch.nn.functional as F
from bench_boundaries import lengths_of
from compiled_code import compiled_alone
from harness import Case, commit, device_name, run, write_csv

import packing_ops as po

SIZES = {"cuda": (16_384, 151_936, (1024, 2048, 4096)), "cpu": (256, 16_384, (256,))}
CHUNKS = (1024, 2048, 4096, 8192, 16_384, 32_768)  # 1,024: 32 MiB of logits, within the L2 cache


def eager_logps(hidden, weight, targets):
    logits = F.linear(hidden, weight).float()
    return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


def liger_loss():
    """Liger's fused linear cross entropy (the mean over targets), or None where it is not installed."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, targets: loss(weight, hidden, targets)


def gradients_of(function, leaves, grad=None):
    return lambda: torch.autograd.grad(function(), leaves, grad)


def backward_of(function, leaves, grad=None):
    """Its backward alone: the forward has run, and its graph stays."""
    kept = []

    def backward():
        if not kept:
            kept.append(function())
        return torch.autograd.grad(kept[0], leaves, grad, retain_graph=True)

    return backward


def kept_whole(hidden, weight, targets):
    """eager_logps compiled such that its backward can run again: it writes over nothing that the forward has kept."""
    compiled = compiled_alone(eager_logps)

    def call():
        with torch._functorch.config.patch(donated_buffer=False):
            return compiled(hidden, weight, targets)

    return call


def matmuls(hidden, weight, logits, forward, backward):
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products():
        for _ in range(forward):
            torch.mm(hidden, weight.t(), out=logits)
        if backward:
            torch.mm(logits, weight, out=grad_hidden)
            torch.mm(logits.t(), hidden, out=grad_weight)

    return products


def without_gradient(function):
    def call():
        with torch.no_grad():
            return function()

    return call


def batch(device, size):
    total, vocab, _ = SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(total, size, device=device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, size, device=device, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, vocab, (total,), device=device)
    lengths = lengths_of(total)
    return hidden, weight, labels, po.PackedMetadata.from_lengths(lengths, device=device)


def cases_of_size(device, size):
    hidden, weight, labels, metadata = batch(device, size)
    total, vocab, _ = SIZES[device]
    leaves, targets = (hidden, weight), po.shift_labels(labels, metadata.cu_seqlens)
    grad = torch.randn(total, device=device)
    functions = {
        "packing_ops": lambda: po.token_logps(hidden, weight, labels, metadata),
        "torch eager": lambda: eager_logps(hidden, weight, targets),
    }
    if device == "cuda":
        compiled = compiled_alone(eager_logps)
        functions["torch.compile"] = lambda: compiled(hidden, weight, targets)
    with_entropy = "packing_ops, entropy too"
    entropy = lambda: torch.stack(po.token_logps(hidden, weight, labels, metadata, entropy=True)).sum(0)  # noqa: E731
    liger = liger_loss()
    logits = torch.empty(total, vocab, device=device, dtype=hidden.dtype)
    plain = hidden.detach(), weight.detach(), logits
    shape, dtype = f"T={total} V={vocab} hidden={size}", str(hidden.dtype).removeprefix("torch.")

    forward = {name: without_gradient(function) for name, function in functions.items()}
    forward["bare matmuls"] = matmuls(*plain, 1, False)
    forward[with_entropy] = without_gradient(entropy)
    yield Case("token_logps, forward", shape, dtype, forward, runs=11)

    backward = {name: backward_of(function, leaves, grad) for name, function in functions.items()}
    if device == "cuda":
        backward["torch.compile"] = backward_of(kept_whole(hidden, weight, targets), leaves, grad)
    backward["bare matmuls"] = matmuls(*plain, 1, True)
    backward["bare matmuls, logits kept"] = matmuls(*plain, 0, True)
    backward[with_entropy] = backward_of(entropy, leaves, grad)
    yield Case("token_logps, backward", shape, dtype, backward, runs=11)
    backward.clear()  # what their graphs hold

    both = {name: gradients_of(function, leaves, grad) for name, function in functions.items()}
    both["bare matmuls"] = matmuls(*plain, 2, True)
    both["bare matmuls, logits kept"] = matmuls(*plain, 1, True)
    both["chunked_cross_entropy"] = gradients_of(
        lambda: po.chunked_cross_entropy(hidden, weight, labels, metadata), leaves
    )
    if liger is not None:
        both["Liger's fused linear cross entropy"] = gradients_of(lambda: liger(hidden, weight, targets), leaves)
    yield Case("token_logps, forward and backward", shape, dtype, both, runs=11)

    if device != "cuda":
        return
    chunked = {
        f"chunk={chunk}": lambda chunk=chunk: po.token_logps(hidden, weight, labels, metadata, chunk=chunk)
        for chunk in CHUNKS
    }
    chunks = {name: without_gradient(function) for name, function in chunked.items()}
    yield Case(
        "token_logps by chunk, forward", shape, dtype, {"packing_ops": forward["packing_ops"], **chunks}, runs=11
    )
    chunks = {name: gradients_of(function, leaves, grad) for name, function in chunked.items()}
    yield Case(
        "token_logps by chunk, forward and backward",
        shape,
        dtype,
        {"packing_ops": both["packing_ops"], **chunks},
        runs=11,
    )


memory = []


def peak(call) -> int:
    call()  # compiled, planned, workspaces made
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def cases(device):
    for size in SIZES[device][2]:
        for case in cases_of_size(device, size):
            yield case
            if device == "cuda" and case.op != "token_logps, backward":
                memory.extend(
                    {
                        "op": case.op,
                        "shape": case.shape,
                        "dtype": case.dtype,
                        "provider": name,
                        "peak_mib": f"{peak(call) / 2**20:.0f}",
                        "device": device_name(device),
                        "torch": torch.__version__,
                        "commit": commit(),
                    }
                    for name, call in case.providers.items()
                    if not name.startswith(("bare", "copy"))
                )
        torch.cuda.empty_cache() if device == "cuda" else None


if __name__ == "__main__":
    arguments = run("logps", cases)
    if memory:
        write_csv(arguments.out / f"logps_memory_{arguments.device}.csv", memory)
