"""The rows of each prompt in a batch of samples, and mini-batches of whole prompts: where RL training cuts a batch."""

from collections.abc import Hashable, Sequence
from itertools import compress, islice
from operator import le, ne, sub
from typing import Any, overload

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import at_least, integer, plain_entries, wrong_type


@overload
def compute_prompt_end_indices(uids: torch.Tensor) -> torch.Tensor: ...


@overload
def compute_prompt_end_indices(uids: Sequence[Any]) -> list[int]: ...


def compute_prompt_end_indices(uids: torch.Tensor | Sequence[Any]) -> torch.Tensor | list[int]:
    """Return the exclusive end of each run of equal uids.

    Args:
        uids: one per row, equal ones next to each other: a list of strings or integers, or an integer tensor.

    Returns:
        A list for a list, int64 ``[num_prompts]`` for a tensor (one synchronisation on CUDA).

    Example:
        >>> compute_prompt_end_indices(["a", "a", "b", "c", "c"])
        [2, 3, 5]

    Raises:
        ValueError: a uid that returns after another one; names it and its index.
        TypeError: uids that are one string, a uid that is a list, or a tensor of several numbers.

    Determinism: the same integers in every call.
    Synchronises: once for a tensor on CUDA; a list never.
    Memory: the result and, for a tensor, sorted copies of uids.
    Gradients: none: integers.
    """
    if isinstance(uids, torch.Tensor):
        ends, count = gate.prompt_end_indices(uids)
        return ends[: int(count)]
    entries = _entries(uids, "uids", "strings or integers")
    starts = [*compress(range(1, len(entries)), map(ne, islice(entries, 1, None), entries))]
    firsts = [entries[start] for start in [0, *starts]] if entries else []
    try:
        repeated = len(set(firsts)) < len(firsts)
    except TypeError:
        wrong = next(uid for uid in firsts if not isinstance(uid, Hashable))
        raise wrong_type("uids", "strings or integers", wrong) from None
    seen: set[Any] = set()
    for start, uid in zip([0, *starts], firsts, strict=True) if repeated else ():
        if uid in seen:
            raise ValueError(f"uids: expected equal uids next to each other, but {uid!r} comes back at index {start}")
        seen.add(uid)
    return [*starts, len(entries)] if entries else []


@overload
def compute_prompt_boundaries(uids: torch.Tensor) -> torch.Tensor: ...


@overload
def compute_prompt_boundaries(uids: Sequence[Any]) -> list[tuple[int, int]]: ...


def compute_prompt_boundaries(uids: torch.Tensor | Sequence[Any]) -> torch.Tensor | list[tuple[int, int]]:
    """Return (start, end) of each run of equal uids.

    Args:
        uids: as compute_prompt_end_indices.

    Returns:
        A list of pairs for a list, int64 ``[num_prompts, 2]`` for a tensor.

    Example:
        >>> compute_prompt_boundaries(["p0", "p0", "p1", "p1", "p1"])
        [(0, 2), (2, 5)]

    Raises:
        ValueError: as compute_prompt_end_indices.

    Determinism: the same integers in every call.
    Synchronises: once for a tensor on CUDA; a list never.
    Memory: as compute_prompt_end_indices.
    Gradients: none: integers.
    """
    ends = compute_prompt_end_indices(uids)
    if isinstance(ends, torch.Tensor):
        starts = torch.cat([ends.new_zeros(min(1, ends.numel())), ends[:-1]])
        return torch.stack([starts, ends], dim=1)
    return list(zip([0, *ends[:-1]], ends, strict=False))


def compute_prompt_mini_batch_boundaries(
    prompts: torch.Tensor | Sequence[Any],
    mini_batch_size: int,
    train_batch_size: int | None = None,
    is_stepwise: bool | None = None,
    n_samples_per_prompt: int | None = None,
) -> list[tuple[int, int]]:
    """Return the rows of each mini-batch of whole prompts: their number depends on the prompts only, not on turns or
    samples.

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
        TypeError: a size that is no integer.

    Determinism: the same integers in every call.
    Synchronises: once for a tensor on CUDA; a list never.
    Memory: the list of pairs.
    Gradients: none: integers.
    """
    at_least(mini_batch_size, "mini_batch_size", 1, "prompt")
    if train_batch_size is None:
        ends = [integer(end, "prompt_end_indices") for end in _entries(prompts, "prompt_end_indices", "integers")]
        if any(map(le, ends, [0, *ends])):
            raise ValueError(f"prompt_end_indices: expected exclusive ends that grow from at least 1, got {ends}")
    else:
        found = compute_prompt_end_indices(prompts)
        ends = found.tolist() if isinstance(found, torch.Tensor) else found
        if len(ends) != integer(train_batch_size, "train_batch_size"):
            raise ValueError(f"uids: expected train_batch_size={train_batch_size} prompts, got {len(ends)}")
        if train_batch_size % mini_batch_size:
            raise ValueError(
                f"train_batch_size: expected a multiple of mini_batch_size={mini_batch_size}, got {train_batch_size}"
            )
        rows = [*map(sub, ends, [0, *ends])]
        if not is_stepwise and rows.count(n_samples_per_prompt) < len(rows):
            prompt, found = next((i, found) for i, found in enumerate(rows) if found != n_samples_per_prompt)
            raise ValueError(
                f"uids: expected n_samples_per_prompt={n_samples_per_prompt} rows for every prompt, got {found} for "
                f"prompt {prompt}"
            )
    stops = [ends[min(i + mini_batch_size, len(ends)) - 1] for i in range(0, len(ends), mini_batch_size)]
    return list(zip([0, *stops], stops, strict=False))


def _entries(values: Any, name: str, of: str) -> list[Any]:
    """List the entries as Python's values, which compare by value: tensors of one number would by identity."""
    try:
        if not isinstance(values, (str, bytes)):
            return plain_entries(values)
    except TypeError:
        pass
    raise wrong_type(name, f"a sequence of {of}", values)
