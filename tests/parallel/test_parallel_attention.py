"""Attention over a group: out and gradients of one process, to the bit where that is promised."""

import dataclasses
import datetime
import functools
import os
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from helpers import cu_seqlens_of
from helpers.processes import message_of, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import packing_ops as po
from packing_ops.parallel import (
    count_targets,
    gathered_attention,
    shard_indices,
    shard_packed,
    ulysses_attention,
    unshard,
    varlen_attention_over,
)
from packing_ops.parallel.collectives import process_group

WORLDS = (2, 4)
ATTENTION = {"ulysses": ulysses_attention, "gathered": gathered_attention}
LENGTHS = [7, 0, 25, 1, 3, 18]  # a row of 54 slots: padded for 4 ranks, not for 2
HEADS = {"grouped": (8, 4), "fewer key heads than ranks": (4, 1), "as many": (4, 4)}
OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (5, 0)},
    "window of both sides": {"causal": False, "window_size": (3, 2)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "sinks": {"sinks": True},
}
CASES = [
    (name, scheme, heads, options)
    for name in ATTENTION
    for scheme in ("contiguous", "zigzag")
    for heads in HEADS
    for options in OPTIONS
    if not (name == "gathered" and options == "window of both sides") and (heads == "grouped" or options == "sinks")
]


