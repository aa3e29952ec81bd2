"""PackedCollator: rows against a loop that places one document at a time, bad input, threads, context parallel."""

import doctest
import itertools
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_same
from hypothesis import given
from hypothesis import strategies as st

from packing_ops.data import PackedCollator, packed


def example(length, num_actions, first=1, **more):
    return {"input_ids": list(range(first, first + length)), "num_actions": num_actions, **more}


def examples_of(lengths, seed=0, weights=(0, 1)):
    """Every token has a separate number; about half of the examples' tokens are actions."""
    rng, first, found = random.Random(seed), 1, []
    for length in lengths:
        num_actions = rng.randint(0, length)
        mask = [rng.choice(weights) for _ in range(num_actions)]
        found.append(example(length, num_actions, first, attention_mask=[1] * length, loss_mask=mask))
        first += length
    return found


def full_mask(ex):
    length, own = len(ex["input_ids"]), ex["num_actions"]
    return [0.0] * (length - own) + [float(w) for w in ex.get("loss_mask", [1] * own)]


def tensors(batch):
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def placed(batch, examples, alignment, pad_token_id):
    """sequences, attention_mask and loss_mask of the batch's rows, one slot at a time."""
    documents = iter(batch["order"])
    rows = [[next(documents) for _ in row] for row in batch["sub_seq_lengths"]]
    assert next(documents, None) is None
    occupied = [[math.ceil(len(examples[i]["input_ids"]) / alignment) * alignment for i in row] for row in rows]
    width = max(map(sum, occupied))
    sequences = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), width - 1)
    for r, row in enumerate(rows):
        slot = 0
        for i, slots in zip(row, occupied[r], strict=True):
            mask = full_mask(examples[i])
            for p, token in enumerate(examples[i]["input_ids"]):
                sequences[r, slot + p] = token
                attention_mask[r, slot + p] = 1
                if p + 1 < len(mask):
                    loss_mask[r, slot + p] = mask[p + 1]
            slot += slots
    return {"sequences": sequences, "attention_mask": attention_mask, "loss_mask": loss_mask}


def test_examples_of_the_docstrings():
    assert doctest.testmod(packed).failed == 0


# --- worked values ---


def test_two_examples_share_a_row():
    batch = PackedCollator(12)([example(5, 3), example(7, 4, first=11)])
    assert (batch["order"], batch["sub_seq_lengths"], batch["response_length"]) == ([1, 0], [[7, 5]], 11)
    assert batch["sequences"].tolist() == [[11, 12, 13, 14, 15, 16, 17, 1, 2, 3, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1] * 12]
    assert_same(batch["loss_mask"], torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1]]) * (1 / 7))
    assert {name: value.dtype for name, value in tensors(batch).items()} == {
        "sequences": torch.int64,
        "attention_mask": torch.int64,
        "loss_mask": torch.float32,
    }
    assert batch["loss_mask"].is_contiguous()
    assert batch.keys() == {
        "sequences", "attention_mask", "loss_mask", "sub_seq_lengths", "response_length", "order"
    }  # fmt: skip


def test_ranks_hold_contiguous_rows_dealt_in_turn():
    # One bin, [820, 110, 50] and so on, as pack_sequences' worked value has them; the fullest gives for a fourth.
    lengths = [820, 410, 520, 110, 250, 700, 50]
    batch = PackedCollator(1024, dp_size=2)(examples_of(lengths))
    bins = [[0, 3], [5, 4], [2, 1], [6]]
    assert batch["order"] == [*bins[0], *bins[2], *bins[1], *bins[3]]
    assert batch["sub_seq_lengths"] == [[820, 110], [520, 410], [700, 250], [50]]


def test_ties_go_to_the_later_example():
    assert PackedCollator(4)(examples_of([2, 2, 2]))["order"] == [2, 1, 0]


