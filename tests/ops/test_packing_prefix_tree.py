"""packing_ops.prefix_tree against packing_ops.reference.prefix_tree, and against what every tree must hold to."""

import copy
import itertools
import math
import pickle
import random
import re

import pytest
import torch
from helpers import assert_same, cpu_seconds, cu_seqlens_of, non_contiguous
from hypothesis import given, settings
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import prefix_tree as oracle

ops = torch.ops.packing_ops
TENSORS = [
    "token_of_slot",
    "cu_seqlens",
    "parents",
    "position_ids",
    "slot_of_token",
    "copies",
    "bin_offsets",
    "sample_bins",
]


def joined(samples, dtype=torch.int64):
    """(tokens, cu_seqlens) of lists."""
    tokens = torch.tensor([token for sample in samples for token in sample], dtype=dtype)
    return tokens, cu_seqlens_of(map(len, samples))


def pack(samples, **options):
    return po.pack_prefix_tree(*joined(samples), **options)


def numbered(*runs):
    """Runs of (token, count), end to end."""
    return [token for token, count in runs for _ in range(count)]


# --- worked values ---


@pytest.mark.parametrize(
    ("shared", "lengths", "parents"),
    [
        (0, [200, 200], [-1, -1]),
        (1, [200, 200], [-1, -1]),
        (127, [200, 200], [-1, -1]),
        (128, [128, 72, 72], [-1, 0, 0]),
        (129, [128, 72, 72], [-1, 0, 0]),
    ],
)
def test_forks_are_at_multiples_of_128(shared, lengths, parents):
    tree = pack([numbered((1, 200)), numbered((1, shared), (2, 200 - shared))])
    assert (tree.lengths.tolist(), tree.parents.tolist()) == (lengths, parents)
    assert (tree.shared_tokens, tree.repeated_at_forks) == (shared, shared % 128)
    assert po.FORK_ALIGNMENT == oracle.FORK_ALIGNMENT == 128


def test_prompt_and_answers():
    prompt = list(range(256))
    tree = pack([[*prompt, 7, 8], [*prompt, 9], prompt])
    assert tree.lengths.tolist() == [256, 2, 1]
    assert tree.parents.tolist() == [-1, 0, 0]
    assert tree.position_ids.tolist() == [*range(256), 256, 257, 256]
    assert tree.token_of_slot.tolist() == [*range(258), 258 + 256]
    assert tree.slot_of_token.tolist() == [*range(258), *range(256), 258, *range(256)]
    assert tree.copies.tolist() == [3] * 256 + [1] * 3
    assert (tree.num_tokens, tree.num_slots, tree.shared_tokens) == (771, 259, 512)
    assert (tree.repeated_at_forks, tree.repeated_by_cuts, tree.num_bins) == (0, 0, 1)
    assert repr(tree) == "PrefixTree(num_samples=3, num_tokens=771, num_slots=259, num_segments=3, num_bins=1)"


def test_a_prefix_of_another_and_equal_samples_have_no_rows_of_their_own():
    long = list(range(300))
    for samples in ([long, long[:130], long[:128], long[:1], long], [long[:1], long, long[:129], long, long[:256]]):
        tree = pack(samples)
        assert (tree.lengths.tolist(), tree.parents.tolist()) == ([300], [-1])
        assert tree.slot_of_token.tolist() == [depth for sample in samples for depth in range(len(sample))]
        assert tree.repeated_at_forks == 0


def test_a_prefix_of_several_goes_with_the_lexicographically_first():
    tree = pack([[1, 5, 9], [1], [1, 3], [1, 5]])
    assert tree.lengths.tolist() == [3, 2]
    assert tree.slot_of_token.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert tree.sample_bins.tolist() == [0] * 4


def test_trees_and_children_are_in_the_order_of_their_first_sample():
    base = numbered((0, 128))
    tree = pack([[9], [*base, 5], [8], [*base, 4], [*base, 6], [*base, 5, 5]])
    assert tree.parents.tolist() == [-1, -1, 1, 1, 1, -1]
    assert joined([[9], [*base, 5], [8], [*base, 4], [*base, 6], [*base, 5, 5]])[0][tree.token_of_slot].tolist() == [
        9, *base, 5, 5, 4, 6, 8,
    ]  # fmt: skip


