"""The scheduler alone: every interleaving that Hypothesis can think of, and the decisions that must not change."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncloader.engine.actions import VOID, Fail, Ticket, Vacate
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.tracks import Track
from asyncloader.messages.outcome import NO_RECORD
from asyncloader.messages.snapshot import WorkerStart
from tests.support import deciders, effort

MOST_WORKERS = 6
BATCH_BYTES = 10_000  # one size for all, so that bounds in bytes can be told in batches
OVERHEAD_BYTES = 4096


def gone(worker: int, *, rests: bool = False, **facts: bool) -> Vacate:
    """Return what is said of a worker whose process has ended."""
    return Vacate(worker, lambda tickets: RuntimeError("it died"), rest_s=float(rests), **facts)


class Send(NamedTuple):
    """A worker is sent a ticket."""

    worker: int
    ticket: Ticket


class Deliver(NamedTuple):
    """What is handed over to the consumer."""

    item: Any


class Acting:
    """A scheduler that is settled after each event, as the engine does it. Events return all that is to be done.

    Attributes:
        stalled: Workers that are sent nothing for a while, such as those that rest before they have another process:
            their tickets stay in the outbox.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.stalled: set[int] = set()

    def __repr__(self) -> str:
        return repr(self._scheduler)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._scheduler, name)
        return partial(self._after, found) if name in EVENTS else found

    def returned(self, worker: int, batch: int, busy_s: float = 0.0) -> list[Any]:
        """Have a worker return a ticket, in a message of its own; return what is to be done."""
        ticket = self._scheduler.returned(worker, batch)
        self._scheduler.measured(worker, ticket, NO_RECORD._replace(fetch_s=busy_s), 0)
        return self._after(bool)

    def _after(self, event: Callable[..., Any], *args: Any, **facts: Any) -> list[Any]:
        """Have this happen, and tickets given out then; return what is to be done."""
        decided, scheduler = event(*args, **facts), self._scheduler
        if event.__name__ == "ready" and len(args) == 3:
            scheduler.run_ahead.sized(args[2])
        if event.__name__ == "vacated":
            self.stalled |= {action[1] for action in decided if action[0] == "replace" and action[2]}
        done = [*(decided if isinstance(decided, list) else ()), *scheduler.assign()]
        done += map(Deliver, scheduler.delivered)
        scheduler.delivered.clear()
        workers = [worker for worker in scheduler.outbox if worker not in self.stalled]
        sent = [Send(worker, ticket) for worker in workers for ticket in scheduler.outbox.pop(worker)]
        return done + sorted(sent, key=lambda send: send.ticket.batch)


EVENTS = {"planned", "ready", "exhausted", "vacated", "joined", "leaving", "lost"}


class Reader:
    """A worker of a stream, which reads one batch for each ticket. Its snapshots say how many are before."""

    def __init__(self, start: WorkerStart) -> None:
        self.at = start.snapshot or 0
        self.gaps = deque(start.gaps())

    def read(self) -> int:
        """Return the number of the next batch that it makes."""
        self.at += 1 + (self.gaps.popleft() if self.gaps else 0)
        return self.at - 1


