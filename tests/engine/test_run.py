"""One run, driven by hand: what consumers read and take, what the loop hands over, in any order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import DataLoader
from asyncloader.engine.actions import VOID, Ticket
from asyncloader.engine.item import Item
from asyncloader.engine.progress import Progress
from asyncloader.engine.run import Run
from asyncloader.engine.scheduler import Scheduler
from asyncloader.messages.failure import BadSample, CapturedError
from asyncloader.messages.messages import EpochSpec, Kind
from asyncloader.messages.outcome import Outcome
from asyncloader.messages.snapshot import Pace
from asyncloader.observe.meter import Meter
from asyncloader.run.plan import Plan
from tests.support import deciders, inside
from tests.support.patience import wait_until

WORKERS, FACTOR = 2, 2
WINDOW = WORKERS * FACTOR


class Driver:
    """The loop thread of one run, in this one: `turn` gives it a turn, `answer` has a worker answer a ticket."""

    def __init__(self, plan: Iterable[Any], *, max_errors: int | None = None, position: int = 0) -> None:
        options: dict[str, Any] = {} if max_errors is None else {"on_error": "skip", "max_errors": max_errors}
        settings = inside.options(DataLoader(range(100), 1, **options))  # type: ignore[arg-type]
        progress = Progress(position)
        scheduler = Scheduler(deciders.options(num_at_start=WORKERS, prefetch=FACTOR), first=position)
        meter = Meter(0, WORKERS, WINDOW)
        made = plan if isinstance(plan, Plan) else Plan(plan, iter(plan), progress, Pace())
        self.run = Run(settings, scheduler, EpochSpec(1, (0, 0, 0)), meter, made, progress)
        self.wakes = 0
        self.sent: dict[int, Ticket] = {}
        self.planned: list[Any] = []

    def wake(self) -> None:
        """The run asks for a turn."""
        self.wakes += 1

    def turn(self) -> None:
        """Look into the inbox."""
        batches, plan_ended = self.run.read_inbox()
        self.planned += batches
        self.run.scheduler.planned(batches)
        if plan_ended:
            self.run.scheduler.plan_ended()
        self.settle()

    def answer(self, batch: int, outcome: Outcome | None = None) -> None:
        """A worker has come to this outcome; to the keys by default."""
        ticket = self.sent.pop(batch)
        scheduler = self.run.scheduler
        item = Item(outcome or Outcome(Kind.BATCH, data=ticket.keys), batch, ticket.worker)
        scheduler.returned(ticket.worker, batch)
        scheduler.ready(batch, item)
        self.settle()

    def take(self) -> Item | None:
        """A consumer takes what there is, and has it."""
        if (item := self.run.first()) is not None:
            self.run.read_for(item, 0.0, 0.0)
            self.run.count(item)
        return item

    def get(self) -> Any:
        """A consumer is given a batch, or what is raised in its place."""
        item = self.take()
        assert item is not None
        if item.outcome.error is not None:
            raise item.outcome.error
        return item.outcome.data

    def settle(self) -> None:
        """Carry out what the scheduler decided."""
        scheduler = self.run.scheduler
        assert scheduler.assign() == []
        self.sent |= {ticket.batch: ticket for tickets in scheduler.outbox.values() for ticket in tickets}
        scheduler.outbox.clear()
        self.run.hand_over()
        self.run.follow()


def begun(plan: Iterable[Any], **options: Any) -> Driver:
    """A run whose first window was read, and planned."""
    driver = Driver(plan, **options)
    driver.run.read_first(driver.wake)
    driver.turn()
    return driver


def bad(key: int) -> BadSample:
    """A sample that raised."""
    return BadSample(key, 0, CapturedError.capture(ValueError(key), "in a test"))


def test_a_window_is_read_and_then_a_batch_for_each_that_is_taken() -> None:
    """With one wake-up for all that is read before the loop gets its turn."""
    driver = begun(range(10))
    assert driver.planned == [0, 1, 2, 3]
    assert driver.wakes == 1
    for batch in range(3):
        driver.answer(batch)
    assert [driver.get() for _ in range(3)] == [0, 1, 2]
    assert driver.wakes == 2
    driver.turn()
    assert driver.planned == [*range(7)]
    assert driver.take() is None


def test_a_run_that_goes_on_has_the_numbers_behind_those_before() -> None:
    """Batches of the plan that were yielded before keep their places, and are passed over."""
    driver = begun([VOID, "b", "c"], position=5)
    assert list(driver.sent) == [6, 7]
    driver.answer(6)
    item = driver.take()
    assert item is not None
    assert (item.outcome.data, item.batch) == ("b", 6)
    assert driver.run.progress.now.position == 7


@given(st.integers(0, 12), st.sets(st.integers(0, 11)), st.lists(st.integers(0, 5), max_size=60))
def test_every_batch_comes_once_and_in_order(count: int, left_out: set[int], choices: list[int]) -> None:
    """However the consumer, the loop and the workers take turns; what is left out is passed over."""
    driver, seen = Driver(range(count)), []
    run = driver.run
    run.read_first(driver.wake)
    for choice in chain(choices, cycle(range(3))):
        if choice == 0:
            driver.turn()
        elif choice == 1:
            if (item := driver.take()) is not None:
                seen.append(item.outcome.data)
        elif choice == 2:
            try:
                run.read_on()
            except StopIteration:
                break
        if choice >= 2 and driver.sent:
            batch = sorted(driver.sent)[choice % len(driver.sent)]
            driver.answer(batch, Outcome(Kind.LEFT_OUT) if batch in left_out else None)
    assert seen == [batch for batch in range(count) if batch not in left_out]
    assert run.all_taken
    assert run.progress.now.position == count


def test_what_the_sampler_raises_comes_after_the_batches_before() -> None:
    """And what it yields after that follows, if it goes on."""

    class Moody:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at == 3:
                raise KeyError("third")
            if self.at == 5:
                raise StopIteration
            return self.at

    driver = begun(Moody())
    assert driver.planned == [1, 2]
    driver.run.read_on()  # not its turn yet
    for batch in range(2):
        driver.answer(batch)
        assert driver.run.has_news()
        driver.take()
    assert driver.run.has_news()
    driver.run.read_on()
    with pytest.raises(KeyError, match="third"):
        driver.get()
    driver.run.read_on()
    driver.turn()
    driver.answer(2)
    assert driver.get() == 4
    with pytest.raises(StopIteration):
        driver.run.read_on()


def test_an_interrupt_in_the_sampler_loses_no_batch() -> None:
    """The one that was being taken is there for the next call."""

    def plan() -> Iterator[int]:
        yield from range(WINDOW)
        raise KeyboardInterrupt

    driver = begun(plan())
    driver.answer(0)
    with pytest.raises(KeyboardInterrupt):
        driver.take()
    assert driver.run.progress.now.position == 0
    assert driver.get() == 0
    assert driver.run.progress.now.position == 1


def test_an_interrupted_wake_up_is_made_up_for_by_the_next() -> None:
    """What was read before is not stuck in the inbox."""
    driver = Driver(range(10))
    raising = iter([KeyboardInterrupt()])

    def wake() -> None:
        for error in raising:
            raise error
        driver.wake()

    with pytest.raises(KeyboardInterrupt):
        driver.run.read_first(wake)
    driver.run.read_on()
    assert driver.wakes == 1
    driver.turn()
    assert driver.planned == [*range(WINDOW)]


def test_too_many_bad_samples_are_an_error_in_the_place_of_their_batch() -> None:
    """It counts as one, and what follows comes."""
    driver = begun(range(10), max_errors=1)
    for batch in range(3):
        driver.answer(batch, Outcome(Kind.BATCH, data=batch, bad=(bad(batch),) if batch < 2 else ()))
    assert driver.get() == 0
    with pytest.raises(ValueError, match="1"):
        driver.get()
    assert driver.get() == 2
    stats = driver.run.meter.stats()
    assert (stats.faults.errors, stats.faults.bad_count) == (1, 2)


def test_an_error_at_once_comes_before_what_is_ready() -> None:
    """It takes no place in the window."""
    driver = begun(range(10))
    driver.answer(0)
    driver.run.raise_first(OSError("1"))
    taken = driver.run.taken
    with pytest.raises(OSError, match="1"):
        driver.get()
    assert driver.run.taken == taken
    assert driver.get() == 0


def test_an_interrupt_leaves_an_error_at_once_in_one_place() -> None:
    """Python looks at signals where a call returns: then the error comes with the next call, and no second time."""

    class Interrupted(deque[Item]):
        def appendleft(self, item: Item) -> None:
            super().appendleft(item)
            raise KeyboardInterrupt

    driver = begun(range(10))
    run = driver.run
    run.handoff.ready = Interrupted()
    run.raise_first(ValueError("a worker has died"))
    with pytest.raises(KeyboardInterrupt):
        run.first()
    item = run.first()
    assert item is not None
    assert str(item.outcome.error) == "a worker has died"
    run.count(item)
    assert run.first() is None


def test_closing_drops_what_is_ready_and_wakes_who_waits() -> None:
    """Consumers find out by themselves what has happened."""
    driver = begun(range(10))
    run = driver.run
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(run.handoff.wait(run.has_news, None)))
    thread.start()
    wait_until(lambda: run.handoff.is_awaited)
    run.close()
    thread.join(10.0)
    assert woken == [True]
    assert run.has_news()
    assert not run.handoff.ready


def test_what_ends_a_run_is_raised_to_each_consumer_once() -> None:
    """A loop that goes on after errors then comes to an end; for states, the epoch has not."""
    run = begun(range(10)).run
    run.stop(ValueError("no worker is left"))
    raised: list[type[BaseException]] = []

    def ask() -> None:
        for _ in range(3):
            with pytest.raises((ValueError, StopIteration)) as caught:
                run.check()
            raised.append(caught.type)

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    ask()
    assert raised == 2 * [ValueError, StopIteration, StopIteration]
    run.progress.note_end()
    assert not run.progress.finished
