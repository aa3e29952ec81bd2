"""Packing at the edges of its numbers: an error that names its argument or a right answer, never a crash."""

import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops.data import token_budget_microbatches

STEPS = 65536
SIZES = [1, 2, 3, 100, 2**31 - 1, 2**31, 2**53 + 1, 10**18, 2**62, sys.maxsize]
COSTS = [0, 5e-324, 1e-310, 1e-3, 1, 49152.0, 1e150, 1e300, 1.7e308]
sizes = st.one_of(st.sampled_from(SIZES), st.integers(1, 5000), st.integers(1, sys.maxsize))
lengths_lists = st.one_of(
    st.lists(st.integers(0, 3000), max_size=60),
    st.lists(st.one_of(st.sampled_from([0, *SIZES]), st.integers(0, 3000)), max_size=20),
)
costs = st.one_of(
    st.sampled_from(["tokens", "flops"]),
    st.tuples(st.just("flops"), st.sampled_from(COSTS), st.sampled_from(COSTS)).filter(lambda cost: cost[1] + cost[2]),
)
NAMES = ("lengths: ", "alignment: ", "min_bins, bins_multiple_of: ", "balance: ", "cost: ")


def cost_function(cost):
    a, b = map(Fraction, {"tokens": (1, 0), "flops": (12 * 4096, 1)}.get(cost) or cost[1:])
    return lambda length: a * length + b * length**2


def assert_balanced(bins, cost):
    """No bin is over the mean by more than one piece: nothing but the costs decided where it went."""
    each = [sum(map(cost, bin)) for bin in bins]
    longest = max((cost(length) for bin in bins for length in bin), default=0)
    most = (Fraction(sum(each), len(each)) if each else 0) + longest
    assert max(each, default=0) <= most * (1 + Fraction(2, STEPS))


@settings(max_examples=600)
@given(
    lengths=lengths_lists,
    capacity=sizes,
    strategy=st.sampled_from(["balanced", "balanced", "ffd", "bfd", "first_fit", "next_fit"]),
    alignment=st.one_of(st.just(1), st.just(1), sizes),
    overlong=st.sampled_from(["error", "own", "split", "truncate", "drop"]),
    max_sequences_per_bin=st.one_of(st.none(), sizes),
    min_bins=st.one_of(st.just(1), sizes),
    bins_multiple_of=st.one_of(st.integers(1, 9), sizes),
    balance=st.one_of(st.none(), costs),
)
def test_pack_sequences(lengths, capacity, strategy, alignment, balance, overlong, **limits):
    assume(overlong != "split" or sum(lengths) // max(1, capacity // alignment * alignment) < 10_000)
    options = {"strategy": strategy, "alignment": alignment, "balance": balance, "overlong": overlong, **limits}
    try:
        packing = po.pack_sequences(lengths, capacity, **options)
    except ValueError as error:
        assert str(error).startswith(NAMES)  # noqa: PT017
        return
    bins = [packing.pieces(bin) for bin in range(packing.num_bins)]
    aligned = [[-(-length // alignment) * alignment for _, _, length in bin] for bin in bins]
    own = set(packing.own.tolist())
    assert all(sum(row) <= capacity or own >= {bin[0][0]} for row, bin in zip(aligned, bins, strict=True))
    assert packing.num_bins % limits["bins_multiple_of"] == 0
    kept = {(item, start + t) for bin in bins for item, start, length in bin for t in (0, length)}
    for item, length in enumerate(lengths):
        if item not in packing.dropped and item not in packing.truncated:
            assert {(item, 0), (item, length)} <= kept
    assert sum(length for bin in bins for _, _, length in bin) + packing.lost_tokens == sum(lengths)
    whole = sorted(item for bin in bins for item, start, _ in bin if start == 0)
    assert whole == [item for item in range(len(lengths)) if item not in packing.dropped]
    if strategy == "balanced" and sum(map(sum, aligned)) <= capacity and (limits["max_sequences_per_bin"] or 99) > 60:
        assert_balanced(aligned, cost_function(balance or "tokens"))


@settings(max_examples=300)
@given(lengths=lengths_lists, capacity=sizes, dp_size=st.integers(1, 20), cost=costs)
def test_token_budget_microbatches(lengths, capacity, dp_size, cost):
    try:
        ranks = token_budget_microbatches(lengths, capacity, dp_size=dp_size, cost=cost)
    except ValueError as error:
        assert str(error).startswith(("lengths: ", "cost: "))  # noqa: PT017
        return
    micro_batches = [micro_batch for steps in ranks for micro_batch in steps]
    assert len({len(steps) for steps in ranks}) == 1
    assert sorted(i for micro_batch in micro_batches for i in micro_batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro_batch) <= capacity for micro_batch in micro_batches)
    if sum(lengths) <= capacity:
        assert_balanced([[lengths[i] for i in micro_batch] for micro_batch in micro_batches], cost_function(cost))


@pytest.mark.parametrize("balance", ["tokens", "flops", ("flops", 0, 1e-310)])
@pytest.mark.parametrize("capacity", [10**6, 10**9, sys.maxsize])
def test_a_capacity_far_above_the_data_is_none(capacity, balance):
    lengths = torch.randint(100, 2000, (1000,))
    packing = po.pack_sequences(lengths, capacity, strategy="balanced", balance=balance, bins_multiple_of=8)
    assert packing.num_bins == 8
    cost = cost_function(balance)
    each = [sum(cost(length) for _, _, length in packing.pieces(bin)) for bin in range(8)]
    assert max(each) * 8 < Fraction(1001, 1000) * sum(each)


OVERFLOWS = {
    "one sequence": ([1000] * 10, 4096, 1e308, 1e308),
    "its square": ([100_000] * 10, 10**6, 1.0, 1e300),
    "the sum": ([2, 2], 4, 8e307, 0.0),
}


@pytest.mark.parametrize("case", OVERFLOWS)
@pytest.mark.parametrize("strategy", ["balanced", "ffd"])
def test_costs_past_a_double_are_named(case, strategy):
    lengths, capacity, a, b = OVERFLOWS[case]
    with pytest.raises(ValueError, match=r"balance: expected costs .* that fit a double in sum, got more with a="):
        po.pack_sequences(lengths, capacity, strategy=strategy, balance=("flops", a, b))
    with pytest.raises(ValueError, match=r"cost: expected costs .* that fit a double in sum, got more with a="):
        token_budget_microbatches(lengths, capacity, dp_size=2, cost=("flops", a, b))


@pytest.mark.parametrize("cost", [(-1.0, 0.0), (float("nan"), 0.0), (1.0, float("inf"))])
def test_costs_of_the_op_itself_are_checked(cost):
    with pytest.raises(ValueError, match="balance: expected finite costs of at least 0, got "):
        gate.pack_sequences(torch.tensor([3, 4]), 8, "balanced", 1, None, 1, 1, "error", False, *cost, "first", None)
