"""Batches in slices, without processes: every interleaving that Hypothesis can think of."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncloader.engine.actions import (
    VOID,
    Deliver,
    Dismiss,
    Fail,
    Replace,
    Send,
    Ticket,
    Vacate,
)
from asyncloader.engine.progress import Progress
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.slices import Divided, Slicer, Slices
from asyncloader.engine.taking import Item, failed
from asyncloader.messages.failure import BadSample, RemoteError
from asyncloader.messages.messages import Kind, Slice
from asyncloader.messages.outcome import Outcome
from asyncloader.observe.record import Record
from tests import deciders
from tests.effort import examples

MOST_WORKERS = 5


def gone(worker: int, **facts: bool) -> Vacate:
    """Return what is said of a worker whose process has ended."""
    return Vacate(worker, lambda tickets: RuntimeError("it died"), **facts)


class Slabs:
    """Stand for the slabs of a batch."""

    def __init__(self, columns: Any, count: int) -> None:
        self.count = count

    def rows(self, begin: int, end: int) -> tuple[int, int]:
        assert 0 <= begin < end <= self.count
        return begin, end

    def whole(self, parts: Any) -> None:
        raise AssertionError("nothing is joined here")


class Workplace:
    """A trainer, its workers and the session, reduced to what the scheduler can see of them."""

    def __init__(
        self,
        *,
        on_error: Any = "raise",
        length: int | None = None,
        sizes: Any = None,
        obtain: Any = None,
        **options: Any,
    ) -> None:
        num_workers = options["num_at_start"]
        self.options = {"max_retries": 1, **options}
        self.slicer = Slicer()
        self.progress = Progress(knows_places=True)
        self.left_out: list[Any] = []
        self.slices = Slices(deciders.options(on_error=on_error), self.slicer, obtain)
        self.scheduler = Scheduler(deciders.options(scheduling="dynamic", **self.options), slices=self.slices)
        self.on_error = on_error
        self.length = length
        self.sizes = sizes or (lambda number: 6)
        self.at_work: dict[int, deque[Ticket]] = {worker: deque() for worker in range(num_workers)}
        self.sent: dict[int, Any] = {}  # what workers were told of their tickets
        self.joining: deque[tuple[int, Divided]] = deque()
        self.delivered: list[Item] = []
        self.handed_over: deque[Item] = deque()
        self.named: set[int] = set()  # batches that an error was raised of beside the order
        self.batches: list[list[int]] = []
        self.taken = 0
        self.plan_ended = self.was_finished = False
        self.read(self.window)

    @property
    def window(self) -> int:
        return self.scheduler.window

    @property
    def finished(self) -> bool:
        return self.scheduler.is_finished

    def read(self, until: int) -> None:
        while len(self.batches) < until and not self.plan_ended:
            number = len(self.batches)
            if number == self.length:
                self.plan_ended = True
                self.scheduler.plan_ended()
            else:
                first = sum(map(len, self.batches))
                self.batches.append(list(range(first, first + self.sizes(number))))
                self.progress.read_batch(len(self.batches[-1]))
                self.apply(self.scheduler.planned([self.batches[-1]]))

    def take(self) -> None:
        until = self.taken + self.scheduler.void_count + self.window
        if self.handed_over:
            self.handed_over.popleft()
            self.taken += 1
            self.read(until + 1)
        else:
            self.read(max(until, self.scheduler.read_until))

    def work(self, worker: int, fate: str = "good", busy_s: float = 1.0) -> None:
        """Have a worker answer its first ticket."""
        ticket = self.at_work[worker].popleft()
        keys = self.sent.pop(ticket.number)
        assert (type(keys) is Slice) is (ticket.bounds is not None)
        placed = keys.keys if type(keys) is Slice else keys
        assert placed.keys == ticket.own_keys
        assert placed.first == (ticket.own_keys or [placed.first])[0], "a sample is seeded by another's place"
        outcome = self.outcome(ticket, fate, busy_s)
        self.apply(self.scheduler.returned(worker, ticket.number, busy_s))
        self.came(ticket, Item(outcome, ticket.batch, worker))

    def came(self, ticket: Ticket, item: Any) -> None:
        """Do what the session does with what has become of a ticket."""
        if ticket.bounds is None:
            if item.outcome.kind == Kind.LEFT_OUT:
                self.left_out.append(ticket.keys)
            self.apply(self.scheduler.ready(ticket.batch, item, 10_000))
        elif (batch := self.scheduler.slice_came(ticket, item)) is not None:
            fate = batch.fate()
            if fate == "join":
                self.joining.append((ticket.batch, batch))
            elif fate == "again":
                self.apply(self.scheduler.again(ticket.batch, batch.keys))
            elif fate == "void":
                self.apply(self.scheduler.ready(ticket.batch, VOID))
            else:
                self.came(Ticket(ticket.batch, batch.keys), Item(fate, ticket.batch))

    def outcome(self, ticket: Ticket, fate: str, busy_s: float) -> Any:
        keys = ticket.own_keys
        record = Record(ticket.number, 1, len(keys), 0.0, 0.0, busy_s, 0.0, 0.0, 0.0)
        if fate == "error":
            return Outcome(Kind.FAILURE, record._replace(samples=0), error=ValueError(keys[0] if keys else 0))
        if fate == "collation":
            return Outcome(Kind.FAILURE, record._replace(collate_s=1.0), error=KeyError(len(keys)))
        bad = [BadSample(key, place, RemoteError("ValueError", "", None, "")) for place, key in enumerate(keys)]
        bad = bad[: {"bad": 1, "none good": len(bad)}.get(fate, 0)]
        if bad and len(bad) == len(keys):
            record = record._replace(samples=0)
            if self.on_error == "skip":
                return Outcome(Kind.LEFT_OUT, record, bad=bad)
            return Outcome(Kind.FAILURE, record, error=ValueError(keys[0]), bad=bad)
        record = record._replace(samples=len(keys) - len(bad) * (self.on_error == "skip") - (fate == "too few"))
        return Outcome(Kind.BATCH, record, [key for key in keys if key not in {each.key for each in bad}], bad=bad)

    def join(self, fate: str = "joined") -> None:
        """Have the finisher join the slices of a batch, which was the first to be complete."""
        number, batch = self.joining.popleft()
        assert self.on_error != "replace" or not batch.bad()
        if fate == "cannot be joined":
            self.apply(self.scheduler.again(number, batch.keys))
            return
        self.slicer.joined(())
        item, _, make = batch.to_join(number)
        found = item.outcome._replace(data=[key for part in make.args[0] for key in part])  # type: ignore[call-arg,attr-defined]
        self.apply(self.scheduler.ready(number, item._replace(outcome=found), 60_000))

    def apply(self, actions: list[Any]) -> None:
        for action in actions:
            assert not self.was_finished or type(action) in (Replace, Dismiss), "an action after the end"
            match action:
                case Send(worker, ticket):
                    assert not any(ticket in queue for queue in self.at_work.values()), "a ticket at two workers"
                    self.at_work[worker].append(ticket)
                    placed = self.progress.placed(ticket.batch, ticket.keys)
                    self.sent[ticket.number] = self.slices.contents(ticket, placed) if ticket.bounds else placed
                case Deliver(item):
                    self.delivered.append(item)
                    self.handed_over.append(item)
                case Replace():
                    pass
                case Dismiss(worker):
                    assert not self.at_work.pop(worker)
                case Fail(tickets, _, at_once, leave_out):
                    self._fail(tickets, at_once, leave_out)
                case _:
                    raise AssertionError(action)
        self.was_finished = self.finished
        self.scheduler.validate()

    def _fail(self, tickets: list[Ticket], at_once: bool, leave_out: bool) -> None:
        if at_once:
            self.named |= {ticket.batch for ticket in tickets}
            return
        (ticket,) = tickets
        self.came(ticket, Item(Outcome(Kind.LEFT_OUT), ticket.batch) if leave_out else failed(OSError(), ticket.batch))

    def finish(self) -> None:
        """Come to the end: all that is planned is made and taken."""
        self.length = len(self.batches) if self.length is None else self.length
        for _ in range(10_000):
            if self.finished:
                return
            busy = [worker for worker, queue in self.at_work.items() if queue]
            if busy:
                self.work(busy[0])
            elif self.joining:
                self.join()
            else:
                self.take()
        raise AssertionError(f"it does not end: {self.scheduler!r}")

    def check(self) -> None:
        numbers = [item.batch for item in self.delivered]
        assert max(Counter(numbers).values(), default=1) == 1, "a batch came twice"
        if self.options.get("in_order", True):
            assert numbers == sorted(numbers)
        for item in self.delivered:
            outcome, keys = item.outcome, self.batches[item.batch]
            assert all(keys[sample.position] == sample.key for sample in outcome.bad)
            if outcome.kind == Kind.BATCH:
                bad = {sample.key for sample in outcome.bad}
                assert outcome.data == [key for key in keys if key not in bad]
            if outcome.kind == Kind.LEFT_OUT:
                assert any(left is keys for left in self.left_out)
        ahead = len(self.batches) - self.taken - self.scheduler.void_count
        assert not self.options.get("max_buffered_bytes") or ahead <= 40


class Model(RuleBasedStateMachine):
    """Workers make slices well and badly, die, hang, join, leave and vanish, while batches are joined and taken."""

    @initialize(
        num_at_start=st.integers(1, 4),
        prefetch=st.integers(1, 3),
        in_order=st.booleans(),
        max_buffered_bytes=st.sampled_from([0, 200_000]),
        on_crash=st.sampled_from(["raise", "retry", "skip"]),
        on_timeout=st.sampled_from(["retry", "skip"]),
        on_error=st.sampled_from(["raise", "skip", "replace"]),
        max_retries=st.integers(0, 2),
        obtain=st.sampled_from([None, Slabs, lambda columns, count: None]),
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
        fate=st.sampled_from(["good"] * 5 + ["too few", "bad", "none good", "error", "collation"]),
        busy_s=st.sampled_from([1e-5, 0.02, 1.0]),
    )
    def work(self, data: st.DataObject, fate: str, busy_s: float) -> None:
        there = self.there
        if busy := [worker for worker, queue in there.at_work.items() if queue]:
            worker = data.draw(st.sampled_from(busy))
            if there.on_error == "raise" and fate in ("bad", "none good"):
                fate = "error"
            if there.at_work[worker][0].bounds is None and fate != "error":
                fate = "good"
            there.work(worker, fate, busy_s)

    @rule(fate=st.sampled_from(["joined", "joined", "cannot be joined"]))
    def join(self, fate: str) -> None:
        if self.there.joining:
            self.there.join(fate)

    @rule(data=st.data(), hangs=st.booleans(), was_ready=st.booleans())
    def die(self, data: st.DataObject, hangs: bool, was_ready: bool) -> None:
        there = self.there
        scheduler = there.scheduler
        if hangs:
            if (ticket := scheduler.awaited()) is not None:
                there.at_work[ticket.worker].clear()
                there.apply(scheduler.vacated(gone(ticket.worker, hung=True)))
            return
        worker = data.draw(st.sampled_from(sorted(there.at_work)))
        there.at_work[worker].clear()
        there.apply(scheduler.vacated(gone(worker, was_ready=was_ready)))

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
            there.apply(there.scheduler.leaving(worker))

    @invariant()
    def what_is_joined_is_with_no_worker(self) -> None:
        if hasattr(self, "there"):
            there = self.there
            is_joining = there.options["in_order"] and there.scheduler.gone_count in dict(there.joining)
            is_nobody_at_work = not any(there.scheduler.in_flight.values())
            assert (there.scheduler.awaited() is None) is (is_joining or is_nobody_at_work)

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
        found = Counter(item.batch for item in there.delivered)
        for number in range(len(there.batches)):
            assert found[number] == 1 or number in there.named, f"batch {number} is neither here nor named"
        assert len(there.left_out) == sum(item.outcome.kind == Kind.LEFT_OUT for item in there.delivered)
        assert there.scheduler.void_count == len(there.batches) - len(there.delivered)


Model.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestEveryInterleaving = Model.TestCase


def all_slices(there: Workplace, number: int = 0) -> list[tuple[int, Ticket]]:
    """Return who has slices of a batch, in the order of these."""
    found = [(worker, ticket) for worker, queue in there.at_work.items() for ticket in queue]
    return sorted([pair for pair in found if pair[1].batch == number], key=lambda pair: pair[1].bounds or (0, 0))


def test_slices_go_to_whoever_is_free_and_are_joined_in_their_order() -> None:
    """Each worker has some, and the batch is as if one had made all."""
    there = Workplace(num_at_start=3, length=1)
    assert all(there.at_work.values())
    there.work(2)
    there.work(1)
    there.finish()
    (item,) = there.delivered
    assert item.outcome.data == [0, 1, 2, 3, 4, 5]


def test_slices_name_their_rows_once_an_earlier_batch_has_shown_them() -> None:
    """The slabs are obtained when the first slice of the batch is sent."""
    obtained: list[tuple[Any, int]] = []

    def obtain(columns: Any, count: int) -> Slabs | None:
        obtained.append((columns, count))
        return Slabs(columns, count) if columns else None

    there = Workplace(num_at_start=2, length=3, obtain=obtain)
    assert all(keys.rows == () for keys in there.sent.values())
    there.slicer.columns = (("float32", (3,)),)  # type: ignore[assignment]
    there.finish()
    assert [count for _, count in obtained] == [6, 6, 6]
    assert obtained[0][0] == ()


@pytest.mark.parametrize(
    ("fates", "expected"),
    [
        (["good", "error", "error"], "error of the second"),
        (["collation", "good", "error"], "error of the third"),  # samples are made before any is collated
        (["collation", "good", "good"], "made again"),
        (["good", "too few", "good"], "made again"),
    ],
)
def test_what_becomes_of_a_batch_of_slices_that_did_not_come_well(fates: list[str], expected: str) -> None:
    """As if its samples were made one after the other, and collated then."""
    there = Workplace(num_at_start=3, length=1, sizes=lambda number: 3)
    names = ("first", "second", "third")
    for worker, ticket in reversed(all_slices(there)):
        assert ticket.bounds is not None
        there.work(worker, fates[ticket.bounds[0]])
    if expected == "made again":
        ((worker, ticket),) = all_slices(there)
        assert (ticket.keys, ticket.bounds) == ([0, 1, 2], None)
        there.work(worker)
        assert there.delivered[0].outcome.data == [0, 1, 2]
    else:
        (item,) = there.delivered
        assert f"error of the {names[item.outcome.error.args[0]]}" == expected
    there.finish()


@pytest.mark.parametrize(("on_error", "is_made_again"), [("skip", False), ("replace", True)])
def test_bad_samples_in_slices(on_error: Any, is_made_again: bool) -> None:
    """They are left out where they are; which sample is in the place of one is decided over the whole batch."""
    there = Workplace(num_at_start=2, length=1, on_error=on_error)
    tickets = all_slices(there)
    there.work(tickets[0][0], "bad")
    while slices := all_slices(there):
        if slices[0][1].bounds is None:
            break
        there.work(slices[0][0])
    assert bool(slices) is is_made_again
    there.finish()
    (item,) = there.delivered
    assert [(sample.key, sample.position) for sample in item.outcome.bad] == ([] if is_made_again else [(0, 0)])


def test_a_batch_without_a_good_sample_is_left_out_once() -> None:
    """Where bad samples are skipped."""
    there = Workplace(num_at_start=2, length=1, on_error="skip")
    while slices := all_slices(there):
        there.work(slices[0][0], "none good")
    (item,) = there.delivered
    assert item.outcome.kind == Kind.LEFT_OUT
    assert len(item.outcome.bad) == 6
    assert there.left_out == [[0, 1, 2, 3, 4, 5]]


def test_a_dead_worker_costs_its_slice() -> None:
    """What others have made is kept."""
    there = Workplace(num_at_start=2, length=1)
    there.work(1)
    lost = [ticket.own_keys for ticket in there.at_work[0]]
    others = [ticket.own_keys for ticket in there.at_work[1]]
    there.at_work[0].clear()
    there.apply(there.scheduler.vacated(gone(0)))
    assert [ticket.own_keys for ticket in there.at_work[0]] == lost[:1]
    assert [ticket.own_keys for ticket in there.at_work[1]] == others
    there.finish()
    assert there.delivered[0].outcome.data == [0, 1, 2, 3, 4, 5]


def test_a_batch_whose_slices_are_lost_is_void_once() -> None:
    """With `on_crash="raise"`: the error was handed over at once, and one place in the window is free."""
    there = Workplace(num_at_start=2, length=2, on_crash="raise")
    before = len(there.batches)
    there.at_work[0].clear()
    there.apply(there.scheduler.vacated(gone(0)))
    there.finish()
    assert there.named <= set(range(before))
    assert there.scheduler.void_count == len(there.named)


def test_the_window_follows_what_batches_cost() -> None:
    """In batches: one while nobody knows, two where all workers share one, torch's where batches are whole."""
    there = Workplace(num_at_start=3)
    assert there.window == 1
    while not there.joining:
        there.work(next(worker for worker, queue in there.at_work.items() if queue), busy_s=1e-6)
    assert there.window == 2  # while it is joined, who waits reads on
    there.join()
    assert there.window == 2
    for _ in range(40):
        if busy := [worker for worker, queue in there.at_work.items() if queue]:
            there.work(busy[0], busy_s=1e-6)
        if there.joining:
            there.join()
        there.take()
    assert there.window == 6
    there.finish()


