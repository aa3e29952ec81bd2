"""The counting of plans: nothing costs less than what is called the least, and a plan is between it and groups."""

import simulate_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_ops.parallel import plan_step

CAPACITY = 4096
lengths_of_documents = st.lists(st.integers(0, 8 * CAPACITY), min_size=1, max_size=30)


@settings(max_examples=50)
@given(lengths_of_documents, st.sampled_from([8, 16]))
def test_the_least_is_the_least(lengths, ranks):
    least, plan = simulate_plan.least(lengths, ranks, CAPACITY), plan_step(lengths, ranks, CAPACITY)
    assert plan.ideal <= least <= plan.cost * (1 + 1e-9)
    assert least <= simulate_plan.one_size(lengths, ranks, CAPACITY, 8) * (1 + 1e-9)
    assert least <= simulate_plan.two_sizes(lengths, ranks, CAPACITY, 8) * (1 + 1e-9)


def test_full_rows_of_one_rank_cost_the_least():
    lengths = [CAPACITY] * 8
    assert simulate_plan.least(lengths, 4, CAPACITY) == plan_step(lengths, 4, CAPACITY).cost


def test_a_row_counts_what_a_plan_can_reach():
    found = simulate_plan.simulated("long-tail 256k", 16, 32_768, steps=1, rows=1)
    assert found["static_size"] == 8
    assert float(found["of_ideal"]) < float(found["of_least"]) <= 1 <= float(found["one_size_times_plan"])
    assert found["best_size"] in (8, 16)
    assert float(found["best_size_times_plan"]) <= float(found["one_size_times_plan"])