class Model(RuleBasedStateMachine):
    """A trainer, its workers and its pinning thread, reduced to what the scheduler can see of them.

    The consumer reads its sampler as :class:`asyncloader.run.worker_iterator.WorkerIterator` does: as far as the
    window, and to `read_until` only when it waits. A worker does its tickets in the order in which it got them, or,
    where samples overlap, in any order. Between `returned` and `ready` lies the pinning, which may change the order.

    A worker of a stream reads one batch of it for each ticket. If the stream is *told* (its dataset tells its state,
    or can be read again) a lost worker is replaced as the session does it, with a `Track`, and every batch of the
    stream comes once; else it takes no more tickets.

    Workers of a map-style dataset join, leave and are lost at any time, and may come back under the same number.

    For a while a worker may be sent nothing, as if its process were yet to come: what is for it waits until it has
    finished what it has in hand. If it dies before, all of that is lost together, but nothing of what has waited is to
    blame.
    """

    @initialize(
        num_workers=st.integers(1, 4),
        prefetch_factor=st.integers(1, 3),
        scheduling=st.sampled_from(["static", "dynamic"]),
        in_order=st.booleans(),
        run_ahead_batches=st.sampled_from([0, 3, 20]),
        on_crash=st.sampled_from(["raise", "retry", "skip"]),
        on_timeout=st.sampled_from(["retry", "skip"]),
        max_retries=st.integers(0, 2),
        is_iterable=st.booleans(),
        is_told=st.booleans(),
        overlapping=st.sampled_from([0, 3]),
        length=st.none() | st.integers(0, 25),
    )
    def begin(
        self,
        num_workers: int,
        prefetch_factor: int,
        scheduling: Any,
        in_order: bool,
        run_ahead_batches: int,
        on_crash: Any,
        on_timeout: Any,
        max_retries: int,
        is_iterable: bool,
        is_told: bool,
        overlapping: int,
        length: int | None,
    ) -> None:
        if is_iterable:
            scheduling = "static"
        self.scheduler: Any = make(
            num_at_start=num_workers,
            prefetch=prefetch_factor,
            scheduling=scheduling,
            in_order=in_order,
            max_buffered_bytes=run_ahead_batches * (BATCH_BYTES + OVERHEAD_BYTES),
            on_crash=on_crash,
            on_timeout=on_timeout,
            max_retries=max_retries,
            tickets_at_once=overlapping,
        )
        self.overlapping = overlapping
        self.num_workers = num_workers  # by now there may be others, under higher numbers
        self.prefetch_factor = prefetch_factor
        self.window = num_workers * prefetch_factor
        self.run_ahead_batches = run_ahead_batches if in_order else 0
        self.takers = set(range(num_workers))
        self.leaving: set[int] = set()
        self.has_changed = False  # workers have come or gone
        self.is_static = scheduling == "static"
        self.in_order = in_order
        self.most_ahead = max(self.window, run_ahead_batches if in_order else 0)
        self.on_crash = on_crash
        self.on_timeout = on_timeout
        self.is_iterable = is_iterable
        self.is_replaceable = not is_iterable or (is_told and on_crash != "skip")
        self.length = length

        self.at_work: list[deque[int]] = [deque() for _ in range(MOST_WORKERS)]
        self.pinning: list[int] = []
        self.handed_over: deque[int] = deque()  # what the consumer can take
        self.fates: dict[int, str] = {}
        self.deliveries: list[int] = []
        self.first_workers: list[int] = []
        self.has_hung = False
        self.tracks = [Track(WorkerStart()) for _ in range(MOST_WORKERS)]
        self.readers = [Reader(WorkerStart()) for _ in range(MOST_WORKERS)]
        self.owed: list[set[int]] = [
            set() for _ in range(MOST_WORKERS)
        ]  # what lost workers had, until it is sent again
        self.read: dict[int, int] = {}  # by ticket, the number of the batch in its worker's stream
        self.made: dict[int, tuple[int, int, Any]] = {}  # by ticket: worker, that number, and the snapshot
        self.taken_tracks = [Track(WorkerStart()) for _ in range(MOST_WORKERS)]
        self.taken_numbers: list[list[int]] = [[] for _ in range(MOST_WORKERS)]

        self.tries: dict[int, int] = {}
        self.planned = self.taken = self.void_count = self.read_until = 0
        self.plan_ended = self.finished = False
        self.lost_workers: set[int] = set()
        self.resting: set[int] = set()
        self._read_sampler(self.window)

    # ------------------------------------------------------------------------------------------- the consumer

    def _read_sampler(self, until: int) -> None:
        while self.planned < until and not self.plan_ended:
            if self.planned == self.length:
                self.plan_ended = True
                self.scheduler.plan_ended()
                self._follow()
            else:
                self.planned += 1
                self._apply(self.scheduler.planned([f"keys {self.planned - 1}"]))

    @rule()
    def take(self) -> None:
        """Take a batch if there is one; else wait, and read on as far as asked."""
        until = self.taken + self.void_count + self.window
        if self.handed_over:
            if (made := self.made.get(self.handed_over.popleft())) is not None:
                worker, number, snapshot = made
                self.taken_numbers[worker].append(number)
                self.taken_tracks[worker].done(number, snapshot)
            self.taken += 1
            self._read_sampler(until + 1)
        else:
            self._read_sampler(max(until, self.read_until))

    # -------------------------------------------------------------------------------------------- the workers

    @rule(data=st.data(), busy_s=st.sampled_from([0.0, 1e-5, 5e-4, 1.0]))
    def do_a_batch(self, data: st.DataObject, busy_s: float) -> None:
        """Have a worker finish the first of its tickets, well or with an exception, which is the same here."""
        if busy := [worker for worker in range(MOST_WORKERS) if self.at_work[worker]]:
            worker = data.draw(st.sampled_from(busy))
            last = len(self.at_work[worker]) - 1 if self.overlapping else 0
            self._return(worker, busy_s, data.draw(st.integers(0, last)), data.draw(st.booleans()))

    def _return(self, worker: int, busy_s: float, index: int = 0, tells: bool = False) -> None:
        batch = self.at_work[worker][index]
        del self.at_work[worker][index]
        if not self.at_work[worker]:
            self._succeed(worker)
        self.pinning.append(batch)
        if self.is_iterable:
            snapshot = self.read[batch] + 1 if tells else None
            number = self.tracks[worker].answered(batch, snapshot)
            assert number == self.read[batch], "the parent counts other batches than the worker reads"
            self.made[batch] = worker, number, snapshot
        self._apply(self.scheduler.returned(worker, batch, busy_s))

    @precondition(lambda self: not self.is_iterable)
    @rule(worker=st.integers(0, MOST_WORKERS - 1))
    def stall(self, worker: int) -> None:
        """Have a worker be sent nothing before it has finished what it has."""
        if worker in self.takers - self.resting - self.lost_workers:
            self.scheduler.stalled.add(worker)
            if not self.at_work[worker]:
                self._succeed(worker)

    def _succeed(self, worker: int) -> None:
        """Send a worker what has waited for it."""
        self.scheduler.stalled.discard(worker)
        for ticket in self.scheduler.outbox.pop(worker, ()):
            self._send(worker, ticket)

    @rule(data=st.data())
    def pin_a_batch(self, data: st.DataObject) -> None:
        """Have the pinning give a batch on, not always in order."""
        if self.pinning:
            self._pin(data.draw(st.integers(0, min(2, len(self.pinning) - 1))))

    def _pin(self, index: int) -> None:
        batch = self.pinning.pop(index)
        self._apply(self.scheduler.ready(batch, batch, BATCH_BYTES))

    @invariant()
    def what_is_pinned_is_with_no_worker(self) -> None:
        if hasattr(self, "scheduler"):
            is_pinning = self.in_order and self.scheduler.gone_count in self.pinning
            is_nobody_at_work = not any(self.scheduler.in_flight.values())
            assert (self.scheduler.awaited() is None) is (is_pinning or is_nobody_at_work)

    @rule(worker=st.integers(0, MOST_WORKERS - 1), rests=st.booleans(), ready=st.booleans())
    def die(self, worker: int, rests: bool, ready: bool) -> None:
        """Kill a worker, at work or idle; its next process may have to wait."""
        if worker not in self.takers | self.leaving or worker in self.lost_workers | self.resting:
            return
        rests = rests and self.is_replaceable
        lost, unsent = self._lose(worker)
        if not self.is_replaceable:
            self.lost_workers.add(worker)
        was_ready = ready or not lost
        dead = gone(worker, rests=rests, replaceable=self.is_replaceable, was_ready=was_ready)
        with self._not_blamed(unsent):
            self._apply(self.scheduler.vacated(dead))
        if not was_ready and self.on_crash != "raise" and self.is_replaceable:
            assert not self.fates.keys() & set(lost), "blamed although it had not begun"
            return
        if lost and self.on_crash == "skip" and self.is_replaceable and not (self.overlapping and len(lost) > 1):
            assert lost[0] in self.fates
        if len(lost) > 1 and self.overlapping and self.on_crash != "raise" and self.is_replaceable:
            assert not self.fates.keys() & set(lost), "blamed among several"

    def _lose(self, worker: int) -> tuple[list[int], list[int]]:
        """Take what a worker has, and what has waited for its successor."""
        waiting = self.scheduler.outbox.get(worker, ())
        lost, unsent = [*self.at_work[worker]], [each.batch for each in waiting]
        self.tries |= {each.batch: each.tries for each in waiting}  # by workers before, if it comes from another one
        self.scheduler.stalled.discard(worker)
        self.at_work[worker].clear()
        self.tracks[worker].forget_given()
        if self.is_replaceable:
            self.owed[worker] |= {*lost, *unsent}
        return lost, unsent

    @contextlib.contextmanager
    def _not_blamed(self, seqs: list[int]) -> Iterator[None]:
        """See that nothing is thought of these, whatever is decided."""
        tries = {batch: self.tries.get(batch, 0) for batch in seqs}
        yield
        assert not self.fates.keys() & tries.keys(), "blamed although it was not sent"
        assert tries == {batch: self.tries.get(batch, 0) for batch in seqs}, "counted although it was not sent"

    @precondition(lambda self: self.is_replaceable)
    @rule(rests=st.booleans())
    def hang(self, rests: bool) -> None:
        """Give up the worker that has the awaited batch."""
        if (ticket := self.scheduler.awaited()) is None or ticket.worker in self.resting:
            return
        lost, unsent = self._lose(ticket.worker)
        at_work = min(lost) if self.overlapping else lost[0]
        self.has_hung = True
        with self._not_blamed(unsent):
            self._apply(self.scheduler.vacated(gone(ticket.worker, rests=rests, hung=True)))
        assert self.on_timeout != "skip" or at_work in self.fates

    @rule(data=st.data())
    def end_a_rest(self, data: st.DataObject) -> None:
        """Give a worker its next process."""
        if self.resting:
            self._end_rest(data.draw(st.sampled_from(sorted(self.resting))))

    def _end_rest(self, worker: int) -> None:
        self.resting.discard(worker)
        self._apply([("replace", worker, 0.0)])
        self._succeed(worker)

    @precondition(lambda self: not self.is_iterable and not self.lost_workers)
    @rule(worker=st.integers(0, MOST_WORKERS - 1))
    def join(self, worker: int) -> None:
        """Have a worker come, or one that is leaving stay."""
        if worker not in self.takers:
            assert worker in self.leaving or not self.at_work[worker]
            self.leaving.discard(worker)
            self.takers.add(worker)
            self.has_changed = True
            self._apply(self.scheduler.joined(worker))

    @precondition(lambda self: not self.is_iterable)
    @rule(worker=st.integers(0, MOST_WORKERS - 1))
    def leave(self, worker: int) -> None:
        """Have a worker leave: it gets nothing more, and is dismissed when it has nothing in hand."""
        if worker in self.takers - self.resting and len(self.takers) > 1 and not self.lost_workers:
            self._succeed(worker)
            self.takers.discard(worker)
            self.leaving.add(worker)
            self.has_changed = True
            self._apply(self.scheduler.leaving(worker))
            assert self.at_work[worker] or worker not in self.leaving, "nothing in hand, and not dismissed"

    @precondition(lambda self: not self.is_iterable)
    @rule(worker=st.integers(0, MOST_WORKERS - 1))
    def lose(self, worker: int) -> None:
        """Have a worker vanish, perhaps the last one: it is not to blame, nor is any batch."""
        if worker in self.takers | self.leaving and not self.lost_workers:
            lost, unsent = self._lose(worker)
            lost += unsent
            fates, tries = dict(self.fates), {batch: self.tries.get(batch, 0) for batch in lost}
            self.takers.discard(worker)
            self.leaving.discard(worker)
            self.resting.discard(worker)
            self.has_changed = True
            self._apply(self.scheduler.lost(worker))
            assert fates == self.fates
            assert tries == {batch: self.tries.get(batch, 0) for batch in lost}

    @precondition(lambda self: self.is_iterable)
    @rule(worker=st.integers(0, 3))
    def exhaust(self, worker: int) -> None:
        """Come to the end of a worker's share of an iterable dataset, which is told after everything before it."""
        if worker >= self.num_workers or not self.at_work[worker] or self.tracks[worker].start.ahead:
            return
        lost = [*self.at_work[worker], *self.owed[worker]]
        self.at_work[worker].clear()
        self.lost_workers.add(worker)
        for batch in lost:
            assert self.fates.setdefault(batch, "exhausted") == "exhausted"
        self._apply(self.scheduler.exhausted(worker))

    @rule(chance=st.integers(0, 9))
    def give_up(self, chance: int) -> None:
        """Have no worker any more: what has no outcome is lost, what is being pinned is not."""
        if chance or self.lost_workers:
            return
        lost = self.scheduler.stopped()
        assert sorted(ticket.batch for ticket in lost) == [ticket.batch for ticket in lost]
        assert {batch for queue in [*self.at_work, *self.owed] for batch in queue} <= {ticket.batch for ticket in lost}
        for queue in self.at_work:
            queue.clear()
        self.scheduler.stalled.clear()
        self.lost_workers = set(range(MOST_WORKERS))
        self.resting.clear()
        self.leaving.clear()
        for ticket in lost:
            assert self.fates.setdefault(ticket.batch, "failed") == "failed"
            self._apply(self.scheduler.ready(ticket.batch, VOID))
        self.scheduler.plan_ended()
        self.plan_ended = True  # the engine stops the run: its consumer raises the error, and reads no more
        self._follow()

    # -------------------------------------------------------------------------------------------- the session

    def _apply(self, actions: list[Any]) -> None:
        for action in actions:
            assert not self.finished or action[0] in ("replace", "dismiss"), "an action after the end"
            match action:
                case Send(worker, ticket):
                    self._send(worker, ticket)
                case Deliver(batch):
                    self._deliver(batch)
                case ("replace", worker, rest_s):
                    assert not self.at_work[worker]
                    assert worker not in self.lost_workers | self.resting
                    if rest_s:
                        self.resting.add(worker)
                    else:
                        self.readers[worker] = Reader(self.tracks[worker].start)
                case ("dismiss", worker):
                    assert not self.at_work[worker]
                    self.leaving.remove(worker)
                case Fail(tickets, _, at_once, leave_out):
                    assert not (at_once and leave_out)
                    self._fail(tickets, at_once)
                case _:
                    raise AssertionError(action)
        deciders.validate(self.scheduler)
        self._follow()

    def _follow(self) -> None:
        """See how far the consumer may read now."""
        scheduler = self.scheduler
        self.void_count, self.finished = scheduler.void_count, scheduler.is_finished
        if scheduler.window != self.window:
            size, num_takers = scheduler.window, len(scheduler.takers)
            assert num_takers <= size <= self.prefetch_factor * num_takers
            assert size == self.prefetch_factor * num_takers or size >= self.run_ahead_batches
            self.window = size
            self.most_ahead = max(self.most_ahead, size)
        if scheduler.read_until != self.read_until:
            ahead = scheduler.read_until - scheduler.gone_count - self._void_ahead()
            assert scheduler.read_until <= self.planned or ahead <= self.most_ahead, f"{ahead} batches ahead"
            assert scheduler.read_until >= self.read_until
            self.read_until = scheduler.read_until

    def _void_ahead(self) -> int:
        """Return how many batches that hold no memory wait for an earlier one."""
        first = self.scheduler.gone_count if self.in_order else self.planned
        return sum(batch >= first for batch, fate in self.fates.items() if fate != "delivered")

    def _send(self, worker: int, ticket: Ticket) -> None:
        assert worker not in self.lost_workers | self.resting, "a ticket for a worker that takes none"
        is_again = worker in self.leaving and ticket.batch in self.owed[worker]
        assert worker in self.takers or is_again, "a ticket for a worker that is not there, or leaves"
        self.tries[ticket.batch] = ticket.tries
        assert ticket.keys == f"keys {ticket.batch}"
        assert ticket.batch not in self.fates
        assert all(ticket.batch not in queue for queue in self.at_work), "a ticket at two workers"
        in_hand = {*self.at_work[worker]}
        assert not (in_hand and worker in self.scheduler._again), "what is done again is not alone"
        self.at_work[worker].append(ticket.batch)
        for owed in self.owed:
            owed.discard(ticket.batch)
        if self.is_iterable:
            self.tracks[worker].given(ticket.batch)
            self.read[ticket.batch] = self.readers[worker].read()
        if self.is_static and not self.lost_workers and self.in_order and not self.has_changed:
            assert worker == ticket.batch % self.num_workers
        if (
            self.is_static
            and not self.in_order
            and ticket.tries == 0
            and self.on_crash == "raise"
            and not self.has_changed
        ):
            assert len(self.at_work[worker]) <= self.window // max(1, self.num_workers - len(self.lost_workers))
        if (
            ticket.batch < self.num_workers
            and ticket.tries == 0
            and not self.lost_workers
            and self.taken == 0
            and (not self.has_changed)
        ):
            self.first_workers.append(worker)

    def _deliver(self, batch: int) -> None:
        assert self.fates.setdefault(batch, "delivered") in ("delivered", "failed")
        self.deliveries.append(batch)
        self.handed_over.append(batch)

    def _fail(self, tickets: list[Ticket], at_once: bool) -> None:
        for ticket in tickets:
            assert self.fates.setdefault(ticket.batch, "failed") == "failed"
            for owed in self.owed:
                owed.discard(ticket.batch)
        if not at_once:
            (ticket,) = tickets
            self._apply(self.scheduler.ready(ticket.batch, ticket.batch))

    # --------------------------------------------------------------------------------------------- what holds

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        """Each batch was delivered at most once, in order."""
        if not hasattr(self, "scheduler"):
            return
        deciders.validate(self.scheduler)
        assert max(Counter(self.deliveries).values(), default=1) == 1
        if self.in_order:
            assert self.deliveries == sorted(self.deliveries)

    @invariant()
    def each_batch_of_a_stream_comes_once(self) -> None:
        """From what was taken, a run that goes on reads just what was not taken. Undisturbed order is kept."""
        if not hasattr(self, "scheduler"):
            return
        for taken, track in zip(self.taken_numbers, self.taken_tracks, strict=True):
            assert len(set(taken)) == len(taken), "a batch of a stream came twice"
            reader = Reader(track.start)
            rest = [reader.read() for _ in range(max(taken, default=-1) + 4 - len(taken))]
            assert sorted([*taken, *rest]) == list(range(len(taken) + len(rest))), "lost, or read twice"
            if self.in_order and "failed" not in self.fates.values():
                assert taken == list(range(len(taken)))

    @invariant()
    def the_window_holds(self) -> None:
        """No more is in flight or waits than the window, or than run-ahead allows in bytes."""
        if hasattr(self, "scheduler"):
            ahead = self.planned - self.taken - self.scheduler.void_count - self._void_ahead()
            assert ahead <= self.most_ahead

    def teardown(self) -> None:
        """Let everything come to its end: nothing may be stuck, and every batch has one fate."""
        if not hasattr(self, "scheduler"):
            return
        if self.length is None:
            self.length = self.planned + 3
        for _ in range(10_000):
            if self.finished and not self.handed_over:
                break
            before = self._progress()
            while self.pinning:
                self._pin(0)
            for worker in sorted(self.resting):
                self._end_rest(worker)
            if not self.takers and not self.lost_workers:
                self.join(0)
            self.take()
            for worker in range(MOST_WORKERS):
                if self.at_work[worker]:
                    self._return(worker, 0.001)
            assert before != self._progress(), f"stuck: {self.scheduler!r}"
        assert self.finished
        assert not self.leaving, "a worker that was to leave is still there"
        # With every worker of an iterable dataset at its end, or lost and named, no more is planned.
        assert self.planned == self.length or not self.scheduler.in_flight
        self._check_fates()
        assert len(set(self.first_workers)) == len(self.first_workers) or self.on_crash != "raise" or self.has_hung

    def _progress(self) -> tuple[object, ...]:
        at_work = [list(queue) for queue in self.at_work]
        return self.planned, self.plan_ended, self.taken, len(self.fates), self.finished, self.pinning[:], at_work

    def _check_fates(self) -> None:
        nameless = [batch for batch in range(self.planned) if batch not in self.fates]
        # Only a dataset of which no worker has anything left makes batches void without naming them.
        assert not nameless or len(self.lost_workers) >= self.num_workers
        assert self.taken == len(self.deliveries)
        assert self.taken + self.scheduler.void_count == self.planned


