"""Log-probabilities of a packed row's next tokens, from hidden states: the logits of all tokens are never held at once.

logits = (hidden @ weight.T + bias) / temperature is ``[total, vocab]``: 5 GB in bf16 for 16,384 tokens of 151,936
entries, twice that in float32 and once more for the gradient. Here it is made in chunks ``[total, chunk]``, some
entries of the vocabulary for all tokens: a product of torch's (cuBLAS), then one kernel that adds each row to its
running maximum, sum of exponentials, chosen logit and entropy (online softmax). The backward makes each chunk again,
turns it in place into d(logits), and multiplies it with weight and with hidden.

The chunks are of the vocabulary, not of the tokens. The gradient of weight is the largest tensor. By chunks of the
vocabulary each of its entries is one product over all tokens, rounded once. Only the gradient of hidden is added up
from chunk to chunk, in float32.

What it costs beside the products (forward: one; backward: that one again, and one for each gradient): the kernel reads
the logits, and in backward writes them too. At 16,384 tokens, 151,936 entries and bf16 these are 5 GB and 10 GB, 1.2 ms
and 2.4 ms at 4.2 TB/s, where a product at 650 TFLOP/s takes 7.8 ms for hidden 1,024 and 31 ms for 4,096.
"""

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch

from packing_ops import _ops
from packing_ops._arguments import check_tensor, described, dtype_name, integer, number, one_number, sum_dtype
from packing_ops._autograd import on_its_own, past_autograd, register_autograd, register_no_autograd
from packing_ops._invariant import GRAIN, active, pad_rows
from packing_ops.metadata import PackedMetadata, cu_seqlens_of


@overload
def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    metadata: PackedMetadata | torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: Literal[False] = False,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> torch.Tensor: ...
@overload
def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    metadata: PackedMetadata | torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: Literal[True],
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    metadata: PackedMetadata | torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each slot's next token, for policy gradients and the like. Differentiable.

    Args:
        hidden: ``[total, hidden]`` or ``[1, total, hidden]``, float32, float64, bfloat16 or float16, any strides: what
            goes into the model's head.
        weight: ``[vocab, hidden]``, the head's (``lm_head.weight``), in the dtype of hidden. Under autocast hidden,
            weight and bias are cast as torch.nn.functional.linear casts them.
        labels: ``[total]`` or ``[1, total]``, int64 or int32, not shifted: label t is the token at t, predicted at
            t - 1. ``ignore_index`` where nothing counts.
        metadata: PackedMetadata of the row, or its cu_seqlens, int32 or int64 ``[num_documents + 1]``.
        temperature: the logits are divided by it, above 0.
        chunk: entries of the vocabulary whose logits are in memory at a time, ``total * chunk`` elements of hidden's
            dtype. By default as many as make 512 MiB (64 MiB on the CPU), at least 512, in equal chunks. Within
            packing_ops.invariant() a multiple of 4,096: no result of a slot then depends on chunk or on other slots.
        entropy: also return the entropy of each slot's prediction.
        bias: ``[vocab]``, the head's, the dtype of weight.
        ignore_index: of labels; it may be any number that they hold.
        group: of torch.distributed, where each rank has a shard of the vocabulary. weight and bias are the rank's
            shard, ``[vocab / ranks, ...]``, in the order of the ranks and equal in size. hidden and labels are the same
            on every rank, and so are the results. The gradient of hidden is summed over the ranks, so each rank has the
            whole gradient. Shards of different sizes are an error on the CPU and give NaN on CUDA.

    Returns:
        ``[total]``, float32 (float64 for float64): slot t holds log p(label t + 1). With ``entropy`` also the entropy
        at slot t, in nats. 0, with gradient 0, at the last slot of each document, where label t + 1 is
        ``ignore_index``, and in the padding after the documents. Sums are float32. Deterministic, and nothing
        synchronises. Work: 2 * total * hidden * vocab operations, in backward as many again and for each gradient;
        FlopCounterMode counts them after register_flop_formulas.

        Logits are rounded to hidden's dtype, as in a model. Gradients have the dtypes of their tensors. Memory beside
        results and gradients: one chunk of logits, four numbers per slot, and in backward a float32 gradient of hidden
        where hidden is of a half type. At 16,384 slots in bf16 this is 0.6 GB for hidden 1,024 and 0.8 GB for 4,096.

    Example:
        >>> hidden = torch.tensor([[0.0], [1.0], [2.0]])
        >>> weight, labels = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1, 1])
        >>> token_logps(hidden, weight, labels, torch.tensor([0, 3], dtype=torch.int32)).exp()
        tensor([0.5000, 0.7311, 1.0000])

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, temperature or chunk out of range, a label outside of the
            vocabulary (on CUDA in a later call). The message names the argument.
        NotImplementedError: a device without a kernel; second derivatives and forward-mode ones (torch.func.jvp).

    Method: Milakov and Gimelshein, online softmax (2018); Wijmans et al., Cut Your Losses (2024), for the chunks.
    """
    logps, of_entropy, _ = _logps(
        hidden, weight, labels, metadata, temperature, chunk, entropy, bias, ignore_index, group
    )
    return (logps, of_entropy) if entropy else logps


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    metadata: PackedMetadata | torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items_in_batch: float | torch.Tensor | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> torch.Tensor:
    """Cross-entropy of a packed row's next tokens, from hidden states: token_logps, added up.

    Args:
        reduction: ``"mean"`` over the slots that have a target (0 where there are none), ``"sum"``, or ``"none"``:
            ``[total]``, 0 where there is no target.
        num_items_in_batch: what "mean" divides by instead: the targets of all micro-batches of all ranks of the
            optimizer step (count_target_tokens). A tensor is not read.
        Others: as token_logps; see there for memory, gradients and errors too.

    Returns:
        A scalar, or ``[total]``; float32, float64 for float64.

    Example:
        >>> hidden = torch.tensor([[0.0], [1.0], [2.0]])
        >>> weight, labels = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1, 1])
        >>> chunked_cross_entropy(hidden, weight, labels, torch.tensor([0, 3], dtype=torch.int32))
        tensor(0.5032)

    Raises:
        ValueError: as token_logps; an unknown reduction, num_items_in_batch without "mean".
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(f"num_items_in_batch: expected None with reduction={reduction!r}, got {num_items_in_batch}")
    logps, _, targets = _logps(hidden, weight, labels, metadata, temperature, chunk, False, bias, ignore_index, group)
    losses = 0 - logps  # -logps would be -0.0 where there is no target
    if reduction == "none":
        return losses
    loss = losses.sum()
    if reduction == "sum":
        return loss
    if num_items_in_batch is None:
        num_items_in_batch = (targets >= 0).sum().clamp(min=1)
    elif isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = one_number(num_items_in_batch, "num_items_in_batch").to(loss.device, non_blocking=True)
    return loss / num_items_in_batch


