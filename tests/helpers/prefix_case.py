"""Pieces of one document, whose rows must have the bits that they have in the document: prefixes, and chunks of
queries.
"""

import random

import torch

from helpers import cu_seqlens_of
from helpers.attention_case import OPEN, Case

# On both sides of the edges of tiles of 16, 32, 64 and 128 keys, in one tile, in two and in several.
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 192, 200, 255, 256, 257, 320, 400, 513]
WINDOWS = [OPEN, OPEN, (0, 0), (16, 0), (70, 0), (130, -1), (200, 0)]


class Pieces:
    """A document, and a pack of it and pieces of it.

    options: of Case, of one document. A piece is (first query, end of the queries, end of the keys); without ``spans``
        some
    are drawn. Queries are the last of their keys, so a piece of causal rows has the keys up to its last query.
    """

    def __init__(self, draw: random.Random, length: int, *, spans=None, **options):
        self.case = Case([length], **options)
        self.length = length
        self.ends = [self.end_of(token) for token in range(length)]
        self.spans = [(0, length, length), *(spans or self.drawn(draw))]

    def end_of(self, token: int) -> int:
        """Where the keys end that a query sees."""
        if "visible_end" in self.case.options:
            return int(self.case.options["visible_end"][token])
        right = self.case.options.get("window_size", OPEN)[1]
        if self.case.options.get("causal", True):
            return token + 1
        return self.length if right < 0 else min(token + right + 1, self.length)

    def drawn(self, draw: random.Random) -> list[tuple[int, int, int]]:
        left, right = self.case.options.get("window_size", OPEN)
        if not self.case.options.get("causal", True) and (left, right) == OPEN:  # every query sees every key
            starts = [draw.randrange(self.length) for _ in range(6)]
            return [(a, min(self.length, a + draw.choice([1, 7, 64, 128, 300])), self.length) for a in starts]
        sizes, spans = [1, 2, 7, 64, 128, 300], []
        stops = [t + 1 for t in range(self.length) if "visible_end" not in self.case.options or self.ends[t] == t + 1]
        for _ in range(6):
            stop = draw.choice(stops)
            spans += [(0, stop, stop), (max(0, stop - draw.choice(sizes)), stop, stop)]
        return spans

    def pack(self) -> Case:
        """A case of the document and its pieces, one after the other."""
        case = self.case
        pack = Case(
            [1], heads=(case.q.shape[1], case.k.shape[1]), dim=case.q.shape[2], device=case.q.device, dtype=case.q.dtype
        )
        pack.q = torch.cat([case.q[a:b] for a, b, _ in self.spans])
        pack.k, pack.v = (torch.cat([t[:end] for *_, end in self.spans]) for t in (case.k, case.v))
        pack.cu_seqlens = (
            cu_seqlens_of([b - a for a, b, _ in self.spans], case.q.device),
            cu_seqlens_of([end for *_, end in self.spans], case.q.device),
        )
        pack.sinks, pack.options = case.sinks, dict(case.options)
        if "visible_end" in case.options:
            pack.options["visible_end"] = torch.cat([case.options["visible_end"][a:b] for a, b, _ in self.spans])
        pack.dout = torch.cat([case.dout[a:b] for a, b, _ in self.spans])
        pack.dlse = torch.cat([case.dlse[:, a:b] for a, b, _ in self.spans], 1)
        return pack

    def assert_equal_rows(self, out: torch.Tensor, lse: torch.Tensor, where: str) -> int:
        """Compares the rows of every piece whose keys are in it; how many those are."""
        start, compared = self.length, 0
        for a, b, end in self.spans[1:]:
            rows = [t for t in range(a, b) if end == self.length or self.ends[t] <= end]
            here = [start + t - a for t in rows]
            for name, of_piece, of_document in (("out", out[here], out[rows]), ("lse", lse[:, here].T, lse[:, rows].T)):
                different = [t for t, x, y in zip(rows, of_piece, of_document, strict=True) if not torch.equal(x, y)]
                assert not different, (
                    f"{where}: {name} of {len(different)} of queries {a}:{b}, keys :{end}, at {different[:9]}"
                )
            start, compared = start + b - a, compared + len(rows)
        return compared

    def assert_equal_gradients(self, found: dict[str, torch.Tensor], where: str) -> int:
        """Compares the gradients of chunks of the document's last queries: dq, and dk and dv of the keys that no
        earlier query sees; how many rows those are.
        """
        row = key = compared = 0
        for a, b, end in self.spans:
            if b == end == self.length and a > 0:
                first = self.ends[a - 1]
                pairs = [(name, key + first, key + end, first) for name in ("dk", "dv")]
                for name, start, stop, here in [("dq", row, row + b - a, a), *pairs]:
                    same = (found[name][start:stop] == found[name][here : here + stop - start]).flatten(1).all(1)
                    different = (here + (~same).nonzero().flatten()).tolist()
                    assert not different, (
                        f"{where}: {name} of {len(different)} rows of queries {a}:{b}, at {different[:9]}"
                    )
                    compared += stop - start
            row, key = row + b - a, key + end
        return compared


def drawn_pieces(seed: int, device: str, dtypes, dims, *, last_queries: bool = False) -> Pieces:
    """last_queries: the pieces are chunks of the document's last queries."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    length, causal = draw.choice(LENGTHS), draw.random() < 0.8
    options = {"heads": draw.choice([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2), (8, 1), (5, 1)]), "causal": causal}
    dim = draw.choice(dims)
    options |= {"dim": dim, "dtype": draw.choice(dtypes), "sinks": draw.random() < 0.3}
    if draw.random() < 0.3:
        options["dim_v"] = draw.choice([d for d in dims if d <= 256 or dim > 256])
    options["window_size"] = draw.choice(WINDOWS if causal else [OPEN, (5, 20), (200, 3), (-1, 70)])
    options["softcap"] = draw.choice([0.0, 0.0, 4.0])
    if causal and draw.random() < 0.3:
        options["visible_end"] = blocks_ends(draw, length).to(device)
        options["window_size"] = (options["window_size"][0], -1)
    starts = [draw.randrange(length) for _ in range(4)] if last_queries else []
    spans = [(start, length, length) for start in starts if start > 0]
    return Pieces(draw, length, spans=spans, device=device, **options)


def blocks_ends(draw: random.Random, length: int) -> torch.Tensor:
    """visible_end of causal text with blocks, images for example, that see all of themselves."""
    ends, at = [], 0
    while at < length:
        size = min(draw.choice([1, 3, 20, 100, 200]), length - at)
        block = draw.random() < 0.5
        ends += [at + size] * size if block else range(at + 1, at + size + 1)
        at += size
    return torch.tensor(ends, dtype=torch.int32)
