"""packing_ops.data.rows on batches of other classes than dict and list, and what is per row in them."""

import pickle
from collections import OrderedDict, UserList, defaultdict, deque

import numpy as np
import pytest
import torch

from packing_ops.data import (
    empty_like_batch,
    normalize_advantages,
    num_rows,
    pad_batch_to_multiple,
    select_rows,
    slice_batch,
    stage_chunks,
)


class Images:
    """One tensor per row, each of another shape; no list, and never empty."""

    def __init__(self, tensors):
        if not tensors:
            raise ValueError("Images of no tensors")
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors)

    def __getitem__(self, index):
        return Images(self.tensors[index]) if isinstance(index, slice) else self.tensors[index]


class Rollouts(dict):
    """A dict of tensors and Images that checks its rows, whose length is their number, with metadata next to it."""

    metadata = None

    def __init__(self, fields):
        super().__init__(fields)
        self._rows = {len(value) for value in self.values() if value is not None}
        if len(self._rows) > 1 or not all(isinstance(v, (torch.Tensor, Images, type(None))) for v in self.values()):
            raise ValueError("rows that differ, or a field of another kind")

    def __len__(self):
        return next(iter(self._rows))

    def __getitem__(self, index):
        if isinstance(index, slice):
            raise AssertionError("the fields are asked for, not the class")
        return super().__getitem__(index)


BOUNDARIES = [(0, 3), (3, 7)]


def rollouts(rows=7):
    """Everything that SkyRL's TrainingInputBatch has: row i is identified by i."""
    ids = torch.arange(rows)[:, None].expand(rows, 5).clone()
    batch = Rollouts(
        {
            "sequences": ids,
            "loss_mask": torch.ones(rows, 5),
            "values": None,
            "rollout_expert_indices": ids[:, :, None, None].repeat(1, 1, 2, 3),
            "router_padding_mask": torch.zeros(rows, 5, dtype=torch.bool),
            "pixel_values": Images([torch.full((i + 1, 3), float(i)) for i in range(rows)]),
        }
    )
    batch.metadata = {
        "uids": [f"u{i}" for i in range(rows)],
        "is_last_step": [i % 2 == 1 for i in range(rows)],
        "policy_mini_batch_boundaries": BOUNDARIES,
        "response_length": 5,
    }
    return batch


def rows_of(batch):
    """The rows' numbers, which every field and the metadata must tell alike."""
    assert type(batch) is Rollouts
    assert type(batch["pixel_values"]) is Images
    numbers = batch["sequences"][:, 0].tolist()
    assert [int(image[0, 0]) for image in batch["pixel_values"].tensors] == numbers
    assert [image.shape for image in batch["pixel_values"].tensors] == [(i + 1, 3) for i in numbers]
    assert batch["values"] is None
    assert batch.metadata["response_length"] == 5
    assert batch.metadata["policy_mini_batch_boundaries"] == BOUNDARIES
    return numbers


def uids_of(batch):
    return [int(uid[1:]) for uid in batch.metadata["uids"]]


# --- a user's class, with metadata and list-likes ---


def test_rows_of_a_class_of_ones_own():
    batch = rollouts()
    assert num_rows(batch) == 7
    for part, numbers in (
        (slice_batch(batch, 2, 5), [2, 3, 4]),
        (select_rows(batch, [6, 0, 6]), [6, 0, 6]),
        (pad_batch_to_multiple(batch, 5), [*range(7), 0, 0, 0]),
    ):
        assert rows_of(part) == uids_of(part) == numbers
        assert part.metadata["is_last_step"] == [i % 2 == 1 for i in numbers]
        assert part.metadata is not batch.metadata
    assert rows_of(batch) == uids_of(batch) == list(range(7)), "left as it was"
    assert pad_batch_to_multiple(batch, 7) is batch


def test_chunks_have_their_own_images_and_uids():
    """7 rows, two ranks: no chunk of 2 rows with 5 images."""
    chunks = stage_chunks(rollouts(), BOUNDARIES, 2)
    assert [[rows_of(chunk) for chunk in ranks] for ranks in chunks] == [[[0, 1], [2, 0]], [[3, 4], [5, 6]]]
    assert [[uids_of(chunk) for chunk in ranks] for ranks in chunks] == [[[0, 1], [2, 0]], [[3, 4], [5, 6]]]
    assert chunks[0][1]["loss_mask"].sum(1).tolist() == [5, 0]


