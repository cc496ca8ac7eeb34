"""How many workers there should be, decided over simulated loads: a trainer, workers and cores that are formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.engine.controller import Controller
from asyncloader.observe.figures import Workers, WorkerStats
from asyncloader.observe.meter import Meter
from asyncloader.observe.stats import LoaderStats
from asyncloader.observe.timing import Timing
from tests.support import deciders
from tests.support.effort import examples

STEP_S = 0.02
_NOTHING = Meter(0, 2, 4).stats()


def figures(
    taken: float, waited: float = 0.0, trained: float = 0.0, made: float = 0, work: float = 0.0, cpu: float = 0.0
) -> LoaderStats:
    """Return the statistics of a run that has come so far. Seconds all told."""
    waiting = replace(_NOTHING.waiting, consumer=Timing(total_s=waited))
    workers = Workers((WorkerStats(0, int(made), work),), cpu)
    return replace(_NOTHING, batches=int(taken), training_s=trained, waiting=waiting, workers=workers)


@dataclass
class World:
    """A load, in steps of simulated time; workers take 50 ms to come.

    Attributes:
        train: Seconds that the trainer takes for a batch.
        work: Seconds that a worker takes for one, waiting included.
        cpu: Of these, how many it computes.
        cores: That there are.
        most: Workers beyond which something else limits: a disk, a server.
        ahead: Batches that those who were there had been given, and the trainer takes before any of those who come.
    """

    train: float
    work: float
    cpu: float
    cores: int = 2
    most: int = 99
    start: int = 2
    stalls: tuple[tuple[float, float], ...] = ()  # when the machine does something else
    ahead: float = 0.0
    now: float = 0.0
    history: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = Controller(deciders.options(most_computing=self.cores, most_waiting=8), self.start)
        self.wanted = self.count = self.were = self.start
        self.comes_at = 0.0
        self.noted = {"waited": 0.0, "trained": 0.0}
        self.old = self.waiting = 0.0
        names = ("taken", "waited", "trained", "made", "work", "cpu")
        self.sums: dict[str, float] = dict.fromkeys(names, 0.0)

    def rate(self, count: int) -> float:
        """Return batches a second with so many workers."""
        return 1 / max(self.work / min(count, self.most), self.cpu / self.cores, self.train, 1e-4)

    def run(self, seconds: float) -> World:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            is_stalled = any(start <= self.now < end for start, end in self.stalls)
            rate = 1e-6 if is_stalled else self.rate(self.count)
            made = rate * STEP_S
            sums = self.sums
            batches = self.taken(made)
            if int(sums["taken"] + batches) > int(sums["taken"]):  # what is known was noted with a batch
                part = (int(sums["taken"] + batches) - sums["taken"]) / batches
                waited = sums["waited"] + part * max(0.0, STEP_S - batches * self.train)
                self.noted = {"waited": waited, "trained": sums["trained"] + part * batches * self.train}
            sums["taken"] += batches
            sums["made"] += made
            sums["trained"] += batches * self.train
            sums["waited"] += max(0.0, STEP_S - batches * self.train)
            # A worker that shares a core, or a disk, takes longer.
            is_limit = rate < 1 / self.train * 0.999
            sums["work"] += STEP_S * self.count if is_limit else made * self.work
            sums["cpu"] += STEP_S * self.count if is_limit and self.cpu > 0.5 * self.work else made * self.cpu
            self.look()
        return self

    def taken(self, made: float) -> float:
        """Return how many batches the trainer takes while so many are made."""
        if self.old > 0:  # those who came make what is behind what the others had been given
            taken = min(made, self.rate(self.were) * STEP_S)
            self.old -= taken
        else:
            taken = min(self.waiting + made, STEP_S / max(self.train, 1e-4))
        self.waiting += made - taken
        return taken

    def look(self) -> None:
        """Have the controller look, and workers come and go."""
        controller = self.controller
        if self.now >= self.comes_at:
            if self.count < controller.num_workers and self.old <= 0:
                self.old, self.were = self.ahead, self.count
            self.count = controller.num_workers
        if self.now >= controller.due:
            sums = self.sums
            noted = self.noted["waited"], self.noted["trained"]
            stats = figures(sums["taken"], *noted, sums["made"], sums["work"], sums["cpu"])
            controller.observe(self.now, self.count, stats)
            if controller.num_workers != self.wanted:
                self.wanted, self.comes_at = controller.num_workers, self.now + 0.05
                self.history.append((self.now, controller.num_workers))

    @property
    def best(self) -> float:
        """The rate of the best fixed number."""
        return max(self.rate(count) for count in range(1, 9))

    def is_good(self, share: float = 0.9) -> bool:
        """Whether the rate is nearly that."""
        return self.rate(self.count) >= share * self.best


LOADS = st.builds(
    World,
    train=st.floats(0.001, 0.1),
    work=st.floats(0.002, 0.2),
    cpu=st.just(0.0),
    most=st.sampled_from([99, 99, 3, 1]),
    start=st.integers(1, 8),
)


@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(LOADS)
def test_it_comes_to_a_good_number_within_5_s_and_stays_there(world: World) -> None:
    """For samples that wait, whatever training takes, and wherever it begins."""
    world.run(5)
    assert world.is_good(), f"{world.count} at {world.rate(world.count)}, best {world.best}"
    changes = len(world.history)
    world.run(60)
    assert world.is_good() or world.history[-1][0] > 63
    assert len(world.history) - changes <= 8, f"it flutters: {world.history}"


@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(LOADS, st.floats(0.001, 0.1), st.floats(0.002, 0.2))
def test_it_follows_a_load_that_changes(world: World, train: float, work: float) -> None:
    """Within 5 s, in either direction."""
    world.run(12)
    world.train, world.work = train, work
    world.run(5)
    assert world.is_good(), f"{world.count} at {world.rate(world.count)}, best {world.best}"


@pytest.mark.parametrize("work", [0.004, 0.04, 0.1])
def test_with_a_trainer_that_never_waits_one_more_than_needed_at_most(work: float) -> None:
    """However many there were."""
    world = World(0.05, work, 0.0, start=8).run(5)
    assert world.count <= math.ceil(work / 0.05) + 1
    assert world.is_good()


def test_there_are_four_times_as_many_at_most_after_one_look() -> None:
    """However many a first look would ask for: each is a process, with memory of its own."""
    world = World(train=0.001, work=0.1, cpu=0.0, start=1).run(5.0)
    assert [count for _, count in world.history] == [4, 8]


def test_what_computes_gets_no_more_than_the_cores() -> None:
    """Also if it waited before."""
    world = World(0.001, 0.04, 0.001).run(5)
    assert world.count == 8
    world.cpu = 0.04
    world.run(5)
    assert world.count == 2


def test_what_did_not_help_is_not_tried_again_soon() -> None:
    """Each time later."""
    world = World(0.001, 0.02, 0.0, most=3, start=3).run(120)
    tries = [at for at, count in world.history if count > 3]
    assert 2 <= len(tries) <= 6
    assert tries[-1] - tries[-2] > tries[1] - tries[0]


@pytest.mark.parametrize("start", [0.6 + 0.1 * step for step in range(10)])
def test_a_pause_of_the_machine_costs_one_rest_at_most(start: float) -> None:
    """It may come in the very window in which more workers are tried."""
    world = World(0.001, 0.02, 0.0, start=2, stalls=((start, start + 0.3),)).run(13)
    assert world.count == 8


@pytest.mark.parametrize("ahead", [20, 50, 100, 200, 400])
def test_what_waits_behind_batches_that_a_few_had_been_given_counts_for_more_workers(ahead: int) -> None:
    """For the trainer gets no more than before until these are made."""
    world = World(0.001, 0.02, 0.0, start=2, ahead=ahead).run(5)
    assert [count for _, count in world.history] == [8]


@pytest.mark.parametrize("most", [2, 3])
def test_samples_that_wait_as_long_as_others_computed_are_another_load(most: int) -> None:
    """More workers are tried again after a rest."""
    world = World(0.001, 0.02, 0.009, cores=8, start=2, most=most).run(4)  # more do not help, and do not compute
    assert world.count == most
    world.cpu, world.most = 0.0, 99
    world.run(12)
    assert world.is_good(), f"{world.count}: {world.history}"


def test_a_window_begins_when_workers_that_came_have_made_batches() -> None:
    """They may have come before anybody looks again."""
    controller = Controller(deciders.options(most_computing=8, most_waiting=8), 2)
    at = 0.0
    while controller.num_workers == 2:
        at += 0.1
        controller.observe(at, 2, figures(int(200 * at), at, made=int(200 * at), work=2 * at))
    before = int(200 * at)
    for made, has_begun in ((0, False), (controller.num_workers - 1, False), (controller.num_workers, True)):
        at += 0.1
        controller.observe(at, controller.num_workers, figures(before, at, made=before + made))
        assert (controller._first is not None) == has_begun


@pytest.mark.parametrize(("taken", "has_helped"), [(10, False), (11, True)])
def test_windows_of_few_batches_are_exact_to_a_batch_each(taken: int, has_helped: bool) -> None:
    """A third worker may add half of what two make, and has to add half of that: 12.5 after 10 if counts were exact."""
    controller = Controller(deciders.options(most_computing=8, most_waiting=8), 2)
    controller.observe(0.0, 2, figures(0))
    controller.observe(1.0, 2, figures(10, waited=0.2, trained=0.8, made=10, work=2.0))
    assert controller.num_workers == 3
    controller.observe(2.0, 3, figures(13, waited=0.3, trained=0.9, made=13, work=2.6))
    controller.observe(3.0, 3, figures(13 + taken, waited=0.9, trained=1.3, made=13 + taken, work=5.6))
    assert (controller.reason != "more did not help") == has_helped


def test_a_worker_that_is_missed_comes_back_at_once_and_stays() -> None:
    """Its batches were not all alike, and the mean had asked for fewer."""
    controller = Controller(deciders.options(most_computing=8, most_waiting=8), 3)
    controller.observe(0.0, 3, figures(0))
    controller.observe(1.0, 3, figures(10, trained=1.0, made=10, work=1.5))
    assert controller.num_workers == 2
    controller.observe(2.0, 2, figures(12, trained=1.2, made=12, work=1.8))
    controller.observe(3.0, 2, figures(22, waited=0.1, trained=2.1, made=22, work=3.3))
    assert (controller.num_workers, controller.reason) == (3, "training waits with fewer")
    controller.observe(4.0, 3, figures(25, waited=0.1, trained=2.4, made=25, work=3.75))
    controller.observe(5.0, 3, figures(35, waited=0.1, trained=3.4, made=35, work=5.25))
    assert controller.num_workers == 3
