"""WeightedSampler.update: weights that change while an epoch is drawn, in states, on any ranks."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import AsyncLoaderError, ConfigurationError
from asyncloader.samplers import LengthBatchSampler, WeightedSampler, live_weights
from asyncloader.samplers.sums import CumulativeSums, SumTree
from asyncloader.samplers.weighted import _draw
from asyncloader.seeding.hashing import mix
from tests.nursery import Nursery
from tests.ranks import fork_ranks

PROGRAM = Path(__file__).parents[1] / "weights_ranks.py"

COUNT, SAMPLES = 13, 150
INITIAL = [1.0, 0.0, 2.0, 5.0, 0.5, 3.0, 1.0, 0.0, 4.0, 1.0, 1.0, 2.0, 7.0]
Change = tuple[list[int], list[float]]


@dataclass
class Reference:
    """Computes each sample from all updates: it has no state but what was said."""

    epoch: int = 0
    number: int = 0  # of the pass
    updates: list[tuple[tuple[int, int], Change]] = field(default_factory=list)

    def draw(self, position: int) -> int:
        weights, is_changed = np.array(INITIAL), False
        for begin, (indices, changed) in sorted(self.updates, key=lambda update: update[0]):
            if begin <= (self.number, position):
                is_changed = True
                for index, weight in zip(indices, changed, strict=True):
                    weights[index] = weight
        sums = SumTree(weights) if is_changed else CumulativeSums(weights)
        return int(_draw(np.uint64(mix(0, self.epoch)), sums, np.array([position % SAMPLES]))[0])

    def at(self, number: int, epoch: int, cursor: int) -> Reference:
        """Return what a sampler knows that has loaded a state."""
        updates = [
            ((0, 0) if begin <= (number, cursor) else (begin[0] - number, begin[1]), change)
            for begin, change in sorted(self.updates, key=lambda update: update[0])
        ]
        return Reference(epoch, 0, updates)


CHANGES = st.lists(
    st.tuples(st.integers(0, COUNT - 1), st.sampled_from([0.0, 0.25, 1.0, 30.0])), min_size=1, max_size=4
)
STEPS = st.one_of(
    st.tuples(st.just("draw"), st.integers(1, 40)),
    st.tuples(st.just("update"), CHANGES),
    st.tuples(st.just("update at"), st.tuples(st.integers(0, 90), CHANGES)),
    st.tuples(st.just("keep state"), st.integers(0, 30)),
    st.tuples(st.just("load"), st.tuples(st.integers(0, 9), st.booleans())),
    st.tuples(st.just("set epoch"), st.integers(0, 2)),
    st.tuples(st.just("iterate anew"), st.none()),
)


class Machine:
    """A sampler and a reference that live through the same."""

    def __init__(self) -> None:
        self.sampler = WeightedSampler(INITIAL, SAMPLES)
        self.reference = Reference()
        self.cursor = self.start = 0
        self.states: list[tuple[dict[str, Any], Reference, int]] = []
        self.iterator: Iterator[int] | None = None

    def draw(self, count: int) -> None:
        self.iterator = self.iterator or iter(self.sampler)
        for index in itertools.islice(self.iterator, count):
            assert index == self.reference.draw(self.cursor)
            self.cursor += 1

    def update(self, change: list[tuple[int, float]]) -> None:
        self._update(None, change)

    def update_at(self, arguments: tuple[int, list[tuple[int, float]]]) -> None:
        ahead, change = arguments
        self._update(self.cursor + ahead, change)

    def _update(self, at: int | None, change: list[tuple[int, float]]) -> None:
        indices, weights = [index for index, _ in change], [weight for _, weight in change]
        self.sampler.update(indices, weights, at=at)
        begin = self.reference.number, self.cursor if at is None else at
        self.reference.updates.append((begin, (indices, weights)))

    def keep_state(self, back: int) -> None:
        """Take a state of a sample that was drawn before."""
        items = max(0, self.cursor - self.start - back)
        state = json.loads(json.dumps(self.sampler.state_after(items)))
        cursor = self.start + items
        self.states.append((state, self.reference.at(self.reference.number, self.reference.epoch, cursor), cursor))

    def load(self, arguments: tuple[int, bool]) -> None:
        number, is_new = arguments
        if not self.states:
            return
        if is_new:
            self.sampler = WeightedSampler(INITIAL, SAMPLES)
        state, reference, cursor = self.states[number % len(self.states)]
        self.sampler.load_state_dict(state)
        assert self.sampler.state_dict() == state
        self.reference, self.iterator = copy.deepcopy(reference), None
        self.cursor = self.start = cursor

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.reference.epoch:
            self.reference.number += self.cursor > 0
            self.iterator, self.cursor, self.start = None, 0, 0
        self.sampler.set_epoch(epoch)
        self.reference.epoch = epoch

    def iterate_anew(self, _: None) -> None:
        """From the beginning, after something was drawn; so an iterator has begun where the last state has said."""
        if self.iterator is None:
            return
        self.reference.number += self.cursor > 0
        self.cursor = self.start = 0
        self.iterator = iter(self.sampler)
        self.draw(1)


@settings(deadline=None, max_examples=300)
@given(steps=st.lists(STEPS, max_size=25))
def test_what_is_drawn_is_what_the_updates_say(steps: list[tuple[str, Any]]) -> None:
    """However updates, states of the past, resumes and epochs follow on each other."""
    machine = Machine()
    for name, argument in steps:
        getattr(machine, name.replace(" ", "_"))(argument)
    machine.draw(SAMPLES)


def changed(number: int) -> tuple[list[int], list[float]]:
    """Return some update."""
    return [number % COUNT, (5 * number + 1) % COUNT], [0.5 + number % 7, 20.0 / (1 + number % 5)]


@pytest.mark.parametrize(
    ("indices", "weights", "options", "message"),
    [
        ([0, 1], [1.0], {}, "a weight for each, but their shapes are"),
        (0, 1.0, {}, "a weight for each, but their shapes are"),
        ([0.0], [1.0], {}, "integers, but are of the dtype float64"),
        ([13], [1.0], {}, "from 0 to 12: 13 to 13"),
        ([-1], [1.0], {}, "from 0 to 12: -1 to -1"),
        ([0], [-1.0], {}, "0, or from 1e-150"),
        ([0], [float("nan")], {}, "0, or from 1e-150"),
        ([0], [float("inf")], {}, "0, or from 1e-150"),
        ([0], [1e-200], {}, "0, or from 1e-150"),
        ([0], ["much"], {}, "0, or from 1e-150"),
        (range(COUNT), [0.0] * COUNT, {}, "0 samples would have a weight above 0, and 1 are needed"),
        ([0], [0.0], {"num_samples": 11, "replacement": False}, "10 samples would have .* and 11 are needed"),
        ([0], [1.0], {"at": 3}, "from sample 5 on, but not from 3"),
        ([0], [1.0], {"num_samples": 11, "replacement": False, "at": 8}, "made as a whole: leave `at` out"),
        ([0], [1.0], {"num_replicas": 2, "rank": 1}, "name it, the same on all ranks"),
    ],
)
def test_bad_updates_are_refused(indices: Any, weights: Any, options: dict[str, Any], message: str) -> None:
    """At once, with what is wrong; and they change nothing."""
    at = options.pop("at", None)
    sampler, other = (WeightedSampler(INITIAL, **{"num_samples": SAMPLES, **options}) for _ in range(2))
    samples, others = iter(sampler), iter(other)
    assert [next(samples) for _ in range(5)] == [next(others) for _ in range(5)]
    with pytest.raises(ConfigurationError, match=message):
        sampler.update(indices, weights, at=at)
    assert sampler.state_dict() == other.state_dict()
    assert list(samples) == list(others)


def test_weights_that_cannot_be_added_up_cannot_be_updated() -> None:
    """Those from the ends of the range of floats, which are drawn exactly as long as they stay as they are."""
    with pytest.raises(ConfigurationError, match="from the start"):
        WeightedSampler([1e-310, 1.0]).update([1], [2.0])


def test_no_weight_is_left_at_a_later_sample() -> None:
    """Where one comes later, and an update before it would leave none until then: an error where that is drawn."""
    sampler = WeightedSampler([1.0, 1.0], 100)
    sampler.update([0], [0.0], at=20)
    sampler.update([0], [1.0], at=30)
    sampler.update([1], [0.0], at=25)
    with pytest.raises(ConfigurationError, match="set all weights to 0"):
        list(sampler)


def to_int(row: Any) -> torch.Tensor:
    return torch.tensor(row).to(torch.int32)


@pytest.mark.parametrize("row", [list, np.array, torch.tensor, to_int])
def test_rows_of_all_kinds(row: Any) -> None:
    """Lists, arrays, tensors with a gradient, integers as weights; what is written into them later is no update."""
    expected = WeightedSampler(INITIAL, SAMPLES)
    expected.update([1, 2], [3.0, 4.0])
    given, initial = np.array([3, 4]), np.array(INITIAL)
    assert list(WeightedSampler(row(INITIAL) if row is not to_int else initial, SAMPLES)) == list(
        WeightedSampler(INITIAL, SAMPLES)
    )
    for weights in (given, torch.tensor([3.0, 4.0], dtype=torch.bfloat16, requires_grad=True)):
        sampler = WeightedSampler(initial, SAMPLES)
        sampler.update(row([1, 2]), weights)
        given[0] = initial[0] = 9
        assert list(sampler) == list(expected)
        given[0] = initial[0] = 3
        initial[0] = INITIAL[0]


def test_an_update_of_nothing_changes_nothing() -> None:
    """Not even a state."""
    sampler = WeightedSampler(INITIAL, SAMPLES)
    sampler.update([], [])
    assert "updates" not in sampler.state_dict()


def weight_of(sampler: WeightedSampler) -> list[int]:
    """Return how often each sample comes in the next pass over it."""
    return np.bincount(list(sampler), minlength=COUNT).tolist()


def test_without_replacement_updates_hold_from_the_next_epoch_on() -> None:
    """All at once, also from a state; before the first sample they hold in the first."""
    sampler, plain = (WeightedSampler(INITIAL, 9, replacement=False) for _ in range(2))
    heavy = [*INITIAL]
    heavy[1], heavy[4] = 1000.0, 0.0
    samples = iter(sampler)
    drawn = list(itertools.islice(samples, 3))
    sampler.update([1, 4], [1000.0, 0.0])
    state = json.loads(json.dumps(sampler.state_dict()))
    assert drawn + list(samples) == list(plain)
    resumed = WeightedSampler(INITIAL, 9, replacement=False)
    resumed.load_state_dict(state)
    assert drawn + list(resumed) == list(plain)
    changed_one = WeightedSampler(heavy, 9, replacement=False)
    for epoch in (1, 1, 2):
        for each in (sampler, resumed, changed_one):
            each.set_epoch(epoch)
        assert list(sampler) == list(resumed) == list(changed_one)
    early = WeightedSampler(INITIAL, 9, replacement=False)
    early.update([1, 4], [1000.0, 0.0])
    changed_one.set_epoch(0)
    assert list(early) == list(changed_one)


@pytest.mark.parametrize("replacement", [True, False])
def test_batch_samplers_have_updates_from_the_next_epoch_on(replacement: bool) -> None:
    """Their windows, their number of batches and their states are of the weights at the epoch's beginning."""

    def make() -> tuple[WeightedSampler, LengthBatchSampler]:
        sampler = WeightedSampler(INITIAL, 9, replacement)
        return sampler, LengthBatchSampler(range(1, COUNT + 1), max_tokens=30, window=4, sampler=sampler)

    (sampler, batches), (_, plain) = make(), make()
    iterator = iter(batches)
    drawn = [next(iterator)]
    sampler.update([1, 4], [1000.0, 0.0])
    state = json.loads(json.dumps(batches.state_dict()))
    assert len(batches) == len(plain)
    assert drawn + list(iterator) == list(plain)
    (other_sampler, other) = make()
    other.load_state_dict(state)
    assert drawn + list(other) == list(plain)
    for each in (batches, other):
        each.set_epoch(1)
    expected = list(batches)
    assert list(other) == expected
    assert len(other) == len(expected)
    plain.set_epoch(1)
    assert list(plain) != expected
    assert not any(4 in batch for batch in expected)
    other_sampler.update([4], [1e9])
    assert list(other) == expected