def test_min_shared_moves_the_first_fork_alone():
    base = numbered((0, 384))
    samples = [[*base, 1], [*base, 2], [*base[:256], 3], base[:5]]
    for min_shared, lengths in (
        (1, [256, 128, 1, 1, 1]),
        (256, [256, 128, 1, 1, 1]),
        (257, [384, 1, 1, 257]),
        (385, [385, 385, 257]),
    ):
        tree = pack(samples, min_shared=min_shared)
        assert tree.lengths.tolist() == lengths
        assert tree.repeated_at_forks == tree.num_slots - (384 + 3)
        assert tree.slot_of_token[-5:].tolist() == list(range(5)), "a prefix needs no fork"


def test_groups_may_interleave():
    base = numbered((0, 128))
    tree = pack([[*base, 1], [*base, 2], [*base, 3], base, [*base, 4]], groups=[7, -1, 7, -1, 2**40])
    assert tree.lengths.tolist() == [128, 1, 1, 129, 129]
    assert tree.parents.tolist() == [-1, 0, 0, -1, -1]
    assert (tree.slot_of_token[387:515] == torch.arange(130, 258)).all()


def test_cut_by_hand():
    """A root of 128 rows, a child of 128 with two leaves of 10, and a leaf of 50."""
    base = numbered((0, 128))
    turn = [*base, *numbered((1, 128))]
    samples = [[*turn, *numbered((2, 10))], [*base, *numbered((4, 50))], [*turn, *numbered((3, 10))], base]
    whole = pack(samples, capacity=326)
    assert (whole.num_bins, whole.num_slots, whole.repeated_by_cuts) == (1, 326, 0)
    cut = pack(samples, capacity=325)
    assert cut.lengths.tolist() == [256, 10, 10, 178], "a segment with one child is one with it"
    assert cut.parents.tolist() == [-1, 0, 0, -1]
    assert (cut.bin_offsets.tolist(), cut.sample_bins.tolist()) == ([0, 3, 4], [0, 1, 0, 0])
    assert cut.repeated_by_cuts == 128
    smallest = pack(samples, capacity=266)
    assert smallest.lengths.tolist() == [266, 266, 178]
    assert smallest.parents.tolist() == [-1] * 3
    assert smallest.repeated_by_cuts == 128 * 3
    assert [smallest.copies[row].item() for row in (0, 128, 266, 532)] == [2, 1, 1, 1]


# --- against the oracle, and by definition ---


def holds_to_the_contract(tree, samples, groups=None, capacity=math.inf):
    tokens, cu_seqlens = joined(samples)
    parents, lengths, segments = tree.parents.tolist(), tree.lengths.tolist(), tree.cu_seqlens.tolist()
    slot_of_token, position_ids = tree.slot_of_token.tolist(), tree.position_ids.tolist()
    assert_same(tokens[tree.token_of_slot][tree.slot_of_token], tokens)
    assert_same(tree.position_ids[tree.slot_of_token], torch.tensor([d for s in samples for d in range(len(s))]).long())
    assert_same(tree.copies, torch.bincount(tree.slot_of_token, minlength=tree.num_slots))
    assert int(tree.copies.sum()) == tree.num_tokens == len(tokens)
    assert tree.num_slots == tree.num_tokens - tree.shared_tokens + tree.repeated_at_forks + tree.repeated_by_cuts
    # The rows of a segment are in one sample; those that have children are of the right length.
    with_children = {parent for parent in parents if parent >= 0}
    assert all(lengths[segment] > 0 and lengths[segment] % 128 == 0 for segment in with_children)
    assert all(parents.count(segment) > 1 for segment in with_children), (
        "one child would be one segment with its parent"
    )
    # Depth-first: a segment's parent is the one before it, or above that one.
    path = []
    for segment, parent in enumerate(parents):
        assert parent < segment
        while path and path[-1] != parent:
            path.pop()
        assert parent == -1 or path
        path.append(segment)
        begin = 0 if parent < 0 else position_ids[segments[parent + 1] - 1] + 1
        assert position_ids[segments[segment] : segments[segment + 1]] == list(range(begin, begin + lengths[segment]))
    # Bins: whole trees, in their order, each within the capacity.
    bin_of = [bin for bin in range(tree.num_bins) for _ in range(*tree.bin_offsets[bin : bin + 2].tolist())]
    assert len(bin_of) == tree.num_segments
    assert all(bin_of[parent] == bin_of[segment] for segment, parent in enumerate(parents) if parent >= 0)
    for bin in range(tree.num_bins):
        first, last = tree.bin_offsets[bin : bin + 2].tolist()
        assert segments[last] - segments[first] <= capacity
    # Along its path each sample reads off its tokens, in the bin that is named.
    segment_of = torch.arange(tree.num_segments).repeat_interleave(tree.lengths).tolist()
    first_group = {}
    for i, sample in enumerate(samples):
        rows = slot_of_token[cu_seqlens[i] : cu_seqlens[i + 1]]
        for before, row in itertools.pairwise(rows):
            if segment_of[row] != segment_of[before]:
                assert parents[segment_of[row]] == segment_of[before]
                assert (before, row) == (segments[segment_of[before] + 1] - 1, segments[segment_of[row]])
            else:
                assert row == before + 1
        assert len(rows) == len(sample)
        assert 0 <= tree.sample_bins[i] < tree.num_bins
        if rows:
            assert parents[segment_of[rows[0]]] == -1
            assert bin_of[segment_of[rows[0]]] == tree.sample_bins[i]
            group = groups[i] if groups else 0
            assert first_group.setdefault(segment_of[rows[0]], group) == group


