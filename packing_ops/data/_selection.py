"""Which examples of a batch a padding-free row keeps, cuts, drops or carries over."""

from dataclasses import dataclass
from itertools import accumulate, takewhile


@dataclass(frozen=True)
class BatchSelection:
    """Which examples a batch keeps, as lists of indices, and how many tokens that is, chosen and rejected together.

    Attributes:
        kept: in the batch, whole or cut.
        truncated: those of ``kept`` that are cut.
        own: those of ``kept`` that are longer than capacity (at most one, in a row without others).
        dropped: lost.
        carried: not in this batch, for the caller to put into the next one.
        num_tokens: tokens in the batch.
        lost_tokens: tokens that were dropped or cut off.
        carried_tokens: tokens of ``carried``.
    """

    kept: list[int]
    truncated: list[int]
    own: list[int]
    dropped: list[int]
    carried: list[int]
    num_tokens: int
    lost_tokens: int
    carried_tokens: int

    @classmethod
    def of(
        cls, lengths: list[tuple[int, ...]], kept: list[tuple[int, ...]], overlong: str, limit: int | None
    ) -> "BatchSelection":
        """Make a selection from the number of tokens that each example has, and that are kept of it, per side."""
        index = range(len(lengths))
        left_out = [i for i in index if not any(kept[i])]
        num_tokens = sum(map(sum, kept))
        rest, carries = sum(map(sum, lengths)) - num_tokens, overlong in ("carry", "own")
        return cls(
            kept=[i for i in index if any(kept[i])],
            truncated=[i for i in index if any(kept[i]) and kept[i] != lengths[i]],
            own=[i for i in index if limit is not None and max(kept[i]) > limit],
            dropped=[] if carries else left_out,
            carried=left_out if carries else [],
            num_tokens=num_tokens,
            lost_tokens=0 if carries else rest,
            carried_tokens=rest if carries else 0,
        )


def num_fitting(lengths: list[tuple[int, ...]], limit: float) -> int:
    """Count how many of the first examples fit together, on each side."""
    totals = zip(*map(accumulate, zip(*lengths, strict=True)), strict=True)
    return sum(1 for _ in takewhile(lambda total: max(total) <= limit, totals))
