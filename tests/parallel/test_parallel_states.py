"""Hybrid models whose rows lie on several ranks: states travel, and loss and gradients are those of one process."""

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import message_of, nccl_ranks, spawn, spawn_on_gpus

import packing_ops as po
from packing_ops.parallel import shard_packed
from packing_ops.parallel.states import documents_on_rank

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).resolve().parents[1] / "integrations" / "transformers"))

from stateful_models import passes_keywords, stateful_model
from test_parallel_transformers import batch_of, from_one_process, loss_of
from torch.distributed.fsdp import fully_shard

from packing_ops.integrations.transformers import apply_packing_ops

FAMILIES = list(filter(passes_keywords, ["qwen3_5_text", "lfm2", "bamba", "nemotron_h", "kimi_linear"]))
LENGTHS = [[9, 1, 22, 6], [37], [1, 2, 3, 33], [5, 5, 5, 5, 5]]  # a document over all ranks; ends where a part ends


def over_nccl(test):
    return pytest.mark.gpu(pytest.mark.skipif(nccl_ranks() < 2, reason="needs two GPUs, or NCCL 2.30")(test))


def model_of(family, device="cpu", **options):
    model = stateful_model(family, attn_implementation="sdpa", num_key_value_heads=4).to(device)
    apply_packing_ops(model, **options)
    return model


def trained(family, lengths, *, around="nothing", checkpointing=None, device="cpu"):
    """(difference of the loss, of the gradients) from one process."""
    group = dist.group.WORLD
    batch = {
        name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch_of(lengths).items()
    }
    one = model_of(family, device)
    expected = loss_of(one, batch)
    expected.backward()
    model = model_of(family, device, sequence_group=group)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if around == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    loss = loss_of(model, shard_packed(batch, group), group)
    return from_one_process(model, loss, one, expected, group, averaged=around != "nothing")


def all_families(device="cpu"):
    """On two ranks everything; on more the first with every row, the others with a document over all ranks."""
    cases = [(family, lengths) for family in FAMILIES for lengths in LENGTHS]
    if dist.get_world_size() > 2:
        cases = [(family, lengths) for family, lengths in cases if family == FAMILIES[0] or len(lengths) == 1]
    return {(family, *lengths): trained(family, lengths, device=device) for family, lengths in cases}


def around_and_checkpointed(device="cpu"):
    return [
        trained("qwen3_5_text", LENGTHS[0], around="fsdp2", checkpointing=False, device=device),
        trained("bamba", LENGTHS[1], checkpointing=True, device=device),
        trained("bamba", LENGTHS[0], around="fsdp2", device=device),
    ]


def assert_as_in_one_process(by_rank):
    """Of {case: (difference of the loss, of the gradients)} on each rank."""
    for found in by_rank:
        assert {case: each for case, each in found.items() if each[0] > 1e-5 or each[1] > 1e-4} == {}


@pytest.mark.parametrize("world", [2, 4])
def test_models_as_in_one_process(world, tmp_path):
    assert_as_in_one_process(spawn(all_families, world, tmp_path))


def test_fsdp2_and_checkpointing(tmp_path):
    assert_as_in_one_process(dict(enumerate(each)) for each in spawn(around_and_checkpointed, 2, tmp_path))


@over_nccl
def test_models_on_gpus_as_on_one(tmp_path):
    assert_as_in_one_process(spawn_on_gpus(functools.partial(all_families, "cuda"), 2, tmp_path))


@over_nccl
def test_fsdp2_and_checkpointing_on_gpus(tmp_path):
    found = spawn_on_gpus(functools.partial(around_and_checkpointed, "cuda"), 2, tmp_path)
    assert_as_in_one_process(dict(enumerate(each)) for each in found)


