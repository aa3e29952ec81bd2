"""How far a student's prediction of the next token is from a teacher's, from the hidden states and heads of both.

As in packing_ops.losses.logps the logits of all tokens are never held at once. Between beta 0 and 1 a divergence needs
all logits of a token twice: for the sum of exponentials of both heads, then for its terms. In chunks of the vocabulary
the products would be made twice, so the forward takes blocks of rows ``[rows, vocab]``: a product for each head, then
one kernel, which for beta 0 and 1 reads a row once on CUDA. The backward takes chunks of the vocabulary ``[total,
chunk]``, as in token_logps and for its reasons: a product for each head, a kernel that turns the student's logits
into d(logits) in place, and a product for each gradient. Or the forward makes d(z) of a block of rows as soon as it has
their sums, and keeps it: d(logits) except the rows' gradients, which the backward multiplies in. Both round d(z)
before that, so within packing_ops.invariant() the gradients have the same bits.

Products, in all: forward one for each head, backward those again and one for each gradient, for every divergence; where
all is kept, one for each head and one for each gradient.
"""

from types import SimpleNamespace
from typing import Any, Literal

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import at_least, described, number, old_name, sum_dtype
from packing_ops._runtime.autograd import call_below_autograd, implements, register_autograd, register_no_autograd
from packing_ops.invariance.mode import ROWS, active, pad_rows, rows_of_product
from packing_ops.losses.chunks import (
    TILE,
    Chunks,
    Gradients,
    Rows,
    check_kept,
    chunk_of,
    kept_shape,
    round_up,
    rows_at_most,
)
from packing_ops.losses.logps import Head, bytes_to_keep, check_positive, checked_head, checked_labels
from packing_ops.metadata import PackedMetadata, cu_seqlens_of


