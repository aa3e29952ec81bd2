"""What token_logps and token_kl share: rows that have a target, chunks of the vocabulary, gradients from d(logits).

The chunks are of the vocabulary, not of the tokens. The gradient of weight is the largest tensor. By chunks of the
vocabulary each of its entries is one product over all tokens, rounded once. Only the gradient of hidden is added up
from chunk to chunk, in float32.

Rows that have a target are gathered to the front, the products run only on these, and the results are scattered
back.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import sum_dtype
from packing_ops.invariance.mode import (
    COLUMNS,
    GRAIN,
    active,
    pad_rows,
    rows_of_product,
    whole_pairs,
)

_LOGITS_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_FEWEST = 512  # entries of a chunk: smaller products do not fill a GPU
TILE = 128  # whole tiles of the product, rows aligned to 16 bytes


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# --- sizes, the same in a trace ---


def rows_at_most(total: int, max_targets: int | None) -> int:
    """Return how many rows are multiplied: whole tiles of them."""
    return total if max_targets is None else torch.sym_min(total, round_up(max_targets, TILE))


def chunk_of(chunk: int | None, rows: int, hidden: torch.Tensor, vocab: int) -> int:
    """Return the entries of the vocabulary in a chunk: a multiple of 8, so that its rows start on 16 bytes. rows: those
    of all heads.
    """
    if chunk is None:
        most = _LOGITS_BYTES.get(hidden.device.type, 1) // torch.sym_max(rows * hidden.element_size(), 1)
        count = -(-vocab // torch.sym_max(most, _FEWEST))
        chunk = round_up(-(-vocab // count), TILE)
    if active():
        chunk = torch.sym_max(chunk // GRAIN, 1) * GRAIN
    return round_up(torch.sym_min(chunk, vocab), 8)


def kept_shape(
    hidden: torch.Tensor, vocab: int, chunk: int | None, max_targets: int | None, keep_logits: int, heads: int = 1
) -> tuple[int, int, int]:
    """Return [chunks, rows, columns] of the logits that are kept of one head: as many whole chunks as fit into
    keep_logits bytes.
    """
    if keep_logits == 0:
        return 0, 0, 0
    rows = rows_at_most(hidden.shape[0], max_targets)
    chunk = chunk_of(chunk, heads * rows, hidden, vocab)
    rows = rows_of_product(rows, hidden) if active() else rows
    fit = keep_logits // torch.sym_max(rows * chunk * hidden.element_size(), 1)
    return torch.sym_min(fit, -(-vocab // chunk)), rows, chunk


def check_kept(
    kept: torch.Tensor, hidden: torch.Tensor, vocab: int, chunk: int | None, max_targets: int | None, heads: int = 1
) -> None:
    """Raise ValueError if a compiled graph's forward ran in another mode than its backward: eager code makes logits
    again.
    """
    if kept.numel() == 0:
        return
    wanted = kept_shape(hidden, vocab, chunk, max_targets, kept.numel() * kept.element_size(), heads)
    if tuple(kept.shape) != wanted:
        raise ValueError(
            f"keep_logits: expected forward and backward both inside packing_ops.invariant() or both outside, got "
            f"chunks of {list(wanted)} in backward where {list(kept.shape)} were kept"
        )


# --- rows with a target ---


class Rows:
    # The rows that are multiplied. index: int64, which ones, -1 past their number; None: all.
    # allowed: ids and offsets of logps_allowed, or nothing.

    def __init__(self, targets: torch.Tensor, max_targets: int | None, allowed: Sequence[Any] = ()) -> None:
        self.allowed = allowed if any(each is not None for each in allowed) else ()
        self.all_targets, self.bounded = targets, max_targets is not None
        self.total = targets.shape[0]
        size = rows_at_most(self.total, max_targets)
        if targets.is_cpu:  # counting them costs no wait
            size = int((targets >= 0).sum())
            size = size if max_targets is None else min(size, max_targets)
        self.index = gate.logps_rows(targets, size) if size < self.total else None
        self.targets = targets
        if self.index is not None:
            self.targets = self.of(targets).masked_fill_(self.index < 0, -1)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return values ``[..., total]`` of these rows, contiguous. Anything where the index is -1."""
        if self.index is None:
            return values.contiguous()
        return values.index_select(-1, self.index.clamp(min=0))

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        # Other strides: copied once here, not by the product of every chunk.
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        return hidden if self.index is None else gate.gather_rows(hidden[None], self.index, self.index.shape[0])

    def back(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Put values ``[rows, ...]`` at their places of ``[total, ...]``, zeros elsewhere."""
        if self.index is None:
            return list(values)
        return [each[0] for each in gate.scatter_rows_many(list(values), self.index, 1, self.total)]

    def over_bound(self) -> torch.Tensor | None:
        """Return bool ``[total]``: targets that are left out for too small a bound; None if there cannot be any."""
        if self.index is None or not self.bounded or self.index.is_cpu:
            return None
        if self.index.shape[0] == 0:
            return self.all_targets >= 0
        last, slots = self.index[-1:], torch.arange(self.total, device=self.index.device)
        return (self.all_targets >= 0) & (last >= 0) & (slots > last)

    def mask(self, first: int, logits: torch.Tensor) -> torch.Tensor | None:
        """Return a bit for each logit of a chunk of these rows, whose entries begin at ``first``; None: all are
        allowed.
        """
        return gate.logps_allowed_mask(*self.allowed, self.index, first, logits.shape[1]) if self.allowed else None

    def scales(self, temperature: torch.Tensor | None, outer: float, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[rows]``: the factor of a bounded logit."""
        if temperature is None:
            return torch.full(self.targets.shape, outer, dtype=dtype, device=self.targets.device)
        scales = outer / self.of(temperature.to(dtype))
        if scales.is_cpu:  # on CUDA the kernel reports it
            wrong = ((self.targets >= 0) & ~((scales > 0) & scales.isfinite())).nonzero()
            if wrong.numel():
                row = int(wrong[0]) if self.index is None else int(self.index[wrong[0]])
                raise ValueError(f"temperature: expected numbers above 0, got {temperature[row]} at index {row}")
        return scales


# --- the loop ---


class Chunks:
    # Yields (slice of the vocabulary, first entry of all ranks' vocabulary, its weight, bias, memory for its logits,
    # are they kept). In the mode invariant() hidden and logits may have more rows than there are (pad_rows).

    def __init__(
        self,
        rows: Rows,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chunk: int,
        group: str | None,
        kept: torch.Tensor,
    ) -> None:
        self.hidden = rows.hidden(hidden)
        self.rows, self.invariant = self.hidden.shape[0], active()
        self.hidden = pad_rows(self.hidden) if self.invariant else self.hidden
        self.weight = weight if 1 in weight.stride() else weight.contiguous()
        self.bias = None if bias is None else bias.to(sum_dtype(hidden.dtype)).contiguous()
        self.group = None
        if group is not None:
            # The op's schema has a str, which torch 2.13 gives a separate type.
            self.group = torch.distributed.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        self.chunk, self.kept = chunk, kept

    def __iter__(self) -> Iterator[tuple[slice, int, torch.Tensor, torch.Tensor | None, torch.Tensor, bool]]:
        vocab, memory = self.weight.shape[0], None
        offset = 0 if self.group is None else self.group.rank() * vocab
        for i, first in enumerate(range(0, vocab, self.chunk)):
            part = slice(first, min(first + self.chunk, vocab))
            is_kept = i < self.kept.shape[0]
            if is_kept:
                logits = self.kept[i, : self.hidden.shape[0]]
            else:
                memory = self.scratch() if memory is None else memory
                logits = memory
            yield part, offset + first, self.weight[part], self.bias_of(part), logits[:, : part.stop - first], is_kept

    def scratch(self) -> torch.Tensor:
        return self.hidden.new_empty(self.hidden.shape[0], self.chunk)

    def bias_of(self, part: slice) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[part]

    def multiply(self, weight: torch.Tensor, logits: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        """Compute logits of a chunk's weight, of all rows or those in hidden."""
        hidden, columns = self.hidden if hidden is None else hidden, logits.shape[1]
        hidden, weight = whole_pairs(hidden, weight) if logits.is_cpu else (hidden, weight)
        if logits.is_cpu and self.invariant:
            gate.mm_by_rows_(logits, hidden, weight.t(), False)
        elif missing := self.missing_columns(columns):
            logits.copy_(torch.mm(hidden, pad(weight, (0, 0, 0, missing)).t())[:, :columns])
        else:
            torch.mm(hidden, weight.t(), out=logits)

    def missing_columns(self, columns: int) -> int:
        """Count the columns up to whole sets of COLUMNS, which products in the mode take on a GPU."""
        return -columns % COLUMNS if self.invariant and self.hidden.is_cuda else 0

    def grains(self, columns: int) -> list[slice]:
        """Yield the columns of a chunk that one product takes."""
        size = GRAIN if self.invariant else max(columns, 1)
        return [slice(first, first + size) for first in range(0, columns, size)]


# --- gradients ---


class Gradients:
    # Of hidden, weight and bias, from d(logits) chunk by chunk. Where d(logits) stays, weight's gradient is made after
    # the float32 one of hidden is gone: less memory at a time.

    def __init__(self, chunks: Chunks, dtype: torch.dtype, need_hidden: bool, need_weight: bool, need_bias: bool):
        self.chunks, self.need_hidden, self.need_weight, self.need_bias = chunks, need_hidden, need_weight, need_bias
        weight = chunks.weight
        self.hidden = chunks.hidden.new_zeros(chunks.hidden.shape if need_hidden else 0, dtype=dtype)
        self.weight: torch.Tensor | None = None
        self.bias = weight.new_empty(weight.shape[0] if need_bias else 0)
        self.later: list[tuple[slice, torch.Tensor]] = []

    def add(self, part: slice, weight: torch.Tensor, all_logits: torch.Tensor, later: bool = False) -> None:
        logits = all_logits[: self.chunks.rows]
        if self.need_hidden:
            weight = weight.to(self.hidden.dtype) if weight.is_cpu else weight  # once for all grains
            for grain in self.chunks.grains(logits.shape[1]):
                of_grain, part_of_weight = all_logits[:, grain], weight[grain]
                if missing := self.chunks.missing_columns(of_grain.shape[1]):
                    of_grain, part_of_weight = pad(of_grain, (0, missing)), pad(part_of_weight, (0, 0, 0, missing))
                _add_product(self.hidden, of_grain, part_of_weight)
        if self.need_bias:
            self.bias[part] = logits.sum(0, dtype=self.hidden.dtype)
        if self.need_weight and later:
            self.later.append((part, logits))
        elif self.need_weight:
            self._add_weight(part, logits)

    def _add_weight(self, part: slice, logits: torch.Tensor) -> None:
        if self.weight is None:
            self.weight = self.chunks.weight.new_empty(self.chunks.weight.shape)
        torch.mm(logits.t(), self.chunks.hidden[: self.chunks.rows], out=self.weight[part])

    def finished(self, rows: Rows, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        hidden, self.hidden = self.hidden[: self.chunks.rows], self.hidden.new_empty(0)  # no view of it stays
        if self.need_hidden:
            if self.chunks.group is not None:
                torch.distributed.all_reduce(hidden, group=self.chunks.group)
            (hidden,) = rows.back(hidden.to(dtype))
        for part, logits in self.later:
            self._add_weight(part, logits)
        return hidden.to(dtype), self.bias.new_empty(0) if self.weight is None else self.weight, self.bias


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to total in total's dtype, which b has on the CPU: rounded to a half type, each chunk would cost
    another error.
    """
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.is_cpu and active():
        gate.mm_by_rows_(total, a.to(total.dtype), b, True)
    else:
        total.addmm_(a.to(total.dtype), b)