@pytest.mark.parametrize(
    ("sizes", "alignment"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"cp_size": 2}, 4),
        ({"tp_size": 2, "cp_size": 2}, 8),
        ({"fp8": True}, 16),
        ({"tp_size": 3, "fp8": True}, 48),
        ({"tp_size": 3, "cp_size": 2, "fp8": True}, 96),
    ],
)
def test_alignment(sizes, alignment):
    """tp, or 2 * tp * cp with context parallelism; with fp8 the lcm of that and 16 * cp. The capacity counts it."""
    collator = PackedCollator(2 * alignment, pad_token_id=9, **sizes)
    batch = collator(examples := examples_of([1, 1, 1]))
    assert collator.alignment == alignment
    assert batch["sub_seq_lengths"] == [[1, 1], [1]]
    assert batch["sequences"].shape == (2, 2 * alignment)
    assert_same(batch["sequences"], placed(batch, examples, alignment, 9)["sequences"])
    with pytest.raises(ValueError, match=f"got {3 * alignment} for {2 * alignment + 1} tokens"):
        collator([example(1, 1), example(2 * alignment + 1, 1)])


def test_what_is_no_target():
    """An example's first token, prompts, padding, and actions that the mask leaves out."""
    whole, masked = example(3, 3), example(2, 1, loss_mask=[0])
    assert PackedCollator(8)([whole])["loss_mask"].tolist() == [[0.5, 0.5]]
    assert PackedCollator(8)([masked])["loss_mask"].tolist() == [[0.0]]
    assert PackedCollator(8)([example(2, 0)])["loss_mask"].tolist() == [[0.0]]
    assert PackedCollator(1)([example(1, 1)])["loss_mask"].shape == (1, 0)


def test_weights_become_shares_of_the_batch():
    batch = PackedCollator(4, dp_size=2)([example(4, 2, loss_mask=[0.5, 1.5]), example(3, 1, loss_mask=[2])])
    assert batch["loss_mask"].tolist() == [[0.0, 0.125, 0.375], [0.0, 0.5, 0.0]]


def test_weights_as_small_as_they_come():
    """1 over their sum is more than float32 holds."""
    batch = PackedCollator(8)([example(4, 2, loss_mask=[1e-40, 1e-40]), example(3, 2, loss_mask=[0, 1e-40])])
    assert batch["loss_mask"].sum() == 1
    assert batch["loss_mask"].max() == torch.tensor(1 / 3)


def test_weights_whose_sum_is_past_float32():
    """They were shares of infinity: a batch without a loss."""
    with pytest.raises(ValueError, match="loss_mask: expected weights whose sum float32 holds, got more"):
        PackedCollator(8)([example(4, 2, loss_mask=[3e38, 3e38])])


def test_overlong_own_keeps_one_whole():
    collator = PackedCollator(8, tp_size=2, overlong="own", pad_token_id=-1)
    batch = collator(examples := examples_of([11, 3, 4]))
    assert (batch["order"], batch["sub_seq_lengths"]) == ([0, 2, 1], [[11], [4, 3]])
    assert batch["sequences"].shape == (2, 12)
    for name, value in placed(batch, examples, 2, -1).items():
        assert_same((batch[name] > 0).float() if name == "loss_mask" else batch[name], value)
    assert collator.model_inputs(batch)["cu_seq_lens_q"].tolist() == [0, 12, 16, 20, 24]
    with pytest.raises(ValueError, match="overlong: expected 'error' or 'own', got 'drop'"):
        PackedCollator(8, overlong="drop")


def test_round_capacity():
    longest = examples_of([30, 2])
    with pytest.raises(
        ValueError, match=r"got 32 for 30 tokens .* exceeds bin capacity; round_capacity=True or overlong="
    ):
        PackedCollator(30, cp_size=2)(longest)
    collator = PackedCollator(30, cp_size=2, round_capacity=True)
    assert collator.capacity == 32
    assert collator(longest)["sub_seq_lengths"] == [[30], [2]]
    with pytest.raises(ValueError, match=r"got 36 for 33 tokens .* exceeds bin capacity; overlong='own' accepts it"):
        collator([example(33, 1)])


# --- every token once, with its label and its mask ---


