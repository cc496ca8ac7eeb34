"""num_workers=0: where batches are made in this process, and the thread of ``async for``.

InlineHost    what is different for a `BatchMaker` here: errors are raised as they are, Ctrl-C is none of a batch
InlineMaker   has batches made, and pinned
FetchThread   takes keys, hands batches over
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.engine.taking import Item, Taking
from asyncloader.messages.failure import LocalError
from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.modes import Modes
from asyncloader.messages.outcome import NO_RECORD, Batch, Exhausted, Failure, LeftOut, Outcome
from asyncloader.observe.faults import Faults
from asyncloader.seeding.sample_context import Placed
from asyncloader.transport.collate import recycling_collate
from asyncloader.worker import threads
from asyncloader.worker.batch_maker import BatchMaker

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


def is_of_a_sample(error: BaseException) -> bool:
    """Whether what is no Exception is a sample's all the same, and not of a signal handler in this thread.

    A CancelledError, which no handler raises; and a SystemExit of an awaited sample, which was raised on the loop.
    """
    return isinstance(error, asyncio.CancelledError) or getattr(error, "asyncloader_of_a_sample", False) is True


class InlineHost:
    """The consumer's process, as what makes batches. Nothing here makes it look like a worker.

    Args:
        collate_fn: Makes a batch of samples.
    """

    where = "in the main process"
    is_remote = False
    cpu_clock = staticmethod(float)  # always 0.0: stats() has the CPU time of this process

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate = recycling_collate(collate_fn)

    def enter(self, worker_id: int, spec: WorkerSpec, open_dataset: Callable[[], Any]) -> None:
        """Leave the surroundings as they are."""

    def ends(self, error: BaseException) -> bool:
        """Whether it is an interruption, and no failure of a batch."""
        return not (isinstance(error, Exception) or is_of_a_sample(error))

    def capture(self, error: BaseException) -> LocalError:
        """Hand the exception over as it is."""
        return LocalError(error, "")

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any, rows: Any = ()) -> Any:
        """Make a batch, in memory that is used again where torch's default does it."""
        return self._collate(samples)


class InlineMaker:
    """Makes the batches of one run in this process, for one thread at a time.

    Args:
        maker: Makes them.
        faults: Has the keys of those that are left out.
        pin: Pins a batch; None if it is not to be pinned.
        aside: Entered while a batch is made; None if nothing is.
        is_stream: The dataset is iterable: keys are not needed to make a batch again.
        is_batched: Keys name the samples of a batch; otherwise one sample.
    """

    def __init__(
        self,
        maker: BatchMaker,
        faults: Faults,
        pin: Callable[[Any], Any] | None,
        aside: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        *,
        is_stream: bool,
        is_batched: bool,
    ) -> None:
        self._maker = maker
        self._pin = pin
        self._aside = aside
        self._faults = faults
        self._is_stream = is_stream
        self._is_batched = is_batched
        self._one_at_a_time = threading.Lock()  # `for` in one thread, the thread of `async for`

    def item(self, seq: int, keys: Any) -> Item:
        """Make a batch, or take what is raised in its place. An interruption passes through; then it can be made anew.

        Args:
            seq: Number of the batch in the plan.
            keys: Of the batch.
        """
        with self._one_at_a_time:
            if self._aside is None:
                outcome = self._maker.make(seq, keys)
            else:
                with self._aside():
                    outcome = self._maker.make(seq, keys)
            if type(outcome) is Batch and self._pin is not None:
                outcome = self._pinned(outcome)
            if type(outcome) is not Batch:
                return self._no_batch(outcome, seq, keys)
            made_at = perf_counter()
            number, keys = (-1, None) if self._is_stream else (seq, keys)
            return _new(Item, (outcome, seq, 0, made_at, number, keys, True))

    def _pinned(self, batch: Batch) -> Batch | Failure:
        """Return the batch in page-locked memory, or what that raises."""
        assert self._pin is not None
        try:
            return batch._replace(data=self._pin(batch.data))
        except Exception as error:
            return Failure(batch.record, error, batch.bad, batch.snapshot)

    def _no_batch(self, outcome: Outcome, seq: int, keys: Any) -> Item:
        """Return what comes in place of a batch."""
        if type(outcome) is Exhausted:
            return Item(outcome)
        if type(outcome) is Failure and not isinstance(outcome.error, BaseException):
            plain = keys.keys if type(keys) is Placed else keys
            outcome = outcome._replace(error=outcome.error.rebuild(None if self._is_stream else plain))
        if type(outcome) is LeftOut:
            bad = [sample.key for sample in outcome.bad]
            self._faults.left_out.append(bad if self._is_batched else bad[0])
        return Item(outcome, seq, 0) if self._is_stream else Item(outcome, seq, 0, None, seq, keys)

    def failed(self, seq: int, error: BaseException) -> Item:
        """Return what stands for a batch that an interruption has ended, where nobody else would tell the consumer."""
        return Item(Failure(NO_RECORD, error), seq, 0, None, -1 if self._is_stream else seq)


class FetchThread:
    """A thread that makes batches from keys, in order, and hands them over.

    Holds the maker, not the iterator: so a dropped iterator ends it.

    Args:
        maker: Makes them.
        taking: What consumers take by.
    """

    def __init__(self, maker: InlineMaker, taking: Taking) -> None:
        self.taking = taking
        self.requested = taking.taken  # changed by consumers, one at a time
        self.wanting: set[object] = set()  # consumers that wait for one
        self._maker = maker
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()  # [number, keys] of batches
        self._thread: threading.Thread | None = None
        fetch_threads.add(self)

    @property
    def unserved(self) -> int:
        """Batches that were asked for and that no consumer has."""
        taking = self.taking
        return self.requested - taking.taken + taking.num_dropped

    def start(self) -> None:
        """Start the thread, if there is none yet."""
        if self._thread is None:
            modes = Modes.of_this_thread()
            self._thread = threads.start(partial(self._run, modes), "asyncloader fetch")

    def stop_with(self, iterator: object) -> None:
        """End the thread when this is dropped. See :meth:`asyncloader.engine.session.Session.close_with`."""
        self._iterator = weakref.ref(iterator, self.requests.put)

    def stop(self) -> None:
        """End the thread after the batch in work. Returns at once."""
        self.requests.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self, modes: Modes) -> None:
        with modes.active():
            self._serve()

    def _serve(self) -> None:
        while isinstance(request := self.requests.get(), list):
            seq = request[0]
            try:
                item = self._maker.item(seq, request.pop())
            except BaseException as error:
                item = self._maker.failed(seq, error)
            self.taking.handoff.put(item)
            del item
        self.requests.put(None)  # for another one, if a Ctrl-C inside `Thread.start` had two of them started


fetch_threads: weakref.WeakSet[FetchThread] = weakref.WeakSet()
"""All that are there, for the end of the interpreter."""
