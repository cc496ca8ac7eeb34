"""WeightedSampler.update: weights that change while an epoch is drawn, in states, on any ranks."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import AsyncLoaderError, ConfigurationError
from asyncloader.samplers import LengthBatchSampler, MixtureSampler, WeightedSampler, ordered
from asyncloader.samplers.ordered import bare_state, newest_run, whole_state
from asyncloader.samplers.sums import SumTree
from asyncloader.samplers.weighted import _uniform
from asyncloader.seeding.hashing import mix
from tests.support import effort

COUNT, SAMPLES = 13, 150
INITIAL = [1.0, 0.0, 2.0, 5.0, 0.5, 3.0, 1.0, 0.0, 4.0, 1.0, 1.0, 2.0, 7.0]
Change = tuple[list[int], list[float]]


@dataclass
class Reference:
    """Computes each sample from all updates: it has no state but what was said."""

    epoch: int = 0
    number: int = 0  # of the reading
    is_begun: bool = False
    updates: list[tuple[tuple[int, int], Change]] = field(default_factory=list)

    def draw(self, position: int) -> int:
        weights = np.array(INITIAL)
        for begin, (indices, changed) in sorted(self.updates, key=lambda update: update[0]):
            if begin <= (self.number, position):
                for index, weight in zip(indices, changed, strict=True):
                    weights[index] = weight
        return int(SumTree(weights).find(_uniform(np.array([position]), np.uint64(mix(0, self.epoch))))[0])

    def begin_anew(self) -> None:
        self.number += self.is_begun
        self.is_begun = False


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
            self.reference.is_begun = True
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
        reference = self.reference
        begin = (reference.number + reference.is_begun, 0) if at is None else (reference.number, at)
        reference.updates.append((begin, (indices, weights)))

    def keep_state(self, back: int) -> None:
        """Take a state of a sample that was drawn before."""
        items = max(0, self.cursor - self.start - back)
        state = json.loads(json.dumps(self.sampler.state_after(items)))
        self.states.append((state, copy.deepcopy(self.reference), self.start + items))

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
            self.reference.begin_anew()
            self.iterator, self.cursor, self.start = None, 0, 0
        self.sampler.set_epoch(epoch)
        self.reference.epoch = epoch

    def iterate_anew(self, _: None) -> None:
        """From the beginning, after something was drawn; so an iterator has begun where the last state has said."""
        if self.iterator is None:
            return
        self.reference.begin_anew()
        self.cursor = self.start = 0
        self.iterator = iter(self.sampler)
        self.draw(1)


@settings(deadline=None, max_examples=effort.examples(300))
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


BAD = [
    ([0, 1], [1.0], {}, "a weight for each, but their shapes are"),
    (0, 1.0, {}, "weights should be one row"),
    ([0.0], [1.0], {}, "indices should be integers from 0 to 12"),
    ([13], [1.0], {}, "indices should be integers from 0 to 12"),
    ([-1], [1.0], {}, "indices should be integers from 0 to 12"),
    ([0], [-1.0], {}, "0, or from 1e-150"),
    ([0], [float("nan")], {}, "0, or from 1e-150"),
    ([0], [float("inf")], {}, "0, or from 1e-150"),
    ([0], [1e-200], {}, "0, or from 1e-150"),
    ([0], ["much"], {}, "0, or from 1e-150"),
    (range(COUNT), [0.0] * COUNT, {}, "0 samples have a weight above 0, and 1 are needed"),
    ([0], [0.0], {"num_samples": 11, "replacement": False}, "10 samples have .* and 11 are needed"),
    ([0], [1.0], {"at": 4}, "from sample 5 on, but not from 4"),
    ([0], [1.0], {"at": 5.0}, "at should be an integer"),
    ([0], [1.0], {"num_samples": 11, "replacement": False, "at": 8}, "from the next epoch on: leave `at` out"),
]


@pytest.mark.parametrize(("indices", "weights", "options", "message"), BAD)
def test_bad_updates_are_refused(indices: Any, weights: Any, options: dict[str, Any], message: str) -> None:
    """At once, with what is wrong; and they change nothing."""
    options = dict(options)
    at = options.pop("at", None)
    sampler, other = (WeightedSampler(INITIAL, **{"num_samples": SAMPLES, **options}) for _ in range(2))
    samples, others = iter(sampler), iter(other)
    assert [next(samples) for _ in range(5)] == [next(others) for _ in range(5)]
    with pytest.raises(ConfigurationError, match=message):
        sampler.update(indices, weights, at=at)
    assert sampler.state_dict() == other.state_dict()
    assert list(samples) == list(others)


def test_no_weight_is_left_at_a_sample() -> None:
    """Where one comes later, and an update before it would leave none until then: an error where that is drawn."""
    sampler = WeightedSampler([1.0, 1.0], 100)
    sampler.update([0], [0.0], at=20)
    sampler.update([0], [1.0], at=30)
    sampler.update([1], [0.0], at=25)
    with pytest.raises(ConfigurationError, match="set all weights to 0"):
        list(sampler)


@pytest.mark.parametrize("kind", ["weighted", "mixture"])
def test_weights_hold_from_the_sample_that_is_named_or_are_refused(kind: str) -> None:
    """However many samples were read, and named ahead: the order is that of a sampler that was told at the start."""

    def make() -> Any:
        return WeightedSampler([1.0, 1.0], 4000) if kind == "weighted" else MixtureSampler([50, 50], [1, 1])

    def change(sampler: Any, at: int) -> None:
        if kind == "weighted":
            sampler.update([0], [9.0], at=at)
        else:
            sampler.set_weights([9, 1], at=at)

    for read in (0, 1, 63, 64, 65, 500):
        for ahead in (-1, 0, 1, 64, 300):
            sampler, at = make(), read + ahead
            samples = iter(sampler)
            drawn = list(itertools.islice(samples, read))
            if ahead < 0:
                with pytest.raises(ConfigurationError):
                    change(sampler, at)
                continue
            change(sampler, at)
            told = make()
            change(told, at)
            drawn += itertools.islice(samples, 2000)
            assert drawn == list(itertools.islice(told, len(drawn))), (read, ahead)


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
    assert sampler.state_dict()["updates"] is None


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
    rest = iter(other)
    first = next(rest)
    other_sampler.update([4], [1e9])
    assert [first, *rest] == expected
    assert any(4 in batch for batch in other)  # the same epoch once more, with the weights of now


def test_batch_samplers_have_updates_from_windows_that_are_not_planned_yet() -> None:
    """Named by their sample; those of planned windows are refused. States and other ranks have them too."""

    def make(ranks: int = 1, rank: int = 0) -> tuple[WeightedSampler, LengthBatchSampler]:
        sampler = WeightedSampler(np.ones(40), 1000)
        options: dict[str, Any] = {"num_replicas": ranks, "rank": rank, "window": 100}
        return sampler, LengthBatchSampler(np.full(40, 5), max_tokens=25, sampler=sampler, **options)

    sampler, batches = make()
    iterator = iter(batches)
    drawn = list(itertools.islice(iterator, 3))
    with pytest.raises(ConfigurationError, match="from sample 100 on, but not from 99"):
        sampler.update(range(39), [0.0] * 39, at=99)
    sampler.update(range(39), [0.0] * 39, at=250)
    state = json.loads(json.dumps(batches.state_dict()))
    drawn += iterator
    flat = [index for batch in drawn for index in batch]
    assert set(flat[300:]) == {39}
    assert len(set(flat[:200])) > 20
    resumed = [make(2, rank)[1] for rank in range(2)]
    for each in resumed:
        each.load_state_dict(state)
    together = [batch for step in zip(*resumed, strict=True) for batch in step]
    assert together[:196] == drawn[3:199]


@settings(deadline=None, max_examples=effort.examples(90))
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


def test_updates_from_another_thread_are_exact_or_refused() -> None:
    """While samples are drawn: the epoch is that of the updates that were taken."""
    sampler, has_begun, taken = WeightedSampler(np.ones(50), 1 << 40), threading.Event(), []
    samples = iter(sampler)

    def update() -> None:
        has_begun.wait()
        for number in range(300):
            at = sampler.state_dict()["cursor"] + (1, 40, 5000)[number % 3]
            try:
                sampler.update([number % 50], [1.0 + number % 9], at=at)
                taken.append((number, at))
            except ConfigurationError:
                pass

    other = threading.Thread(target=update)
    other.start()
    drawn = [next(samples)]
    has_begun.set()
    while other.is_alive():
        drawn.append(next(samples))
    drawn += itertools.islice(samples, 1000)
    told = WeightedSampler(np.ones(50), 1 << 40)
    for number, at in taken:
        told.update([number % 50], [1.0 + number % 9], at=at)
    assert drawn == list(itertools.islice(told, len(drawn)))


class NotingLock:
    """Says that a thread waits for it."""

    def __init__(self) -> None:
        self.lock, self.is_asked = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if self.lock.locked():
            self.is_asked.set()
        self.lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.lock.release()


def test_a_sample_that_is_drawn_while_its_weight_changes_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread asks for it between the look at what was drawn and the change."""
    lock = NotingLock()
    monkeypatch.setattr(ordered, "_lock", lock)
    sampler, told = WeightedSampler(INITIAL, SAMPLES), WeightedSampler(INITIAL, SAMPLES)
    samples = iter(sampler)
    drawn = [next(samples)]
    reader = threading.Thread(target=lambda: drawn.append(next(samples)))
    add = sampler._weights.add

    def add_late(update: Any) -> None:
        reader.start()
        assert lock.is_asked.wait(30)
        add(update)

    sampler._weights.add = add_late  # type: ignore[method-assign]
    for each in (sampler, told):
        each.update(range(12), [0.0] * 12, at=1)
    reader.join()
    assert drawn + list(samples) == list(told)
    assert drawn[1] == 12


