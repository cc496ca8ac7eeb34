"""Programs that seed as programs do: with one seed at the start, before each epoch or validation, again and again.

Several loaders, whose states are taken between epochs, go on in another program. What each epoch gives has to be what
it gives in the program that was not interrupted: whether a seed was set again, and whether another loader has drawn
before, cannot be seen from where a generator stands.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, Sampler

from asyncloader import DataLoader
from asyncloader.samplers import ElasticSampler
from asyncloader.seeding.generators import left_alone
from tests.support import effort, generators

LENGTH = 12

pytestmark = pytest.mark.on_threads


class Shuffled(Sampler[int]):
    """Shuffles with Python's or numpy's global generator, and has no state."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        self.module.shuffle(order)
        return iter(order)


def make(how: str, num_workers: int) -> DataLoader[Any]:
    """Make a loader that shuffles in one way."""
    if how == "torch":
        return DataLoader(range(LENGTH), 2, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]
    sampler = Shuffled({"random": random, "numpy": np.random}[how])
    return DataLoader(range(LENGTH), 2, sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]


@dataclass
class Step:
    """What a program does: "epoch" of a loader, "look" at a batch of one, "seed", "draw"; with a number of that."""

    what: str
    number: int


def play(loaders: list[DataLoader[Any]], steps: list[Step]) -> list[Any]:
    """Do it; return what came of it."""
    found: list[Any] = []
    for step in steps:
        if step.what == "seed":
            torch.manual_seed(step.number)
        elif step.what == "draw":
            found.append(torch.rand(step.number).tolist())
        else:
            loader = loaders[step.number % len(loaders)]
            keys = [batch.tolist() for batch in loader] if step.what == "epoch" else next(iter(loader)).tolist()
            found.append(keys)
    return found


SEEDS = st.integers(1, 2)
STEPS = st.lists(
    st.one_of(
        st.builds(Step, st.just("epoch"), st.integers(0, 2)),
        st.builds(Step, st.just("look"), st.integers(0, 2)),
        st.builds(Step, st.just("seed"), SEEDS),
        st.builds(Step, st.just("draw"), st.integers(1, 9)),
    ),
    max_size=9,
)


def ended(steps: list[Step], count: int) -> list[Step]:
    """Have each loader's last loop come to its end: a state would go on with one that was left."""
    last = {step.number % count: step.what for step in steps if step.what in ("epoch", "look")}
    return steps + [Step("epoch", number) for number, what in last.items() if what == "look"]


def decided(steps: list[Step], *, is_restored: bool) -> list[Step]:
    """Leave out draws before any seed or epoch: a program that starts draws as well, and those do not count."""
    first = 0 if is_restored else next((at for at, step in enumerate(steps) if step.what != "draw"), len(steps))
    return steps[first:]


@settings(max_examples=effort.examples(150), deadline=None)
@given(
    count=st.integers(1, 3),
    seeds=st.tuples(SEEDS, SEEDS),
    before=STEPS,
    after=STEPS,
    draws=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    restored=st.sampled_from(["", "before", "after"]),
)
def test_epochs_after_states_between_epochs(
    count: int, seeds: tuple[int, int], before: list[Step], after: list[Step], draws: tuple[int, int], restored: str
) -> None:
    """Whatever seeds there are, the same ones too, and whether or not the program restores the generators itself."""
    after = decided(after, is_restored=bool(restored))
    with left_alone():
        torch.manual_seed(seeds[0])
        loaders = [make("torch", 0) for _ in range(count)]
        play(loaders, ended(before, count))
        states, saved = [loader.state_dict() for loader in loaders], generators.save(torch.Generator())
        expected = play(loaders, after)
        torch.manual_seed(seeds[1])
        torch.rand(draws[0])
        resumed = [make("torch", 0) for _ in range(count)]
        if restored == "before":
            generators.restore(saved, torch.Generator())
        is_there = torch.equal(torch.get_rng_state(), saved[2])  # then it counts as restored
        for loader, state in zip(resumed, states, strict=True):
            loader.load_state_dict(state)
        torch.rand(0 if is_there else draws[1])
        if restored == "after":
            generators.restore(saved, torch.Generator())
        assert play(resumed, after) == expected


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["torch", "random", "numpy"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_loader_for_validation_draws_after_that_for_training(how: str, num_workers: int, seed: int) -> None:
    """Both are resumed in a program with the same seed at its start, or another; the first to begin is put back."""
    with left_alone():
        generators.seed_all(1)
        loaders = [make(how, num_workers) for _ in range(2)]
        steps = [Step("epoch", 0), Step("epoch", 1)]
        play(loaders, steps)
        states = [loader.state_dict() for loader in loaders]
        expected = play(loaders, 2 * steps)
        generators.seed_all(seed)
        resumed = [make(how, num_workers) for _ in range(2)]
        for loader, state in zip(resumed, states, strict=True):
            loader.load_state_dict(state)
        assert play(resumed, 2 * steps) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [ElasticSampler, DistributedSampler])
