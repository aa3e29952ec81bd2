"""Where documents begin and end in a packed row, and what to do with labels there.

cu_seqlens (cumulated lengths) is int32 ``[num_documents + 1]``: document ``i`` owns slots
``cu_seqlens[i] : cu_seqlens[i + 1]`` of the row. Slots from ``cu_seqlens[-1]`` to ``total`` are padding and count as a
separate document. int64 cu_seqlens are taken everywhere too, and copied.
"""

from collections.abc import Sequence

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    check_cu_seqlens,
    check_tensor,
    described,
    dtype_name,
    holds,
    index_tensor,
    one_row,
)
from packing_ops._runtime.batch_cache import cu_seqlens_of_rows, is_captured
from packing_ops.metadata import PackedMetadata, check_no_tree, cu_seqlens_of


def cu_seqlens_from_lengths(lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Return the cumulated lengths, starting at 0.

    Args:
        lengths: int32 or int64 ``[num_documents]``, tokens per document; a Python sequence stays on the CPU.

    Returns:
        int32 ``[num_documents + 1]``, on the device of ``lengths``.

    Example:
        >>> cu_seqlens_from_lengths([2, 1, 3])
        tensor([0, 2, 3, 6], dtype=torch.int32)

    Raises:
        ValueError: a negative length, or a sum over 2**31 - 1.

    Determinism: the same integers in every call.
    Synchronises: never; a wrong length on CUDA raises in a later call.
    Memory: the result.
    Gradients: none: integers.
    """
    return gate.cu_seqlens_from_lengths(index_tensor(lengths, "lengths"))


def position_ids_from_cu_seqlens(cu_seqlens: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """Return the position of every slot in its document.

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

    Determinism: the same integers in every call.
    Synchronises: on CUDA once without ``total``; with it never.
    Memory: the result.
    Gradients: none: integers.
    """
    return gate.position_ids_from_cu_seqlens(cu_seqlens, _total(cu_seqlens, total))


def seq_idx_from_cu_seqlens(cu_seqlens: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """Return the index of every slot's document (``num_documents`` for padding after the last one).

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

    Determinism: the same integers in every call.
    Synchronises: on CUDA once without ``total``; with it never.
    Memory: the result.
    Gradients: none: integers.
    """
    return gate.seq_idx_from_cu_seqlens(cu_seqlens, _total(cu_seqlens, total))


def last_token_indices(cu_seqlens: PackedMetadata | torch.Tensor) -> torch.Tensor:
    """Return the slot of each document's last token in a packed row: where a reward model reads its score.

    Args:
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.

    Returns:
        int64 ``[num_documents]``. One synchronisation on CUDA, to see that documents start at 0 and are not empty; a
        compiled or captured graph asserts it on the device.

    Example:
        >>> scores = torch.tensor([[[0.1], [0.2], [0.3], [0.4], [0.5]]])  # [1, total, 1]
        >>> indices = last_token_indices(torch.tensor([0, 2, 5], dtype=torch.int32))
        >>> indices, scores[0, indices, 0]
        (tensor([1, 4]), tensor([0.2000, 0.5000]))

    Raises:
        ValueError: a document without tokens; cu_seqlens that do not start at 0, or of another dtype or shape.

    Determinism: the same integers in every call.
    Synchronises: once on CUDA; never in a compiled or captured graph.
    Memory: the result.
    Gradients: none: integers.
    """
    if isinstance(cu_seqlens, PackedMetadata):
        check_no_tree(cu_seqlens, "cu_seqlens")
        cu_seqlens = cu_seqlens.cu_seqlens
    check_cu_seqlens(cu_seqlens, "cu_seqlens")
    last, empty = cu_seqlens[1:].long() - 1, cu_seqlens[1:] <= cu_seqlens[:-1]
    wrong = empty.any() | (cu_seqlens[:1] != 0).any()
    # In this order: torch.compile before 2.13 does not trace the second.
    if torch.compiler.is_compiling() or is_captured(cu_seqlens):
        torch._assert_async(~wrong, "cu_seqlens: expected documents with tokens from 0 on, got others")
    elif bool(wrong):
        if cu_seqlens[0] != 0:
            raise ValueError(f"cu_seqlens: expected to start at 0, got {int(cu_seqlens[0])}")
        found = empty.nonzero().flatten().tolist()
        raise ValueError(f"cu_seqlens: expected at least one token in each document, got none in {found}")
    return last


def cu_seqlens_from_position_ids(position_ids: torch.Tensor, *, padded: bool = False) -> torch.Tensor:
    """Find the documents of a packed row by where position_ids stop growing, and return their cu_seqlens.

    Args:
        position_ids: int32 or int64 ``[total]`` or ``[1, total]``; a document starts at slot 0 and wherever a position
            is not larger than the one before it.
        padded: return ``total + 1`` entries, the unused ones ``total`` (documents of length 0). The size is then fixed,
            and nothing synchronises. False: the exact size, with one synchronisation on CUDA.

    Returns:
        int32 ``[num_documents + 1]``, or ``[total + 1]`` with ``padded``.

    Example:
        >>> cu_seqlens_from_position_ids(torch.tensor([0, 1, 0, 0, 1, 2]))
        tensor([0, 2, 3, 6], dtype=torch.int32)

    Raises:
        ValueError: position_ids of another dtype or shape.

    Determinism: the same integers in every call.
    Synchronises: once on CUDA, for the number of documents; with ``padded`` never.
    Memory: the result and ``total`` integers.
    Gradients: none: integers.
    """
    cu_seqlens, count = gate.cu_seqlens_from_position_ids(one_row(position_ids, "position_ids"))
    return cu_seqlens if padded else cu_seqlens[: int(count) + 1]


def mask_boundary_labels(
    labels: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return unshifted labels with the first label of each document masked: no token of another document may predict
    it.

    Args:
        labels: int64 or int32 ``[total]`` or ``[1, total]``.
        cu_seqlens: int32 ``[num_documents + 1]``, or the PackedMetadata of the row; or
        lengths: tokens per document (exactly one of the two).

    Returns:
        A new tensor like ``labels``. Slots past the last document keep their labels. A second call changes nothing.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> mask_boundary_labels(torch.tensor([5, 6, 7, 8, 9]), cu_seqlens)
        tensor([-100,    6, -100,    8,    9])

    Raises:
        ValueError: labels of another dtype, device or shape (rows of a padded batch are no packed row), cu_seqlens past
            the labels, both or neither of cu_seqlens and lengths.

    Determinism: the same integers in every call.
    Synchronises: never; wrong cu_seqlens on CUDA raise in a later call.
    Memory: the result.
    Gradients: none: integers.
    """
    return gate.mask_boundary_labels(labels, _cu_seqlens(labels, cu_seqlens, lengths), ignore_index)


def mask_boundary_labels_shifted_(
    labels: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Mask the last shifted label of each document (slot t holds the target of t), in place.

    Arguments are those of mask_boundary_labels; ``labels`` must be contiguous.

    Returns:
        ``labels`` itself.

    Example:
        >>> labels = torch.tensor([6, 7, 8, 9, 0])
        >>> mask_boundary_labels_shifted_(labels, lengths=[2, 3])
        tensor([   6, -100,    8,    9, -100])

    Raises:
        ValueError: as mask_boundary_labels.

    Determinism: the same integers in every call.
    Synchronises: never; wrong cu_seqlens on CUDA raise in a later call.
    Memory: nothing: in place.
    Gradients: none: integers.
    """
    gate.mask_boundary_labels_shifted_(labels, _cu_seqlens(labels, cu_seqlens, lengths), ignore_index)
    if not torch.compiler.is_compiling():  # autograd must notice if a loss has saved them
        torch.autograd.graph.increment_version(labels)
    return labels


def shift_labels(
    labels: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, *, ignore_index: int = -100
) -> torch.Tensor:
    """Return next-token targets that never cross a document.

    Args:
        labels: raw labels, int64 or int32 ``[total]`` or ``[1, total]``.
        cu_seqlens: int32 ``[num_documents + 1]``, or the PackedMetadata of the row.

    Returns:
        Like ``labels``: slot t holds label t + 1, or ``ignore_index`` at the last slot of each document and in the
        padding after them.

    Example:
        >>> shift_labels(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 2, 5], dtype=torch.int32))
        tensor([   6, -100,    8,    9, -100])

    Raises:
        ValueError: as mask_boundary_labels.

    Determinism: the same integers in every call.
    Synchronises: never; wrong cu_seqlens on CUDA raise in a later call.
    Memory: the result.
    Gradients: none: integers.
    """
    return gate.shift_labels(labels, _of_row(labels, cu_seqlens, "labels"), ignore_index)


def shift_values(
    values: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, *, fill_value: float = 0.0
) -> torch.Tensor:
    """Shift other values per token (loss masks, advantages, rewards, old log-probs) as shift_labels shifts labels.
    Differentiable.

    Args:
        values: ``[total]`` or ``[1, total]``, any dtype of torch.where: the value of token t at slot t.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.
        fill_value: what a slot gets that predicts no token.

    Returns:
        Like ``values``: slot t holds the value of token t + 1, or ``fill_value`` at the last slot of each document and
        in the padding after them. Nothing predicts a document's first token, so its value is in no slot and its
        gradient is 0.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> shift_values(torch.tensor([0.0, 1.0, 0.0, 0.5, 1.0]), cu_seqlens)
        tensor([1.0000, 0.0000, 0.5000, 1.0000, 0.0000])
        >>> shift_values(torch.tensor([[5, 6, 7, 8, 9]]), cu_seqlens, fill_value=-1)
        tensor([[ 6, -1,  8,  9, -1]])

    Raises:
        ValueError: values of another shape, wrong cu_seqlens, or cu_seqlens that end past the values, a fill_value that
            the dtype of the values does not hold.

    Determinism: the same bits in every call.
    Synchronises: never; wrong cu_seqlens on CUDA raise in a later call.
    Memory: the result and some integers per slot.
    Gradients: of values, of any order; forward mode too.
    """
    one_row(values, "values")
    if fill_value and not holds(values.dtype, fill_value):
        raise ValueError(
            f"fill_value: expected a number that {dtype_name(values.dtype)} holds like values, got {fill_value}"
        )
    cu_seqlens = _of_row(values, cu_seqlens, "values")
    last = shift_labels(values.new_zeros(values.shape, dtype=torch.int32), cu_seqlens, ignore_index=1) != 0
    # masked_fill knows fewer dtypes.
    return torch.where(last, values.new_full((), fill_value), values.roll(-1, dims=-1))


def count_target_tokens(
    labels: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor | None = None, *, ignore_index: int = -100
) -> torch.Tensor:
    """Count the next-token targets that raw labels hold: the divisor of a summed loss.

    Args:
        labels: raw (unshifted) labels, int64 or int32 ``[total]`` or ``[1, total]``. Without ``cu_seqlens``
            ``[batch, seqlen]``, one document a row.
        cu_seqlens: int32 ``[num_documents + 1]`` or the PackedMetadata of the row; the first label of each document is
            no target, padding after the last one is not counted.

    Returns:
        int64 scalar tensor on the device of ``labels``.

    Example:
        >>> count_target_tokens(torch.tensor([5, 6, 7, -100, 9]), torch.tensor([0, 2, 5], dtype=torch.int32))
        tensor(2)

    Raises:
        ValueError: labels of another dtype, device or shape, cu_seqlens past the labels.

    Determinism: the same integer in every call.
    Synchronises: never.
    Memory: the result.
    Gradients: none: integers.
    """
    if cu_seqlens is None:
        check_tensor(labels, "labels")
        if labels.dim() != 2:
            raise ValueError(f"labels: expected [batch, seqlen] without cu_seqlens, got {described(labels)}")
        batch, seqlen = labels.shape
        cu_seqlens = cu_seqlens_of_rows(batch, seqlen, labels.device)
        labels = labels.reshape(-1)
    return gate.count_target_tokens(labels, _of_row(labels, cu_seqlens, "labels"), ignore_index)


def _total(cu_seqlens: torch.Tensor, total: int | None) -> int:
    if total is not None:
        return total
    check_tensor(cu_seqlens, "cu_seqlens")
    check_cu_seqlens(cu_seqlens)
    return int(cu_seqlens[-1])


def _cu_seqlens(
    labels: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor | None, lengths: torch.Tensor | Sequence[int] | None
) -> torch.Tensor:
    if (cu_seqlens is None) == (lengths is None):
        got = "neither" if lengths is None else "cu_seqlens and lengths"
        raise ValueError(f"expected exactly one of cu_seqlens and lengths, got {got}")
    if cu_seqlens is not None:
        return _of_row(labels, cu_seqlens, "labels")
    check_tensor(labels, "labels")
    return cu_seqlens_from_lengths(index_tensor(lengths, "lengths").to(labels.device, non_blocking=True))  # type: ignore[arg-type]


def _of_row(row: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, name: str) -> torch.Tensor:
    check_tensor(row, name)
    return cu_seqlens_of(cu_seqlens, row.numel(), like=name)
