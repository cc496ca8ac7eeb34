"""The consumer's side of one run: reads the sampler, takes what is handed over. No waiting in here.

    sampler ── read ──> plan ── push ──> session          (as far as the window, then one for each batch taken)
    hand-off ── take ──> item                             (a batch, or an exception in its place)

All of it happens in the threads of the consumers, under one lock, so that several of them may share an iterator. The
sampler is read when torch would read it; a consumer that would wait anyway also reads on for run-ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from asyncloader.engine import exits
from asyncloader.engine.actions import VOID
from asyncloader.engine.run import Item, PlanEnd, Run, failed
from asyncloader.engine.session import Session, State
from asyncloader.iteration.error_limit import ErrorLimit
from asyncloader.iteration.plan import Done
from asyncloader.iteration.progress import Progress
from asyncloader.workers.protocol.outcome import Failure, LeftOut


class Consumer:
    """Counts what was planned and taken of one run.

    Args:
        session: Makes the batches.
        run: The run.
        sampler: Iterator over batches of keys. It may be infinite, or raise.
        window: Batches in flight or waiting.
        progress: Where the run begins, and how far it is.
        limit: Counts bad samples.
    """

    def __init__(
        self,
        session: Session,
        run: Run,
        sampler: Iterator[Any],
        window: int,
        progress: Progress,
        limit: ErrorLimit,
    ) -> None:
        self.run = run
        self.progress = progress
        self.taken = progress.position  # as if those before had been taken
        self._session = session
        self._sampler = sampler
        self._window = window
        self._limit = limit
        self._lock = progress.lock
        self._planned = progress.position
        self._plan_ended = False
        self._plan_error: Exception | None = None
        self._taker = 0
        self._note_taker()
        with self._lock:
            self._read(window + self.taken)

    @property
    def exhausted(self) -> bool:
        """Whether everything was taken."""
        return self.progress.finished

    def take(self, asked_at: float = 0.0) -> Item | None:
        """Take the next item if there is one, and read the sampler on by what that frees.

        Args:
            asked_at: Since when the consumer has waited; 0.0 if it has just come.
        """
        run = self.run
        with self._lock:
            try:
                item = run.handoff.ready.popleft()
            except IndexError:
                return None
            if self._taker != threading.get_ident():
                self._note_taker()
            self.taken += item.counts
            try:
                self._read(self._window + self.taken + run.void_count)
            except BaseException:  # Ctrl-C inside the sampler: the batch is not lost
                self.taken -= item.counts
                run.handoff.ready.appendleft(item)
                raise
            outcome = item.outcome
            if type(outcome) is Failure:
                run.meter.failed()
            elif item.times is not None:
                used = self._planned - self.taken - run.void_count
                run.meter.took(asked_at, item.times, used, len(run.handoff.ready))
            if item.seq >= 0:
                self.progress.done(item.seq)
                if item.worker >= 0:
                    self.progress.answered(item.worker, outcome.snapshot, item.number, item.keys)
            if self._plan_error is not None:
                run.handoff.wake()  # what the sampler raised may be due now, and we may not come again
            if outcome.bad:
                item = self._judge(item)
        return None if type(item.outcome) is LeftOut else item

    def _judge(self, item: Item) -> Item:
        """Count the bad samples of an item; it becomes an error if there are too many by now."""
        error = self._limit.count(item.outcome.bad)
        return item if error is None else failed(error)

    def read_on(self) -> None:
        """Do what a consumer can do before it waits.

        Raises:
            StopIteration: if everything was taken.
            Exception: what the sampler raised, when its turn has come.
        """
        run = self.run
        self._note_taker()
        with self._lock:
            self._read(self._may_read())
            if self._plan_error is not None and self._is_plan_error_due():
                run.handoff.wake()  # somebody else reads on
                error, self._plan_error = self._plan_error, None
                try:
                    raise error
                finally:
                    del error
        if run.ended and not run.handoff.ready:
            self.progress.ends = run.ends
            self.progress.finished = True
            run.meter.log_summary()
            raise StopIteration

    def has_news(self) -> bool:
        """Whether there is something to take or to do, so that a consumer should not wait."""
        run = self.run
        if run.handoff.ready or run.ended or self._session.state not in (State.NEW, State.OPEN):
            return True
        if self._plan_error is not None:
            return self._is_plan_error_due()
        return not self._plan_ended and self._may_read() > self._planned

    def _read(self, until: int) -> None:
        """Read the sampler on, until so many batches of keys were read in all. With the lock held.

        What a sampler raises stands in the place of the batch that it should have named, after those before it.
        """
        while self._planned < until and not self._plan_ended and self._plan_error is None:
            try:
                keys = next(self._sampler)
            except StopIteration:
                self._plan_ended = True
                self._session.push(PlanEnd())
                return
            except Exception as error:
                self._plan_error = error
                return
            self._planned += 1
            self._session.push(VOID if keys is Done else keys)

    def _may_read(self) -> int:
        """Return how far a consumer that waits may read the sampler."""
        return max(self._window + self.taken + self.run.void_count, self.run.read_until)

    def _is_plan_error_due(self) -> bool:
        return self.taken + self.run.void_count >= self._planned

    def _note_taker(self) -> None:
        """Remember who takes: at interpreter exit, threads that train on are waited for."""
        self._taker = threading.get_ident()
        exits.note_user()
