"""Which workers come, go and are renewed, decided without any workers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from asyncloader.engine.recovery import Recovery
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.workforce import Workforce
from tests.support import deciders


@dataclass
class Place:
    """What is known of a worker that is there."""

    is_ready: bool = True
    is_alive: bool = True


class World:
    """Scheduler and pool, as far as a workforce sees of them: `carry_out` does what it decides."""

    def __init__(self, num_workers: int, max_batches: int | None = None) -> None:
        self.workforce = Workforce(deciders.options(num_at_start=num_workers, max_worker_memory=max_batches))
        self.scheduler = Scheduler(deciders.options(num_at_start=num_workers))
        self.recovery = Recovery(deciders.options(num_at_start=num_workers, on_timeout="retry"))
        self.places: dict[int, Any] = {worker: Place() for worker in range(num_workers)}
        self.to_start: set[int] = set()
        self.made: dict[int, int] = {}  # batches, by each worker's process
        self.is_idle = False  # nobody has tickets: who leaves is gone

    def settle(self) -> list[Any]:
        """Have it decide."""
        actions = self.workforce.settle(self.scheduler, self.places)
        self.carry_out(actions)
        return actions

    def carry_out(self, actions: list[Any]) -> None:
        """Do it; who leaves has something in hand, and is dismissed by `finish`."""
        for action in actions:
            match action:
                case ("start", worker, _):
                    assert not self.is_there(worker)
                    self.to_start.add(worker)
                case ("join", worker):
                    assert worker in self.scheduler.in_flight or (
                        self.is_there(worker) and self.places[worker].is_ready
                    )
                    self.scheduler.joined(worker)
                case ("leave", worker):
                    self.scheduler.leaving(worker)
                    if not self.is_there(worker):
                        self.scheduler.lost(worker)
                    elif self.is_idle:
                        self.scheduler.lost(worker)
                        del self.places[worker]
                case ("dismiss", worker):
                    self.places.pop(worker, None)

    def make(self) -> None:
        """Have each worker make a batch, which leaves a byte behind; one that has grown leaves."""
        for worker in tuple(self.places):
            if self.takes(worker) and self.is_there(worker) and self.places[worker].is_ready:
                self.made[worker] = self.made.get(worker, 0) + 1
                if self.workforce.has_grown(worker, self.made[worker]):
                    self.scheduler.leaving(worker)

    def takes(self, worker: int) -> bool:
        """Whether a worker takes tickets."""
        return worker in self.scheduler.takers

    def is_there(self, worker: int) -> bool:
        """Whether it has a process that lives."""
        return worker in self.places and self.places[worker].is_alive

    def die(self, worker: int) -> None:
        """Have a worker's process end by itself. It keeps its place, and another one is to be started."""
        if self.is_there(worker) and self.takes(worker):
            self.places[worker].is_alive = False
            self.to_start.add(worker)

    def start(self) -> None:
        """Start who is to be started, is not there, and takes tickets or is wanted still."""
        for worker in self.to_start & (self.workforce.wanted | {*self.scheduler.takers}):
            if self.is_there(worker):
                continue
            self.places[worker] = Place(False)
            self.made[worker] = 0
            self.workforce.reset(worker)
        self.to_start.clear()

    def get_ready(self) -> None:
        """Have those that were started open the dataset."""
        for worker, place in tuple(self.places.items()):
            if place.is_alive and not place.is_ready:
                place.is_ready = True
                self.carry_out(self.workforce.ready(worker, self.scheduler))

    def hang(self) -> None:
        """Have those that are to join hang while they open the dataset: they are killed. Who takes tickets has some."""
        for worker in self.workforce.coming & self.places.keys():
            if not self.is_there(worker) or self.places[worker].is_ready:
                continue
            del self.places[worker]
            error = TimeoutError("it has not opened the dataset")
            decided = self.recovery.not_launched(worker, error, is_active=False, is_alone=False)
            assert [action[0] for action in decided] == ["leave", "start"]
            self.carry_out([*decided])

    def finish(self) -> None:
        """Have those that leave be done; in the place of one that is wanted another is started."""
        for worker in self.scheduler.in_flight.keys() - self.scheduler.takers:
            self.scheduler.lost(worker)
            self.places.pop(worker, None)
            if worker in self.workforce.wanted:
                self.workforce.coming.add(worker)
                self.to_start.add(worker)

    def begin(self, num_workers: int) -> None:
        """Begin another run, made for so many; workers that have grown leave it."""
        self.scheduler, self.is_idle = Scheduler(deciders.options(num_at_start=num_workers)), True
        self.to_start |= {worker for worker in self.workforce.wanted & self.places.keys() if not self.is_there(worker)}
        self.settle()
        for worker in self.workforce.grown:
            self.scheduler.leaving(worker)
        self.is_idle = False


def test_one_more_joins_when_it_is_ready() -> None:
    """It is started once."""
    world = World(1)
    world.workforce.want(2)
    assert world.settle() == [("start", 1, 0.0)]
    assert world.settle() == []
    world.start()
    assert 1 in world.workforce.coming
    assert not world.takes(1)
    world.get_ready()
    assert world.takes(1)
    assert 1 not in world.workforce.coming


def test_the_last_go_first_and_stay_if_they_are_wanted_before_they_have_gone() -> None:
    """Without another process."""
    world = World(4)
    world.workforce.want(2)
    assert world.settle() == [("leave", 3), ("leave", 2)]
    world.workforce.want(3)
    assert world.settle() == [("join", 2)]