@functools.cache
def whole_tensors(total, heads, dtype, seed=0, head_dim=8):
    """q, k, v, sinks and the gradients of out and lse, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    of_q, of_k = ((total, each, head_dim) for each in heads)
    shapes = [of_q, of_k, of_k, (heads[0],), of_q, (heads[0], total)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results_of(attention, tensors, options, *, wrapped=lambda f, *a: f(*a)):
    """out, lse, dq, dk, dv, dsinks."""
    q, k, v, sinks, dout, dlse = tensors
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    given = {**options, "sinks": leaves[3]} if options.get("sinks") else options

    def call(q, k, v):
        return attention(q, k, v, return_lse=True, **given)

    out, lse = wrapped(call, *leaves[:3])
    lse = lse.masked_fill(lse.isinf(), 0)  # of padding
    loss = (out * dout).sum() + (lse * dlse.to(lse.dtype)).sum()
    gradients = torch.autograd.grad(loss, leaves if options.get("sinks") else leaves[:3])
    return [out.detach(), lse.detach(), *gradients]


def compared(
    name,
    scheme,
    heads,
    options,
    *,
    lengths=LENGTHS,
    dtype=torch.float64,
    seed=0,
    head_dim=8,
    wrapped=None,
    device="cpu",
    group=None,
    **only,
):
    """(largest difference, whether all bits are equal) of this rank's rows from those of one process. ``only``: options
    that only the attention over a group has.
    """
    group = group or dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    total = -(-sum(lengths) // ranks) * ranks
    metadata = po.PackedMetadata.from_lengths(lengths, total=total, device=device)
    tensors = [t.to(device) for t in whole_tensors(total, heads, dtype, seed, head_dim)]
    one = functools.partial(po.varlen_attention, cu_seqlens_q=metadata)
    expected = results_of(one, tensors, options)
    own = shard_indices(metadata, ranks, rank, scheme=scheme)
    mine = [*(t[own] for t in tensors[:3]), tensors[3], tensors[4][own], tensors[5][:, own]]
    over = functools.partial(ATTENTION[name], documents=metadata, group=group, scheme=scheme, **only)
    found = results_of(over, mine, options, **({} if wrapped is None else {"wrapped": wrapped}))
    if len(found) == 6:
        dist.all_reduce(found[5], group=group)
    wanted = [expected[0][own], expected[1][:, own], *(t[own] for t in expected[2:5]), *expected[5:]]
    pairs = list(zip(found, wanted, strict=True))
    assert expected[0].abs().max() > 0.1
    differences = torch.stack([(a - b).abs().max().double() for a, b in pairs if a.numel()])
    return differences.max().item(), all(torch.equal(a, b) for a, b in pairs)  # NaN where one is


def random_lengths(rng):
    return [rng.choice([0, 1, 2, rng.randint(1, 12), rng.randint(1, 60)]) for _ in range(rng.randint(1, 7))]


def on_rank_1(changed, otherwise):
    return changed if dist.get_rank() == 1 else otherwise


def disagreements():
    """{case: message}, the same on every rank."""
    ranks = dist.get_world_size()
    metadata = po.PackedMetadata.from_lengths([4 * ranks])
    q, k, v = (torch.randn(4, heads, 8) for heads in (8, 4, 4))
    found = {}
    for name, attention in ATTENTION.items():
        for case, options in {
            "window": {"window_size": on_rank_1((2, 0), (3, 0))},
            "scale": {"softmax_scale": on_rank_1(0.5, None)},
            "causal": {"causal": bool(on_rank_1(False, True)), "softcap": 3.0},
        }.items():
            found[name, case] = message_of(lambda a=attention, o=options: a(q, k, v, metadata, **o))
        rows = on_rank_1(3, 4)
        short = po.PackedMetadata.from_lengths([rows * ranks])
        tensors = [t[:rows] for t in (q, k, v)]
        found[name, "rows"] = message_of(lambda a=attention, t=tensors, s=short: a(*t, s, softcap=5.0))
        other = po.PackedMetadata.from_lengths(on_rank_1([3, 4 * ranks - 3], [4, 4 * ranks - 4]))
        found[name, "documents"] = message_of(lambda a=attention, o=other: a(q, k, v, o, softcap=6.0))
        dtype = on_rank_1(torch.bfloat16, torch.float32)
        mixed = [t.to(dtype) for t in (q, k, v)]
        found[name, "dtype"] = message_of(lambda a=attention, m=mixed: a(*m, metadata, softcap=7.0))
        found[name, "v.dtype"] = message_of(lambda a=attention, d=dtype: a(q, k, v.to(d), metadata, softcap=9.0))
        wide = torch.randn(4, 4, on_rank_1(16, 8))
        found[name, "v head_dim"] = message_of(lambda a=attention, w=wide: a(q, k, w, metadata, softcap=10.0))
        wanted = q.clone().requires_grad_(on_rank_1(False, True))
        found[name, "requires_grad"] = message_of(lambda a=attention, w=wanted: a(w, k, v, metadata, softcap=11.0))
        fewer = [t[: on_rank_1(3, 4)] for t in (q, k, v)]
        found[name, "rows of one row"] = message_of(lambda a=attention, t=fewer: a(*t, metadata, softcap=12.0))
        limits = {"causal": bool(on_rank_1(False, True)), "window_size": (2, 0), "softcap": 13.0}
        found[name, "causal, of a window"] = message_of(lambda a=attention, o=limits: a(q, k, v, metadata, **o))
        other = on_rank_1(*ATTENTION.values()) if name == "gathered" else on_rank_1(*[*ATTENTION.values()][::-1])
        found[name, "attention"] = message_of(lambda a=other: a(q, k, v, metadata, softcap=14.0))
        ends = torch.full((4 * ranks,), on_rank_1(2, 3), dtype=torch.int32)
        seen = dataclasses.replace(metadata, visible_end=ends)
        found[name, "visible_end"] = message_of(lambda a=attention, m=seen: a(q, k, v, m, softcap=15.0))
        over = functools.partial(varlen_attention_over, None, q, k, v, metadata)
        found[name, "over"] = message_of(lambda o=over: o(window_size=on_rank_1((2, 0), (3, 0)), softcap=16.0))
        half = q, k.bfloat16(), v
        found[name, "mixed dtypes"] = message_of(lambda a=attention, h=half: a(*h, metadata, softcap=8.0))
    uneven = torch.randn(4, 9, 8), torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    found["uneven heads"] = message_of(lambda: ulysses_attention(*uneven, metadata))
    keys = torch.randn(4, 24, 8), torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    found["uneven key heads"] = message_of(lambda: ulysses_attention(*keys, metadata))
    found["uneven heads, gathered"] = gathered_attention(*uneven, metadata).shape
    return found


def edge_cases():
    ranks, found = dist.get_world_size(), {}
    (alone,) = [g for r in range(ranks) if (g := dist.new_group([r])) and r == dist.get_rank()]
    q, k, v = (torch.randn(5, heads, 8) for heads in (8, 4, 4))
    metadata = po.PackedMetadata.from_lengths([2, 3])
    nothing = po.PackedMetadata.from_lengths([0, 0])
    for name, attention in ATTENTION.items():
        found[name, "alone"] = torch.equal(attention(q, k, v, metadata, alone), po.varlen_attention(q, k, v, metadata))
        empty = [t[:0].requires_grad_() for t in (q, k, v)]
        out = attention(*empty, nothing)
        out.sum().backward()
        found[name, "empty"] = out.shape == (0, 8, 8) and empty[1].grad.shape == (0, 4, 8)
        found[name, "one slot each"] = compared(name, "contiguous", (8, 4), {}, lengths=[ranks])
        found[name, "checkpoint"] = compared(
            name, "zigzag", (8, 4), {}, wrapped=lambda f, *a: checkpoint(f, *a, use_reentrant=False)
        )
    x = torch.randn(3, 2, dtype=torch.float64).requires_grad_()
    row = po.PackedMetadata.from_lengths([2, 3 * ranks - 2])
    weights = torch.arange(6.0 * ranks, dtype=torch.float64).view(-1, 2)
    (unshard(x, row, scheme="zigzag") * weights * (1 + dist.get_rank())).sum().backward()
    own = shard_indices(row, ranks, dist.get_rank(), scheme="zigzag")
    found["unshard"] = torch.equal(x.grad, weights[own] * sum(range(1, ranks + 1)))
    return found


def refused():
    """What would be wrong without a word, or is of no use."""
    ranks, found = dist.get_world_size(), {}
    metadata = po.PackedMetadata.from_lengths([4 * ranks])
    q, k, v = (torch.randn(4, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (8, 4, 4))
    for name, attention in ATTENTION.items():
        (dq,) = torch.autograd.grad(attention(q, k, v, metadata).square().sum(), q, create_graph=True)
        found[name, "second derivative"] = message_of(lambda d=dq: torch.autograd.grad(d.square().sum(), q))
        for window in (None, (1.5, 0), "ab"):
            found[name, window] = message_of(lambda a=attention, w=window: a(q, k, v, metadata, window_size=w))
            over = functools.partial(varlen_attention_over, None, q, k, v, metadata)
            found["over", window] = message_of(lambda o=over, w=window: o(window_size=w))
    x = torch.randn(3, 2, requires_grad=True)
    row = po.PackedMetadata.from_lengths([3 * ranks])
    (dx,) = torch.autograd.grad(unshard(x, row).pow(3).sum(), x, create_graph=True)
    found["second derivative of unshard"] = message_of(lambda: torch.autograd.grad(dx.square().sum(), x))
    found["unshard, total"] = message_of(lambda: unshard(x, row, total=3 * ranks + 1))
    found["unshard, rows"] = message_of(lambda: unshard(x[None], row))
    found["unshard, scalar"] = message_of(lambda: unshard(x.sum(), row))
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("rows", "sequence"))
    found["mesh"] = message_of(lambda: gathered_attention(q, k, v, metadata, mesh))
    found["mesh of one dimension"] = message_of(lambda: gathered_attention(q, k, v, metadata, mesh["sequence"]))
    of_rank_0 = dist.new_group([0])
    found["not in the group"] = message_of(lambda: on_rank_1(process_group, str)(of_rank_0))
    return found


def with_visible_end():
    """(difference of Ulysses from one process, what it is called for, the refusal of gathered keys)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q, k, v, *_ = whole_tensors(4 * ranks, (8, 4), torch.float64)
    metadata = po.PackedMetadata.from_lengths([3, 4 * ranks - 3])
    visible_end = po.visible_end_from_prefix_lengths(torch.tensor([2, 3]), metadata)
    metadata = dataclasses.replace(metadata, visible_end=visible_end)
    expected = po.varlen_attention(q, k, v, metadata)
    difference = expected - po.varlen_attention(q, k, v, metadata.cu_seqlens)
    own = shard_indices(metadata, ranks, rank, scheme="zigzag")
    mine = [t[own] for t in (q, k, v)]
    out, choice = varlen_attention_over(None, *mine, metadata, scheme="zigzag", explain=True)
    refusal = message_of(lambda: gathered_attention(*mine, metadata, scheme="zigzag"))
    return difference.abs().max().item(), torch.equal(out, expected[own]), choice.name, refusal


