"""How many parts the heads travel in, one behind the other: attention over a part runs while the next is under way.

Heads are independent of each other, so that parts leave every bit as it is; keys are not, since one call sums over all
keys of a document in their order. All ranks count the same parts, from numbers that are the same on all of them.
"""

from collections.abc import Sequence

import torch

MOST_PARTS = 4
# Of a part: a link moves them in 28 us (at 300 GB/s), about what one more collective and kernel call cost.
LEAST_BYTES = 8 << 20
# Parts of out are put together by one more copy of it. Memory is some thirteen times as fast as a link and a copy reads
# and writes, so that hiding three quarters of what is received pays from a fifth of out's bytes on.
LEAST_SHARE = 0.2


def head_parts(heads: int, received: int, *, merged: int = 0) -> int:
    """Return how many parts to send ``heads`` key heads in: a divisor of ``heads``.

    Args:
        heads: what is divided, evenly.
        received: bytes that the neediest rank receives before attention can run over all heads.
        merged: bytes of out, where its parts are put together by a copy.
    """
    if received < LEAST_SHARE * merged:
        return 1
    most = max(1, min(MOST_PARTS, heads, received // LEAST_BYTES))
    return max(parts for parts in range(1, most + 1) if heads % parts == 0)


def ulysses_parts(ranks: int, rows: int, heads: Sequence[tuple[int, int]], element_size: int) -> int:
    """Return how many parts ulysses_attention sends the heads in.

    Args:
        heads: (number, head_dim) of q, k and v.
    """
    elements = sum(max(number, ranks) * head_dim for number, head_dim in heads)
    received = (ranks - 1) * rows * elements * element_size // ranks
    return head_parts(max(heads[1][0] // ranks, 1), received)


def gathered_parts(received: int, rows: int, heads: Sequence[tuple[int, int]], element_size: int) -> int:
    """Return how many parts gathered_attention sends the key heads in, by the rows of keys of the rank that receives
    most.
    """
    (num_heads, _), (num_kv_heads, head_dim), (_, head_dim_v) = heads
    keys = received * num_kv_heads * (head_dim + head_dim_v) * element_size
    return head_parts(num_kv_heads, keys, merged=rows * num_heads * head_dim_v * element_size)


def keeps_keys(received: int, rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Return whether received rows of k and v take no more memory than q and out of a rank, which backward needs
    anyway.
    """
    return received * num_kv_heads <= rows * num_heads


def slices(heads: int, parts: int) -> list[slice]:
    size = heads // parts
    return [slice(part * size, (part + 1) * size) for part in range(parts)]


def together(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
