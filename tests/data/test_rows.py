"""packing_ops.data.rows: dummy rows, slices and choices of rows."""

import copy
import itertools

import numpy as np
import pytest
import torch
from helpers import assert_same
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import (
    PackedCollator,
    iter_microbatches,
    num_rows,
    pad_batch_to_multiple,
    select_rows,
    slice_batch,
    stage_chunks,
    trim_padding,
)


def batch_of(rows, device="cpu"):
    """Every kind of field that rollouts have; row i is identified by i + 1 in each."""
    ids = torch.arange(1, rows + 1, device=device)[:, None].expand(rows, 3).clone()
    return {
        "sequences": ids,
        "loss_mask": torch.ones(rows, 3, device=device),
        "rewards": ids[:, 0].double(),
        "pixel_values": [torch.full((i % 3, 2), float(i + 1), device=device) for i in range(rows)],
        "turns": [[i + 1] * (i % 4) for i in range(rows)],
        "texts": [f"row {i + 1}" for i in range(rows)],
        "values": None,
        "temperature": torch.tensor(0.5, device=device),
        "metadata": {
            "uids": [f"uid {i + 1}" for i in range(rows)],
            "objects": np.array([{"row": i + 1} for i in range(rows)], dtype=object),
            "env": {"seeds": torch.arange(1, rows + 1)},
            "response_length": 3,
            "split": "train",
            "shape": (1, 2, 3),
        },
    }


