"""Heads in parts, keys kept for backward: the same bits, and what is sent is what the page says."""

import contextlib
import copy
import functools
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from helpers.processes import message_of, spawn
from test_parallel_attention import ATTENTION, OPTIONS, on_rank_1, results_of, whole_tensors
from torch.utils.checkpoint import checkpoint

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops.contrib.ring_flash_attn import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
)
from packing_ops.parallel import collectives, gathered_attention, overlap, shard_indices
from packing_ops.parallel.gathered import layout_of

WORLDS = (2, 4)
LENGTHS = [40, 8, 16]  # 64 slots
CASES = [
    (name, scheme, heads, options)
    for name in ATTENTION
    for scheme in ("contiguous", "zigzag")
    for heads, options in (((16, 8), "causal"), ((16, 8), "full"), ((24, 12), "window"), ((16, 8), "sinks"))
]


@contextlib.contextmanager
def in_parts():
    """As many parts of the heads as there may be, however few bytes they have."""
    numbers = overlap.LEAST_BYTES, overlap.LEAST_SHARE
    overlap.LEAST_BYTES, overlap.LEAST_SHARE = 1, 0.0
    try:
        yield
    finally:
        overlap.LEAST_BYTES, overlap.LEAST_SHARE = numbers


@contextlib.contextmanager
def counted():
    """[(collective, bytes that go to other ranks)]"""
    calls, ranks, rank = [], dist.get_world_size(), dist.get_rank()
    gather, exchange = collectives._all_gather, dist.all_to_all_single

    def counted_gather(gathered, own, **kwargs):
        # In place: what the rank has itself is where it should be, and no collective copies it.
        assert own.data_ptr() == gathered.data_ptr() + rank * own.numel() * own.element_size()
        if own.dim() == 3:  # else it is whether the ranks agree
            calls.append(("gather", own.numel() * own.element_size() * (ranks - 1)))
        return gather(gathered, own, **kwargs)

    def counted_exchange(received, rows, receive=None, send=None, **kwargs):
        others = len(rows) * (ranks - 1) // ranks if send is None else sum(send) - send[rank]
        calls.append(("exchange", others * math.prod(rows.shape[1:]) * rows.element_size()))
        return exchange(received, rows, receive, send, **kwargs)

    collectives._all_gather, dist.all_to_all_single = counted_gather, counted_exchange
    try:
        yield calls
    finally:
        collectives._all_gather, dist.all_to_all_single = gather, exchange