def equals_reference(tree, samples, groups=None, capacity=math.inf, min_shared=128):
    expected = oracle.pack_prefix_tree(samples, groups, capacity, min_shared)
    starts = joined(samples)[1].tolist()
    expected["token_of_slot"] = [starts[sample] + depth for sample, depth in expected["token_of_slot"]]
    assert {name: getattr(tree, name).tolist() for name in TENSORS} == {name: expected[name] for name in TENSORS}
    assert tree.repeated_at_forks == expected["repeated_at_forks"]
    assert tree.repeated_by_cuts == expected["repeated_by_cuts"]


@st.composite
def grown(draw):
    """Samples that each begin as an earlier one does, some of them entirely."""
    samples = []
    for _ in range(draw(st.integers(0, 12))):
        start = list(draw(st.sampled_from(samples))) if samples and draw(st.booleans()) else []
        cut = draw(st.sampled_from([1, 127, 128, 129, 255, 256, 300, 384, 1000]))
        tail = draw(st.sampled_from([0, 0, 1, 2, 127, 128, 129, 256, 300]))
        samples.append(start[:cut] + [draw(st.integers(0, 2))] * tail)
    return samples


@settings(max_examples=400, deadline=None)
@given(samples=grown(), data=st.data())
def test_equals_reference(samples, data):
    groups = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=len(samples), max_size=len(samples)))
    longest = max([1, *map(len, samples)])
    capacity = data.draw(st.none() | st.sampled_from([longest, longest + 1, longest + 130, 2 * longest, 10**6]))
    min_shared = data.draw(st.sampled_from([1, 128, 129, 256, 10**9, 2**62]))
    tree = pack(samples, groups=groups, capacity=capacity, min_shared=min_shared)
    holds_to_the_contract(tree, samples, groups, capacity or math.inf)
    equals_reference(tree, samples, groups, capacity or math.inf, min_shared)
    assert tree.num_bins == (0 if not samples else tree.num_bins if capacity else 1)


def random_tree(seed, leaves, depth):
    """Samples of a random tree: each goes on from one of the last paths, and ends in a separate token."""
    rng = random.Random(seed)
    paths, samples = [[]], []
    while len(samples) < leaves:
        path = rng.choice(paths[-8:]) + [rng.randrange(3)] * rng.choice([1, 127, 128, 129])
        samples.append([*path, 3 + len(samples)])
        paths.append(path if len(path) < depth * 128 else [])
    rng.shuffle(samples)
    return samples


