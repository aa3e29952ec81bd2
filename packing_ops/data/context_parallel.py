"""Where documents are placed under tensor and context parallelism, and which tokens of a row each rank of a group
holds.

Zigzag: a document is cut into ``2 * ranks`` chunks and rank r holds chunks r and ``2 * ranks - 1 - r``, one from either
end, so that a causal mask gives all ranks equal work. A rank's row holds those two chunks of every document, one
document after the other. Contiguous: rank r holds the r-th of ``ranks`` equal parts of the row.
"""

import math
from typing import Literal, NamedTuple, overload

import torch

from packing_ops._runtime.arguments import at_least, check_cu_seqlens, integer

SCHEMES = ("contiguous", "zigzag")
Fp8 = Literal["tensor", "mxfp8", "blockwise"]


class PackedAlignment(NamedTuple):
    """Two multiples of slots: of a document, and of a whole row.

    document_multiple: context parallelism cuts every document into equal chunks.
    row_multiple: tensor parallelism and FP8 divide the row. Its padding is paid once, at the end.
    """

    document_multiple: int
    row_multiple: int


@overload
def packed_alignment(
    tp_size: int = 1, cp_size: int = 1, fp8: bool = False, *, tp: int | None = None, cp: int | None = None
) -> int: ...
@overload
def packed_alignment(
    tp_size: int = 1, cp_size: int = 1, *, fp8: Fp8 | None, tp: int | None = None, cp: int | None = None
) -> PackedAlignment: ...
def packed_alignment(
    tp_size: int = 1, cp_size: int = 1, fp8: bool | Fp8 | None = False, *, tp: int | None = None, cp: int | None = None
) -> int | PackedAlignment:
    """Return the multiples that tensor and context parallelism and FP8 need: of documents and of rows, or one for both.

    Args:
        tp_size, cp_size: ranks of tensor and context parallelism; tp and cp are shorter names.
        fp8: None or the name of a recipe gives PackedAlignment: documents in multiples of ``2 * tp * cp`` under context
            parallelism, else of 1; rows in multiples of that, of tp and of what the recipe needs: ``"tensor"`` (one
            scale for a tensor) 16 slots on each context-parallel rank, ``"mxfp8"`` 32 on each rank, ``"blockwise"`` 128
            on each rank, or 16 without tensor parallelism. False gives one int that documents are rounded up to, tp or
            ``2 * tp * cp`` under context parallelism; True the same, and a multiple of ``16 * cp``.

    Example:
        >>> packed_alignment(tp=4, cp=1, fp8="tensor")
        PackedAlignment(document_multiple=1, row_multiple=16)
        >>> packed_alignment(tp=2, cp=2, fp8=None), packed_alignment(tp=2, cp=2, fp8="mxfp8").row_multiple
        (PackedAlignment(document_multiple=8, row_multiple=8), 128)
        >>> packed_alignment(4, 1), packed_alignment(1, 2), packed_alignment(4, 1, fp8=True)
        (4, 4, 16)

    Raises:
        ValueError: a size below 1, an unknown recipe.
        TypeError: a size that is no integer; tp together with tp_size, cp together with cp_size.
    """
    sizes = []
    for name, size, short in (("tp", tp_size, tp), ("cp", cp_size, cp)):
        if short is not None and size != 1:
            raise TypeError(f"{name}: expected None beside {name}_size={size}, got {short}")
        sizes.append(at_least(size, f"{name}_size", 1) if short is None else at_least(short, name, 1))
    tp, cp = sizes
    layout = 2 * tp * cp if cp > 1 else tp
    if isinstance(fp8, bool):
        return math.lcm(layout, 16 * cp) if fp8 else layout
    recipes = {None: 1, "tensor": 16 * cp, "mxfp8": 32 * tp * cp, "blockwise": 128 * tp * cp if tp > 1 else 16 * cp}
    if fp8 not in recipes:
        raise ValueError(f"fp8: expected 'tensor', 'mxfp8', 'blockwise', None or a bool, got {fp8!r}")
    return PackedAlignment(layout if cp > 1 else 1, math.lcm(layout, recipes[fp8]))


