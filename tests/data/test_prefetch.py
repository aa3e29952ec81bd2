"""prefetch: the batches of the loop, one ahead, and no thread that outlives it."""

import gc
import threading
import time
import weakref
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packing_ops.data import PaddingFreeCollator, prefetch


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batch-collate")]


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    assert not workers()


@given(first=st.integers(-3, 3), count=st.integers(0, 9))
def test_the_batches_are_those_of_map(first, count):
    steps = range(first, first + count)
    assert list(prefetch(steps, lambda step: step * step)) == [step * step for step in steps]


def test_the_next_batch_is_collated_while_the_current_one_trains():
    ended = [threading.Event() for _ in range(3)]
    threads = set()

    def compute(step):
        threads.add(threading.current_thread().name)
        ended[step].set()
        return step

    for step in prefetch(range(3), compute):
        assert not any(event.is_set() for event in ended[step + 2 :]), "one ahead, no more"
        assert all(event.wait(10) for event in ended[: step + 2])  # without the loop's asking for it
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_nothing_runs_before_the_first_batch_is_asked_for():
    batches = prefetch(range(3), pytest.fail)
    assert not workers()
    batches.close()


@pytest.mark.parametrize("end", ["break", "error", "return"])
def test_a_loop_that_ends_early_leaves_no_thread(end):
    def loop():
        for step in prefetch(range(9), lambda step: time.sleep(0.02) or step):
            if step == 2:
                if end == "error":
                    raise ZeroDivisionError("the loop")
                if end == "return":
                    return
                break
        assert not workers()

    if end == "error":
        with pytest.raises(ZeroDivisionError, match="the loop"):
            loop()
    else:
        loop()
    assert not workers()


def test_error_of_compute_comes_where_its_batch_is_due():
    def compute(step):
        if step == 2:
            raise KeyError("step 2")
        return step

    seen = []
    with pytest.raises(KeyError, match="step 2"):
        seen.extend(prefetch(range(5), compute))
    assert seen == [0, 1]
    assert not workers()


def test_error_of_the_loop_wins_over_that_of_the_batch_ahead():
    def compute(step):
        if step:
            raise KeyError("nobody asked for it")

    def loop():
        for _ in prefetch(range(5), compute):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not workers()


def test_error_of_the_steps():
    def steps():
        yield 0
        yield 1
        raise OSError("no more steps")

    with pytest.raises(OSError, match="no more steps"):
        list(prefetch(steps(), lambda step: step))
    assert not workers()


def test_a_generator_in_a_variable_is_closed_by_closing():
    with closing(prefetch(range(9), lambda step: step)) as batches:
        assert next(batches) == 0
        assert len(workers()) == 1
    assert not workers()


def test_the_loop_alone_holds_a_batch():
    class Batch:
        pass

    batches = prefetch(range(3), lambda step: Batch())
    held = weakref.ref(next(batches))
    gc.collect()
    assert held() is None
    batches.close()


def test_steps_may_be_lists_or_tensors():
    examples = [{"input_ids": [i] * (i + 1)} for i in range(6)]

    def collate(indices):
        return PaddingFreeCollator()([examples[i] for i in indices])["input_ids"].tolist()

    bins = [[5], [0, 4], [1, 2, 3]]
    wanted = [collate(bin) for bin in bins]
    assert list(prefetch(bins, collate)) == wanted
    assert list(prefetch(map(torch.tensor, bins), lambda indices: collate(indices.tolist()))) == wanted


def test_arguments_the_other_way_round_are_named():
    with pytest.raises(TypeError, match=r"steps: expected an iterable, such as a range, got <function .* \(function\)"):
        prefetch(lambda step: step, range(3))
    with pytest.raises(TypeError, match=r"compute: expected a function of a step, got range\(0, 3\) \(range\)"):
        prefetch(range(3), range(3))