def compiled():
    if dist.get_world_size() > 2:  # tracing costs seconds
        return True
    torch._dynamo.reset()
    call = torch.compile(ulysses_attention, fullgraph=True, backend="aot_eager")
    ranks = dist.get_world_size()
    metadata = po.PackedMetadata.from_lengths([3, 4 * ranks - 3])
    q, k, v = (torch.randn(4, heads, 8, requires_grad=True) for heads in (8, 4, 4))
    outs = [f(q, k, v, metadata.cu_seqlens) for f in (ulysses_attention, call)]
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
    broken = torch.compile(gathered_attention, backend="aot_eager")(q, k, v, metadata)
    return (
        torch.equal(*outs)
        and all(map(torch.equal, *gradients))
        and torch.equal(broken, gathered_attention(q, k, v, metadata))
    )


def forked():
    """{call: message} of a fork, which has the groups and none of their threads: a collective would hang there."""
    ranks, unused = dist.get_world_size(), dist.new_group()
    metadata = po.PackedMetadata.from_lengths([4 * ranks])
    q, k, v = (torch.randn(4, heads, 8) for heads in (8, 4, 4))
    calls = {name: functools.partial(attention, q, k, v, metadata) for name, attention in ATTENTION.items()}
    for call in calls.values():
        call()
    calls["unused group"] = functools.partial(gathered_attention, q, k, v, metadata, unused)
    calls["unshard"] = functools.partial(unshard, q, metadata)
    calls["targets"] = functools.partial(count_targets, torch.ones(3, dtype=torch.int64))
    calls["shard"] = functools.partial(shard_packed, {"input_ids": torch.arange(4 * ranks), "metadata": metadata})
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, pickle.dumps({name: message_of(call) for name, call in calls.items()}))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        found = pickle.loads(told.read())
    os.waitpid(child, 0)
    found["here"] = [message_of(call) for call in calls.values()]
    return found


