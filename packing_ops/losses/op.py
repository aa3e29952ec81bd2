"""The ops of logps.py: the loop over chunks of the vocabulary, forward and backward (losses/chunks.py).

The logits of the first chunks may be kept from forward to backward. In eager mode the backward writes their gradient
over them, so that a second backward of the same graph makes them again; in a graph of torch.compile and under
torch.func it works on a copy of a chunk.
"""

from types import SimpleNamespace
from typing import Any

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import sum_dtype
from packing_ops._runtime.autograd import call_below_autograd, implements, register_autograd, register_no_autograd
from packing_ops._runtime.batch_cache import is_real
from packing_ops.invariance.mode import active
from packing_ops.losses.chunks import Chunks, Gradients, Rows, check_kept, chunk_of, kept_shape, rows_at_most

OUTPUTS = ("logps", "lse", "entropy", "sum_p2", "mean_logit", "top1")  # as the op returns them
ALWAYS = ("logps", "lse")  # the others are computed where one of them is asked for


@implements("token_logps")
def _token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    outer: float,
    inner: float,
    chunk: int | None,
    max_targets: int | None,
    keep_logits: int,
    more: bool,
    group: str | None,
    *allowed: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    vocab, dtype = weight.shape[0], sum_dtype(hidden.dtype)
    rows = Rows(targets, max_targets, allowed)
    kept = hidden.new_empty(kept_shape(hidden, vocab, chunk, max_targets, keep_logits))
    chunk = chunk_of(chunk, rows_at_most(hidden.shape[0], max_targets), hidden, vocab)
    chunks = Chunks(rows, hidden, weight, bias, chunk, group, kept)
    scales = rows.scales(temperature, outer, dtype)
    state = hidden.new_zeros(7 if more else 3, chunks.rows, dtype=dtype)
    state[0] = -float("inf")
    for _, first, part_of_weight, part_of_bias, logits, _ in chunks:
        chunks.multiply(part_of_weight, logits)
        mask = rows.mask(first, logits)
        gate.logps_chunk_(logits[: chunks.rows], part_of_bias, rows.targets, first, scales, inner, state, mask)
    if chunks.group is not None:
        _add_up_ranks(state, chunks.group, vocab)
        vocab *= chunks.group.size()
    # OUTPUTS of the sums over the whole vocabulary; those that are not computed are empty
    largest, total, chosen, *others = state
    has_target, log_total = rows.targets >= 0, total.log()
    lse = largest + log_total
    found = [chosen - lse, lse]
    if others:
        weighted, squares, of_logits, _ = others
        found += [log_total - weighted / total, squares / total.square(), of_logits / vocab]
    found = rows.back(*(torch.where(has_target, values, 0) for values in found))
    if (over := rows.over_bound()) is not None:
        found = [values.masked_fill_(over, torch.nan) for values in found]
    if not others:
        return *found, *(state.new_empty(0) for _ in range(3)), state.new_empty(0, dtype=torch.int64), kept
    entry = torch.where(has_target & lse.isfinite(), others[-1].long() + 1, 0)
    return *found, rows.back(entry)[0] - 1, kept


def _add_up_ranks(state: torch.Tensor, group: "torch.distributed.ProcessGroup", vocab: int) -> None:
    """Add each rank's sums over the largest logit of all ranks. Shards of other sizes give NaN, as nothing waits."""
    from torch.distributed import ReduceOp, all_reduce

    own = state[0].clone()
    largest = torch.cat([own, own.new_full((1,), vocab), own.new_full((1,), -vocab)])
    all_reduce(largest, ReduceOp.MAX, group)
    if largest.is_cpu and largest[-2] != -largest[-1]:
        least, most = int(-largest[-1]), int(largest[-2])
        raise ValueError(
            f"weight: expected as many entries on every rank of group, got {least} to {most}, here {vocab}"
        )
    state[0] = torch.where(largest[-2] == -largest[-1], largest[:-2], torch.nan)
    below = own - state[0]
    scale = torch.where(state[1] == 0, 0, below.exp())  # a shard that is all -inf weighs nothing
    if state.shape[0] > 3:
        _, total, _, weighted, squares, _, top1 = state
        weighted.copy_(torch.where(scale == 0, 0, scale * (weighted + below * total)))
        squares *= scale.square()
        first_of_ranks = torch.where(own == state[0], top1, torch.inf)
        all_reduce(first_of_ranks, ReduceOp.MIN, group)
    state[1] *= scale
    all_reduce(state[1:6], ReduceOp.SUM, group)
    if state.shape[0] > 3:
        state[6] = torch.where(first_of_ranks.isfinite(), first_of_ranks, -1)