def test_the_load_of_a_sampler_that_hears_of_epochs_is_no_draw(kind: Any, num_workers: int) -> None:
    """It is loaded at once, and generators are put back; the loader that was loaded before goes on all the same."""

    def start(seed: int) -> list[DataLoader[Any]]:
        generators.seed_all(seed)
        sampler = kind(range(LENGTH), num_replicas=1, rank=0)
        validation: DataLoader[Any] = DataLoader(range(LENGTH), 2, sampler=sampler)  # type: ignore[arg-type]
        return [make("torch", num_workers), validation]

    with left_alone():
        loaders = start(1)
        play(loaders, [Step("epoch", 0), Step("epoch", 1)])
        states = [loader.state_dict() for loader in loaders]
        expected = play(loaders, [Step("epoch", 0)])
        resumed = start(2)
        for loader, state in zip(resumed, states, strict=True):
            loader.load_state_dict(state)
        assert play(resumed, [Step("epoch", 0)]) == expected


@pytest.mark.parametrize("restores", [False, True])
def test_a_loader_that_was_not_begun_is_stopped_twice(restores: bool) -> None:
    """Its second state is of the generators of that time, and its load disturbs no loader that was in an epoch."""

    def go_on(seed: int) -> None:
        states, saved = [loader.state_dict() for loader in loaders], generators.save(None)
        torch.manual_seed(seed)
        loaders[:] = [make("torch", 0) for _ in range(2)]
        if restores:
            generators.restore(saved, None)
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)

    def program(*, is_stopped: bool) -> list[Any]:
        torch.manual_seed(1)
        loaders[:] = [make("torch", 0) for _ in range(2)]
        found = play(loaders, [Step("epoch", 0)])
        if is_stopped:
            go_on(1)
        iterator = iter(loaders[0])
        found += [next(iterator).tolist()]
        if restores:
            torch.rand(1)
        if is_stopped:
            go_on(2)
            iterator = iter(loaders[0])
        return found + [batch.tolist() for batch in iterator] + play(loaders, [Step("epoch", 1), Step("epoch", 0)])

    loaders: list[DataLoader[Any]] = []
    with left_alone():
        assert program(is_stopped=True) == program(is_stopped=False)


def test_a_generator_draws_the_same_after_a_load() -> None:
    """Whatever the loader notes in it: the order of other samplers, and what the model is made with, stay."""
    loader = make("torch", 0)
    play([loader], [Step("epoch", 0)])
    with left_alone():
        torch.manual_seed(5)
        torch.randn(3)
        expected = torch.randn(5), torch.rand(2000), torch.randperm(9), torch.randn(1, dtype=torch.float64)
        torch.manual_seed(5)
        torch.randn(3)
        loader.load_state_dict(loader.state_dict())
        found = torch.randn(5), torch.rand(2000), torch.randperm(9), torch.randn(1, dtype=torch.float64)
        assert torch.initial_seed() % (1 << 32) == 5
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("module", [random, np.random, torch], ids=lambda module: module.__name__)
@pytest.mark.parametrize("draws", [0, 1, 2000])
@pytest.mark.parametrize("what", ["seeded", "restored", "drawn"])
def test_what_is_drawn_between_a_load_and_the_epoch(module: Any, draws: int, what: str) -> None:
    """From a generator that the program has seeded or restored; of any other the state's counts, whatever was drawn."""

    def go_on(saved: Any) -> None:
        if what == "seeded":
            generators.seed_all(3)
        elif what == "restored":
            generators.restore(saved, None)
        if what != "drawn" or is_resumed:
            for _ in range(draws):
                assert torch.rand(1) + random.random() + np.random.random() >= 0

    def make_one() -> DataLoader[Any]:
        if module is torch:
            return make("torch", 0)
        return DataLoader(range(LENGTH), 2, sampler=Shuffled(module))  # type: ignore[arg-type]

    with left_alone():
        generators.seed_all(1)
        loader = make_one()
        list(loader)
        state, saved = loader.state_dict(), generators.save(None)
        is_resumed = False
        go_on(saved)
        expected = [batch.tolist() for batch in loader]
        generators.seed_all(2)
        loader, is_resumed = make_one(), True
        loader.load_state_dict(state)
        go_on(saved)
        assert [batch.tolist() for batch in loader] == expected