def test_put_gets_the_class_with_memory_of_its_own():
    batch = rollouts(128)
    whole = torch.ones(128, 100, 3)
    batch = Rollouts({**batch, "pixel_values": Images(list(whole.unbind()))})
    batch.metadata = {"rewards": torch.zeros(128, 64), "turns": list(torch.zeros(128, 64).unbind())}
    (ranks,) = stage_chunks(batch, [(0, 128)], 8, put=lambda chunk: (chunk, pickle.dumps(dict(chunk) | chunk.metadata)))
    assert all(type(chunk) is Rollouts and len(chunk) == 16 for chunk, _ in ranks)
    assert sum(len(data) for _, data in ranks) < 1.3 * len(pickle.dumps(dict(batch) | batch.metadata))


def test_metadata_may_be_none_or_a_field():
    batch = Rollouts({"ids": torch.arange(3)})
    assert slice_batch(batch, 0, 2).metadata is None
    assert slice_batch({"ids": torch.arange(3), "metadata": None}, 0, 2)["metadata"] is None
    both = Rollouts({"ids": torch.arange(3)})
    both.metadata = {"nested": {"uids": ["a", "b", "c"]}, "step": 4}
    assert slice_batch(both, 1, 3).metadata == {"nested": {"uids": ["b", "c"]}, "step": 4}
    both.metadata = {"uids": ["a", "b"]}
    with pytest.raises(ValueError, match="uids: expected 3 rows like ids, got 2; batch_keys"):
        slice_batch(both, 0, 1)


def test_attributes_that_the_class_does_not_set_are_carried():
    batch = Rollouts({"ids": torch.arange(3)})
    batch.step = 7
    assert slice_batch(batch, 0, 2).step == 7
    assert len(slice_batch(batch, 0, 2)) == 2


def test_dicts_of_the_standard_library_become_dicts():
    for batch in (OrderedDict(ids=torch.arange(3)), defaultdict(list, ids=torch.arange(3))):
        part = slice_batch(batch, 1, 3)
        assert type(part) is dict
        assert part["ids"].tolist() == [1, 2]


def test_a_class_that_is_not_made_of_a_dict_is_named():
    class Fixed(dict):
        def __init__(self):
            super().__init__(ids=torch.arange(3))

    with pytest.raises(TypeError, match=r"batch: expected a dict or a class made of one, Fixed\(fields\), got"):
        slice_batch(Fixed(), 0, 1)


def test_no_rows_of_a_class_of_ones_own():
    batch = Rollouts({"ids": torch.arange(3), "values": None})
    batch.metadata = {"uids": ["a", "b", "c"], "policy_mini_batch_boundaries": BOUNDARIES}
    empty = empty_like_batch(batch)
    assert (type(empty), empty["ids"].shape, empty["values"]) == (Rollouts, (0,), None)
    assert empty.metadata == {"uids": [], "policy_mini_batch_boundaries": BOUNDARIES}
    with pytest.raises(ValueError, match="pixel_values: expected Images to be made of 0 rows, got ValueError: Images"):
        empty_like_batch(rollouts())
    with pytest.raises(ValueError, match=r"pixel_values: expected Images to have rows 2 to 2, got ValueError: Images"):
        slice_batch(rollouts(), 2, 2)
    packed = Rollouts({"input_ids": torch.arange(3), "cu_seqlens": torch.tensor([0, 1, 3])[:3]})
    packed.metadata = {"policy_mini_batch_boundaries": [(0, 1), (1, 2)], "uids": ["a", "b"]}
    empty = empty_like_batch({**packed, "metadata": packed.metadata})
    assert empty["metadata"] == {"policy_mini_batch_boundaries": [(0, 1), (1, 2)], "uids": []}


@pytest.mark.parametrize("make", [list, UserList, np.array, torch.tensor])
def test_what_has_a_length_and_slices_is_rows(make):
    batch = {"ids": torch.arange(5), "x": make([10, 11, 12, 13, 14])}
    assert [int(x) for x in slice_batch(batch, 1, 3)["x"]] == [11, 12]
    assert [int(x) for x in select_rows(batch, [4, 0])["x"]] == [14, 10]
    assert [int(x) for x in pad_batch_to_multiple(batch, 6, fill={"x": 7})["x"]] == [10, 11, 12, 13, 14, 7]
    assert type(slice_batch(batch, 1, 3)["x"]) is type(batch["x"])


