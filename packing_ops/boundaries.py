"""Where documents begin and end in a packed row, and what to do with labels there.

cu_seqlens (cumulated lengths) is int32 ``[num_documents + 1]``: document ``i`` owns slots
``cu_seqlens[i] : cu_seqlens[i + 1]`` of the row. Slots from ``cu_seqlens[-1]`` to ``total`` are padding and count as a
document of their own. int64 is taken everywhere too, and copied.
"""

from collections.abc import Hashable, Sequence
from typing import overload

import torch

from packing_ops import _ops
from packing_ops._arguments import (
    check_cu_seqlens,
    check_tensor,
    described,
    dtype_name,
    exactly_one,
    holds,
    index_tensor,
    integer,
    one_row,
    plain,
    wrong_type,
)


def cu_seqlens_from_lengths(lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Cumulated lengths, starting at 0.

    Args:
        lengths: int32 or int64 ``[num_documents]``, tokens per document; a Python sequence stays on the CPU.

    Returns:
        int32 ``[num_documents + 1]``, on the device of ``lengths``. No synchronisation.

    Example:
        >>> cu_seqlens_from_lengths([2, 1, 3])
        tensor([0, 2, 3, 6], dtype=torch.int32)

    Raises:
        ValueError: a negative length, or a sum over 2**31 - 1.
    """
    return _ops.cu_seqlens_from_lengths(index_tensor(lengths, "lengths"))


def position_ids_from_cu_seqlens(cu_seqlens: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """Position of every slot inside its own document.

    Args:
        cu_seqlens: int32 ``[num_documents + 1]``.
        total: slots of the row; without it ``cu_seqlens[-1]``, which synchronises on CUDA.

    Returns:
        int64 ``[total]``; padding after the last document counts from 0 again.

    Example:
        >>> position_ids_from_cu_seqlens(torch.tensor([0, 2, 3, 6], dtype=torch.int32), 6)
        tensor([0, 1, 0, 0, 1, 2])

    Raises:
        ValueError: cu_seqlens not integer, not starting at 0, decreasing or ending past ``total``.
    """
    return _ops.position_ids_from_cu_seqlens(cu_seqlens, _total(cu_seqlens, total))


def seq_idx_from_cu_seqlens(cu_seqlens: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """Index of the document that every slot belongs to (``num_documents`` for padding after the last one).

    Args:
        cu_seqlens: int32 ``[num_documents + 1]``.
        total: slots of the row; without it ``cu_seqlens[-1]``, which synchronises on CUDA.

    Returns:
        int32 ``[total]``.

    Example:
        >>> seq_idx_from_cu_seqlens(torch.tensor([0, 2, 3, 6], dtype=torch.int32), 7)
        tensor([0, 0, 1, 2, 2, 2, 3], dtype=torch.int32)

    Raises:
        ValueError: as position_ids_from_cu_seqlens.
    """
    return _ops.seq_idx_from_cu_seqlens(cu_seqlens, _total(cu_seqlens, total))


def cu_seqlens_from_position_ids(position_ids: torch.Tensor, *, padded: bool = False) -> torch.Tensor:
    """Documents of a packed row, found where position_ids stop growing.

    Args:
        position_ids: int32 or int64 ``[total]`` or ``[1, total]``; a document starts at slot 0 and wherever a position
            is not larger than the one before it.
        padded: return all ``total + 1`` entries, the unused ones repeating ``total`` (zero-length documents): a fixed
            size and no synchronisation. Otherwise the exact size, one synchronisation on CUDA.

    Returns:
        int32 ``[num_documents + 1]``, or ``[total + 1]`` with ``padded``.

    Example:
        >>> cu_seqlens_from_position_ids(torch.tensor([0, 1, 0, 0, 1, 2]))
        tensor([0, 2, 3, 6], dtype=torch.int32)

    Raises:
        ValueError: position_ids of another dtype or shape.
    """
    cu_seqlens, count = _ops.cu_seqlens_from_position_ids(one_row(position_ids, "position_ids"))
    return cu_seqlens if padded else cu_seqlens[: int(count) + 1]


@overload
def compute_prompt_end_indices(uids: torch.Tensor) -> torch.Tensor: ...
@overload
def compute_prompt_end_indices(uids: Sequence) -> list[int]: ...
def compute_prompt_end_indices(uids: torch.Tensor | Sequence) -> torch.Tensor | list[int]:
    """Exclusive end of each run of equal uids.

    Args:
        uids: one per row, equal ones next to each other: a list of strings or integers, or an integer tensor.

    Returns:
        A list for a list, int64 ``[num_prompts]`` for a tensor (one synchronisation on CUDA).

    Example:
        >>> compute_prompt_end_indices(["a", "a", "b", "c", "c"])
        [2, 3, 5]

    Raises:
        ValueError: a uid that comes back after another one; names it and its index.
        TypeError: a uid that is a list, or a tensor of several numbers.
    """
    if isinstance(uids, torch.Tensor):
        ends, count = _ops.prompt_end_indices(uids)
        return ends[: int(count)]
    uids = [plain(uid) for uid in plain(uids)]  # tensors of one number would be told apart by identity
    seen, ends = set(), []
    for i, uid in enumerate(uids):
        if not isinstance(uid, Hashable):
            raise wrong_type("uids", "strings or integers", uid)
        if i > 0 and uid == uids[i - 1]:
            continue
        if uid in seen:
            raise ValueError(f"uids: expected equal uids next to each other, but {uid!r} comes back at index {i}")
        seen.add(uid)
        if i > 0:
            ends.append(i)
    return [*ends, len(uids)] if len(uids) else []


@overload
def compute_prompt_boundaries(uids: torch.Tensor) -> torch.Tensor: ...
@overload
def compute_prompt_boundaries(uids: Sequence) -> list[tuple[int, int]]: ...
def compute_prompt_boundaries(uids: torch.Tensor | Sequence) -> torch.Tensor | list[tuple[int, int]]:
    """(start, end) of each run of equal uids.

    Args:
        uids: as compute_prompt_end_indices.

    Returns:
        A list of pairs for a list, int64 ``[num_prompts, 2]`` for a tensor.

    Example:
        >>> compute_prompt_boundaries(["p0", "p0", "p1", "p1", "p1"])
        [(0, 2), (2, 5)]

    Raises:
        ValueError: as compute_prompt_end_indices.
    """
    ends = compute_prompt_end_indices(uids)
    if isinstance(ends, torch.Tensor):
        starts = torch.cat([ends.new_zeros(min(1, ends.numel())), ends[:-1]])
        return torch.stack([starts, ends], dim=1)
    return list(zip([0, *ends[:-1]], ends, strict=False))


def compute_prompt_mini_batch_boundaries(
    prompts: torch.Tensor | Sequence,
    mini_batch_size: int,
    train_batch_size: int | None = None,
    is_stepwise: bool | None = None,
    n_samples_per_prompt: int | None = None,
) -> list[tuple[int, int]]:
    """Rows of each mini-batch of whole prompts: their number depends on the prompts alone, not on turns or samples.

    Args:
        prompts: exclusive ends of the prompts' rows (compute_prompt_end_indices); with ``train_batch_size`` the uid of
            each row instead.
        mini_batch_size: prompts of a mini-batch; the last may hold fewer.
        train_batch_size: with uids, the prompts that there must be, a multiple of mini_batch_size.
        is_stepwise: True: a prompt may have any number of rows (with uids).
        n_samples_per_prompt: otherwise the rows that every prompt must have.

    Returns:
        (start, end) row pairs, one per mini-batch. A tensor on CUDA is read with one synchronisation.

    Example:
        >>> compute_prompt_mini_batch_boundaries([4, 6, 9, 11], 2)
        [(0, 6), (6, 11)]
        >>> compute_prompt_mini_batch_boundaries(["p0", "p0", "p1", "p1"], 1, 2, False, 2)
        [(0, 2), (2, 4)]

    Raises:
        ValueError: ends that do not grow, mini_batch_size < 1, uids that are not as the arguments say.
    """
    if integer(mini_batch_size, "mini_batch_size") < 1:
        raise ValueError(f"mini_batch_size: expected at least 1 prompt, got {mini_batch_size}")
    if train_batch_size is None:
        ends = [integer(end, "prompt_end_indices") for end in plain(prompts)]
        if any(end <= start for start, end in zip([0, *ends], ends, strict=False)):
            raise ValueError(f"prompt_end_indices: expected exclusive ends that grow from at least 1, got {ends}")
    else:
        found = compute_prompt_end_indices(prompts)
        ends = found.tolist() if isinstance(found, torch.Tensor) else found
        if len(ends) != train_batch_size:
            raise ValueError(f"uids: expected train_batch_size={train_batch_size} prompts, got {len(ends)}")
        if train_batch_size % mini_batch_size:
            raise ValueError(
                f"train_batch_size: expected a multiple of mini_batch_size={mini_batch_size}, got {train_batch_size}"
            )
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if not is_stepwise and end - start != n_samples_per_prompt:
                raise ValueError(
                    f"uids: expected n_samples_per_prompt={n_samples_per_prompt} rows for every prompt, "
                    f"got {end - start} for prompt {i}"
                )
    stops = [ends[min(i + mini_batch_size, len(ends)) - 1] for i in range(0, len(ends), mini_batch_size)]
    return list(zip([0, *stops], stops, strict=False))


def mask_boundary_labels(
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Unshifted labels with the first label of each document masked: no token of another document may predict it.

    Args:
        labels: int64 or int32 ``[total]`` or ``[1, total]``.
        cu_seqlens: int32 ``[num_documents + 1]``; or
        lengths: tokens per document (exactly one of the two).

    Returns:
        A new tensor like ``labels``. Slots past the last document are left alone. Idempotent, no synchronisation.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> mask_boundary_labels(torch.tensor([5, 6, 7, 8, 9]), cu_seqlens)
        tensor([-100,    6, -100,    8,    9])

    Raises:
        ValueError: labels of another dtype, device or shape (rows of a padded batch are no packed row), cu_seqlens past
            the labels, both or neither of cu_seqlens and lengths.
    """
    return _ops.mask_boundary_labels(labels, _cu_seqlens(labels, cu_seqlens, lengths), ignore_index)


def mask_boundary_labels_shifted_(
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Shifted labels (slot t holds the target of t) with the last of each document masked, in place.

    Args:
        As mask_boundary_labels; ``labels`` must be contiguous.

    Returns:
        ``labels`` itself.

    Example:
        >>> labels = torch.tensor([6, 7, 8, 9, 0])
        >>> mask_boundary_labels_shifted_(labels, lengths=[2, 3])
        tensor([   6, -100,    8,    9, -100])

    Raises:
        ValueError: as mask_boundary_labels.
    """
    _ops.mask_boundary_labels_shifted_(labels, _cu_seqlens(labels, cu_seqlens, lengths), ignore_index)
    if not torch.compiler.is_compiling():  # autograd must notice if a loss has saved them
        torch.autograd.graph.increment_version(labels)
    return labels


def shift_labels(labels: torch.Tensor, cu_seqlens: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """Next-token targets that never cross a document.

    Args:
        labels: raw labels, int64 or int32 ``[total]`` or ``[1, total]``.
        cu_seqlens: int32 ``[num_documents + 1]``.

    Returns:
        Like ``labels``: slot t holds label t + 1, or ``ignore_index`` at the last slot of each document and in the
        padding after them. No synchronisation.

    Example:
        >>> shift_labels(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 2, 5], dtype=torch.int32))
        tensor([   6, -100,    8,    9, -100])

    Raises:
        ValueError: as mask_boundary_labels.
    """
    return _ops.shift_labels(labels, cu_seqlens, ignore_index)


def shift_values(values: torch.Tensor, cu_seqlens: torch.Tensor, *, fill_value: float = 0.0) -> torch.Tensor:
    """shift_labels for everything else that a token has: loss masks, advantages, rewards, old log-probs. Differentiable.

    Args:
        values: ``[total]`` or ``[1, total]``, any dtype of torch.where, one for each token, at the token's own slot.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``.
        fill_value: what a slot gets that predicts no token.

    Returns:
        Like ``values``: slot t holds the value of token t + 1, or ``fill_value`` at the last slot of each document and
        in the padding after them. No synchronisation. The value of a document's first token, which nothing predicts,
        is in no slot, and its gradient is 0. Any derivative, deterministic.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> shift_values(torch.tensor([0.0, 1.0, 0.0, 0.5, 1.0]), cu_seqlens)
        tensor([1.0000, 0.0000, 0.5000, 1.0000, 0.0000])
        >>> shift_values(torch.tensor([[5, 6, 7, 8, 9]]), cu_seqlens, fill_value=-1)
        tensor([[ 6, -1,  8,  9, -1]])

    Raises:
        ValueError: values of another shape, cu_seqlens that are none or end past the values, a fill_value that the
            dtype of the values does not hold.
    """
    check_tensor(values, "values")
    one_row(values, "values")
    if fill_value and not torch.compiler.is_compiling() and not holds(values.dtype, fill_value):
        raise ValueError(
            f"fill_value: expected a number that {dtype_name(values.dtype)} holds like values, got {fill_value}"
        )
    last = shift_labels(values.new_zeros(values.shape, dtype=torch.int32), cu_seqlens, ignore_index=1) != 0
    # masked_fill knows fewer dtypes.
    return torch.where(last, values.new_full((), fill_value), values.roll(-1, dims=-1))


def count_target_tokens(
    labels: torch.Tensor, cu_seqlens: torch.Tensor | None = None, *, ignore_index: int = -100
) -> torch.Tensor:
    """How many next-token targets raw labels hold: what a summed loss is divided by.

    Args:
        labels: raw (unshifted) labels, int64 or int32 ``[total]`` or ``[1, total]``. Without ``cu_seqlens``
            ``[batch, seqlen]``, one document a row.
        cu_seqlens: int32 ``[num_documents + 1]``; the first label of each document is no target, padding after the
            last one is not counted.

    Returns:
        int64 scalar tensor on the device of ``labels``. No synchronisation.

    Example:
        >>> count_target_tokens(torch.tensor([5, 6, 7, -100, 9]), torch.tensor([0, 2, 5], dtype=torch.int32))
        tensor(2)

    Raises:
        ValueError: labels of another dtype, device or shape, cu_seqlens past the labels.
    """
    if cu_seqlens is None:
        check_tensor(labels, "labels")
        if labels.dim() != 2:
            raise ValueError(f"labels: expected [batch, seqlen] without cu_seqlens, got {described(labels)}")
        cu_seqlens = cu_seqlens_of_rows(*labels.shape, labels.device)
        labels = labels.reshape(-1)
    return _ops.count_target_tokens(labels, cu_seqlens, ignore_index)


def block_causal_mask(
    cu_seqlens: torch.Tensor, total: int, *, dtype: torch.dtype = torch.bool, window: int | None = None
) -> torch.Tensor:
    """Causal attention mask inside each document, for scaled_dot_product_attention.

    Args:
        cu_seqlens: int32 ``[num_documents + 1]``.
        total: slots of the row; padding after the last document is a segment of its own.
        dtype: bool (True = visible) or a floating dtype (0 = visible, -inf = hidden).
        window: visible keys including the query itself; None for all.

    Returns:
        ``[total, total]``: total**2 elements, which is what varlen_attention avoids.

    Example:
        >>> block_causal_mask(torch.tensor([0, 1, 3], dtype=torch.int32), 3).int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]

    Raises:
        ValueError: a window below 1, cu_seqlens past ``total``, a dtype that is neither bool nor floating.
    """
    if window is not None and integer(window, "window") < 1:
        raise ValueError(f"window: expected at least 1 visible key (the query itself), got {window}")
    return _ops.block_causal_mask(cu_seqlens, total, dtype, window or 0)


def xformers_bias(lengths: Sequence[int], *, window: int | None = None):
    """The same visibility as block_causal_mask, as an xformers attention bias (xformers must be installed).

    Args:
        lengths: tokens per document, Python ints.
        window: visible keys including the query itself; None for all.

    Returns:
        ``BlockDiagonalCausalMask``, or its local form with ``window``; it stores the lengths, no matrix.

    Example:
        >>> xformers.ops.memory_efficient_attention(q, k, v, attn_bias=xformers_bias([3, 5]))  # doctest: +SKIP

    Raises:
        ImportError: xformers is not installed.
    """
    try:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask
    except ImportError as error:
        raise ImportError("xformers_bias needs xformers: pip install xformers") from error
    bias = BlockDiagonalCausalMask.from_seqlens([integer(length, "lengths") for length in lengths])
    return bias if window is None else bias.make_local_attention(window)


def cu_seqlens_of_rows(rows: int, seqlen: int, device: torch.device) -> torch.Tensor:
    """int32 ``[rows + 1]``: every row of a dense batch is a document."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * seqlen


