"""Which rows go to which rank: as defined, and found with one wait for the GPU."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packing_ops.parallel.key_layout import RowSpans, key_layout

WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "equal", "is_nonzero", "masked_select"}


class Waits(TorchDispatchMode):
    """Ops whose result the host needs: those and tolist(), which is counted by itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        flags = name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in WAITS or flags or (name == "repeat_interleave" and "output_size" not in (kwargs or {})):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def spans_of(lengths, ranks, scheme):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = -(-sum(lengths) // ranks)
    return RowSpans.of(ends, ends, rows, ranks, scheme)


def lengths_of(seed):
    rng = random.Random(seed)
    return [rng.choice([0, 1, rng.randint(1, 12), rng.randint(1, 60)]) for _ in range(rng.randint(1, 7))] + [1]


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchange_is_what_is_needed(scheme, ranks):
    chosen, in_order = 0, 0
    for seed in range(40):
        spans = spans_of(lengths_of(seed), ranks, scheme)
        layouts = [key_layout(spans, rank, causal=True) for rank in range(ranks)]
        assert len({(layout.received, layout.exchange is None) for layout in layouts}) == 1
        if layouts[0].exchange is None:
            assert layouts[0].received == (ranks - 1) * spans.rows
            continue
        chosen += 1
        received = [sum(e for s, e in enumerate(l.exchange.receive) if s != r) for r, l in enumerate(layouts)]
        assert layouts[0].received == max(received)
        for rank, layout in enumerate(layouts):
            exchange = layout.exchange
            assert exchange.send == [other.exchange.receive[rank] for other in layouts]
            parts = list(exchange.index.split(exchange.send))
            own = parts.pop(rank)
            shared, index = torch.cat(parts).unique(return_inverse=True)
            assert torch.equal(exchange.shared, shared)
            assert torch.equal(exchange.shared_index, index)
            if exchange.to_others is not None:
                in_order += 1
                assert torch.equal(exchange.to_others, torch.cat(parts))
                assert torch.equal(own, torch.arange(len(own)))
                assert torch.equal(layout.key_index[: sum(exchange.receive)], torch.arange(sum(exchange.receive)))
    assert chosen >= 5
    assert (in_order > 0) == (scheme == "contiguous")


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
def test_one_wait(scheme, monkeypatch):
    spans, read, tolist = spans_of([8] * 8, 4, scheme), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(tensor.shape) or tolist(tensor))
    with Waits() as waits:
        layout = key_layout(spans, 1, causal=True)
    assert (layout.exchange is None) == (scheme == "zigzag")
    assert (waits.found, len(read)) == ([], 1)
    with Waits() as waits:
        key_layout(spans, 1, causal=True, exchange=False)
    assert (waits.found, len(read)) == ([], 1)


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_wait_there_is_room_for_every_key(scheme, causal):
    """As in a CUDA graph. Documents of an odd length have more of them in the first chunk."""
    for ranks in (2, 3, 4):
        for seed in range(8):
            spans = spans_of([*lengths_of(seed), 7, 7, 3], ranks, scheme)
            for rank in range(ranks):
                asked, given = (key_layout(spans, rank, causal=causal, exchange=each) for each in (True, False))
                keys = int(asked.cu_seqlens_k[-1])
                assert torch.equal(asked.cu_seqlens_k, given.cu_seqlens_k)
                assert len(given.key_index) > keys
                assert (given.key_positions.max(0).values <= len(given.key_index) - 1).all()


def test_documents_of_another_row():
    ends = torch.tensor([0, 9], dtype=torch.int32)
    for wrong in (ends, ends[[1, 0]], ends.clamp(min=1)):
        with pytest.raises(
            ValueError, match="cu_seqlens: expected numbers from 0 that never decrease, to at most the 8"
        ):
            key_layout(RowSpans.of(wrong, wrong, 4, 2, "contiguous"), 0, causal=True)
