"""PackedStream: every example once, whatever ends, raises or is killed; the rows that were left after a checkpoint."""

import copy
import itertools
import json
import os
import pickle
import random
import signal

import pytest
import torch
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from packing_ops.data import PackedCollator, PackedStream, PaddingFreeCollator, image_sizes

WORKLOADS = json.loads((ROOT / "benchmarks" / "workloads.json").read_text())["workloads"]


def examples_of(lengths):
    """Every token is the number of its example."""
    return [{"input_ids": [number] * length} for number, length in enumerate(lengths)]


def numbers(row):
    return [int(example["input_ids"][0]) for example in row]


def rows_of(stream):
    return [numbers(row) for row in stream]


DRAW = random.Random(0)
LENGTHS = [DRAW.randint(1, 60) for _ in range(200)]
EXAMPLES = examples_of(LENGTHS)
WHOLE = rows_of(PackedStream(EXAMPLES, 100, buffer=20))


class Restarting:
    """A source that can say where it is."""

    def __init__(self, examples):
        self.examples, self.start, self.now = examples, 0, 0

    def __iter__(self):
        first, self.start = self.start, 0
        for number, example in enumerate(self.examples[first:], start=first + 1):
            self.now = number
            yield example

    def state_dict(self):
        return {"now": self.now}

    def load_state_dict(self, state):
        self.start = self.now = state["now"]


class Failing:
    """Raises in place of one example, or ends its process there, if that is a DataLoader's worker."""

    def __init__(self, examples, number, signalled=False):
        self.examples, self.number, self.signalled = examples, number, signalled

    def __iter__(self):
        for number, example in enumerate(self.examples):
            if number == self.number and self.signalled:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == self.number:
                raise OSError("the network is gone")
            yield example


SOURCES = {"list": list, "with a state": Restarting}
OPTIONS = {
    "capacity": st.integers(60, 150),
    "buffer": st.integers(1, 30),
    "seed": st.one_of(st.none(), st.integers(0, 3)),
    "document_multiple": st.sampled_from([1, 4]),
    "row_multiple": st.sampled_from([1, 6]),
}


