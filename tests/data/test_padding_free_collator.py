"""PaddingFreeCollator: transformers' collator as the oracle, the row's end, policies, pairs, bad input, threads."""

import doctest
import itertools
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_same
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import PaddingFreeCollator, PaddingFreeDPOCollator, count_within_token_budget, padding_free


def documents(*lengths, **more):
    """Every token has a separate number."""
    ends = list(itertools.accumulate(lengths))
    return [{"input_ids": list(range(e - n + 1, e + 1)), **more} for n, e in zip(lengths, ends, strict=True)]


def plain(batch):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def on(device, examples):
    return [{name: torch.tensor(v, device=device) for name, v in example.items()} for example in examples]


def test_examples_of_the_docstrings():
    assert doctest.testmod(padding_free).failed == 0


# --- one row ---


def test_worked_example(device):
    batch = PaddingFreeCollator(capacity=7, pad_token_id=9)(on(device, documents(2, 3)))
    assert plain(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 9, 9]],
        "labels": [[-100, 2, -100, 4, 5, -100, -100]],
        "position_ids": [[0, 1, 0, 1, 2, 0, 1]],
        "seq_idx": [[0, 0, 1, 1, 1, 2, 2]],
        "cu_seq_lens_q": [0, 2, 5, 7],
        "cu_seq_lens_k": [0, 2, 5, 7],
        "max_length_q": 3,
        "max_length_k": 3,
        **({"num_targets": 3} if device == "cpu" else {}),
        "num_tokens": 5,
    }
    found = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert {name: value.dtype for name, value in found.items()} == {
        **dict.fromkeys(("input_ids", "labels", "position_ids"), torch.int64),
        **dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"), torch.int32),
    }
    assert {value.device.type for value in found.values()} == {device}


def test_the_filling_may_be_the_longest_segment():
    batch = PaddingFreeCollator(capacity=9)(documents(2, 3))
    assert (batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]) == ([0, 2, 5, 9], 4)
    separated = PaddingFreeCollator(capacity=6, separator_id=7)(documents(2, 3))
    assert separated["labels"].tolist() == [[7, 2, 7, 4, 5, -100]]  # nothing is learned from the filling
    full = PaddingFreeCollator(capacity=5)(documents(2, 3))
    assert (full["cu_seq_lens_q"].tolist(), full["max_length_q"]) == ([0, 2, 5], 3)


@pytest.mark.parametrize("options", [*itertools.product([False, True], repeat=3)])
@pytest.mark.parametrize("separator_id", [-100, 7])
def test_options_of_transformers(options, separator_id):
    transformers = pytest.importorskip("transformers")
    names = "return_flash_attn_kwargs", "return_position_ids", "return_seq_idx"
    options = {**dict(zip(names, options, strict=True)), "separator_id": separator_id}
    own_labels = [{**example, "labels": [-100] * len(example["input_ids"])} for example in documents(3, 1, 4)]
    own_labels[2]["labels"][-1] = 5
    for examples in (documents(3, 1, 4), own_labels, on("cpu", own_labels)):
        want = transformers.DataCollatorWithFlattening(**options)(examples)
        got = PaddingFreeCollator(**options, return_num_targets=False)(examples)
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert_same(got[name], value)
    assert_same(
        PaddingFreeCollator()(own_labels, return_tensors="pt", separator_id=3)["labels"],
        transformers.DataCollatorWithFlattening()(own_labels, separator_id=3)["labels"],
    )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(0, 30), st.booleans(), st.integers(0, 99))
def test_every_token_once_with_its_label(lengths, room, as_tensors, seed):
    rng, examples = random.Random(seed), documents(*lengths)
    for example in examples:
        example["labels"] = [rng.choice([-100, token]) for token in example["input_ids"]]
    total = sum(lengths) + room
    given_examples = on("cpu", examples) if as_tensors else examples
    batch = plain(PaddingFreeCollator(capacity=total, pad_token_id=-1)(given_examples))
    assert batch["input_ids"] == [[*range(1, sum(lengths) + 1), *[-1] * room]]
    first, row = 0, batch["labels"][0]
    for i, example in enumerate(examples):
        end = first + lengths[i]
        assert row[first:end] == [-100, *example["labels"][1:]]
        assert batch["position_ids"][0][first:end] == list(range(lengths[i]))
        assert batch["seq_idx"][0][first:end] == [i] * lengths[i]
        assert batch["cu_seq_lens_q"][i : i + 2] == [first, end]
        first = end
    assert row[first:] == [-100] * room
    assert batch["position_ids"][0][first:] == list(range(room))
    assert batch["cu_seq_lens_q"][len(lengths) + 1 :] == [total] * bool(room)
    assert batch["max_length_q"] == max(*lengths, room)