def test_reading_on_is_counted_in_batches() -> None:
    """Whatever the number of tickets: who waits reads one batch after the other, not as many as there are slices."""
    there = Workplace(num_at_start=2, max_buffered_bytes=64 << 20)
    window = there.window
    for _ in range(100):
        before, most, window = len(there.batches), 1 + there.window - window, there.window
        there.take()
        assert len(there.batches) <= before + most
        if not there.handed_over:
            there.work(next(worker for worker, queue in there.at_work.items() if queue))
        while there.joining:
            there.join()
    assert len(there.batches) > there.window + there.taken
    there.finish()


def played(times_s: Any, batch_size: int, **options: Any) -> list[float]:
    """Play a run on a clock that is none, with 4 workers and 0.3 ms a ticket; return when each batch was there."""
    count = len(times_s) // batch_size
    there = Workplace(length=count, sizes=lambda number: batch_size, num_at_start=4, **options)
    now, working, events, arrived = 0.0, set[int](), list[tuple[float, int, float]](), list[float]()

    def begin() -> None:
        for worker in there.at_work.keys() - working:
            if there.at_work[worker]:
                ticket = there.at_work[worker][0]
                took = 0.0003 + sum(times_s[key] for key in ticket.own_keys)
                working.add(worker)
                heapq.heappush(events, (now + took, worker, took))

    begin()
    while events:
        now, worker, took = heapq.heappop(events)
        working.discard(worker)
        there.work(worker, busy_s=took)
        while there.joining:
            there.join()
        while there.handed_over:
            there.take()
            arrived.append(now)
        there.take()  # it waits, and reads on
        begin()
    assert there.finished
    return arrived


