"""num_workers=0: one run over the data whose batches this process makes itself.

    consumers ── read ──> to_do ── make, in a consumer's thread or in ours ──> ready ── take ──> consumers

The keys of a batch stay in ``to_do`` until the batch is made. So a batch whose maker was interrupted is made by the
next consumer, and nothing has to be put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader import threads
from asyncloader.engine import exits
from asyncloader.engine.actions import VOID
from asyncloader.engine.arrivals import Arrivals
from asyncloader.engine.taking import Item, Taking
from asyncloader.messages.failure import LocalError
from asyncloader.messages.messages import Kind
from asyncloader.messages.modes import Modes
from asyncloader.messages.outcome import Outcome
from asyncloader.protocols import namer
from asyncloader.seeding.sample_context import Placed
from asyncloader.worker.batch_maker import BatchMaker, Host

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


class InlineHost(Host):
    """The consumer's thread, as what makes batches. Nothing here makes it look like a worker."""

    where = "in the main process"
    cpu_clock = staticmethod(float)  # always 0.0: stats() has the CPU time of this process

    def ends(self, error: BaseException) -> bool:
        """Whether this is an interruption by a signal's handler, and no failure of a batch.

        No handler raises CancelledError; a SystemExit of an awaited sample was raised on the loop, and says so.
        """
        is_of_a_sample = isinstance(error, asyncio.CancelledError) or hasattr(error, "asyncloader_of_a_sample")
        return not (isinstance(error, Exception) or is_of_a_sample)

    def capture(self, error: BaseException) -> LocalError:
        """Hand the exception over as it is: no worker is in the user's eyes."""
        return LocalError(error, "")