def test_examples_stay_as_they_are():
    examples = on("cpu", [{**example, "labels": example["input_ids"]} for example in documents(2, 3)])
    before = [{name: value.clone() for name, value in example.items()} for example in examples]
    PaddingFreeCollator(capacity=8)(examples)
    single = PaddingFreeCollator()(examples[:1])  # a row of one tensor
    single["input_ids"].zero_()
    for example, old in zip(examples, before, strict=True):
        for name, value in old.items():
            assert_same(example[name], value)


def test_threads_share_one_collator():
    collator, batches = PaddingFreeCollator(capacity=600), [documents(*range(1, 30 + i)) for i in range(5)]
    want = [plain(collator(batch)) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        assert [plain(batch) for batch in pool.map(collator, batches * 16)] == want * 16


# --- more than capacity ---


def test_overlong_error():
    message = (
        "capacity: expected at least the 9 tokens of the examples, got 6; overlong='truncate', 'drop', 'carry' or 'own'"
    )
    with pytest.raises(ValueError, match=message):
        PaddingFreeCollator(capacity=6)(documents(2, 7))


def test_overlong_truncate_cuts_the_row():
    collator = PaddingFreeCollator(capacity=6, overlong="truncate")
    with pytest.warns(UserWarning, match="capacity=6: 1 of 3 examples dropped and 1 cut, 5 of 11 tokens lost"):
        batch = plain(collator(documents(2, 7, 2)))
    assert batch["input_ids"] == [[1, 2, 3, 4, 5, 6]]
    assert (batch["cu_seq_lens_q"], batch["labels"]) == ([0, 2, 6], [[-100, 2, -100, 4, 5, 6]])
    with pytest.warns(UserWarning, match="0 of 1 examples dropped and 1 cut, 3 of 9 tokens lost"):
        assert plain(collator(documents(9)))["input_ids"] == [[1, 2, 3, 4, 5, 6]]
    own_labels = [{"input_ids": [1, 2, 3], "labels": [-100, 8, 9]}, {"input_ids": [4, 5, 6, 7], "labels": [4, 6, 7, 8]}]
    with pytest.warns(UserWarning, match="0 of 2 examples dropped and 1 cut, 1 of 7 tokens lost"):
        assert plain(collator(own_labels))["labels"] == [[-100, 8, 9, -100, 6, 7]]


def test_overlong_drop_keeps_whole_documents():
    collator = PaddingFreeCollator(capacity=6, overlong="drop")
    with pytest.warns(UserWarning, match="capacity=6: 1 of 3 examples dropped and 0 cut, 7 of 11 tokens lost"):
        batch = plain(collator(documents(2, 7, 2)))
    assert batch["input_ids"] == [[1, 2, 10, 11, 0, 0]]
    assert (batch["cu_seq_lens_q"], batch["seq_idx"]) == ([0, 2, 4, 6], [[0, 0, 1, 1, 2, 2]])
    with pytest.raises(ValueError, match="capacity: expected room for one of 1 examples, got 6"):
        collator(documents(7))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(9, 20), st.sampled_from(["truncate", "drop"]))
def test_what_is_lost_is_counted(lengths, limit, overlong):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = PaddingFreeCollator(capacity=limit, overlong=overlong)(documents(*lengths))["input_ids"]
    assert row.shape == (1, limit)
    lost = sum(lengths) - int((row > 0).sum())
    assert [f"{lost} of {sum(lengths)} tokens lost" in str(warning.message) for warning in caught] == [True] * bool(
        lost
    )