@settings(deadline=None, max_examples=60)
@given(
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=4),
    updates=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 80)), max_size=5),
)
def test_ranks_may_change_between_updates(legs: list[tuple[int, int]], updates: list[tuple[int, int]]) -> None:
    """Together they draw what one rank draws with the same updates, wherever in a step these are to hold."""
    alone = WeightedSampler(INITIAL, SAMPLES)
    samples, expected, drawn = iter(alone), [], []
    state: dict[str, Any] | None = None
    for number, (ranks, steps) in enumerate(legs):
        samplers = [WeightedSampler(INITIAL, SAMPLES, num_replicas=ranks, rank=rank) for rank in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        for leg, ahead in updates:
            if leg == number:
                at = len(drawn) + ahead
                for sampler in (alone, *samplers):
                    sampler.update(*changed(ahead), at=at)
        taken = [list(itertools.islice(sampler, steps)) for sampler in samplers]
        drawn += [index for step in zip(*taken, strict=True) for index in step]
        expected += list(itertools.islice(samples, ranks * steps))
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
        assert all(other == states[0] for other in states)
        state = states[-1]
    assert drawn[: len(expected)] == expected


def test_ranks_with_a_process_group_agree(nursery: Nursery, tmp_path: Path) -> None:
    """On the first sample that none of them has drawn; and all of them hear which of them differ."""
    told = fork_ranks(nursery, PROGRAM, tmp_path, ranks=3)

    def together(name: str, ranks: Sequence[int] = (0, 1, 2)) -> list[int]:
        return [index for step in zip(*(told[rank][name] for rank in ranks), strict=True) for index in step]

    alone = WeightedSampler([1.0] * 40, 600)
    alone.update([3, 4], [50.0, 20.0], at=3 * (5 + 3 * 2))
    alone.update([4, 5], [1.0, 60.0], at=120)
    assert together("drawn") == list(alone)
    once = WeightedSampler([1.0] * 40, 30, replacement=False)
    expected = list(once)
    once.update([3, 4], [50.0, 20.0])
    assert together("once") == expected + list(once)
    pair = WeightedSampler([1.0] * 40, 600)
    pair.update([3, 4], [50.0, 20.0], at=2 * (4 + 2))
    assert together("pair", (0, 2)) == list(pair)
    for rank in told:
        assert "weights can change from sample 75 on, but not from 74" in rank["refused at"]
        assert "weights should be the same on all ranks" in rank["refused weights"]
        assert "but rank 0 has {'count': 2, 'checksum': " in rank["refused weights"]
        assert "unlike it, rank 1 has {'count': 2, 'checksum': " in rank["refused weights"]
        assert "rank 2" not in rank["refused weights"]
        assert "the weights at construction should be the same" in rank["refused initial"]
        assert "unlike it, rank 2 has " in rank["refused initial"]
        assert "all updates before should be the same" in rank["refused before"]
        assert "rank 0 has 0; unlike it, rank 1 has " in rank["refused before"]
        assert ", rank 2 has " in rank["refused before"]
    assert "but rank 0 has 5; unlike it, rank 2 has 7" in told[2]["refused in group"]
    assert told[1]["refused in group"] == "rank 1 is not in the process group that is given"


def test_updates_from_another_thread_hold_from_some_sample_on() -> None:
    """From which one, states say: what was drawn is drawn again from them."""
    sampler = WeightedSampler(np.ones(50), 1 << 40)
    samples, has_begun = iter(sampler), threading.Event()

    def update() -> None:
        has_begun.wait()
        for number in range(300):
            sampler.update([number % 50], [1.0 + number % 9])

    other = threading.Thread(target=update)
    other.start()
    drawn = [next(samples)]
    has_begun.set()
    while other.is_alive():
        drawn.append(next(samples))
    drawn += itertools.islice(samples, 1000)
    again = WeightedSampler(np.ones(50), 1 << 40)
    again.load_state_dict(sampler.state_after(1))
    assert drawn[1:] == list(itertools.islice(again, len(drawn) - 1))
    assert len(sampler._live._done) == 300


def test_samples_that_another_thread_has_drawn_meanwhile_are_an_error() -> None:
    """They would have needed the weights that were set for them."""
    sampler = WeightedSampler(INITIAL, SAMPLES)
    samples = iter(sampler)
    next(samples)
    post = sampler._live.post

    def post_late(update: Any) -> None:
        next(samples)
        post(update)

    sampler._live.post = post_late  # type: ignore[method-assign]
    sampler.update([3], [9.0])
    later = sampler.state_dict()
    next(samples)
    assert sampler.state_after(2) == later
    with pytest.raises(AsyncLoaderError, match="weights should have changed from sample 3 on, but samples up to 4"):
        sampler.update([3], [9.0], at=3)
        next(samples)


@pytest.mark.parametrize("loads", [False, True])
def test_an_iterator_that_is_not_the_newest_comes_to_its_end(loads: bool) -> None:
    """Updates are for the newest one, which draws what it would draw alone."""
    sampler, alone = WeightedSampler(INITIAL, SAMPLES), WeightedSampler(INITIAL, SAMPLES)
    old = iter(sampler)
    assert next(old) == next(iter(alone))
    if loads:
        for each in (sampler, alone):
            each.load_state_dict(each.state_dict())
    newest, expected = iter(sampler), iter(alone)
    drawn, others = [next(newest) for _ in range(10)], [next(expected) for _ in range(10)]
    for each in (sampler, alone):
        each.update(*changed(5), at=20)
        each.update(*changed(4))
    assert len([*old]) == SAMPLES - 1
    assert drawn + list(newest) == others + list(expected)


def test_weights_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """So memory is bounded; a state of then is an error, and one of now is whole."""
    monkeypatch.setattr(live_weights, "_KEPT", 20)
    sampler, other = WeightedSampler(INITIAL, SAMPLES), WeightedSampler(INITIAL, SAMPLES)
    samples = iter(sampler)
    for number in range(60):
        next(samples)
        sampler.update(*changed(number))
    with pytest.raises(AsyncLoaderError, match="the weights of sample 7 are not known any more: more than 20"):
        sampler.state_after(7)
    next(samples)
    other.load_state_dict(sampler.state_after(55))
    assert list(other)[6:] == list(samples)
    assert len(sampler._live._done) <= 10


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_copies_have_the_updates(copied: Any) -> None:
    """Those in force, and those to come; later ones are each one's own."""
    sampler = WeightedSampler(INITIAL, SAMPLES)
    sampler.update(*changed(1))
    for _ in zip(range(30), sampler, strict=False):
        pass
    sampler.update(*changed(2), at=60)
    other = copied(sampler)
    assert other.state_dict() == sampler.state_dict()
    expected = list(copied(sampler))
    other.update(range(COUNT), [0.0] * 4 + [1.0] + [0.0] * 8)
    assert list(sampler) == expected
    assert set(other) == {2, 4, 11}


@pytest.mark.parametrize("place", ["sums", "before"])
def test_an_interrupt_while_weights_change_loses_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the update nor what was there before: the state of then goes on as if there had been no interrupt."""
    add_up = SumTree._add_up

    def interrupt(tree: SumTree, *_: Any) -> None:
        if place == "before" or len(tree._changed):
            raise KeyboardInterrupt
        add_up(tree)

    sampler, plain = WeightedSampler(INITIAL, SAMPLES), WeightedSampler(INITIAL, SAMPLES)
    for each in (sampler, plain):
        samples = iter(each)
        for number in (1, 2):
            assert len(list(itertools.islice(samples, 20))) == 20
            each.update(*changed(number))
        if each is sampler:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(SumTree, "_add_up" if place == "sums" else "set", interrupt)
                next(samples)
    assert sampler.state_dict() == plain.state_dict()
    assert sampler.state_after(25) == plain.state_after(25)
    resumed = WeightedSampler(INITIAL, SAMPLES)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == list(samples)
    sampler.set_epoch(1)
    plain.set_epoch(1)
    assert list(sampler) == list(plain)


def test_samples_come_by_the_weights_of_the_moment() -> None:
    """Each stretch of an epoch is a draw by its weights: chi-squared with 49 degrees of freedom, fresh seeds.

    Above 130 by chance for less than one stretch in 10 million: for less than one run in a million, of 8 stretches.
    """
    random = np.random.default_rng()
    seed = int(random.integers(1 << 62))
    sampler, stretch = WeightedSampler(np.ones(50), 8 * 20_000, seed=seed), 20_000
    samples = iter(sampler)
    for _ in range(8):
        weights = random.integers(1, 20, 50).astype(float)
        sampler.update(np.arange(50), weights)
        expected = stretch * weights / weights.sum()
        seen = np.bincount(list(itertools.islice(samples, stretch)), minlength=50)
        assert ((seen - expected) ** 2 / expected).sum() < 130, f"seed {seed}"