@pytest.mark.parametrize("capacity", [None, 50 * 128 + 129, 20_000])
def test_fifty_levels(capacity):
    trunk, samples = [], []
    for level in range(50):
        trunk = [*trunk, *numbered((level % 3, 128))]
        samples += [[*trunk, 7, level], trunk[: 64 * level + 1]]
    tree = pack(samples, capacity=capacity)
    holds_to_the_contract(tree, samples, None, capacity or math.inf)
    equals_reference(tree, samples, None, capacity or math.inf)
    assert capacity or tree.num_slots == 50 * 128 + 2 * 50


@pytest.mark.parametrize("capacity", [None, 3000])
def test_a_thousand_leaves(capacity):
    samples = random_tree(0, 1000, depth=12)
    tree = pack(samples, capacity=capacity)
    holds_to_the_contract(tree, samples, None, capacity or math.inf)
    equals_reference(tree, samples, None, capacity or math.inf)
    assert tree.num_segments >= 1000


@pytest.mark.parametrize("capacity", [None, 300 * 128 + 1, 100_000])
def test_three_hundred_levels(capacity):
    trunk, one = torch.zeros(300 * 128, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    tokens = torch.cat([part for level in range(1, 301) for part in (trunk[: level * 128], one)])
    lengths = [level * 128 + 1 for level in range(1, 301)]
    tree = po.pack_prefix_tree(tokens, cu_seqlens_of(lengths), capacity=capacity)
    assert_same(tokens[tree.token_of_slot][tree.slot_of_token], tokens)
    assert tree.num_slots - tree.repeated_by_cuts == 300 * 128 + 300
    assert tree.num_bins == (3 if capacity == 300 * 128 + 1 else 1)


def test_the_order_of_samples_does_not_change_what_is_shared():
    samples = random_tree(1, 60, depth=6)
    trees = []
    for seed in range(3):
        random.Random(seed).shuffle(samples)
        trees.append(pack(samples))
    assert len({(tree.num_slots, tree.num_segments, tree.repeated_at_forks) for tree in trees}) == 1


def test_one_prompt_of_many_samples_is_linear():
    def batch(count):
        prompt = torch.randint(0, 1000, (512,))
        tokens = torch.cat([part for _ in range(count) for part in (prompt, torch.randint(0, 1000, (128,)))])
        return tokens, torch.arange(count + 1) * 640

    small, large = (cpu_seconds(lambda: po.pack_prefix_tree(*batch)) for batch in (batch(500), batch(8000)))  # noqa: B023
    assert large / small < 6 * 16


# --- forms of arguments ---


def assert_same_tree(actual, expected):
    for name in [*TENSORS, "samples", "sample_cu_seqlens"]:
        assert_same(getattr(actual, name), getattr(expected, name))
    assert actual.repeated_at_forks == expected.repeated_at_forks
    assert actual.repeated_by_cuts == expected.repeated_by_cuts


def test_forms_of_tokens():
    samples = [[token - 5 for token in sample] for sample in random_tree(2, 20, depth=3)]
    tokens, cu_seqlens = joined(samples)
    expected = pack(samples, groups=[0] * 20)
    for form in (tokens.int(), tokens[None], non_contiguous(tokens), non_contiguous(tokens.int())):
        assert_same_tree(po.pack_prefix_tree(form, cu_seqlens), expected)
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens)
    for form in (cu_seqlens.long(), cu_seqlens.tolist(), non_contiguous(cu_seqlens), metadata):
        assert_same_tree(po.pack_prefix_tree(tokens, form), expected)
    for groups in (torch.zeros(20, dtype=torch.int32), non_contiguous(torch.full((20,), 2**40))):
        assert_same_tree(po.pack_prefix_tree(tokens, cu_seqlens, groups=groups), expected)
    kept = expected.sample_cu_seqlens.clone()
    cu_seqlens.zero_()
    assert_same(expected.sample_cu_seqlens, kept)


def test_large_tokens_are_compared_whole():
    tree = po.pack_prefix_tree(torch.tensor([1, 2**32 + 1, -1]), [0, 1, 2, 3])
    assert tree.num_slots == 3


