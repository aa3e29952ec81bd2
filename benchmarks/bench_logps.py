"""python benchmarks/bench_logps.py [--device cpu|cuda]

Directions: forward (no gradient), backward (the graph is there already) and both. The floor, "bare matmuls", is cuBLAS
alone on logits that are there in full: forward one product, backward three (the logits once more, and one for each
gradient), both four; "bare matmuls, logits kept" has one less in backward, for one who stores 5 GB of logits. Of rows
without a target, torch.compile gets all and, as a second provider, those with a target, selected by a mask, for which
the host waits; so does trl.
"""

import functools

import torch
import torch.nn.functional as F
from bench_boundaries import lengths_of
from compiled_code import compiled_alone
from harness import Case, matmuls, run

import packing_ops as po

# (tokens, vocabulary, hidden sizes)
SIZES = {
    "cuda": [(16_384, 151_936, (1024, 2048, 4096, 8192)), (8192, 151_936, (4096,))],
    "cpu": [(256, 16_384, (256,))],
}
MASKED = (0.0, 0.5, 0.9)
OF_MASKED = {"cuda": (16_384, 151_936, 4096), "cpu": (256, 16_384, 256)}
ALL = 2**40  # bytes: every chunk of logits
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


def trl_logps():
    """trl's chunked log-probabilities of the rows that have a target, as its trainers call them; None without trl."""
    try:
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as columns
    except ImportError:
        return None

    options = None, 1.0, ()
    return functools.partial(
        of_rows, lambda h, w, t: ChunkedLogProbFunction.apply(h, w, None, t, 1.0, columns, *options)[0]
    )


def of_rows(function, hidden, weight, targets):
    """function of the rows that have a target."""
    kept = targets >= 0
    found = function(hidden[kept], weight, targets[kept])
    return found.new_zeros(targets.shape).masked_scatter(kept, found)


def gradients_of(function, leaves, grad=None):
    return lambda: torch.autograd.grad(function(), leaves, grad)


def backward_of(function, leaves, grad=None):
    """Its backward alone: the forward has run, and its graph stays.

    A backward of torch.compile may overwrite what the graph keeps (donated_buffer), and torch refuses to run such a one
    again. So it is compiled without, and past torch's caches, which may hold such a one; torch asks when it runs, too.
    """
    kept, without_caches = [], {"donated_buffer": False, "enable_autograd_cache": False}

    def backward():
        with torch._functorch.config.patch(without_caches), torch._inductor.config.patch(fx_graph_cache=False):
            if not kept:
                kept.append(function())
            return torch.autograd.grad(kept[0], leaves, grad, retain_graph=True)

    return backward


def without_gradient(function):
    return torch.no_grad()(function)


def batch(device, total, vocab, size, masked=0.0):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(total, size, device=device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, size, device=device, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, vocab, (total,), device=device)
    labels[torch.rand(total, device=device) < masked] = -100
    return hidden, weight, labels, po.PackedMetadata.from_lengths(lengths_of(total), device=device)


def described(hidden, weight):
    (total, size), vocab = hidden.shape, weight.shape[0]
    return f"T={total} V={vocab} hidden={size}", str(hidden.dtype).removeprefix("torch.")


def peers(hidden, weight, targets):
    """{provider: log-probabilities} of others; torch.compile on the GPU alone."""
    found = {"torch eager": lambda: eager_logps(hidden, weight, targets)}
    if hidden.is_cuda:
        compiled = compiled_alone(eager_logps)
        found["torch.compile"] = lambda: compiled(hidden, weight, targets)
    if (trl := trl_logps()) is not None:
        found["TRL's chunked log-probs"] = lambda: trl(hidden, weight, targets)
    return found


def cases_of_size(device, total, vocab, size):
    hidden, weight, labels, metadata = batch(device, total, vocab, size)
    leaves, targets = (hidden, weight), po.shift_labels(labels, metadata.cu_seqlens)
    grad = torch.randn(total, device=device)
    ours = functools.partial(po.token_logps, hidden, weight, labels, metadata)
    functions = {"packing_ops": ours, **peers(hidden, weight, targets)}
    with_entropy = "packing_ops, entropy too"
    entropy = lambda: torch.stack(ours(entropy=True)).sum(0)  # noqa: E731
    logits = torch.empty(total, vocab, device=device, dtype=hidden.dtype)
    plain = [(hidden, weight)], logits
    shape, dtype = described(hidden, weight)

    forward = {name: without_gradient(function) for name, function in functions.items()}
    forward["bare matmuls"] = matmuls(*plain, 1, False)
    forward[with_entropy] = without_gradient(entropy)
    yield Case("token_logps, forward", shape, dtype, forward, runs=11)

    backward = {name: backward_of(function, leaves, grad) for name, function in functions.items()}
    if device == "cuda":
        compiled = compiled_alone(eager_logps)  # not the one that has run with caches
        backward["torch.compile"] = backward_of(lambda: compiled(hidden, weight, targets), leaves, grad)
    backward["bare matmuls"] = matmuls(*plain, 1, True)
    backward["bare matmuls, logits kept"] = matmuls(*plain, 0, True)
    backward[with_entropy] = backward_of(entropy, leaves, grad)
    yield Case("token_logps, backward", shape, dtype, backward, runs=11)
    backward.clear()  # what their graphs hold

    both = {name: gradients_of(function, leaves, grad) for name, function in functions.items()}
    for name, keep in (("all logits kept", ALL), ("keep_logits=auto", "auto")):
        both[f"packing_ops, {name}"] = gradients_of(functools.partial(ours, keep_logits=keep), leaves, grad)
    both["bare matmuls"] = matmuls(*plain, 2, True)
    both["bare matmuls, logits kept"] = matmuls(*plain, 1, True)
    both["chunked_cross_entropy"] = gradients_of(
        lambda: po.chunked_cross_entropy(hidden, weight, labels, metadata), leaves
    )
    if (liger := liger_loss()) is not None:
        both["Liger's fused linear cross entropy"] = gradients_of(lambda: liger(hidden, weight, targets), leaves)
    yield Case("token_logps, forward and backward", shape, dtype, both, runs=11)