def test_overlong_carry_keeps_the_first_that_fit():
    collator, examples = PaddingFreeCollator(capacity=6, overlong="carry"), documents(2, 3, 4, 1)
    batch = plain(collator(examples))
    assert (batch["input_ids"], batch["cu_seq_lens_q"]) == ([[1, 2, 3, 4, 5, 0]], [0, 2, 5, 6])
    chosen = collator.selection(examples)
    # The last one would fit, but follows one that does not.
    assert (chosen.kept, chosen.carried, chosen.carried_tokens, chosen.num_tokens) == ([0, 1], [2, 3], 5, 5)
    assert (chosen.dropped, chosen.truncated, chosen.own, chosen.lost_tokens) == ([], [], [], 0)
    assert plain(collator(examples[2:]))["input_ids"] == [[6, 7, 8, 9, 10, 0]]
    with pytest.raises(
        ValueError, match="room for the first example of 7 tokens, got 6; overlong='own' keeps it whole"
    ):
        collator(documents(7, 1))


def test_overlong_own_keeps_one_whole():
    collator, examples = PaddingFreeCollator(capacity=6, overlong="own"), documents(8, 2, 3)
    batch = plain(collator(examples))
    assert (batch["input_ids"], batch["cu_seq_lens_q"]) == ([list(range(1, 9))], [0, 8])
    assert batch["labels"] == [[-100, *range(2, 9)]]
    chosen = collator.selection(examples)
    assert (chosen.kept, chosen.own, chosen.carried, chosen.carried_tokens) == ([0], [0], [1, 2], 5)
    assert plain(collator(examples[1:]))["input_ids"] == [[9, 10, 11, 12, 13, 0]]
    assert collator.selection(examples[1:]).own == []


