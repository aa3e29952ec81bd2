"""Prefix trees over a group: Ulysses gives the bits of one process, gathered keys refuse them by name."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from helpers.processes import message_of, spawn

import packing_ops as po
from packing_ops.parallel import (
    choose_attention,
    gathered_attention,
    shard_indices,
    shard_of,
    ulysses_attention,
    unshard,
    varlen_attention_over,
)

WORLDS = (2, 4)
OPTIONS = {
    "plain": {},
    "window": {"window_size": (100, 0), "softcap": 2.0},
    "sinks": {"sinks": True, "softmax_scale": 0.5},
}
CASES = [(scheme, heads, options) for scheme in ("contiguous", "zigzag") for heads in ((8, 4), (4, 1)) for options in OPTIONS]  # fmt: skip


def batch_of_tree():
    """Samples of one prompt and one of another: 128 + 7 + 0 + 30 + 9 = 174 and 11 rows, 185 in all."""
    tokens = torch.arange(1, 400)
    prompt = tokens[:128]
    samples = [torch.cat([prompt, tokens[a:b]]) for a, b in ((200, 207), (0, 0), (210, 240), (250, 259))]
    samples.append(tokens[300:311])
    ends = po.cu_seqlens_from_lengths([len(each) for each in samples])
    tree = po.pack_prefix_tree(torch.cat(samples), ends)
    batch = {
        "input_ids": torch.cat(samples)[tree.token_of_slot][None],
        "metadata": po.PackedMetadata.from_prefix_tree(tree),
    }
    return tree, batch


def batch_of_ids():
    """A row that another library has laid out: forks inside of a tile, an answer after that of another one."""
    groups = torch.tensor([0] * 100 + [1] * 7 + [2] * 30 + [3] * 9 + [4] * 39)
    parents = torch.tensor([0] * 107 + [1] * 30 + [0] * 9 + [4] * 39)
    return {"input_ids": torch.arange(185)[None], "metadata": po.prefix_tree_metadata(groups, parents)}


def shards_of(ranks, scheme="contiguous", batch=None):
    batch = batch or batch_of_tree()[1]
    return [shard_of(batch, ranks=ranks, rank=rank, scheme=scheme) for rank in range(ranks)]


def results_of(attention, q, k, v, sinks, dout, dlse, *, use_sinks):
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    out, lse = attention(*leaves[:3], sinks=leaves[3] if use_sinks else None)
    loss = (out * dout).sum() + (lse.masked_fill(lse.isinf(), 0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves[: 3 + use_sinks])]


def compared(scheme, heads, options, dtype=torch.float64, batch=None):
    """Largest difference of this rank's rows from those of one process, and whether all bits are equal."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    options = dict(options)
    use_sinks = options.pop("sinks", False)
    metadata = shards_of(ranks, scheme, batch)[rank]["metadata"]
    generator = torch.Generator().manual_seed(0)
    of_q, of_k = ((metadata.total, each, 8) for each in heads)
    shapes = of_q, of_k, of_k, (heads[0],), of_q, (heads[0], metadata.total)
    q, k, v, sinks, dout, dlse = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)

    def whole(q, k, v, sinks):
        return po.varlen_attention(q, k, v, metadata, sinks=sinks, return_lse=True, **options)

    def over(q, k, v, sinks):
        return ulysses_attention(q, k, v, metadata, scheme=scheme, sinks=sinks, return_lse=True, **options)

    expected = results_of(whole, q, k, v, sinks, dout, dlse, use_sinks=use_sinks)
    own = shard_indices(metadata, ranks, rank, scheme=scheme)
    found = results_of(over, q[own], k[own], v[own], sinks, dout[own], dlse[:, own], use_sinks=use_sinks)
    if use_sinks:
        dist.all_reduce(found[5])
    wanted = [expected[0][own], expected[1][:, own], *(t[own] for t in expected[2:5]), *expected[5:]]
    pairs = list(zip(found, wanted, strict=True))
    difference = max((a.masked_fill(a.isinf(), 0) - b.masked_fill(b.isinf(), 0)).abs().max().item() for a, b in pairs)
    return difference, all(torch.equal(a, b) for a, b in pairs)