@given(
    st.lists(st.integers(1, 24), min_size=4, max_size=20),
    st.sampled_from(["ffd", "bfd", "next_fit", "first_fit", "balanced"]),
    st.sampled_from([(1, 1, False), (2, 1, False), (1, 2, False), (3, 1, True)]),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_every_token_once_with_its_label_and_mask(lengths, strategy, sizes, dp_size, seed):
    tp_size, cp_size, fp8 = sizes
    collator = PackedCollator(
        96, pad_token_id=-1, dp_size=dp_size, tp_size=tp_size, cp_size=cp_size, fp8=fp8, strategy=strategy
    )
    examples = examples_of(lengths, seed)
    batch = collator(examples)
    sequences, loss_mask = batch["sequences"], batch["loss_mask"]
    assert sequences.shape[0] % dp_size == 0
    assert sequences.shape[1] <= collator.capacity
    assert all(batch["sub_seq_lengths"]), "a rank without documents"
    assert sorted(batch["order"]) == list(range(len(examples)))
    assert sequences[batch["attention_mask"] == 1].sort().values.tolist() == list(range(1, sum(lengths) + 1))

    # The slot before a token has its weight, over all weights.
    weights = {t: w for ex in examples for t, w in zip(ex["input_ids"][1:], full_mask(ex)[1:], strict=True)}
    targets = sum(weights.values())
    found = {int(t): float(w) for t, w in zip(sequences[:, 1:].flatten(), loss_mask.flatten(), strict=True) if w}
    assert found.keys() == {t for t, w in weights.items() if w}
    assert sum(found.values()) == pytest.approx(1.0 if targets else 0.0)

    expected = placed(batch, examples, collator.alignment, -1)
    expected["loss_mask"] *= 1 / max(targets, 1)
    for name, value in expected.items():
        assert_same(batch[name], value)


def test_lists_arrays_and_tensors_are_the_same():
    numpy = pytest.importorskip("numpy")
    examples = examples_of([5, 9, 2, 4], seed=3)
    assert any(ex["num_actions"] for ex in examples)
    want = PackedCollator(12, dp_size=2)(examples)
    for convert in (torch.tensor, lambda v: torch.tensor(v, dtype=torch.int32), numpy.array, tuple):
        other = [{name: convert(v) if isinstance(v, list) else v for name, v in ex.items()} for ex in examples]
        got = PackedCollator(12, dp_size=2)([*other[:2], *examples[2:]])
        assert got["order"] == want["order"]
        for name, value in tensors(want).items():
            assert_same(got[name], value)
    without = [{name: v for name, v in ex.items() if name != "attention_mask"} for ex in examples]
    assert_same(PackedCollator(12, dp_size=2)(without)["attention_mask"], want["attention_mask"])


def test_threads_share_one_collator():
    collator, batches = PackedCollator(64, dp_size=2), [examples_of([7, 30, 12, 50, 3] * 8, seed) for seed in range(8)]
    want = [collator(batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        for got, expected in zip(pool.map(collator, batches * 8), want * 8, strict=True):
            assert got["order"] == expected["order"]
            for name, value in tensors(expected).items():
                assert_same(got[name], value)


# --- context parallel ---


@pytest.mark.parametrize("sizes", [{"cp_size": 1}, {"cp_size": 2}, {"cp_size": 4, "tp_size": 2}])
def test_ranks_hold_two_chunks_of_each_document(sizes):
    collator = PackedCollator(96, dp_size=2, pad_token_id=-1, **sizes)
    cp_size, batch = collator.cp_size, collator(examples_of([40, 33, 17, 9, 5, 3, 16], seed=1))
    width, starts = batch["sequences"].shape[1], []
    for lengths in batch["sub_seq_lengths"]:
        slots = [math.ceil(n / collator.alignment) * collator.alignment for n in lengths]
        starts.append([sum(slots[:i]) for i in range(len(slots) + 1)] + [width])
    next_token = torch.nn.functional.pad(batch["sequences"][:, 1:], (0, 1))
    weight = torch.nn.functional.pad(batch["loss_mask"], (0, 1))
    seen = torch.zeros_like(batch["sequences"])
    for rank in range(cp_size):
        share = collator.context_parallel_split(batch, rank)
        for r, bounds in enumerate(starts):
            held = []
            for start, end in itertools.pairwise(bounds):
                if cp_size == 1:
                    held += range(start, end)
                    continue
                chunk = (end - start) // (2 * cp_size)
                for which in (rank, 2 * cp_size - 1 - rank):
                    held += range(start + which * chunk, start + (which + 1) * chunk)
            seen[r, held] += 1
            firsts = [max(b for b in bounds if b <= slot) for slot in held]
            assert share["sequences"][r].tolist() == batch["sequences"][r, held].tolist()
            assert share["attention_mask"][r].tolist() == batch["attention_mask"][r, held].tolist()
            assert share["position_ids"][r].tolist() == [s - f for s, f in zip(held, firsts, strict=True)]
            assert share["loss_mask"][r].tolist() == weight[r, held].tolist()
            trained = share["loss_mask"][r] > 0
            assert share["labels"][r][trained].tolist() == next_token[r, held][trained].tolist()
        assert (share["order"], share["sub_seq_lengths"]) == (batch["order"], batch["sub_seq_lengths"])
    assert (seen == 1).all()


def test_context_parallel_split_of_some_rows():
    collator = PackedCollator(16, dp_size=2, cp_size=2)
    batch = collator(examples_of([16, 8, 8, 4], seed=1))
    half = len(batch["sequences"]) // 2
    part = {name: batch[name][half:] for name in ("sequences", "attention_mask", "loss_mask", "sub_seq_lengths")}
    whole = collator.context_parallel_split(batch, 1)
    for name, value in tensors(collator.context_parallel_split(part, 1)).items():
        assert_same(value, whole[name][half:])
    with pytest.raises(ValueError, match="cp_rank: expected 0 to 1 for cp_size=2, got 2"):
        collator.context_parallel_split(batch, 2)
    with pytest.raises(ValueError, match="sub_seq_lengths: expected 4 lists, one per row, got 1"):
        collator.context_parallel_split({**batch, "sub_seq_lengths": [[16]]}, 0)
    with pytest.raises(ValueError, match="sub_seq_lengths: expected documents that leave a multiple of 4 of the 16"):
        collator.context_parallel_split({**batch, "sub_seq_lengths": [[16], [17], [8], [4]]}, 0)


# --- bad input ---


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "examples: expected at least dp_size=1, got 0"),
        ([example(2, 1), {"num_actions": 0}], r"input_ids: expected in every example, got only \['num_actions'\] in example 1"),
        ([{"input_ids": [1]}], "num_actions: expected in every example"),
        ([example(2, 1), example(0, 0)], "input_ids: expected at least 1 token, got 0 in example 1"),
        ([{"input_ids": 5, "num_actions": 0}], "input_ids: expected a 1-D sequence, got 5 in example 0"),
        ([{"input_ids": [1, 2.5], "num_actions": 0}], "input_ids: expected a 1-D sequence of integers, got float32"),
        ([{"input_ids": torch.ones(2), "num_actions": 0}], "1-D sequence of integers, got float32"),
        ([{"input_ids": torch.ones(2, 2, dtype=torch.int64), "num_actions": 0}], r"1-D sequence of integers, got int64 \[2, 2\]"),
        ([{"input_ids": [[1], [2]], "num_actions": 0}], r"1-D sequence of integers, got int64 \[2, 1\]"),
        ([{"input_ids": ["a"], "num_actions": 0}], r"1-D sequence of integers, got \['a'\] in example 0"),
        ([{"input_ids": [2**70], "num_actions": 0}], "1-D sequence of integers"),
        ([{"input_ids": torch.tensor([1, 2**63], dtype=torch.uint64), "num_actions": 0}], r"1-D sequence of integers, got uint64 \[2\] in example 0"),
        ([{"input_ids": torch.ones(2, dtype=torch.complex64), "num_actions": 0}], r"1-D sequence of integers, got complex64 \[2\] in example 0"),
        ([example(2, 1, loss_mask=torch.ones(1, dtype=torch.complex64))], r"loss_mask: expected a 1-D sequence of numbers, got complex64"),
        ([example(9, 1)], "input_ids: expected at most capacity=8 slots, got 9 for 9 tokens"),
        ([example(2, 3)], "num_actions: expected 0 to the example's 2 tokens, got 3 in example 0"),
        ([example(2, -1)], "num_actions: expected 0 to the example's 2 tokens, got -1"),
        ([example(2, 1.5)], "num_actions: expected 0 to the example's 2 tokens, got 1.5 in example 0"),
        ([example(2, torch.tensor(1.5))], r"num_actions: expected 0 to the example's 2 tokens, got tensor\(1.5"),
        ([example(2, None)], "num_actions: expected 0 to the example's 2 tokens, got None in example 0"),
        ([example(4, 2, loss_mask=[1])], "loss_mask: expected 2 values like num_actions, got 1 in example 0"),
        ([example(4, 2, loss_mask=[1, 1]), example(4, 2)], "loss_mask: expected in every example, got only"),
        ([example(4, 2, loss_mask=[1, -1])], "loss_mask: expected finite weights of at least 0, got -1 to 1"),
        ([example(4, 2, loss_mask=[1, math.nan])], "loss_mask: expected finite weights"),
        ([example(4, 2, loss_mask=[1, math.inf])], "loss_mask: expected finite weights"),
        ([example(2, 1, attention_mask=[1])], "attention_mask: expected 2 values like input_ids, got 1"),
        ([example(2, 1, attention_mask=[1, 1]), example(2, 1, attention_mask=[0, 1])], "attention_mask: expected no padding.* in example 1"),
        ([example(2, 1, attention_mask=torch.tensor([0, 1]))], "attention_mask: expected no padding.* in example 0"),
    ],
)  # fmt: skip
def test_bad_examples_are_named(examples, message):
    with pytest.raises(ValueError, match=message):
        PackedCollator(8)(examples)