def test_a_look_at_a_sample_beside_the_epoch_changes_nothing() -> None:
    """Iterators of their own have the weights of their own reading, and so have their states."""
    sampler, alone = WeightedSampler(INITIAL, SAMPLES), WeightedSampler(INITIAL, SAMPLES)
    old, expected = iter(sampler), iter(alone)
    for each, samples in ((sampler, old), (alone, expected)):
        assert len(list(itertools.islice(samples, 5))) == 5
        each.update(*changed(4), at=20)
        each.update(*changed(5))
    run = newest_run(sampler)
    look = next(iter(sampler))
    assert look == next(iter(WeightedSampler(changed_by(changed(4), changed(5)), SAMPLES)))
    assert list(itertools.islice(old, 30)) == list(itertools.islice(expected, 30))
    state = whole_state(sampler, bare_state(sampler, run))
    resumed = WeightedSampler(INITIAL, SAMPLES)
    resumed.load_state_dict(state)
    assert list(resumed) == list(old) == list(expected)


def changed_by(*changes: Change) -> list[float]:
    weights = np.array(INITIAL)
    for indices, values in changes:
        weights[indices] = values
    return [*map(float, weights)]


def test_weights_of_long_ago_are_forgotten() -> None:
    """So memory is bounded: those of some readings are kept. A state of one before is an error."""
    sampler = WeightedSampler(INITIAL, SAMPLES)
    first = iter(sampler)
    next(first)
    run = newest_run(sampler)
    for number in range(30):
        sampler.update(*changed(number))
        next(iter(sampler))
    assert len(sampler._weights._updates) <= 9
    with pytest.raises(AsyncLoaderError, match="the weights of sample 1 are not known any more"):
        whole_state(sampler, bare_state(sampler, run))
    with pytest.raises(AsyncLoaderError, match="are not known any more"):
        list(first)
    other = WeightedSampler(INITIAL, SAMPLES)
    other.load_state_dict(sampler.state_after(0))
    assert list(other) == list(WeightedSampler(changed_by(*map(changed, range(30))), SAMPLES))


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
    assert set(other) == {4}


