"""What runs on GPUs over NCCL, on one GPU or on none: ranks are threads, their collectives are late
(ranks_as_threads.py).

On the CPU the code of GPUs is called; test_parallel_nccl.py has the same cases over NCCL.
"""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.processes import message_of, spawn_on_gpus
from helpers.ranks_as_threads import rank_of_identical_ranks, ranks_in_threads
from test_parallel_attention import ATTENTION, OPTIONS, compared
from test_parallel_nccl import CASES, within
from test_parallel_overlap import checkpointed, in_parts, same, two_branches

import packing_ops as po
from packing_ops.parallel import (
    agreement,
    choose,
    collectives,
    count_targets,
    gathered,
    key_layout,
    shard_indices,
    ulysses_attention,
    unshard,
    varlen_attention_over,
)

GPUS = [pytest.param(("cuda", ranks), marks=pytest.mark.gpu) for ranks in (2, 4)]
LENGTHS = {"cpu": [7, 0, 25, 1, 3, 18], "cuda": [250, 0, 900, 1, 30, 500]}
SHORT = {"few keys cross": [24] * 11, "none does": [33] * 8, "padded": [24] * 10 + [21]}
HEADS = [(8, 1), (8, 2), (24, 12)]
LATE = {
    (name, scheme, kind, keep_keys): {"lengths": lengths, **({} if keep_keys is None else {"keep_keys": keep_keys})}
    for name in ATTENTION
    for scheme in ("contiguous", "zigzag")
    for kind, lengths in {**SHORT, "long": [240]}.items()
    for keep_keys in ((None, True, False) if name == "gathered" else (None,))
}


@contextlib.contextmanager
def sent_as_on_gpus(device):
    """gloo has no exchange of lists, so that CPUs take another."""

    def exchange(received, rows, receive=None, send=None, group=None, async_op=True):
        return collectives._exchange_with_others(received, rows, group, receive, send)

    stock = dist.all_to_all_single
    if device == "cpu":
        dist.all_to_all_single = exchange
    try:
        yield
    finally:
        dist.all_to_all_single = stock


def nccl_cases(parts, device, group):
    found = {}
    for case in CASES:
        name, scheme, options, dtype, of_case = case
        if of_case == parts:
            # Of half types those that wgmma takes, else those of 12 bytes, which no copy by 16 bytes can take.
            head_dim = {torch.float32: 8, torch.bfloat16: 64}[dtype] if device == "cuda" else 8
            given = {"lengths": LENGTHS[device], "dtype": dtype, "head_dim": head_dim, "device": device}
            found[case] = compared(name, scheme, (16, 8), OPTIONS[options], **given, group=group)
    return found


def other_cases(device, group):
    given, found = {"dtype": torch.float32, "device": device, "group": group}, {}
    for case, options in LATE.items():
        found[case] = compared(*case[:2], (16, 8), {}, **given, **options)
    for name in ATTENTION:
        for heads in HEADS:
            found[name, heads] = compared(name, "zigzag", heads, {"sinks": True}, **given, lengths=LENGTHS[device])
        for options in ("softcap", "window of both sides"):
            if (name, options) != ("gathered", "window of both sides"):
                found[name, options] = compared(name, "zigzag", (8, 4), OPTIONS[options], **given)
        found[name, "wrapped"] = wrapped(name, device, group)
    found["seam"] = seam(device, group)
    return found


def call_of(name, device, group, total=240):
    """(attention over two documents, this rank's q, k, v, sinks and gradients, the whole ones)"""
    metadata = po.PackedMetadata.from_lengths([total - 90, 90], device=device)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(total, heads, 8, generator=generator).to(device) for heads in (8, 4, 4, 8))
    dlse = torch.randn(8, total, generator=generator).to(device)
    own = shard_indices(metadata, group.size(), group.rank(), scheme="zigzag")
    mine = [*(t[own] for t in (q, k, v)), None, dout[own], dlse[:, own]]
    return functools.partial(ATTENTION[name], documents=metadata, group=group, scheme="zigzag"), mine, (q, k, v)


def wrapped(name, device, group):
    call, mine, _ = call_of(name, device, group)
    leaves = [t.clone().requires_grad_() for t in mine[:3]]
    out, lse = call(*leaves, return_lse=True)
    wanted = [out, lse, *torch.autograd.grad((out * mine[4]).sum() + (lse * mine[5]).sum(), leaves)]
    found = {reentrant: same(checkpointed(call, mine, reentrant), wanted) for reentrant in (False, True)}
    with torch.autograd.graph.save_on_cpu():
        found["offloaded"] = same(checkpointed(call, mine, False), wanted)
    found["two branches"] = two_branches(call, mine)
    return found


