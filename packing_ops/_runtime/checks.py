"""Checks of values that cost no synchronisation: on the CPU at once, on CUDA by a kernel and the fault flag."""

import torch

from packing_ops._runtime import gate


def checked_documents(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    batch: int,
    seqlen: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """cu_seqlens_q and position_ids. ValueError where explicit cu_seqlens, padding mask and positions contradict each other.

    Positions contradict where a document goes on with those before it in its row (one more than the last), or where they
    fall inside of a document and grow again. They may start anywhere. What may be padding passes: documents of ones at an
    end of a row, and zeros or ones beside a document.

    A compiled graph drops an op that gives nothing. There they are copies, and checked if what comes out is used.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[num_documents + 1]`` over the batch's rows, one after the other.
        mask: bool ``[batch, seqlen]``, False is padding, which has no place beside cu_seqlens.
        position_ids: int32 or int64 ``[batch or 1, seqlen]`` of queries and keys.
    """
    given = cu_seqlens_q, cu_seqlens_k, mask, position_ids, batch, seqlen
    if not torch.compiler.is_compiling():
        gate.check_documents(*given)
        return cu_seqlens_q, position_ids
    cu_seqlens_q, copied = gate.checked_documents(*given)
    return cu_seqlens_q, position_ids if position_ids is None else copied


def check_unchanged(values: torch.Tensor, expected: torch.Tensor, wanted: str = "as it was") -> None:
    """ValueError where ``values`` are not, byte for byte, those of ``expected``. wanted: what the error says.

    "as it was": a kept copy of values; "depths": position_ids of a prefix tree; "segments": cu_seqlens of one.
    """
    gate.check_unchanged(values, expected, wanted)


@gate.register_fake("check_documents")
def _(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    batch: int,
    seqlen: int,
) -> None:
    return None


@gate.register_fake("checked_documents")
def _(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    batch: int,
    seqlen: int,
) -> tuple[torch.Tensor, ...]:
    positions = cu_seqlens_q.new_empty(0, dtype=torch.int64) if position_ids is None else position_ids
    return cu_seqlens_q.new_empty(cu_seqlens_q.shape), positions.new_empty(positions.shape)


@gate.register_fake("check_unchanged")
def _(values: torch.Tensor, expected: torch.Tensor, wanted: str = "as it was") -> None:
    return None