def test_an_interrupt_while_weights_change_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the update nor a sum: what is drawn afterwards is drawn as if there had been no interrupt."""
    sampler, plain = WeightedSampler(INITIAL, SAMPLES), WeightedSampler(INITIAL, SAMPLES)
    for each in (sampler, plain):
        samples = iter(each)
        for number in (1, 2):
            assert len(list(itertools.islice(samples, 20))) == 20
            each.update(*changed(number), at=20 * number)
    change = SumTree.set

    def interrupt(tree: SumTree, *args: Any) -> None:
        change(tree, *args)
        tree._sums[1:4] = -1  # some sums are made, and some are not
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SumTree, "set", interrupt)
        list(iter(sampler))
    for state in (plain.state_after(25), plain.state_dict()):
        resumed = WeightedSampler(INITIAL, SAMPLES)
        resumed.load_state_dict(state)
        sampler.load_state_dict(state)
        assert list(resumed) == list(sampler)
    again = WeightedSampler(INITIAL, SAMPLES)
    again.update(*changed(1), at=0)
    list(again)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SumTree, "set", interrupt)
        again.update(*changed(2))
        list(again)
    assert list(again) == list(WeightedSampler(changed_by(changed(1), changed(2)), SAMPLES))


def test_samples_come_by_the_weights_of_the_moment() -> None:
    """Each stretch of an epoch is a draw by its weights: chi-squared with 49 degrees of freedom, fresh seeds.

    Above 130 by chance for less than one stretch in 10 million: for less than one run in a million, of 8 stretches.
    """
    random = np.random.default_rng()
    seed = int(random.integers(1 << 62))
    sampler, stretch = WeightedSampler(np.ones(50), 8 * 20_000, seed=seed), 20_000
    samples = iter(sampler)
    for number in range(8):
        weights = random.integers(1, 20, 50).astype(float)
        sampler.update(np.arange(50), weights, at=number * stretch)
        expected = stretch * weights / weights.sum()
        seen = np.bincount(list(itertools.islice(samples, stretch)), minlength=50)
        assert ((seen - expected) ** 2 / expected).sum() < 130, f"seed {seed}"
