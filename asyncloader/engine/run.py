"""One run over the data (an epoch): what is planned, in work, ready and taken of it.

    consumers ── read ──> plan ──> inbox ──> loop thread: session, scheduler ──> workers
              <── take ── hand-off <────────────── fail, answered, finish

Consumers and the loop thread share it; each side has methods of its own, and each attribute one side that writes it.
The sampler is read when torch would read it: as far as the window, then one batch of keys for each batch taken. A
consumer that would wait anyway also reads on for run-ahead. Nothing waits in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncloader.engine import exits
from asyncloader.engine.actions import Action, Fail, Ticket
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.progress import Call, Progress
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.splitter import Splitter
from asyncloader.engine.taking import Item, Taking, failed
from asyncloader.engine.tracks import Track, make_tracks
from asyncloader.errors import describe_keys
from asyncloader.messages.failure import another
from asyncloader.messages.messages import EpochSpec
from asyncloader.messages.outcome import NO_RECORD, Failure, LeftOut
from asyncloader.messages.snapshot import Frozen, Start
from asyncloader.observe.meter import Meter

log = logging.getLogger("asyncloader")


class Run:
    """One run over the data (an epoch).

    Args:
        scheduler: Decides who makes what.
        epoch: The run, as workers know it.
        meter: Counts what happens.
        plan: Iterator over batches of keys. It may be infinite, or raise.
        progress: Where the run begins, and how far it is.
        limit: Counts bad samples.
        window: Batches in flight or waiting.
        is_stream: The dataset is iterable.
        overlaps: A worker has samples of several batches in work at once.
        splitter: Divides batches into slices, or None.

    Attributes:
        taking: What consumers take by.
        inbox: Keys that were read, for the loop thread.
        plan_ended: There are no more behind these.
        handoff: What consumers can take.
        exhausted: Everything was taken.
        ended: Everything that was planned has been handed over. Written by the loop thread, as all that follows.
        closed: Nobody makes batches any more.
        error: Why, if that is no consumer's wish.
        read_until: A consumer that waits may read the sampler on, until it has read so many batches of keys.
        void_count: Tickets that made no batch; each frees a place in the window.
        faults: What went wrong and was mended.
        ends: By worker, the state of its stream after the end, if that outlasts the run.
        tracks: By worker, how far it is, for datasets that workers have a place or a state in.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        epoch: EpochSpec,
        meter: Meter,
        plan: Iterator[Any],
        progress: Progress,
        limit: ErrorLimit,
        window: int,
        *,
        is_stream: bool = False,
        overlaps: bool = False,
        splitter: Splitter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.splitter = splitter
        self.meter = meter
        self.epoch = epoch
        self.progress = progress
        self.faults = limit.faults
        self.ends: dict[int, Frozen] = {}
        self._is_stream = is_stream
        self._overlaps = overlaps
        self.begin_at(epoch.starts or {})
        self.taking = Taking(progress, limit)
        self.handoff = self.taking.handoff
        self.ended = self.closed = self.exhausted = False
        self.error: BaseException | None = None
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()  # consumers that have raised it
        self.read_until = 0
        self.void_count = 0

        self.inbox: deque[Any] = deque()
        self.plan_ended = False
        self._planned = self.taken
        self._plan = plan
        self._plan_error: Exception | None = None
        self._window = window  # written by the loop thread later on
        self._lock = progress.lock
        self._taker = 0
        self._wake_loop: Callable[[], None]
        self._wake_posted = False
        self._end_known = False  # to the loop thread: that of the plan

    # ---------------------------------------------------------------------------------------- the consumers' side
    #
    # In their threads, under one lock, so that several of them may share an iterator.

    def begin(self, wake_loop: Callable[[], None], until: int | None = None) -> None:
        """Read the sampler as far as the window.

        Args:
            wake_loop: Has the loop thread look into the inbox.
            until: How many batches of keys to read, if not as far as the window.
        """
        self._wake_loop = wake_loop
        self._note_taker()
        with self._lock:
            self._read(self._window + self.taken if until is None else until)

    def take_up(self, plan: Iterator[Any], progress: Progress, limit: ErrorLimit) -> None:
        """Go on with the sampler itself, after a run that was begun ahead with the first keys of it.

        Args:
            plan: Iterator over the batches of keys that follow.
            progress: In which those before are counted as read.
            limit: Counts bad samples, as faults of this run.
        """
        self._plan, self.progress, self._lock = plan, progress, progress.lock
        self.taking.progress, self.taking.limit = progress, limit
        self.meter.restart_clock()

    @property
    def taken(self) -> int:
        """Batches of the plan that consumers have taken, those before the run included."""
        return self.taking.taken

    def take(self, call: Call, asked_at: float = 0.0) -> Item | None:
        """Take the next item if there is one, and read the sampler on by what that frees.

        Args:
            call: Of the consumer.
            asked_at: Since when the consumer has waited; 0.0 if it has just come.
        """
        meter = self.meter
        with self._lock:
            if (item := self.taking.take(call)) is None:
                return None
            if self._taker != threading.get_ident():
                self._note_taker()
            if item.counts:
                self._read(self._window + self.taken + self.void_count)
            if type(item.outcome) is Failure:
                meter.failed()
            elif item.times is not None:
                used = self._planned - self.taken - self.void_count
                meter.took(asked_at, item.times, used, len(self.handoff.ready))
            if self._plan_error is not None:
                self.handoff.wake()  # what the sampler raised may be due now, and we may not come again
        return item

    def read_on(self) -> None:
        """Do what a consumer can do before it waits.

        Raises:
            StopIteration: if everything was taken.
        """
        self._note_taker()
        with self._lock:
            self._read(self._may_read())
            if (error := self._plan_error) is not None and self._is_plan_error_due():
                item = failed(error, counts=False)
                self._plan_error = None
                self.handoff.ready.append(item)  # no signal's handler comes between the two
                del item, error  # a traceback refers to this frame
            is_over = self.ended and not self.taking.has_ready
        if is_over:
            self.progress.ends = self.ends
            self.meter.log_summary()
            self.exhausted = True
            raise StopIteration

    def check(self) -> None:
        """Raise what has ended the run, after all that is ready: to each consumer once, a thread or a task.

        Raises:
            BaseException: that.
            StopIteration: for one that has been told, and goes on after every error. Its epoch is not over in states.
        """
        if self.error is None or self.ended or self.taking.has_ready:
            return
        consumer: Any = None
        with contextlib.suppress(RuntimeError):  # there is no loop
            consumer = asyncio.current_task()
        consumer = consumer or threading.current_thread()
        if consumer in self._told:
            self.progress.is_broken = True
            raise StopIteration
        self._told.add(consumer)
        raise another(self.error)

    def has_news(self) -> bool:
        """Whether there is something to take or to do, so that a consumer should not wait."""
        if self.taking.has_ready or self.ended or self.closed or self.error is not None:
            return True
        if self._plan_error is not None:
            return self._is_plan_error_due()
        return not self.plan_ended and self._may_read() > self._planned

    def _read(self, until: int) -> None:
        """Read the sampler on, until so many batches of keys were read in all. With the lock held.

        What a sampler raises stands in the place of the batch that it should have named, after those before it. One
        wake-up of the loop serves all that is read before it gets its turn: that coalesces the traffic of a consumer
        that finds its batches ready.
        """
        while self._planned < until and not self.plan_ended and self._plan_error is None:
            try:
                # Not `next`: an interrupt between its end and the assignment would lose what it has returned.
                for keys in self._plan:
                    self._planned += 1
                    self.inbox.append(keys)
                    break
                else:
                    self.plan_ended = True
            except Exception as error:
                self._plan_error = error
            self._wake()
        self._wake()  # an interrupted call may have come to less

    def _wake(self) -> None:
        """Have the loop thread look into the inbox, if there is something new and it is not about to."""
        if not self._wake_posted and (self.inbox or self.plan_ended is not self._end_known):
            try:
                self._wake_posted = True
                self._wake_loop()
            except BaseException:  # Ctrl-C: the next one must not rely on this wake-up
                self._wake_posted = False
                raise

    def _may_read(self) -> int:
        """Return how far a consumer that waits may read the sampler."""
        return max(self._window + self.taken + self.void_count, self.read_until)

    def _is_plan_error_due(self) -> bool:
        return self.taken + self.void_count >= self._planned

    def _note_taker(self) -> None:
        """Remember who takes: at interpreter exit, threads that train on are waited for."""
        self._taker = threading.get_ident()
        exits.note_user()

    # ------------------------------------------------------------------------------------------------ loop thread

    def read_inbox(self) -> tuple[list[Any], bool]:
        """Return the keys that have come, and whether there are no more behind them."""
        # Cleared before the inbox is read: what is read in between posts one wake-up too many, never one too few.
        self._wake_posted = False
        self._end_known = plan_ended = self.plan_ended
        batches = []
        while self.inbox:
            batches.append(self.inbox.popleft())
        return batches, plan_ended

    def close(self) -> None:
        """Drop what is ready, and wake consumers: nobody makes batches any more."""
        self.closed = True
        if self.error is None:
            self.taking.clear()
        self.handoff.wake_all()

    def stop(self, error: BaseException) -> None:
        """Have consumers take what is ready, and raise this then, unless all batches are there."""
        self.error = error
        self.handoff.wake_all()

    def begin_at(self, starts: dict[int, Start]) -> None:
        """Note where workers are at the beginning."""
        key = None if self._is_stream else self.epoch.key
        self.tracks = make_tracks(starts, key, overlaps=self._overlaps)

    def start_of(self, worker: int) -> Start | None:
        """Return where another worker would begin; None where workers have no place in the data."""
        return self.tracks[worker].start if self.tracks else None

    def given(self, worker: int, ticket: Ticket) -> None:
        """Note that a worker gets a ticket."""
        self.faults.retries += ticket.tries > 0
        if isinstance(track := self.tracks.get(worker), Track):
            track.given(ticket.seq)

    def answered(self, item: Item, ticket: Ticket) -> Item:
        """Note that a worker has answered a ticket, which decides where a replacement would begin."""
        snapshot = item.outcome.snapshot
        # What an iterator tells after its end is no place to begin at: some would begin anew.
        place = None if isinstance(snapshot, Frozen) and snapshot.ended else snapshot
        keys = None if self._is_stream else self.progress.placed(ticket.seq, ticket.keys)
        return item._replace(number=self.tracks[item.worker].answered(item.seq, place, keys), keys=keys)

    def lost(self, worker: int) -> None:
        """Note that what a worker that is gone had been given was not made."""
        if self.tracks:
            self.tracks[worker].lost()

    def fail(self, action: Fail) -> list[Action]:
        """Make one error of tickets that are given up, and hand it over, or leave the batch out."""
        assert action.cause is not None
        batches = self.batches_of(action.tickets)
        error = action.cause(batches)
        if action.at_once:
            self.handoff.ready.appendleft(failed(error, counts=False))
            self.handoff.wake()
            return [] if self.splitter is None else self.splitter.lost(action.tickets)
        (batch,) = batches
        item = failed(error, batch.seq)
        if action.leave_out:
            log.warning("The batch with the indices %s is left out: %s", describe_keys(batch.keys), error)
            if self.splitter is None:
                self.faults.left_out.append(batch.keys)
            item = Item(LeftOut(NO_RECORD), batch.seq)
        return self.ready(action.tickets[0].seq, item)

    def planned(self, batches: Sequence[Any]) -> list[Action]:
        """Return what follows from batches of keys that have come."""
        return (self.splitter or self.scheduler).planned(batches)

    def ready(self, seq: int, item: Any, nbytes: int = 0) -> list[Action]:
        """Return what follows from the outcome of a ticket; see `Scheduler.ready`."""
        return (self.splitter or self.scheduler).ready(seq, item, nbytes)

    def awaited(self) -> Ticket | None:
        """Return the ticket that holds up the consumer; None if no worker has it."""
        return None if (self.splitter or self.scheduler).is_finishing() else self.scheduler.awaited()

    def contents(self, ticket: Ticket) -> Any:
        """Return what a worker is to know of a ticket."""
        if self.splitter is not None:
            return self.splitter.contents(ticket, self.progress)
        return self.progress.placed(ticket.seq, ticket.keys)

    def batch_of(self, ticket: Ticket) -> tuple[int, Any, int | None]:
        """Return number and keys of the batch that a ticket is of; of a slice, also where in that batch it begins."""
        if self.splitter is None:
            return ticket.seq, ticket.keys, None
        batch = self.splitter.batch(ticket.seq)
        return batch.number, batch.keys, None if batch.is_whole else batch.bounds[ticket.seq - batch.first]

    def batches_of(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """Return the batches that tickets are of: each as one ticket, with its number in the plan."""
        return tickets if self.splitter is None else self.splitter.batches_of(tickets)

    def let_read(self, until: int) -> None:
        """Let a consumer that waits read the sampler on."""
        self.void_count = self.scheduler.void_count
        if self.splitter is not None:
            until, self.void_count = self.splitter.read_until(until), self.splitter.num_void
        self.read_until = max(self.read_until, until)
        self.handoff.wake()

    def resize(self, window: int) -> None:
        """Let consumers read the sampler so many batches ahead of what they have taken."""
        self._window = window
        self.handoff.wake()

    def finish(self) -> None:
        """Tell consumers that everything that was planned has been handed over."""
        self.ended = self.error is None
        self.handoff.wake_all()