@pytest.mark.parametrize(
    ("overlong", "rest"),
    [
        ("carry", {"carried": [2, 3], "carried_tokens": 5}),
        ("own", {"carried": [2, 3], "carried_tokens": 5}),
        ("drop", {"dropped": [2, 3], "lost_tokens": 5}),
        ("truncate", {"dropped": [2, 3], "lost_tokens": 5}),
    ],
)
def test_max_sequences_per_bin(overlong, rest):
    examples = documents(2, 3, 4, 1)
    for limit in (None, 10):
        collator = PaddingFreeCollator(capacity=limit, overlong=overlong, max_sequences_per_bin=2)
        chosen = collator.selection(examples)
        assert chosen.kept == [0, 1]
        assert {name: getattr(chosen, name) for name in rest} == rest
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row = plain(collator(examples))["input_ids"][0]
        assert row == [1, 2, 3, 4, 5, *[0] * (len(row) - 5)]
        told = [str(warning.message) for warning in caught]
        named = "capacity=10, max_sequences_per_bin=2" if limit else "max_sequences_per_bin=2"
        assert told == [f"{named}: 2 of 4 examples dropped and 0 cut, 5 of 10 tokens lost"] * ("dropped" in rest)
    with pytest.raises(ValueError, match="max_sequences_per_bin: expected at least the 4 examples, got 2; overlong="):
        PaddingFreeCollator(max_sequences_per_bin=2)(examples)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(4, 20),
    st.sampled_from(["truncate", "drop", "carry", "own"]),
    st.sampled_from([None, 1, 3]),
)
def test_selection_counts_what_the_row_holds(lengths, limit, overlong, most):
    collator = PaddingFreeCollator(capacity=limit, overlong=overlong, max_sequences_per_bin=most, pad_token_id=-1)
    examples = documents(*lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            row = collator(examples)["input_ids"][0]
        except ValueError:
            with pytest.raises(ValueError, match="capacity: expected room for"):
                collator.selection(examples)
            return
    chosen = collator.selection(examples)
    held = row[row > 0].tolist()
    assert chosen.num_tokens == len(held)
    assert chosen.num_tokens + chosen.lost_tokens + chosen.carried_tokens == sum(lengths)
    assert sorted([*chosen.kept, *chosen.dropped, *chosen.carried]) == list(range(len(lengths)))
    whole = [token for i in chosen.kept if i not in chosen.truncated for token in examples[i]["input_ids"]]
    assert set(whole) <= set(held)
    assert len(chosen.truncated) <= 1
    assert (held == whole) == (not chosen.truncated)


# --- preference pairs ---


def pairs(chosen, rejected, **more):
    sides = documents(*chosen), documents(*rejected)
    return [
        {"chosen_input_ids": c["input_ids"], "rejected_input_ids": [-t for t in r["input_ids"]], "index": 40 + i, **more}
        for i, (c, r) in enumerate(zip(*sides, strict=True))
    ]  # fmt: skip


def test_pairs_have_a_row_for_each_side():
    examples = pairs([2, 3], [4, 1], chosen_labels=None)
    for example in examples:
        example["chosen_labels"] = [-100] + [9] * (len(example["chosen_input_ids"]) - 1)
    batch = PaddingFreeDPOCollator(capacity=6)(examples)
    assert batch.pop("index").tolist() == [40, 41]
    for side in ("chosen", "rejected"):
        own = [
            {n.removeprefix(side + "_"): v for n, v in example.items() if n.startswith(side)} for example in examples
        ]
        for name, value in PaddingFreeCollator(capacity=6)(own).items():
            assert_same(batch.pop(f"{side}_{name}"), value)
    assert not batch


def test_pairs_in_one_row_have_offset_cu_seqlens():
    batch = plain(PaddingFreeDPOCollator(concatenated=True, capacity=6)(pairs([2, 3], [4, 1])))
    assert batch["input_ids"] == [[1, 2, 3, 4, 5, -1, -2, -3, -4, -5, 0, 0]]
    assert batch["labels"] == [[-100, 2, -100, 4, 5, -100, -2, -3, -4, -100, -100, -100]]
    assert batch["cu_seq_lens_q"] == [0, 2, 5, 9, 10, 12]
    assert batch["seq_idx"] == [[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4]]
    assert (batch["max_length_q"], batch["index"]) == (4, [40, 41])
    assert plain(PaddingFreeDPOCollator(concatenated=True)(pairs([2], [1])))["cu_seq_lens_q"] == [0, 2, 3]


def test_pairs_stay_pairs():
    examples = pairs([2, 3, 1], [6, 1, 1])
    with pytest.raises(ValueError, match="capacity: expected at least the 8 tokens"):
        PaddingFreeDPOCollator(capacity=7)(examples)
    with pytest.warns(UserWarning, match="1 of 3 examples dropped and 0 cut, 2 of 14 tokens lost"):
        batch = plain(PaddingFreeDPOCollator(capacity=7, overlong="drop")(examples))
    assert (batch["chosen_cu_seq_lens_q"], batch["rejected_cu_seq_lens_q"]) == ([0, 2, 5, 7], [0, 6, 7])
    assert batch["index"] == [40, 41]
    with pytest.warns(UserWarning, match="2 of 3 examples dropped and 0 cut"):
        batch = plain(PaddingFreeDPOCollator(capacity=6, overlong="truncate")(examples))
    assert (batch["chosen_input_ids"], batch["index"]) == ([[1, 2, 0, 0, 0, 0]], [40])
    with pytest.raises(ValueError, match=r"index: expected in every example, got only .* in example 1"):
        PaddingFreeDPOCollator()([examples[0], {n: v for n, v in examples[1].items() if n != "index"}])
    with pytest.raises(ValueError, match="rejected_input_ids: expected in every example, got only"):
        PaddingFreeDPOCollator()([{"chosen_input_ids": [1]}])
    assert "index" not in PaddingFreeDPOCollator()([{"chosen_input_ids": [1], "rejected_input_ids": [2]}])


def loaded(lengths, budget, most):
    """Pairs of each batch, as open-instruct's loader shares them out: both budgets at once, never an empty batch."""
    batches, totals = [], None
    for i, own in enumerate(lengths):
        with_it = None if totals is None else [total + n for total, n in zip(totals, own, strict=True)]
        if with_it is None or max(with_it) > budget or len(batches[-1]) == most:
            batches.append([])
            with_it = list(own)
        batches[-1].append(i)
        totals = with_it
    return batches


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 30),
    st.sampled_from([1, 3, 12]),
    st.booleans(),
)
def test_two_budgets_at_once(lengths, budget, most, concatenated):
    """The collator, the count and the packing of a whole dataset share one rule; every token is trained on once."""
    queue, kept, options = pairs(*zip(*lengths, strict=True)), [], {"max_sequences_per_bin": most}
    collator = PaddingFreeDPOCollator(capacity=budget, overlong="own", concatenated=concatenated, **options)
    while queue:
        batch = plain(collator(queue))
        chosen = collator.selection(queue)
        count = len(batch["index"])
        assert chosen.kept == list(range(count))
        assert chosen.carried == list(range(count, len(queue)))
        assert count == count_within_token_budget(queue, budget, **options)
        rows = [batch["input_ids"]] if concatenated else [batch["chosen_input_ids"], batch["rejected_input_ids"]]
        whole = [t for side in ("chosen", "rejected") for pair in queue[:count] for t in pair[f"{side}_input_ids"]]
        assert [token for (row,) in rows for token in row if token] == whole
        kept.append([index - 40 for index in batch["index"]])
        queue = queue[count:]
    assert kept == loaded(lengths, budget, most)
    packed = po.pack_sequences(lengths, budget, strategy="next_fit", overlong="own", **options)
    assert packed.bins == kept