def test_few_tokens():
    for samples, bins in (([], 0), ([[]], 1), ([[], []], 1)):
        for capacity in (None, 1):
            tree = pack(samples, capacity=capacity)
            assert (tree.num_slots, tree.num_segments, tree.num_bins, tree.shared_tokens) == (0, 0, bins, 0)
            assert tree.cu_seqlens.tolist() == [0]
            assert tree.bin_offsets.tolist() == [0] * (bins + 1)
            assert tree.sample_bins.tolist() == [0] * len(samples)
    tree = pack([[4]], capacity=1)
    assert (tree.token_of_slot.tolist(), tree.cu_seqlens.tolist(), tree.parents.tolist()) == ([0], [0, 1], [-1])
    tree = pack([[], [4], [], [4], []])
    assert (tree.token_of_slot.tolist(), tree.slot_of_token.tolist(), tree.copies.tolist()) == ([0], [0, 0], [2])


def test_tokens_of_a_device_are_copied(device):
    tokens, cu_seqlens = joined(random_tree(2, 20, depth=3))
    groups = torch.arange(20) % 3
    tree = po.pack_prefix_tree(tokens.to(device), cu_seqlens.to(device), groups=groups.to(device))
    assert_same_tree(tree, po.pack_prefix_tree(tokens, cu_seqlens, groups=groups))


# --- PrefixTree ---


@pytest.mark.parametrize("capacity", [500, 700])
def test_row_is_the_tree_of_one_bin(capacity):
    samples = [*random_tree(3, 30, depth=2), []]
    tokens, _ = joined(samples)
    tree = pack(samples, capacity=capacity)
    assert tree.num_bins > 2
    assert tree.repeated_by_cuts > 0
    rows = [tree.bin(bin) for bin in range(tree.num_bins)]
    assert sorted(i for row in rows for i in row.samples.tolist()) == list(range(31))
    assert_same(torch.cat([row.token_of_slot for row in rows]), tree.token_of_slot)
    for row in rows:
        mine = [samples[i] for i in row.samples.tolist()]
        assert_same(tokens[row.token_of_slot][row.slot_of_token], joined(mine)[0])
        assert_same(row.sample_cu_seqlens, joined(mine)[1])
        assert (row.num_bins, row.repeated_at_forks, row.repeated_by_cuts, row.shared_tokens) == (1, None, None, None)
        assert row.bin(0) is row
        assert all(getattr(row, name).untyped_storage().nbytes() == getattr(row, name).nbytes for name in TENSORS)
        alone = pack(mine)
        assert (row.num_slots, row.num_segments) == (alone.num_slots, alone.num_segments)
    for bin in (-1, tree.num_bins):
        with pytest.raises(ValueError, match=f"index: expected 0 to num_bins - 1 = {tree.num_bins - 1}, got {bin}"):
            tree.bin(bin)
    with pytest.raises(TypeError, match="index: expected an integer"):
        tree.bin(0.5)


def test_copies_of_a_tree(device):
    tree = pack(random_tree(2, 20, depth=3), capacity=1000)
    for other in (copy.copy(tree), copy.deepcopy(tree), pickle.loads(pickle.dumps(tree)), tree.to(device).to("cpu")):
        assert_same_tree(other, tree)
    assert all(getattr(tree.to(device), name).device.type == device for name in TENSORS)
    assert tree != copy.deepcopy(tree)


def test_loss_of_rows_is_the_loss_of_samples():
    """What slot_of_token is for: values of rows, indexed, are those of the tokens, and gradients add up."""
    samples = random_tree(4, 12, depth=3)
    tokens, _ = joined(samples)
    tree = pack(samples)
    weight = torch.randn(20, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(len(tokens), dtype=torch.float64)
    (shared,) = torch.autograd.grad((weight[tokens[tree.token_of_slot]][tree.slot_of_token] * advantages).sum(), weight)
    (alone,) = torch.autograd.grad((weight[tokens] * advantages).sum(), weight)
    torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)


# --- torch.library ---


@pytest.mark.parametrize("capacity", [None, 600])
def test_opcheck(capacity):
    tokens, cu_seqlens = joined(random_tree(5, 10, depth=3))
    for form in (tokens, non_contiguous(tokens.int())):
        torch.library.opcheck(ops.pack_prefix_tree, (form, cu_seqlens, None, capacity, 128))
    torch.library.opcheck(ops.pack_prefix_tree, (tokens, cu_seqlens, torch.arange(10) % 2, capacity, 128))


