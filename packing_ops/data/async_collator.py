"""Collating the next batch while the current one trains."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

_NOT_GIVEN: Any = object()  # None may be a step


class AsyncBatchCollatorMisuse(AssertionError):
    """A step submitted or asked for out of turn. Raised, never asserted: ``python -O`` keeps it."""


class AsyncBatchCollator:
    """Runs ``compute(step)`` in one worker thread, at most one step ahead. For a plain loop see prefetch.

    A batch is the same, to the byte, as ``compute(step)`` called in the loop, if nothing that ``compute`` reads changes
    between ``submit`` and ``get``. The caller sees to that: the example submits no step across a reshuffle.

    Args:
        compute: from a step number to its batch. Runs in the worker, so torch's thread-local state (grad mode, default
            device, current CUDA device and stream) is the worker's; random numbers must come from a generator of its
            own, seeded by the step. What it does in torch and packing_ops ops releases the GIL.
        thread_name_prefix: of the worker thread's name.

    Example:
        A loop over epochs that trains on the same batches with ``ahead`` on or off, and from any step on. A checkpoint
        written after step N resumes with ``first_step=N + 1``.

        >>> def train(first_step, last_step, steps_per_epoch, collate, reshuffle, train_step, ahead=True):
        ...     epoch = None
        ...     with AsyncBatchCollator(collate) as collator:
        ...         for step in range(first_step, last_step + 1):
        ...             if step // steps_per_epoch != epoch:
        ...                 epoch = step // steps_per_epoch
        ...                 collator.clear()  # nobody reads the order while it changes
        ...                 reshuffle(epoch)
        ...             batch = collator.get(step) if collator.has_pending() else collate(step)
        ...             same_epoch = (step + 1) // steps_per_epoch == epoch
        ...             if ahead and same_epoch and step < last_step:
        ...                 collator.submit(step + 1)  # collated while this step trains
        ...             train_step(step, batch)
        >>> train(0, 3, 2, lambda step: step * 10, lambda epoch: print("epoch", epoch), print)
        epoch 0
        0 0
        1 10
        epoch 1
        2 20
        3 30

    For one calling thread at a time; any number of collators side by side. In a forked child the collator has a worker of
    the child's own, which computes the pending step anew; the parent's goes on. The names, the AssertionErrors and their
    words are those of SkyRL's class, which it can stand in for; there ``clear`` and ``shutdown`` raise what the discarded
    step raised, here they do not.
    """

    def __init__(self, compute: Callable[[int], Any], thread_name_prefix: str = "batch-collate"):
        self._compute = compute
        self._thread_name_prefix = thread_name_prefix
        self._start_worker()
        self._pending: tuple[int, Future[Any]] | None = None
        self._shut_down = False
        self._last_compute_seconds: float | None = None
        self._last_error: BaseException | None = None

    def submit(self, step: int) -> None:
        """Start ``compute(step)`` in the worker and return at once.

        Raises:
            AsyncBatchCollatorMisuse: a step is pending already, or after shutdown.
        """
        if self._shut_down:
            raise AsyncBatchCollatorMisuse(f"submit: expected a collator in use, got step {step} after shutdown")
        if self._pending is not None:
            raise AsyncBatchCollatorMisuse(
                f"submit: slot already occupied by step {self._pending[0]}, got step {step} before that was taken"
            )
        self._forked()
        self._pending = step, self._executor.submit(self._timed, step)

    def get(self, step: int = _NOT_GIVEN, *, expected_step: int = _NOT_GIVEN) -> Any:
        """The batch of the pending step, waited for if need be; the slot is free after it.

        Args:
            step: the one that must be pending; ``expected_step`` is another name for it.

        Raises:
            AsyncBatchCollatorMisuse: nothing is pending, or another step, which stays pending.
            Exception: what ``compute`` raised, with the worker's traceback; the slot is free then too.
            TypeError: not exactly one of the two names.
        """
        if (step is _NOT_GIVEN) == (expected_step is _NOT_GIVEN):
            raise TypeError("get: expected exactly one of step and expected_step")
        step = expected_step if step is _NOT_GIVEN else step
        if self._pending is None:
            raise AsyncBatchCollatorMisuse(f"get: expected step {step} to be pending, got an empty slot")
        pending_step, future = self._pending
        if pending_step != step:
            raise AsyncBatchCollatorMisuse(
                f"get: pending step {pending_step} != expected step {step}; it stays pending"
            )
        if self._forked():
            self._pending = step, (future := self._executor.submit(self._timed, step))
        future.exception()  # waits; interrupted, it leaves the step pending
        self._pending = None
        return future.result()

    def has_pending(self) -> bool:
        """Whether a step is submitted and not yet taken, finished or not."""
        return self._pending is not None

    def pending_step(self) -> int | None:
        """The step in the slot, None for an empty one."""
        return None if self._pending is None else self._pending[0]

    @property
    def last_compute_seconds(self) -> float | None:
        """Wall seconds of the last ``compute`` in the worker, failed ones too; None before the first has ended."""
        return self._last_compute_seconds

    def clear(self) -> None:
        """Wait for the pending step and discard its batch, or its error: nobody asked for either."""
        if not self._forked() and self._pending is not None:
            self._pending[1].exception()  # waits, and returns what get would raise
        self._pending = self._last_error = None

    def shutdown(self) -> None:
        """Discard the pending step and join the worker, even when waiting is interrupted. May be called again."""
        self._shut_down = True
        try:
            self.clear()
        finally:
            self._executor.shutdown(wait=True)

    def __enter__(self) -> "AsyncBatchCollator":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()  # raises nothing of the worker's, so the loop's own error is the one that is seen

    def _start_worker(self) -> None:
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._thread_name_prefix)

    def _forked(self) -> bool:
        """Whether the worker is a thread of the parent, which a forked child does not have: it gets one here."""
        if self._process == os.getpid():
            return False
        self._start_worker()
        return True

    def _timed(self, step: int) -> Any:
        error, self._last_error = self._last_error, None
        earlier = None if error is None else error.__traceback__
        start = time.perf_counter()
        try:
            return self._compute(step)
        except BaseException as raised:
            if raised is error:  # Python puts this time's frames before those of the last time
                _cut_before(earlier, raised.__traceback__)  # type: ignore[arg-type]
            self._last_error = raised
            raise
        finally:  # before the future is done, so it is there when get returns
            error = earlier = None  # the traceback holds this frame
            self._last_compute_seconds = time.perf_counter() - start


def prefetch(
    steps: Iterable[Any], compute: Callable[[Any], Any], *, thread_name_prefix: str = "batch-collate"
) -> Iterator[Any]:
    """``map(compute, steps)`` with one batch computed ahead: the next is collated while the current one trains.

    A generator around AsyncBatchCollator. Its worker ends with the loop: after the last batch, a break, or an error of
    the loop, of ``steps`` or of ``compute``. Where the generator is kept in a variable, an error leaves the worker idle
    until that is gone: ``with contextlib.closing(prefetch(...)) as batches`` ends it at once.

    Args:
        steps: what a batch is computed from: a range, or the lists of indices of a batch sampler. Read by the caller's
            thread, one ahead: PackedBatchSampler.state_dict must be told how many are done. For steps whose order
            changes between epochs, a prefetch for each epoch.
        compute: from a step to its batch, in the worker. See AsyncBatchCollator.
        thread_name_prefix: of the worker's name.

    Yields:
        The batches, in the order of the steps. It keeps no reference to a batch that it has given.

    Example:
        >>> for batch in prefetch(range(10, 13), lambda step: [step] * 2):
        ...     print(batch)
        [10, 10]
        [11, 11]
        [12, 12]

    Raises:
        TypeError: steps that are no iterable, a compute that is no function.
        Exception: what ``compute`` raised, where its batch is due, with the worker's traceback.
    """
    if not isinstance(steps, Iterable) and not hasattr(steps, "__getitem__"):
        raise TypeError(f"steps: expected an iterable, such as a range, got {steps!r} ({type(steps).__name__})")
    if not callable(compute):
        raise TypeError(f"compute: expected a function of a step, got {compute!r} ({type(compute).__name__})")
    return _prefetched(iter(steps), compute, thread_name_prefix)


def _prefetched(steps: Iterator[Any], compute: Callable[..., Any], thread_name_prefix: str) -> Iterator[Any]:
    def run(step: Any) -> Any:  # in a tuple, so that steps are compared as objects: tensors have no one answer
        return compute(*step)

    with AsyncBatchCollator(run, thread_name_prefix) as collator:
        _submit_next(collator, steps)
        while collator.has_pending():
            batch = [collator.get(collator.pending_step())]  # type: ignore[arg-type]
            _submit_next(collator, steps)
            yield batch.pop()


def _submit_next(collator: AsyncBatchCollator, steps: Iterator[Any]) -> None:
    for step in steps:
        collator.submit((step,))  # type: ignore[arg-type]
        return


def _cut_before(earlier: TracebackType | None, traceback: TracebackType) -> None:
    while traceback.tb_next is not None and traceback.tb_next is not earlier:
        traceback = traceback.tb_next
    traceback.tb_next = None
