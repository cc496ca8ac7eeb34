"""Who is renewed, and when, decided without any workers; and a world of simulated ones, to which anything happens."""

from __future__ import annotations

import logging
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncloader.engine.actions import Abandon, Renew, Succeed
from asyncloader.engine.renewal import Renewal

MB = 1 << 20


def anybody(worker: int) -> bool:
    """Whoever is due may be renewed."""
    return True


def make(renewal: Renewal, worker: int, batches: int, private_bytes: int = 0) -> bool:
    """Have a worker make so many; return whether there is anything to decide after the last."""
    return [renewal.made(worker, private_bytes) for _ in range(batches)][-1]


def test_who_has_made_enough_is_renewed_between_two_batches() -> None:
    """A successor is started, and when it is ready and the worker has nothing in hand it takes the place."""
    renewal = Renewal(3, None)
    assert not make(renewal, 0, 2)
    assert renewal.next(0.0, anybody) == []
    assert make(renewal, 0, 1)
    assert renewal.next(0.0, anybody) == [Renew(0)]
    assert make(renewal, 0, 2)  # it goes on meanwhile
    assert renewal.next(1.0, anybody) == []
    assert renewal.idle() == []
    assert renewal.ready(0)
    assert renewal.idle() == [Succeed(0)]
    assert renewal.worker is None
    assert not make(renewal, 0, 2)
    assert make(renewal, 0, 1)


def test_with_the_same_number_they_go_one_after_the_other() -> None:
    """In the order in which they became due."""
    renewal = Renewal(2, None)
    for worker in (2, 0, 1):
        make(renewal, worker, 5)
    renewed = []
    for _ in range(3):
        (action,) = renewal.next(0.0, anybody)
        assert renewal.next(0.0, anybody) == []
        renewed.append(action.worker)
        renewal.ready(action.worker)
        assert renewal.idle() == [Succeed(action.worker)]
    assert renewed == [2, 0, 1]
    assert renewal.next(0.0, anybody) == []


def test_who_has_grown_is_renewed() -> None:
    """As soon as it tells of more than it may have."""
    renewal = Renewal(None, 100 * MB)
    assert not make(renewal, 0, 1)  # nothing is known yet
    assert not make(renewal, 0, 50, 60 * MB)
    assert not make(renewal, 0, 50, 100 * MB)
    assert make(renewal, 0, 1, 101 * MB)
    assert renewal.next(0.0, anybody) == [Renew(0)]


def test_what_a_worker_needs_from_the_beginning_is_no_reason(caplog: Any) -> None:
    """Another one would need it too: only what comes to it, and that is told once."""
    renewal = Renewal(None, 100 * MB)
    with caplog.at_level(logging.WARNING, "asyncloader"):
        for worker in range(3):
            assert not make(renewal, worker, 5, 150 * MB)
            assert not make(renewal, worker, 5, 300 * MB)
    assert caplog.text.count("max_worker_memory is 105 MB, and a worker takes 157 MB when it has made 1 batches") == 1
    assert make(renewal, 1, 1, 301 * MB)


def test_who_may_not_be_renewed_now_is_due_again_with_its_next_batch() -> None:
    """It was being started, or rested; and holds up nobody."""
    renewal = Renewal(1, None)
    make(renewal, 0, 1)
    make(renewal, 1, 1)
    assert renewal.next(0.0, lambda worker: worker == 1) == [Renew(1)]
    renewal.ready(1)
    renewal.idle()
    assert renewal.next(0.0, anybody) == []
    make(renewal, 0, 1)
    assert renewal.next(0.0, anybody) == [Renew(0)]


def test_a_successor_that_cannot_be_had_is_tried_again_later_each_time() -> None:
    """And the worker goes on; one that came makes up for it."""
    renewal = Renewal(1, None)
    at, waits = 0.0, []
    for _ in range(3):
        make(renewal, 0, 1)
        assert renewal.next(at, anybody) == [Renew(0)]
        assert renewal.failed(0, at) == [Abandon(0)]
        failed_at = at
        while True:
            make(renewal, 0, 1)
            at += 0.25
            if actions := renewal.next(at, anybody):
                break
        waits.append(at - failed_at)
        assert actions == [Renew(0)]
        renewal.stop(0)
    assert waits == [1, 2, 4]
    make(renewal, 0, 1)
    renewal.next(at, anybody)
    renewal.ready(0)
    renewal.idle()
    make(renewal, 0, 1)
    renewal.next(at, anybody)
    renewal.failed(0, at)
    make(renewal, 0, 1)
    assert renewal.next(at + 1.0, anybody) == [Renew(0)]


def test_a_successor_that_hangs_is_not_waited_for() -> None:
    """It may open a large dataset for minutes."""
    renewal = Renewal(1, None)
    make(renewal, 0, 1)
    renewal.next(0.0, anybody)
    assert renewal.next(299.0, anybody) == []
    assert renewal.next(301.0, anybody) == [Abandon(0)]
    assert not renewal.ready(0)


@pytest.mark.parametrize("is_ready", [False, True])
def test_who_leaves_or_dies_is_not_being_renewed_any_more(is_ready: bool) -> None:
    """Of one that died the successor takes the place, which is nobody's business here."""
    renewal = Renewal(1, None)
    for end, expected in ((renewal.stop, [Abandon(0)]), (renewal.lost, None), (renewal.born, None)):
        make(renewal, 0, 1)
        assert renewal.next(0.0, anybody) == [Renew(0)]
        if is_ready:
            renewal.ready(0)
        assert end(0) == expected  # type: ignore[operator]
        assert (renewal.worker, renewal.is_holding) == (None, False)
        assert renewal.idle() == renewal.stop(0) == renewal.failed(0, 0.0) == []
        assert not renewal.ready(0)