TestInterleavings = Model.TestCase
TestInterleavings.settings = settings(
    max_examples=effort.examples(240), stateful_step_count=60, deadline=None, report_multiple_bugs=False
)


def make(first: int = 0, next_worker: int | None = None, **options: Any) -> Any:
    """Return a scheduler of two workers and a window of four, unless options say otherwise."""
    scheduler = Scheduler(deciders.options(**options), first=first, next_worker=next_worker)
    scheduler.are_up = True
    return Acting(scheduler)


def sent(actions: list[Any]) -> list[tuple[int, int]]:
    """Return worker and number of each ticket sent."""
    return [(action.worker, action.ticket.batch) for action in actions if isinstance(action, Send)]


def delivered(actions: list[Any]) -> list[Any]:
    """Return what is delivered."""
    return [action.item for action in actions if isinstance(action, Deliver)]


def kinds(actions: list[Any]) -> list[str]:
    """Return the names of the actions."""
    return [action[0].capitalize() if type(action) is tuple else type(action).__name__ for action in actions]


def windows(scheduler: Scheduler, event: Callable[[int], object], *workers: int) -> list[int]:
    """Return the window after this has happened to each of the workers."""
    found = []
    for worker in workers:
        event(worker)
        found.append(scheduler.window)
    return found


def test_static_scheduling_is_round_robin() -> None:
    """Batch i goes to worker i % num_workers, whatever came back when."""
    scheduler = make(num_at_start=3)
    assert sent(scheduler.planned(range(6))) == [(0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)]
    scheduler.returned(2, 2)
    scheduler.returned(2, 5)
    assert sent(scheduler.planned(range(3))) == [(0, 6), (1, 7), (2, 8)]


