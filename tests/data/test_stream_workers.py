"""PackedStream under DataLoaders with workers, torchdata's StatefulDataLoader and Hugging Face datasets."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stream import EXAMPLES, LENGTHS, WHOLE, Failing, Restarting, numbers, rows_of
from torch.utils.data import DataLoader

from packing_ops.data import PackedStream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")


def stream_of(examples=EXAMPLES, **options):
    return PackedStream(examples, 100, buffer=20, **options)


def loader_of(stream, num_workers, kind=DataLoader, **options):
    return kind(stream, num_workers=num_workers, **{"batch_size": None, "collate_fn": numbers, **options})


# --- torch's DataLoader ---


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_batches(num_workers):
    assert list(loader_of(stream_of(), num_workers)) == WHOLE


def test_workers_that_are_spawned_after_an_iteration():
    stream = stream_of()
    next(iter(stream))
    assert list(loader_of(stream, 1, multiprocessing_context="spawn")) == WHOLE


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("before", [0, 3])
def test_resumed_with_any_number_of_workers(num_workers, before):
    loader = iter(loader_of(first := stream_of(), before))
    assert [next(loader) for _ in range(5)] == WHOLE[:5]
    resumed = stream_of()
    resumed.load_state_dict(first.state_dict(batches_done=5))
    assert list(loader_of(resumed, num_workers)) == WHOLE[5:]
    resumed.set_epoch(1)
    assert len(list(loader_of(resumed, num_workers))) > len(WHOLE) - 5


def test_batches_of_several_rows():
    def collate(rows):
        return [numbers(row) for row in rows]

    whole = [WHOLE[i : i + 3] for i in range(0, len(WHOLE), 3)]
    for num_workers in (0, 2):
        loader = loader_of(stream_of(rows_per_batch=3), num_workers, batch_size=3, collate_fn=collate)
        assert list(loader) == whole
    resumed = stream_of(rows_per_batch=3)
    resumed.load_state_dict(resumed.state_dict(batches_done=4))
    assert list(loader_of(resumed, 2, batch_size=3, collate_fn=collate)) == whole[4:]


def test_workers_that_persist_follow_the_epoch():
    stream = stream_of()
    loader = loader_of(stream, 2, persistent_workers=True)
    assert list(loader) == WHOLE
    stream.set_epoch(1)
    other = stream_of()
    other.set_epoch(1)
    assert list(loader) == rows_of(other) != WHOLE


@settings(deadline=None, max_examples=5)
@given(number=st.integers(1, len(EXAMPLES) - 1), num_workers=st.integers(1, 2))
def test_killed_workers_lose_nothing(number, num_workers):
    killed, done = stream_of(Failing(EXAMPLES, number, signalled=True)), []
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        done.extend(loader_of(killed, num_workers))
    resumed = stream_of()
    resumed.load_state_dict(killed.state_dict(batches_done=len(done)))
    assert done + list(loader_of(resumed, num_workers)) == WHOLE


# --- torchdata ---


def stateful(stream, num_workers, **options):
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
    return loader_of(stream, num_workers, stateful_dataloader.StatefulDataLoader, **options)


@pytest.mark.parametrize(("source", "num_workers"), [(list, 0), (Restarting, 0), (list, 1), (Restarting, 2)])
@pytest.mark.parametrize("count", [0, 1, 5, len(WHOLE) - 1, len(WHOLE)])
def test_stateful_data_loader(source, num_workers, count):
    loader = stateful(stream_of(source(EXAMPLES)), num_workers)
    batches = iter(loader)
    assert [next(batches) for _ in range(count)] == WHOLE[:count]
    resumed = stateful(stream_of(source(EXAMPLES)), num_workers)
    resumed.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert list(resumed) == WHOLE[count:]
    assert list(resumed) == WHOLE


@settings(deadline=None, max_examples=5)
@given(number=st.integers(1, len(EXAMPLES) - 1), num_workers=st.integers(1, 2))
def test_stateful_data_loader_after_a_killed_worker(number, num_workers):
    loader = stateful(stream_of(Failing(EXAMPLES, number, signalled=True)), num_workers)
    state, done = loader.state_dict(), []
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):  # noqa: PT012
        for batch in loader:
            done.append(batch)
            state = loader.state_dict()
    resumed = stateful(stream_of(), num_workers)
    resumed.load_state_dict(state)
    assert len(done) < len(WHOLE)
    assert done + list(resumed) == WHOLE


def test_states_of_another_number_of_workers_are_refused_by_name(workers_end):
    loader = stateful(stream_of(), 2)
    next(iter(loader))
    state = loader.state_dict()
    resumed = stateful(stream_of(), 3)
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="state_dict: expected num_workers=3, got that of a worker among 2"):
        next(iter(resumed))


# --- Hugging Face datasets ---


def hugging_face(kind):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(EXAMPLES)
    if kind == "map":
        return made
    made = made.to_iterable_dataset(num_shards=4)
    return made.shuffle(seed=3, buffer_size=30) if kind == "shuffled" else made


@pytest.mark.parametrize("kind", ["map", "iterable", "shuffled"])
def test_datasets_of_hugging_face(kind):
    whole = rows_of(stream_of(hugging_face(kind)))
    assert sorted(itertools.chain(*whole)) == list(range(len(LENGTHS)))
    assert list(loader_of(stream_of(hugging_face(kind)), 3)) == whole
    for count in (0, 1, 7, len(whole)):
        first = stream_of(hugging_face(kind))
        rows = iter(first)
        assert [numbers(next(rows)) for _ in range(count)] == whole[:count]
        resumed = stream_of(hugging_face(kind))
        resumed.load_state_dict(first.state_dict())
        assert rows_of(resumed) == whole[count:]
        assert rows_of(resumed) == whole


def test_a_shuffled_dataset_is_shuffled_again_in_each_epoch():
    stream = stream_of(hugging_face("shuffled"), seed=None)
    first = rows_of(stream)
    stream.set_epoch(1)
    second = rows_of(stream)
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    resumed = stream_of(hugging_face("shuffled"), seed=None)
    rows = iter(stream)
    assert [numbers(next(rows)) for _ in range(5)] == second[:5]
    resumed.load_state_dict(stream.state_dict())
    assert rows_of(resumed) == second[5:]


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_examples_as_tensors(kind):
    dataset = hugging_face(kind).with_format("torch")
    stream = stream_of(dataset)
    rows = list(stream)
    assert all(isinstance(example["input_ids"], torch.Tensor) for row in rows for example in row)
    assert [numbers(row) for row in rows] == WHOLE
