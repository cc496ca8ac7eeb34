"""Which epoch, and which iterator over the sampler, a state speaks of: after loops that were left, looks, seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from asyncloader import DataLoader
from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
)
from tests.support import generators

pytestmark = pytest.mark.on_threads

LENGTH = 17
IN_TURNS = "have read it in turns"
DRAWS_ON = "draws from global random generators while it is read"


class Lazy(Sampler[int]):
    """Puts its place back when its next iterator is read, not before; its generator lasts for all epochs."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.at = self.count = 0
        self.goes_on = False

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.begin()
        yield from self.rest()

    def begin(self) -> None:
        if not self.goes_on:
            self.at, self.count = 0, self.count + 1
        self.goes_on = False

    def rest(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield self.rng.randrange(1000) * 10 + self.count

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate(), "at": self.at, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.at, self.count = state["at"], state["count"]
        self.goes_on = self.at > 0


class Eager(Lazy):
    """Puts its place back as soon as it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        self.begin()
        return self.rest()


def saved(loader: DataLoader[Any]) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def left_and_cut(
    make: Callable[[], DataLoader[Any]], left: tuple[int, ...], cut: tuple[int, Any] | None
) -> list[list[Any]]:
    """Return the batches of two epochs: before each, loops are left after so many batches.

    A state is loaded into a new loader in one epoch: before its first batch, after so many, or after its "end".
    """
    loader, found = make(), []
    for epoch in range(2):
        for count in left:
            list(islice(iter(loader), count))
        iterator, given = iter(loader), 0
        while True:
            if cut == (epoch, given):
                state = saved(loader)
                del iterator
                loader.close()
                loader = make()
                loader.load_state_dict(state)
                iterator = iter(loader)
            if (batch := next(iterator, None)) is None:
                break
            found.append(batch.tolist())
            given += 1
        if cut == (epoch, "end"):
            state = saved(loader)
            loader.close()
            loader = make()
            loader.load_state_dict(state)
    loader.close()
    return found


@pytest.mark.covering(2)
@pytest.mark.parametrize("left", [(), (0,), (2,), (0, 1), (2, 0), (1, 2, 0)])
@pytest.mark.parametrize("batch_size", [3, 1])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("kind", [Lazy, Eager])
def test_a_sampler_of_the_users_goes_on_after_loops_that_were_left(
    kind: Any, options: dict[str, Any], batch_size: int, left: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Its state is that of the place where the loop that was left has read it; the next iterator begins anew."""
    more = {**options, "max_buffered_bytes": 0} if options else {}

    def make() -> DataLoader[Any]:
        return DataLoader(range(10**5), batch_size, sampler=kind(), **more)  # type: ignore[arg-type]

    expected = left_and_cut(make, left, None)
    for cut in [(0, 0), (0, 1), (0, "end"), (1, 0), (1, 2)] if not options else [(1, 0)]:
        assert left_and_cut(make, left, cut) == expected, cut
    assert IN_TURNS not in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_iterators_over_one_place_are_told(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """A sampler with one place for both: once, when a state is asked for."""
    loader: DataLoader[Any] = DataLoader(range(10**5), 3, sampler=Lazy(), num_workers=num_workers)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    loader.state_dict()
    assert IN_TURNS not in caplog.text
    next(iter(loader))
    assert len(list(iterator)) <= 5
    for _ in range(2):
        loader.state_dict()
    assert caplog.text.count(IN_TURNS) == 1
    loader.close()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 8}])
def test_an_epoch_that_was_read_to_its_end_before_a_look_is_followed_by_it(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The look has read the sampler last, so the next epoch begins where it has left that."""

    def train(*, is_cut: bool) -> list[Any]:
        def make() -> DataLoader[Any]:
            return DataLoader(range(10**5), 3, sampler=Lazy(), max_buffered_bytes=0 if options else 2**26, **options)  # type: ignore[arg-type]

        loader, found = make(), []
        iterator = iter(loader)
        found += [next(iterator).tolist() for _ in range(6)]
        next(iter(loader))
        assert next(iterator, None) is None
        if is_cut:
            state = saved(loader)
            loader.close()
            loader = make()
            loader.load_state_dict(state)
        found += [batch.tolist() for batch in loader]
        loader.close()
        return found

    assert train(is_cut=True) == train(is_cut=False) or (IN_TURNS in caplog.text and not options)


class Once(Sampler[int]):
    """Draws its order when it is iterated over, from Python's or numpy's generator."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        (random if self.source == "random" else np.random).shuffle(order)  # type: ignore[attr-defined]
        return iter(order)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch's generator": lambda: {"shuffle": True},
    "one of its own": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "Python's": lambda: {"sampler": Once("random")},
    "numpy's": lambda: {"sampler": Once("numpy")},
    "by the epoch": lambda: {"sampler": DistributedSampler(range(LENGTH), 1, 0)},
}


def seed(loader: DataLoader[Any], number: int) -> None:
    generators.seed_all(number)
    if loader.generator is not None:
        loader.generator.manual_seed(number)