def left_alone():
    """One rank raises, the others call: an error within the group's timeout, and no hang."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    metadata = po.PackedMetadata.from_lengths([4 * dist.get_world_size()])
    q, k, v = (torch.randn(4, heads, 8) for heads in (8, 4, 4))
    gathered_attention(q, k, v, metadata, group)
    wrong = q[0] if dist.get_rank() == 0 else q
    message = message_of(lambda: gathered_attention(wrong, k, v, metadata, group, softcap=9.0))
    if dist.get_rank() == 0:
        return message
    return message_of(lambda: gathered_attention(q, k, v, metadata, group))


def every_case():
    found = {case: compared(*case[:2], HEADS[case[2]], OPTIONS[case[3]]) for case in CASES}
    rng = random.Random(0)
    for number in range(12):
        lengths, options = random_lengths(rng), rng.choice([{}, {"causal": False}, {"window_size": (4, 0)}])
        for name in ATTENTION:
            for scheme in ("contiguous", "zigzag"):
                if sum(lengths):
                    key = f"random {number}", name, scheme, str(lengths)
                    found[key] = compared(name, scheme, (8, 4), options, lengths=lengths, seed=number)
    for dtype in (torch.float32, torch.bfloat16):
        found["bits", str(dtype)] = compared("ulysses", "zigzag", (8, 4), {"sinks": True}, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKING_OPS_CHECK", "1")  # on all ranks
        found["disagreements"] = disagreements()
    found["edges"], found["compiled"] = edge_cases(), compiled()
    found["refused"], found["visible_end"] = refused(), with_visible_end()
    found["forked"], found["left alone"] = forked(), left_alone()
    return found


@pytest.fixture(scope="module", params=WORLDS)
def by_rank(request, tmp_path_factory):
    return spawn(every_case, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_attention_over_a_group(case, by_rank):
    """out, lse, the gradients of q, k, v and sinks; through out and lse."""
    for found in by_rank:
        difference, same_bits = found[case]
        assert difference <= 1e-12
        promised = case[0] == "ulysses" and HEADS[case[2]][1] >= len(by_rank)
        assert same_bits or not promised


def test_random_lengths(by_rank):
    for found in by_rank:
        differences = {key: value for key, value in found.items() if key[0].startswith("random ")}
        assert len(differences) > 30
        assert all(difference <= 1e-12 for difference, _ in differences.values())
        assert all(bits for (_, name, _, _), (_, bits) in differences.items() if name == "ulysses")


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_bits_in_other_dtypes(dtype, by_rank):
    assert [found["bits", dtype][1] for found in by_rank] == [True] * len(by_rank)


WORDS = {
    "window": "window_size[0]: expected 3 on all {ranks} ranks as on rank 0, got 2 on rank 1",
    "scale": "softmax_scale: expected None on all {ranks} ranks as on rank 0, got 0.5 on rank 1",
    "causal": "causal: expected True on all {ranks} ranks as on rank 0, got False on rank 1",
    "rows": "q rows: expected 4 on all {ranks} ranks as on rank 0, got 3 on rank 1",
    "documents": "cu_seqlens (checksum): expected ",
    "dtype": "q.dtype: expected float32 on all {ranks} ranks as on rank 0, got bfloat16 on rank 1",
    "mixed dtypes": "k: expected float32",
    "v.dtype": "v.dtype: expected float32 on all {ranks} ranks as on rank 0, got bfloat16 on rank 1",
    "v head_dim": "v head_dim: expected 8 on all {ranks} ranks as on rank 0, got 16 on rank 1",
    "requires_grad": "q, k or v requires_grad: expected True on all {ranks} ranks as on rank 0, got False on rank 1",
    "rows of one row": "q rows: expected 4 on all {ranks} ranks as on rank 0, got 3 on rank 1",
    "causal, of a window": "causal: expected True on all {ranks} ranks as on rank 0, got False on rank 1",
    "attention": "attention: expected {name}_attention on all {ranks} ranks as on rank 0, got ",
    "visible_end": "visible_end (checksum): expected ",
    "over": "window_size[0]: expected 3 on all {ranks} ranks as on rank 0, got 2 on rank 1",
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("case", WORDS)
def test_ranks_that_disagree_are_named(name, case, by_rank):
    for found in by_rank:
        message = found["disagreements"][name, case]
        assert WORDS[case].format(ranks=len(by_rank), name=name) in message
        assert message.startswith("ValueError: ")
        assert "rank 1" in message or case == "mixed dtypes"


def test_heads_that_the_ranks_do_not_divide(by_rank):
    ranks = len(by_rank)
    for found in by_rank:
        refused = found["disagreements"]
        assert f"num_q_heads: expected a multiple of the {ranks} ranks, got 9" in refused["uneven heads"]
        assert f"num_kv_heads: expected a multiple of the {ranks} ranks or a divisor" in refused["uneven key heads"]
        assert refused["uneven heads, gathered"] == (4, 9, 8)


def test_edges(by_rank):
    for found in by_rank:
        for case, result in found["edges"].items():
            assert result[0] <= 1e-12 if isinstance(result, tuple) else result is True, case


def test_refusals(by_rank):
    ranks = len(by_rank)
    named = "expected a DeviceMesh of one dimension, as mesh[name] gives it, got 2 dimensions ('rows', 'sequence')"
    for rank, found in enumerate(by_rank):
        refused = found["refused"]
        for name in ATTENTION:
            what = f"packing_ops.parallel.{name}_attention has no second derivative"
            assert refused[name, "second derivative"] == f"NotImplementedError: {what}"
        for name in (*ATTENTION, "over"):
            assert (
                refused[name, None]
                == "TypeError: window_size: expected (left, right) keys, -1 for all, got None (NoneType)"
            )
            assert refused[name, (1.5, 0)] == "TypeError: window_size[0]: expected an integer, got 1.5 (float)"
            assert refused[name, "ab"] == "TypeError: window_size[0]: expected an integer, got 'a' (str)"
        assert "packing_ops.parallel.unshard has no second derivative" in refused["second derivative of unshard"]
        assert refused["unshard, total"] == (
            f"ValueError: total: expected 0 to the {3 * ranks} rows of {ranks} ranks, got {3 * ranks + 1}"
        )
        assert f"cu_seqlens: expected total={ranks} like the rows of {ranks} ranks" in refused["unshard, rows"]
        assert refused["unshard, scalar"] == "ValueError: rows: expected [rows, ...], got float32 []"
        assert refused["mesh"] == f"ValueError: group: {named}"
        assert refused["mesh of one dimension"] == "no error"
        if rank == 1:
            assert "group: expected a group that this process is in" in refused["not in the group"]


def test_visible_end(by_rank):
    for found in by_rank:
        difference, same_bits, name, refusal = found["visible_end"]
        assert difference > 0.1
        assert (same_bits, name) == (True, "ulysses")
        assert refusal.startswith("NotImplementedError: cu_seqlens: expected no visible_end with gathered keys, got a")


def test_compiled(by_rank):
    """Ulysses in one graph; at gathered attention it breaks."""
    assert [found["compiled"] for found in by_rank] == [True] * len(by_rank)


def test_a_fork_has_no_collectives(by_rank):
    for found in by_rank:
        *here, shard = found["forked"].pop("here"), found["forked"].pop("shard")
        assert (here, shard) == ([["no error"] * 6], "no error")
        for message in found["forked"].values():
            assert message.startswith(
                "RuntimeError: group: expected a process group that this process has made, got one"
            )
        assert len(found["forked"]) == 5


def test_a_rank_that_raises_leaves_no_rank_waiting(by_rank):
    """Past the timeout of the group, which is 3 seconds here."""
    for found in by_rank:
        assert found["left alone"] != "no error"


def test_without_processes():
    q = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="group: expected a process group, got None before"):
        ulysses_attention(q, q, q, cu_seqlens_of([4]))
    with pytest.raises(TypeError, match=r"group: expected a torch\.distributed process group"):
        ulysses_attention(q, q, q, cu_seqlens_of([4]), 3)