def seam(device, group):
    """varlen_attention_over, unshard and the loss's targets."""
    ranks, rank = group.size(), group.rank()
    call, mine, whole = call_of("gathered", device, group)
    metadata = call.keywords["documents"]
    out, choice = varlen_attention_over(group, *mine[:3], metadata, scheme="zigzag", explain=True)
    x = torch.randn(240 // ranks, 3, device=device, requires_grad=True)
    weights = torch.arange(720.0, device=device).view(240, 3)
    row = unshard(x, metadata, group, scheme="zigzag")
    (row * weights * (1 + rank)).sum().backward()
    own = shard_indices(metadata, ranks, rank, scheme="zigzag")
    gathered = unshard(out, metadata, group, scheme="zigzag")
    labels = torch.tensor([-100, 1, 2] + rank * [3], device=device)
    return {
        "over": (gathered - po.varlen_attention(*whole, metadata)).abs().max().item() < 1e-5,
        "chosen": choice.name in ATTENTION,
        "unshard": torch.equal(x.grad, weights[own] * sum(range(1, ranks + 1))) and torch.equal(row[own], x),
        "targets": count_targets(labels, group).item() == sum(2 + each for each in range(ranks)),
    }


def disagreement(device, group):
    call, mine, _ = call_of("gathered", device, group)
    return message_of(lambda: call(*mine[:3], softmax_scale=0.5 if group.rank() == 1 else None))


def test_ranks_that_differ_are_named(device):
    """Under PACKING_OPS_CHECK, which conftest.py sets."""
    with sent_as_on_gpus(device):
        for message in ranks_in_threads(functools.partial(disagreement, device), 2, device=device):
            assert message.startswith("ValueError: softmax_scale: expected None on all 2 ranks")


@pytest.fixture(scope="module", params=[("cpu", 2), ("cpu", 4), *GPUS])
def by_rank(request):
    """{case: ..} of each rank; the CPU, whose tests have little time, has some of the cases with either number of
    ranks.
    """
    device, ranks = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run = functools.partial(ranks_in_threads, ranks=ranks, device=device)
    found = []
    # A module's fixture precedes what conftest.py sets for each test.
    with pytest.MonkeyPatch.context() as patch, sent_as_on_gpus(device):
        patch.setenv("PACKING_OPS_CHECK", "1" if device == "cpu" else "0")  # which waits for the GPU
        if request.param != ("cpu", 2):
            found.append(run(functools.partial(other_cases, device)))
        if device == "cuda":
            found.append(run(functools.partial(nccl_cases, 1, device)))
        if request.param != ("cpu", 4):
            with in_parts():
                found.append(run(functools.partial(nccl_cases, 4, device)))
    assert all(each for of_ranks in found for each in of_ranks)
    return [{case: result for each in of_rank for case, result in each.items()} for of_rank in zip(*found, strict=True)]


def test_what_the_cases_of_nccl_promise(by_rank):
    for found in by_rank:
        for case in (case for case in CASES if case in found):
            assert within(case, found[case]), (case, found[case])


def skip_without_other_cases(by_rank):
    if "seam" not in by_rank[0]:
        pytest.skip("the CPU has these with four ranks")


def test_what_is_late(by_rank):
    """Lengths of which all, few or no keys cross ranks, kept for backward or not; fewer key heads than ranks."""
    skip_without_other_cases(by_rank)
    heads = [(name, each) for name in ATTENTION for each in HEADS]
    options = [(name, each) for name in ATTENTION for each in ("softcap", "window of both sides")]
    for found in by_rank:
        for case in (case for case in [*LATE, *heads, *options] if case != ("gathered", "window of both sides")):
            difference, same_bits = found[case]
            assert difference <= 1e-4, case
            key_heads = case[1][1] if case in heads else len(by_rank)
            assert same_bits or case[0] == "gathered" or key_heads < len(by_rank), case


def test_wrapped_and_in_the_seam(by_rank):
    skip_without_other_cases(by_rank)
    for found in by_rank:
        for case in [("ulysses", "wrapped"), ("gathered", "wrapped"), "seam"]:
            assert found[case] == dict.fromkeys(found[case], True), case


def test_what_does_not_wait_is_found(monkeypatch):
    """On the CPU, where it does no harm."""
    stock = collectives._finish
    late = lambda work, received: stock(work, received) if received.dim() == 2 else lambda: received  # noqa: E731
    monkeypatch.setattr(collectives, "_finish", late)
    for name in ATTENTION:
        with sent_as_on_gpus("cpu"):
            found = ranks_in_threads(lambda group, name=name: compared(name, "zigzag", (8, 4), {}, group=group), 2)
        assert not any(difference < 1 for difference, _ in found)  # NaN


# --- CUDA graphs ---


def captured_as_on_gpus(patch):
    """On the CPU, what a call does while a CUDA graph is captured."""
    for module in (agreement, gathered):
        patch.setattr(module, "is_captured", lambda tensor: True)
    patch.setattr(choose, "is_real", lambda tensor: False)


def test_while_a_graph_is_captured(monkeypatch):
    """Nothing is read: gathered attention gets all keys, varlen_attention_over chooses by heads as before."""
    captured_as_on_gpus(monkeypatch)
    monkeypatch.setattr(key_layout, "_counts", None)

    def worker(group):
        q = torch.randn(4, 6, 8)
        chosen = [
            varlen_attention_over(group, q, k, k, po.PackedMetadata.from_lengths([3, 5]), explain=True)[1]
            for k in (q[:, :2], q[:, :1])
        ]
        uneven = torch.randn(4, 5, 8)
        chosen.append(varlen_attention_over(group, uneven, uneven, uneven, torch.tensor([0, 8]), explain=True)[1])
        found = [compared("gathered", "zigzag", (8, 4), OPTIONS[each], group=group) for each in ("causal", "window")]
        return [each.name for each in chosen], found

    with sent_as_on_gpus("cpu"):
        for names, found in ranks_in_threads(worker, 2):
            assert names == ["ulysses", "ulysses", "gathered"]
            assert all(difference <= 1e-12 for difference, _ in found)


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def graph_of(call, device):
    """(what it returns, what makes it anew in the same memory)"""
    graph = torch.cuda.CUDAGraph() if device == "cuda" else None
    with pytest.MonkeyPatch.context() as patch, torch.cuda.graph(graph) if graph else contextlib.nullcontext():
        patch.setenv("PACKING_OPS_CHECK", "0")
        if graph:
            return call(), graph.replay
        captured_as_on_gpus(patch)
        found = call()

    def replay():
        with pytest.MonkeyPatch.context() as patch:
            captured_as_on_gpus(patch)
            for to, value in zip(found, call(), strict=True):
                to.copy_(value)

    return found, replay


# Without a graph Ulysses does what it does in one: nothing to compare on the CPU.
CAPTURED = [("cpu", "gathered"), ("cpu", "over"), *(("cuda", name) for name in (*ATTENTION, "over"))]


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("device", "name"), [pytest.param(*each, marks=needs_gpu if each[0] == "cuda" else []) for each in CAPTURED]
)
def test_a_graph_replays_with_other_lengths(device, name, scheme, monkeypatch):
    """Forward and backward, with collectives on a separate stream; all ranks send what this one does."""
    monkeypatch.setattr(
        key_layout, "MIN_SKIPPED_FRACTION", 2.0
    )  # the others are like this one where all keys are gathered
    group, lengths = rank_of_identical_ranks(2), [170, 0, 5, 81]
    given = {"scheme": scheme, "group": group}
    q, k, v, dout = (torch.randn(128, h, 64, device=device, dtype=torch.bfloat16) for h in (8, 4, 4, 8))
    leaves = [each.requires_grad_() for each in (q, k, v)]

    def ends_of(lengths):
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    def call(ends, attention=varlen_attention_over if name == "over" else ATTENTION[name]):
        with sent_as_on_gpus(device):
            out = attention(documents=ends, q=q, k=k, v=v, **given)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    cu_seqlens = ends_of(lengths)
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
        call(cu_seqlens)
    if device == "cuda":
        torch.cuda.synchronize()
    captured, replay = graph_of(functools.partial(call, cu_seqlens), device)
    for other in (lengths, [1, 4, 251, 0], [64, 64, 64, 64]):
        cu_seqlens.copy_(ends_of(other))
        with torch.no_grad():
            for each in leaves:
                each.normal_()
        replay()
        wanted = call(ends_of(other), ulysses_attention if name == "over" else ATTENTION[name])
        tolerance = 0.02 if name == "gathered" else 0
        for found, expected in zip(captured, wanted, strict=True):
            assert expected.isfinite().all()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def alone_over_nccl():
    """The collectives of a group of one rank, where attention calls no collective: now, and in a CUDA graph."""
    group, rows = dist.group.WORLD, torch.randn(6, 4, 8, device="cuda", dtype=torch.bfloat16)

    def calls():
        every = [
            collectives.start_all_to_all(rows, group),
            collectives.start_all_to_all(rows.transpose(1, 2), group, [6], [6]),
            collectives.start_all_to_all(rows[:0], group),
            collectives.start_all_gather(rows[:, :3], group),
            collectives.start_sum_of_parts(rows, group),
        ]
        return [received() for received in every]

    def wanted():
        return [rows, rows.transpose(1, 2), rows[:0], rows[:, :3], rows]

    found = [same(calls(), wanted())]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = calls()
    rows.normal_()
    graph.replay()
    return [*found, same(captured, wanted())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_takes_what_is_sent(tmp_path):
    """Lists with tensors of no element, a gather in place, and all of it in a CUDA graph."""
    assert spawn_on_gpus(alone_over_nccl, 1, tmp_path) == [[True, True]]
