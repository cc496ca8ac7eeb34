"""A run over the data (an epoch): what is planned, in work, ready and taken of it.

    consumers ── read ──> plan ──> inbox ──> loop thread: engine, scheduler ──> workers
              <── first, count ── hand-off <────── answered, follow

Consumers and the loop thread share it, and each side has methods of its own.
The sampler is read when torch would read it: as far as the window, then one batch of keys for each batch taken. A
consumer that would wait anyway also reads on for run-ahead. Where the keys themselves are waited for (`arrives` of a
plan), whoever brings them reads on as well. Nothing waits in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from asyncloader.engine import exits
from asyncloader.engine.actions import END, NOTHING, Ticket
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.handoff import Handoff
from asyncloader.engine.item import Item, failed
from asyncloader.engine.progress import Place, Progress
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.tracks import Progressing, make_tracks
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.failure import another
from asyncloader.messages.messages import EpochSpec, Kind
from asyncloader.messages.outcome import Outcome
from asyncloader.messages.snapshot import Frozen, WorkerStart
from asyncloader.messages.tickets import as_read, unpickled
from asyncloader.observe.faults import Faults
from asyncloader.observe.meter import Meter
from asyncloader.options import Options
from asyncloader.protocols import namer

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


class Run:
    """A run over the data (an epoch).

    Args:
        options: The options of the run.
        scheduler: Decides who makes what.
        epoch: The run, as workers know it.
        meter: Counts what happens.
        plan: Reads batches of keys (`asyncloader.run.plan.Plan`).
        progress: Where the run begins, and how far it is.

    Attributes:
        limit: Counts bad samples.
        taken: How many batches of the plan were taken, those before the run included.
        inbox: Keys that were read, for the loop thread. Consumers append; the loop thread takes from its front, each by
            one step that the other cannot be in the middle of.
        plan_ended: The sampler has no more keys behind these.
        handoff: Items that consumers can take.
        is_asked: The consumer that waits has asked the loop thread what its batch waits for.
        is_answered: It has an answer.
        all_taken: All items were taken, and whoever takes was told so: what `close` drops was not taken.
        ended: Everything that was planned has been handed over. Written by the loop thread, as all that follows.
        closed: No more batches are made.
        error: Why no more are made, if that is no consumer's wish.
        faults: Counts failures that were handled.
        ends: By worker, the state of its stream after the end, if that outlasts the run.
        is_stream: The dataset is iterable.
        tracks: By worker, how far it is, for datasets that workers have a place or a state in.
    """

    ended: bool
    closed: bool
    all_taken: bool
    is_answered: bool
    tracks: dict[int, Progressing]

    def __init__(
        self,
        options: Options,
        scheduler: Scheduler,
        epoch: EpochSpec,
        meter: Meter,
        plan: Any,
        progress: Progress,
    ) -> None:
        self.scheduler = scheduler
        self.meter = meter
        self.epoch = epoch
        self.progress = progress
        self.faults: Faults = meter.faults
        self.ends: dict[int, Frozen] = {}
        self.is_stream: bool = options.is_iterable
        self._overlaps = options.overlaps
        self._names = namer(options.dataset, of_batches=options.auto_collation)
        self.begin_at(epoch.starts or {})
        is_asked_for_keys = self.tracks or progress.knows_places
        self._in_pickles = not (options.is_in_process or options.provider or is_asked_for_keys)
        self.limit: ErrorLimit = ErrorLimit(options, progress, meter.faults)
        self.handoff: Handoff[Item] = Handoff()
        self.taken: int = progress.now.position  # as if those before had been taken
        self._urgent: deque[BaseException] = deque()  # raised before what is ready
        self.ended = self.closed = self.all_taken = self.is_asked = self.is_answered = False
        self.error: BaseException | None = None
        self._raised_in: weakref.WeakSet[Any] = weakref.WeakSet()  # consumers that have raised it

        self.inbox: list[Any] = []
        self.plan_ended: bool = False
        self._planned = self.taken
        self.plan: Any = plan
        plan.tell(self)
        self._is_left = False
        self._is_plain, self._rest = progress.counts_simply(options), progress.now[1:]
        self._plan_error: Exception | None = None
        self._reading: Iterator[Exception]
        # The figures as consumers and statistics were last told of them.
        self._followed = scheduler.num_workers, scheduler.window, scheduler.read_until, scheduler.void_count
        self._lock = progress.lock
        self._wake_loop: Callable[[], None]
        self._wake_posted = False
        self._end_known = False  # to the loop thread: that of the plan

    # ---------------------------------------------------------------------------------------- the consumers' side
    #
    # In their threads, under one lock, so that several of them may share an iterator.

    def read_first(self, wake_loop: Callable[[], None]) -> None:
        """Read the keys of the first batches: as far as the window.

        Args:
            wake_loop: Has the loop thread look into the inbox. Must not keep the engine alive.
        """
        self._wake_loop = wake_loop
        exits.note_user()
        with self._lock:
            self._read(self.scheduler.window + self.taken)

    @property
    def has_ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self.handoff.ready or self._urgent)

    def first(self) -> Item | None:
        """Return the item whose turn it is, which stays where it is until it is counted; None if there is none.

        Batches that are left out are counted, and passed over.
        """
        ready = self.handoff.ready
        self.progress.follower()
        if self._urgent:
            item = failed(self._urgent[0], counts=False)
            del self._urgent[0]  # this calls nothing, so no signal's handler comes before the item is there
            ready.appendleft(item)
        while ready:
            item = ready[0]
            outcome = item.outcome
            if outcome.bad and (error := self.limit.count(outcome.bad, self.progress.now.bad_count)) is not None:
                return item._replace(outcome=outcome._replace(kind=Kind.FAILURE, data=None, error=error), row=None)
            if outcome.kind != Kind.LEFT_OUT:
                return item
            self.count(item)
        return None

    def read_for(self, item: Item, asked_at: float, came_at: float) -> None:
        """Read the sampler on by what an item frees that is about to be given, and count it for the figures.

        Args:
            item: The item.
            asked_at: Since when the consumer has waited; 0.0 if it has just come.
            came_at: Since when it need not wait.
        """
        scheduler = self.scheduler  # the loop thread moves its window meanwhile: `follow` wakes who waits for that
        gone = self.taken + scheduler.void_count + 1
        until = scheduler.window + gone
        # Keys that an interrupt has kept from the loop thread are told with later ones, or before this consumer waits.
        if item.counts and self._planned < until:
            with self._lock:
                self._read(until)
        if (row := item.row) is not None:
            ahead = self._planned - gone
            # Another list: a call that is interrupted comes here once more, with the same row.
            lay_ready = len(self.handoff.ready) - 1
            self.meter.add([*row, *(asked_at or came_at, came_at, ahead, lay_ready, perf_counter())])
        elif item.outcome.kind == Kind.FAILURE:
            self.faults.errors += 1

    def count(self, item: Item) -> None:
        """Count the first item: the consumer has it now."""
        ready = self.handoff.ready
        if self._is_plain and item.counts:  # of most runs, only the position changes
            after = _new(Place, (item.batch + 1, *self._rest))
        else:
            progress, outcome = self.progress, item.outcome
            after = progress.now.after(
                item.batch,
                item.worker,
                item.in_stream,
                outcome.snapshot,
                item.keys,
                len(outcome.bad),
                in_order=progress.in_order,
            )
        # From here on nothing is called: neither can a signal's handler run, nor another thread.
        self.progress.now = after
        self.taken += item.counts
        if ready:  # nobody has closed the run meanwhile
            del ready[0]

    def read_on(self) -> None:
        """Do what a consumer can do before it waits.

        Raises:
            StopIteration: if everything was taken.
        """
        exits.note_user()  # at the end of the interpreter, threads that train on are waited for
        with self._lock:
            self._read(self._may_read())
            if (error := self._plan_error) is not None and self._is_plan_error_due():
                item = failed(error, counts=False)
                self._plan_error = None
                self.handoff.ready.append(item)  # no signal's handler comes between the two
                del self._reading, item, error  # a traceback refers to this frame
            is_over = self.ended and not self.has_ready
        if is_over:
            self.progress.ends = self.ends
            self.meter.log_summary()
            self.all_taken = True
            raise StopIteration

    def keys_came(self) -> None:
        """Read on as far as the window: keys have come that were to be read. In the thread that brings them."""
        try:
            with self._lock:
                self.plan.are_awaited = False
                if not (self.closed or self._is_left or self.error is not None):
                    with contextlib.suppress(LoaderClosedError):  # nobody makes batches any more
                        self._read(self._window_end())
        finally:
            self.handoff.wake()

    def leave(self) -> None:
        """Read the sampler no more when keys come: another run is about to."""
        with self._lock:
            self._is_left = True
            self.plan.leave()

    def check(self) -> None:
        """Raise what has ended the run, after all that is ready: to each consumer once, a thread or a task.

        Raises:
            BaseException: the error that has ended the run.
            StopIteration: for a consumer that has raised it and asks again, as a loop does that goes on after errors.
                In states the epoch is not over.
        """
        if self.error is None or self.ended or self.has_ready:
            return
        consumer: Any = None
        with contextlib.suppress(RuntimeError):  # there is no loop
            consumer = asyncio.current_task()
        consumer = consumer or threading.current_thread()
        if consumer in self._raised_in:
            self.progress.is_broken = True
            raise StopIteration
        self._raised_in.add(consumer)
        raise another(self.error)

    def has_news(self) -> bool:
        """Whether there is something to take or to do, so that a consumer should not wait."""
        if self.has_ready or self.is_answered or self.ended or self.closed or self.error is not None:
            return True
        if self._plan_error is not None:
            return self._is_plan_error_due()
        return not (self.plan_ended or self.plan.are_awaited) and self._may_read() > self._planned

    def _read(self, until: int) -> None:
        """Read the sampler on, until so many batches of keys were read in all. With the lock held.

        An error of the sampler stands in the place of the batch that it should have named, after the batches before.
        A single wake-up serves all keys that are read before the loop gets its turn: that coalesces the traffic of a
        consumer that finds its batches ready.
        """
        if not self.plan_ended and self._plan_error is None:
            self._reading = self._read_until(until)
            for self._plan_error in self._reading:  # noqa: B020 - an attribute of ours
                break
        if not self._wake_posted:  # at the end, and if an interrupted call has come to less
            self._wake()

    def _read_until(self, until: int) -> Iterator[Exception]:
        """Put keys into the inbox, unless they have to be waited for, or there are none; give what is raised.

        The frame of a generator that has yielded has no caller, as long as the generator is there. So the traceback of
        the error ends here: with frames of the consumer in it, an error that waits for its turn would keep the
        consumer's iterator alive, and its workers.
        """
        plan = self.plan
        while self._planned < until:
            try:
                if plan.arrives and plan.must_wait():
                    return
                keys = plan.read()
            except Exception as error:
                yield error
                return
            if keys is END:
                self.plan_ended = True
                return
            keys = as_read(keys, in_pickles=self._in_pickles)
            # From here to the end of `append`, nothing looks for signals: either the keys are in the inbox, and
            # counted, or the plan has them.
            plan.keys = NOTHING
            self._planned += 1
            self.inbox.append(keys)
            if not self._wake_posted:
                self._wake()

    def _wake(self) -> None:
        """Have the loop thread look into the inbox, if there is something new. It is not about to."""
        if self.inbox or self.plan_ended is not self._end_known:
            try:
                self._wake_posted = True
                self._wake_loop()
            except BaseException:  # Ctrl-C: the next one must not rely on this wake-up
                self._wake_posted = False
                raise

    def _may_read(self) -> int:
        """Return how far a consumer that waits may read the sampler."""
        return max(self._window_end(), self.scheduler.read_until)

    def _window_end(self) -> int:
        """Return how far a consumer may read the sampler in any case."""
        return self.scheduler.window + self.taken + self.scheduler.void_count

    def _is_plan_error_due(self) -> bool:
        return self.taken + self.scheduler.void_count >= self._planned

    # ------------------------------------------------------------------------------------------------ loop thread

    def read_inbox(self) -> tuple[list[Any], bool]:
        """Return the keys that have come, and whether there are no more behind them."""
        # Cleared before the inbox is read: what is read in between posts one wake-up too many, never one too few.
        self._wake_posted = False
        self._end_known = plan_ended = self.plan_ended
        inbox = self.inbox
        # A consumer may append between these two, behind what is taken here.
        batches = inbox[:]
        del inbox[: len(batches)]
        return batches, plan_ended

    def close(self) -> None:
        """Drop what is ready, and wake consumers: nobody makes batches any more."""
        self.closed = True
        self.plan.leave()
        if self.error is None:
            # A consumer may just be giving the first of these: it has that, and finds nothing to delete (`count`).
            self.handoff.ready.clear()
        self.handoff.wake()

    def stop(self, error: BaseException) -> None:
        """Have consumers take what is ready, and raise this then, unless all batches are there."""
        self.error = error
        self.handoff.wake()

    def begin_at(self, starts: dict[int, WorkerStart]) -> None:
        """Note where workers are at the beginning."""
        key = None if self.is_stream else self.epoch.key
        self.tracks = make_tracks(starts, key, overlaps=self._overlaps)

    def start_of(self, worker: int) -> WorkerStart | None:
        """Return where another worker would begin; None where workers have no place in the data."""
        return self.tracks[worker].start if self.tracks else None

    def given(self, worker: int, tickets: Sequence[Ticket], now: float) -> list[tuple[int, Any]]:
        """Note that a worker is sent tickets at this time; return what it is to know of them."""
        progress, track, contents = self.progress, self.tracks.get(worker), []
        for ticket in tickets:
            keys = ticket.keys
            if not ticket.sent_at:
                ticket.sent_at = now
            if ticket.tries:
                self.faults.retries += 1
            if track is not None:
                track.given(ticket.batch)
            if progress.knows_places:
                keys = progress.placed(ticket.batch, keys)
            contents.append((ticket.batch, keys))
        return contents

    def answered(self, item: Item, ticket: Ticket) -> Item:
        """Note that a worker has answered a ticket, which decides where a replacement would begin."""
        snapshot = item.outcome.snapshot
        # The state of an iterator after its end is no place to begin at: some iterators would begin anew.
        place = None if isinstance(snapshot, Frozen) and snapshot.ended else snapshot
        keys = None if self.is_stream else self.progress.placed(ticket.batch, ticket.keys)
        return item._replace(in_stream=self.tracks[item.worker].answered(item.batch, place, keys), keys=keys)

    def rebuilt(self, outcome: Outcome, ticket: Ticket) -> Outcome:
        """Return an outcome that is no batch with its error as it is to be raised, if it has one."""
        if outcome.kind != Kind.FAILURE or isinstance(outcome.error, BaseException):
            return outcome
        keys = None if self.is_stream else self.named(ticket).keys  # a stream has no indices
        return outcome._replace(error=outcome.error.rebuild(keys))

    def named(self, ticket: Ticket) -> Ticket:
        """Return the ticket for a message: with what its samples are called in place of their keys."""
        return replace(ticket, keys=self._names(unpickled(ticket.keys)))

    def forget_given(self, worker: int) -> None:
        """Note that what a worker that is gone had been given was not made."""
        if self.tracks:
            self.tracks[worker].forget_given()

    def raise_first(self, error: BaseException) -> None:
        """Have this raised before what is in order."""
        self._urgent.append(error)
        self.handoff.wake()

    def answer(self, error: BaseException | None) -> None:
        """Answer the consumer that has asked what its batch waits for: the error to raise, or None to wait on.

        A consumer that was interrupted, or cancelled, has asked for nothing any more when the next call waits.
        """
        # The consumer takes its question back (`WorkerIterator._begin_wait`) before this look and hears nothing, or
        # after it and is woken for nothing, or raises an error that was true when it was made.
        if self.is_asked and not self.is_answered:
            if error is not None and not self.handoff.ready:  # otherwise the batch has come in the last moment
                self._urgent.append(error)
            self.is_answered = True
            self.handoff.wake()

    def hand_over(self) -> None:
        """Hand over to consumers what the scheduler has put in order.

        A consumer that is about to wait leaves its waiter first, and then looks once more. So it finds what is appended
        here, or is found among those that wait.
        """
        handoff, now = self.handoff, perf_counter()
        # Taken out first: if a wake-up raises, the run ends, and nothing may be handed over a second time by then.
        delivered, self.scheduler.delivered = self.scheduler.delivered, []
        for item in delivered:
            if item.row is not None:
                item.row.append(now)
        if delivered:
            handoff.ready.extend(delivered)
            handoff.wake()

    def follow(self) -> None:
        """Wake consumers if the scheduler lets them read further, or has delivered everything."""
        scheduler, before = self.scheduler, self._followed
        now = scheduler.num_workers, scheduler.window, scheduler.read_until, scheduler.void_count
        if now != before:
            self._followed = now
            self.meter.resized(scheduler.num_workers, scheduler.window)
            self.handoff.wake()
        if scheduler.is_finished and not self.ended and self.error is None:
            self.ended = True
            self.handoff.wake()