def assert_same_batch(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in expected:
            assert_same_batch(actual[name], expected[name])
    elif isinstance(expected, torch.Tensor):
        assert_same(actual, expected)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same_batch(one, other)
    else:
        assert np.array_equal(actual, expected) if isinstance(expected, np.ndarray) else actual == expected


def storages(value):
    if isinstance(value, dict):
        return {pointer for part in value.values() for pointer in storages(part)}
    if isinstance(value, list):
        return {pointer for part in value for pointer in storages(part)}
    return {value.untyped_storage().data_ptr()} if isinstance(value, torch.Tensor) and value.numel() else set()


# --- pad_batch_to_multiple ---


@pytest.mark.parametrize(("rows", "multiple"), [(3, 2), (7, 4), (1, 5), (2, 8), (5, 3)])
def test_dummy_rows_repeat_row_0_and_count_in_no_loss(device, rows, multiple):
    batch = batch_of(rows, device)
    before = copy.deepcopy(batch)
    padded = pad_batch_to_multiple(batch, multiple)
    total = num_rows(padded)
    assert total % multiple == 0
    assert 0 < total - rows < multiple
    assert_same_batch(slice_batch(padded, 0, rows), batch)
    for dummy in range(rows, total):
        row = slice_batch(padded, dummy, dummy + 1)
        assert not row["loss_mask"].any()
        assert_same_batch({**row, "loss_mask": batch["loss_mask"][:1]}, slice_batch(batch, 0, 1))
    assert_same_batch(batch, before)


def test_dummy_rows_are_copies():
    batch = batch_of(3)
    before = copy.deepcopy(batch)
    padded = pad_batch_to_multiple(batch, 5)
    padded["sequences"][3:] = -1
    padded["pixel_values"][3] += 1
    padded["turns"][3].append(9)
    padded["metadata"]["uids"][4] = "other"
    assert_same_batch(batch, before)
    assert padded["turns"][4] == before["turns"][0]


@pytest.mark.parametrize(("rows", "multiple"), [(4, 2), (3, 1), (0, 4)])
def test_the_same_object_when_nothing_is_to_do(rows, multiple):
    batch = batch_of(rows)
    assert pad_batch_to_multiple(batch, multiple) is batch


def test_fills_of_every_kind():
    batch = {
        "ids": torch.tensor([[1], [2]]),
        "mask": [[1.0, 1.0], [1.0]],
        "advantages": [torch.tensor([2.0, 3.0]), torch.tensor([4.0])],
        "weight": [0.5, 2],
        "spans": [[(1, 2)], [(3, 4), (5, 6)]],
        "array": np.array([1.5, 2.5]),
        "objects": np.array([{"a": 1}, None], dtype=object),
        "texts": ["a", "b"],
        "infos": [{"a": 1}, {}],
        "metadata": {"valid": torch.tensor([True, True]), "last": [False, True]},
        "nothing": None,
    }
    zeros = dict.fromkeys(("mask", "advantages", "weight", "valid", "spans", "nothing"), 0)
    fill = {**zeros, "array": -1, "objects": "none", "texts": "pad", "last": True, "infos": {"b": []}}
    padded = pad_batch_to_multiple(batch, 4, fill=fill)
    assert padded["ids"].tolist() == [[1], [2], [1], [1]]
    assert padded["mask"] == [[1.0, 1.0], [1.0], [0.0, 0.0], [0.0, 0.0]]
    assert [row.tolist() for row in padded["advantages"]] == [[2.0, 3.0], [4.0], [0.0, 0.0], [0.0, 0.0]]
    assert padded["weight"] == [0.5, 2, 0.0, 0.0]
    assert padded["spans"] == [[(1, 2)], [(3, 4), (5, 6)], [(0, 0)], [(0, 0)]]
    assert padded["array"].tolist() == [1.5, 2.5, -1, -1]
    assert padded["objects"].tolist() == [{"a": 1}, None, "none", "none"]
    assert padded["texts"] == ["a", "b", "pad", "pad"]
    assert padded["infos"] == [{"a": 1}, {}, {"b": []}, {"b": []}]
    assert padded["infos"][2]["b"] is not padded["infos"][3]["b"]
    assert padded["metadata"]["valid"].tolist() == [True, True, False, False]
    assert padded["metadata"]["last"] == [False, True, True, True]
    assert pad_batch_to_multiple({"ids": batch["ids"]}, 3, fill={})["ids"].tolist() == [[1], [2], [1]]


def test_masks_and_labels_need_not_be_told():
    batch = {
        "loss_mask": torch.ones(1, 2),
        "labels": torch.tensor([[5, 6]]),
        "chosen_labels": [[5, 6]],
        "metadata": {"critic_loss_mask": [[True, True]], "labels": torch.tensor([3])},
        "ids": torch.tensor([[5, 6]]),
    }
    dummy = slice_batch(pad_batch_to_multiple(batch, 2), 1, 2)
    assert not dummy["loss_mask"].any()
    assert (dummy["labels"].tolist(), dummy["chosen_labels"], dummy["ids"].tolist()) == (
        [[-100] * 2],
        [[-100] * 2],
        [[5, 6]],
    )
    assert dummy["metadata"]["critic_loss_mask"] == [[False, False]]
    assert dummy["metadata"]["labels"].tolist() == [-100]
    assert po.count_target_tokens(dummy["labels"]) == 0
    told = pad_batch_to_multiple(batch, 2, fill={"labels": lambda rows: rows, "loss_mask": 0.5, "ids": 0})
    assert (told["labels"][1].tolist(), told["metadata"]["labels"].tolist()) == ([5, 6], [3, 3])
    assert (told["loss_mask"][1].tolist(), told["ids"][1].tolist()) == ([0.5, 0.5], [0, 0])


def test_fills_of_skyrl():
    """router_padding_mask, expert indices, uids and is_last_step as its pad_training_input_batch has them."""
    batch = {
        "loss_mask": torch.ones(4, 5),
        "rollout_expert_indices": torch.randint(3, 8, (4, 5, 2, 3)),
        "router_padding_mask": torch.zeros(4, 5, dtype=torch.bool),
        "metadata": {"uids": [f"u{i}" for i in range(4)], "is_last_step": [False, True, False, True]},
    }
    before = copy.deepcopy(batch)
    fill = {
        "rollout_expert_indices": lambda rows: torch.arange(rows.shape[-1]).expand_as(rows),
        "router_padding_mask": True,
        "uids": lambda uids: [f"pad{i}" for i in range(len(uids))],
        "is_last_step": True,
    }
    padded = pad_batch_to_multiple(batch, 7, fill=fill)
    assert_same_batch(slice_batch(padded, 0, 4), before)
    assert_same(padded["rollout_expert_indices"][4:], torch.tensor([0, 1, 2]).expand(3, 5, 2, 3))
    assert padded["router_padding_mask"][4:].all()
    assert not padded["loss_mask"][4:].any()
    assert padded["metadata"]["uids"] == ["u0", "u1", "u2", "u3", "pad0", "pad1", "pad2"]
    assert padded["metadata"]["is_last_step"] == [False, True, False, True, True, True, True]
    assert_same_batch(batch, before)


def test_a_function_may_write_into_the_copies():
    def numbered(rows):
        rows[:, 0] = torch.arange(len(rows))
        return rows

    batch = {"ids": torch.tensor([[5, 6]]), "array": np.array([[5, 6]])}
    fill = {"ids": numbered, "array": lambda rows: rows + 1}
    padded = pad_batch_to_multiple(batch, 3, fill=fill)
    assert (padded["ids"].tolist(), batch["ids"].tolist()) == ([[5, 6], [0, 6], [1, 6]], [[5, 6]])
    assert padded["array"].tolist() == [[5, 6], [6, 7], [6, 7]]


def test_nested_tensors_are_ragged_rows():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])]
    batch = {"loss_mask": torch.nested.nested_tensor(rows, layout=torch.jagged)}
    padded = pad_batch_to_multiple(batch, 4)["loss_mask"]
    assert padded.layout == torch.jagged
    assert [row.tolist() for row in padded.unbind()] == [[1, 2, 3], [4], [5, 6], [0, 0, 0]]
    assert [row.tolist() for row in slice_batch(batch, 1, 3)["loss_mask"].unbind()] == [[4], [5, 6]]
    assert [row.tolist() for row in select_rows(batch, [2, 0])["loss_mask"].unbind()] == [[5, 6], [1, 2, 3]]