def call_of(name, scheme="contiguous", heads=(16, 8), *, lengths=LENGTHS, dtype=torch.float64, **options):
    """(attention, this rank's q, k, v, sinks and gradients)"""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    metadata = po.PackedMetadata.from_lengths(lengths, total=-(-sum(lengths) // ranks) * ranks)
    tensors = whole_tensors(metadata.total, heads, dtype)
    own = shard_indices(metadata, ranks, rank, scheme=scheme)
    mine = [*(t[own] for t in tensors[:3]), tensors[3], tensors[4][own], tensors[5][:, own]]
    return functools.partial(ATTENTION[name], documents=metadata, scheme=scheme, **options), mine


def same(found, wanted):
    return [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


def bits(name, scheme, heads, options):
    """{how: whether all bits are those of one part that is received again, number of collectives}"""
    found, given = {}, OPTIONS[options]
    once, mine = call_of(name, scheme, heads, **({"keep_keys": False} if name == "gathered" else {}))
    with counted() as calls:
        wanted = results_of(once, mine, given)
    found["once"] = True, len(calls)
    for keep_keys in (True, False) if name == "gathered" else (None,):
        call, _ = call_of(name, scheme, heads, **({} if keep_keys is None else {"keep_keys": keep_keys}))
        with in_parts(), counted() as calls:
            found[keep_keys] = same(results_of(call, mine, given), wanted), len(calls)
    low, mine = call_of(name, scheme, heads, dtype=torch.bfloat16)
    wanted = results_of(low, mine, given)
    with in_parts():
        found["bfloat16"] = same(results_of(low, mine, given), wanted), 0
    return found


def sent(scheme, lengths, keep_keys):
    """[(collective, bytes)] of gathered_attention, forward and backward."""
    call, mine = call_of("gathered", scheme, lengths=lengths, keep_keys=keep_keys)
    with counted() as calls:
        results_of(call, mine, {})
    return calls


def order_of_calls(name):
    """What is started when: "sent", "attention", "backward"."""
    call, mine = call_of(name, "zigzag", **({"keep_keys": True} if name == "gathered" else {}))
    forward, backward = gate.varlen_attention, gate.varlen_attention_backward
    with in_parts(), counted() as calls:
        gate.varlen_attention = lambda *args: calls.append(("attention", 0)) or forward(*args)
        gate.varlen_attention_backward = lambda *args: calls.append(("backward", 0)) or backward(*args)
        try:
            results_of(call, mine, {})
        finally:
            gate.varlen_attention, gate.varlen_attention_backward = forward, backward
    return ["sent" if kind in ("gather", "exchange") else kind for kind, _ in calls]


def wrapped():
    """Under what wraps a layer, in parts: the bits of the call by itself."""
    found = {}
    with in_parts():
        for name in ATTENTION:
            call, mine = call_of(name, "zigzag")
            wanted = results_of(call, mine, {})
            for reentrant in (False, True):
                found[name, "checkpoint", reentrant] = same(checkpointed(call, mine, reentrant), wanted)
            with torch.autograd.graph.save_on_cpu():
                found[name, "offloaded"] = same(results_of(call, mine, {}), wanted)
            found[name, "two branches"] = two_branches(call, mine)
            found[name, "lse alone"] = lse_alone(call, mine)
    return found


def checkpointed(call, mine, reentrant):
    leaves = [t.clone().requires_grad_() for t in mine[:3]]
    attention = functools.partial(call, return_lse=True)
    out, lse = checkpoint(attention, *leaves, use_reentrant=reentrant)
    ((out * mine[4]).sum() + (lse * mine[5]).sum()).backward()
    return [out.detach(), lse.detach(), *(t.grad for t in leaves)]


def two_branches(call, mine):
    """Two attentions of one graph: every rank's autograd must take their backwards in the same order."""
    leaves = [[t.clone().requires_grad_() for t in mine[:3]] for _ in range(2)]
    outs = [call(*each) for each in leaves]
    together = torch.autograd.grad((outs[0] * 2 + outs[1]).square().sum(), [t for each in leaves for t in each])
    apart = []
    for index in range(2):
        outs = [call(*each) for each in leaves]
        apart += torch.autograd.grad((outs[0] * 2 + outs[1]).square().sum(), leaves[index])
    return same(together, apart)


def lse_alone(call, mine):
    """On rank 1 the loss uses lse and no out, elsewhere both: the ranks' collectives still fit."""
    q, k, v = (t.clone().requires_grad_() for t in mine[:3])
    out, lse = call(q, k, v, return_lse=True)
    loss = lse.square().sum() + on_rank_1(0.0, (out * mine[4]).sum())
    found = torch.autograd.grad(loss, (q, k, v))
    other = (t.clone().requires_grad_() for t in mine[:3])
    out, lse = call(*(leaves := list(other)), return_lse=True)
    weight = float(on_rank_1(0.0, 1.0))
    return same(found, torch.autograd.grad(lse.square().sum() + weight * (out * mine[4]).sum(), leaves))


def layouts():
    """What is kept with documents does not follow them into a copy or a pickle."""
    ranks = dist.get_world_size()
    metadata = po.PackedMetadata.from_lengths([4 * ranks - 1, 1])
    q, k, v = (torch.randn(4, heads, 8) for heads in (8, 4, 4))
    wanted = gathered_attention(q, k, v, metadata)
    layout = layout_of(metadata, metadata.cu_seqlens, 4, dist.group.WORLD, "contiguous", True, -1)
    kept = layout_of(metadata, metadata.cu_seqlens, 4, dist.group.WORLD, "contiguous", True, -1)
    copies = [copy.deepcopy(metadata), pickle.loads(pickle.dumps(metadata))]
    restored = pickle.loads(pickle.dumps(layout))
    return {
        "kept": kept is layout,
        "copies": all(torch.equal(gathered_attention(q, k, v, each), wanted) for each in copies),
        "pickled": torch.equal(restored.key_index, layout.key_index) and restored.received == layout.received,
    }


def disagreements():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    metadata = po.PackedMetadata.from_lengths([4 * ranks])
    q, k, v = (torch.randn(4, heads, 8) for heads in (8, 4, 4))
    prepared = llama3_flash_attn_prepare_cu_seqlens(metadata.cu_seqlens, True, rank, ranks)

    def ring(k=k, v=v, **options):
        *documents, keys = prepared
        return llama3_flash_attn_varlen_func(q, k, v, *documents, 1, keys, **options)

    wide = torch.randn(4, 4, on_rank_1(16, 8))
    return {
        "keep_keys": message_of(lambda: gathered_attention(q, k, v, metadata, keep_keys=on_rank_1(False, None), softcap=1.5)),
        "ring, causal": message_of(lambda: ring(causal=bool(on_rank_1(False, True)))),
        "ring, window": message_of(lambda: ring(causal=True, window_size=(on_rank_1(2, 3), 0))),
        "ring, v": message_of(lambda: ring(v=wide, causal=True, softcap=2.0)),
        "ring, other": message_of(
            lambda: (on_rank_1(lambda: gathered_attention(q, k, v, metadata, softcap=4.0),
                               lambda: ring(causal=True, softcap=4.0)))()
        ),
    }  # fmt: skip


def every_case():
    found = {case: bits(*case) for case in CASES}
    for lengths in ([64], [16] * 4, [13, 20, 31]):
        for scheme in ("contiguous", "zigzag"):
            for keep_keys in (True, False, None):
                found["sent", scheme, str(lengths), keep_keys] = sent(scheme, lengths, keep_keys)
    found["order"] = {name: order_of_calls(name) for name in ATTENTION}
    found["wrapped"], found["layouts"] = wrapped(), layouts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKING_OPS_CHECK", "1")  # on all ranks
        found["disagreements"] = disagreements()
    return found


@pytest.fixture(scope="module", params=WORLDS)
def by_rank(request, tmp_path_factory):
    return spawn(every_case, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_have_the_bits_of_the_whole(case, by_rank):
    name, _, (_, num_kv_heads), _ = case
    heads = num_kv_heads // (len(by_rank) if name == "ulysses" else 1)
    parts = max(n for n in (1, 2, 3, 4) if heads % n == 0)
    assert parts > 1
    for found in by_rank:
        assert all(equal for equal, _ in found[case].values()), found[case]
        calls = {how: count for how, (_, count) in found[case].items()}
        if name == "ulysses":  # k, v, q, out, lse; dout, dlse, dk, dv, dq
            assert (calls["once"], calls[None]) == (10, parts * 10)
        else:  # k, v; both again; dk, dv
            assert (calls["once"], calls[False], calls[True]) == (6, parts * 6, parts * 4)


def test_parts_are_under_way_while_attention_runs(by_rank):
    """All parts are requested before the first is computed; each result is sent before the next is computed."""
    for found in by_rank:
        order = 8 * ["sent"] + 4 * ["attention"] + 4 * ["backward", "sent", "sent"]
        assert found["order"]["gathered"] == order
        parts = 8 // len(by_rank)
        order = 3 * parts * ["sent"] + parts * ["attention", "sent", "sent"]
        order += 2 * parts * ["sent"] + parts * ["backward", "sent", "sent", "sent"]
        assert found["order"]["ulysses"] == order


def needed_of_others(lengths, ranks, scheme):
    """Of each rank, the slots of others that its queries see; by the definition."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).tolist()
    metadata, found = po.PackedMetadata.from_lengths(lengths), []
    for rank in range(ranks):
        own = shard_indices(metadata, ranks, rank, scheme=scheme).tolist()
        seen = {key for query in own for key in range(query + 1) if document[key] == document[query]}
        found.append(len(seen - set(own)))
    return found


@pytest.mark.parametrize("lengths", [[64], [16] * 4, [13, 20, 31]], ids=str)
@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
def test_what_is_sent(scheme, lengths, by_rank):
    """Only needed keys, where that saves a quarter for the neediest rank, else all; twice where they are kept."""
    ranks, of_row = len(by_rank), 8 * 8 * 8  # float64, of k or v
    needed, rows = needed_of_others(lengths, ranks, scheme), 64 // ranks
    chosen = max(needed) <= 0.75 * (ranks - 1) * rows
    bytes_of_all = (sum(needed) if chosen else ranks * (ranks - 1) * rows) * of_row
    for keep_keys in (True, False, None):
        of_ranks = [found["sent", scheme, str(lengths), keep_keys] for found in by_rank]
        kinds = [kind for kind, _ in of_ranks[0]]
        assert all([kind for kind, _ in calls] == kinds for calls in of_ranks)
        if not max(needed) and scheme == "contiguous":
            assert kinds == []
            continue
        most = max(needed) if chosen else (ranks - 1) * rows
        kept = most * 8 <= rows * 16 if keep_keys is None else keep_keys
        passes = 2 if kept else 3
        assert kinds == [*(passes - 1) * 2 * ["exchange" if chosen else "gather"], "exchange", "exchange"]
        assert [sum(each) for each in zip(*([size for _, size in calls] for calls in of_ranks), strict=True)] == (
            passes * 2 * [bytes_of_all]
        )


def test_wrapped_calls(by_rank):
    """Checkpointing, offloaded tensors, two attentions in one graph, a rank whose loss has no out."""
    for found in by_rank:
        assert found["wrapped"] == dict.fromkeys(found["wrapped"], True)
        assert len(found["wrapped"]) == 10


def test_layouts_are_kept_here_alone(by_rank):
    for found in by_rank:
        assert found["layouts"] == dict.fromkeys(("kept", "copies", "pickled"), True)


WORDS = {
    "keep_keys": "keep_keys: expected None on all {ranks} ranks as on rank 0, got False on rank 1",
    "ring, causal": "causal: expected True on all {ranks} ranks as on rank 0, got False on rank 1",
    "ring, window": "window_size[0]: expected 3 on all {ranks} ranks as on rank 0, got 2 on rank 1",
    "ring, v": "v head_dim: expected 8 on all {ranks} ranks as on rank 0, got 16 on rank 1",
    "ring, other": "attention: expected llama3_flash_attn_varlen_func on all {ranks} ranks as on rank 0, got gathered_",
}


@pytest.mark.parametrize("case", WORDS)
def test_ranks_that_disagree_are_named(case, by_rank):
    for found in by_rank:
        assert WORDS[case].format(ranks=len(by_rank)) in found["disagreements"][case]


def test_number_of_parts():
    parts = overlap.head_parts
    mib = 1 << 20
    assert [parts(8, size * mib) for size in (0, 15, 16, 31, 32, 1000)] == [1, 1, 2, 2, 4, 4]
    assert [parts(heads, 1000 * mib) for heads in (1, 2, 3, 5, 6, 8)] == [1, 2, 3, 1, 3, 4]
    assert [parts(8, 100 * mib, merged=size * mib) for size in (499, 501)] == [4, 1]
