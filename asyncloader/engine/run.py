"""One run over the data (an epoch): what is planned, in work, ready and taken of it.

    consumers ── read ──> plan ──> inbox ──> loop thread: session, scheduler ──> workers
              <── take ── hand-off <────────────── fail, answered, finish

Consumers and the loop thread share it; each side has methods of its own, and each attribute one side that writes it.
The sampler is read when torch would read it: as far as the window, then one batch of keys for each batch taken. A
consumer that would wait anyway also reads on for run-ahead. Nothing waits in here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncloader.engine import exits
from asyncloader.engine.actions import Action, Fail, Ticket
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.handoff import Handoff
from asyncloader.engine.progress import Progress
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.sliced import Sliced, batches_of, contents
from asyncloader.engine.tracks import Track, make_tracks
from asyncloader.errors import describe_keys
from asyncloader.observe.meter import BatchTimes, Meter
from asyncloader.workers.protocol.failure import stand_in
from asyncloader.workers.protocol.messages import EpochSpec
from asyncloader.workers.protocol.outcome import NO_RECORD, Batch, Failure, LeftOut, Outcome
from asyncloader.workers.protocol.snapshot import Frozen, Start

log = logging.getLogger("asyncloader")


class Item(NamedTuple):
    """What the consumer gets: an outcome whose turn has come.

    Attributes:
        outcome: A batch, what was raised in its place, or nothing, but the place in the window is free; the end of the
            data, where batches are made in this process.
        seq: Number of the batch in the plan; -1 beside the order.
        worker: Who has answered the ticket; -1 for nobody.
        times: The meter's note of a batch.
        number: Of the batch in the stream of its worker.
        keys: Where they may be needed to make the batch again.
        counts: It is in order, and frees a place in the window.
    """

    outcome: Outcome
    seq: int = -1
    worker: int = -1
    times: BatchTimes | None = None
    number: int = -1
    keys: Any = None
    counts: bool = True

    def open(self) -> Any:
        """Return the batch, or raise what came in its place."""
        outcome = self.outcome
        if type(outcome) is Batch:
            return outcome.data
        try:
            if type(outcome) is Failure:
                raise stand_in(outcome.error)
            raise StopIteration
        finally:
            del self, outcome  # the traceback refers to this frame


def failed(error: BaseException, seq: int = -1, *, counts: bool = True) -> Item:
    """Return what is raised in place of a batch that no worker has come to."""
    return Item(Failure(NO_RECORD, error), seq, counts=counts)


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

    Attributes:
        taken: Batches of the plan that consumers have taken, those before the run included.
        inbox: Keys that were read, for the loop thread.
        plan_ended: There are no more behind these.
        handoff: What consumers can take.
        ended: Everything that was planned has been handed over. Written by the loop thread, as all that follows.
        closed: Nobody makes batches any more.
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
    ) -> None:
        self.scheduler = scheduler
        self.meter = meter
        self.epoch = epoch
        self.progress = progress
        self.faults = limit.faults
        self.ends: dict[int, Frozen] = {}
        self._is_stream = is_stream
        self._overlaps = overlaps
        self.begin_at(epoch.starts or {})
        self.handoff: Handoff[Item] = Handoff()
        self.ended = self.closed = False
        self.read_until = 0
        self.void_count = 0

        self.inbox: deque[Any] = deque()
        self.plan_ended = False
        self.taken = self._planned = progress.position  # as if those before had been taken
        self._plan = plan
        self._plan_error: Exception | None = None
        self._limit = limit
        self._window = window  # written by the loop thread later on
        self._lock = progress.lock
        self._taker = 0
        self._wake_loop: Callable[[], None]
        self._wake_posted = False

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
        self._plan, self.progress, self._limit, self._lock = plan, progress, limit, progress.lock
        self.meter.restart_clock()

    @property
    def exhausted(self) -> bool:
        """Whether everything was taken."""
        return self.progress.finished

    def take(self, asked_at: float = 0.0) -> Item | None:
        """Take the next item if there is one, and read the sampler on by what that frees.

        Args:
            asked_at: Since when the consumer has waited; 0.0 if it has just come.
        """
        ready, progress, meter = self.handoff.ready, self.progress, self.meter
        with self._lock:
            try:
                item = ready.popleft()
            except IndexError:
                return None
            if self._taker != threading.get_ident():
                self._note_taker()
            self.taken += item.counts
            try:
                self._read(self._window + self.taken + self.void_count)
            except BaseException:  # Ctrl-C inside the sampler: the batch is not lost
                self.taken -= item.counts
                ready.appendleft(item)
                raise
            outcome = item.outcome
            if item.seq >= 0:
                progress.done(item.seq)
                if item.worker >= 0:
                    progress.answered(item.worker, outcome.snapshot, item.number, item.keys)
            if outcome.bad and (error := self._limit.count(outcome.bad)) is not None:
                item = failed(error)
            if type(item.outcome) is Failure:
                meter.failed()
            elif item.times is not None:
                meter.took(asked_at, item.times, self._planned - self.taken - self.void_count, len(ready))
            if self._plan_error is not None:
                self.handoff.wake()  # what the sampler raised may be due now, and we may not come again
        return None if type(item.outcome) is LeftOut else item

    def read_on(self) -> None:
        """Do what a consumer can do before it waits.

        Raises:
            StopIteration: if everything was taken.
            Exception: what the sampler raised, when its turn has come.
        """
        self._note_taker()
        with self._lock:
            self._read(self._may_read())
            if self._plan_error is not None and self._is_plan_error_due():
                self.handoff.wake()  # somebody else reads on
                error, self._plan_error = self._plan_error, None
                try:
                    raise error
                finally:
                    del error
        if self.ended and not self.handoff.ready:
            self.progress.ends = self.ends
            self.progress.finished = True
            self.meter.log_summary()
            raise StopIteration

    def has_news(self) -> bool:
        """Whether there is something to take or to do, so that a consumer should not wait."""
        if self.handoff.ready or self.ended or self.closed:
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
                keys = next(self._plan)
            except StopIteration:
                self.plan_ended = True
            except Exception as error:
                self._plan_error = error
                return
            else:
                self._planned += 1
                self.inbox.append(keys)
            if not self._wake_posted:
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
        plan_ended, batches = self.plan_ended, []
        while self.inbox:
            batches.append(self.inbox.popleft())
        return batches, plan_ended

    def close(self) -> None:
        """Drop what is ready, and wake consumers: nobody makes batches any more."""
        self.closed = True
        self.handoff.ready.clear()
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
        batches = batches_of(action.tickets)
        error = action.cause(batches)
        if action.at_once:
            self.handoff.ready.appendleft(failed(error, counts=False))
            self.handoff.wake()
            return []
        (batch,) = batches
        item = failed(error, batch.seq)
        if action.leave_out:
            log.warning("The batch with the indices %s is left out: %s", describe_keys(batch.keys), error)
            if not any(keys is batch.keys for keys in self.faults.left_out):  # another slice of it may have failed
                self.faults.left_out.append(batch.keys)
            item = Item(LeftOut(NO_RECORD), batch.seq)
        return self.scheduler.ready(action.tickets[0].seq, item)

    def assemble(self, batch: Sliced) -> Item:
        """Make a batch of the rows that workers have written."""
        nbytes = batch.room.nbytes
        times = self.meter.came_in_rows(batch.number, batch.times, nbytes)
        data = batch.room.batch(batch.texts)
        batch.let_go()
        return Item(Batch(NO_RECORD._replace(seq=batch.last), data, nbytes), batch.number, times=times)

    def contents(self, ticket: Ticket) -> Any:
        """Return what a worker is to know of a ticket."""
        return self.progress.placed(ticket.seq, ticket.keys) if ticket.part is None else contents(ticket, self.progress)

    def let_read(self, until: int) -> None:
        """Let a consumer that waits read the sampler on."""
        self.void_count = self.scheduler.void_count
        self.read_until = max(self.read_until, until)
        self.handoff.wake()

    def resize(self, window: int) -> None:
        """Let consumers read the sampler so many batches ahead of what they have taken."""
        self._window = window
        self.handoff.wake()

    def finish(self) -> None:
        """Tell consumers that everything that was planned has been handed over."""
        self.ended = True
        self.handoff.wake_all()

    def begin_after(self, past: dict[int, Sequence[Start]]) -> None:
        """Note what workers of a stream had been through before, by worker."""
        for worker, runs in past.items():
            self.tracks[worker].begin_after(runs)