# --- slice_batch, select_rows ---


@given(rows=st.integers(1, 7), cuts=st.lists(st.integers(0, 7), max_size=3))
def test_slices_put_together_are_the_batch(rows, cuts):
    batch = batch_of(rows)
    cuts = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    slices = [slice_batch(batch, start, end) for start, end in itertools.pairwise(cuts)]
    assert_same(torch.cat([part["sequences"] for part in slices]), batch["sequences"])
    for name in ("turns", "texts"):
        assert [row for part in slices for row in part[name]] == batch[name]
    assert [uid for part in slices for uid in part["metadata"]["uids"]] == batch["metadata"]["uids"]
    assert_same(torch.cat([part["metadata"]["env"]["seeds"] for part in slices]), batch["metadata"]["env"]["seeds"])
    assert all(part["metadata"]["shape"] == (1, 2, 3) and part["values"] is None for part in slices)


def test_slices_are_views():
    batch = batch_of(4)
    assert storages(slice_batch(batch, 1, 3)) <= storages(batch)
    assert slice_batch(batch, 2, 2)["sequences"].shape == (0, 3)


@given(rows=st.integers(1, 6), data=st.data())
def test_selected_rows_are_those_rows(rows, data):
    batch = batch_of(rows)
    indices = data.draw(st.lists(st.integers(0, rows - 1), max_size=8))
    selected = select_rows(batch, indices)
    assert num_rows(selected) == len(indices)
    for place, index in enumerate(indices):
        assert_same_batch(slice_batch(selected, place, place + 1), slice_batch(batch, index, index + 1))
    assert not storages(selected["sequences"]) & storages(batch["sequences"])


# --- rows of several documents: PackedCollator's order has an entry per document ---


def packed_batch(dp_size=1):
    """Example i is i + 1, as often as it is long; rows of 3, 2, 1 and 1 documents, or dealt to two ranks."""
    examples = [{"input_ids": [i + 1] * n, "num_actions": n - 1} for i, n in enumerate((5, 8, 2, 4, 3, 7, 6))]
    return PackedCollator(10, dp_size=dp_size)(examples)