def test_a_first_batch_takes_a_worker_s_share_of_its_time() -> None:
    """64 samples of 20 ms, of which nothing is known, and 4 workers: not 1.28 s, but a quarter of that."""
    assert played([0.02] * 256, 64)[0] < 0.27 * 1.28


def test_samples_that_take_unlike_times_leave_nobody_idle() -> None:
    """Log-normal ones, sigma 1.2, in batches of 24: within 3 % of what four workers need at the least."""
    times_s = np.random.default_rng(1).lognormal(np.log(0.02), 1.2, 24 * 80)
    assert played(times_s, 24, max_buffered_bytes=64 << 20)[-1] * 0.97 < times_s.sum() / 4


def test_void_keys_free_their_place() -> None:
    """Batches that were given before a resume are passed over."""
    scheduler = Scheduler(deciders.options(scheduling="dynamic"), slices=Slices(deciders.options(), Slicer()))
    assert scheduler.planned([VOID]) == []
    assert (scheduler.void_count, scheduler.gone_count) == (1, 1)


def test_keys_of_any_other_kind_are_a_whole_batch() -> None:
    """They need not even have a length."""
    scheduler = Scheduler(deciders.options(scheduling="dynamic"), slices=Slices(deciders.options(), Slicer()))
    (action,) = scheduler.planned([iter([1, 2, 3])])
    ticket = action.ticket  # type: ignore[union-attr]
    assert ticket.bounds is None
    scheduler.returned(ticket.worker, ticket.number, 1.0)
    assert scheduler.ready(ticket.batch, "batch") == [Deliver("batch")]


