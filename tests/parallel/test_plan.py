"""plan_step: every document runs once, within the memory, for no more than groups of one size; and trains as one
process does.
"""

import math

import pytest
import torch
import torch.distributed as dist
from helpers.processes import message_of, spawn
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import token_budget_microbatches
from packing_ops.packing import cost_coefficients
from packing_ops.parallel import collectives, count_targets, plan, plan_step, shard_packed

MOST = 4096
steps_of_documents = st.lists(
    st.one_of(st.integers(0, MOST), st.integers(0, 8 * MOST), st.sampled_from([MOST, MOST + 1, 2 * MOST, 8 * MOST])),
    max_size=40,
)


@given(steps_of_documents, st.sampled_from([8, 16]), st.sampled_from(["tokens", "flops"]))
def test_every_document_runs_once_within_the_memory(lengths, ranks, cost):
    found = plan_step(lengths, ranks, MOST, cost=cost)
    seen = []
    for shares in found.steps:
        assert len(shares) == ranks
        for rank, share in enumerate(shares):
            assert share.size in (1, 2, 4, 8, 16)
            assert share.first % share.size == 0
            assert share.first <= rank < share.first + share.size
            assert share == shares[share.first], "all ranks of a group run the same"
            assert sum(lengths[i] for i in share.documents) <= share.size * MOST
            seen += share.documents if rank == share.first else ()
    assert sorted(seen) == list(range(len(lengths)))
    assert found.cost >= found.ideal
    assert [found.of_rank(rank) for rank in range(ranks)] == [
        list(each) for each in zip(*found.steps, strict=True)
    ] or not lengths


@given(steps_of_documents.filter(len), st.sampled_from([1, 2, 4, 8]))
def test_it_costs_no_more_than_groups_of_one_size(lengths, size):
    lengths = [min(length, size * MOST) for length in lengths]
    per_token, per_square = cost_coefficients("flops", "cost")
    groups = token_budget_microbatches(lengths, MOST * size, dp_size=8 // size, cost="flops")

    def cost_of(row):
        sent = 1 + plan.SENT * (size > 1)
        whole = sum(per_token * sent * lengths[i] + per_square * lengths[i] ** 2 for i in row)
        return whole / size + per_token * plan.ROW

    static = sum(max(cost_of(group[step]) for group in groups) for step in range(len(groups[0])))
    assert plan_step(lengths, 8, MOST).cost <= static * (1 + 1e-9)


def test_a_long_document_runs_beside_short_ones():
    """A long one over two ranks takes as long as two short ones next to it."""
    found = plan_step([7 * MOST, 4 * MOST, 4 * MOST - 100, 100], ranks=4, capacity=4 * MOST, cost="tokens")
    (shares,) = found.steps
    assert [share.size for share in shares] == [2, 2, 1, 1]
    assert {frozenset(share.documents) for share in shares} >= {frozenset([0])}


def test_nothing_to_run():
    assert plan_step([], 4, 10) == plan.StepPlan((), 0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([5], 6, 10), "ranks: expected a power of two, whose halves are groups, got 6"),
        (([5, 41], 4, 10), r"lengths: expected 0 to 4 ranks \* 10 tokens, got 41 at index 1"),
        (([-1], 4, 10), "lengths: expected 0 to 4 ranks .* got -1 at index 0"),
        (([5], 8, 10, 3), "max_size: expected a power of two, whose halves are groups, got 3"),
        (([5, 21], 8, 10, 2), r"lengths: expected 0 to 2 ranks \* 10 tokens, got 21 at index 1"),
        (([5], 0, 10), "ranks: expected"),
        (([5], 4, 0), "capacity: expected"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        plan_step(*arguments[:3], max_size=(*arguments, None)[3])


# --- four ranks ---

LENGTHS = [28, 16, 15, 1, 27, 16, 9, 3, 60]


def row_of(documents):
    """Of some documents; of none a row without targets."""
    texts = [torch.arange(LENGTHS[i]) * 7 % 50 + 3 + i for i in documents] or [torch.full((1,), 3)]
    metadata = po.PackedMetadata.from_lengths([len(text) for text in texts])
    ids = torch.cat(texts)[None]
    labels = po.mask_boundary_labels(ids[0], metadata.cu_seqlens)[None]
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": metadata.position_ids[None],
        **metadata.to_transformers(),
    }


def gradients_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def planned_training():
    """(gradients of a plan's step on this rank, summed; those of one process; sizes of groups that ran; refusals)"""
    from helpers.hf_models import tiny_model

    from packing_ops.integrations.transformers import apply_packing_ops

    plan.ROW = 0  # rows are short here
    targets = sum(length - 1 for length in LENGTHS)
    model = tiny_model("llama", dtype=torch.float32, num_key_value_heads=4)
    apply_packing_ops(model)
    model(**row_of(range(len(LENGTHS))), num_items_in_batch=targets).loss.backward()
    wanted = gradients_of(model)
    model.zero_grad()
    apply_packing_ops(model, sequence_group=dist.group.WORLD)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # attention runs again in the backward
    found, sizes = plan_step(LENGTHS, dist.get_world_size(), 16, cost="tokens"), set()
    for step, share in enumerate(found.of_rank()):
        with found.group_for(step) as group:
            sizes.add(group.size())
            shard = shard_packed(row_of(share.documents), None if step % 2 else group)
            assert int(count_targets(shard["shift_labels"], group)) == sum(LENGTHS[i] - 1 for i in share.documents)
            loss = model(**shard, num_items_in_batch=targets).loss
            (loss if share.documents else 0.0 * loss.nan_to_num()).backward()
    assert collectives.planned == []
    total = gradients_of(model)
    dist.all_reduce(total)
    sizes = [None] * dist.get_world_size(), sizes
    dist.all_gather_object(*sizes)
    again = found.group_for(0)
    with again as first, found.group_for(0) as second:
        assert first is second, "groups are made once"
    wrong = plan_step([3, 3], 2, 4)
    return total, wanted, set().union(*sizes[0]), message_of(lambda: wrong.group_for(0).__enter__())


def test_a_planned_step_trains_as_one_process(tmp_path):
    pytest.importorskip("transformers")
    for found, wanted, sizes, refused in spawn(planned_training, 4, tmp_path):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max() + 1e-7
        assert len(sizes) > 1
        assert math.isfinite(found.sum())
        assert refused == "ValueError: plan: expected one for 4 ranks, got one for 2"
