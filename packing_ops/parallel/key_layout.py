"""Which keys a rank's documents need and where they are, for one varlen call over the queries of this rank.

A rank holds one or two chunks of a document. Each is a document of queries, whose keys are those of the whole document
that it sees: under a causal mask up to the chunk's end, from the window's first on. varlen_attention puts the last
query at the last key, which is where the chunk's is. Without a mask both chunks see the same keys, and are one
document.

Slots between documents that hold no token cost no copy: their queries get a document without keys (out 0, gradient 0).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from packing_ops._runtime.arguments import int32_cu_seqlens
from packing_ops.data.context_parallel import chunks_of_ranks, slots_of_chunks

# Of the rows of other ranks, how many the neediest rank must do without for the exchange to pay over an all-gather,
# which moves whole parts without an index.
MIN_SKIPPED_FRACTION = 0.25


@dataclass
class Exchange:
    """Which of a rank's rows go where, where not every rank gets all of them.

    index: int64, this rank's rows for rank 0, for rank 1, ..
    send, receive: how many rows go to each rank, and are received from it.
    shared: int64, this rank's rows that others get.
    shared_index: int64, which of ``shared`` each row of ``index`` is, but for those that stay here.
    to_others: ``index`` but for the rows that stay here, where the call's keys are the rows of the ranks in their
        order, this rank's first rows among them, so that only what others send is moved; else None. It saves nearly six
        copies of this rank's k in each layer, forward and backward (16,384 rows of 500-token documents, 384 of them
        received).
    """

    index: torch.Tensor
    send: list[int]
    receive: list[int]
    shared: torch.Tensor
    shared_index: torch.Tensor
    to_others: torch.Tensor | None = None


@dataclass
class KeyLayout:
    """Of one rank's varlen call.

    cu_seqlens_q, cu_seqlens_k: int32, of the rows of q and of the keys that they attend to.
    key_index: int64, the received row of each key of the call.
    key_positions: int64 ``[1 or 2, received rows]``, where a received key is in the call, and where again; the last
        key of the call, which no document contains, where it does not.
    received: how many rows of others the rank that needs most receives: the same number on every rank.
    exchange: which rows go to which rank; None where every rank gets all of them.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    key_index: torch.Tensor
    key_positions: torch.Tensor
    received: int
    exchange: Exchange | None = None


