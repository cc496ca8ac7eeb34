"""Which workers come, go and are renewed, decided without any workers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncloader.engine.actions import Dismiss, Join, Leave, Start
from asyncloader.engine.roster import Roster
from asyncloader.engine.workforce import Workforce
from tests import deciders


@dataclass
class Place:
    """What is known of a worker that is there."""

    is_ready: bool = True


class World:
    """Scheduler and pool, as far as a workforce sees of them: `carry_out` does what it decides."""

    def __init__(self, num_workers: int, max_tasks: int | None = None) -> None:
        self.workforce = Workforce(deciders.options(num_at_start=num_workers, max_tasks_per_child=max_tasks))
        self.now = 0.0
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

    def make(self) -> None:
        """Have each worker make a batch, unless it is sent nothing."""
        for worker in tuple(self.roster.active & self.places.keys()):
            if self.workforce.may_send(worker) and self.places[worker].is_ready:
                self.made[worker] = self.made.get(worker, 0) + 1
                if self.workforce.made(worker, 0):
                    self.workforce.choose(self.now, self.roster, self.places)

    def renew(self) -> None:
        """Have a worker that is to be renewed answer its tickets: another process takes its place."""
        if (worker := self.workforce.renewing) is not None and not self.workforce.is_finishing:
            self.workforce.is_finishing = True
        elif worker is not None:
            assert self.roster.takes(worker)
            assert all(place.is_ready for place in self.places.values()), "another one is being started"
            self.places[worker] = Place(False)
            self.made[worker] = 0
            self.workforce.reset(worker)

    def refuse(self) -> None:
        """Have no process be had for a worker that is to be renewed."""
        if self.workforce.renewing is not None:
            self.workforce.not_renewed(self.now)

    def lose(self) -> None:
        """Have the last worker be lost."""
        if len(self.roster.active) > 1 and (worker := max(self.roster.active)):
            self.workforce.lose(worker)
            self.roster.retire(worker)
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


def test_a_run_may_begin_before_the_first_of_its_workers() -> None:
    """They are being started, and join as they come; one that is not wanted any more goes."""
    workforce, roster = Workforce(deciders.options(num_at_start=0, num_workers=3)), Roster(0, 0)
    processes: Any = {worker: Place(False) for worker in range(3)}
    assert workforce.settle(roster, processes) == []
    assert workforce.ready(1, roster) == [Join(1)]
    roster.join(1)
    workforce.want(2)
    assert workforce.settle(roster, processes) == [Dismiss(2)]
    assert workforce.ready(2, roster) == [Dismiss(2)]
    assert workforce.ready(0, roster) == [Join(0)]
    workforce.lose(0)
    assert workforce.members == {1}


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


EVENTS = st.sampled_from(["start", "get_ready", "finish", "settle", "make", "renew", "refuse", "lose"])


@example(["make"] * 3)  # a worker that is being renewed goes on
@given(st.lists(st.integers(1, 5) | EVENTS | st.integers(1, 5).map(lambda count: ("begin", count)), max_size=40))
def test_in_the_end_there_are_as_many_as_there_are_to_be(events: list[Any]) -> None:
    """Whatever happens in between; and each that has made enough is renewed, one at a time."""
    world = World(2, max_tasks=2)
    for event in events:
        world.now += 1.0
        match event:
            case int():
                world.workforce.want(event)
                world.settle()
            case ("begin", count):
                world.begin(count)
            case name:
                getattr(world, name)()
        world.workforce.validate(world.roster)
    world.start()
    world.get_ready()
    world.finish()
    takers = {worker for worker in world.roster.active if world.roster.takes(worker)}
    assert takers == world.workforce.members
    world.now += 1000.0
    world.made.clear()
    for _ in range(4 * len(takers) + 3):
        world.make()
        world.renew()
        world.get_ready()
    assert all(world.made.get(worker, 0) <= 2 + 2 * len(takers) for worker in takers), "some get old"


# ------------------------------------------------------------------------------------------------------------ renewal

MB = 1 << 20


def make(workforce: Workforce, worker: int, batches: int, private_bytes: int = 0) -> bool:
    """Have a worker make so many; return whether any is to be renewed after the last."""
    return [workforce.made(worker, private_bytes) for _ in range(batches)][-1]


def choose(workforce: Workforce, now: float = 0.0, **places: bool) -> int | None:
    """Have it choose a worker to be renewed, of three that are there; some may not be ready."""
    known: Any = {worker: Place(places.get(f"is_{worker}_ready", True)) for worker in range(3)}
    workforce.choose(now, Roster(3, 0), known)
    return workforce.renewing


def test_a_worker_that_has_made_enough_is_renewed() -> None:
    """The one that takes its place has made nothing."""
    workforce = Workforce(deciders.options(num_at_start=3, max_tasks_per_child=3))
    assert not make(workforce, 0, 2)
    assert choose(workforce) is None
    assert make(workforce, 0, 1)
    assert choose(workforce) == 0
    assert workforce.has_made(0) == "it has made 3 batches"
    assert workforce.may_send(0)  # it goes on until the other one is ready
    workforce.is_finishing = True
    assert not workforce.may_send(0)
    workforce.reset(0)
    assert workforce.may_send(0)
    assert workforce.renewing is None
    assert not make(workforce, 0, 2)
    assert make(workforce, 0, 1)


def test_without_an_option_nothing_is_counted() -> None:
    """However many a worker makes."""
    workforce = Workforce(deciders.options(num_at_start=3))
    assert not make(workforce, 0, 100, 1 << 40)
    assert not workforce._lives


def test_workers_are_renewed_one_after_the_other() -> None:
    """In the order in which they became due, each when all others are there."""
    workforce = Workforce(deciders.options(num_at_start=3, max_tasks_per_child=2))
    for worker in (2, 0, 1):
        make(workforce, worker, 5)
    renewed = []
    for _ in range(3):
        renewed.append(choose(workforce))
        assert choose(workforce) == renewed[-1]
        workforce.reset(renewed[-1] or 0)
    assert renewed == [2, 0, 1]
    assert choose(workforce) is None


def test_a_worker_that_cannot_be_renewed_now_is_due_again_with_its_next_batch() -> None:
    """Another one is just being started, or no process could be had; and it holds up nobody."""
    workforce = Workforce(deciders.options(num_at_start=3, max_tasks_per_child=1))
    make(workforce, 0, 1)
    assert choose(workforce, is_2_ready=False) is None
    assert choose(workforce) is None
    make(workforce, 0, 1)
    assert choose(workforce) == 0
    workforce.not_renewed(0.0)
    make(workforce, 0, 1)
    assert choose(workforce, now=29.9) is None
    assert choose(workforce, now=30.0) == 0


def test_a_worker_that_has_grown_is_renewed() -> None:
    """As soon as it tells of more than it may have."""
    workforce = Workforce(deciders.options(num_at_start=3, max_worker_memory=100 * MB))
    assert not make(workforce, 0, 1)  # nothing is known yet
    assert not make(workforce, 0, 50, 60 * MB)
    assert not make(workforce, 0, 50, 100 * MB)
    assert make(workforce, 0, 1, 101 * MB)
    assert choose(workforce) == 0
    assert workforce.has_made(0) == "it has made 102 batches, and has 106 MB to itself"


def test_what_a_worker_needs_from_its_start_is_no_reason(caplog: Any) -> None:
    """Another one would need it too: the bound is twice that, which is told once."""
    workforce = Workforce(deciders.options(num_at_start=3, max_worker_memory=100 * MB))
    with caplog.at_level(logging.WARNING, "asyncloader"):
        for worker in range(3):
            assert not make(workforce, worker, 5, 150 * MB)
            assert not make(workforce, worker, 5, 300 * MB)
    assert caplog.text.count("max_worker_memory is 105 MB, and a worker takes 157 MB when it has made 1 batches") == 1
    assert make(workforce, 1, 1, 301 * MB)


def test_a_worker_that_is_far_above_its_bound_is_sent_nothing_until_it_is_renewed() -> None:
    """A fast leak would have taken twice as much by then. So is the one whose turn comes next."""
    workforce = Workforce(deciders.options(num_at_start=3, max_worker_memory=100 * MB))
    for worker in range(3):
        make(workforce, worker, 1, 10 * MB)
    make(workforce, 0, 1, 200 * MB)
    assert workforce.may_send(0)  # it is not decided that another comes
    assert choose(workforce) == 0
    make(workforce, 1, 1, 110 * MB)
    make(workforce, 2, 1, 111 * MB)
    assert [workforce.may_send(worker) for worker in range(3)] == [False, True, False]
    workforce.reset(0)
    assert all(map(workforce.may_send, range(3)))
    assert choose(workforce) == 1
    assert [workforce.may_send(worker) for worker in range(3)] == [True, True, False]
    make(workforce, 1, 1, 140 * MB)
    assert not workforce.may_send(1)
    workforce.not_renewed(0.0)
    assert all(map(workforce.may_send, range(3)))


@pytest.mark.parametrize("end", ["reset", "lose", "settle"])
def test_a_worker_that_dies_or_leaves_is_not_renewed(end: str) -> None:
    """What comes in its place has made nothing; one that stays after all is due again."""
    workforce, roster, places = (
        Workforce(deciders.options(num_at_start=3, max_tasks_per_child=1)),
        Roster(3, 0),
        {worker: Place() for worker in range(3)},
    )
    make(workforce, 2, 1)
    assert choose(workforce) == 2
    match end:
        case "settle":
            workforce.want(2)
            assert workforce.settle(roster, places) == [Leave(2)]  # type: ignore[arg-type]
        case name:
            getattr(workforce, name)(2)
    assert workforce.renewing is None


def test_representation() -> None:
    """What a debugger shows."""
    workforce = Workforce(deciders.options(num_at_start=3, max_tasks_per_child=1))
    make(workforce, 2, 1)
    assert repr(workforce) == "<Workforce [0, 1, 2] coming=[] due=[2]>"
    choose(workforce)
    assert repr(workforce) == "<Workforce [0, 1, 2] coming=[] renewing=2 due=[]>"