def test_what_is_done_again_holds_up_no_other_worker() -> None:
    """Overlapping tickets of a worker that died are tried one by one there; the other worker goes on, out of order."""
    scheduler = make(prefetch=4, tickets_at_once=4, in_order=False)
    scheduler.planned(range(8))
    assert sent(scheduler.vacated(gone(0))) == [(0, 0)]
    for number in list(scheduler.in_flight[1]):
        batch = scheduler.in_flight[1][number].batch
        scheduler.returned(1, number)
        scheduler.ready(batch, "a batch", 10)
    assert sent(scheduler.planned(range(8, 12))) == [(1, 8), (1, 9), (1, 10), (1, 11)]
    assert sent(scheduler.returned(0, next(iter(scheduler.in_flight[0])))) == [(0, 2)]
    deciders.validate(scheduler)


def test_a_worker_that_joins_has_its_turn_after_the_others() -> None:
    """As if it had been there from the beginning."""
    scheduler = make()
    scheduler.planned(range(4))
    assert windows(scheduler, scheduler.joined, 2) == [6]
    assert sent(scheduler.planned(range(6))) == [(0, 4), (1, 5), (2, 6), (0, 7), (1, 8), (2, 9)]
    deciders.validate(scheduler)


def test_a_worker_that_leaves_is_sent_nothing_more() -> None:
    """What it was given, and waits for room in its hand, others do: it may leave because it has grown too large."""
    scheduler = make(prefetch=4)
    scheduler.stalled = {0}
    assert sent(scheduler.planned(range(6))) == [(1, 1), (1, 3), (1, 5)]
    assert sent(scheduler.leaving(0)) == [(1, 0), (1, 2), (1, 4)]
    assert 0 not in scheduler.in_flight  # dismissed
    deciders.validate(scheduler)