# --- the rows of an epoch ---


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), dp_size=st.integers(1, 4), **OPTIONS)
def test_every_example_is_in_one_row_of_one_rank(lengths, dp_size, capacity, **options):
    examples = examples_of(lengths)
    streams = [PackedStream(examples, capacity, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]
    ranks = [rows_of(stream) for stream in streams]
    assert len({len(rows) for rows in ranks}) == 1
    rows = list(itertools.chain(*ranks))
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    multiple, whole = options["document_multiple"], options["row_multiple"]
    slots = [sum(-(-lengths[i] // multiple) * multiple for i in row) for row in rows]
    assert all(-(-own // whole) * whole <= capacity for own in slots)
    # Empty only in the last step, and only where every other row has one example.
    assert all(row or step == len(own) - 1 for own in ranks for step, row in enumerate(own))
    assert all(map(len, rows)) or all(len(own[-1]) <= 1 for own in ranks)
    progress = streams[0].progress
    assert (progress.examples_read, progress.examples_waiting) == (len(lengths), 0)
    assert (progress.rows, progress.tokens) == (len(rows), sum(lengths))


def test_rows_of_one_step_are_dealt_to_the_ranks():
    dealt = [rows_of(PackedStream(EXAMPLES, 100, buffer=20, dp_rank=rank, dp_size=3)) for rank in range(3)]
    assert [dealt[row % 3][row // 3] for row in range(len(WHOLE) // 3 * 3)] == WHOLE[: len(WHOLE) // 3 * 3]
    left = [rows_of(PackedStream(EXAMPLES[:4], 100, buffer=20, dp_rank=r, dp_size=5, drop_last=True)) for r in range(5)]
    assert left == [[]] * 5


@pytest.mark.parametrize("capacity", [2384, 4096, 8192])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_buffer_of_1000_leaves_at_most_one_slot_in_a_hundred(capacity, seed):
    draw = random.Random(1)
    lengths = [draw.choice(WORKLOADS["sft"]) for _ in range(10_000)]
    stream = PackedStream(examples_of(lengths), capacity, buffer=1000, seed=seed)
    assert sum(map(len, stream)) == len(lengths)
    assert 0 < stream.progress.padding < 0.01


@given(buffer=st.integers(1, 50), seed=st.one_of(st.none(), st.integers(0, 3)))
def test_no_more_examples_are_read_than_the_buffer_holds(buffer, seed):
    stream, done = PackedStream(EXAMPLES, 100, buffer=buffer, seed=seed), 0
    for row in stream:
        done += len(row)
        assert stream.progress.examples_waiting == stream.progress.examples_read - done < buffer


def test_in_order_no_example_waits_for_ever():
    rows = rows_of(PackedStream(EXAMPLES, 100, buffer=20, seed=None))
    first = [min(row) for row in rows]
    assert first == sorted(first)


def test_epochs_are_drawn_differently_and_the_same_again():
    stream = PackedStream(EXAMPLES, 100, buffer=20)
    assert rows_of(stream) == rows_of(stream) == WHOLE
    stream.set_epoch(1)
    second = rows_of(stream)
    assert second != WHOLE
    assert sorted(itertools.chain(*second)) == list(range(len(EXAMPLES)))
    assert rows_of(PackedStream(EXAMPLES, 100, buffer=20, seed=1)) != WHOLE


# --- several budgets, examples over them ---


def with_images(number, tokens, images, patches):
    grids = [[1, 1, patches // images]] * images if images else None
    return {"input_ids": torch.full((tokens,), number), "image_grid_thw": grids, "video_grid_thw": None}


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(3, 9)), min_size=1, max_size=40))
def test_no_row_exceeds_any_budget(sizes):
    examples = [with_images(i, *size) for i, size in enumerate(sizes)]
    stream = PackedStream(examples, {"images": 4, "tokens": 60, "patches": 20}, buffer=10)
    rows = list(stream)
    assert sorted(n for row in rows for n in numbers(row)) == list(range(len(examples)))
    for row in rows:
        grids = [grid for example in row for grid in example["image_grid_thw"] or []]
        assert sum(len(example["input_ids"]) for example in row) <= 60
        assert len(grids) <= 4
        assert sum(grid[2] for grid in grids) <= 20


def test_sizes_without_a_grid():
    assert image_sizes({"pixel_values": [[[0.5] * 3] * 4] * 2}) == {"images": 2, "patches": 8}
    assert image_sizes({"input_ids": [1]}) == {"images": 0, "patches": 0}
    examples = [{"input_ids": [1], "pixel_values": torch.zeros(2, 3, 8, 8)}]
    assert len(rows_of(PackedStream(examples, {"tokens": 9, "images": 2}))) == 1
    with pytest.raises(ValueError, match=r"^sizes: expected patches too, got \['images'\] in example 0$"):
        rows_of(PackedStream(examples, {"tokens": 9, "patches": 64}))


def test_examples_without_an_image_have_no_columns_of_images():
    examples = [{"input_ids": [i] * 4, **({"image_grid_thw": [[1, 2, 2]]} if i % 2 else {})} for i in range(6)]
    for first in (0, 1):
        rows = list(PackedStream(examples[first:], {"tokens": 12, "images": 1}, seed=None))
        assert sorted(n for row in rows for n in numbers(row)) == [*range(first, 6)]
        assert all(sum("image_grid_thw" in example for example in row) <= 1 for row in rows)


def test_images_are_not_cut():
    examples = [{"input_ids": [1] * 4, "pixel_values": torch.zeros(9, 3)}, {"input_ids": [2] * 9, "pixel_values": None}]
    assert sorted(len(row[0]["input_ids"]) for row in PackedStream(examples, 6, overlong="truncate")) == [4, 6]
    examples[1]["pixel_values"] = torch.zeros(9, 3)
    stream = PackedStream(examples, 6, overlong="truncate")
    with pytest.raises(
        ValueError, match=r"^pixel_values: expected an example of text to cut, got .* 9 tokens of example 1;"
    ):
        rows_of(stream)
    assert stream.state_dict()["unchecked"] == [examples[1]]


def test_sizes_of_any_kind():
    stream = PackedStream(EXAMPLES, {"tokens": 100, "examples": 2}, buffer=20, sizes=lambda example: {"examples": 1})
    assert max(len(row) for row in stream) == 2
    with pytest.raises(ValueError, match=r"^sizes: expected images too, got \['examples'\] in example 0$"):
        rows_of(PackedStream(EXAMPLES, {"tokens": 100, "images": 2}, sizes=lambda example: {"examples": 1}))


LONG = examples_of([5, 30, 7, 40, 9, 3])


def test_overlong_examples():
    with pytest.raises(ValueError, match=r"^capacity: expected at least the 30 slots of example 1, got 20; overlong="):
        rows_of(PackedStream(LONG, 20))
    for overlong, wanted in ("drop", [0, 2, 4, 5]), ("own", range(6)), ("truncate", range(6)):
        stream = PackedStream(LONG, 20, overlong=overlong, seed=None)
        rows = list(stream)
        assert sorted(n for row in rows for n in numbers(row)) == list(wanted)
        tokens = [sum(len(example["input_ids"]) for example in row) for row in rows]
        assert all(own <= 20 or len(row) == 1 for own, row in zip(tokens, rows, strict=True))
        assert stream.progress.lost_tokens == {"drop": 70, "own": 0, "truncate": 30}[overlong]
        assert (stream.progress.dropped, stream.progress.truncated) == {"drop": (2, 0), "truncate": (0, 2)}.get(
            overlong, (0, 0)
        )


def test_a_budget_of_images_decides_what_is_overlong():
    examples = [with_images(0, 5, 3, 9), with_images(1, 5, 1, 3)]
    with pytest.raises(ValueError, match=r"^capacity: expected at least the 3 images of example 0, got 2; overlong="):
        rows_of(PackedStream(examples, {"tokens": 20, "images": 2}))
    own = PackedStream(examples, {"tokens": 20, "images": 2}, overlong="own", seed=None)
    assert rows_of(own) == [[0], [1]]


@pytest.mark.parametrize("overlong", ["drop", "own"])
def test_an_example_over_every_budget(overlong):
    examples = [with_images(0, 5, 1, 3), with_images(1, 30, 4, 40), with_images(2, 5, 1, 3)]
    budgets = {"tokens": 20, "images": 2, "patches": 20}
    with pytest.raises(ValueError, match=r"^capacity: expected at least the 30 slots of example 1, got 20; overlong="):
        rows_of(PackedStream(examples, budgets))
    stream = PackedStream(examples, budgets, overlong=overlong, seed=None)
    assert sorted(rows_of(stream)) == ([[0, 2]] if overlong == "drop" else [[0, 2], [1]])
    assert (stream.progress.dropped, stream.progress.lost_tokens) == ((1, 30) if overlong == "drop" else (0, 0))


def test_truncated_columns_are_as_long_as_the_tokens():
    example = {
        "input_ids": torch.arange(6),
        "labels": [[0, 1, 2, 3, 4, 5]],
        "completion_mask": (0, 0, 0, 1, 1, 1),
        "text": "sixsix",
        "weight": 6,
    }
    ((cut,),) = PackedStream([example], 5, document_multiple=2, overlong="truncate")
    assert cut["input_ids"].tolist() == [0, 1, 2, 3]
    assert (cut["labels"], cut["completion_mask"]) == ([[0, 1, 2, 3]], (0, 0, 0, 1))
    assert (cut["text"], cut["weight"]) == ("sixsix", 6)


def test_copies_begin_anew():
    stream = PackedStream(EXAMPLES, 100, buffer=20)
    next(iter(stream))
    for made in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        assert rows_of(made) == WHOLE


# --- states ---


@settings(deadline=None)
@given(data=st.data(), dp_size=st.integers(1, 3), source=st.sampled_from(sorted(SOURCES)), **OPTIONS)
def test_resumed_after_any_row(data, dp_size, source, capacity, **options):
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=40))
    examples = examples_of(lengths)
    rank = data.draw(st.integers(0, dp_size - 1))
    epoch = data.draw(st.integers(0, 1))

    def stream():
        made = PackedStream(SOURCES[source](examples), capacity, dp_rank=rank, dp_size=dp_size, **options)
        made.set_epoch(epoch)
        return made

    whole = rows_of(stream())
    done, killed = [], stream()
    for _ in range(3):  # killed again and again
        rows = iter(killed)
        done += [numbers(next(rows)) for _ in range(data.draw(st.integers(0, len(whole) - len(done))))]
        by_count = killed.state_dict(batches_done=len(done))
        state = pickle.loads(pickle.dumps(data.draw(st.sampled_from([killed.state_dict(), by_count]))))
        killed = stream()
        killed.load_state_dict(state)
        assert killed.epoch == epoch
    assert done + rows_of(killed) == whole
    assert rows_of(killed) == whole  # a second iteration


@settings(deadline=None)
@given(number=st.integers(0, len(EXAMPLES) - 1), dp_size=st.integers(1, 3), buffer=st.integers(1, 40))
def test_a_source_that_raises_loses_nothing(number, dp_size, buffer):
    options = {"buffer": buffer, "dp_size": dp_size}
    whole = rows_of(PackedStream(EXAMPLES, 100, **options))
    failing, done = PackedStream(Failing(EXAMPLES, number), 100, **options), []
    with pytest.raises(OSError, match="the network is gone"):
        done.extend(numbers(row) for row in failing)  # extend keeps what was there
    resumed = PackedStream(EXAMPLES, 100, **options)
    resumed.load_state_dict(failing.state_dict())
    assert done + rows_of(resumed) == whole


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_ids": [7] * 101}, "capacity: expected at least the 101 slots of example 50, got 100"),
        ({"input_ids": []}, "input_ids: expected at least 1 token, got 0 in example 50"),
        ({"labels": [1]}, r"input_ids: expected in every example, got only \['labels'\] in example 50"),
        (
            {"input_ids": [1], "labels": [1]},
            r"examples: expected columns \['input_ids'\], got \['input_ids', 'labels'\]",
        ),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask: expected no padding, got .* in example 50"),
        ([7], "examples: expected dicts, got list as example 50"),
    ],
)
def test_a_bad_example_is_named_and_named_again_after_a_resume(source, wrong, message):
    examples = [*EXAMPLES[:50], wrong, *EXAMPLES[50:]]
    stream, done = PackedStream(SOURCES[source](examples), 100, buffer=20), []
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        done.extend(numbers(row) for row in stream)
    state = stream.state_dict()
    again = PackedStream(SOURCES[source](examples), 100, buffer=20)
    again.load_state_dict(state)
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        rows_of(again)
    assert again.state_dict()["waiting"] == state["waiting"]
    assert 0 < len(done) < len(WHOLE)


def state_after(count, stream):
    rows = iter(stream)
    for _ in range(count):
        next(rows)
    return stream.state_dict()


OTHERS = {
    "capacity of tokens": {"capacity": 101},
    "buffer": {"buffer": 21},
    "seed": {"seed": None},
    "dp_size": {"dp_size": 2},
    "document_multiple": {"document_multiple": 2},
    "row_multiple": {"row_multiple": 2},
    "overlong": {"overlong": "own"},
    "rows_per_batch": {"rows_per_batch": 2},
    "budgets": {"capacity": {"tokens": 100, "images": 1}},
    "drop_last": {"drop_last": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_streams_are_refused_by_name(name):
    state = state_after(3, PackedStream(EXAMPLES, 100, buffer=20))
    other = PackedStream(EXAMPLES, **{"capacity": 100, "buffer": 20, **OTHERS[name]})
    with pytest.raises(ValueError, match=f"^state_dict: expected that of a stream with {name}="):
        other.load_state_dict(state)


def test_states_of_other_versions_and_objects_are_refused():
    stream = PackedStream(EXAMPLES, 100, buffer=20)
    state = state_after(3, stream)
    with pytest.raises(ValueError, match=r"^state_dict: expected that of a stream with algorithm=1, got 0$"):
        stream.load_state_dict({**state, "algorithm": 0})
    with pytest.raises(ValueError, match=r"^state_dict: expected that of a PackedStream, got none of epoch, rows_done"):
        stream.load_state_dict({"weights": 1})


@pytest.mark.parametrize("source", SOURCES)
def test_states_of_other_examples_are_refused(source):
    state = state_after(3, PackedStream(SOURCES[source](EXAMPLES), 100, buffer=20))
    other = PackedStream(SOURCES[source](EXAMPLES[1:]), 100, buffer=20)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"^state_dict: expected that of these examples, got that of others among"):
        next(iter(other))
    fewer = PackedStream(EXAMPLES[:5], 100, buffer=20)
    fewer.load_state_dict(state_after(3, PackedStream(EXAMPLES, 100, buffer=20)))
    with pytest.raises(ValueError, match=r"^state_dict: expected that of the 5 examples that there are, got "):
        next(iter(fewer))
    fewer.load_state_dict(PackedStream(EXAMPLES, 100, buffer=20).state_dict(batches_done=9))
    with pytest.raises(ValueError, match=r"^state_dict: expected at most the \d rows of the examples, got 9$"):
        next(iter(fewer))


# --- a stream that ends too early ---


def test_a_rank_whose_examples_end_before_raises():
    streams = [PackedStream(EXAMPLES[:count], 100, buffer=20, num_batches=20) for count in (200, 30)]
    assert rows_of(streams[0]) == WHOLE[:20]
    done = []
    with pytest.raises(ValueError, match=r"^examples: expected enough for num_batches=20, got \d+ batches of them$"):
        done.extend(rows_of(streams[1]))


def test_no_examples_are_an_error():
    with pytest.raises(ValueError, match=r"^examples: expected at least one in epoch 0, got none$"):
        rows_of(PackedStream([], 100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": iter(EXAMPLES)}, "examples: expected an iterable that starts again"),
        ({"examples": {"input_ids": [[1]]}}, "examples: expected an iterable of dicts, got dict"),
        ({"examples": 7}, "examples: expected an iterable of dicts, got int"),
        ({"capacity": 0}, "capacity: expected at least 1 token, got 0"),
        ({"capacity": {"images": 1}}, r"capacity: expected tokens among the budgets, got \['images'\]"),
        ({"capacity": {"tokens": 5, "images": 0}}, "capacity of images: expected at least 1, got 0"),
        ({"buffer": 0}, "buffer: expected at least 1 example, got 0"),
        ({"seed": 0.5}, "seed: expected an integer"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank: expected 0 to 1 for dp_size=2, got 2"),
        ({"row_multiple": 101}, "capacity: expected room for a document of document_multiple=1 slots"),
        ({"document_multiple": 64, "row_multiple": 60}, "capacity: expected room for a document"),
        ({"overlong": "split"}, "overlong: expected 'error', 'drop', 'own' or 'truncate', got 'split'"),
        (
            {"overlong": "truncate", "capacity": {"tokens": 9, "images": 1}},
            "overlong: expected 'error', 'drop' or 'own'",
        ),
        ({"rows_per_batch": 0}, "rows_per_batch: expected at least 1 row, got 0"),
        ({"num_batches": 0}, "num_batches: expected at least 1 batch, got 0"),
    ],
)
def test_arguments_that_are_out_of_range(arguments, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        PackedStream(**{"examples": EXAMPLES, "capacity": 100, **arguments})


# --- collators ---


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_collators_take_rows(batch_size):
    stream = PackedStream(EXAMPLES, 100, buffer=20, rows_per_batch=batch_size or 1)
    loader = DataLoader(stream, batch_size=batch_size, collate_fn=PaddingFreeCollator(return_seq_idx=False))
    found = [batch["input_ids"][0].tolist() for batch in loader]
    together = [itertools.chain(*WHOLE[i : i + (batch_size or 1)]) for i in range(0, len(WHOLE), batch_size or 1)]
    assert found == [[n for n in batch for _ in range(LENGTHS[n])] for batch in together]
    examples = [{**example, "num_actions": 1} for example in EXAMPLES[:20]]
    row = next(iter(PackedStream(examples, 100)))
    assert torch.equal(PackedCollator(100)([row])["sequences"], PackedCollator(100)(row)["sequences"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_rows_in_a_batch_than_the_stream_counts_are_refused(num_workers, workers_end):
    stream = PackedStream(EXAMPLES, 100, buffer=20, rows_per_batch=2)
    loader = DataLoader(stream, batch_size=3, collate_fn=PaddingFreeCollator(), num_workers=num_workers)
    with pytest.raises(ValueError, match=r"rows_per_batch: expected the 3 rows of a batch .* in PackedStream, got 2"):
        next(iter(loader))


class Divided(IterableDataset):
    """Gives each worker another part."""

    def __iter__(self):
        info = get_worker_info()
        yield from EXAMPLES if info is None else EXAMPLES[info.id :: info.num_workers]


def test_a_dataset_that_divides_itself_is_read_whole_in_each_worker():
    loader = DataLoader(PackedStream(Divided(), 100, buffer=20), batch_size=None, collate_fn=numbers, num_workers=2)
    assert list(loader) == WHOLE