@pytest.mark.parametrize("examples", [iter([example(2, 1)]), example(2, 1), [[1, 2]], [None], [example(2, 1), "ab"]])
def test_examples_are_a_list_of_dicts(examples):
    with pytest.raises(
        TypeError, match=r"examples: expected (a list of )?dicts, got (list_iterator|dict|list|NoneType|str)"
    ):
        PackedCollator(8)(examples)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_tokens(dtype):
    """torch.cat takes them next to nothing else."""
    ids = [[1, 2, 60_000], [3]]
    want = PackedCollator(8, tp_size=4)([{"input_ids": i, "num_actions": 1} for i in ids])
    for convert in (lambda i: torch.tensor(i, dtype=dtype), lambda i: torch.tensor(i, dtype=dtype).numpy()):
        examples = [{"input_ids": convert(i), "num_actions": 1} for i in ids]
        assert_same(PackedCollator(8, tp_size=4)(examples)["sequences"], want["sequences"])
        examples[1]["input_ids"] = [3]
        assert_same(PackedCollator(8, tp_size=4)(examples)["sequences"], want["sequences"])


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_the_wrong_example_is_named_not_its_place_in_the_row(name):
    examples = examples_of([2, 6, 4], seed=5)  # 1, 2, 0 in the row
    examples[0] = {"input_ids": [1, 2], "num_actions": 2, "attention_mask": [1, 1], "loss_mask": [1, 1], name: [1, "?"]}
    with pytest.raises(ValueError, match=rf"{name}: expected a 1-D sequence of .* got \[1, '\?'\] in example 0"):
        PackedCollator(12)(examples)


