"""Log-probabilities of a packed row's next tokens, from hidden states: the logits of all tokens are never held at once.

The logits, hidden @ weight.T + bias, are ``[total, vocab]``: 5 GB in bf16 for 16,384 tokens of 151,936 entries, twice
that in float32 and once more for the gradient. Here they are made in chunks ``[total, chunk]``, some entries of the
vocabulary for all tokens that have a target: a product of torch's (cuBLAS), then one kernel that adds each row to its
running maximum, sum of exponentials and chosen logit (online softmax). The backward makes each chunk again, or takes it
from those that were kept, turns it in place into d(logits), and multiplies it with weight and with hidden
(losses/op.py, losses/chunks.py).

Its cost besides the products (forward: one; backward: the same again where the logits were not kept, and one for
each gradient): the kernel reads the logits, and in backward writes them too. At 16,384 tokens, 151,936 entries and bf16
these are 5 GB and 10 GB, 1.2 ms and 2.4 ms at 4.2 TB/s, where a product at 650 TFLOP/s takes 7.8 ms for hidden 1,024
and 31 ms for 4,096.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, overload

import torch
from typing_extensions import Unpack

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    FLOATS,
    as_autocast,
    at_least,
    check_tensor,
    described,
    dtype_name,
    number,
    old_name,
    one_number,
    one_of,
    refuse_gradient,
)
from packing_ops._runtime.batch_cache import is_captured
from packing_ops.losses.op import ALWAYS, OUTPUTS
from packing_ops.metadata import PackedMetadata, cu_seqlens_of


class HeadKeywords(TypedDict, total=False):
    """Names the options of log-probabilities where overloads take them all. Their defaults are the functions'."""

    temperature: float | torch.Tensor
    chunk: int | None
    bias: torch.Tensor | None
    ignore_index: int
    scale: float
    softcap: float
    max_targets: int | None
    keep_logits: int | Literal["auto"]
    allowed_ids: torch.Tensor | None
    allowed_offsets: torch.Tensor | None


class LogpsKeywords(HeadKeywords, total=False):
    """Adds what only token_logps takes."""

    group: "torch.distributed.ProcessGroup | None"