def test_one_that_has_died_does_not_join() -> None:
    """It was not wanted when another was to be started in its place, and then it was: nobody would have started one."""
    world = World(2)
    world.die(1)
    world.workforce.want(1)
    assert world.settle() == [("leave", 1)]
    world.start()
    assert not world.is_there(1)
    world.workforce.want(2)
    assert world.settle() == [("start", 1, 0.0)]
    world.start()
    world.get_ready()
    assert world.is_there(1)
    assert world.takes(1)


def test_one_that_is_not_wanted_before_it_is_ready_goes_at_once() -> None:
    """Started or not."""
    world = World(1)
    world.workforce.want(2)
    world.settle()
    world.workforce.want(1)
    assert world.settle() == []
    world.workforce.want(2)
    assert world.settle() == [("start", 1, 0.0)]
    world.start()
    world.workforce.want(1)
    assert world.settle() == [("dismiss", 1)]


def test_workers_that_come_later_join_as_they_come() -> None:
    """Nobody starts them once more; one that is not wanted any more goes."""
    workforce, scheduler = Workforce(deciders.options(num_at_start=3)), Scheduler(deciders.options(num_at_start=3))
    for worker in range(3):
        scheduler.lost(worker)
        workforce.coming.add(worker)
    processes: Any = {worker: Place(False) for worker in range(3)}
    assert workforce.settle(scheduler, processes) == []
    assert workforce.ready(1, scheduler) == [("join", 1)]
    scheduler.joined(1)
    workforce.want(2)
    assert workforce.settle(scheduler, processes) == [("dismiss", 2)]
    assert workforce.ready(2, scheduler) == [("dismiss", 2)]
    assert workforce.ready(0, scheduler) == [("join", 0)]
    assert workforce.wanted == {0, 1}


def test_a_run_that_was_made_for_others_gets_those_that_are_there() -> None:
    """And has no place for those that are not."""
    world = World(2)
    world.workforce.want(3)
    world.settle()
    world.start()
    world.get_ready()
    world.begin(1)
    assert [world.takes(worker) for worker in range(3)] == [True, True, True]
    world.workforce.want(1)
    world.settle()
    world.begin(3)
    assert world.scheduler.in_flight.keys() == {0}


EVENTS = st.sampled_from(["start", "get_ready", "hang", "finish", "settle", "make"])


@example(["make"] * 3)  # a worker that is being renewed goes on
@example([*["make"] * 3, 1, "make", 1])  # or would, whenever somebody says how many are wanted
@example(["make"] * 3 + ["finish", "start", "hang"])  # the one that takes its place stops while it starts
@example([("die", 1), 1, "start", 2])  # one that has died is not wanted, and then it is
@given(
    st.lists(
        st.integers(1, 5)
        | EVENTS
        | st.tuples(st.just("begin"), st.integers(1, 5))
        | st.tuples(st.just("die"), st.integers(0, 4)),
        max_size=40,
    )
)
def test_in_the_end_there_are_as_many_as_there_are_to_be(events: list[Any]) -> None:
    """Whatever happens in between; and each that has grown is renewed."""
    world = World(2, max_batches=2)
    for event in events:
        match event:
            case int():
                world.workforce.want(event)
                world.settle()
            case (name, number):
                getattr(world, name)(number)
            case name:
                getattr(world, name)()
        deciders.validate_workforce(world.workforce, world.scheduler)
    for _ in range(2):
        world.finish()
        world.start()
        world.get_ready()
    takers = {*world.scheduler.takers}
    assert takers == world.workforce.wanted
    assert all(map(world.is_there, takers))
    for _ in range(9):
        world.make()
        assert all(world.made[worker] <= 4 for worker in takers), "some get old"
        world.finish()
        world.start()
        world.get_ready()


# ------------------------------------------------------------------------------------------------------------ renewal

MB = 1 << 20


def test_a_worker_that_has_grown_is_renewed() -> None:
    """As soon as it tells of more than it may have. The one that takes its place has made nothing."""
    workforce = Workforce(deciders.options(num_at_start=3, max_worker_memory=100 * MB))
    assert not any(workforce.has_grown(0, size * MB) for size in (0, 60, 100))
    assert workforce.has_grown(0, 101 * MB)
    workforce.reset(0)
    assert not workforce.has_grown(0, 102 * MB)  # it has so much at its start


def test_without_an_option_nothing_is_looked_at() -> None:
    """However much a worker has."""
    workforce = Workforce(deciders.options(num_at_start=3))
    assert not workforce.has_grown(0, 1 << 40)
    assert workforce.most_in_hand is None


def test_what_a_worker_needs_from_its_start_is_no_reason(caplog: Any) -> None:
    """Another one would need it too: the bound is twice that, which is told once."""
    workforce = Workforce(deciders.options(num_at_start=3, max_worker_memory=100 * MB))
    with caplog.at_level(logging.WARNING, "asyncloader"):
        for worker in range(3):
            assert not workforce.has_grown(worker, 150 * MB)
            assert not workforce.has_grown(worker, 300 * MB)
    assert caplog.text.count("max_worker_memory is 105 MB, and a worker takes 157 MB after its first batch") == 1
    assert workforce.has_grown(1, 301 * MB)