def _register_backward(name: str, overwrites: bool) -> Any:
    """Register the backward op, and return it; with overwrites the gradient of kept logits takes their place."""

    @implements(name)
    def token_logps_backward(
        slopes: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        lse: torch.Tensor,
        kept: torch.Tensor,
        outer: float,
        inner: float,
        chunk: int | None,
        max_targets: int | None,
        group: str | None,
        *others: Any,
    ) -> tuple[torch.Tensor, ...]:
        needed, allowed = others[:3], others[3:]
        rows = Rows(targets, max_targets, allowed)
        check_kept(kept, hidden, weight.shape[0], chunk, max_targets)
        chunk = chunk_of(chunk, rows_at_most(hidden.shape[0], max_targets), hidden, weight.shape[0])
        chunks = Chunks(rows, hidden, weight, bias, chunk, group, kept)
        gradients = Gradients(chunks, lse.dtype, *needed)
        options = rows.scales(temperature, outer, lse.dtype), inner, rows.of(lse), rows.of(slopes)
        for part, first, part_of_weight, part_of_bias, logits, is_kept in chunks:
            if not is_kept:
                chunks.multiply(part_of_weight, logits)
            elif not overwrites:
                logits = chunks.scratch()[:, : logits.shape[1]].copy_(logits)
            mask = rows.mask(first, logits)
            gate.logps_chunk_backward_(logits[: chunks.rows], part_of_bias, rows.targets, first, *options, mask)
            gradients.add(part, part_of_weight, logits, later=is_kept and overwrites)
        return gradients.finished(rows, hidden.dtype)

    register_no_autograd(name, of="token_logps")
    return token_logps_backward


_backward = _register_backward("token_logps_backward", overwrites=False)
_register_backward("token_logps_backward_", overwrites=True)


# --- registration: shapes for torch.compile, gradients ---


def _shapes(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    total, dtype = a.hidden.shape[0], sum_dtype(a.hidden.dtype)
    dtypes = [torch.int64 if name == "top1" else dtype for name in OUTPUTS]
    sizes = [total if a.more or name in ALWAYS else 0 for name in OUTPUTS]
    kept = kept_shape(a.hidden, a.weight.shape[0], a.chunk, a.max_targets, a.keep_logits)
    found = [a.hidden.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    return *found, a.hidden.new_empty(kept)


gate.register_fake("token_logps", _shapes)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    hidden, weight, bias, targets, temperature, *options, _, _, group, ids, offsets = inputs
    _, lse, entropy, sum_p2, _, top1, kept = output
    ctx.mark_non_differentiable(top1, kept)
    ctx.options, ctx.overwritten, ctx.mode = (*options, group), False, active()
    ctx.save_for_backward(hidden, weight, bias, targets, temperature, lse, kept, entropy, sum_p2, ids, offsets)


def _formula(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *tensors, kept, entropy, sum_p2, ids, offsets = ctx.saved_tensors
    if ctx.overwritten or ctx.mode != active():  # by the first backward of this graph; or laid out in another mode
        kept = kept[:0]
    # The rows of the kernel's slopes: grad, plain, and by_log, by_p, also with more outputs
    of_logps, of_lse, *of_more = grads[:5]
    zero = torch.zeros_like(tensors[-1])
    grad = zero if of_logps is None else of_logps
    plain = grad if of_lse is None else grad - of_lse
    rows = [grad, plain]
    if entropy.shape[0] and any(each is not None for each in of_more):
        of_entropy, of_sum_p2, of_mean_logit = (zero if each is None else each for each in of_more)
        group, ranks = ctx.options[-1], 1
        if group is not None:
            ranks = torch.distributed.distributed_c10d._resolve_process_group(group).size()
        plain = plain + of_entropy * entropy + 2 * of_sum_p2 * sum_p2
        rows = [grad, plain, of_entropy, 2 * of_sum_p2, of_mean_logit / (tensors[1].shape[0] * ranks)]
    slopes = torch.stack(rows)
    needed, op = ctx.needs_input_grad[:3], gate.token_logps_backward
    if kept.shape[0] and is_real(kept) and torch._C._has_storage(slopes):
        op, ctx.overwritten = gate.token_logps_backward_, True
    found = call_below_autograd(op, slopes, *tensors, kept, *ctx.options, *needed, ids, offsets)
    return *(grad if need else None for grad, need in zip(found, needed, strict=True)), *[None] * 11


register_autograd("token_logps", _formula, setup_context=_context)