def test_fewer_examples_than_ranks_or_rows():
    with pytest.raises(ValueError, match="examples: expected at least dp_size=4, got 3"):
        PackedCollator(8, dp_size=4)(examples_of([1, 2, 3]))
    with pytest.raises(
        ValueError, match=r"dp_size=2, strategy='ffd': .* got 3 sequences for at least 3 bins .* Cannot create"
    ):
        PackedCollator(8, dp_size=2)(examples_of([8, 8, 8]))
    assert len(PackedCollator(8, dp_size=3)(examples_of([1, 2, 3]))["sequences"]) == 3


@pytest.mark.parametrize("name", ["capacity", "dp_size", "tp_size", "cp_size"])
def test_sizes_below_one(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        PackedCollator(**{"capacity": 8, name: 0})


def test_no_pad_token():
    with pytest.raises(TypeError, match="pad_token_id: expected an integer, got None"):
        PackedCollator(8, pad_token_id=None)
    with pytest.raises(TypeError, match="capacity: expected an integer, got '8'"):
        PackedCollator("8")


def test_unknown_strategy():
    with pytest.raises(ValueError, match="strategy"):
        PackedCollator(8, strategy="magic")(examples_of([1]))


# --- speed: benchmarks/bench_data.py has the milliseconds; a test's must hold on any machine ---


def calls_made(call):
    """How many functions of Python and C run: what a collator without vectorised steps spends its time on."""
    made = 0

    def count(_frame, event, _function):
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return made


@pytest.mark.parametrize("convert", [list, torch.tensor])
def test_calls_do_not_grow_with_the_tokens(convert):
    def calls_for(length):
        examples = examples_of([length] * 256)
        examples = [{n: convert(v) if isinstance(v, list) else v for n, v in ex.items()} for ex in examples]
        return calls_made(lambda: PackedCollator(8192, dp_size=8)(examples))

    short, long = calls_for(8), calls_for(128)
    assert long < 1.1 * short
    assert long < 30 * 256  # examples