# ------------------------------------------------------------------------------------------------- how large slices are


def slicer_of(making_s: float) -> Slicer:
    slicer = Slicer()
    slicer.each = 1
    slicer.made(1, making_s)
    return slicer


def sizes(slicer: Slicer, count: int, num_workers: int) -> list[int]:
    """Return how large the slices of a batch are, one after the other."""
    found: list[int] = []
    while (left := count - sum(found)) > 0:
        found.append(slicer.size(left, num_workers))
    return found


@given(
    count=st.integers(0, 5000),
    num_workers=st.integers(0, 100),
    costs=st.lists(st.tuples(st.integers(0, 64), st.floats(0, 10)), max_size=5),
)
def test_slices_cover_the_batch_and_none_is_empty(count: int, num_workers: int, costs: list[tuple[int, float]]) -> None:
    """Whatever was measured: each sample is in one slice."""
    slicer = Slicer()
    for samples, seconds in costs:
        slicer.made(samples, seconds)
        slicer.each = samples or slicer.each
    found = sizes(slicer, count, num_workers)
    assert sum(found) == count
    assert all(size > 0 for size in found)


@pytest.mark.parametrize(
    ("making_s", "count", "num_workers", "slices"),
    [
        (20e-3, 64, 4, 27),  # of 8 samples at first, of one in the end
        (1e-3, 64, 4, 3),  # of 20 ms each
        (1e-3, 39, 4, 1),  # not twice 20 ms
        (10e-6, 512, 4, 1),
        (1.0, 1, 4, 1),
        (1.0, 64, 1, 1),  # nobody to share with
        (0.0, 64, 4, 1),
    ],
)
def test_a_slice_is_worth_its_ticket(making_s: float, count: int, num_workers: int, slices: int) -> None:
    """Slices take a worker 20 ms at least; a batch that does not take two of these stays whole."""
    assert len(sizes(slicer_of(making_s), count, num_workers)) == slices