def test_workers_that_join_take_no_more_than_the_byte_budget() -> None:
    """One batch each, and what was there before them."""
    budget = 5 * (BATCH_BYTES + OVERHEAD_BYTES)
    scheduler = make(max_buffered_bytes=budget)
    scheduler.planned(range(4))
    assert windows(scheduler, scheduler.joined, 2) == [6]  # how large batches are is not known yet
    scheduler.returned(0, 0)
    scheduler.ready(0, 0, BATCH_BYTES)
    assert windows(scheduler, scheduler.joined, 3, 4, 5) == [5, 5, 6]
    assert windows(scheduler, scheduler.leaving, 5, 4, 3, 2) == [5, 5, 5, 4]


def test_workers_that_were_asked_for_have_their_window_also_when_they_come_late() -> None:
    """Whoever names their number accepts what they hold; those beyond it, and those who are not there, add nothing."""
    scheduler = make(num_at_start=4, max_buffered_bytes=1)
    assert windows(scheduler, scheduler.lost, *range(4)) == [6, 4, 2, 0]
    assert windows(scheduler, scheduler.joined, 0, 1) == [2, 4]
    scheduler.planned(range(4))
    scheduler.returned(0, 0)
    scheduler.ready(0, 0, BATCH_BYTES)
    assert windows(scheduler, scheduler.joined, *range(2, 10)) == [6, 8, 8, 8, 8, 8, 9, 10]
    assert windows(scheduler, scheduler.lost, *range(9, 1, -1)) == [9, 8, 8, 8, 8, 8, 6, 4]
    deciders.validate(scheduler)


def test_a_worker_that_leaves_finishes_what_it_has_and_is_dismissed() -> None:
    """It gets nothing more; the turns go on without it."""
    scheduler = make(num_at_start=3)
    scheduler.planned(range(6))
    assert (scheduler.leaving(1), scheduler.window) == ([], 4)
    assert sent(scheduler.planned(range(3))) == [(0, 6), (2, 7), (0, 8)]
    assert scheduler.returned(1, 1) == []
    assert scheduler.returned(1, 4) == [("dismiss", 1)]
    assert 1 not in scheduler.in_flight
    assert scheduler.leaving(1) == []
    assert (scheduler.leaving(2), scheduler.window) == ([], 2)
    assert (scheduler.joined(2), scheduler.window) == ([], 4)  # it is wanted again, and has its tickets still
    assert sent(scheduler.planned("xy")) == [(0, 9), (2, 10)]
    deciders.validate(scheduler)