def test_what_has_a_length_and_no_slices_is_named():
    batch = {"ids": torch.arange(3), "x": deque([1, 2, 3])}
    with pytest.raises(ValueError, match=r"x: expected deque to have rows 0 to 1, got TypeError: .*; batch_keys"):
        slice_batch(batch, 0, 1)
    assert slice_batch(batch, 0, 1, batch_keys=["x"])["x"] is batch["x"]
    batch = {"ids": torch.arange(3), "x": range(3)}
    assert slice_batch(batch, 1, 3)["x"] == range(1, 3)
    with pytest.raises(ValueError, match="x: expected range to be made of 2 rows, got TypeError"):
        select_rows(batch, [2, 0])
    with pytest.raises(ValueError, match="x: expected 3 rows like ids, got 2"):
        num_rows({"ids": torch.arange(3), "x": deque([1, 2])})


# --- what is per row and what is not ---


@pytest.mark.parametrize("rows", [7, 2])
@pytest.mark.parametrize("make", [list, torch.tensor, np.array])
def test_boundaries_pass_whole(rows, make):
    """Also where they are as many as the rows."""
    boundaries = make(BOUNDARIES if rows == 7 else [(0, 1), (1, 2)])
    batch = {"ids": torch.arange(rows), "policy_mini_batch_boundaries": boundaries, "prompt_boundaries": boundaries}
    for nested in (batch, {"ids": batch["ids"], "metadata": batch}):
        for part in (
            slice_batch(nested, 1, 2),
            select_rows(nested, [1, 1]),
            pad_batch_to_multiple(nested, 3, fill={}),
            empty_like_batch(nested),
        ):
            assert part.get("metadata", part)["policy_mini_batch_boundaries"] is boundaries
    (first, *_), *_ = stage_chunks(batch, [(0, 1), (1, rows)], 1)
    assert first["prompt_boundaries"] is boundaries


def test_boundaries_on_a_gpu_are_not_read():
    """The meta device, where a number that is asked for is an error: by their shape, and not where rows have it too."""
    boundaries = torch.empty(2, 2, dtype=torch.int64, device="meta")
    batch = {"ids": torch.arange(7), "boundaries": boundaries}
    assert slice_batch(batch, 1, 3)["boundaries"] is boundaries
    with pytest.raises(ValueError, match=r"boundaries: expected in row_keys .* row_keys=\('boundaries',\)"):
        num_rows(batch | {"ids": torch.arange(2)})
    assert num_rows({"ids": torch.arange(2), "boundaries": boundaries}, row_keys=["boundaries"]) == 2


def test_what_only_ends_in_boundaries_is_rows():
    batch = {"ids": torch.arange(2), "turn_boundaries": [[0, 4, 9], [0, 3]]}
    assert slice_batch(batch, 1, 2)["turn_boundaries"] == [[0, 3]]
    spans = torch.tensor([[2, 4], [3, 9]])
    assert slice_batch({"ids": torch.arange(2), "boundaries": spans}, 1, 2)["boundaries"].tolist() == [[3, 9]]


def test_what_may_be_either_is_asked():
    """A list of (start, end) pairs that follow on each other to the last row, as many as rows, under another name."""
    batch = {"ids": torch.arange(2), "spans": [(0, 1), (1, 2)]}
    with pytest.raises(
        ValueError,
        match=r"spans: expected in row_keys .* row_keys=\('spans',\) .* batch_keys=\('spans',\)",
    ):
        slice_batch(batch, 0, 1)
    assert slice_batch(batch, 0, 1, row_keys=("spans",))["spans"] == [(0, 1)]
    assert slice_batch(batch, 0, 1, batch_keys=("spans",))["spans"] == [(0, 1), (1, 2)]
    for rows in ([(2, 3), (3, 7)], [(0, 3), (3, 7)], [[0, 1], [1, 2]]):
        assert slice_batch({"ids": torch.arange(2), "sizes": rows}, 0, 1)["sizes"] == rows[:1]