def documents_of(batch):
    """(example, length) of every document of every row, by the tokens; held against order and sub_seq_lengths."""
    rows, order = [], iter(batch["order"])
    for ids, mask, lengths in zip(batch["sequences"], batch["attention_mask"], batch["sub_seq_lengths"], strict=True):
        tokens, lengths_by_tokens = ids[mask == 1].unique_consecutive(return_counts=True)
        rows.append(list(zip((tokens - 1).tolist(), lengths_by_tokens.tolist(), strict=True)))
        assert rows[-1] == [(next(order), length) for length in lengths]
    assert next(order, None) is None
    return rows


def test_order_goes_with_the_rows_of_its_documents():
    batch = packed_batch()
    before, rows = copy.deepcopy(batch), documents_of(batch)
    assert len({len(row) for row in rows}) > 1, "rows of different numbers of documents"
    assert num_rows(batch) == len(rows)
    for start, end in itertools.combinations(range(len(rows) + 1), 2):
        part = slice_batch(batch, start, end)
        assert documents_of(part) == rows[start:end]
        assert part["response_length"] == batch["response_length"]
    assert slice_batch(batch, 1, 1)["order"] == []
    assert documents_of(select_rows(batch, [2, 0, 2])) == [rows[2], rows[0], rows[2]]
    padded = pad_batch_to_multiple(batch, 3)
    assert documents_of(padded) == rows + [rows[0]] * (-len(rows) % 3)
    assert not padded["loss_mask"][len(rows) :].any()
    assert pad_batch_to_multiple(batch, len(rows)) is batch
    assert_same_batch(batch, before)
    nested = slice_batch({"loss_mask": batch["loss_mask"], "packing": batch}, 1, 3)
    assert documents_of(nested["packing"]) == rows[1:3]


def test_order_of_one_row_is_no_boundary():
    batch = PackedCollator(10)([{"input_ids": [5, 6, 7], "num_actions": 2}, {"input_ids": [8], "num_actions": 1}])
    assert (batch["order"], batch["sub_seq_lengths"]) == ([0, 1], [[3, 1]])
    assert slice_batch(batch, 0, 1)["order"] == [0, 1]


def test_order_may_be_anything_else():
    batch = {"ids": torch.arange(2), "order": [7, 8], "sub_seq_lengths": [3, 4]}
    assert slice_batch(batch, 1, 2)["order"] == [8]
    assert slice_batch({**batch, "order": torch.arange(2)}, 1, 2)["order"].tolist() == [1]