def refusals():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    metadata = shards_of(ranks)[rank]["metadata"]
    rows = metadata.total // ranks
    q, k, v = (torch.randn(rows, heads, 8) for heads in (8, 4, 4))
    uneven = torch.randn(rows, 9, 8), torch.randn(rows, 3, 8), torch.randn(rows, 3, 8)
    ends = torch.full((metadata.total,), 3, dtype=torch.int32)
    found = {
        "gathered": message_of(lambda: gathered_attention(q, k, v, metadata)),
        "over": message_of(lambda: varlen_attention_over(None, *uneven, metadata)),
        "full": message_of(lambda: ulysses_attention(q, k, v, metadata, causal=False)),
        "visible_end": message_of(lambda: ulysses_attention(q, k, v, dataclasses.replace(metadata, visible_end=ends))),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKING_OPS_CHECK", "1")
        segments = dataclasses.replace(metadata, paths=None) if rank == 1 else metadata
        found["one rank"] = message_of(lambda: ulysses_attention(q, k, v, segments))
        rows = metadata.paths.slot_of_key.flip(0) if rank == 1 else metadata.paths.slot_of_key
        other = dataclasses.replace(metadata, paths=metadata.paths._replace(slot_of_key=rows))
        found["paths"] = message_of(lambda: ulysses_attention(q, k, v, other))
        out, choice = varlen_attention_over(None, q, k, v, metadata, explain=True)
    found["choice"] = choice.name, torch.equal(out, ulysses_attention(q, k, v, metadata))
    return found


def logps_through_unshard():
    """Whether log-probs of the samples, of hidden states that come together from the ranks, are those of one
    process.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tree, batch = batch_of_tree()
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tree.num_slots, 8, generator=generator), torch.randn(400, 8, generator=generator)
    shard = shards_of(ranks)[rank]
    own = shard_indices(shard["metadata"], ranks, rank)
    mine = torch.cat([hidden, torch.zeros(ranks, 8)])[own]
    whole = unshard(mine, shard["metadata"], total=tree.num_slots)
    logps = po.prefix_token_logps(whole, weight, batch["input_ids"], tree)
    return torch.equal(logps, po.prefix_token_logps(hidden, weight, batch["input_ids"], tree))


def nothing_shared():
    """Whether a tree of samples that share nothing gives the bits of these as documents."""
    ranks = dist.get_world_size()
    ends = torch.tensor([0, 3, 4 * ranks], dtype=torch.int32)
    tree = po.pack_prefix_tree(torch.arange(4 * ranks), ends)
    q, k, v = (torch.randn(4, heads, 8) for heads in (8, 4, 4))
    return torch.equal(
        ulysses_attention(q, k, v, po.PackedMetadata.from_prefix_tree(tree)), ulysses_attention(q, k, v, ends)
    )


def compiled():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    metadata = shards_of(ranks)[rank]["metadata"]
    q, k, v = (torch.randn(metadata.total // ranks, heads, 8, requires_grad=True) for heads in (8, 4, 4))
    outs = [
        f(q, k, v, metadata)
        for f in (ulysses_attention, torch.compile(ulysses_attention, fullgraph=True, backend="aot_eager"))
    ]
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
    return torch.equal(*outs) and all(map(torch.equal, *gradients))


def every_case():
    found = {case: compared(*case[:2], OPTIONS[case[2]]) for case in CASES}
    for dtype in (torch.float32, torch.bfloat16):
        found["bits", str(dtype)] = compared("contiguous", (8, 4), {"sinks": True}, dtype)
    for scheme in ("contiguous", "zigzag"):
        found["bits", scheme] = compared(scheme, (8, 4), {}, torch.float32, batch_of_ids())
    found["refusals"], found["logps"] = refusals(), logps_through_unshard()
    found["nothing shared"] = nothing_shared()
    found["compiled"] = dist.get_world_size() > 2 or compiled()
    return found


@pytest.fixture(scope="module", params=WORLDS)
def by_rank(request, tmp_path_factory):
    return spawn(every_case, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ulysses_over_a_tree(case, by_rank):
    """out, lse, the gradients of q, k, v and sinks. Gradients of repeated key heads are summed in another order."""
    for found in by_rank:
        difference, same_bits = found[case]
        assert difference <= 1e-12
        assert same_bits or case[1][1] < len(by_rank)


def test_bits_in_other_dtypes(by_rank):
    for found in by_rank:
        assert [found["bits", dtype][1] for dtype in ("torch.float32", "torch.bfloat16")] == [True, True]


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
def test_forks_inside_of_a_tile_have_the_same_bits(scheme, by_rank):
    assert all(found["bits", scheme][1] for found in by_rank)


@pytest.mark.parametrize("case", ["logps", "nothing shared", "compiled"])
def test_log_probs_documents_and_compile(case, by_rank):
    assert [found[case] for found in by_rank] == [True] * len(by_rank)


def test_refusals(by_rank):
    ranks = len(by_rank)
    for found in by_rank:
        refused = found["refusals"]
        assert refused["gathered"].startswith(
            "NotImplementedError: cu_seqlens: expected no prefix tree with gathered keys, got a PackedMetadata"
        )
        assert refused["over"] == (
            f"ValueError: num_q_heads: expected a multiple of the {ranks} ranks, got 9, and cu_seqlens: expected no "
            "prefix tree for gathered keys"
        )
        assert refused["full"].startswith("ValueError: causal, window_size: expected a causal call for a prefix tree")
        assert refused["visible_end"].startswith("ValueError: visible_end: expected None beside a prefix tree")
        assert refused["one rank"] == (
            f"ValueError: paths: expected True on all {ranks} ranks as on rank 0, got False on rank 1 of the group"
        )
        assert refused["paths"].startswith("ValueError: paths (checksum): expected ")
        assert refused["choice"] == ("ulysses", True)


def test_the_choice_for_a_tree():
    metadata = batch_of_tree()[1]["metadata"]
    name, why = choose_attention(metadata, ranks=2, num_heads=8, num_kv_heads=4)
    assert (name, why) == ("ulysses", "cu_seqlens: expected no prefix tree for gathered keys")


# --- a tree over ranks, without processes ---


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
def test_shards_of_a_tree(scheme):
    tree, batch = batch_of_tree()
    shards = shards_of(4, scheme)
    own = [shard_indices(shard["metadata"], 4, rank, scheme=scheme) for rank, shard in enumerate(shards)]
    order = torch.cat(own).argsort()[: tree.num_slots]
    for name, expected in (("input_ids", batch["input_ids"][0]), ("position_ids", tree.position_ids)):
        assert torch.equal(torch.cat([shard[name][0] for shard in shards])[order], expected)
    assert shards[0]["metadata"].total == 188


def test_shards_of_segment_parents():
    tree, batch = batch_of_tree()
    named = {"input_ids": batch["input_ids"], "cu_seq_lens_q": tree.cu_seqlens, "segment_parents": tree.parents}
    shard = shard_of(named, ranks=2, rank=1)
    assert torch.equal(shard["position_ids"][0, :-1], tree.position_ids[93:])
    assert shard["segment_parents"] is tree.parents
    assert shard["cu_seq_lens_q"] is tree.cu_seqlens


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("by_metadata", [True, False])
def test_labels_of_a_tree_are_refused(name, by_metadata):
    tree, batch = batch_of_tree()
    if not by_metadata:
        batch = {**batch, "metadata": None, "cu_seq_lens_q": tree.cu_seqlens, "segment_parents": tree.parents}
    with pytest.raises(ValueError, match=f"^{name}: expected none in the row of a prefix tree"):
        shard_of({**batch, name: batch["input_ids"]}, ranks=2, rank=0)
