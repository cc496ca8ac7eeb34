"""Batches in slices, without processes: every interleaving that Hypothesis can think of."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncloader.engine.actions import (
    VOID,
    Assemble,
    Deliver,
    Dismiss,
    Fail,
    Finish,
    Read,
    Replace,
    Send,
    Ticket,
    Window,
)
from asyncloader.engine.progress import Progress
from asyncloader.engine.sliced import batch_of, batches_of, contents
from asyncloader.engine.slicer import Slicer
from asyncloader.engine.split import SplitScheduler
from asyncloader.engine.taking import Item, failed
from asyncloader.observe.faults import Faults
from asyncloader.observe.record import Record
from asyncloader.seeding.sample_context import Placed
from asyncloader.transport.rows import RowsOf
from asyncloader.workers.protocol.failure import BadSample, RemoteError
from asyncloader.workers.protocol.messages import Slice, Together
from asyncloader.workers.protocol.outcome import NO_RECORD, Batch, Failure, LeftOut, Samples, Stuck, Written

MOST_WORKERS = 5


def record_of(ticket: Ticket, busy_s: float) -> Record:
    return Record(ticket.seq, 1, len(ticket.keys), 0.0, 0.0, busy_s, 0.0, 0.0, 0.0)


class Room:
    """Stands for the slabs of a batch."""

    nbytes = 60_000

    def __init__(self, layout: Any, count: int) -> None:
        assert layout == "alike"
        self.layout = layout
        self.there = [-1] * count


class Workplace:
    """A trainer, its workers and the session, reduced to what a `SplitScheduler` can see of them."""

    def __init__(
        self, *, on_error: Any = "raise", length: int | None = None, sizes: Any = None, **options: Any
    ) -> None:
        num_workers = options["num_workers"]
        self.options = {"prefetch_factor": 2, "max_retries": 1, **options}
        self.slicer = Slicer()
        self.progress = Progress(knows_places=True)
        self.scheduler = SplitScheduler(
            self.slicer, first=0, on_error=on_error, faults=Faults(), batch_size=6, **self.options
        )
        self.on_error = on_error
        self.length = length
        self.sizes = sizes or (lambda number: 6)
        self.at_work: dict[int, deque[Ticket]] = {worker: deque() for worker in range(num_workers)}
        self.sent: dict[int, Any] = {}  # what workers were told of their tickets
        self.delivered: list[Item] = []
        self.handed_over: deque[Item] = deque()
        self.named: set[int] = set()  # batches that an error was raised of beside the order
        self.batches: list[list[int]] = []
        self.window = self.scheduler.window
        self.taken = self.void_count = self.read_until = 0
        self.plan_ended = self.finished = False
        self.read(self.window)

    def read(self, until: int) -> None:
        while len(self.batches) < until and not self.plan_ended:
            number = len(self.batches)
            if number == self.length:
                self.plan_ended = True
                self.apply(self.scheduler.plan_ended())
            else:
                first = sum(map(len, self.batches))
                self.batches.append(list(range(first, first + self.sizes(number))))
                self.progress.read_batch(len(self.batches[-1]))
                self.apply(self.scheduler.planned([self.batches[-1]]))

    def take(self) -> None:
        until = self.taken + self.void_count + self.window
        if self.handed_over:
            self.handed_over.popleft()
            self.taken += 1
            self.read(until + 1)
        else:
            self.read(max(until, self.read_until))

    def work(self, worker: int, fate: str = "good", busy_s: float = 1.0) -> None:
        """Have a worker answer its first ticket."""
        ticket = self.at_work[worker].popleft()
        record, keys = record_of(ticket, busy_s), self.sent.pop(ticket.seq)
        number, batch = batch_of(ticket)
        outcome: Any
        if fate == "error":
            outcome = Failure(record, ValueError(ticket.keys[0] if ticket.keys else 0))
        elif fate == "stuck" and type(keys) is not Placed:
            outcome = Stuck(record)
        elif type(keys) is Slice:
            assert keys.keys == (ticket.keys, batch[0] + keys.begin), "a sample is seeded by another's place"
            bad = [BadSample(key, key - batch[0], RemoteError("ValueError", "", None, "")) for key in ticket.keys]
            bad = bad[: {"bad": 1, "none good": len(bad)}.get(fate, 0)]
            good = [key for key in ticket.keys if key not in {one.key for one in bad}]
            if keys.rows is not None and not bad and fate not in ("unlike", "no memory"):
                keys.rows.there[keys.begin : keys.begin + len(good)] = good
                outcome = Written(record, [])
            else:
                layout = None if bad or fate == "unlike" else "alike"
                outcome = Samples(record, good, 10_000, bad, layout)
        elif type(keys) is Together:
            parts = [part.rows.there[part.begin : part.end] if type(part) is RowsOf else part for part in keys.slices]
            samples = [key for part in parts for key in part]
            outcome = Batch(record, samples, 0)
            assert len(samples) + len(keys.bad) == keys.size
            if keys.rows is not None and fate != "unlike":
                assert not keys.bad
                assert any(type(part) is RowsOf for part in keys.slices), "slabs that this worker was not shown"
                keys.rows.there[:] = samples
                outcome = Written(record, [[] for part in keys.slices if type(part) is not RowsOf])
        else:
            assert keys == (batch, batch[0] if batch else keys.first)
            outcome = Batch(record, list(batch), 10_000)
        self.apply(self.scheduler.returned(worker, ticket.seq, busy_s))
        self.apply(
            self.scheduler.ready(ticket.seq, Item(outcome, number, worker), max(0, getattr(outcome, "nbytes", 0)))
        )

    def apply(self, actions: list[Any]) -> None:
        for action in actions:
            assert not self.finished or type(action) in (Replace, Read, Window, Dismiss), "an action after the end"
            match action:
                case Send(worker, ticket):
                    assert not any(ticket in queue for queue in self.at_work.values()), "a ticket at two workers"
                    self.at_work[worker].append(ticket)
                    self.sent[ticket.seq] = contents(ticket, self.progress)
                case Assemble(batch):
                    outcome = Batch(NO_RECORD, list(batch.room.there))
                    self.apply(self.scheduler.ready(batch.last, Item(outcome, batch.number)))
                case Deliver(item):
                    self.delivered.append(item)
                    self.handed_over.append(item)
                case Read(until):
                    self.void_count, self.read_until = self.scheduler.void_count, max(self.read_until, until)
                case Window(size):
                    self.window = size
                case Replace():
                    pass
                case Dismiss(worker):
                    assert not self.at_work.pop(worker)
                case Fail(tickets, at_once, leave_out, _):
                    self._fail(tickets, at_once, leave_out)
                case Finish():
                    self.finished = True
                case _:
                    raise AssertionError(action)
        self.scheduler.validate()

    def _fail(self, tickets: list[Ticket], at_once: bool, leave_out: bool) -> None:
        batches = batches_of(tickets)
        if at_once:
            self.named |= {batch.seq for batch in batches}
            return
        (batch,) = batches
        item = Item(LeftOut(NO_RECORD), batch.seq) if leave_out else failed(OSError(), batch.seq)
        self.apply(self.scheduler.ready(tickets[0].seq, item))

    def finish(self) -> None:
        """Come to the end: all that is planned is made and taken."""
        self.length = len(self.batches) if self.length is None else self.length
        for _ in range(10_000):
            if self.finished:
                return
            busy = [worker for worker, queue in self.at_work.items() if queue]
            if busy:
                self.work(busy[0])
            else:
                self.take()
        raise AssertionError(f"it does not end: {self.scheduler!r}")

    def check(self) -> None:
        numbers = [item.seq for item in self.delivered]
        assert max(Counter(numbers).values(), default=1) == 1, "a batch came twice"
        if self.options.get("in_order", True):
            assert numbers == sorted(numbers)
        for item in self.delivered:
            outcome = item.outcome
            if type(outcome) is Batch:
                bad = {sample.key for sample in outcome.bad}
                assert outcome.data == [key for key in self.batches[item.seq] if key not in bad]
        ahead = len(self.batches) - self.taken - self.scheduler.void_count
        assert not self.options.get("max_buffered_bytes") or ahead <= 40


class Model(RuleBasedStateMachine):
    """Workers make slices well and badly, die, hang, join, leave and vanish, while batches are taken."""

    @initialize(
        num_workers=st.integers(1, 4),
        prefetch_factor=st.integers(1, 3),
        in_order=st.booleans(),
        max_buffered_bytes=st.sampled_from([0, 200_000]),
        on_crash=st.sampled_from(["raise", "retry", "skip"]),
        on_timeout=st.sampled_from(["retry", "skip"]),
        on_error=st.sampled_from(["raise", "skip", "replace"]),
        max_retries=st.integers(0, 2),
        make_room=st.sampled_from([None, Room, lambda layout, count: None]),
        length=st.none() | st.integers(0, 12),
        sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    )
    def begin(self, sizes: list[int], **options: Any) -> None:
        self.there = Workplace(sizes=lambda number: sizes[number % len(sizes)], **options)

    @rule()
    def take(self) -> None:
        self.there.take()

    @rule(
        data=st.data(),
        fate=st.sampled_from(
            ["good", "good", "good", "good", "unlike", "no memory", "bad", "none good", "error", "stuck"]
        ),
        busy_s=st.sampled_from([1e-5, 0.02, 1.0]),
    )
    def work(self, data: st.DataObject, fate: str, busy_s: float) -> None:
        there = self.there
        if busy := [worker for worker, queue in there.at_work.items() if queue]:
            if there.on_error == "raise" and fate in ("bad", "none good"):
                fate = "error"
            there.work(data.draw(st.sampled_from(busy)), fate, busy_s)

    @rule(data=st.data(), hangs=st.booleans(), was_ready=st.booleans())
    def die(self, data: st.DataObject, hangs: bool, was_ready: bool) -> None:
        there = self.there
        scheduler = there.scheduler
        if hangs:
            if (ticket := scheduler.awaited()) is not None:
                there.at_work[ticket.worker].clear()
                there.apply(scheduler.hung(ticket.worker))
            return
        worker = data.draw(st.sampled_from(sorted(there.at_work)))
        there.at_work[worker].clear()
        there.apply(scheduler.died(worker, was_ready=was_ready))

    @rule(worker=st.integers(0, MOST_WORKERS - 1))
    def come(self, worker: int) -> None:
        there = self.there
        if not there.scheduler.roster.takes(worker):
            there.at_work.setdefault(worker, deque())
            there.apply(there.scheduler.joined(worker))

    @rule(worker=st.integers(0, MOST_WORKERS - 1), vanishes=st.booleans())
    def go(self, worker: int, vanishes: bool) -> None:
        there = self.there
        if not there.scheduler.roster.takes(worker) or there.scheduler.roster.num_takers < 2:
            return
        if vanishes:
            there.at_work.pop(worker)
            there.apply(there.scheduler.lost(worker))
        else:
            there.apply(there.scheduler.left(worker))

    @rule(chance=st.integers(0, 19))
    def give_up(self, chance: int) -> None:
        there = self.there
        if chance:
            return
        for queue in there.at_work.values():
            queue.clear()
        lost = there.scheduler.stopped()
        there.named |= {batch.seq for batch in batches_of(lost)}
        there.plan_ended, there.length = True, len(there.batches)
        for ticket in lost:
            there.apply(there.scheduler.ready(ticket.seq, VOID))
        there.apply(there.scheduler.plan_ended())

    @invariant()
    def each_batch_comes_once(self) -> None:
        if hasattr(self, "there"):
            self.there.check()

    def teardown(self) -> None:
        if not hasattr(self, "there"):
            return
        there = self.there
        there.finish()
        there.check()
        found = Counter(item.seq for item in there.delivered)
        for number in range(len(there.batches)):
            assert found[number] == 1 or number in there.named, f"batch {number} is neither here nor named"


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEveryInterleaving = Model.TestCase


def test_slices_go_to_whoever_is_free() -> None:
    """And the batch of them is made when the last one is here, before later slices."""
    there = Workplace(num_workers=3, length=1)
    assert {worker: len(queue) for worker, queue in there.at_work.items()} == {0: 1, 1: 1, 2: 1}
    for worker in (0, 0, 1, 0, 2):
        there.work(worker)
        assert not there.delivered
    there.work(1)
    (ticket,) = [ticket for queue in there.at_work.values() for ticket in queue]
    assert there.sent[ticket.seq].slices == ([0], [1], [2], [3], [4], [5])
    there.finish()
    assert [item.outcome.data for item in there.delivered] == [[0, 1, 2, 3, 4, 5]]


def test_a_batch_is_put_together_before_slices_of_later_ones() -> None:
    """By who has made its last slice: nobody else may be free for long."""
    there = Workplace(num_workers=2, length=4)
    while not any(type(there.sent[queue[0].seq]) is Together for queue in there.at_work.values() if queue):
        worker = min((queue[0].seq, worker) for worker, queue in there.at_work.items() if queue)[1]
        there.work(worker)
    (ticket,) = there.at_work[worker]
    assert type(there.sent[ticket.seq]) is Together
    assert batch_of(ticket)[0] == 0
    there.finish()
    assert [item.outcome.data for item in there.delivered] == there.batches


def test_of_several_slices_that_raise_the_first_in_the_batch_counts() -> None:
    """Whichever raises first. Those behind it, which nobody has yet, are not made."""
    there = Workplace(num_workers=2, length=1)
    there.work(1, "error")
    assert [len(queue) for _, queue in sorted(there.at_work.items())] == [1, 0]
    there.work(0, "error")
    assert [item.outcome.error.args for item in there.delivered] == [(0,)]
    there.finish()


def test_slices_of_a_batch_that_comes_to_nothing_are_not_made() -> None:
    """Its worker died: what is left of it would be for nobody. What others have of it is passed over in the order."""
    there = Workplace(num_workers=2, length=2, on_crash="raise")
    there.work(0)
    first = {ticket.seq for queue in there.at_work.values() for ticket in queue}
    there.at_work[1].clear()
    there.apply(there.scheduler.died(1))
    there.apply(there.scheduler.rested(1))
    sent = [ticket for queue in there.at_work.values() for ticket in queue if ticket.seq not in first]
    assert sent
    assert {batch_of(ticket)[0] for ticket in sent} == {1}
    there.finish()
    assert [item.outcome.data for item in there.delivered if type(item.outcome) is Batch] == there.batches[1:]


def test_a_dead_worker_costs_its_slice() -> None:
    """The slices of others are not made again."""
    there = Workplace(num_workers=2, length=1)
    there.work(0)
    (seq, *_) = [ticket.seq for ticket in there.at_work[1]]
    there.at_work[1].clear()
    there.apply(there.scheduler.died(1))
    tries = {ticket.seq: ticket.tries for queue in there.at_work.values() for ticket in queue}
    assert tries[seq] == 1
    assert 0 not in tries
    there.finish()
    assert [type(item.outcome) for item in there.delivered] == [Batch]


@pytest.mark.parametrize(("on_error", "outcome"), [("skip", LeftOut), ("replace", Failure)])
def test_a_batch_without_a_good_sample_is_not_put_together(on_error: Any, outcome: type) -> None:
    """As one that a worker makes alone."""
    there = Workplace(num_workers=2, length=1, on_error=on_error)
    while not there.delivered:
        there.work(next(worker for worker, queue in there.at_work.items() if queue), "none good")
    assert type(there.delivered[0].outcome) is outcome
    assert len(there.delivered[0].outcome.bad) == 6


def test_samples_are_written_into_the_batch_once_it_is_known_what_they_are_like() -> None:
    """The first slice decides; from the next batch on nothing is left to be done when the last slice is there."""
    there = Workplace(num_workers=2, length=4, make_room=Room)
    kinds = []
    while not there.finished:
        busy = [worker for worker, queue in there.at_work.items() if queue]
        if busy:
            kinds.append(type(there.sent[there.at_work[busy[0]][0].seq]))
            there.work(busy[0])
        else:
            there.take()
    assert [item.outcome.data for item in there.delivered] == there.batches
    assert kinds.count(Together) < 4


def test_samples_that_cannot_be_carried_are_made_by_one_worker() -> None:
    """And no later batch is divided."""
    there = Workplace(num_workers=2, length=3)
    there.work(1, "stuck")
    there.finish()
    assert [item.outcome.data for item in there.delivered] == there.batches
    assert there.slicer.is_whole


def test_the_window_follows_what_batches_cost() -> None:
    """Cheap batches stay whole, and then each worker has its own in advance."""
    there = Workplace(num_workers=4, length=40)
    assert there.window == 2
    while len(there.delivered) < 12:
        for worker in [worker for worker, queue in there.at_work.items() if queue]:
            if there.at_work[worker]:
                there.work(worker, busy_s=1e-5)
        there.take()
    assert there.window == 8
    there.finish()
    assert [item.outcome.data for item in there.delivered] == there.batches


@pytest.mark.parametrize(
    ("busy_s", "sizes"), [(1.0, [1, 1, 15, 11, 9, 6]), (1e-3, [1, 1, 20, 20, 22]), (1e-4, [1, 1, 62])]
)
def test_what_the_first_samples_cost_decides_about_the_rest(busy_s: float, sizes: list[int]) -> None:
    """Each worker makes one; then nobody makes more slices than are worth it, of any batch that was read before."""
    there = Workplace(num_workers=2, sizes=lambda number: 64, make_room=Room)
    made = []
    while not there.delivered:
        worker = min((queue[0].seq, worker) for worker, queue in there.at_work.items() if queue)[1]
        ticket = there.at_work[worker][0]
        if type(there.sent[ticket.seq]) is Slice:
            made.append(len(ticket.keys))
        there.work(worker, busy_s=busy_s * len(ticket.keys))
    assert made[: len(sizes)] == sizes
    assert (busy_s < 1e-3) == any(type(contents) is Placed for contents in there.sent.values())  # the next batch
    there.finish()
    assert [item.outcome.data for item in there.delivered] == there.batches


def test_first_samples_are_written_to_the_others_in_the_end() -> None:
    """They were carried, for nobody knew yet what they are like; their batch is not collated for it."""
    there = Workplace(num_workers=2, length=3, make_room=Room)
    found = []
    while len(there.delivered) < 3:
        worker = min((queue[0].seq, worker) for worker, queue in there.at_work.items() if queue)[1]
        found.append(there.sent[there.at_work[worker][0].seq])
        there.work(worker)
        while there.handed_over:
            there.take()
    (together,) = [each for each in found if type(each) is Together]
    assert together.rows is not None
    assert [type(part) for part in together.slices] == [list, list, *[RowsOf] * (len(together.slices) - 2)]
    assert [item.outcome.data for item in there.delivered] == there.batches


def test_where_nothing_could_be_written_a_batch_is_collated() -> None:
    """As there was no memory; whoever collates it is not shown the slabs, and writes nothing there."""
    there = Workplace(num_workers=2, length=1, make_room=Room)
    found = []
    while not there.delivered:
        worker = next(worker for worker, queue in there.at_work.items() if queue)
        found.append(there.sent[there.at_work[worker][0].seq])
        there.work(worker, "no memory")
    assert any(type(each) is Slice and each.rows is not None for each in found)
    assert (type(found[-1]), found[-1].rows) == (Together, None)
    assert [item.outcome.data for item in there.delivered] == there.batches


@pytest.mark.parametrize("num_workers", [1, 4])
def test_workers_that_join_do_not_make_whole_batches_take_more_than_there_may_be(num_workers: int) -> None:
    """The window is as large as `max_buffered_bytes`, beyond what the workers of the beginning may have."""
    there = Workplace(num_workers=num_workers, max_buffered_bytes=100_000)
    there.slicer.is_whole = True
    for _ in range(20):
        there.take()
        there.work(next(worker for worker, queue in there.at_work.items() if queue))
    for worker in range(num_workers, 12):
        there.at_work[worker] = deque()
        there.apply(there.scheduler.joined(worker))
    assert there.window == 12
    there.finish()


def test_reading_on_is_counted_in_batches() -> None:
    """Whatever the number of tickets: who waits reads one batch after the other, not as many as there are slices."""
    there = Workplace(num_workers=2, max_buffered_bytes=64 << 20)
    for _ in range(100):
        before = len(there.batches)
        there.take()
        assert len(there.batches) <= before + 1
        if not there.handed_over:
            there.work(next(worker for worker, queue in there.at_work.items() if queue))
    assert len(there.batches) > there.window + there.taken
    there.finish()


def played(times_s: Any, batch_size: int, **options: Any) -> list[float]:
    """Play a run on a clock that is none, with 4 workers and 0.3 ms a ticket; return when each batch was there."""
    count = len(times_s) // batch_size
    there = Workplace(length=count, sizes=lambda number: batch_size, num_workers=4, make_room=Room, **options)
    now, working, events, arrived = 0.0, set[int](), list[tuple[float, int, float]](), list[float]()

    def begin() -> None:
        for worker in there.at_work.keys() - working:
            if there.at_work[worker]:
                ticket = there.at_work[worker][0]
                is_together = type(there.sent[ticket.seq]) is Together
                took = 0.0003 + (0.0 if is_together else sum(times_s[key] for key in ticket.keys))
                working.add(worker)
                heapq.heappush(events, (now + took, worker, took))

    begin()
    while events:
        now, worker, took = heapq.heappop(events)
        working.discard(worker)
        there.work(worker, busy_s=took)
        while there.handed_over:
            there.take()
            arrived.append(now)
        there.take()  # it waits, and reads on
        begin()
    assert there.finished
    return arrived


def test_a_first_batch_takes_a_worker_s_share_of_its_time() -> None:
    """64 samples of 20 ms, of which nothing is known, and 4 workers: not 1.28 s, but a quarter of that."""
    assert played([0.02] * 256, 64)[0] < 0.26 * 1.28


def test_samples_that_take_unlike_times_leave_nobody_idle() -> None:
    """Log-normal ones, sigma 1.2, in batches of 24: within 3 % of what four workers need at the least."""
    times_s = np.random.default_rng(1).lognormal(np.log(0.02), 1.2, 24 * 80)
    assert played(times_s, 24, max_buffered_bytes=64 << 20)[-1] * 0.97 < times_s.sum() / 4