@old_name("metadata")
def token_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    chunk: int | None = None,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    max_targets: int | None = None,
    keep_logits: int | Literal["auto"] = 0,
) -> torch.Tensor:
    """Compute the divergence between a student's and a teacher's prediction of each slot's next token, for
    distillation. Differentiable.

    With P the student's prediction, Q the teacher's and M = beta Q + (1 - beta) P:

        beta 0:   KL(Q || P), forward: the student covers whatever the teacher may say
        beta 1:   KL(P || Q), reverse: the student says only what the teacher may say
        between:  beta KL(Q || M) + (1 - beta) KL(P || M), generalized Jensen-Shannon, as TRL and Liger have it

    Between 0 and 1 it goes to 0 at both ends, where it is not the Kullback-Leibler divergence of beta 0 and 1.

    Args:
        hidden, weight: the student's, as token_logps: ``[total, hidden]`` or ``[1, total, hidden]``, and
            ``[vocab, hidden]``.
        teacher_hidden, teacher_weight: the teacher's for the same slots and vocabulary, in the dtype of hidden; its
            hidden size may be another. They are constants: their gradient is None, without an error.
        labels: which slots count, as token_logps takes them, not shifted: slot t counts where ``labels[t + 1]`` is of
            the same document and not ``ignore_index``. A bool mask of tokens counts them where it is True, such as a
            completion mask. None: every token.
        cu_seqlens: PackedMetadata of the row, or its cu_seqlens, int32 or int64 ``[num_documents + 1]``.
        beta: 0 to 1.
        temperature: the student's logits are divided by it, above 0. Nothing multiplies the result by its square.
        teacher_temperature: the teacher's; by default temperature.
        chunk: entries of the vocabulary whose logits are in memory at a time, rounded up to a multiple of 8: of each
            head ``total * chunk`` elements of hidden's dtype, in forward too, where they are fewer rows of the whole
            vocabulary. By default as many as make 512 MiB for both heads (64 MiB on the CPU).
        bias, teacher_bias: ``[vocab]``, the heads', the dtype of weight.
        ignore_index: of labels that are no mask; it may be any number that they hold.
        max_targets: slots that count, or an upper bound, as token_logps: the products take no more rows. By default
            ``cu_seqlens.num_targets`` for labels that are no mask. On the CPU they are counted; on CUDA without a bound
            all rows are multiplied. More slots than the bound are an error, on CUDA in a later call, and NaN.
        keep_logits: bytes for the gradient of the student's logits, in hidden's dtype, which the forward then makes and
            keeps for as many chunks as fit. The backward makes no logits of these. 0 keeps nothing, nor does float16.
            ``"auto"``: half of what is free, as token_logps has it. Within packing_ops.invariant() gradients have the
            same bits as with 0.

    Returns:
        ``[total]``, float32 (float64 for float64), in nats. 0, with gradient 0, at the last slot of each document,
        where the next token does not count, and in the padding after the documents. inf where P has no weight on what Q
        has (beta 0), or the other way round (beta 1); NaN where a slot's logits have one. Sums are float32. Within
        packing_ops.invariant() no result of a slot, and no gradient of hidden, depends on chunk or on other slots.

        Work: 2 * rows * vocab * (hidden + teacher's hidden) operations, in backward as many again (of what was not
            kept)
        and 2 * rows * vocab * hidden for each gradient. Memory besides results and gradients: one chunk of logits of
        each head, four numbers per slot, the gathered rows, what is kept (``rows * vocab`` elements of hidden's dtype
        for all), and in backward a float32 gradient of hidden where hidden is of a half type. At 16,384 slots in bf16
        this is 0.6 GB for hidden 1,024 and 0.8 GB for 4,096, and 5 GB more for a vocabulary of 151,936 with all kept.

    Example:
        >>> hidden = torch.tensor([[0.0], [1.0], [2.0]])
        >>> teacher_hidden = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
        >>> weight, teacher_weight = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 0.0], [2.0, 1.0]])
        >>> cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
        >>> token_kl(hidden, weight, teacher_hidden, teacher_weight, None, cu_seqlens)
        tensor([0.3278, 0.1201, 0.0000])
        >>> mask = torch.tensor([False, False, True])  # the last token counts: slot 1 predicts it
        >>> token_kl(hidden, weight, teacher_hidden, teacher_weight, mask, cu_seqlens, beta=0.5)
        tensor([0.0000, 0.0285, 0.0000])

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, heads of different vocabularies, beta, a temperature,
            chunk or keep_logits out of range, a label outside of the vocabulary, more slots than max_targets (both on
            CUDA in a later call). The message names the argument.
        NotImplementedError: a device without a kernel; second derivatives and forward-mode ones (torch.func.jvp).

    Method: Hinton et al., distillation (2015); Agarwal et al., generalized knowledge distillation (2023), for the
        divergences.

    Determinism: the same bits in every call; within packing_ops.invariant() also in any pack and chunk.
    Synchronises: never; a wrong label on CUDA raises in a later call.
    Memory: one chunk of logits of each head and what is kept; in backward a float32 gradient of hidden of a half type.
    Gradients: of hidden, weight and bias of the student. No second derivative, no forward mode.
    """
    hidden, weight, bias = checked_head(hidden, weight, bias)
    try:
        teacher_hidden, teacher_weight, teacher_bias = checked_head(teacher_hidden, teacher_weight, teacher_bias)
    except (TypeError, ValueError) as error:
        raise type(error)(f"teacher_{error}") from None
    for name in ("dtype", "device"):
        wanted, got = getattr(hidden, name), getattr(teacher_hidden, name)
        if wanted != got:
            raise ValueError(f"teacher_hidden: expected {name} {wanted} like hidden, got {got}")
    if teacher_hidden.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"teacher_hidden: expected [total={hidden.shape[0]}, hidden] like hidden, got {described(teacher_hidden)}"
        )
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight: expected [vocab={weight.shape[0]}, hidden] like weight, got {described(teacher_weight)}: "
            "cut both heads to the entries that they share"
        )
    beta, inv_temperature = number(beta, "beta"), _inverse(temperature, "temperature")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta: expected 0 to 1, got {beta}")
    teacher_inv_temperature = (
        inv_temperature if teacher_temperature is None else _inverse(teacher_temperature, "teacher_temperature")
    )
    chunk = None if chunk is None else at_least(chunk, "chunk", 1, "entry of the vocabulary")
    # Targets, and how many
    total, are_labels = hidden.shape[0], labels is not None
    if labels is None:
        labels, ignore_index = torch.zeros(total, dtype=torch.int32, device=hidden.device), -1
    labels = checked_labels(labels, hidden)
    if labels.dtype == torch.bool:
        labels, ignore_index, are_labels = labels.int() - 1, -1, False
    of_row = cu_seqlens_of(cu_seqlens, total, like="hidden")
    targets = gate.logps_targets(labels, of_row, ignore_index, weight.shape[0])
    if max_targets is None and isinstance(cu_seqlens, PackedMetadata) and are_labels:
        max_targets = cu_seqlens.num_targets
    if max_targets is not None:
        max_targets = at_least(max_targets, "max_targets", 0)
    teacher = [None if t is None else t.detach() for t in (teacher_hidden, teacher_weight, teacher_bias)]
    numbers = inv_temperature, teacher_inv_temperature, beta
    keep = bytes_to_keep(keep_logits, (hidden, weight, bias))
    return gate.token_kl(hidden, weight, bias, *teacher, targets, *numbers, chunk, max_targets, keep)[0]