@pytest.mark.covering(2)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_a_seed_that_is_set_after_the_load_is_that_of_the_epoch(order: str, num_workers: int, draws: bool) -> None:
    """As without the load, in the same program and in another one; otherwise the epoch has the generators of the state.

    A state of the last step is that of an epoch before, where another epoch is set.
    """

    def make() -> DataLoader[Any]:
        return DataLoader(range(LENGTH), 4, num_workers=num_workers, **ORDERS[order]())  # type: ignore[arg-type]

    def train(cut: int | None, *, seeds: bool, is_new: bool) -> list[Any]:
        loader, found = make(), []
        generators.seed_all(9)
        for epoch in range(2):
            if seeds:
                seed(loader, 11 + epoch)
                if draws:
                    torch.rand(3)
            if order == "by the epoch":
                loader.set_epoch(epoch)
            for number, batch in enumerate(loader, 1):
                found.append(batch.tolist())
                if number == cut:
                    state = saved(loader)
            if cut and not epoch:
                state = state if cut == number else saved(loader)
                if is_new:
                    generators.seed_all(77)
                    loader = make()
                loader.load_state_dict(state)
                if is_new and draws:
                    torch.rand(3)  # no seed: a model that is made
        return found

    for seeds in (True, False):
        expected = train(None, seeds=seeds, is_new=False)
        for cut in (5, 99) if order == "by the epoch" else (99,):
            for is_new in (False, True):
                assert train(cut, seeds=seeds, is_new=is_new) == expected, (seeds, cut, is_new)


class Noise(Dataset[Any]):
    """Draws from a generator of its own and from torch's."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.rng.random(), float(torch.rand(()))])


@pytest.mark.processes
@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_look_inside_an_epoch_counts_for_the_seeds_of_later_ones(looks: int) -> None:
    """Also where the state is of the loop that goes on: the dataset's own generators draw as without the load."""

    def train(is_cut: bool) -> list[Any]:
        torch.manual_seed(3)
        loader, found = DataLoader(Noise(), 4, num_workers=1), []
        for epoch in range(2):
            iterator = iter(loader)
            for number, batch in enumerate(iterator, 1):
                found.append(batch.tolist())
                for _ in range(looks if (epoch, number) == (0, 2) else 0):
                    next(iter(loader))
                if is_cut and (epoch, number) == (0, 3):
                    break
            if is_cut and not epoch:
                state = saved(loader)
                loader = DataLoader(Noise(), 4, num_workers=1)
                loader.load_state_dict(state)
                found += [batch.tolist() for batch in loader]
        return found

    assert train(is_cut=True) == train(is_cut=False)


@pytest.mark.processes
def test_persistent_workers_count_an_epoch_that_was_moved_on_from() -> None:
    """A state of a last step, and another epoch is set: its seeds are those after the epoch of the state."""

    def train(is_cut: bool) -> list[Any]:
        torch.manual_seed(3)
        sampler = DistributedSampler(range(LENGTH), 1, 0)
        loader = DataLoader(Noise(), 4, sampler=sampler, num_workers=1, persistent_workers=True)
        found = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            for number, batch in enumerate(loader, 1):
                found.append(batch.tolist())
                if number == len(loader):
                    state = saved(loader)
            if is_cut and epoch == 1:
                loader.load_state_dict(state)
        loader.close()
        return found

    assert train(is_cut=True) == train(is_cut=False)


TOKENS = np.random.default_rng(1).integers(1, 30, 60)
WINDOWED: dict[str, Callable[[], Any]] = {
    "balanced": lambda: BalancedBatchSampler(TOKENS, batch_size=3, window=12, seed=3),
    "of a mixture": lambda: BalancedBatchSampler(
        TOKENS, batch_size=3, window=12, seed=3, sampler=MixtureSampler([30, 30], [2, 1], stop="first", seed=4)
    ),
    "by length": lambda: LengthBatchSampler(
        TOKENS, max_tokens=60, window=12, seed=3, sampler=ElasticSampler(60, seed=5)
    ),
    "packed": lambda: PackingBatchSampler(TOKENS, block_size=40, batch_size=2, window=12, seed=3),
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_look_leaves_windows_that_are_not_planned_yet_to_the_loop(kind: str) -> None:
    """They are those of the loop's epoch, and so is its state."""

    def train(look: int, cut: int) -> list[Any]:
        loader, found = DataLoader(range(60), batch_sampler=WINDOWED[kind](), collate_fn=str), []  # type: ignore[arg-type]
        iterator = iter(loader)
        for number, batch in enumerate(iterator, 1):
            found.append(batch)
            if number == look:
                next(iter(loader))
            if number == cut:
                state = loader.state_dict()
                loader = DataLoader(range(60), batch_sampler=WINDOWED[kind](), collate_fn=str)  # type: ignore[arg-type]
                loader.load_state_dict(state)
                return found + list(loader)
        return found

    expected = train(0, 0)
    for look, cut in [(1, 0), (1, 1), (2, 6), (4, 5)]:
        assert train(look, cut) == expected, (look, cut)


class StopHere(BaseException):
    """What a handler of a signal raises."""


class PerStep(Sampler[int]):
    """Draws each index from Python's generator; once, a handler raises between a draw and its answer."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for number in range(LENGTH):
            index = random.randrange(LENGTH)
            if number == self.at:
                self.at = -1
                raise StopHere
            yield index


@pytest.mark.parametrize("at", range(0, LENGTH, 2))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_draw_that_an_interrupt_has_lost_is_told(num_workers: int, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """What draws each step from a global generator goes on behind it, with as many batches. The log names it."""
    random.seed(3)
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 2}
    expected = [batch.tolist() for batch in DataLoader(range(LENGTH), sampler=PerStep(-1), **options)]  # type: ignore[arg-type]
    random.seed(3)
    loader: DataLoader[Any] = DataLoader(range(LENGTH), sampler=PerStep(at), **options)  # type: ignore[arg-type]
    found = []
    try:
        for batch in loader:
            found.append(batch.tolist())
    except StopHere:
        loader.load_state_dict(loader.state_dict())
        found += [batch.tolist() for batch in loader]
    assert len(found) == len(expected)
    assert caplog.text.count(DRAWS_ON) == 1
    loader.close()
