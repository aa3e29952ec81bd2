"""AsyncBatchCollator: the same batches with it on or off, errors where they belong, no thread left behind."""

import ast
import doctest
import inspect
import os
import re
import signal
import textwrap
import threading
import time
import traceback

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import AsyncBatchCollator, AsyncBatchCollatorMisuse


def workers(prefix):
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    assert not workers("batch-collate")


def gated():
    """compute that ends when the test says so, and the events (started, may_end)."""
    started, may_end = threading.Event(), threading.Event()

    def compute(step):
        started.set()
        assert may_end.wait(10)
        return step

    return compute, started, may_end


def fail(step):
    raise KeyError(f"step {step}")


# --- the slot ---


def test_a_batch_is_computed_in_the_worker():
    with AsyncBatchCollator(lambda step: (step, threading.current_thread().name), "collate-me") as collator:
        collator.submit(3)
        step, thread = collator.get(3)
        assert step == 3
        assert thread.startswith("collate-me")
    assert not workers("collate-me")


def test_one_worker_whatever_the_number_of_steps():
    with AsyncBatchCollator(lambda step: threading.get_ident()) as collator:
        idents = set()
        for step in range(20):
            collator.submit(step)
            idents.add(collator.get(step))
    assert len(idents) == 1
    assert idents != {threading.get_ident()}


def test_submit_does_not_wait_and_get_does():
    compute, started, may_end = gated()
    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        assert started.wait(10)
        assert collator.has_pending()  # the test would hang above if submit waited
        threading.Timer(0.05, may_end.set).start()
        assert collator.get(0) == 0


def test_pending_step():
    with AsyncBatchCollator(lambda step: step) as collator:
        assert not collator.has_pending()
        assert collator.pending_step() is None
        collator.submit(0)
        assert collator.has_pending()
        assert collator.pending_step() == 0
        collator.get(0)
        assert not collator.has_pending()
        assert collator.pending_step() is None


def test_misuse_is_an_assertion_error_that_is_raised():
    assert issubclass(AsyncBatchCollatorMisuse, AssertionError)
    tree = inspect.getsource(inspect.getmodule(AsyncBatchCollator))
    assert not re.search(r"^\s*assert\b", tree, re.M), "python -O would drop it"


def test_submit_on_an_occupied_slot():
    with AsyncBatchCollator(lambda step: step) as collator:
        collator.submit(1)
        with pytest.raises(AssertionError, match="submit: slot already occupied by step 1, got step 2"):
            collator.submit(2)
        assert collator.get(1) == 1


def test_get_of_another_step_leaves_the_pending_one():
    with AsyncBatchCollator(lambda step: step) as collator:
        collator.submit(1)
        with pytest.raises(AssertionError, match="get: pending step 1 != expected step 2"):
            collator.get(2)
        assert collator.pending_step() == 1
        assert collator.get(1) == 1


def test_get_by_keyword():
    """SkyRL's class calls it expected_step."""
    with AsyncBatchCollator(lambda step: step) as collator:
        for name in ("step", "expected_step"):
            collator.submit(4)
            with pytest.raises(AsyncBatchCollatorMisuse, match="!= expected step 5"):
                collator.get(**{name: 5})
            assert collator.get(**{name: 4}) == 4
        for wrong in ({}, {"step": 4, "expected_step": 4}):
            with pytest.raises(TypeError, match="get: expected exactly one of step and expected_step"):
                collator.get(**wrong)


def test_get_from_an_empty_slot():
    with AsyncBatchCollator(lambda step: step) as collator:
        with pytest.raises(AsyncBatchCollatorMisuse, match="expected step 0 to be pending, got an empty slot"):
            collator.get(0)
        collator.submit(0)
        collator.get(0)
        with pytest.raises(AsyncBatchCollatorMisuse, match="empty slot"):
            collator.get(0)


def test_submit_after_shutdown():
    collator = AsyncBatchCollator(lambda step: step)
    collator.shutdown()
    with pytest.raises(AsyncBatchCollatorMisuse, match="got step 5 after shutdown"):
        collator.submit(5)
    assert not collator.has_pending()


def test_last_compute_seconds():
    def compute(step):
        time.sleep(0.02 * step)
        if step == 3:
            raise ValueError
        return collator.last_compute_seconds

    with AsyncBatchCollator(compute) as collator:
        assert collator.last_compute_seconds is None
        collator.submit(2)
        assert collator.get(2) is None
        second = collator.last_compute_seconds
        assert 0.04 <= second < 5
        collator.submit(3)
        with pytest.raises(ValueError):
            collator.get(3)
        assert collator.last_compute_seconds >= 0.06
        assert collator.last_compute_seconds != second