def aligned(length: int, alignment: int) -> int:
    """Round the length of a document up to a multiple of the alignment, and return these slots.

    Example:
        >>> aligned(5, 4), aligned(8, 4), aligned(0, 4)
        (8, 8, 0)
    """
    return -(-length // alignment) * alignment


def thd_partition_indices(
    cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int, *, total: int | None = None
) -> torch.Tensor:
    """Return the tokens of the whole row that context-parallel rank ``cp_rank`` holds, in the order in which it holds
    them.

    Args:
        cu_seqlens: int32 ``[num_documents + 1]`` of the whole row, multiples of ``2 * cp_size``: the padded ones where
            documents are padded.
        cp_size, cp_rank: ranks that share the row, and which of them this is.
        total: tokens of the whole row, a multiple of ``2 * cp_size``; those after the last document are shared out
            like a document. Without it ``cu_seqlens[-1]``, which synchronises on CUDA, and checks the lengths there.

    Returns:
        int64 ``[total / cp_size]``, strictly increasing, on the device of ``cu_seqlens``. With ``total`` given nothing
        waits for a GPU; a document there that does not divide gets the indices ``total``, which no row has, so that
        indexing with them fails.

    Example:
        >>> cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
        >>> [thd_partition_indices(cu_seqlens, 2, rank).tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]

    Raises:
        ValueError: cp_rank outside cp_size; cu_seqlens or total that are no multiples of ``2 * cp_size``; no
            cu_seqlens, or such as end past ``total``.

    Source:
        TransformerEngine's context parallelism (thd_get_partitioned_indices), as megatron-core expects it.

    Determinism: the same integers in every call.
    Synchronises: on CUDA once without ``total``; with it never.
    Memory: the result and some integers per document.
    Gradients: none: integers.
    """
    cp_size, cp_rank = integer(cp_size, "cp_size"), integer(cp_rank, "cp_rank")
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank: expected 0 to cp_size - 1 = {cp_size - 1}, got {cp_rank}")
    check_cu_seqlens(cu_seqlens)
    chunks = 2 * cp_size if cp_size > 1 else 1
    if total is None or (cu_seqlens.is_cpu and not torch.compiler.is_compiling()):
        wrong = (cu_seqlens % chunks != 0).any()
        wrong, end = torch.stack([wrong.to(cu_seqlens.dtype), cu_seqlens[-1]]).tolist()
        if wrong:
            raise ValueError(
                f"cu_seqlens: expected multiples of 2 * cp_size = {chunks} under context parallelism, "
                f"got {cu_seqlens.tolist()}"
            )
        total = end if total is None else total
        if end > total:
            raise ValueError(f"cu_seqlens: expected to end at most at total={total}, got {end}")
    if cp_size == 1:
        return torch.arange(total, device=cu_seqlens.device)
    if total % chunks:
        raise ValueError(f"total: expected a multiple of 2 * cp_size = {chunks}, got {total}")
    # What follows the last document is one more.
    starts = torch.nn.functional.pad(cu_seqlens, (0, 1), value=total).long()
    begin, end = (chunk[cp_rank] for chunk in chunks_of_ranks(starts, total // cp_size, cp_size, "zigzag"))
    index, document = slots_of_chunks(starts, begin, end, total // cp_size)
    return index.masked_fill((starts.diff() % chunks != 0)[document], total)


def chunks_of_ranks(starts: torch.Tensor, rows: int, ranks: int, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the chunks of each document that a rank holds begin and end, for documents of any lengths.

    Zigzag chunks have equal lengths where a document's length is a multiple of ``2 * ranks``. Else they differ by a
    slot or two: a rank takes as many slots of a document as there are numbers t between its two ends with
    ``t % ranks == rank``. So all ranks hold equally many slots of the row, without any padding inside of it.

    Args:
        starts: int64 ``[num_documents + 1]``, ends with the row: its padding is the last document.
        rows: slots of each rank, ``starts[-1] / ranks``.
        scheme: ``"contiguous"`` or ``"zigzag"``.

    Returns:
        Two int64 ``[ranks, chunks, num_documents]``, counted from the document's first slot; chunks: 1 or 2.

    Example:
        >>> begin, end = chunks_of_ranks(torch.tensor([0, 5, 6]), 3, 2, "zigzag")  # 5 slots and 1 of padding
        >>> torch.stack([begin, end], -1)[:, :, 0].tolist()  # of the first document
        [[[0, 2], [4, 5]], [[2, 3], [3, 4]]]
    """
    rank = torch.arange(ranks, device=starts.device)[:, None]
    if scheme == "contiguous":
        edges = [(edge * rows - starts[:-1]).clamp(min=0).minimum(starts.diff()) for edge in (rank, rank + 1)]
        return edges[0][:, None], edges[1][:, None]
    slots = ((starts + ranks - 1 - rank) // ranks).diff(dim=1)
    first, second = (slots + 1) // 2, slots // 2
    begin = torch.stack([
        first.cumsum(0) - first,
        first.sum(0) + second.flip(0).cumsum(0).flip(0) - second,
    ], dim=1)  # fmt: skip
    return begin, begin + torch.stack([first, second], dim=1)


def slots_of_chunks(
    starts: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row's slot of each of a rank's ``rows`` slots, and its document; both int64 ``[rows]``.

    Args:
        starts, begin, end: as chunks_of_ranks, of one rank: ``[chunks, num_documents]``.

    Example:
        >>> starts = torch.tensor([0, 8, 12])  # documents of 8 and 4 slots, then no padding
        >>> begin, end = chunks_of_ranks(starts, 6, 2, "zigzag")
        >>> slots, document = slots_of_chunks(starts, begin[1], end[1], 6)  # of rank 1
        >>> slots.tolist(), document.tolist()
        ([2, 3, 4, 5, 9, 10], [0, 0, 0, 0, 1, 1])
    """
    lengths = (end - begin).T.flatten()
    ends = lengths.cumsum(0)
    slot = torch.arange(rows, device=starts.device)
    chunk = torch.searchsorted(ends, slot, right=True).clamp(max=len(ends) - 1)
    document = chunk // len(begin)
    return starts[document] + begin.T.flatten()[chunk] + slot - (ends - lengths)[chunk], document


def thd_inverse_indices(cu_seqlens: torch.Tensor, cp_size: int, *, total: int | None = None) -> torch.Tensor:
    """Return where each token of the whole row is in the ranks' rows laid end to end, as an all-gather gives them.

    Args:
        cu_seqlens, cp_size, total: as thd_partition_indices.

    Returns:
        int64 ``[total]``: ``torch.cat(rows_of_ranks)[thd_inverse_indices(...)]`` is the whole row.

    Example:
        >>> thd_inverse_indices(torch.tensor([0, 8], dtype=torch.int32), 2).tolist()
        [0, 1, 4, 5, 6, 7, 2, 3]

    Raises:
        ValueError: as thd_partition_indices.

    Determinism: the same integers in every call.
    Synchronises: as thd_partition_indices.
    Memory: the result and one more of its size.
    Gradients: none: integers.
    """
    check_cu_seqlens(cu_seqlens)
    if total is None:
        total = int(cu_seqlens[-1])
    parts = [thd_partition_indices(cu_seqlens, cp_size, rank, total=total) for rank in range(cp_size)]
    held = torch.cat(parts)
    return torch.empty_like(held).scatter_(0, held, torch.arange(total, device=held.device))
