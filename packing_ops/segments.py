"""Per-document reductions of a packed row (sum, mean, standard deviation), their broadcast back to the slots, and GAE.

cu_seqlens is as in packing_ops.boundaries. A segment need not be a document: with one reward per sample as values and
the boundaries of the prompts as cu_seqlens, segment_mean is the mean reward of each prompt.
"""

from numbers import Real
from typing import Any

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    FLOATS,
    check_cu_seqlens,
    check_tensor,
    described,
    dtype_name,
    integer,
    is_set,
    old_name,
    one_row,
    sum_dtype,
)
from packing_ops._runtime.autograd import call_below_autograd, register_autograd, register_no_autograd
from packing_ops.boundaries import position_ids_from_cu_seqlens, seq_idx_from_cu_seqlens
from packing_ops.metadata import PackedMetadata, cu_seqlens_of


def segment_sum(
    values: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    mask: torch.Tensor | None = None,
    average: bool = False,
) -> torch.Tensor:
    """Sum of values per document: token log-probs to sequence log-probs, hidden states to one vector. Differentiable.

    Args:
        values: float32, float64, bfloat16 or float16 ``[total, ...]``; summed over dim 0 only. For a packed row
            ``[1, total]`` pass ``values[0]``.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.
        mask: ``[total]``, bool, integer or floating; slots where it is 0 are excluded, even if they are NaN.
        average: divide by the number of slots that are not excluded, as segment_mean does.

    Returns:
        ``[num_documents, ...]``, float64 for float64 values, else float32; 0 for an empty document. Padding after the
        last document is excluded.

    Example:
        >>> segment_sum(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3], dtype=torch.int32))
        tensor([3., 3.])
        >>> segment_sum(torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]), torch.tensor([0, 2, 3])).tolist()
        [[3.0, 11.0], [3.0, 7.0]]

    Raises:
        ValueError: values, a mask or cu_seqlens of another dtype, device or shape; cu_seqlens past the values.

    Determinism: the same bits in every call: the order of additions depends only on a document's length and on values
        per slot.
    Synchronises: never; wrong cu_seqlens on CUDA raise in a later call.
    Memory: the result, and partial sums of long documents.
    Gradients: of values, of any order; forward mode too.
    """
    check_tensor(values, "values")
    cu_seqlens = cu_seqlens_of(cu_seqlens, values.shape[0] if values.dim() else 1, like="values")
    return gate.segment_sum(values, cu_seqlens, None if mask is None else is_set(mask, "mask"), average)