def _total(cu_seqlens: torch.Tensor, total: int | None) -> int:
    if total is not None:
        return total
    check_tensor(cu_seqlens, "cu_seqlens")
    check_cu_seqlens(cu_seqlens)
    return int(cu_seqlens[-1])


def _cu_seqlens(labels, cu_seqlens, lengths) -> torch.Tensor:
    exactly_one(cu_seqlens=cu_seqlens, lengths=lengths)
    if cu_seqlens is not None:
        return cu_seqlens
    check_tensor(labels, "labels")
    return cu_seqlens_from_lengths(index_tensor(lengths, "lengths").to(labels.device, non_blocking=True))


# --- registration: shapes for torch.compile ---


@_ops.register_fake("cu_seqlens_from_lengths")
def _(lengths):
    return lengths.new_empty(lengths.numel() + 1, dtype=torch.int32)


@_ops.register_fake("position_ids_from_cu_seqlens")
def _(cu_seqlens, total):
    return cu_seqlens.new_empty(total, dtype=torch.int64)


@_ops.register_fake("seq_idx_from_cu_seqlens")
def _(cu_seqlens, total):
    return cu_seqlens.new_empty(total, dtype=torch.int32)


@_ops.register_fake("cu_seqlens_from_position_ids")
def _(position_ids):
    cu_seqlens = position_ids.new_empty(position_ids.numel() + 1, dtype=torch.int32)
    return cu_seqlens, position_ids.new_empty(1, dtype=torch.int64)


@_ops.register_fake("prompt_end_indices")
def _(uids):
    return uids.new_empty(uids.numel(), dtype=torch.int64), uids.new_empty(1, dtype=torch.int64)


@_ops.register_fake("mask_boundary_labels")
def _(labels, cu_seqlens, ignore_index):
    return labels.new_empty(labels.shape)


@_ops.register_fake("mask_boundary_labels_shifted_")
def _(labels, cu_seqlens, ignore_index):
    return None


@_ops.register_fake("shift_labels")
def _(labels, cu_seqlens, ignore_index):
    return labels.new_empty(labels.shape)


@_ops.register_fake("count_target_tokens")
def _(labels, cu_seqlens, ignore_index):
    return labels.new_empty((), dtype=torch.int64)


@_ops.register_fake("block_causal_mask")
def _(cu_seqlens, total, dtype, window):
    return cu_seqlens.new_empty((total, total), dtype=dtype)