def bits(device="cpu"):
    """Whether parts that begin at multiples of 64 have the bits of one process."""
    group, rows, total = dist.group.WORLD, 128, 128 * dist.get_world_size()
    torch.manual_seed(0)
    q, k, v = (torch.randn(total, 1, 16, device=device) for _ in range(3))
    g, beta = (torch.rand(total, 1, device=device) for _ in range(2))
    g, cu_seqlens = -g, torch.tensor([0, 64, total - 2, total], device=device)
    wanted, _ = po.gated_delta_rule(q, k, v, g, beta, cu_seqlens)
    own = slice(group.rank() * rows, (group.rank() + 1) * rows)
    documents, inputs = documents_on_rank(cu_seqlens, rows, group), [x[own] for x in (q, k, v, g, beta)]

    def scan(**states):
        return po.gated_delta_rule(*inputs, documents.cu_seqlens, **states)

    return torch.equal(documents.scanned(scan, inputs, (1, 16, 16), torch.float32), wanted[own])


def test_bits_of_parts_at_multiples_of_64(tmp_path):
    assert spawn(bits, 3, tmp_path) == [True] * 3


@over_nccl
def test_bits_of_parts_on_gpus(tmp_path):
    assert spawn_on_gpus(functools.partial(bits, "cuda"), 2, tmp_path) == [True] * 2


class Group:
    """What documents_on_rank asks of one."""

    def __init__(self, rank):
        self.rank = lambda: rank


@pytest.mark.parametrize(
    ("cu_seqlens", "rank", "wanted"),
    [
        ([0, 3, 9, 10], 0, ([0, 3, 4], False, True)),
        ([0, 3, 9, 10], 1, ([0, 4], True, True)),
        ([0, 3, 9, 10], 2, ([0, 1, 2], True, False)),  # two slots of padding
        ([0, 4, 4, 8], 1, ([0, 4], False, False)),
        ([0, 4, 4, 8], 2, ([0], False, False)),  # padding alone
    ],
)
def test_documents_on_a_rank(cu_seqlens, rank, wanted):
    found = documents_on_rank(torch.tensor(cu_seqlens, dtype=torch.int32), 4, Group(rank))
    assert (found.cu_seqlens.tolist(), found.from_previous, found.to_next) == wanted


def refusals():
    group, batch = dist.group.WORLD, batch_of()
    model = model_of("qwen3_5_text", sequence_group=group)
    conv = model_of("lfm2", sequence_group=group) if passes_keywords("lfm2") else model
    shard = shard_packed({name: value for name, value in batch.items() if name != "labels"}, group)
    return [
        message_of(lambda: model_of("qwen3_5_text", sequence_group=group, sequence_scheme="zigzag")),
        message_of(lambda: model_of("qwen3_5_text", sequence_group=group, linear_attention=False)),
        message_of(lambda: model_of("jamba", sequence_group=group)),
        *(message_of(lambda model=model: model(**shard, use_cache=True)) for model in (model, model.model, conv)),
    ]


def test_what_is_refused(tmp_path):
    for zigzag, stock, other, *cached in spawn(refusals, 2, tmp_path):
        assert 'which takes sequence_scheme="contiguous"' in zigzag
        assert "carries a state along the sequence" in stock
        assert "carries a state along the sequence" in other
        assert ["use_cache: expected False with a sequence_group" in each for each in cached] == [True] * 3


def caches():
    """What models and their decoders fill of a row on several ranks, if the call does not say."""
    group, batch = dist.group.WORLD, batch_of()
    shard = shard_packed({name: value for name, value in batch.items() if name != "labels"}, group)
    models = {family: model_of(family, sequence_group=group).eval() for family in FAMILIES}
    return {
        (family, called is model): called(**shard).get("past_key_values")
        for family, model in models.items()
        for called in (model, model.model)
    }


def test_no_cache_is_filled(tmp_path):
    for found in spawn(caches, 2, tmp_path):
        assert {case: each for case, each in found.items() if each is not None} == {}


def compiled():
    """Of a whole model, whose graph breaks where it looks for a row's documents."""
    group, batch = dist.group.WORLD, batch_of([7, 9])
    model = model_of("qwen3_5_text", sequence_group=group)
    losses = [loss_of(f, shard_packed(batch, group), group) for f in (model, torch.compile(model, backend="eager"))]
    return torch.equal(*losses)


def test_a_compiled_model_keeps_its_documents(tmp_path):
    assert spawn(compiled, 1, tmp_path) == [True]