class InlineRun:
    """A run over the data whose batches are made in this process, one at a time.

    Consumers read and take with the lock of the progress held. A batch is made by a consumer's thread (`for`) or by a
    thread of the run's own (`async for`), which ends when the iterator is dropped: the run does not know the iterator.

    Args:
        plan: Yields batches of keys.
        taking: The consumers' end of the hand-off.
        maker: Makes batches.
        pin: Pins a batch; None if it is not to be pinned.
        aside: Entered while a batch is made; None if nothing is.

    Attributes:
        to_do: Number and keys of batches that are to be made. Written by consumers; by the maker when a batch is made.
        ready: Batches that are made and not taken.
        making: Held to make a batch.
        plan_ended: The sampler has come to its end.
        is_torn: A consumer was interrupted while it read a batch of a stream. The samples that were read are gone.
        closed: The iterator was closed.
    """

    def __init__(
        self,
        plan: Iterator[Any],
        taking: Taking,
        maker: BatchMaker,
        pin: Callable[[Any], Any] | None = None,
        aside: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.taking = taking
        self.handoff = taking.handoff
        self.ready = self.handoff.ready
        self.to_do: deque[tuple[int, Any]] = deque()
        self.making = threading.Lock()
        self.plan_ended = self.is_torn = self.closed = False
        self._plan = plan
        self._arrivals = Arrivals(self, plan)
        self._make = maker.answer
        self._pin = pin
        self._aside = aside
        self._is_stream, self._is_batched = maker.spec.is_iterable, maker.spec.auto_collation
        self._knows_places = maker.spec.knows_places
        self._names = namer(maker.spec.dataset, of_batches=self._is_batched)
        self._pid = os.getpid()
        self._kicks: queue.SimpleQueue[object] = queue.SimpleQueue()  # True: look for work; anything else: end
        self._thread: threading.Thread | None = None
        _runs.add(self)

    # --------------------------------------------------------------------------------------------- consumers' threads

    @property
    def is_over(self) -> bool:
        """Whether all of the plan is made, and taken."""
        return self.plan_ended and not self.to_do and not self.taking.has_ready

    def close(self) -> None:
        """Read nothing more."""
        self.closed = True
        self._arrivals.leave()

    def has_news(self) -> bool:
        """Whether a task that waits should look again: at a batch, at an end, or as nobody is to make one for it."""
        return self.lacks(self.handoff.waiting) or self.taking.has_ready or self.closed or self.is_over

    def lacks(self, tasks: int) -> bool:
        """Whether nobody is to make a batch for some of so many tasks, and there are more of them."""
        return not (self.plan_ended or self._arrivals.are_awaited) and len(self.to_do) < tasks

    @property
    def has_asked(self) -> bool:
        """Whether keys are still to arrive, and nothing is there meanwhile; `keys_came` is called then."""
        return self._arrivals.are_awaited and not (self.taking.has_ready or self.closed)

    def keys_came(self) -> None:
        """Have consumers look again: keys have come that were to be read. In the thread that brings them."""
        try:
            with self.taking.progress.lock:
                self._arrivals.are_awaited = False
        finally:
            self.handoff.wake_all()

    def read(self) -> bool:
        """Read the keys of another batch of the sampler, unless this has come to its end, or they are still to arrive.

        Returns:
            Whether there were some.
        """
        progress = self.taking.progress
        with progress.lock:
            while not self._arrivals.must_wait():
                # Not `next`: an interrupt between its end and the assignment would lose what it has returned.
                for keys in self._plan:
                    if keys is not VOID:
                        self.to_do.append((progress.read - 1, keys))
                        return True
                    break  # it was given before: what follows may be still to arrive
                else:
                    self.plan_ended = True
                    break
        return False

    def make(self, *, aside: bool = False) -> None:
        """Make the first batch that is to do, with `making` held.

        Args:
            aside: In the run's thread, where consumers hear of an interruption in place of the batch. In a consumer's
                thread an interruption leaves the batch to the next maker.
        """
        batch, keys = self.to_do[0]
        try:
            item = self.item(batch, keys)
        except BaseException as error:
            if not aside:
                self.is_torn = self._is_stream
                raise
            item = Item(Outcome(Kind.FAILURE, error=error), batch, 0, None, -1 if self._is_stream else batch)
        del self.to_do[0]
        self.ready.append(item)  # no interrupt could come between the two
        del item  # what a sample has raised may refer to this frame, which refers to all of the run

    def kick(self) -> None:
        """Have the thread of this run make what is to do; start the thread if there is none yet."""
        self._kicks.put(True)
        if self._thread is None:
            self._thread = threads.start(partial(self._serve, Modes.of_this_thread()), "asyncloader fetch")

    def stop_with(self, iterator: object) -> None:
        """End the thread when this is dropped. See :meth:`asyncloader.engine.engine.Engine.close_with`."""
        self._iterator = weakref.ref(iterator, self._kicks.put)

    def stop(self) -> None:
        """End the thread after the batches that tasks wait for. Returns at once."""
        self._kicks.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def wait_made(self, timeout_s: float) -> None:
        """Wait until no batch is being made; not in a fork, which does not have the thread that makes it."""
        if self._pid == os.getpid() and self.making.acquire(timeout=timeout_s):
            self.making.release()

    # ----------------------------------------------------------------------------------------------- the run's thread

    def _serve(self, modes: Modes) -> None:
        with modes.active():
            while self._kicks.get() is True:
                while self._serve_one():
                    self.handoff.wake()
        self._kicks.put(None)  # for another thread, if a Ctrl-C inside `threads.start` had two of them started

    def _serve_one(self) -> bool:
        """Make a batch, if there is one to do."""
        with self.making:
            if self.closed or self.is_torn or not self.to_do:
                return False
            self.make(aside=True)
        return True

    # --------------------------------------------------------------------------------------------------- a batch

    def item(self, batch: int, keys: Any) -> Item:
        """Make a batch, or take what is raised in its place. An interruption passes through; then it can be made anew.

        Args:
            batch: Number of the batch in the plan.
            keys: The keys of its samples.
        """
        if self._knows_places:
            keys = self.taking.progress.placed(batch, keys)
        outcome = self._make(batch, keys) if self._aside is None else self._make_aside(batch, keys)
        if self._pin is not None and outcome.kind == Kind.BATCH:
            outcome = self._pinned(outcome)
        if outcome.kind != Kind.BATCH:
            try:
                return self._no_batch(outcome, batch, keys)
            finally:
                del outcome  # what a sample raises refers to this frame, and to those below
        in_stream, keys = (-1, None) if self._is_stream else (batch, keys)
        return _new(Item, (outcome, batch, 0, perf_counter(), in_stream, keys, True))

    def _make_aside(self, batch: int, keys: Any) -> Outcome:
        assert self._aside is not None
        with self._aside():
            return self._make(batch, keys)

    def _pinned(self, batch: Outcome) -> Outcome:
        """Return the batch in page-locked memory, or what that raises."""
        assert self._pin is not None
        try:
            return batch._replace(data=self._pin(batch.data))
        except Exception as error:
            return batch._replace(kind=Kind.FAILURE, data=None, error=error)

    def _no_batch(self, outcome: Outcome, batch: int, keys: Any) -> Item:
        """Return what comes in place of a batch."""
        if outcome.kind == Kind.EXHAUSTED:
            return Item(outcome)
        if outcome.kind == Kind.FAILURE and not isinstance(outcome.error, BaseException):
            plain = self._names(keys.keys if type(keys) is Placed else keys)
            outcome = outcome._replace(error=outcome.error.rebuild(None if self._is_stream else plain))
        if outcome.kind == Kind.LEFT_OUT:
            bad = [sample.key for sample in outcome.bad]
            self.taking.limit.faults.left_out.append(bad if self._is_batched else bad[0])
        return Item(outcome, batch, 0) if self._is_stream else Item(outcome, batch, 0, None, batch, keys)


_runs: weakref.WeakSet[InlineRun] = weakref.WeakSet()


def _stop_at_exit() -> None:
    """Have our threads end, and let daemon threads of the user's finish their batch.

    See :mod:`asyncloader.threads` for what would happen to them in the middle of one.
    """
    runs = threads.copied(_runs)
    for run in runs:
        run.stop()
    for run in runs:
        run.wait_made(exits.grace_left_s())


exits.at_exit(_stop_at_exit)