def cases_of_masks(device):
    """Rows without a target: their number is known to the host, as a collator's metadata tells it."""
    for masked in MASKED:
        hidden, weight, labels, metadata = batch(device, *OF_MASKED[device], masked)
        leaves, targets = (hidden, weight), po.shift_labels(labels, metadata.cu_seqlens)
        grad, count = torch.randn(len(labels), device=device), int((targets != -100).sum())
        ours = functools.partial(po.token_logps, hidden, weight, labels, metadata, max_targets=count)
        functions = {
            "packing_ops": ours,
            "packing_ops, all logits kept": functools.partial(ours, keep_logits=ALL),
            "packing_ops, all rows": functools.partial(po.token_logps, hidden, weight, labels.clamp(min=0), metadata),
            **peers(hidden, weight, targets),
        }
        if device == "cuda":
            functions["torch.compile, rows by a mask"] = functools.partial(
                of_rows, torch.compile(eager_logps, dynamic=True), hidden, weight, targets
            )
        both = {name: gradients_of(function, leaves, grad) for name, function in functions.items()}
        if (liger := liger_loss()) is not None:
            both["Liger's fused linear cross entropy"] = gradients_of(
                functools.partial(liger, hidden, weight, targets), leaves
            )
        op = f"{masked:.0%} of the rows masked, forward and backward"
        yield Case(op, *described(hidden, weight), both, runs=11)


def both_directions(op, functions, leaves, grad):
    forward = {name: without_gradient(function) for name, function in functions.items()}
    yield Case(f"{op}, forward", *described(*leaves), forward, runs=11)
    both = {name: gradients_of(function, leaves, grad) for name, function in functions.items()}
    yield Case(f"{op}, forward and backward", *described(*leaves), both, runs=11)


def allowed(labels, vocab, count):
    """Sets of so many entries for each label, as a sampler with top-k records them."""
    ids = torch.randint(0, vocab, (len(labels), count), device=labels.device, dtype=torch.int32)
    ids[:, 0] = labels
    return {"allowed_ids": ids.flatten(), "allowed_offsets": count * torch.arange(len(ids) + 1, device=ids.device)}


def cases_of_options(device):
    """What outputs and scalings cost beside plain log-probabilities, and chunks of other sizes."""
    hidden, weight, labels, metadata = batch(device, *OF_MASKED[device])
    leaves, grad = (hidden, weight), torch.randn(len(labels), device=device)
    names = ("logps", "lse", "entropy", "sum_p2", "mean_logit")
    options = {
        "packing_ops": {},
        "all outputs": {"outputs": (*names, "top1")},
        "softcap": {"softcap": 30.0},
        "scale": {"scale": 0.5},
        "temperatures": {"temperature": torch.rand(len(labels), device=device) + 0.5},
        "bias": {"bias": torch.randn(len(weight), device=device, dtype=weight.dtype)},
        **{f"{count} allowed entries": allowed(labels, len(weight), count) for count in (20, 1024)},
    }

    def of(given):
        found = po.token_logps(hidden, weight, labels, metadata, **given)
        return found if isinstance(found, torch.Tensor) else torch.stack(found[: len(names)]).sum(0)

    chunks = {"packing_ops": {}, **{f"chunk={chunk}": {"chunk": chunk} for chunk in CHUNKS}}
    for op, each in (("token_logps by option", options), ("token_logps by chunk", chunks)):
        functions = {name: functools.partial(of, given) for name, given in each.items()}
        yield from both_directions(op, functions, leaves, grad)


def cases(device):
    for total, vocab, sizes in SIZES[device]:
        for size in sizes:
            yield from cases_of_size(device, total, vocab, size)
    yield from cases_of_masks(device)
    yield from cases_of_options(device)


if __name__ == "__main__":
    run("logps", cases)