def test_a_worker_that_has_nothing_is_dismissed_at_once() -> None:
    """Of one that rests the engine says that it is lost: what was kept for it is for others."""
    assert make().leaving(1) == [("dismiss", 1)]
    scheduler = make(on_timeout="retry")
    scheduler.planned(range(4))
    assert sent(scheduler.vacated(gone(1, rests=True, hung=True))) == []
    assert [ticket.batch for ticket in scheduler.outbox[1]] == [1]
    assert sent(scheduler.lost(1)) == [(0, 1), (0, 3)]
    assert scheduler.window == 2
    deciders.validate(scheduler)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
def test_a_run_whose_workers_have_all_gone_waits_for_those_who_join(scheduling: Any, in_order: bool) -> None:
    """What is planned is theirs."""
    scheduler = make(num_at_start=1, scheduling=scheduling, in_order=in_order)
    assert kinds(scheduler.lost(0)) == []
    assert kinds(scheduler.planned(range(2))) == []
    actions = scheduler.joined(3)
    assert scheduler.window == 2
    assert sent(actions) == [(3, 0), (3, 1)]
    deciders.validate(scheduler)


def test_what_is_lost_with_a_worker_is_done_by_others_and_nobody_is_blamed() -> None:
    """Before what is behind it; even if there is nobody for a while."""
    scheduler = make(max_retries=0, on_crash="raise")
    scheduler.planned(range(4))
    actions = scheduler.lost(0)
    assert (scheduler.window, sent(actions)) == (2, [(1, 0), (1, 2)])
    assert scheduler.lost(0) == []
    assert (scheduler.lost(1), scheduler.window) == ([], 0)
    assert kinds(scheduler.planned("x")) == []
    deciders.validate(scheduler)
    actions = scheduler.joined(5)
    assert sent(actions) == [(5, 0), (5, 1), (5, 2), (5, 3), (5, 4)]
    assert {ticket.tries for ticket in scheduler.in_flight[5].values()} == {0}
    with pytest.raises(AssertionError, match="worker 5 has joined twice"):
        scheduler.joined(5)


@pytest.mark.parametrize("on_crash", ["retry", "skip", "raise"])
def test_a_worker_that_dies_while_it_leaves_has_no_successor(on_crash: Any) -> None:
    """Others do what it had, but perhaps what it was at; there is nobody to rest."""
    scheduler = make(on_crash=on_crash)
    scheduler.planned(range(4))
    scheduler.leaving(1)
    actions = scheduler.vacated(gone(1, rests=True))
    assert ("dismiss", 1) in actions
    assert "Replace" not in kinds(actions)
    failed = [ticket.batch for action in actions if isinstance(action, Fail) for ticket in action.tickets]
    assert failed == {"retry": [], "skip": [1], "raise": [1, 3]}[on_crash]
    assert sent(actions) == {"retry": [(0, 1), (0, 3)], "skip": [(0, 3)], "raise": []}[on_crash]
    deciders.validate(scheduler)


def test_what_overlapped_in_a_worker_that_was_leaving_is_done_by_others() -> None:
    """Beside what they have: nothing is blamed before it was alone."""
    scheduler = make(prefetch=3, tickets_at_once=3, on_crash="skip")
    scheduler.planned(range(6))
    scheduler.leaving(1)
    actions = scheduler.vacated(gone(1))
    assert sent(actions) == [(0, 1), (0, 3), (0, 5)]
    assert "Fail" not in kinds(actions)
    assert [sent(scheduler.returned(0, batch)) for batch in (0, 2, 4)] == [[], [], []]
    actions = scheduler.vacated(gone(0))
    assert sent(actions) == [(0, 1)]
    assert sent(scheduler.returned(0, 1)) == [(0, 3)]
    actions = scheduler.vacated(gone(0))
    assert [action.tickets[0].batch for action in actions if isinstance(action, Fail)] == [3]
    assert sent(actions) == [(0, 5)]
    deciders.validate(scheduler)


def test_a_run_goes_on_in_the_middle() -> None:
    """Numbers go on from the first, to the worker whose turn it is; what was done before is passed over."""
    scheduler = make(7, num_at_start=3)
    actions = scheduler.planned(["a", VOID, "b"])
    sent = [(action.worker, action.ticket) for action in actions if isinstance(action, Send)]
    assert [(worker, ticket.batch, ticket.keys) for worker, ticket in sent] == [(1, 7, "a"), (2, 9, "b")]
    scheduler.returned(1, 7)
    assert [a.item for a in scheduler.ready(7, "A") if isinstance(a, Deliver)] == ["A"]
    assert scheduler.gone_count == 9
    deciders.validate(scheduler)
    scheduler = make(7, 3, num_at_start=3)
    assert [a.worker for a in scheduler.planned("ab") if isinstance(a, Send)] == [0, 1]


def test_dynamic_scheduling_gives_to_who_has_least() -> None:
    """One ticket each at first; further ones to whoever comes back."""
    scheduler = make(scheduling="dynamic", num_at_start=3, prefetch=4)
    first = sent(scheduler.planned(range(12)))
    assert [worker for worker, _ in first[:3]] == [0, 1, 2]
    for batch in sorted(scheduler.in_flight[1]):
        actions = scheduler.returned(1, batch, busy_s=0.5)
    assert sent(actions) == [(1, len(first))]


def test_dynamic_scheduling_queues_little_behind_a_slow_batch() -> None:
    """A worker with long batches has one to do; with batches of microseconds many, for the channel takes longer."""
    slow, fast = (make(scheduling="dynamic", num_at_start=1, prefetch=200) for _ in range(2))
    for scheduler, busy_s in ((slow, 0.5), (fast, 2e-6)):
        scheduler.planned(range(200))
        for batch in range(30):
            if batch in scheduler.in_flight[0]:
                scheduler.returned(0, batch, busy_s)
                scheduler.ready(batch, batch, 100)
    assert len(slow.in_flight[0]) == 1
    assert len(fast.in_flight[0]) > 20