def test_compiles_fullgraph_with_dynamic_sizes(fresh_compile):
    def step(tokens, cu_seqlens):
        rows, _, _, _, slot_of_token, *_ = ops.pack_prefix_tree(tokens, cu_seqlens, None, None, 1)
        return tokens[rows][slot_of_token]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for leaves in (4, 9, 20):
        tokens, cu_seqlens = joined(random_tree(leaves, leaves, depth=2))
        assert_same(compiled(tokens, cu_seqlens), tokens)


# --- bad input ---

TOKENS = torch.arange(5)
BAD_CALLS = {
    "float tokens": ((TOKENS.float(), [0, 5]), {}, "tokens: expected int32 or int64, got float32 [5]"),
    "rank": ((TOKENS.expand(2, 5), [0, 5]), {}, "tokens: expected [total] or [1, total], got int64 [2, 5]"),
    "start": ((TOKENS, [1, 5]), {}, "cu_seqlens: expected to start at 0, got 1"),
    "decrease": ((TOKENS, [0, 4, 3, 5]), {}, "cu_seqlens: expected never to decrease, got 3 after 4 at index 2"),
    "past the end": ((TOKENS, [0, 6]), {}, "cu_seqlens: expected to end at most at total=5, got 6"),
    "int64 past int32": ((TOKENS, [0, 2**40]), {}, "cu_seqlens: expected to end at most at total=5, got 2147483647"),
    "not covered": ((TOKENS, [0, 4]), {}, "cu_seqlens: expected to end at total=5 like tokens, got 4"),
    "no entry": ((TOKENS, []), {}, "cu_seqlens: expected int32 or int64 [num_documents + 1], got int64 [0]"),
    "float cu_seqlens": ((TOKENS, torch.tensor([0.0, 5.0])), {}, "cu_seqlens: expected int32 or int64"),
    "metadata": ((TOKENS, po.PackedMetadata.from_lengths([4])), {}, "cu_seqlens: expected total=5 like tokens"),
    "groups": ((TOKENS, [0, 5]), {"groups": [1, 2]}, "groups: expected [samples] like cu_seqlens"),
    "float groups": ((TOKENS, [0, 5]), {"groups": torch.ones(1)}, "groups: expected int32 or int64, got float32 [1]"),
    "capacity": ((TOKENS, [0, 2, 5]), {"capacity": 2}, "capacity: expected at least 3, the tokens of sample 1, got 2"),
    "no capacity": ((TOKENS[:0], [0]), {"capacity": 0}, "capacity: expected at least 1, got 0"),
    "min_shared": ((TOKENS, [0, 5]), {"min_shared": 0}, "min_shared: expected at least 1, got 0"),
    "past int64": ((TOKENS, [0, 5]), {"capacity": 2**63}, "capacity: expected an integer that fits int64"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named(case):
    arguments, options, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        po.pack_prefix_tree(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 2], [0, 2]), {}, r"tokens: expected a tensor, got \[1, 2\] \(list\)"),
        ((TOKENS, [0, 2.5]), {}, r"cu_seqlens: expected integers, got 2\.5"),
        ((TOKENS, [0, 5]), {"groups": ["a"]}, "groups: expected integers, got 'a'"),
        ((TOKENS, [0, 5]), {"capacity": 8.0}, r"capacity: expected an integer, got 8\.0"),
        ((TOKENS, [0, 5]), {"min_shared": None}, "min_shared: expected an integer, got None"),
    ],
)
def test_bad_type_is_named(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        po.pack_prefix_tree(*arguments, **options)


def test_a_tree_of_several_bins_is_no_row():
    tree = po.pack_prefix_tree(torch.arange(9), [0, 4, 9], capacity=5)
    with pytest.raises(ValueError, match=r"tree: expected that of one row of the batch \(PrefixTree.bin\), got 2 bins"):
        po.PackedMetadata.from_prefix_tree(tree)
    assert po.PackedMetadata.from_prefix_tree(tree.bin(0)).total == 5