def test_a_pair_over_one_budget_has_a_longer_row_on_that_side():
    batch = plain(PaddingFreeDPOCollator(capacity=4, overlong="own")(pairs([2, 1], [6, 1])))
    assert (batch["chosen_input_ids"], batch["rejected_input_ids"]) == ([[1, 2, 0, 0]], [[-1, -2, -3, -4, -5, -6]])
    assert (batch["chosen_cu_seq_lens_q"], batch["rejected_cu_seq_lens_q"]) == ([0, 2, 4], [0, 6])
    with pytest.raises(ValueError, match="room for the first example of 6 tokens, got 4; overlong='own'"):
        PaddingFreeDPOCollator(capacity=4, overlong="carry")(pairs([2, 1], [6, 1]))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8), st.integers(1, 30))
def test_count_within_token_budget(lengths, budget):
    examples = pairs(*zip(*lengths, strict=True)) if lengths else []
    count = count_within_token_budget(examples, budget)

    def fits(n):
        return max(sum(c for c, _ in lengths[:n]), sum(r for _, r in lengths[:n])) <= budget

    assert min(1, len(lengths)) <= count <= len(lengths)
    assert fits(count) or count == 1
    assert count == len(lengths) or not fits(count + 1)
    assert count_within_token_budget(examples, None) == len(lengths)


def test_count_within_token_budget_of_single_documents():
    assert count_within_token_budget(documents(3, 3, 1), 6) == 2
    assert count_within_token_budget(documents(7, 1), 6) == 1
    assert count_within_token_budget(documents(1, 1, 1), 6, max_sequences_per_bin=2) == 2
    assert count_within_token_budget(documents(1, 1, 1), None, max_sequences_per_bin=2) == 2
    with pytest.raises(ValueError, match="input_ids: expected in every example"):
        count_within_token_budget([{"text": "?"}], 6)
    with pytest.raises(ValueError, match="max_sequences_per_bin: expected at least 1 example or None, got 0"):
        count_within_token_budget(documents(1), 6, max_sequences_per_bin=0)


# --- bad input ---


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "features: expected at least one example, got none"),
        ([{"labels": [1]}], r"input_ids: expected in every example, got only \['labels'\] in example 0"),
        ([{"input_ids": [1]}, {"input_ids": []}], "input_ids: expected at least 1 token, got 0 in example 1"),
        ([{"input_ids": torch.tensor(3)}], r"input_ids: expected a 1-D sequence, got tensor\(3\) in example 0"),
        ([{"input_ids": torch.ones(2, 3, dtype=torch.int64)}], "input_ids: expected a 1-D sequence of integers"),
        ([{"input_ids": torch.ones(1, 1, 3, dtype=torch.int64)}], "input_ids: expected a 1-D sequence of integers"),
        ([{"input_ids": [1], "labels": [[1, 2]]}], "labels: expected 1 values like input_ids, got 2 in example 0"),
        ([{"input_ids": [0.5]}], r"input_ids: expected a 1-D sequence of integers, got float32 \[1\] in example 0"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels: expected 2 values like input_ids, got 1 in example 0"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "labels: expected in every example, got only"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], "attention_mask: expected no padding"),
    ],
)
def test_bad_examples_are_named(examples, message):
    with pytest.raises(ValueError, match=message):
        PaddingFreeCollator()(examples)