def test_order_is_kept_whatever_comes_first() -> None:
    """What comes too early is parked, and delivered with the one that it waited for."""
    scheduler = make()
    scheduler.planned("abcd")
    for batch in (3, 1, 2):
        scheduler.returned(batch % 2, batch)
        assert delivered(scheduler.ready(batch, batch, 1)) == []
    scheduler.returned(0, 0)
    assert delivered(scheduler.ready(0, 0, 1)) == [0, 1, 2, 3]


def test_out_of_order_batches_are_delivered_as_they_come() -> None:
    """And a worker gets no more than its share of the window."""
    scheduler = make(in_order=False)
    assert sent(scheduler.planned(range(5))) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    scheduler.returned(1, 3)
    assert delivered(scheduler.ready(3, 3, 1)) == [3]
    assert 4 in scheduler.in_flight[1]


def run_ahead(scheduler: Scheduler, size: int) -> int:
    """Have worker 1 alone do what it gets, of batches of this size; return how many were planned then."""
    planned = scheduler.planned_count
    while mine := sorted(scheduler.in_flight[1]):
        before = scheduler.read_until
        scheduler.returned(1, mine[0], 1e-5)
        actions = scheduler.ready(mine[0], mine[0], size)
        assert all(isinstance(action, Deliver) for action in actions)  # the last one before the batch that is slow
        if scheduler.read_until != before:
            scheduler.planned(range(scheduler.read_until - planned))
            planned = max(planned, scheduler.read_until)
    deciders.validate(scheduler)
    return planned


def begun(**options: Any) -> Scheduler:
    """Return a scheduler whose first batch was handed over, and whose worker 0 is at the third."""
    scheduler = make(**options)
    scheduler.planned(range(4))
    scheduler.returned(0, 0, 1e-5)
    scheduler.ready(0, 0)
    return scheduler


def test_run_ahead_lets_idle_workers_go_on() -> None:
    """While batch 2 is slow the other worker is not idle; what waits stays under the limit in bytes."""
    size = 1000
    planned = run_ahead(begun(max_buffered_bytes=20 * (size + OVERHEAD_BYTES)), size)
    assert 10 < planned <= 20 + 2


def test_nobody_runs_ahead_before_all_workers_are_up() -> None:
    """Whoever waits for a worker that is slow to start does not find hundreds of batches read behind it.

    A first batch that is slow, with workers that are up, is run ahead of as any other.
    """
    scheduler = make(max_buffered_bytes=1 << 40)
    scheduler.planned(range(4))
    scheduler._scheduler.are_up = False
    assert run_ahead(scheduler, 1) == 4
    scheduler = make(max_buffered_bytes=1 << 40)
    scheduler.planned(range(4))
    assert run_ahead(scheduler, 1) > 100


def test_without_run_ahead_the_window_is_torchs() -> None:
    """Nothing asks the consumer to read on."""
    assert run_ahead(begun(max_buffered_bytes=0), 10) == 4


@pytest.mark.parametrize(("size", "most"), [(1, 2 + 4 + 2 * 256), (-1, 4)], ids=["tiny", "unknown"])
def test_run_ahead_is_bounded_in_batches_too(size: int, most: int) -> None:
    """However little they weigh; and batches of unknown size are not run ahead of at all."""
    assert most - 2 <= run_ahead(begun(max_buffered_bytes=1 << 40), size) <= most


def test_only_the_batch_in_work_is_blamed() -> None:
    """The tickets queued behind it are sent again, one by one, without counting as tried."""
    scheduler = make(max_retries=1, prefetch=3)
    scheduler.planned(range(6))
    actions = scheduler.vacated(gone(0))
    assert kinds(actions) == ["Replace", "Send"]
    assert sent(actions) == [(0, 0)]
    assert [ticket.tries for ticket in scheduler.in_flight[0].values()] == [1]
    actions = scheduler.vacated(gone(0))
    assert kinds(actions) == ["Replace", "Fail", "Send"]
    (fail,) = [action for action in actions if isinstance(action, Fail)]
    assert [(ticket.batch, ticket.tries) for ticket in fail.tickets] == [(0, 2)]
    assert [(ticket.batch, ticket.tries) for ticket in scheduler.in_flight[0].values()] == [(2, 0)]
    assert sent(scheduler.returned(0, 2)) == [(0, 4)]


def test_a_worker_begins_with_what_it_was_sent_first() -> None:
    """Though it was sent earlier batches later, those of a worker that is no longer there."""
    scheduler = make(max_retries=0)
    scheduler.planned(range(4))
    assert sent(scheduler.lost(0)) == [(1, 0), (1, 2)]
    actions = scheduler.vacated(gone(1))
    assert [ticket.batch for action in actions if isinstance(action, Fail) for ticket in action.tickets] == [1]


def test_of_several_batches_in_work_none_is_blamed_before_it_was_alone() -> None:
    """What overlapped is done again one by one; then the worker has several again."""
    scheduler = make(num_at_start=1, prefetch=4, tickets_at_once=4, max_retries=0)
    assert sent(scheduler.planned("abcd")) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    scheduler.returned(0, 1)
    scheduler.ready(1, "b")
    again = scheduler.vacated(gone(0))
    assert kinds(again) == ["Replace", "Send"]
    assert sent(again) == [(0, 0)]
    assert sent(scheduler.planned("e")) == []
    assert sent(scheduler.returned(0, 0)) == [(0, 2)]
    assert delivered(scheduler.ready(0, "a")) == ["a", "b"]
    actions = scheduler.vacated(gone(0))  # alone: so it is to blame
    assert [action.tickets[0].keys for action in actions if isinstance(action, Fail)] == ["c"]
    assert sent(actions) == [(0, 3)]
    assert sent(scheduler.returned(0, 3)) == [(0, 4)]
    deciders.validate(scheduler)