def test_packed_rows_are_staged():
    batch = packed_batch(dp_size=2)
    rows = documents_of(batch)
    (ranks,) = stage_chunks(batch, [(0, len(rows))], 2)
    assert [documents_of(chunk) for chunk in ranks] == [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    chunks = stage_chunks(batch, [(0, 1), (1, len(rows))], 2)
    assert [documents_of(chunk) for chunk in chunks[0]] == [rows[:1], rows[:1]]
    assert not chunks[0][1]["loss_mask"].any()


# --- bad input ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad_batch_to_multiple(batch_of(3), 0), "multiple: expected at least 1, got 0"),
        (lambda: pad_batch_to_multiple({}, 2), r"batch: expected a tensor or a list to count rows by, got \[\]"),
        (lambda: pad_batch_to_multiple({"step": 3}, 2), r"to count rows by, got \['step'\]"),
        (
            lambda: pad_batch_to_multiple({**batch_of(3), "texts": ["a", "b"]}, 3),
            "texts: expected 3 rows like sequences, got 2",
        ),
        (
            lambda: slice_batch({**batch_of(3), "metadata": {"uids": ["a"] * 4}}, 0, 1),
            "uids: expected 3 rows like sequences, got 4",
        ),
        (
            lambda: pad_batch_to_multiple({"ids": torch.ones(1, 2)}, 2),
            r"fill: expected a loss_mask or labels in the batch, got \['ids'\]; fill={name: value} says",
        ),
        (lambda: pad_batch_to_multiple({"ids": torch.ones(1), "loss_mask": None}, 2), "fill: expected a loss_mask or"),
        (
            lambda: pad_batch_to_multiple(batch_of(2), 2, fill={"los_mask": 0}),
            "fill: expected names in the batch, got 'los_mask'",
        ),
        (
            lambda: pad_batch_to_multiple(batch_of(1), 2, fill={"split": 0}),
            "fill: expected a name of rows, got 'split', str",
        ),
        (
            lambda: pad_batch_to_multiple(batch_of(1), 2, fill={"texts": 0}),
            "fill: expected a value of str for 'texts', .* got 0",
        ),
        (
            lambda: pad_batch_to_multiple(batch_of(1), 2, fill={"sequences": 0.5}),
            "fill: expected a value of int64 for 'sequences'",
        ),
        (
            lambda: pad_batch_to_multiple({"labels": [True]}, 2),
            "fill: expected a value of bool for 'labels', .* got -100",
        ),
        (lambda: pad_batch_to_multiple({"n": [1]}, 2, fill={"n": 0.5}), "fill: expected a value of int for 'n'"),
        (
            lambda: pad_batch_to_multiple({"n": np.ones(1, dtype=np.int8)}, 2, fill={"n": 300}),
            "a value of int8 for 'n'",
        ),
        (
            lambda: pad_batch_to_multiple(batch_of(1), 2, fill={"sequences": lambda rows: rows.float()}),
            r"fill: expected int64 \[1, 3\] on cpu for 'sequences', got float32 \[1, 3\] on cpu",
        ),
        (
            lambda: pad_batch_to_multiple(batch_of(1), 3, fill={"texts": lambda rows: ["a"]}),
            "fill: expected 2 rows for 'texts', got 1",
        ),
        (
            lambda: pad_batch_to_multiple(batch_of(1), 3, fill={"texts": lambda rows: "ab"}),
            "fill: expected 2 rows for 'texts', got str",
        ),
        (
            lambda: slice_batch({**packed_batch(), "order": [0, 1]}, 0, 1),
            "order: expected 7 entries, one per document of sub_seq_lengths, got 2",
        ),
        (
            lambda: slice_batch({"ids": torch.ones(2, 1), "order": [0, 1, 2]}, 0, 1),
            "order: expected 2 rows like ids, got 3",
        ),
        (lambda: slice_batch(batch_of(3), 1, 4), "0 <= start <= end <= 3 rows, got 1 and 4"),
        (lambda: slice_batch(batch_of(3), -1, 2), "got -1 and 2"),
        (lambda: slice_batch(batch_of(3), 2, 1), "got 2 and 1"),
        (lambda: select_rows(batch_of(3), [0, 3]), "indices: expected 0 to 2 for 3 rows, got 3"),
        (lambda: select_rows(batch_of(3), [-1]), "indices: expected 0 to 2 for 3 rows, got -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("indices", [torch.tensor([2, 0]), np.array([2, 0]), (i for i in (2, 0)), [torch.tensor(2), 0]])
def test_indices_may_be_any_integers(indices):
    rows = select_rows({"ids": torch.tensor([[5, 1], [6, 2], [7, 3]]), "uids": ["a", "b", "c"]}, indices)
    assert rows["ids"].tolist() == [[7, 3], [5, 1]]
    assert rows["uids"] == ["c", "a"]


@pytest.mark.parametrize(
    "call", [lambda: pad_batch_to_multiple(batch_of(3), 1.5), lambda: select_rows(batch_of(3), [1.0])]
)
def test_fractions_are_no_numbers_of_rows(call):
    with pytest.raises(TypeError, match=r"(multiple|indices): expected an integer, got 1\.[05]"):
        call()


def test_padding_functions_are_here_too():
    assert iter_microbatches is po.iter_microbatches
    assert trim_padding is po.trim_padding