def test_a_first_batch_is_divided_before_anything_is_known() -> None:
    """Into slices that become smaller, down to a single sample: workers that start first do more of it."""
    found = sizes(Slicer(), 64, 4)
    assert found[0] == 8
    assert found == sorted(found, reverse=True)
    assert found[-1] == 1


def test_a_first_sample_that_costs_nothing_does_not_keep_the_first_batch_together() -> None:
    """What samples cost is believed when a batch is there."""
    slicer = slicer_of(1e-6)
    slicer.each = math.inf
    assert slicer.size(40, 4) == 5


def test_what_samples_cost_is_what_they_cost_now() -> None:
    """A long past of cheap ones does not keep dear ones together, nor one ticket decide."""
    slicer = slicer_of(1e-6)
    for _ in range(100):
        slicer.made(64, 64e-6)
    slicer.made(64, 64e-4)
    assert len(sizes(slicer, 64, 4)) == 1
    for _ in range(50):
        slicer.made(64, 0.64)
    assert len(sizes(slicer, 64, 4)) > 1


def test_batches_stay_whole_where_slices_often_cannot_be_joined() -> None:
    """One in eight may be made again, and one more."""
    slicer = slicer_of(1.0)
    for refused in (False, True, *[False] * 8, True, False):
        assert len(sizes(slicer, 64, 4)) > 1
        if refused:
            slicer.not_joined()
        else:
            slicer.joined(())
    slicer.not_joined()
    assert slicer.is_whole
    assert slicer.size(64, 4) == 64