def _logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    metadata: PackedMetadata | torch.Tensor,
    temperature: float,
    chunk: int | None,
    entropy: bool,
    bias: torch.Tensor | None,
    ignore_index: int,
    group: "torch.distributed.ProcessGroup | None",
) -> tuple[torch.Tensor, ...]:
    check_tensor(labels, "labels")
    hidden, weight, bias = checked_head(hidden, weight, bias)
    total = hidden.shape[0]
    if labels.shape not in ((total,), (1, total)):
        raise ValueError(f"labels: expected [total={total}] or [1, total] like hidden, got {_described(labels)}")
    if labels.device != hidden.device:
        raise ValueError(f"labels: expected on {hidden.device} like hidden, got {_described(labels)}")
    cu_seqlens = cu_seqlens_of(metadata, total, like="hidden", name="metadata")
    ranks = 1 if group is None else group.size()
    targets = _ops.logps_targets(labels.reshape(-1), cu_seqlens, ignore_index, weight.shape[0] * ranks)
    return *logps_of_targets(hidden, weight, bias, targets, temperature, chunk, entropy, group), targets


def checked_head(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """hidden ``[total, hidden]``, weight and bias, as autocast casts them. ValueError where they do not fit."""
    for name, tensor in (("hidden", hidden), ("weight", weight), *([] if bias is None else [("bias", bias)])):
        check_tensor(tensor, name)
    hidden, weight, bias = _as_autocast(hidden, weight, bias)
    hidden = hidden[0] if hidden.dim() == 3 and hidden.shape[0] == 1 else hidden
    if hidden.dim() != 2 or hidden.dtype not in _FLOATS:
        raise ValueError(
            "hidden: expected float32, float64, bfloat16 or float16 [total, hidden] or [1, total, hidden], "
            f"got {_described(hidden)}"
        )
    size = hidden.shape[1]
    if weight.dim() != 2 or weight.shape[1] != size:
        raise ValueError(f"weight: expected [vocab, hidden={size}], got {_described(weight)}")
    _check_like_hidden("weight", weight, hidden)
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: expected [vocab={weight.shape[0]}] like weight, got {_described(bias)}")
        _check_like_hidden("bias", bias, hidden)
    return hidden, weight, bias


def logps_of_targets(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk: int | None,
    entropy: bool,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy ``[total]`` of what each row predicts: targets, int32 ``[total]``, -1 for none."""
    temperature = number(temperature, "temperature")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    if chunk is not None and (chunk := integer(chunk, "chunk")) < 1:
        raise ValueError(f"chunk: expected at least 1 entry of the vocabulary, got {chunk}")
    group_name = None if group is None else group.group_name
    logps, of_entropy, _ = _ops.token_logps(hidden, weight, bias, targets, 1 / temperature, chunk, entropy, group_name)
    return logps, of_entropy


def _as_autocast(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What autocast makes of the arguments of a linear layer."""
    device = hidden.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(hidden), cast(weight), None if bias is None else cast(bias)


def _check_like_hidden(name: str, tensor: torch.Tensor, hidden: torch.Tensor) -> None:
    if tensor.dtype != hidden.dtype:
        raise ValueError(f"{name}: expected {dtype_name(hidden.dtype)} like hidden, got {_described(tensor)}")
    if tensor.device != hidden.device:
        raise ValueError(f"{name}: expected on {hidden.device} like hidden, got {_described(tensor)}")


def _described(tensor: torch.Tensor) -> str:
    return f"{described(tensor)} on {tensor.device}"


# --- the two ops that loop over chunks ---

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LOGITS_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_FEWEST = 512  # entries of a chunk: smaller products do not fill a GPU
_MULTIPLE = 128  # whole tiles of the product, rows aligned to 16 bytes


def _chunk_of(chunk: int | None, hidden: torch.Tensor, vocab: int) -> int:
    if chunk is None:
        most = _LOGITS_BYTES[hidden.device.type] // max(hidden.shape[0] * hidden.element_size(), 1)
        count = -(-vocab // max(most, _FEWEST))
        chunk = _round_up(-(-vocab // count), _MULTIPLE)
    if active():
        chunk = max(chunk // GRAIN, 1) * GRAIN
    return min(chunk, vocab)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class _Chunks:
    # Yields (slice of the vocabulary, first entry of all ranks' vocabulary, its weight, bias and logits). In the mode
    # invariant(), on the CPU, hidden and logits have whole blocks of rows, more than there are targets.

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chunk: int | None,
        group: str | None,
    ) -> None:
        # Other strides: copied once here, not by the product of every chunk.
        self.hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        self.rows, self.invariant = hidden.shape[0], active()
        self.hidden = pad_rows(self.hidden) if self.invariant else self.hidden
        self.weight = weight if 1 in weight.stride() else weight.contiguous()
        self.bias = None if bias is None else bias.to(sum_dtype(hidden.dtype)).contiguous()
        self.group = None
        if group is not None:
            # The op's schema has a str, which torch 2.13 gives a type of its own.
            self.group = torch.distributed.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        self.chunk = _chunk_of(chunk, hidden, weight.shape[0])

    def __iter__(self) -> Iterator[tuple[slice, int, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        vocab = self.weight.shape[0]
        offset = 0 if self.group is None else self.group.rank() * vocab
        # Rows start on 16 bytes, whatever the chunk.
        memory = self.hidden.new_empty(self.hidden.shape[0], _round_up(self.chunk, 8))
        for first in range(0, vocab, self.chunk):
            part = slice(first, min(first + self.chunk, vocab))
            logits, weight = memory[:, : part.stop - first], self.weight[part]
            for grain in self.grains(part.stop - first) if logits.is_cpu else [slice(None)]:
                torch.mm(self.hidden, weight[grain].t(), out=logits[:, grain])
            yield part, offset + first, weight, None if self.bias is None else self.bias[part], logits

    def grains(self, columns: int) -> list[slice]:
        """The columns of a chunk that one product takes."""
        size = GRAIN if self.invariant else max(columns, 1)
        return [slice(first, first + size) for first in range(0, columns, size)]


@on_its_own
def _token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    inv_temperature: float,
    chunk: int | None,
    entropy: bool,
    group: str | None,
) -> tuple[torch.Tensor, ...]:
    dtype = sum_dtype(hidden.dtype)
    state = hidden.new_zeros(4 if entropy else 3, hidden.shape[0], dtype=dtype)
    state[0] = -float("inf")
    for _, first, _, part_of_bias, logits in (chunks := _Chunks(hidden, weight, bias, chunk, group)):
        _ops.logps_chunk_(logits[: chunks.rows], part_of_bias, targets, first, inv_temperature, state)
    if chunks.group is not None:
        _add_up_ranks(state, chunks.group, weight.shape[0])
    largest, total, chosen, *weighted = state
    kept = targets >= 0
    log_total = total.log()
    lse = torch.where(kept, largest + log_total, 0)
    of_entropy = torch.where(kept, log_total - weighted[0] / total, 0) if entropy else state.new_empty(0)
    return torch.where(kept, chosen - lse, 0), of_entropy, lse


def _add_up_ranks(state: torch.Tensor, group: "torch.distributed.ProcessGroup", vocab: int) -> None:
    """Each rank's sums over the largest logit of all ranks, added. Shards of other sizes give NaN where nothing waits."""
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
    for weighted in state[3:]:
        weighted.copy_(torch.where(scale == 0, 0, scale * (weighted + below * state[1])))
    state[1] *= scale
    all_reduce(state[1:], ReduceOp.SUM, group)


@on_its_own
def _token_logps_backward(
    grad_logps: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    inv_temperature: float,
    chunk: int | None,
    group: str | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, ...]:
    grad_logps = torch.zeros_like(lse) if grad_logps is None else grad_logps.contiguous()
    if grad_entropy is not None:
        grad_entropy = grad_entropy.contiguous()
    of_entropy = None if grad_entropy is None else entropy
    chunks = _Chunks(hidden, weight, bias, chunk, group)
    grad_hidden = hidden.new_zeros(chunks.hidden.shape if need_hidden else 0, dtype=lse.dtype)
    grad_weight = weight.new_empty(weight.shape if need_weight else 0)
    grad_bias = weight.new_empty(weight.shape[0] if need_bias else 0)
    for part, first, part_of_weight, part_of_bias, all_logits in chunks:
        logits = all_logits[: chunks.rows]
        _ops.logps_chunk_backward_(
            logits, part_of_bias, targets, first, inv_temperature, lse, grad_logps, of_entropy, grad_entropy
        )
        if need_hidden:
            for grain in chunks.grains(logits.shape[1]):
                _add_product(grad_hidden, all_logits[:, grain], part_of_weight[grain])
        if need_weight:
            torch.mm(logits.t(), chunks.hidden[: chunks.rows], out=grad_weight[part])
        if need_bias:
            grad_bias[part] = logits.sum(0, dtype=lse.dtype)
    grad_hidden = grad_hidden[: chunks.rows]
    if need_hidden and chunks.group is not None:
        torch.distributed.all_reduce(grad_hidden, group=chunks.group)
    return grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b in the dtype of total: rounded to a half type, each chunk would cost another error."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # no such product on the CPU
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


# --- registration: shapes for torch.compile, gradients ---

_registrations = torch.library.Library("packing_ops", "IMPL")
for _key in ("CPU", "CUDA"):
    _registrations.impl("token_logps", _token_logps, _key)
    _registrations.impl("token_logps_backward", _token_logps_backward, _key)


@_ops.register_fake("logps_targets")
def _(labels: torch.Tensor, cu_seqlens: torch.Tensor, ignore_index: int, vocab: int) -> torch.Tensor:
    return labels.new_empty(labels.numel(), dtype=torch.int32)


for _in_place in ("logps_chunk_", "logps_chunk_backward_"):
    _ops.register_fake(_in_place)(lambda logits, *others: None)


@_ops.register_fake("token_logps")
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    inv_temperature: float,
    chunk: int | None,
    entropy: bool,
    group: str | None,
) -> tuple[torch.Tensor, ...]:
    total, dtype = hidden.shape[0], sum_dtype(hidden.dtype)
    return tuple(hidden.new_empty(size, dtype=dtype) for size in (total, total if entropy else 0, total))


@_ops.register_fake("token_logps_backward")
def _(
    grad_logps: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, ...]:
    shapes, needed = (hidden.shape, weight.shape, weight.shape[:1]), others[-3:]
    return tuple(hidden.new_empty(shape if need else 0) for shape, need in zip(shapes, needed, strict=True))


def _token_logps_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    hidden, weight, bias, targets, ctx.inv_temperature, ctx.chunk, _, ctx.group = inputs
    _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)


def _token_logps_backward_formula(
    ctx: Any, grad_logps: torch.Tensor | None, grad_entropy: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    if grad_entropy is not None and grad_entropy.numel() == 0:
        grad_entropy = None
    needed = ctx.needs_input_grad[:3]
    options = ctx.inv_temperature, ctx.chunk, ctx.group, *needed
    grads = past_autograd(_ops.token_logps_backward, grad_logps, grad_entropy, *ctx.saved_tensors, *options)
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *[None] * 5


register_autograd("token_logps", _token_logps_backward_formula, setup_context=_token_logps_context)
register_no_autograd("token_logps_backward", of="token_logps")
