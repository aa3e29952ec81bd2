"""The rows of each prompt in a batch of samples, and mini-batches of whole prompts: where RL training cuts a batch."""

from collections.abc import Hashable, Sequence
from typing import Any, overload

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import integer, plain, wrong_type


@overload
def compute_prompt_end_indices(uids: torch.Tensor) -> torch.Tensor: ...


@overload
def compute_prompt_end_indices(uids: Sequence[Any]) -> list[int]: ...


def compute_prompt_end_indices(uids: torch.Tensor | Sequence[Any]) -> torch.Tensor | list[int]:
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
        ends, count = gate.prompt_end_indices(uids)
        return ends[: int(count)]
    uids = [plain(uid) for uid in plain(uids)]  # tensors of one number would be compared by identity
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
def compute_prompt_boundaries(uids: Sequence[Any]) -> list[tuple[int, int]]: ...


def compute_prompt_boundaries(uids: torch.Tensor | Sequence[Any]) -> torch.Tensor | list[tuple[int, int]]:
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
    prompts: torch.Tensor | Sequence[Any],
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


# --- registration: shapes for torch.compile ---


@gate.register_fake("prompt_end_indices")
def _(uids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return uids.new_empty(uids.numel(), dtype=torch.int64), uids.new_empty(1, dtype=torch.int64)
