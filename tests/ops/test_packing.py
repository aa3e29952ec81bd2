"""packing_ops.packing against packing_ops.reference.packing, and against what every packing must hold to."""

import itertools
import math
import random
import threading
import time
from array import array

import pytest
import torch
from helpers import assert_same, cpu_seconds, non_contiguous
from hypothesis import given, settings
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import packing as oracle

ops = torch.ops.packing_ops
STRATEGIES = ["ffd", "bfd", "next_fit", "first_fit", "balanced"]
WORKED = [820, 410, 520, 110, 250, 700, 50]


def pieces_of(packing):
    return [packing.pieces(bin) for bin in range(packing.num_bins)]


def aligned(length, alignment):
    return -(-length // alignment) * alignment


# --- worked values ---


def test_worked_values():
    packing = po.pack_sequences(WORKED, 1024, ties="last")
    assert packing.bins == [[0, 3, 6], [5, 4], [2, 1]]
    assert packing.bin_offsets.tolist() == [0, 3, 5, 7]
    assert packing.item_indices.tolist() == [0, 3, 6, 5, 4, 2, 1]
    assert packing.lengths.tolist() == [820, 110, 50, 700, 250, 520, 410]
    assert packing.starts.tolist() == [0] * 7
    assert packing.efficiency == sum(WORKED) / (3 * 1024)
    assert (packing.num_bins, packing.lower_bound, packing.num_tokens, packing.lost_tokens) == (3, 3, 2860, 0)
    assert repr(packing) == "Packing(num_bins=3, num_pieces=7, efficiency=0.9310, lower_bound=3)"


@pytest.mark.parametrize(
    ("strategy", "lengths", "bins"),
    [
        ("ffd", [12, 9, 9, 2], [[0, 3], [1, 2]]),  # 2 into the first bin with room
        ("bfd", [12, 9, 9, 2], [[0], [1, 2, 3]]),  # 2 into the fullest bin with room
        ("next_fit", [6, 8, 14, 10, 4], [[0, 1], [2], [3, 4]]),
        ("first_fit", [6, 8, 14, 10, 4], [[0, 1, 4], [2], [3]]),
    ],
)
def test_strategies_by_hand(strategy, lengths, bins):
    assert po.pack_sequences(lengths, 20, strategy=strategy).bins == bins


def test_balanced_by_hand():
    # 7 and 5; 4 joins 5, 3 joins 7, 2 joins the 9 and not the 10.
    assert po.pack_sequences([5, 7, 3, 4, 2], 12, strategy="balanced", min_bins=2).bins == [[0, 3, 4], [1, 2]]


@pytest.mark.parametrize(("ties", "bins"), [("first", [[0, 1], [2]]), ("last", [[2, 1], [0]])])
@pytest.mark.parametrize("strategy", ["ffd", "bfd"])
def test_ties(strategy, ties, bins):
    assert po.pack_sequences([5, 5, 5], 10, strategy=strategy, ties=ties).bins == bins


def test_ties_are_between_aligned_lengths():
    assert po.pack_sequences([5, 7, 6], 16, alignment=8).bins == [[0, 1], [2]]
    assert po.pack_sequences([5, 7, 6], 16, alignment=8, ties="last").bins == [[2, 1], [0]]


def test_alignment_counts_against_the_capacity():
    assert po.pack_sequences([5, 5], 10).num_bins == 1
    packing = po.pack_sequences([5, 5], 10, alignment=4)
    assert packing.num_bins == 2
    assert packing.efficiency == 0.5


def test_missing_bins_come_from_the_fullest():
    lengths = [4, 4, 2, 1, 1, 1, 1]
    assert po.pack_sequences(lengths, 8).bins == [[0, 1], [2, 3, 4, 5, 6]]
    assert po.pack_sequences(lengths, 8, bins_multiple_of=4).bins == [[0, 1], [2, 3, 4], [6], [5]]
    # The fullest gives all but one, then the next one gives.
    assert po.pack_sequences(lengths, 8, min_bins=7).bins == [[0], [2], [6], [5], [4], [3], [1]]
    # Two bins of two: the later one gives.
    assert po.pack_sequences([4, 4, 4, 4], 8, min_bins=3).bins == [[0, 1], [2], [3]]


# --- against the oracle ---


@st.composite
def problems(draw):
    capacity = draw(st.sampled_from([1, 2, 5, 16, 37, 100, 1000, 10**6, 2**33, 10**12]))
    alignment = draw(st.sampled_from([1, 1, 2, 3, 8, 64]))
    most = draw(st.sampled_from([1, capacity // 5 + 1, capacity // 2 + 1, capacity, 2 * capacity]))
    lengths = draw(st.lists(st.one_of(st.sampled_from([0, 1, most]), st.integers(0, most)), max_size=40))
    return lengths, capacity, {
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "alignment": alignment,
        "overlong": draw(st.sampled_from(["own", "drop"] if alignment > capacity else ["own", "split", "truncate", "drop"])),
        "max_sequences_per_bin": draw(st.sampled_from([None, None, 1, 2, 3])),
        "min_bins": draw(st.sampled_from([1, 1, 2, 4])),
        "bins_multiple_of": draw(st.sampled_from([1, 1, 2, 3])),
        "balance": draw(st.sampled_from([None, None, "tokens", "flops", ("flops", 1.0, 0.5), ("flops", 0, 1)])),
        "ties": draw(st.sampled_from(["first", "last"])),
        "seed": draw(st.sampled_from([None, None, 0, 2**40])),
    }  # fmt: skip


@settings(max_examples=600)
@given(problem=problems())
def test_equals_reference(problem):
    lengths, capacity, options = problem
    try:
        expected = oracle.pack_sequences(lengths, capacity, **options)
    except ValueError:
        with pytest.raises(ValueError, match="expected at most as many bins as sequences"):
            po.pack_sequences(lengths, capacity, **options)
        return
    packing = po.pack_sequences(lengths, capacity, **options)
    assert pieces_of(packing) == expected
    holds_to_the_contract(packing, lengths, capacity, options)


def holds_to_the_contract(packing, lengths, capacity, options):
    alignment, overlong = options["alignment"], options["overlong"]
    most_tokens = capacity // alignment * alignment
    bins = pieces_of(packing)
    assert packing.bins == [[item for item, _, _ in bin] for bin in bins]
    assert all(bins)
    assert packing.num_bins % options["bins_multiple_of"] == 0
    assert packing.num_bins >= min(options["min_bins"], len(lengths)) or not packing.num_bins
    assert packing.num_bins >= packing.lower_bound
    over = [i for i, length in enumerate(lengths) if length > most_tokens]
    for name, chosen in {"dropped": "drop", "split": "split", "truncated": "truncate", "own": "own"}.items():
        assert getattr(packing, name).tolist() == (over if overlong == chosen else [])
    slots = 0
    for bin in bins:
        used = sum(aligned(length, alignment) for _, _, length in bin)
        assert used <= capacity or (overlong == "own" and len(bin) == 1 and bin[0][0] in over)
        assert len(bin) <= (options["max_sequences_per_bin"] or len(bin))
        slots += max(used, capacity)
    assert packing.num_slots == slots
    kept = sorted(piece for bin in bins for piece in bin)
    for item, length in enumerate(lengths):
        mine = [(start, tokens) for i, start, tokens in kept if i == item]
        if item not in over or overlong == "own":
            assert mine == [(0, length)]
        elif overlong == "drop":
            assert mine == []
        elif overlong == "truncate":
            assert mine == [(0, most_tokens)]
        else:
            assert [start for start, _ in mine] == list(range(0, length, most_tokens))
            assert sum(tokens for _, tokens in mine) == length
    assert packing.num_tokens == sum(length for _, _, length in kept)
    assert packing.num_tokens + packing.lost_tokens == sum(lengths)


@pytest.mark.parametrize("strategy", ["ffd", "bfd", "first_fit"])
@pytest.mark.parametrize("longest", [30, 700])
def test_equals_reference_with_many_bins(strategy, longest):
    lengths = torch.randint(0, longest, (3000,)).tolist()
    options = {"strategy": strategy, "max_sequences_per_bin": 9 if longest == 30 else None}
    assert pieces_of(po.pack_sequences(lengths, 1000, **options)) == oracle.pack_sequences(lengths, 1000, **options)


def test_ffd_equals_naive_ffd_in_a_deep_tree():
    lengths = torch.randint(300, 701, (24_000,))
    packing = po.pack_sequences(lengths, 1000)
    assert packing.num_bins > 16**3
    room = torch.full((packing.num_bins + 1,), 1000)
    bin_of = torch.full((24_000,), -1)
    for i in torch.sort(lengths, descending=True, stable=True).indices.tolist():
        bin_of[i] = (room >= lengths[i]).int().argmax()
        room[bin_of[i]] -= lengths[i]
    sizes = packing.bin_offsets.diff()
    assert_same(bin_of[packing.item_indices], torch.arange(packing.num_bins).repeat_interleave(sizes))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_capacity_costs_no_memory_of_its_size(strategy):
    unit = 2**50
    packing = po.pack_sequences([length * unit for length in WORKED], 1024 * unit, strategy=strategy)
    small = po.pack_sequences(WORKED, 1024, strategy=strategy)
    assert packing.bins == small.bins
    assert po.pack_sequences([3, 4], 2**63 - 1, strategy=strategy).num_bins == 1


# --- overlong ---


@pytest.mark.parametrize(
    ("overlong", "bins", "lost"),
    [
        ("own", [[(1, 0, 25)], [(3, 0, 10)], [(0, 0, 4), (2, 0, 6)]], 0),
        ("split", [[(1, 0, 10)], [(1, 10, 10)], [(3, 0, 10)], [(2, 0, 6), (0, 0, 4)], [(1, 20, 5)]], 0),
        ("truncate", [[(1, 0, 10)], [(3, 0, 10)], [(2, 0, 6), (0, 0, 4)]], 15),
        ("drop", [[(3, 0, 10)], [(2, 0, 6), (0, 0, 4)]], 25),
    ],
)
def test_overlong(overlong, bins, lost):
    packing = po.pack_sequences([4, 25, 6, 10], 10, overlong=overlong)
    assert [sorted(bin) for bin in pieces_of(packing)] == [sorted(bin) for bin in bins]
    assert packing.lost_tokens == lost
    named = {"own": packing.own, "split": packing.split, "truncate": packing.truncated, "drop": packing.dropped}
    assert named.pop(overlong).tolist() == [1]
    assert all(other.numel() == 0 for other in named.values())


def test_own_bins_count_their_own_slots():
    packing = po.pack_sequences([25, 10], 10, overlong="own", alignment=2)
    assert packing.num_slots == 26 + 10
    assert packing.efficiency == 35 / 36


def test_next_fit_keeps_the_order_around_an_own_bin():
    assert po.pack_sequences([1, 25, 1, 1], 10, strategy="next_fit", overlong="own").bins == [[0], [1], [2, 3]]


def test_split_pieces_are_aligned():
    packing = po.pack_sequences([25], 10, overlong="split", alignment=4)
    assert [bin[0][1:] for bin in pieces_of(packing)] == [(0, 8), (8, 8), (16, 8), (24, 1)]


# --- ranks ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("balance", ["tokens", "flops", ("flops", 1.0, 0.01)])
def test_ranks_get_near_equal_cost(strategy, balance):
    a, b = {"tokens": (1, 0), "flops": (12 * 4096, 1)}.get(balance) or balance[1:]
    lengths = (torch.randn(3000) * 0.9).exp().mul(300).long().clamp(1, 4096)
    packing = po.pack_sequences(lengths, 4096, strategy=strategy, balance=balance, bins_multiple_of=8)
    cost = [sum(a * n + b * n * n for _, _, n in bin) for bin in pieces_of(packing)]
    ranks = [packing.rows_for_rank(rank, 8) for rank in range(8)]
    assert sorted(row for rows in ranks for row in rows) == list(range(packing.num_bins))
    totals = [sum(cost[row] for row in rows) for rows in ranks]
    assert max(totals) - min(totals) <= (max(cost) - min(cost)) * (1 + 1e-9)
    steps = zip(*([cost[row] for row in rows] for rows in ranks), strict=True)
    assert all(min(step) >= max(after) for step, after in itertools.pairwise(steps))


@pytest.mark.parametrize("balance", ["tokens", ("flops", 1.0, 0.001)])
def test_balanced_bins_differ_by_less_than_one_sequence(balance):
    a, b = (1, 0) if balance == "tokens" else balance[1:]
    lengths = (torch.randn(2000) * 0.9).exp().mul(300).long().clamp(1, 4096)
    packing = po.pack_sequences(lengths, 10**5, strategy="balanced", balance=balance, min_bins=16)
    assert packing.num_bins == 16
    cost = [sum(a * n + b * n * n for _, _, n in bin) for bin in pieces_of(packing)]
    most = max(a * n + b * n * n for n in lengths.tolist())
    assert max(cost) - min(cost) <= most + 1e5 * (a + b * 1e5) / oracle.STEPS
    tokens = po.pack_sequences(lengths, 10**5, strategy="balanced", min_bins=16)
    assert tokens.bins == po.pack_sequences(lengths, 10**5, strategy="balanced", min_bins=16, balance="tokens").bins


def test_balanced_needs_few_more_bins_than_the_bound():
    lengths = (torch.randn(20_000) * 0.9).exp().mul(300).long().clamp(1, 8192)
    packing = po.pack_sequences(lengths, 8192, strategy="balanced")
    assert packing.num_bins <= packing.lower_bound * 1.01
    tokens = torch.tensor([sum(n for _, _, n in bin) for bin in pieces_of(packing)])
    assert tokens.min() > 0.95 * tokens.max()


def test_rows_for_rank():
    packing = po.pack_sequences([5] * 6, 5)
    assert packing.rows_for_rank(1, 3) == [1, 4]
    for rank, world_size, message in [
        (0, 4, "world_size: expected a divisor of num_bins=6, got 4; pack with bins_multiple_of=4"),
        (3, 3, "rank: expected 0 to 2 for world_size=3, got 3"),
        (-1, 3, "rank: expected 0 to 2"),
        (0, 0, "world_size: expected at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            packing.rows_for_rank(rank, world_size)


# --- seed, forms of lengths ---


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seed(strategy):
    lengths = torch.randint(1, 40, (200,))
    packings = [po.pack_sequences(lengths, 100, strategy=strategy, seed=seed).bins for seed in (None, None, 7, 7, 8)]
    assert packings[0] == packings[1] != packings[2] == packings[3] != packings[4]


def test_seed_is_the_same_everywhere():
    assert po.pack_sequences([1] * 8, 1, strategy="next_fit", seed=1).bins == [[0], [3], [7], [1], [2], [6], [5], [4]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forms_of_lengths(strategy):
    bins = po.pack_sequences(WORKED, 1024, strategy=strategy, alignment=2).bins
    tensor = torch.tensor(WORKED)
    for form in (tensor, tensor.int(), non_contiguous(tensor), tuple(WORKED)):
        packing = po.pack_sequences(form, 1024, strategy=strategy, alignment=2)
        assert packing.bins == bins
        csr = (packing.bin_offsets, packing.item_indices, packing.starts, packing.lengths)
        assert all(t.dtype == torch.int64 for t in csr)
    tensor.zero_()
    assert packing.lengths.sum() == sum(WORKED)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overlong", ["error", "own", "split", "truncate", "drop"])
def test_nothing_to_pack(strategy, overlong):
    options = {"strategy": strategy, "overlong": overlong, "balance": "flops", "bins_multiple_of": 4, "seed": 0}
    packing = po.pack_sequences([], 8, **options)
    assert (packing.num_bins, packing.bins, packing.efficiency) == (0, [], 1.0)
    assert packing.bin_offsets.tolist() == [0]
    assert packing.rows_for_rank(3, 4) == []
    assert po.pack_sequences([9], 8, strategy=strategy, overlong="drop").lost_tokens == 9
    zeros = po.pack_sequences([0, 0], 8, strategy=strategy, alignment=16)
    assert (zeros.bins, zeros.efficiency) == ([[0, 1]], 0.0)
    with pytest.raises(ValueError, match="got 0 sequences for at least 2 bins"):
        po.pack_sequences([], 8, strategy=strategy, min_bins=2)


# --- time and threads ---


DISTRIBUTIONS = {
    "lognormal": lambda n: (torch.randn(n) * 0.9).exp().mul(300).long().clamp(1, 8192),
    "equal": lambda n: torch.full((n,), 100),
    "over half": lambda n: torch.randint(4097, 8193, (n,)),
    "third and a bit": lambda n: torch.randint(2700, 2800, (n,)),
    "small then large": lambda n: torch.cat([torch.ones(n // 2, dtype=torch.int64), torch.full((n - n // 2,), 5000)]),
    "distinct": lambda n: torch.randperm(n) * 8192 // n,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_time_grows_no_faster_than_n_log_n(strategy, distribution):
    counts = 20_000, 320_000
    small, large = (
        cpu_seconds(lambda: po.pack_sequences(lengths, 8192, strategy=strategy))  # noqa: B023
        for lengths in map(DISTRIBUTIONS[distribution], counts)
    )
    growth = counts[1] * math.log(counts[1]) / (counts[0] * math.log(counts[0]))
    assert large / small < 6 * growth  # caches end in between; quadratic would be 12 * growth


def test_other_threads_run_during_a_pack():
    lengths = torch.randint(1, 8193, (2_000_000,))
    span = []

    def pack():
        span.append(time.perf_counter())
        po.pack_sequences(lengths, 8192, strategy="balanced")
        span.append(time.perf_counter())

    worker = threading.Thread(target=pack)
    worker.start()
    ticks = []
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    start, end = span
    margin = (end - start) / 5
    assert any(start + margin < tick < end - margin for tick in ticks), "the interpreter stood still during the pack"


def test_two_threads_at_once():
    lengths = torch.randint(1, 1000, (50_000,))
    alone = po.pack_sequences(lengths, 4096).item_indices
    results = []

    def pack():
        results.append(po.pack_sequences(lengths, 4096).item_indices)

    threads = [threading.Thread(target=pack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        assert_same(result, alone)


# --- torch.library ---


def call_op(lengths, capacity=1024, strategy="ffd", overlong="error", seed=None):
    return ops.pack_sequences(lengths, capacity, strategy, 1, None, 1, 1, overlong, False, 1.0, 0.0, "first", seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overlong", ["error", "split"])
def test_opcheck(strategy, overlong):
    capacity = 1024 if overlong == "error" else 300
    for lengths in (torch.tensor(WORKED), non_contiguous(torch.tensor(WORKED, dtype=torch.int32))):
        arguments = (lengths, capacity, strategy, 8, 2, 2, 1, overlong, True, 1.0, 0.5, "last", 3)
        torch.library.opcheck(ops.pack_sequences, arguments)


def test_compiles_fullgraph_with_dynamic_sizes(fresh_compile):
    def step(lengths):
        bin_offsets, item_indices, _, _, _, _ = call_op(lengths)
        return lengths[item_indices], bin_offsets.diff()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (7, 3, 20):
        lengths = torch.tensor(random.Random(count).choices(range(1, 900), k=count))
        for actual, expected in zip(compiled(lengths), step(lengths), strict=True):
            assert_same(actual, expected)


# --- bad input ---

BAD_CALLS = {
    "negative": (([3, -2], 8), {}, "lengths: expected no negative length, got -2 at index 1"),
    "over capacity": (([3, 9], 8), {}, "capacity=8, got 9 at index 1, which exceeds bin capacity; overlong='own'"),
    "over capacity, shuffled": (([9, 10, 11], 8), {"seed": 0}, "got 9 at index 0"),
    "aligned over capacity": (
        ([3, 9], 10),
        {"alignment": 4},
        "capacity=10 after rounding up to a multiple of alignment=4, got 9 at index 1, which exceeds bin capacity",
    ),
    "alignment over capacity": (([1], 10), {"alignment": 16}, "after rounding up to a multiple of alignment=16, got 1"),
    "nothing to cut to": (
        ([1], 10),
        {"alignment": 16, "overlong": "split"},
        r"alignment: expected at most capacity=10 to cut lengths\[0\]=1, got 16",
    ),
    "sum": (([2**62, 2**62], 8), {"overlong": "drop"}, "lengths: expected a sum that fits int64, got more at index 1"),
    "pieces": (
        ([3, 2**40], 8),
        {"overlong": "split"},
        "at most 2147483646 pieces after splitting, got more at index 1",
    ),
    "fractional tensor": ((torch.ones(2), 8), {}, r"lengths: expected int32 or int64, got float32 \[2\]"),
    "rank": ((torch.tensor(1), 8), {}, r"lengths: expected \[num_sequences\] or .* got .*int64 \[\]"),
    "capacity": (([1], 0), {}, "capacity: expected at least 1, got 0"),
    "capacity past int64": (([1], 2**63), {}, "capacity: expected an integer that fits int64"),
    "alignment": (([1], 8), {"alignment": 0}, "alignment: expected at least 1, got 0"),
    "max_sequences_per_bin": (([1], 8), {"max_sequences_per_bin": 0}, "max_sequences_per_bin: expected at least 1"),
    "min_bins": (([1], 8), {"min_bins": 0}, "min_bins: expected at least 1, got 0"),
    "bins_multiple_of": (([1], 8), {"bins_multiple_of": -1}, "bins_multiple_of: expected at least 1, got -1"),
    "more bins than sequences": (
        ([1, 1, 1], 8),
        {"min_bins": 4},
        r"at most as many bins as sequences, got 3 .* for at least 4 bins in multiples of 1\. Cannot create bins",
    ),
    "multiple past the sequences": (([8, 8, 8], 8), {"bins_multiple_of": 2}, "got 3 .* 3 bins in multiples of 2"),
    "strategy": (([1], 8), {"strategy": "best"}, "strategy: expected 'ffd', 'bfd', .* or 'balanced', got 'best'"),
    "hyphens": (
        ([1], 8),
        {"strategy": "first-fit"},
        r"strategy: expected .*, got 'first-fit' \(names have underscores\)",
    ),
    "overlong": (([1], 8), {"overlong": "cut"}, "overlong: expected 'error', .* or 'drop', got 'cut'"),
    "ties": (([1], 8), {"ties": "none"}, "ties: expected 'first' or 'last', got 'none'"),
    "past int64": (([1, -(2**63) - 1], 8), {}, "lengths: expected integers that fit int64, got -9223372036854775809"),
    "balance": (([1], 8), {"balance": "time"}, "balance: expected None, 'tokens', .* got 'time'"),
    "balance coefficients": (([1], 8), {"balance": ("flops", -1, 1)}, "balance: expected .* finite a, b >= 0"),
    "balance of nothing": (([1], 8), {"balance": ("flops", 0, 0)}, "balance: expected .* not both 0"),
    "balance past a double": (([1], 8), {"balance": ("flops", 10**400, 1)}, "balance: expected .* finite a, b >= 0"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named(strategy, case):
    arguments, options, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=message):
        po.pack_sequences(*arguments, **{"strategy": strategy, **options})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 1.5], 8), {}, r"lengths: expected integers, got 1\.5"),
        (([1], 8.5), {}, r"capacity: expected an integer, got 8\.5"),
        (([1], 8), {"seed": "a"}, "seed: expected an integer, got 'a'"),
        (([1], 8), {"strategy": 3}, "strategy: expected a name, got 3"),
        (([1], 8), {"max_sequences_per_bin": 1.0}, "max_sequences_per_bin: expected an integer, got 1.0"),
    ],
)
def test_bad_type_is_named(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        po.pack_sequences(*arguments, **options)


def test_lengths_may_be_any_sequence_of_integers():
    for lengths in ((3, 5), range(3, 6, 2), b"\3\5", array("B", [3, 5]), [True + 2, 5]):
        assert po.pack_sequences(lengths, 8).bins == [[1, 0]]
    assert po.pack_sequences((n for n in (3, 5)), 8).bins == [[1, 0]], "looked at twice, an iterator would be empty"
    assert po.pack_sequences(bytes(8), 8).num_tokens == 0, "eight lengths, not one number of eight bytes"
    assert po.pack_sequences((), 8).num_bins == 0