@overload
def token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, *,
    entropy: Literal[False] = False, outputs: None = None, **options: Unpack[LogpsKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, *,
    entropy: Literal[True], outputs: None = None, **options: Unpack[LogpsKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, *,
    entropy: Literal[False] = False, outputs: Sequence[str], **options: Unpack[LogpsKeywords],
) -> tuple[torch.Tensor, ...]: ...  # fmt: skip
@old_name("metadata")
def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    group: "torch.distributed.ProcessGroup | None" = None,
    outputs: Sequence[str] | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    max_targets: int | None = None,
    keep_logits: int | Literal["auto"] = 0,
    allowed_ids: torch.Tensor | None = None,
    allowed_offsets: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute the log-probability of each slot's next token, for policy gradients and the like. Differentiable.

    With logits = hidden @ weight.T + bias and z = softcap * tanh(scale * logits / softcap) / temperature, without a
    softcap z = scale * logits / temperature, and p = softmax(z).

    Args:
        hidden: ``[total, hidden]`` or ``[1, total, hidden]``, float32, float64, bfloat16 or float16, any strides: what
            goes into the model's head.
        weight: ``[vocab, hidden]``, the head's (``lm_head.weight``), in the dtype of hidden. Under autocast hidden,
            weight and bias are cast as torch.nn.functional.linear casts them.
        labels: ``[total]`` or ``[1, total]``, int64 or int32, not shifted: label t is the token at t, predicted at
            t - 1. ``ignore_index`` where nothing counts.
        cu_seqlens: PackedMetadata of the row, or its cu_seqlens, int32 or int64 ``[num_documents + 1]``.
        temperature: above 0; or a floating tensor ``[total]`` or ``[1, total]``: of what each slot predicts. It gets no
            gradient.
        chunk: entries of the vocabulary whose logits are in memory at a time, rounded up to a multiple of 8:
            ``total * chunk`` elements of hidden's dtype. By default as many as make 512 MiB (64 MiB on the CPU), at
            least 512, in equal chunks. Within packing_ops.invariant() a multiple of 4,096: no result of a slot then
            depends on chunk or on other slots.
        entropy: ``True`` for ``outputs=("logps", "entropy")``.
        bias: ``[vocab]``, the head's, the dtype of weight.
        ignore_index: of labels; it may be any number that they hold.
        group: of torch.distributed, where each rank has a shard of the vocabulary. weight and bias are the rank's
            shard, ``[vocab / ranks, ...]``, in the order of the ranks and equal in size. hidden and labels are the same
            on every rank, and so are the results. The gradient of hidden is summed over the ranks, so each rank has the
            whole gradient. Shards of different sizes are an error on the CPU and give NaN on CUDA.
        outputs: what is returned, by names, in their order: ``"logps"``; ``"lse"``, the log of the sum of exp(z);
            ``"entropy"`` in nats; ``"sum_p2"``, the sum of p squared; ``"mean_logit"``, the mean of z over the
            vocabulary (for label smoothing); ``"top1"``, int64, the entry of the largest z, the first among equals,
            without a gradient, -1 without a target or without a finite lse.
        scale: of the logits, above 0.
        softcap: bound of the scaled logits, 0 or inf for no cap. In half types on CUDA z is wrong by up to 1e-7 *
            softcap.
        max_targets: slots that have a target, or an upper bound: the products take no more rows. By default
            ``cu_seqlens.num_targets``, which the collators count. On the CPU the targets themselves are counted; on
            CUDA without a bound all rows are multiplied, as nothing waits for the GPU. More targets than the bound
            are an error, on CUDA in a later call, and NaN where they are left out.
        keep_logits: bytes. The logits of as many chunks as fit are kept for the backward, which then need not make them
            again, and their gradient takes their place. ``"auto"``: half of the memory that the GPU and torch's
            allocator have free at the call; nothing on the CPU, in torch.compile and in the capture of a CUDA graph.
            Under torch.utils.checkpoint give bytes: both forwards must keep the same. Gradients have the same bits.
        allowed_ids: int64 or int32, entries of the vocabulary, in any order: those that the sampler could draw each
            token from (its top-k, top-p, min-p), one label's after another. Softmax and all outputs are then over a
            token's entries, as if all other z were -inf: log p(token | its entries). One without entries is over the
            whole vocabulary.
        allowed_offsets: int64 or int32 ``[total + 1]``: label t was drawn from
            ``allowed_ids[allowed_offsets[t] : allowed_offsets[t + 1]]``, not shifted, as labels are not.

    Returns:
        ``[total]``, float32 (float64 for float64): slot t holds log p(label t + 1). With ``outputs`` a tuple of such.
        0, with gradient 0, at the last slot of each document, where label t + 1 is ``ignore_index``, and in the padding
        after the documents. NaN where a logit is NaN. Sums are float32. Work: 2 * rows * hidden * vocab operations, in
        backward as many again (of the logits that were not kept) and for each gradient; FlopCounterMode counts them
        after register_flop_formulas.

        Logits are rounded to hidden's dtype, as in a model. Gradients have the dtypes of their tensors. Memory besides
        results and gradients: one chunk of logits and those that are kept, some numbers per slot, the gathered rows of
        hidden, and in backward a float32 gradient of hidden where hidden is of a half type. At 16,384 slots in bf16
        this is 0.6 GB for hidden 1,024 and 0.8 GB for 4,096, and 5 GB more with all logits kept.

    Example:
        >>> hidden = torch.tensor([[0.0], [1.0], [2.0]])
        >>> weight, labels = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1, 1])
        >>> token_logps(hidden, weight, labels, torch.tensor([0, 3], dtype=torch.int32)).exp()
        tensor([0.5000, 0.7311, 1.0000])

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, temperature, scale, softcap or chunk out of range, an
            unknown name in outputs, "mean_logit" with allowed_ids; a label or an allowed id outside of the
            vocabulary, a label that is not among its allowed ids, allowed_offsets that do not start at 0, decrease, or
            do not end at the number of allowed_ids, a temperature in a tensor that is not above 0, more targets than
            max_targets (these on CUDA in a later call; the log-probability of a label that is not allowed is -inf
            there). The message names the argument.
        NotImplementedError: a device without a kernel; second derivatives and forward-mode ones (torch.func.jvp).

    Method: Milakov and Gimelshein, online softmax (2018); Wijmans et al., Cut Your Losses (2024), for the chunks.

    Determinism: the same bits in every call; within packing_ops.invariant() also in any pack and chunk.
    Synchronises: never; a wrong label on CUDA raises in a later call.
    Memory: one chunk of logits and those that are kept; in backward a float32 gradient of hidden of a half type.
    Gradients: of hidden, weight and bias. No second derivative, no forward mode.
    """
    names = output_names(entropy, outputs)
    allowed = allowed_ids, allowed_offsets
    options = LogpsOptions(temperature, scale, softcap, chunk, max_targets, keep_logits, group, allowed)
    found, _ = _logps((hidden, weight, bias), labels, cu_seqlens, ignore_index, names, options)
    return found[0] if outputs is None and not entropy else found


@old_name("metadata")
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk: int | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items_in_batch: float | torch.Tensor | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    max_targets: int | None = None,
    keep_logits: int | Literal["auto"] = 0,
) -> torch.Tensor:
    """Compute the cross-entropy of a packed row's next tokens from hidden states: token_logps, added up.

    Args:
        reduction: ``"mean"`` over the slots that have a target (0 without any), ``"sum"``, or ``"none"``:
            ``[total]``, 0 without a target.
        num_items_in_batch: what "mean" divides by instead: the targets of all micro-batches of all ranks of the
            optimizer step (count_target_tokens). A tensor is not read. Where it is 0 there is no target, and the loss
            is 0.
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

    Determinism: as token_logps.
    Synchronises: as token_logps.
    Memory: as token_logps.
    Gradients: as token_logps.
    """
    one_of(reduction, ("mean", "sum", "none"), "reduction")
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(f"num_items_in_batch: expected None with reduction={reduction!r}, got {num_items_in_batch}")
    options = LogpsOptions(temperature, scale, softcap, chunk, max_targets, keep_logits, group)
    (logps,), targets = _logps((hidden, weight, bias), labels, cu_seqlens, ignore_index, ("logps",), options)
    losses = 0 - logps  # -logps would be -0.0 without a target
    if reduction == "none":
        return losses
    loss = losses.sum()
    if reduction == "sum":
        return loss
    if num_items_in_batch is None:
        return loss / (targets >= 0).sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        items = one_number(num_items_in_batch, "num_items_in_batch").to(loss.device, non_blocking=True)
        if items.is_complex():
            raise ValueError(f"num_items_in_batch: expected a real number, got {described(items)}")
        return loss / torch.where(items == 0, 1, items)  # no target anywhere: the sum is 0
    count = number(num_items_in_batch, "num_items_in_batch")
    if not count >= 0:
        raise ValueError(f"num_items_in_batch: expected a number of targets, 0 or more, got {count}")
    return loss / (count or 1)


Allowed = tuple[torch.Tensor | None, torch.Tensor | None]  # allowed_ids and allowed_offsets


class LogpsOptions(NamedTuple):
    """Arguments of token_logps that the slots and the tree have in common."""

    temperature: float | torch.Tensor
    scale: float
    softcap: float
    chunk: int | None
    max_targets: int | None
    keep_logits: int | Literal["auto"]
    group: "torch.distributed.ProcessGroup | None" = None
    allowed: Allowed = (None, None)


Head = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # hidden, weight, bias


def _logps(
    head: Head,
    labels: torch.Tensor,
    metadata: PackedMetadata | torch.Tensor,
    ignore_index: int,
    names: tuple[str, ...],
    options: LogpsOptions,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the outputs ``names``, and the targets int32 ``[total]``."""
    hidden, weight, bias = checked_head(*head)
    labels = checked_labels(labels, hidden)
    cu_seqlens = cu_seqlens_of(metadata, hidden.shape[0], like="hidden")
    max_targets = options.max_targets
    if max_targets is None and isinstance(metadata, PackedMetadata):
        max_targets = metadata.num_targets
    vocab = weight.shape[0] * (1 if options.group is None else options.group.size())
    targets = gate.logps_targets(labels, cu_seqlens, ignore_index, vocab)
    # Not _replace: from a graph that breaks behind it, as at a number of NumPy, torch 2.11 hands on an empty tuple.
    options = LogpsOptions(
        temperature=options.temperature,
        scale=options.scale,
        softcap=options.softcap,
        chunk=options.chunk,
        max_targets=max_targets,
        keep_logits=options.keep_logits,
        group=options.group,
        allowed=checked_allowed(options.allowed, targets, vocab, ahead=1),
    )
    return logps_of_targets((hidden, weight, bias), targets, names, options), targets