def segment_mean(
    values: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Average values per document: the pooling of reward and embedding models. Differentiable.

    Args:
        values, cu_seqlens: as segment_sum.
        mask: as segment_sum; the mean is over the slots where it is not 0.

    Returns:
        As segment_sum; 0 for a document that is empty or fully masked.

    Example:
        >>> hidden = torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])
        >>> segment_mean(hidden, torch.tensor([0, 2, 2, 3], dtype=torch.int32)).tolist()
        [[1.5, 5.5], [0.0, 0.0], [3.0, 7.0]]

    Raises:
        ValueError: as segment_sum.

    Determinism: as segment_sum.
    Synchronises: as segment_sum.
    Memory: as segment_sum.
    Gradients: of values, of any order; forward mode too.
    """
    return segment_sum(values, cu_seqlens, mask, average=True)


def segment_std(
    values: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    correction: float = 1,
) -> torch.Tensor:
    """Compute the standard deviation of values per document, or of the rewards per group of samples. Differentiable.

    Args:
        values: float32, float64, bfloat16 or float16, ``[total]`` or ``[1, total]``.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.
        mask: as many elements as ``values``; slots where it is 0 are excluded, even if they are NaN.
        correction: the sum of squares is divided by the number of values minus this: 1 as in torch.std, 0 for the
            deviation of the population.

    Returns:
        ``[num_documents]``, float64 for float64 values, else float32. 0 for no more than ``correction`` values
        (torch.std gives NaN), and where all are equal; the gradient is 0 there too. Computed in float64.

    Example:
        Advantages of GRPO, for two prompts of three and two samples: rewards normalized within each prompt's group.

        >>> import packing_ops as po
        >>> rewards, groups = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0]), torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> mean, std = po.segment_sum(rewards, groups, average=True), segment_std(rewards, groups)
        >>> mean, std
        (tensor([2., 5.]), tensor([1., 0.]))
        >>> (rewards - segment_broadcast(mean, groups)) / (segment_broadcast(std, groups) + 1e-6)
        tensor([-1.0000,  0.0000,  1.0000,  0.0000,  0.0000])

    Raises:
        ValueError: values, a mask or cu_seqlens of another shape or dtype, cu_seqlens past the values, a correction
            below 0.

    Determinism: the same bits in every call: the order of additions depends only on a document's length.
    Synchronises: never; wrong cu_seqlens on CUDA raise in a later call.
    Memory: values and their squares in float64.
    Gradients: of values, of any order, 0 where all are equal; forward mode too.
    """
    one_row(values, "values")
    cu_seqlens = cu_seqlens_of(cu_seqlens, values.numel(), like="values")
    check_cu_seqlens(cu_seqlens)
    if not values.is_floating_point():
        raise ValueError(f"values: expected a floating dtype, got {dtype_name(values.dtype)}")
    if not isinstance(correction, Real) or not correction >= 0:
        raise ValueError(f"correction: expected a number of at least 0, got {correction!r}")
    total = values.numel()
    # Includes the padding after the documents: a NaN there would reach the gradient.
    left_out = segment_broadcast(values.new_ones(cu_seqlens.numel() - 1), cu_seqlens, total) == 0
    if mask is not None:
        kept = is_set(mask, "mask")
        if kept.numel() != values.numel():
            raise ValueError(f"mask: expected {values.numel()} elements like values, got {described(mask)}")
        left_out = left_out | ~kept.reshape(-1)
    flat = values.reshape(-1).double().masked_fill(left_out, 0.0)
    count = gate.segment_sum((~left_out).double(), cu_seqlens, None, False)
    mean = gate.segment_sum(flat, cu_seqlens, None, False) / count.clamp_min(1)
    deviations = (flat - segment_broadcast(mean, cu_seqlens, total)).masked_fill(left_out, 0.0)
    few = count <= correction
    squares = gate.segment_sum(deviations.square(), cu_seqlens, None, False)
    variance = squares / (count - correction).masked_fill(few, 1.0)
    # Equal values may differ from their mean by rounding error: the deviation is set to 0. And sqrt'(0) is infinite.
    none = few | (variance <= (1e-14 * mean.detach()).square())
    std = variance.masked_fill(none, 1.0).sqrt().masked_fill(none, 0.0)
    return std.to(sum_dtype(values.dtype))


def segment_broadcast(
    values: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, total: int | None = None
) -> torch.Tensor:
    """Broadcast one value per document to all its slots: the transpose of segment_sum. Differentiable.

    Args:
        values: ``[num_documents, ...]``, any dtype.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.
        total: slots of the row. Without it ``total`` of the PackedMetadata, or ``cu_seqlens[-1]``, which synchronises
            on CUDA.

    Returns:
        ``[total, ...]`` of the same dtype: slot t has the value of its document; 0 (False) in the padding after the
        last one. A document's gradient is the sum over its slots, in an order that depends only on its length.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> segment_broadcast(torch.tensor([0.5, -1.0]), cu_seqlens, total=4)
        tensor([ 0.5000,  0.5000, -1.0000,  0.0000])
        >>> segment_broadcast(torch.tensor([True, False]), cu_seqlens)  # documents to keep, as a mask of tokens
        tensor([ True,  True, False])

    Raises:
        ValueError: not one value per document, cu_seqlens of another shape or dtype or past ``total``.

    Determinism: the same bits in every call, backward too: the order of additions depends only on a document's length.
    Synchronises: on CUDA once without ``total`` or a PackedMetadata; else never.
    Memory: the result.
    Gradients: of values, of any order; forward mode too.
    """
    if isinstance(cu_seqlens, PackedMetadata):
        total = cu_seqlens.total if total is None else total
        cu_seqlens = cu_seqlens_of(cu_seqlens, total, like="total")
    check_cu_seqlens(cu_seqlens)
    check_tensor(values, "values")
    num_documents = cu_seqlens.numel() - 1
    if values.dim() == 0 or values.shape[0] != num_documents:
        raise ValueError(
            f"values: expected [num_documents={num_documents}, ...] like cu_seqlens, got {described(values)}"
        )
    if not isinstance(total, int):
        total = int(cu_seqlens[-1]) if total is None else integer(total, "total")
    if values.dtype not in FLOATS:
        padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        return padded[seq_idx_from_cu_seqlens(cu_seqlens, total)]
    sums = values.to(sum_dtype(values.dtype))  # segment_sum's: this is its backward
    return gate.segment_sum_backward(sums, cu_seqlens, None, False, total, values.dtype)


def slots_with_tokens(num_tokens: torch.Tensor | int | None, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Return bool ``[total]``, by the ``num_tokens`` of PackedMetadata.to_transformers; None: every slot is a token.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> slots_with_tokens(2, cu_seqlens, 5), slots_with_tokens(torch.tensor([1, 2]), cu_seqlens, 5)
        (tensor([ True,  True, False, False, False]), tensor([ True, False,  True,  True, False]))

    Raises:
        ValueError: a tensor that has not one number per document.
    """
    slots = torch.arange(total, device=cu_seqlens.device)
    if num_tokens is None:
        return torch.ones_like(slots, dtype=torch.bool)
    if not isinstance(num_tokens, torch.Tensor) or num_tokens.dim() == 0:
        return slots < num_tokens
    if num_tokens.shape != (cu_seqlens.numel() - 1,):
        wanted = f"a number or [num_documents={cu_seqlens.numel() - 1}]"
        raise ValueError(f"num_tokens: expected {wanted} like cu_seqlens, got {described(num_tokens)}")
    of_slots = segment_broadcast(num_tokens.to(cu_seqlens.device), cu_seqlens, total)
    return position_ids_from_cu_seqlens(cu_seqlens, total) < of_slots


