"""Collate the next batch in a worker thread while the current one trains."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

_NOT_GIVEN: Any = object()  # None may be a step


class AsyncBatchCollatorMisuse(AssertionError):
    """submit or get called out of order. An AssertionError as in SkyRL, but raised, so that ``python -O`` keeps it."""


class AsyncBatchCollator(AbstractContextManager["AsyncBatchCollator"]):
    """Runs ``compute(step)`` in one worker thread, at most one step ahead. For a simple loop, prefetch is shorter.

    A batch is the same, byte for byte, as ``compute(step)`` called in the loop, as long as nothing that ``compute``
    reads changes between ``submit`` and ``get``. That is up to the caller: the example submits no step across a
    reshuffle.

    Args:
        compute: function from a step number to its batch. It runs in the worker, with the worker's torch thread-local
            state (grad mode, default device, current CUDA device and stream). Random numbers must be drawn from a
            generator that ``compute`` seeds by the step. Ops of torch and packing_ops release the GIL.
        thread_name_prefix: of the worker thread's name.

    Example:
        A loop over epochs. It trains on the same batches with ``ahead`` True or False, and when resumed: a checkpoint
        written after step N resumes with ``first_step=N + 1``.

        >>> def train(first_step, last_step, steps_per_epoch, collate, reshuffle, train_step, ahead=True):
        ...     epoch = None
        ...     with AsyncBatchCollator(collate) as collator:
        ...         for step in range(first_step, last_step + 1):
        ...             if step // steps_per_epoch != epoch:
        ...                 epoch = step // steps_per_epoch
        ...                 collator.clear()  # waits: nothing reads the order while it changes
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

    A collator serves one calling thread at a time. There may be any number of collators. After a fork the child's copy
    starts another worker, which computes the pending step again; the parent's worker goes on.

    It can replace SkyRL's class of the same name: the methods are the same, and so are the AssertionErrors and their
    words. One difference: ``clear`` and ``shutdown`` raise no Exception of the discarded step.
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
        """Return the batch of the pending step; wait until it is computed. Afterwards nothing is pending.

        Args:
            step: the step that must be pending; ``expected_step`` is another name for it.

        Raises:
            AsyncBatchCollatorMisuse: nothing is pending, or another step, which stays pending.
            Exception: what ``compute`` raised, with the worker's traceback; then nothing is pending either.
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
        """Return whether a step was submitted and not yet fetched by get, finished or not."""
        return self._pending is not None

    def pending_step(self) -> int | None:
        """Return the pending step, or None."""
        return None if self._pending is None else self._pending[0]

    @property
    def last_compute_seconds(self) -> float | None:
        """Return wall-clock seconds of the last ``compute``, even a failed one; None before the first has ended."""
        return self._last_compute_seconds

    def clear(self) -> None:
        """Wait for the pending step, if there is one, and discard its batch or its error.

        Raises:
            KeyboardInterrupt, SystemExit: the step raised it. It is meant for the process, not for the batch.
        """
        error = None
        if not self._forked() and self._pending is not None:
            error = self._pending[1].exception()  # waits, and returns what get would raise
        self._pending = self._last_error = None
        if error is not None and not isinstance(error, Exception):
            raise error

    def shutdown(self) -> None:
        """Discard the pending step and join the worker, even when waiting is interrupted. May be called again."""
        self._shut_down = True
        try:
            self.clear()
        finally:
            self._executor.shutdown(wait=True)

    def __exit__(self, *error: object) -> None:
        self.shutdown()  # raises no Exception of the worker, which would hide the with block's error

    def _start_worker(self) -> None:
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._thread_name_prefix)

    def _forked(self) -> bool:
        """Return whether this process was forked since the worker started: threads do not survive a fork, so a new
        one starts.
        """
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
            if raised is error:  # raised again: Python has put the new frames before the old ones
                traceback: Any = raised.__traceback__
                while traceback.tb_next is not None and traceback.tb_next is not earlier:
                    traceback = traceback.tb_next
                traceback.tb_next = None
            self._last_error = raised
            raise
        finally:  # runs before the future is done, so that last_compute_seconds is set when get returns
            error = earlier = None  # no reference cycle: the traceback refers to this frame
            self._last_compute_seconds = time.perf_counter() - start


def prefetch(
    steps: Iterable[Any], compute: Callable[[Any], Any], *, thread_name_prefix: str = "batch-collate"
) -> Iterator[Any]:
    """Yield ``map(compute, steps)`` one batch ahead: the next batch is collated while the current one trains.

    A generator around AsyncBatchCollator. Its worker thread ends with the loop: after the last batch, a break, or an
    error in the loop, in ``steps`` or in ``compute``. If a variable refers to the generator, an error in the loop
    leaves the worker idle for as long as the variable lives; ``with contextlib.closing(prefetch(...)) as batches`` ends
    it at once.

    Args:
        steps: iterable of what batches are computed from: a range, or a batch sampler's lists of indices. The calling
            thread iterates it, one step ahead, so pass ``batches_done`` to PackedBatchSampler.state_dict. If the order
            changes between epochs, use one prefetch per epoch.
        compute: function from a step to its batch; runs in the worker, see AsyncBatchCollator.
        thread_name_prefix: of the worker thread's name.

    Yields:
        The batches, in the order of the steps. It keeps no reference to a batch that it has yielded.

    Example:
        >>> for batch in prefetch(range(10, 13), lambda step: [step] * 2):
        ...     print(batch)
        [10, 10]
        [11, 11]
        [12, 12]

    Raises:
        TypeError: steps that are no iterable, a compute that is no function.
        Exception: what ``compute`` raised, in place of that batch, with the worker's traceback.

    Determinism: the batches of ``map(compute, steps)``, in their order.
    Synchronises: never by itself; ``compute`` may.
    Memory: one batch more than the loop holds.
    Gradients: as ``compute`` makes them: the worker has the caller's grad mode.
    """
    if not isinstance(steps, Iterable) and not hasattr(steps, "__getitem__"):
        raise TypeError(f"steps: expected an iterable, such as a range, got {steps!r} ({type(steps).__name__})")
    if not callable(compute):
        raise TypeError(f"compute: expected a function of a step, got {compute!r} ({type(compute).__name__})")
    return _prefetched(iter(steps), compute, thread_name_prefix)


def _prefetched(steps: Iterator[Any], compute: Callable[..., Any], thread_name_prefix: str) -> Iterator[Any]:
    # Steps are wrapped in tuples, which get compares by identity of their items: != of tensors is element-wise.
    with AsyncBatchCollator(lambda step: compute(*step), thread_name_prefix) as collator:  # type: ignore[misc]
        _submit_next(collator, steps)
        while collator.has_pending():
            batch = [collator.get(collator.pending_step())]  # type: ignore[arg-type]
            _submit_next(collator, steps)
            yield batch.pop()


def _submit_next(collator: AsyncBatchCollator, steps: Iterator[Any]) -> None:
    for step in steps:
        collator.submit((step,))  # type: ignore[arg-type]
        return