def test_representation() -> None:
    """What a debugger shows."""
    renewal = Renewal(1, None)
    make(renewal, 0, 1)
    make(renewal, 1, 1)
    renewal.next(0.0, anybody)
    renewal.ready(0)
    assert repr(renewal) == "<Renewal of 0 (it finishes), due: [1]>"


class World:
    """Processes under worker ids: how many batches each has made, what it has in hand, and what waits for it."""

    def __init__(self, max_tasks: int) -> None:
        self.renewal = Renewal(max_tasks, None)
        self.ages: dict[int, int] = {0: 0, 1: 0}
        self.in_hand: dict[int, int] = {0: 0, 1: 0}
        self.waiting: dict[int, int] = {}  # held
        self.successors: dict[int, bool] = {}  # whether it is ready
        self.oldest = 0
        self.now = 0.0

    def carry_out(self, actions: list[Any]) -> None:
        """Do what was decided, as the supervisor does it."""
        for action in actions:
            match action:
                case Renew(worker):
                    assert worker in self.ages
                    assert not self.successors.get(worker), "two successors of one worker"
                    self.successors[worker] = False
                case Succeed(worker):
                    assert self.successors.pop(worker), "it is not ready"
                    assert not self.in_hand[worker], "it has something in hand"
                    self.ages[worker], self.in_hand[worker] = 0, self.waiting.pop(worker)
                case Abandon(worker):
                    self.successors.pop(worker, None)
                    self.in_hand[worker] += self.waiting.pop(worker, 0)
        assert len(self.successors) <= 1

    def look(self) -> None:
        """See whether anything is to be done."""
        renewal = self.renewal
        if renewal.is_holding and renewal.worker is not None and not self.in_hand[renewal.worker]:
            self.carry_out(renewal.idle())
        self.carry_out(renewal.next(self.now, lambda worker: worker in self.ages))

    def give(self, worker: int) -> None:
        """Give a worker a batch to do."""
        if worker in self.waiting:
            self.waiting[worker] += 1
        elif worker in self.ages:
            self.in_hand[worker] += 1

    def make(self, worker: int) -> None:
        """Have it make one."""
        if self.in_hand.get(worker):
            self.in_hand[worker] -= 1
            self.ages[worker] += 1
            self.oldest = max(self.oldest, self.ages[worker])
            if self.renewal.made(worker, 0):
                self.look()

    def get_ready(self, worker: int) -> None:
        """Have a successor open the dataset."""
        if self.successors.get(worker) is False:
            self.successors[worker] = True
            if self.renewal.ready(worker):
                self.waiting[worker] = 0
            self.look()

    def fail(self, worker: int) -> None:
        """Have a successor end."""
        if worker in self.successors:
            del self.successors[worker]
            self.carry_out(self.renewal.failed(worker, self.now))

    def die(self, worker: int) -> None:
        """Have a worker die: its successor takes the place, ready or not, or another one."""
        if worker in self.ages:
            self.renewal.lost(worker)
            self.in_hand[worker] += self.waiting.pop(worker, 0)  # done again by whoever comes
            self.successors.pop(worker, None)
            self.ages[worker] = 0
            self.renewal.born(worker)

    def leave(self, worker: int) -> None:
        """Have a worker go, unless it is the last."""
        if worker in self.ages and len(self.ages) > 1:
            self.carry_out(self.renewal.stop(worker))
            del self.ages[worker], self.in_hand[worker]

    def join(self, worker: int) -> None:
        """Have one come."""
        if worker not in self.ages:
            self.renewal.born(worker)
            self.ages[worker] = self.in_hand[worker] = 0

    def begin(self, worker: int) -> None:
        """Begin another run: what was in hand is for nobody."""
        self.in_hand = dict.fromkeys(self.in_hand, 0)
        self.waiting = dict.fromkeys(self.waiting, 0)
        self.look()


EVENTS = ["give", "give", "make", "make", "get_ready", "fail", "die", "leave", "join", "begin"]


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), max_size=80))
def test_whatever_happens_in_the_end_everybody_is_renewed(max_tasks: int, events: list[tuple[str, int]]) -> None:
    """One at a time, only where nothing is in hand, and no ticket is forgotten."""
    world = World(max_tasks)
    for name, worker in events:
        world.now += 0.01
        getattr(world, name)(worker)
    for _ in range(100):  # what is in hand is finished, by whoever has it
        for worker in range(3):
            world.make(worker)
            world.get_ready(worker)
    world.now += 1000.0
    world.oldest = 0
    world.ages = dict.fromkeys(world.ages, 0)
    for _ in range(4 * max_tasks + 8):
        world.now += 0.01
        for worker in tuple(world.ages):
            world.give(worker)
            world.make(worker)
            world.get_ready(worker)
    assert world.oldest <= max_tasks + 2 * len(world.ages) + 2, f"some get old: {world.renewal!r}"
    for worker in world.ages:
        for _ in range(100):
            world.make(worker)
    assert not any(world.in_hand.values())
    assert not any(world.waiting.values()), "what is for a worker is not sent"