# --- errors of the worker ---


def test_error_of_the_worker_comes_out_of_get_with_its_traceback():
    with AsyncBatchCollator(fail) as collator:
        collator.submit(7)
        with pytest.raises(KeyError, match="step 7") as caught:
            collator.get(7)
        assert "fail" in [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert not collator.has_pending()
        collator.submit(8)  # the slot is free again
        with pytest.raises(KeyError, match="step 8"):
            collator.get(8)


def test_an_error_raised_again_and_again_has_one_traceback():
    """Python adds to the traceback that an error already has; a reader that keeps its error raises that one."""
    kept = OSError("the disk is gone")

    def compute(step):
        raise kept

    frames, kept_by_caller = [], []
    with AsyncBatchCollator(compute) as collator:
        for step in range(4):
            collator.submit(step)
            with pytest.raises(OSError, match="the disk is gone") as caught:
                collator.get(step)
            kept_by_caller.append(caught.value.__traceback__)
            frames.append([frame.name for frame in traceback.extract_tb(caught.value.__traceback__)])
    assert frames[1:] == frames[:1] * 3
    assert [len(traceback.extract_tb(each)) for each in kept_by_caller] == [len(frames[0])] * 4


def test_clear_waits_and_discards():
    compute, started, may_end = gated()
    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        assert started.wait(10)
        threading.Timer(0.05, may_end.set).start()
        collator.clear()
        assert may_end.is_set()
        assert not collator.has_pending()
        collator.submit(1)
        assert collator.get(1) == 1


def test_clear_swallows_the_error_of_a_step_that_nobody_asked_for():
    with AsyncBatchCollator(fail) as collator:
        collator.submit(0)
        collator.clear()
        assert not collator.has_pending()
        collator.clear()  # an empty slot is cleared already


@pytest.mark.parametrize("discard", ["clear", "shutdown"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_process_is_not_discarded_with_its_step(error, discard):
    def compute(step):
        raise error

    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        with pytest.raises(error):
            getattr(collator, discard)()
        assert not collator.has_pending()


def test_shutdown_discards_joins_and_may_be_called_again():
    collator = AsyncBatchCollator(fail, "batch-collate")
    collator.submit(0)
    collator.shutdown()
    assert not workers("batch-collate")
    assert not collator.has_pending()
    collator.shutdown()


def test_shutdown_joins_even_when_draining_raises():
    class Interrupted(AsyncBatchCollator):
        def clear(self):
            raise KeyboardInterrupt

    collator = Interrupted(lambda step: step)
    collator.submit(0)
    with pytest.raises(KeyboardInterrupt):
        collator.shutdown()
    assert not workers("batch-collate")


def with_statement():
    with AsyncBatchCollator(fail) as collator:
        collator.submit(0)
        raise ZeroDivisionError("the loop")


def try_finally():
    collator = AsyncBatchCollator(fail)
    try:
        collator.submit(0)
        raise ZeroDivisionError("the loop")
    finally:
        collator.shutdown()


@pytest.mark.parametrize("loop", [with_statement, try_finally])
def test_error_of_the_loop_wins_over_that_of_the_worker(loop):
    with pytest.raises(ZeroDivisionError, match="the loop"):
        loop()
    assert not workers("batch-collate")


def test_an_interrupted_get_leaves_the_step_pending(monkeypatch):
    with AsyncBatchCollator(lambda step: step) as collator:
        collator.submit(0)
        _, future = collator._pending
        with monkeypatch.context() as patched:
            patched.setattr(future, "exception", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                collator.get(0)
        assert collator.get(0) == 0


# --- a process that was forked ---


def in_a_child(function):
    """What ``function()`` gives in a forked child, which a signal ends if it waits for ever."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os.write(writer, repr(function()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    assert os.waitpid(child, 0)[1] == 0, "it waited for ever"
    return ast.literal_eval(text)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_worker_of_its_own():
    def child():
        may_end.set()
        pending = collator.pending_step()
        batches = [collator.get(2)]
        collator.submit(3)
        batches.append(collator.get(3))
        collator.submit(4)
        collator.clear()
        collator.submit(5)
        collator.shutdown()
        return pending, batches

    compute, started, may_end = gated()
    with AsyncBatchCollator(lambda step: (step, os.getpid() == parent) if step < 2 else compute(step)) as collator:
        parent = os.getpid()
        collator.submit(1)
        assert collator.get(1) == (1, True)  # the worker is there and idle
        collator.submit(2)
        assert started.wait(10)
        assert in_a_child(child) == (2, [2, 3])
        may_end.set()
        assert collator.get(2) == 2  # the parent's worker goes on


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("end", ["shutdown", "clear"])
def test_a_forked_child_does_not_wait_for_the_parents_step(end):
    compute, started, may_end = gated()
    with AsyncBatchCollator(compute) as collator:
        collator.submit(0)
        assert started.wait(10)
        assert in_a_child(lambda: (getattr(collator, end)(), collator.has_pending())) == (None, False)
        may_end.set()
        assert collator.get(0) == 0


# --- the loop of the docstring ---


def train_of_the_docstring():
    examples = doctest.DocTestParser().get_examples(textwrap.dedent(AsyncBatchCollator.__doc__))
    names = {"AsyncBatchCollator": AsyncBatchCollator}
    exec(examples[0].source, names)
    return names["train"]


class Epochs:
    """Documents whose order is shuffled in place, and every batch that was trained on."""

    batch_size = 3

    def __init__(self, steps_per_epoch):
        generator = torch.Generator().manual_seed(0)
        count = steps_per_epoch * self.batch_size
        self.documents = [torch.randint(0, 99, (n,), generator=generator) for n in range(1, count + 1)]
        self.order = list(range(count))
        self.steps_per_epoch = steps_per_epoch
        self.collated = []
        self.batches = {}

    def reshuffle(self, epoch):
        self.order[:] = torch.randperm(len(self.order), generator=torch.Generator().manual_seed(epoch)).tolist()

    def collate(self, step):
        self.collated.append(step)
        first = step % self.steps_per_epoch * self.batch_size
        rows = [self.documents[i] for i in self.order[first : first + self.batch_size]]
        metadata = po.PackedMetadata.from_lengths([len(row) for row in rows])
        noise = torch.rand(metadata.total, generator=torch.Generator().manual_seed(step))
        return {"input_ids": torch.cat(rows), "cu_seqlens": metadata.cu_seqlens, "noise": noise}

    def keep(self, step, batch):
        self.batches[step] = {name: tensor.numpy().tobytes() for name, tensor in batch.items()}


def batches_of(first_step, last_step, steps_per_epoch, ahead, train=None):
    run = Epochs(steps_per_epoch)
    loop = train or train_of_the_docstring()
    loop(first_step, last_step, steps_per_epoch, run.collate, run.reshuffle, run.keep, ahead=ahead)
    assert list(run.batches) == list(range(first_step, last_step + 1))
    if train is None:
        assert run.collated == list(run.batches), "a batch was collated in vain"
    return run.batches


@given(steps_per_epoch=st.integers(1, 5), last_step=st.integers(0, 12))
def test_batches_are_the_same_on_and_off(steps_per_epoch, last_step):
    assert batches_of(0, last_step, steps_per_epoch, True) == batches_of(0, last_step, steps_per_epoch, False)


@given(steps_per_epoch=st.integers(1, 5), saved_step=st.integers(0, 9), steps_after=st.integers(1, 6))
def test_step_n_resumes_at_n_plus_1(steps_per_epoch, saved_step, steps_after):
    last_step = saved_step + steps_after
    whole = batches_of(0, last_step, steps_per_epoch, True)
    before = batches_of(0, saved_step, steps_per_epoch, True)
    after = batches_of(saved_step + 1, last_step, steps_per_epoch, True)
    assert before | after == whole


def test_a_batch_collated_across_the_reshuffle_would_be_seen():
    """The comparison above notices what the loop avoids."""

    def train_without_care(first_step, last_step, steps_per_epoch, collate, reshuffle, train_step, ahead):
        upcoming = None
        for step in range(first_step, last_step + 1):
            if step % steps_per_epoch == 0:
                reshuffle(step // steps_per_epoch)
            batch = collate(step) if upcoming is None else upcoming
            upcoming = collate(step + 1)
            train_step(step, batch)

    careless = batches_of(0, 7, 4, True, train_without_care)
    right = batches_of(0, 7, 4, False)
    assert [step for step in right if careless[step] != right[step]] == [4]


def test_error_in_the_loop_of_the_docstring():
    def train_step(step, batch):
        raise ZeroDivisionError(step)

    def collate(step):
        return fail(step) if step else step

    with pytest.raises(ZeroDivisionError):
        train_of_the_docstring()(0, 3, 9, collate, lambda epoch: None, train_step)


def test_eight_collators_in_eight_threads():
    failures = []

    def run(seed):
        try:
            assert batches_of(0, 11, 3 + seed % 3, True) == expected[seed % 3]
        except BaseException as error:
            failures.append(error)

    expected = [batches_of(0, 11, 3 + i, False) for i in range(3)]
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