def test_selection_is_of_what_can_be_collated():
    with pytest.raises(ValueError, match="input_ids: expected at least 1 token, got 0 in example 1"):
        PaddingFreeCollator().selection([{"input_ids": [1]}, {"input_ids": []}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity: expected at least 1 token or None, got 0"),
        ({"max_sequences_per_bin": 0}, "max_sequences_per_bin: expected at least 1 example or None, got 0"),
        ({"overlong": "split"}, "overlong: expected 'error', 'truncate', 'drop', 'carry' or 'own', got 'split'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PaddingFreeCollator(**options)
    with pytest.raises(ValueError, match="return_tensors: expected \"pt\" or None, got 'np'"):
        PaddingFreeCollator()(documents(1), return_tensors="np")


@pytest.mark.parametrize(
    "collator",
    [
        PaddingFreeCollator(),
        PaddingFreeCollator().selection,
        lambda features: count_within_token_budget(features, 4),
    ],
)
@pytest.mark.parametrize("wrong", [lambda features: (f for f in features), lambda features: features[0]])
def test_features_are_a_list_of_dicts(collator, wrong):
    """Of an iterator nothing would be left when the labels are read."""
    with pytest.raises(TypeError, match=r"features: expected a list of dicts, got (generator|dict)"):
        collator(wrong([{"input_ids": [1, 2], "labels": [-100, -100]}]))


@pytest.mark.parametrize("index", [1.5, None, "3"])
def test_index_of_a_pair_is_an_integer(index):
    with pytest.raises(TypeError, match="index: expected an integer, got"):
        PaddingFreeDPOCollator()([{"chosen_input_ids": [1], "rejected_input_ids": [2], "index": index}])


def test_no_pad_token():
    with pytest.raises(TypeError, match="pad_token_id: expected an integer, got None"):
        PaddingFreeCollator(capacity=8, pad_token_id=None)


def test_labels_that_are_all_ignored_stay_ignored():
    batch = PaddingFreeCollator()([{"input_ids": [1, 2, 3], "labels": [-100] * 3}])
    assert batch["labels"].tolist() == [[-100] * 3]


@pytest.mark.parametrize(("budget", "error"), [(0, ValueError), (-1, ValueError), (5.5, TypeError), ("5", TypeError)])
def test_a_budget_that_the_collator_refuses_counts_nothing(budget, error):
    with pytest.raises(error, match="capacity: expected"):
        PaddingFreeCollator(capacity=budget)
    with pytest.raises(error, match="capacity: expected"):
        count_within_token_budget([{"input_ids": [1] * 5}], budget)


def test_pairs_are_counted_by_the_sides_that_are_collated():
    """Whatever other input_ids the examples have."""
    pair = {"prompt_input_ids": [1] * 9, "chosen_input_ids": [1], "rejected_input_ids": [1, 2], "input_ids": [3] * 9}
    kept = PaddingFreeDPOCollator(capacity=4, overlong="own").selection([pair] * 3).kept
    assert count_within_token_budget([pair] * 3, 4) == len(kept) == 2
    with pytest.raises(TypeError, match="examples: expected dicts, got list as example 0"):
        count_within_token_budget([[1, 2]], 4)


def test_packed_metadata_of_the_row():
    examples = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]
    batch = PaddingFreeCollator(capacity=6, return_packed_metadata=True)(examples)
    metadata = batch["packed_metadata"]
    assert (metadata.cu_seqlens.tolist(), metadata.total) == ([0, 2, 5], 6)
    assert metadata.position_ids.tolist() == batch["position_ids"][0].tolist()
    assert "packed_metadata" not in PaddingFreeCollator()(examples)