def _inverse(temperature: float, name: str) -> float:
    check_positive(temperature := number(temperature, name), name)
    return 1 / temperature


# --- the two ops that loop over blocks of rows and chunks of the vocabulary ---


def _heads(
    rows: Rows, head: Head, teacher: Head, chunk: int | None, max_targets: int | None, kept: torch.Tensor
) -> tuple[Chunks, ...]:
    """Return chunks of both heads, over the rows that have a target. Their logits share the memory that one head's
    would have.
    """
    hidden, weight, _ = head
    at_most = rows_at_most(hidden.shape[0], max_targets)
    chunk = chunk_of(chunk, 2 * at_most, hidden, weight.shape[0])
    return tuple(Chunks(rows, *each, chunk, None, kept) for each in (head, teacher))


def _new_kept(
    hidden: torch.Tensor, weight: torch.Tensor, chunk: int | None, max_targets: int | None, keep_logits: int
) -> torch.Tensor:
    """Allocate ``[rows, chunks, columns]`` for d(z). Rows are first, so that a block of rows is one slice over all
    chunks. None in float16: before the rows' gradients are multiplied in, d(z) may be outside of its range.
    """
    keep_logits = 0 if hidden.dtype == torch.float16 else keep_logits
    chunks, rows, columns = kept_shape(hidden, weight.shape[0], chunk, max_targets, keep_logits, heads=2)
    return hidden.new_empty(rows, chunks, columns)


def _is_finite(stats: torch.Tensor) -> torch.Tensor:
    """Return bool ``[rows]``: whether d(z) is finite. The divergence, stats[0], may be inf where it is."""
    return stats[1:].isfinite().all(0)