def output_names(entropy: bool, outputs: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names that arguments of token_logps ask for. Raises ValueError for an unknown one."""
    if outputs is None:
        return ("logps", "entropy") if entropy else ("logps",)
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if entropy or isinstance(outputs, str) or not names or not set(names) <= set(OUTPUTS):
        beside = " beside entropy=True" if entropy else ""
        raise ValueError(f"outputs: expected a sequence of names among {', '.join(OUTPUTS)}, got {outputs!r}{beside}")
    return names


def checked_head(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return hidden ``[total, hidden]``, weight and bias, as autocast casts them. Raises ValueError if they do not
    fit.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight), *([] if bias is None else [("bias", bias)])):
        check_tensor(tensor, name)
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    hidden = hidden[0] if hidden.dim() == 3 and hidden.shape[0] == 1 else hidden
    if hidden.dim() != 2 or hidden.dtype not in FLOATS:
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


def checked_labels(labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return ``[total]`` of labels ``[total]`` or ``[1, total]``. Raises ValueError if they do not fit hidden ``[total,
    hidden]``.
    """
    check_tensor(labels, "labels")
    total = hidden.shape[0]
    if labels.shape not in ((total,), (1, total)):
        raise ValueError(f"labels: expected [total={total}] or [1, total] like hidden, got {_described(labels)}")
    if labels.device != hidden.device:
        raise ValueError(f"labels: expected on {hidden.device} like hidden, got {_described(labels)}")
    return labels.reshape(-1)


def checked_allowed(allowed: Allowed, targets: torch.Tensor, vocab: int, ahead: int) -> Allowed:
    """Return them as the op takes them, by row: row t predicts label t + ahead. Raises ValueError if they do not fit
    targets.
    """
    ids, offsets = allowed
    if ids is None and offsets is None:
        return None, None
    for name, tensor, other in (("allowed_ids", ids, "allowed_offsets"), ("allowed_offsets", offsets, "allowed_ids")):
        if tensor is None:
            raise ValueError(f"{name}: expected a tensor beside {other}, got None")
        check_tensor(tensor, name)
    return gate.logps_allowed(ids, offsets, targets, vocab, ahead)


def logps_of_targets(
    head: Head, targets: torch.Tensor, names: tuple[str, ...], options: LogpsOptions
) -> tuple[torch.Tensor, ...]:
    """Compute the outputs ``names``, each ``[total]``, of what each row predicts: targets, int32 ``[total]``, -1 for
    no target.
    """
    hidden, weight, bias = head
    # z = outer * f(logit) / temperature of each row, as the kernels have it
    scale, softcap = number(options.scale, "scale"), number(options.softcap, "softcap")
    check_positive(scale, "scale")
    if softcap not in (0, float("inf")):
        check_positive(softcap, "softcap", ", or 0 or inf for none")
    outer, inner = (scale, 0.0) if softcap in (0, float("inf")) else (softcap, scale / softcap)
    temperature, of_rows = options.temperature, None
    if isinstance(temperature, torch.Tensor):
        total = hidden.shape[0]
        if not temperature.is_floating_point() or temperature.shape not in ((), (total,), (1, total)):
            raise ValueError(
                f"temperature: expected a number, or floating [total={total}] like hidden, got "
                f"{_described(temperature)}"
            )
        if temperature.device != hidden.device and temperature.dim():
            raise ValueError(f"temperature: expected on {hidden.device} like hidden, got {_described(temperature)}")
        refuse_gradient(temperature, "temperature")
        of_rows = temperature.to(hidden.device).reshape(-1).expand(total)
    else:
        check_positive(temperature := number(temperature, "temperature"), "temperature")
        outer = outer / temperature
    # How many entries and rows
    chunk, max_targets, group = options.chunk, options.max_targets, options.group
    chunk = None if chunk is None else at_least(chunk, "chunk", 1, "entry of the vocabulary")
    if max_targets is not None:
        max_targets = at_least(max_targets, "max_targets", 0)
    if "mean_logit" in names and options.allowed[0] is not None:
        raise ValueError("outputs: expected no 'mean_logit' beside allowed_ids: all other logits count as -inf")
    if "top1" in names and hidden.dtype != torch.float64 and weight.shape[0] > _EXACT // (group.size() if group else 1):
        raise ValueError(f"outputs: expected no 'top1' of more than {_EXACT} entries of the vocabulary")
    found = gate.token_logps(
        hidden,
        weight,
        bias,
        targets,
        of_rows,
        outer,
        inner,
        chunk,
        max_targets,
        bytes_to_keep(options.keep_logits, head),
        not set(names) <= set(ALWAYS),
        None if group is None else group.group_name,
        *options.allowed,
    )
    return tuple(found[OUTPUTS.index(name)] for name in names)


_EXACT = 2**24  # the op holds the entry of the largest logit in float32


def check_positive(value: float, name: str, more: str = "") -> None:
    """Raise ValueError unless it is above 0 and, with its inverse, within float32."""
    if not 1e-37 < value < 1e37:
        raise ValueError(f"{name}: expected a number above 0{more}, got {value}")


def bytes_to_keep(keep_logits: int | str, head: Head) -> int:
    """Return keep_logits as bytes, 0 if no backward follows. Raises ValueError unless it is bytes or "auto"."""
    if isinstance(keep_logits, str) and keep_logits != "auto":
        raise ValueError(f"keep_logits: expected bytes or 'auto', got {keep_logits!r}")
    keep = 0 if isinstance(keep_logits, str) else at_least(keep_logits, "keep_logits", 0, "bytes")
    hidden = head[0]
    if not torch.is_grad_enabled() or not any(each is not None and each.requires_grad for each in head):
        return 0
    if keep_logits != "auto" or not hidden.is_cuda or torch.compiler.is_compiling() or is_captured(hidden):
        return keep
    free, _ = torch.cuda.mem_get_info(hidden.device)
    unused = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    return (free + unused) // 2


def _check_like_hidden(name: str, tensor: torch.Tensor, hidden: torch.Tensor) -> None:
    if tensor.dtype != hidden.dtype:
        raise ValueError(f"{name}: expected {dtype_name(hidden.dtype)} like hidden, got {_described(tensor)}")
    if tensor.device != hidden.device:
        raise ValueError(f"{name}: expected on {hidden.device} like hidden, got {_described(tensor)}")


def _described(tensor: torch.Tensor) -> str:
    return f"{described(tensor)} on {tensor.device}"
