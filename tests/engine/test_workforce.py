"""Who comes and who goes, decided without any workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.engine.actions import Dismiss, Join, Leave, Start
from asyncloader.engine.roster import Roster
from asyncloader.engine.workforce import Workforce


@dataclass
class Place:
    """What is known of a worker that is there."""

    is_ready: bool = True


class World:
    """Scheduler and pool, as far as a workforce sees of them: `carry_out` does what it decides."""

    def __init__(self, num_workers: int) -> None:
        self.workforce = Workforce(num_workers)
        self.roster = Roster(num_workers, 0)
        self.places: dict[int, Any] = {worker: Place() for worker in range(num_workers)}
        self.to_start: set[int] = set()
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
                case Start(worker):
                    assert worker not in self.places
                    self.to_start.add(worker)
                case Join(worker):
                    assert worker in self.roster.leaving or self.places[worker].is_ready
                    self.roster.join(worker)
                case Leave(worker):
                    self.roster.leave(worker)
                    if self.is_idle or worker not in self.places:
                        self.roster.retire(worker)
                        self.places.pop(worker, None)
                case Dismiss(worker):
                    self.places.pop(worker, None)

    def start(self) -> None:
        """Start who is to be started, and is wanted still."""
        for worker in self.to_start & self.workforce.members - self.places.keys():
            self.places[worker] = Place(False)
        self.to_start.clear()

    def get_ready(self) -> None:
        """Have those that were started open the dataset."""
        for worker, place in self.places.items():
            if not place.is_ready:
                place.is_ready = True
                self.carry_out(self.workforce.ready(worker, self.roster))

    def finish(self) -> None:
        """Have those that leave be done."""
        for worker in tuple(self.roster.leaving):
            self.roster.retire(worker)
            self.places.pop(worker, None)

    def begin(self, num_workers: int) -> None:
        """Begin another run, made for so many."""
        self.roster, self.is_idle = Roster(num_workers, 0), True
        self.settle()
        self.is_idle = False


def test_one_more_joins_when_it_is_ready() -> None:
    """It is started once."""
    world = World(1)
    world.workforce.want(2)
    assert world.settle() == [Start(1)]
    assert world.settle() == []
    world.start()
    assert world.workforce.is_coming(1)
    assert not world.roster.takes(1)
    world.get_ready()
    assert world.roster.takes(1)
    assert not world.workforce.is_coming(1)


def test_the_last_go_first_and_stay_if_they_are_wanted_before_they_have_gone() -> None:
    """Without another process."""
    world = World(4)
    world.workforce.want(2)
    assert world.settle() == [Leave(3), Leave(2)]
    world.workforce.want(3)
    assert world.settle() == [Join(2)]


def test_one_that_is_not_wanted_before_it_is_ready_goes_at_once() -> None:
    """Started or not."""
    world = World(1)
    world.workforce.want(2)
    world.settle()
    world.workforce.want(1)
    assert world.settle() == []
    world.workforce.want(2)
    assert world.settle() == [Start(1)]
    world.start()
    world.workforce.want(1)
    assert world.settle() == [Dismiss(1)]


def test_one_that_nobody_has_asked_for_is_welcome() -> None:
    """So workers come that start elsewhere; one that is gone is not asked for again."""
    world = World(1)
    world.places[7] = Place()
    world.carry_out(world.workforce.ready(7, world.roster))
    assert world.roster.takes(7)
    assert world.workforce.members == {0, 7}
    world.workforce.gone(7)
    assert world.settle() == [Leave(7)]


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


EVENTS = st.sampled_from(["start", "get_ready", "finish", "settle"])


@given(st.lists(st.integers(1, 5) | EVENTS | st.integers(1, 5).map(lambda count: ("begin", count)), max_size=40))
def test_in_the_end_there_are_as_many_as_there_are_to_be(events: list[Any]) -> None:
    """Whatever happens in between."""
    world = World(2)
    for event in events:
        match event:
            case int():
                world.workforce.want(event)
                world.settle()
            case ("begin", count):
                world.begin(count)
            case name:
                getattr(world, name)()
    world.start()
    world.get_ready()
    world.finish()
    assert {worker for worker in world.roster.active if world.roster.takes(worker)} == world.workforce.members


def test_those_of_other_machines_come_and_go_by_themselves() -> None:
    """The number that is wanted is that of this machine; who was wanted here before is no guest."""
    workforce, roster = Workforce(2), Roster(2, 0)
    assert workforce.ready(5, roster) == [Join(5)]
    roster.join(5)
    workforce.want(4)
    assert (workforce.wanted, workforce.guests) == ({0, 1, 2, 3}, {5})
    workforce.want(1)
    assert workforce.members == {0, 5}
    assert workforce.ready(2, roster) == [Dismiss(2)]  # it was being started when it was wanted no more
    assert workforce.members == {0, 5}
    assert workforce.leaves(5, roster) == [Leave(5)]
    assert workforce.members == {0}
    roster.leave(5)
    processes: Any = {0: Place(), 1: Place(), 5: Place()}
    assert workforce.settle(roster, processes) == [Leave(1)]
    workforce = Workforce(3)  # the first ones are being started
    workforce.want(1)
    assert workforce.ready(2, Roster(1, 0)) == [Dismiss(2)]