@dataclass
class RowSpans:
    """A row whose documents are spread over ranks: what every layout of it is made from.

    starts: int64 ``[num_documents + 1]``, the first slot of each document; the last one is the row's padding.
    lengths: int64 ``[num_documents]``, tokens of each document, at most its slots.
    rows, ranks, scheme: slots of a rank, and how the row was split.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    rows: int
    ranks: int
    scheme: str

    @classmethod
    def of(cls, cu_tokens: torch.Tensor, cu_slots: torch.Tensor, rows: int, ranks: int, scheme: str) -> "RowSpans":
        """Make it from cu_tokens and cu_slots: cu_seqlens of the tokens, and of the slots that hold them."""
        starts = F.pad(cu_slots.long(), (0, 1), value=ranks * rows)
        return cls(starts, F.pad(cu_tokens.long().diff(), (0, 1)), rows, ranks, scheme)

    def queries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (first, last, slots) ``[ranks, chunks, num_documents]``: the tokens first:last of a chunk, and its
        slots.
        """
        begin, end = chunks_of_ranks(self.starts, self.rows, self.ranks, self.scheme)
        last = end.minimum(self.lengths)
        return begin.minimum(last), last, end - begin

    def keys(self, causal: bool, left: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (first, last) ``[ranks, chunks, num_documents]`` of the keys that each chunk sees; both 0 if it
        sees no key.
        """
        first, last, _ = self.queries()
        if not causal:  # both chunks together
            any_query = (last > first).any(1, keepdim=True)
            return torch.zeros_like(first[:, :1]), self.lengths * any_query
        seen = first - left if left >= 0 else torch.zeros_like(first)
        return seen.clamp(min=0) * (last > first), last * (last > first)


def key_layout(spans: RowSpans, rank: int, *, causal: bool, left: int = -1, exchange: bool = True) -> KeyLayout:
    """Return the layout of ``rank``.

    Args:
        spans: of the row.
        causal, left: of the mask; a window needs causal.
        exchange: send only rows that are needed, where that pays. It waits for the GPU once, in the first layer of a
            batch. Without it the layout has the largest size that its lengths could need, and nothing waits.

    Raises:
        ValueError: with ``exchange``, documents of another row.
    """
    # Documents of the call.
    first, last, slots = (each[rank] for each in spans.queries())
    of_ranks = spans.keys(causal, left)
    key_first, key_last = (each[rank] for each in of_ranks)
    tokens = last - first
    if not causal:  # where the first chunk has padding the second is nothing else
        tokens, slots = tokens.sum(0, keepdim=True), slots.sum(0, keepdim=True)
    # The row's padding is no document of the call: rows past the last one have out 0.
    cu_seqlens_q = cumulated(*(part[:-1] for t, s in zip(tokens, slots, strict=True) for part in (t, s - t)))
    cu_seqlens_k = cumulated(*(part[:-1] for keys in key_last - key_first for part in (keys, torch.zeros_like(keys))))

    # Rows that arrive.
    begin, end = chunks_of_ranks(spans.starts, spans.rows, spans.ranks, spans.scheme)
    parts = [slots_of_chunks(spans.starts, begin[r], end[r], spans.rows)[0] for r in range(spans.ranks)]
    gathered = torch.cat(parts)  # the row's slot of each row that an all-gather gives
    slot_of_received, sent, received = gathered, None, (spans.ranks - 1) * spans.rows
    count = _most_keys(spans, len(key_first), rank)
    if exchange:
        document = _document_of(spans, gathered)
        position, (firsts, lasts) = gathered - spans.starts[document], of_ranks
        needed = ((position >= firsts[:, :, document]) & (position < lasts[:, :, document])).any(1)  # [ranks, slots]
        counts = _counts(spans, needed, cu_seqlens_k, rank)
        count = counts.keys
        most = max(sum(counts.from_to[s][r] for s in range(spans.ranks) if s != r) for r in range(spans.ranks))
        if received and most <= (1 - MIN_SKIPPED_FRACTION) * received:
            received, sent = most, _exchange(spans, needed, counts, rank)
            slot_of_received = gathered[_nonzero(needed[rank], sum(sent.receive))]
    gathered_of = slot_of_received.new_zeros(spans.ranks * spans.rows)
    gathered_of[slot_of_received] = torch.arange(len(slot_of_received), device=gathered.device)

    # The received row of each key. No document contains the key at `count`.
    chunks, ends = len(key_first), cu_seqlens_k.long()
    key = torch.arange(count + 1, device=gathered.device)
    part = torch.searchsorted(ends[1:], key, right=True).clamp(max=max(len(ends) - 2, 0))
    document, chunk = part // (2 * chunks), part % (2 * chunks) // 2
    slot = spans.starts[document] + key_first[chunk, document] + key - ends[part]
    key_index = gathered_of[slot.where(key < ends[-1], 0)]
    if not len(slot_of_received):
        key_index = key_index[:0]

    # The keys of each received row.
    document = _document_of(spans, slot_of_received)
    position = slot_of_received - spans.starts[document]
    first_key = F.pad(ends[:-1].view(-1, 2 * chunks)[:, ::2].T, (0, 1))
    first, last = key_first[:, document], key_last[:, document]
    outside = (position < first) | (position >= last)
    key_positions = (first_key[:, document] + position - first).masked_fill(outside, count)
    return KeyLayout(cu_seqlens_q, cu_seqlens_k, key_index, key_positions, received, sent)


class _Counts(NamedTuple):
    """What the sizes of a layout depend on.

    from_to: rows that go from each rank to each, itself included.
    keys: of this rank's call.
    shared: rows of this rank that others get.
    in_order: the keys of a call are the rows of the ranks in their order, of each its first ones.
    """

    from_to: list[list[int]]
    keys: int
    shared: int
    in_order: bool


def _counts(spans: RowSpans, needed: torch.Tensor, cu_seqlens_k: torch.Tensor, rank: int) -> _Counts:
    """Read at once all that waits for the GPU. Before it nothing is used as an index that the documents could make
    wrong.
    """
    starts, ranks, rows = spans.starts, spans.ranks, spans.rows
    from_to = needed.view(ranks, ranks, rows).sum(2).T
    shared = _needed_by_others(spans, needed, rank).sum()
    unpadded = (spans.lengths[:-1] == starts.diff()[:-1]).all()
    wrong = (starts[0] != 0) | (starts.diff() < 0).any()
    single = torch.stack([cu_seqlens_k[-1].long(), shared, unpadded.long(), wrong.long()])
    *flat, keys, others, is_unpadded, is_wrong = torch.cat([from_to.flatten(), single]).tolist()
    if is_wrong:
        raise ValueError(
            f"cu_seqlens: expected numbers from 0 that never decrease, to at most the {ranks * rows} rows of "
            f"{ranks} ranks, got {starts[:-1].tolist()}"
        )
    by_rank = [flat[source * ranks : (source + 1) * ranks] for source in range(ranks)]
    return _Counts(by_rank, keys, others, bool(is_unpadded) and spans.scheme == "contiguous")


def _needed_by_others(spans: RowSpans, needed: torch.Tensor, rank: int) -> torch.Tensor:
    """Return bool ``[rows]`` of this rank's rows: whether another rank needs them."""
    mine = needed[:, rank * spans.rows : (rank + 1) * spans.rows]
    return torch.cat([mine[:rank], mine[rank + 1 :]]).any(0)


def _exchange(spans: RowSpans, needed: torch.Tensor, counts: _Counts, rank: int) -> Exchange:
    send, receive = counts.from_to[rank], [of_rank[rank] for of_rank in counts.from_to]
    of_ranks = needed[:, rank * spans.rows : (rank + 1) * spans.rows]
    index = _nonzero(of_ranks.flatten(), sum(send)) % spans.rows
    parts = list(index.split(send))
    del parts[rank]
    to_others, by_others = torch.cat(parts), _needed_by_others(spans, needed, rank)
    shared, shared_index = _nonzero(by_others, counts.shared), (by_others.cumsum(0) - 1)[to_others]
    return Exchange(index, send, receive, shared, shared_index, to_others if counts.in_order else None)


def _nonzero(flags: torch.Tensor, count: int) -> torch.Tensor:
    """Return flags.nonzero()[:, 0] for ``count`` true flags: with the count given, the host does not wait for the
    GPU.
    """
    place = torch.where(flags, flags.cumsum(0) - 1, count)
    return place.new_zeros(count + 1).scatter_(0, place, torch.arange(len(flags), device=flags.device))[:count]


def _most_keys(spans: RowSpans, chunks: int, rank: int) -> int:
    """Return an upper bound of the keys of a call, from sizes only.

    One chunk (contiguous, or no mask): each token once, ``total = ranks * rows``.
    Two chunks (zigzag, causal): chunks r and 2 * ranks - 1 - r of a document of L tokens see the keys before their
    ends. For L a multiple of 2 * ranks these are L * (r + 1) / (2 * ranks) and L * (2 * ranks - r) / (2 * ranks) keys,
    together L + L / (2 * ranks). Another L adds at most (2 * r + 1) / 2. Over all documents:

        total + (rows + (2 * r + 1) * num_documents) // 2

    Example: a document of 8 tokens on 2 ranks of 4 rows. Rank 0 has tokens 0, 1, 6, 7, which see 2 + 8 keys, and the
        bound is 8 + (4 + 1) // 2 = 10. Rank 1 has tokens 2 to 5, which see 4 + 6 keys, and the bound is
        8 + (4 + 3) // 2 = 11.
    """
    total = spans.ranks * spans.rows
    return total if chunks == 1 else total + (spans.rows + (2 * rank + 1) * (len(spans.lengths) - 1)) // 2


def _document_of(spans: RowSpans, slots: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(spans.starts[1:], slots, right=True).clamp(max=len(spans.lengths) - 1)


def cumulated(*lengths: torch.Tensor) -> torch.Tensor:
    """Return cu_seqlens of documents in turn: the first of each tensor, the second of each, ...

    Example:
        >>> cumulated(torch.tensor([2, 1]), torch.tensor([3, 4])).tolist()
        [0, 2, 5, 6, 10]
    """
    ends = torch.stack(lengths, dim=1).flatten().cumsum(0)
    return int32_cu_seqlens(F.pad(ends, (1, 0)))