def test_chunks_are_not_guessed_anew():
    """What is rows of the whole batch stays so in one row of it, and what is none."""
    batch = {
        "ids": torch.arange(3),
        "loss_mask": torch.ones(3),
        "spans": [(0, 1), (0, 1), (0, 9)],
        "turn_boundaries": [[(0, 2)], [(0, 4)], [(0, 9)]],
        "prompt_boundaries": torch.empty(2, 2, dtype=torch.int64, device="meta"),
        "none": None,
        "metadata": {"step": 4},
    }
    ((first, second, third),) = stage_chunks(batch, [(0, 3)], 3)
    assert [chunk["spans"] for chunk in (first, second, third)] == [[(0, 1)], [(0, 1)], [(0, 9)]]
    assert second["turn_boundaries"] == [[(0, 4)]]
    assert third["metadata"] == {"step": 4}
    ((pair, _),) = stage_chunks(batch, [(0, 3)], 2)
    assert pair["prompt_boundaries"] is batch["prompt_boundaries"]


def test_keys_say_what_is_per_row():
    batch = {
        "ids": torch.arange(7),
        "table": torch.arange(64),
        "metadata": {"layers": [1, 2, 3], "timings": {"steps": [0.1, 0.2]}, "shape": (1, 2, 3, 4, 5, 6, 7)},
    }
    with pytest.raises(ValueError, match=r"table: expected 7 rows like ids, got 64; batch_keys=\('table',\) carries"):
        num_rows(batch)
    keys = {"batch_keys": ("table", "layers", "timings"), "row_keys": ["shape"]}
    for part in (
        slice_batch(batch, 2, 4, **keys),
        stage_chunks(batch | {"loss_mask": torch.ones(7)}, [(2 - 2, 7)], 4, **keys)[0][1],
    ):
        assert part["ids"].tolist() == [2, 3]
        assert part["table"] is batch["table"]
        assert part["metadata"] == batch["metadata"] | {"shape": (3, 4)}
    assert num_rows(batch, **keys) == 7
    assert select_rows(batch, [6], **keys)["metadata"]["shape"] == (7,)
    assert pad_batch_to_multiple(batch, 8, fill={"ids": 9}, **keys)["ids"].tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert empty_like_batch(batch, **keys)["metadata"]["timings"] == {"steps": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"row_keys": ["uid"]}, r"row_keys: expected names in the batch, got 'uid'; it has \['ids', 'metadata', 'scale', 'uids'\]"),
        ({"batch_keys": ["uid"]}, "batch_keys: expected names in the batch, got 'uid'"),
        ({"batch_keys": ["uids"], "row_keys": ["uids"]}, "row_keys, batch_keys: expected a name in one of them, got 'uids' in both"),
        ({"row_keys": ["metadata"]}, "metadata: expected rows, as row_keys says, got dict"),
        ({"row_keys": ["scale"]}, "scale: expected rows, as row_keys says, got Tensor"),
        ({"batch_keys": "uids"}, "batch_keys: expected a list of names, got 'uids'"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_meant_are_named(keys, message):
    with pytest.raises((ValueError, TypeError), match=message):
        slice_batch({"ids": torch.arange(2), "metadata": {"uids": ["a", "b"], "scale": torch.ones(())}}, 0, 1, **keys)


# --- rows after the last boundary ---


def test_padding_after_the_last_boundary_is_not_staged():
    """Boundaries of 7 rows, and then the batch was padded to 8."""
    batch = pad_batch_to_multiple(rollouts(), 8)
    chunks = stage_chunks(batch, BOUNDARIES, 2)
    assert [[uids_of(chunk) for chunk in ranks] for ranks in chunks] == [[[0, 1], [2, 0]], [[3, 4], [5, 6]]]
    advantages = torch.randn(8, 5)
    for reduction in ("token_mean", "sequence_mean"):
        scaled = normalize_advantages(advantages, batch["loss_mask"], BOUNDARIES, reduction)
        assert torch.equal(scaled[:7], normalize_advantages(advantages[:7], torch.ones(7, 5), BOUNDARIES, reduction))
        assert not scaled[7].any()


@pytest.mark.parametrize("mask", [[True, False], torch.tensor([True, False]), np.array([True, False])])
def test_a_mask_is_no_row_numbers(mask):
    """True would be row 1."""
    with pytest.raises(TypeError, match=r"indices: expected row numbers, got .*True.* \(bool"):
        select_rows({"ids": torch.arange(2)}, mask)


def test_rows_of_a_pandas_column_are_its_places():
    """Whatever its labels are, as after a shuffle."""
    pandas = pytest.importorskip("pandas")
    batch = {
        "ids": torch.arange(3),
        "reward": pandas.Series([10, 11, 12], index=[2, 0, 1]),
        "table": pandas.DataFrame({"a": [10, 11, 12]}, index=[2, 0, 1]),
    }
    for part, wanted in (
        (slice_batch(batch, 1, 3), [11, 12]),
        (select_rows(batch, [0, 2, 0]), [10, 12, 10]),
        (pad_batch_to_multiple(batch, 2, fill={}), [10, 11, 12, 10]),
        (empty_like_batch(batch), []),
    ):
        assert part["reward"].tolist() == part["table"]["a"].tolist() == wanted
    assert pad_batch_to_multiple(batch, 2, fill={"reward": 0})["reward"].tolist() == [10, 11, 12, 0]


def test_rows_that_are_objects_in_an_array():
    """Each is filled as it would be in a list, and dummy rows are separate copies."""
    labels = np.empty(2, object)
    labels[:] = [[1, 2], [3]]
    tensors = np.empty(2, object)
    tensors[0], tensors[1] = torch.tensor([1, 2]), torch.tensor([3])
    uids = np.array(["a", "b"], object)
    batch = {"labels": labels, "chosen_labels": tensors, "turns": labels, "uids": uids, "ids": torch.arange(2)}
    padded = pad_batch_to_multiple(batch, 4, fill={"uids": lambda copies: [f"pad{i}" for i in range(len(copies))]})
    assert padded["labels"].tolist() == [[1, 2], [3], [-100, -100], [-100, -100]]
    assert [row.tolist() for row in padded["chosen_labels"]] == [[1, 2], [3], [-100, -100], [-100, -100]]
    assert padded["turns"].tolist() == [[1, 2], [3], [1, 2], [1, 2]]
    assert padded["turns"][2] is not labels[0]
    assert padded["turns"][2] is not padded["turns"][3]
    assert padded["uids"].tolist() == ["a", "b", "pad0", "pad1"]


# --- what is refused, and what is not guessed ---


@pytest.mark.parametrize(
    "pairs",
    [
        [(3, 5), (5, 7)],
        [(0, 3), (4, 7)],
        torch.tensor([[3, 5], [5, 7]]),
        [0, 3],
        torch.tensor([0, 3]),
    ],
)
def test_boundaries_of_another_form_are_asked(pairs):
    """Those of a part of a batch, with gaps, or only ends: cut with the rows they would be wrong without a word."""
    batch = {"ids": torch.arange(2), "prompt_boundaries": pairs}
    with pytest.raises(ValueError, match=r"prompt_boundaries: expected in row_keys or batch_keys"):
        slice_batch(batch, 0, 1)
    assert slice_batch(batch, 0, 1, batch_keys=("prompt_boundaries",))["prompt_boundaries"] is pairs
    assert len(slice_batch(batch, 0, 1, row_keys=("prompt_boundaries",))["prompt_boundaries"]) == 1


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_boundaries_of_other_integers_pass_whole(number):
    pairs = [(number(0), number(3)), (number(3), number(7))]
    assert slice_batch({"ids": torch.arange(2), "boundaries": pairs}, 0, 1)["boundaries"] is pairs
    pairs = [torch.tensor([0, 3]), torch.tensor([3, 7])]
    assert slice_batch({"ids": torch.arange(2), "boundaries": pairs}, 0, 1)["boundaries"] is pairs


def test_a_tuple_of_as_many_tensors_as_rows_is_asked():
    pixels = (torch.zeros(1), torch.zeros(3))
    with pytest.raises(ValueError, match=r"pixel_values: expected in row_keys .* row_keys=\('pixel_values',\)"):
        slice_batch({"ids": torch.arange(2), "pixel_values": pixels}, 0, 1)
    assert slice_batch({"ids": torch.arange(3), "pixel_values": pixels, "size": (2, 2, 2)}, 0, 1)["size"] == (2, 2, 2)
    part = slice_batch({"ids": torch.arange(2), "pixel_values": pixels}, 0, 1, row_keys=["pixel_values"])
    assert part["pixel_values"] == pixels[:1]


@pytest.mark.parametrize("other", ["preference", 3, {"a": 1}, None])
def test_a_name_that_has_rows_in_one_place_alone(other):
    batch = {"labels": torch.arange(4), "metadata": {"labels": other}}
    ((first, _),) = stage_chunks(batch, [(0, 4)], 2)
    assert first["labels"].tolist() == [0, 1]
    assert first["metadata"]["labels"] == other
    with pytest.raises(TypeError, match="metadata_: expected rows, as row_keys says, got str"):
        slice_batch(batch | {"metadata_": "x"}, 0, 1, row_keys=["labels", "metadata_"])


class Sized(dict):
    """As tensordict's: a size next to its fields, which a dict of them does not say."""

    batch_size = torch.Size([3])


@pytest.mark.parametrize("wrap", [lambda batch: batch, lambda batch: {"batch": batch}])
def test_a_batch_with_a_size_of_its_own_is_refused(wrap):
    batch = wrap(Sized(ids=torch.arange(3)))
    for call in (lambda: slice_batch(batch, 0, 1), lambda: stage_chunks(batch, [(0, 3)], 1), lambda: num_rows(batch)):
        with pytest.raises(
            TypeError, match=r"batch: expected a Mapping without a batch_size of its own, got Sized .*\[3\]"
        ):
            call()
    extra = {"ids": torch.arange(3), "batch": Sized(ids=torch.arange(3))}
    assert slice_batch(extra, 0, 1, batch_keys=["batch"])["batch"] is extra["batch"]


@pytest.mark.parametrize("batch", [None, [torch.arange(3)], torch.arange(3)])
def test_what_is_no_mapping_is_named(batch):
    for call in (
        lambda: num_rows(batch),
        lambda: pad_batch_to_multiple(batch, 2),
        lambda: empty_like_batch(batch),
        lambda: stage_chunks(batch, [(0, 3)], 1),
    ):
        with pytest.raises(TypeError, match="batch: expected a dict or another Mapping, got"):
            call()


def test_names_may_be_numbers():
    batch = {0: torch.arange(3), "input_ids": torch.arange(3), "cu_seqlens": torch.tensor([0, 3])}
    assert empty_like_batch(batch)[0].shape == (0,)
    assert slice_batch({0: torch.arange(3), "a": [1, 2, 3]}, 0, 1)["a"] == [1]


def test_fills_that_are_no_fills():
    batch = {"ids": torch.arange(3)}
    for fill in (0, ["ids"], "ids"):
        with pytest.raises(TypeError, match="fill: expected a dict of values by name, got"):
            pad_batch_to_multiple(batch, 2, fill=fill)
    counts = {"counts": np.ones((3, 2), np.int32)}
    for made, got in (
        (lambda rows: rows + 0.5, r"float64 \(1, 2\)"),
        (lambda rows: np.ones(1, np.int32), r"int32 \(1,\)"),
    ):
        with pytest.raises(ValueError, match=rf"fill: expected int32 \(1, 2\) for 'counts', got {got}"):
            pad_batch_to_multiple(counts, 2, fill={"counts": made})
    nan = pad_batch_to_multiple({"x": np.zeros((1, 2), np.float32)}, 2, fill={"x": float("nan")})["x"]
    assert np.isnan(nan[1]).all()


@pytest.mark.parametrize("boundaries", [None, 3, [0, 3], [(0, 1, 3)], "ab", torch.tensor([0, 3])])
def test_boundaries_that_are_no_pairs(boundaries):
    for call in (
        lambda: stage_chunks({"loss_mask": torch.ones(3)}, boundaries, 1),
        lambda: normalize_advantages(torch.ones(3, 2), torch.ones(3, 2), boundaries, "token_mean"),
    ):
        with pytest.raises((TypeError, ValueError), match=r"boundaries: expected \(start, end\) pairs"):
            call()


def test_no_rows_of_nested_tensors():
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    batch = {"ids": torch.arange(2), "loss_mask": nested}
    for part in (slice_batch(batch, 1, 1), select_rows(batch, []), empty_like_batch(batch)):
        assert len(part["loss_mask"]) == 0
        assert part["loss_mask"].values().shape == (0, 4)
        assert num_rows(part) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_other_layout_are_named():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="x: expected nested tensors of layout jagged, got strided"):
        slice_batch({"ids": torch.arange(2), "x": nested}, 0, 1)