def _block_of(head: Chunks) -> int:
    """Count the rows of the whole vocabulary that are no more logits than a chunk has, in equal blocks."""
    blocks = -(-head.rows // max(head.rows * head.chunk // head.weight.shape[0], 1))
    size = -(-head.rows // max(blocks, 1))
    return max(round_up(size, ROWS if size < TILE else TILE), ROWS)


def _logits_of(head: Chunks, rows: slice, memory: torch.Tensor) -> torch.Tensor:
    hidden = head.hidden[rows]
    hidden = pad_rows(hidden) if head.invariant else hidden
    logits = memory[: hidden.shape[0], : head.weight.shape[0]]
    head.multiply(head.weight, logits, hidden)
    return logits[: min(rows.stop, head.rows) - rows.start]


@implements("token_kl")
def _token_kl(*arguments: Any) -> tuple[torch.Tensor, ...]:
    targets, *numbers, chunk, max_targets, keep_logits = arguments[6:]
    rows = Rows(targets, max_targets)
    kept = _new_kept(arguments[0], arguments[1], chunk, max_targets, keep_logits)
    head, teacher = heads = _heads(rows, arguments[:3], arguments[3:6], chunk, max_targets, kept.transpose(0, 1))
    found = head.hidden.new_empty(4, head.rows, dtype=sum_dtype(head.hidden.dtype))
    block, vocab = _block_of(head), head.weight.shape[0]
    size = min(block, head.hidden.shape[0])
    size = rows_of_product(size, head.hidden) if head.invariant else size
    memory = [each.hidden.new_empty(size, round_up(vocab, 8)) for each in heads]
    kept_dz = kept.flatten(1)[: head.rows, :vocab]
    columns = slice(kept_dz.shape[1])
    for first in range(0, head.rows, block):
        part = slice(first, first + block)
        logits, teacher_logits = (_logits_of(*each) for each in zip(heads, (part, part), memory, strict=True))
        of_block = rows.targets[part].contiguous()
        stats = gate.kl_rows(logits, head.bias, teacher_logits, teacher.bias, of_block, *numbers)
        found[:, part] = stats
        if kept_dz.numel():
            both = logits[:, columns], head.bias_of(columns), teacher_logits[:, columns], teacher.bias_of(columns)
            of_block = of_block.masked_fill(~_is_finite(stats), -1)
            gate.kl_chunk_backward_(*both, of_block, *numbers, stats, None, kept_dz[part])
    stats = found if rows.index is None else torch.stack(rows.back(*found))
    over = rows.over_bound()
    return stats[0].clone() if over is None else stats[0].masked_fill(over, torch.nan), stats, kept


@implements("token_kl_backward")
def _token_kl_backward(grad: torch.Tensor | None, *arguments: Any) -> tuple[torch.Tensor, ...]:
    targets, stats, kept, *numbers, chunk, max_targets, need_hidden, need_weight, need_bias = arguments[6:]
    grad = torch.zeros_like(stats[0]) if grad is None else grad
    rows, kept = Rows(targets, max_targets), kept.transpose(0, 1)
    check_kept(kept, arguments[0], arguments[1].shape[0], chunk, max_targets, heads=2)
    head, teacher = _heads(rows, arguments[:3], arguments[3:6], chunk, max_targets, kept)
    stats = rows.of(stats)
    # Of each row of d(z): grad, 0 where the row does not count, NaN where d(z) is not finite: kept, it is zeros
    scales = (numbers[0] * rows.of(grad)).masked_fill(rows.targets < 0, 0)
    scales.masked_fill_((scales != 0) & ~_is_finite(stats), torch.nan)
    of_rows = rows.targets, *numbers, stats, scales
    gradients = Gradients(head, stats.dtype, need_hidden, need_weight, need_bias)
    of_kept = head.scratch() if kept.shape[0] else kept  # memory for their d(logits)
    for (part, _, weight, bias, logits, is_kept), (_, _, teacher_weight, teacher_bias, teacher_logits, _) in zip(
        head, teacher, strict=True
    ):
        if is_kept:
            kept_dz, logits = logits[: head.rows], of_kept[:, : logits.shape[1]]
            gate.kl_scale_kept_(kept_dz, scales, logits[: head.rows])
        else:
            head.multiply(weight, logits)
            teacher.multiply(teacher_weight, teacher_logits)
            out = logits[: head.rows]
            gate.kl_chunk_backward_(out, bias, teacher_logits[: head.rows], teacher_bias, *of_rows, out)
        gradients.add(part, weight, logits)
    return gradients.finished(rows, head.hidden.dtype)


# --- registration: shapes for torch.compile, gradients ---


def _shapes(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    total, dtype = a.hidden.shape[0], sum_dtype(a.hidden.dtype)
    kl, stats = a.hidden.new_empty(total, dtype=dtype), a.hidden.new_empty((4, total), dtype=dtype)
    return kl, stats, _new_kept(a.hidden, a.weight, a.chunk, a.max_targets, a.keep_logits)


gate.register_fake("token_kl", _shapes)


def _token_kl_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, stats, kept = output
    ctx.mark_non_differentiable(stats, kept)
    ctx.save_for_backward(*inputs[:7], stats, kept)
    ctx.options, ctx.mode = inputs[7:-1], active()


def _token_kl_backward_formula(ctx: Any, grad: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    *tensors, kept = ctx.saved_tensors
    kept = kept if ctx.mode == active() else kept[:, :0]  # the other mode has other chunks
    needed = ctx.needs_input_grad[:3]
    grads = call_below_autograd(gate.token_kl_backward, grad, *tensors, kept, *ctx.options, *needed)
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *[None] * 10


register_autograd("token_kl", _token_kl_backward_formula, setup_context=_token_kl_context)
register_no_autograd("token_kl_backward", of="token_kl")
