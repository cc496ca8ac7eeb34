"""Which workers come, go and are renewed, decided without any workers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from asyncloader.engine.roster import Roster
from asyncloader.engine.workforce import Workforce
from tests.support import deciders


@dataclass
class Place:
    """What is known of a worker that is there."""

    is_ready: bool = True


class World:
    """Scheduler and pool, as far as a workforce sees of them: `carry_out` does what it decides."""

    def __init__(self, num_workers: int, max_batches: int | None = None) -> None:
        self.workforce = Workforce(deciders.options(num_at_start=num_workers, max_worker_memory=max_batches))
        self.roster = Roster(num_workers, 0)
        self.places: dict[int, Any] = {worker: Place() for worker in range(num_workers)}
        self.to_start: set[int] = set()
        self.made: dict[int, int] = {}  # batches, by each worker's process
        self.is_idle = False  # nobody has tickets: who leaves is gone

    def settle(self) -> list[Any]:
        """Have it decide."""
        actions = self.workforce.settle(self.roster, self.places)
        self.carry_out(actions)
        return actions

    def carry_out(self, actions: list[Any]) -> None:
        """Do it; who leaves has something in hand, and is dismissed by `finish`."""
        for action in actions:
            match action:
                case ("start", worker):
                    assert worker not in self.places
                    self.to_start.add(worker)
                case ("join", worker):
                    assert worker in self.roster.leaving or self.places[worker].is_ready
                    self.roster.join(worker)
                case ("leave", worker):
                    self.roster.leave(worker)
                    if self.is_idle or worker not in self.places:
                        self.roster.retire(worker)
                        self.places.pop(worker, None)
                case ("dismiss", worker):
                    self.places.pop(worker, None)

    def make(self) -> None:
        """Have each worker make a batch, which leaves a byte behind; one that has grown leaves."""
        for worker in tuple(self.roster.active & self.places.keys()):
            if self.roster.takes(worker) and self.places[worker].is_ready:
                self.made[worker] = self.made.get(worker, 0) + 1
                if self.workforce.has_grown(worker, self.made[worker]):
                    self.roster.leave(worker)

    def start(self) -> None:
        """Start who is to be started, and is wanted still."""
        for worker in self.to_start & self.workforce.wanted - self.places.keys():
            self.places[worker] = Place(False)
            self.made[worker] = 0
            self.workforce.reset(worker)
        self.to_start.clear()

    def get_ready(self) -> None:
        """Have those that were started open the dataset."""
        for worker, place in self.places.items():
            if not place.is_ready:
                place.is_ready = True
                self.carry_out(self.workforce.ready(worker, self.roster))

    def finish(self) -> None:
        """Have those that leave be done; in the place of one that is wanted another is started."""
        for worker in tuple(self.roster.leaving):
            self.roster.retire(worker)
            self.places.pop(worker, None)
            if worker in self.workforce.wanted:
                self.workforce.coming.add(worker)
                self.to_start.add(worker)

    def begin(self, num_workers: int) -> None:
        """Begin another run, made for so many; workers that have grown leave it."""
        self.roster, self.is_idle = Roster(num_workers, 0), True
        self.settle()
        for worker in self.workforce.grown:
            if self.roster.takes(worker):
                self.roster.leave(worker)
        self.is_idle = False


def test_one_more_joins_when_it_is_ready() -> None:
    """It is started once."""
    world = World(1)
    world.workforce.want(2)
    assert world.settle() == [("start", 1)]
    assert world.settle() == []
    world.start()
    assert 1 in world.workforce.coming
    assert not world.roster.takes(1)
    world.get_ready()
    assert world.roster.takes(1)
    assert 1 not in world.workforce.coming


def test_the_last_go_first_and_stay_if_they_are_wanted_before_they_have_gone() -> None:
    """Without another process."""
    world = World(4)
    world.workforce.want(2)
    assert world.settle() == [("leave", 3), ("leave", 2)]
    world.workforce.want(3)
    assert world.settle() == [("join", 2)]


def test_one_that_is_not_wanted_before_it_is_ready_goes_at_once() -> None:
    """Started or not."""
    world = World(1)
    world.workforce.want(2)
    world.settle()
    world.workforce.want(1)
    assert world.settle() == []
    world.workforce.want(2)
    assert world.settle() == [("start", 1)]
    world.start()
    world.workforce.want(1)
    assert world.settle() == [("dismiss", 1)]


def test_workers_that_come_later_join_as_they_come() -> None:
    """Nobody starts them once more; one that is not wanted any more goes."""
    workforce, roster = Workforce(deciders.options(num_at_start=3)), Roster(0, 0)
    for worker in range(3):
        workforce.coming.add(worker)
    processes: Any = {worker: Place(False) for worker in range(3)}
    assert workforce.settle(roster, processes) == []
    assert workforce.ready(1, roster) == [("join", 1)]
    roster.join(1)
    workforce.want(2)
    assert workforce.settle(roster, processes) == [("dismiss", 2)]
    assert workforce.ready(2, roster) == [("dismiss", 2)]
    assert workforce.ready(0, roster) == [("join", 0)]
    assert workforce.wanted == {0, 1}


def test_a_run_that_was_made_for_others_gets_those_that_are_there() -> None:
    """And has no place for those that are not."""
    world = World(2)
    world.workforce.want(3)
    world.settle()
    world.start()
    world.get_ready()
    world.begin(1)
    assert [world.roster.takes(worker) for worker in range(3)] == [True, True, True]
    world.workforce.want(1)
    world.settle()
    world.begin(3)
    assert world.roster.active == {0}


EVENTS = st.sampled_from(["start", "get_ready", "finish", "settle", "make"])


@example(["make"] * 3)  # a worker that is being renewed goes on
@example([*["make"] * 3, 1, "make", 1])  # or would, whenever somebody says how many are wanted
@given(st.lists(st.integers(1, 5) | EVENTS | st.integers(1, 5).map(lambda count: ("begin", count)), max_size=40))
def test_in_the_end_there_are_as_many_as_there_are_to_be(events: list[Any]) -> None:
    """Whatever happens in between; and each that has grown is renewed."""
    world = World(2, max_batches=2)
    for event in events:
        match event:
            case int():
                world.workforce.want(event)
                world.settle()
            case ("begin", count):
                world.begin(count)
            case name:
                getattr(world, name)()
        deciders.validate_workforce(world.workforce, world.roster)
    for _ in range(2):
        world.finish()
        world.start()
        world.get_ready()
    takers = {worker for worker in world.roster.active if world.roster.takes(worker)}
    assert takers == world.workforce.wanted
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


def test_representation() -> None:
    """What a debugger shows."""
    workforce = Workforce(deciders.options(num_at_start=3))
    workforce.coming.add(2)
    assert repr(workforce) == "<Workforce [0, 1, 2] coming=[2]>"