@old_name("metadata")
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    gamma: float,
    lam: float,
    *,
    mask: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimation (GAE; Schulman et al. 2016) for each document of a packed row, as PPO
    needs it.

    Backwards from the end of a document:

        delta[t] = rewards[t] + gamma * values[t + 1] - values[t]
        advantages[t] = delta[t] + gamma * lam * advantages[t + 1]
        returns[t] = advantages[t] + values[t]

    Masked slots (the prompt, output of tools and environments) are skipped: t + 1 is then the next slot that is not
    masked, as in verl's compute_gae_advantage_return. verl and TRL whiten the advantages afterwards; this function does
    not.

    Args:
        rewards: float32, float64, bfloat16 or float16 ``[total]`` or ``[1, total]``. rewards[t] is the reward of the
            token in slot t. The reward of a whole document is in its last slot, which is
            ``last_token_indices(cu_seqlens)``; with a mask, in its last slot that is not masked, since rewards of
            masked slots are ignored. Nothing is shifted.
        values: the critic's, of the same shape, any of these dtypes. values[t] is the value before the token in slot t.
        cu_seqlens: PackedMetadata, or its cu_seqlens int32 ``[num_documents + 1]``.
        gamma: discount per step, 0 to 1.
        lam: 0 (one-step TD error) to 1 (discounted sum of rewards minus the value).
        mask: of that shape, bool, integer or floating; slots where it is 0 are skipped, even if they are NaN.
        bootstrap: floating ``[num_documents]``, the value after each document's last slot: not 0 for truncated
            responses. 0 by default.

    Returns:
        (advantages, returns), shaped like rewards; float64 if rewards or values are, else float32. 0 in masked slots
        (verl has other numbers there, which its loss masks) and after the last document. No synchronisation; one kernel
        for any number and length of documents.

    Example:
        >>> rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0])
        >>> values = torch.tensor([0.5, 0.5, 0.5, 0.25, 0.5])
        >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> gae(rewards, values, cu_seqlens, gamma=1.0, lam=0.5)
        (tensor([0.1250, 0.2500, 0.5000, 0.5000, 0.5000]), tensor([0.6250, 0.7500, 1.0000, 0.7500, 1.0000]))
        >>> from packing_ops import last_token_indices
        >>> scores = torch.tensor([1.0, 1.0])  # one for each document: the same rewards
        >>> torch.zeros(5).index_copy(0, last_token_indices(cu_seqlens), scores)
        tensor([0., 0., 1., 0., 1.])
        >>> mask = torch.tensor([1, 0, 1, 1, 1])  # slot 1: a token of a tool's output
        >>> gae(rewards, values, cu_seqlens, gamma=1.0, lam=0.5, mask=mask)[0]
        tensor([0.2500, 0.0000, 0.5000, 0.5000, 0.5000])

    Raises:
        ValueError: rewards, values, a mask or a bootstrap of another dtype, device or shape; gamma or lam outside 0 to
            1; a PackedMetadata of another total, cu_seqlens past the end of rewards.

    Determinism: the same bits in every call, and for a document in any row.
    Synchronises: never.
    Memory: the two results.
    Gradients: none: backward raises NotImplementedError, since PPO's losses take both as constants.
    """
    given: dict[str, Any] = {"rewards": rewards, "values": values, "bootstrap": bootstrap}
    for name, tensor in given.items():
        if tensor is None and name == "bootstrap":
            continue
        check_tensor(tensor, name)
        if tensor.dtype not in FLOATS:
            wanted = ", ".join(map(dtype_name, FLOATS[:-1]))
            raise ValueError(f"{name}: expected {wanted} or {dtype_name(FLOATS[-1])}, got {described(tensor)}")
    row = one_row(rewards, "rewards")
    cu_seqlens = cu_seqlens_of(cu_seqlens, row.shape[0], like="rewards")
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    advantages, returns = gate.gae(
        row.to(dtype),
        one_row(values, "values").to(dtype),
        cu_seqlens,
        None if mask is None else one_row(is_set(mask, "mask"), "mask"),
        None if bootstrap is None else bootstrap.to(sum_dtype(dtype)),
        gamma,
        lam,
    )
    return advantages.view(rewards.shape), returns.view(rewards.shape)


# --- gradients ---


def _segment_sum_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, cu_seqlens, mask, ctx.average = inputs[:4]
    ctx.save_for_backward(cu_seqlens, mask)
    ctx.total, ctx.dtype = values.shape[0], values.dtype


def _segment_sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cu_seqlens, mask = ctx.saved_tensors
    if grad is not None:
        grad = call_below_autograd(gate.segment_sum_backward, grad, cu_seqlens, mask, ctx.average, ctx.total, ctx.dtype)
    return grad, None, None, None


def _sum_again(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cu_seqlens, mask = ctx.saved_tensors
    return None if grad is None else gate.segment_sum(grad, cu_seqlens, mask, ctx.average), *[None] * 5


register_autograd("segment_sum", _segment_sum_backward, setup_context=_segment_sum_context, linear=1)
register_autograd("segment_sum_backward", _sum_again, setup_context=_segment_sum_context, linear=1)
register_no_autograd(
    "gae",
    why="packing_ops::gae has no gradient: advantages and returns are constants to the loss; detach rewards and values",
)