@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
def test_what_was_not_sent_is_not_blamed_for_a_hang(scheduling: Any) -> None:
    """A batch that comes back after a crash is awaited, but waits itself for the worker that hangs at a later one."""
    scheduler = make(scheduling=scheduling, tickets_at_once=1, on_timeout="skip", max_retries=0)
    assert sent(scheduler.planned(range(4))) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    scheduler.returned(0, 0, 1.0)
    scheduler.ready(0, "a")
    scheduler.leaving(1)
    assert [ticket.batch for ticket in scheduler.in_flight[0].values()] == [2]
    scheduler.stalled.add(0)
    assert sent(scheduler.vacated(gone(1, was_ready=False))) == []
    assert scheduler.awaited() is scheduler.in_flight[0][1]
    waiting = [ticket.batch for ticket in scheduler.outbox[0]]
    assert waiting == [1, 3][: 2 if scheduling == "static" else 1]
    scheduler.stalled.clear()
    actions = scheduler.vacated(gone(0, hung=True))
    assert [ticket.batch for action in actions if isinstance(action, Fail) for ticket in action.tickets] == [2]
    assert sent(actions) == [(0, 1)]
    rest = [*sent(scheduler.returned(0, 1)), *sent(scheduler.returned(0, 3))]
    assert (0, 3) in rest
    deciders.validate(scheduler)


@pytest.mark.parametrize("on_crash", ["raise", "skip"])
def test_what_was_not_sent_is_not_blamed_for_a_death(on_crash: Any) -> None:
    """Not even where the worker had nothing else."""
    scheduler = make(num_at_start=1, on_crash=on_crash)
    scheduler.stalled.add(0)
    scheduler.planned(range(2))
    scheduler.stalled.clear()
    actions = scheduler.vacated(gone(0))
    assert kinds(actions) == ["Replace", "Send"]
    assert [ticket.tries for ticket in scheduler.in_flight[0].values()] == [0]
    assert sent(scheduler.returned(0, 0)) == [(0, 1)]


def test_what_is_done_again_keeps_its_order() -> None:
    """In a stream each ticket takes the next batch; so a worker that dies while it starts changes nothing."""
    scheduler = make(num_at_start=1, prefetch=4, tickets_at_once=4)
    scheduler.planned("abcd")
    assert sent(scheduler.vacated(gone(0))) == [(0, 0)]
    assert sent(scheduler.vacated(gone(0, was_ready=False))) == [(0, 0)]
    assert sent(scheduler.vacated(gone(0))) == [(0, 0)]
    again = []
    for batch in range(4):
        again += sent(scheduler.returned(0, batch))
    assert again == [(0, 1), (0, 2), (0, 3)]


def test_the_end_of_a_stream_voids_what_was_to_be_done_again() -> None:
    """Whether it waits for its turn or for its worker: other workers do not get it."""
    scheduler = make(num_at_start=1, prefetch=4, tickets_at_once=4)
    scheduler.planned("abcd")
    assert sent(scheduler.vacated(gone(0))) == [(0, 0)]
    assert sent(scheduler.exhausted(0)) == []
    assert scheduler.void_count == 4
    scheduler = make(tickets_at_once=4, on_timeout="retry")
    scheduler.planned("abcd")
    assert sent(scheduler.vacated(gone(0, rests=True, hung=True))) == []
    assert sent(scheduler.vacated(gone(1, was_ready=False))) == [(1, 1)]
    scheduler.exhausted(1)
    assert [ticket.batch for ticket in scheduler.outbox[0]] == [0]
    assert scheduler.void_count == 0
    scheduler.returned(0, 0)
    scheduler.ready(0, "a")
    assert scheduler.void_count == 1


def test_the_end_of_a_stream_lets_go_of_all_that_waited_for_it() -> None:
    """What lies between two tickets of the worker is handed over as well."""
    scheduler = make()
    scheduler.planned("abcd")
    scheduler.returned(1, 1)
    assert delivered(scheduler.ready(1, "b")) == []
    assert delivered(scheduler.exhausted(0)) == ["b"]
    assert scheduler.gone_count == 3


def test_nothing_is_blamed_on_a_worker_that_never_came_up() -> None:
    """It had not begun with any ticket."""
    scheduler = make(max_retries=0)
    scheduler.planned(range(4))
    for _ in range(5):
        assert kinds(scheduler.vacated(gone(1, was_ready=False))) == ["Replace", "Send"]
    assert {ticket.tries for ticket in scheduler.in_flight[1].values()} == {0}


def test_an_empty_plan_is_finished_at_once() -> None:
    """Nothing planned, nothing to wait for."""
    scheduler = make()
    scheduler.plan_ended()
    assert scheduler.is_finished


def test_there_is_more_until_workers_have_all_tickets() -> None:
    """Also behind the end of the plan, when those that were given to a worker may wait for room in its hand."""
    scheduler = Scheduler(deciders.options())
    assert scheduler.has_more
    scheduler.planned(range(5))
    scheduler.plan_ended()
    assert scheduler.has_more
    scheduler.assign()
    assert scheduler.has_more
    scheduler.outbox.clear()
    assert not scheduler.has_more


def test_finish_comes_once_after_everything() -> None:
    """With the delivery of the last batch, or with the end of the plan if that comes later."""
    scheduler = make()
    scheduler.planned([0])
    scheduler.returned(0, 0)
    assert kinds(scheduler.ready(0, 0, 1)) == ["Deliver"]
    assert not scheduler.is_finished
    scheduler.plan_ended()
    assert scheduler.is_finished
    assert kinds(scheduler.vacated(gone(0))) == ["Replace"]


def test_what_a_worker_never_had_cannot_come_back() -> None:
    """A mistake in the session shows at once."""
    scheduler = make()
    scheduler.planned([0])
    with pytest.raises(AssertionError, match="worker 1 returned 0, which it did not have"):
        scheduler.returned(1, 0)


def test_the_awaited_ticket_is_the_first_that_a_worker_has() -> None:
    """It is what a timeout is about."""
    scheduler = make()
    assert scheduler.awaited() is None
    scheduler.planned("ab")
    scheduler.returned(0, 0)
    assert scheduler.awaited() is None  # it was made, and is being pinned
    scheduler.ready(0, "a")
    ticket = scheduler.awaited()
    assert ticket is not None
    assert (ticket.batch, ticket.keys, ticket.worker) == (1, "b", 1)


def test_representation() -> None:
    """What a debugger shows."""
    scheduler = make()
    scheduler.planned("abcd")
    scheduler.returned(1, 1)
    scheduler.ready(1, 1, 1)
    assert repr(scheduler) == "<Scheduler planned=4 unsent=0 in_flight=[2,1] parked=1 gone=0>"
