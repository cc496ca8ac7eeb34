"""Going on in the middle of a stream, and with the stream of a worker that died."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import DataLoader, StateMismatchError, sample_rng
from asyncloader.testing import assert_resumable, assert_resumable_async
from tests.support import effort

LENGTH = 23

pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def share() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Stream(IterableDataset[int]):
    """The numbers of which a worker has every n-th, and some workers have fewer."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        worker, workers = share()
        return iter([number for number in range(self.length - 4 * worker) if number % workers == worker])


class Noisy(Stream):
    """With random numbers of the worker's stream: read again from the beginning, they are the same."""

    deterministic = True

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield number, random.random()


class OfDataset(Stream):
    """The dataset tells where it is."""

    at = -1

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number > self.at:
                self.at = number
                yield number
        self.at = -1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Reader:
    """An iterator that tells where it is, and counts how often it was asked."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.at = 0
        self.asked = 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> tuple[int, int]:
        self.asked += 1
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1], self.asked

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class OfIterator(Stream):
    """Its iterators tell where they are."""

    def __iter__(self) -> Any:
        return Reader(list(super().__iter__()))


class OwnIterator(Stream):
    """A dataset that is its own iterator; its state does not go through JSON, which has no numbers as keys."""

    at = 0

    def __iter__(self) -> OwnIterator:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        worker, workers = share()
        if self.at > self.length // workers:
            raise StopIteration
        return self.at * workers + worker

    def state_dict(self) -> dict[int, Any]:
        return {0: self.at}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        self.at = state[0]


class Asynchronous(OfDataset):
    """An async stream that tells where it is; its samples take their time."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in super().__iter__():
            await asyncio.sleep(0)
            yield self.later(number)

    async def later(self, number: int) -> int:
        await asyncio.sleep(0.001 * (number % 3))
        return number


class Forgetful(Stream):
    """An async stream that does not tell."""

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in super().__iter__():
            await asyncio.sleep(0)
            yield number


CASES: dict[str, tuple[Callable[[], Any], list[int], dict[str, Any]]] = {
    "no state": (Stream, [0, 3], {}),
    "no state, random": (Noisy, [2], {}),
    "no state, short batches dropped": (Stream, [2], {"drop_last": True}),
    "no state, no batching": (lambda: Stream(7), [2], {"batch_size": None}),
    "of the dataset": (OfDataset, [0, 2], {}),
    "of the dataset, persistent workers": (OfDataset, [2], {"persistent_workers": True}),
    "of iterators": (OfIterator, [0, 2], {}),
    "of the dataset that is its own iterator": (OwnIterator, [0, 2], {"batch_size": 4}),
    "every third batch": (OfDataset, [2], {"snapshot_every_n_steps": 3, "batch_size": 1, "length": 15}),
    "async": (Asynchronous, [0, 2], {}),
    "async, no state": (Forgetful, [2], {"concurrency": 5}),
}

ON_PROCESSES = ("no state, random", "of the dataset, persistent workers")
"""The others run on threads, and on processes each night. Threads share the generators that are drawn from."""


def placed_cases() -> list[Any]:
    """Return the cases, each with its number of workers and where they run."""
    found: list[Any] = []
    for name, (_, workers, _) in CASES.items():
        if 0 in workers:
            found.append((name, 0, "process"))
        rest = [count for count in workers if count]
        slow = [] if name in ON_PROCESSES else [pytest.mark.slow]
        found += [pytest.param(name, count, "process", marks=slow) for count in rest]
        found += [(name, count, "thread") for count in rest if name not in ON_PROCESSES]
    return found


def maker(dataset: Callable[[], Any], num_workers: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    """Return a function that makes loaders over new datasets."""

    def make() -> DataLoader[Any]:
        made = dataset()
        given = {"batch_size": 3, **options}
        if "length" in given:
            made.length = given.pop("length")
        return DataLoader(made, num_workers=num_workers, **given)

    return make


@pytest.mark.parametrize(("case", "num_workers", "backend"), placed_cases())
def test_a_stream_goes_on_from_every_batch(case: str, num_workers: int, backend: str) -> None:
    """The rest of the epoch and the next one are the same, whoever tells the state, or nobody."""
    dataset, _, options = CASES[case]
    if num_workers and effort.is_quick:
        options = {"batch_size": 6, **options}  # half as many states, each of which is gone on from in new workers
    make = maker(dataset, num_workers, worker_backend=backend, **options)
    assert_resumable(make, restore_generators=num_workers == 0)


@pytest.mark.processes
@pytest.mark.parametrize(("dataset", "num_workers"), [(OfIterator, 0), (Noisy, 1)])
async def test_a_stream_goes_on_in_async_for(dataset: Any, num_workers: int) -> None:
    """The same by the other face."""
    await assert_resumable_async(maker(dataset, num_workers, batch_size=6 if num_workers else 3))


def test_what_is_read_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Going on without a state reads the stream again, and says so; with one it does not."""
    for dataset, told in ((Stream, True), (OfIterator, False)):
        loader = maker(dataset, 2)()
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        resumed = maker(dataset, 2)()
        resumed.load_state_dict(loader.state_dict())
        iterator.close()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "asyncloader"):
            rest = list(resumed)
        assert len(rest) == 4
        assert ("3 batches are read again and dropped" in caplog.text) == told
    with pytest.raises(StateMismatchError, match="num_workers was 2 when it was taken, and is 3 now"):
        maker(Stream, 3)().load_state_dict(maker_state())


def maker_state() -> dict[str, Any]:
    loader = maker(Stream, 2)()
    with iter(loader) as iterator:
        next(iterator)
        return loader.state_dict()


# ------------------------------------------------------------------------------------------------------------- deaths


def deadly(dataset: type[Stream], folder: Path) -> Any:
    """Let a stream kill its worker at some numbers, once for each marker that it finds."""

    class Deadly(dataset):  # type: ignore[valid-type, misc]
        def __iter__(self) -> Any:
            return Dying(super().__iter__(), folder)

    return Deadly()


class Dying:
    """An iterator that kills its process."""

    def __init__(self, numbers: Any, folder: Path) -> None:
        self.numbers = numbers
        self.folder = folder
        if hasattr(numbers, "state_dict"):
            self.state_dict = numbers.state_dict
            self.load_state_dict = numbers.load_state_dict

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        sample = next(self.numbers)
        number = sample[0] if isinstance(sample, tuple) else sample
        if (marker := self.folder / str(number)).exists():
            marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


class NoisyTwice(Stream):
    """With random numbers of the worker's stream, and with those of the sample."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield number, random.random(), sample_rng().random()


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_of_workers_that_had_earlier_epochs(persistent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Their generators are not those of workers that begin: the log says so; `sample_rng` draws the same."""

    def make() -> DataLoader[Any]:
        torch.manual_seed(5)
        return DataLoader(NoisyTwice(), batch_size=4, num_workers=2, persistent_workers=persistent)

    def listed(loader: Any) -> list[Any]:
        return [[part.tolist() for part in batch] for batch in loader]

    loader = make()
    epochs = [listed(loader) for _ in range(3)]
    for epoch, done in [(0, 3), (1, 0)] if effort.is_quick else [(0, 3), (1, 0), (1, 3), (2, 2)]:
        loader = make()
        for _ in range(epoch):
            listed(loader)
        if done:
            iterator = iter(loader)
            for _ in range(done):
                next(iterator)
        state = loader.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        caplog.clear()
        found, expected = listed(resumed), epochs[epoch][done:]
        has_warned = "persistent workers that had read the stream in epochs before" in caplog.text
        assert has_warned == (persistent and epoch > 0)
        assert (found == expected) is not has_warned
        assert [(batch[0], batch[2]) for batch in found] == [(batch[0], batch[2]) for batch in expected]


DYING = [Noisy, OfDataset, OfIterator]


@pytest.mark.processes
@pytest.mark.parametrize("dataset", DYING)
def test_a_stream_goes_on_after_deaths(dataset: Any, tmp_path: Path) -> None:
    """With a state, or declared to be the same each time: no sample is lost or comes twice, bit for bit."""

    def run(deaths: list[int], **options: Any) -> list[str]:
        for number in deaths:
            (tmp_path / str(number)).touch()
        loader = DataLoader(deadly(dataset, tmp_path), batch_size=3, num_workers=2, **options)
        torch.manual_seed(5)
        return [repr([part.tolist() for part in batch] if isinstance(batch, list) else batch) for batch in loader]

    expected = run([])
    patient = {"timeout": 30, "on_timeout": "retry"}
    plans: list[Any] = [([8, 13, 20], {}), ([10], {"prefetch_factor": 5}), ([8, 9, 12], patient)]
    for deaths, options in plans[DYING.index(dataset) :: 3] if effort.is_quick else plans:
        assert run(deaths, **options) == expected
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("was", "now"), [(0, 1), (1, 0)])
def test_a_stream_that_is_read_again_at_another_place_is_named(
    was: int, now: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker has generators of its own; without workers a stream draws from the trainer's."""

    def make(num_workers: int) -> DataLoader[Any]:
        return DataLoader(NoisyTwice(), batch_size=4, num_workers=num_workers)

    loader = make(was)
    next(iter(loader))
    resumed = make(now)
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert "the other way: what the stream draws from global random generators is not the same" in caplog.text


class WithState(IterableDataset[Any]):
    """Has a state, and adds noise from a global generator to its numbers, or none."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 12:
            self.at += 1
            yield self.at, float(self.draw())
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.processes
@pytest.mark.parametrize("draw", [random.random, np.random.rand, partial(torch.rand, ()), float], ids=range(4))
def test_the_epoch_after_a_state_between_two_is_the_same_or_the_noise_is_named(
    draw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in a loader that was resumed before: the generators of persistent workers move on from epoch to epoch."""

    def make() -> DataLoader[Any]:
        torch.manual_seed(5)
        options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}
        return DataLoader(WithState(draw), batch_size=4, num_workers=1, **options)  # a pickle has its own generator

    def listed(loader: Any) -> list[Any]:
        return [[part.tolist() for part in batch] for batch in loader]

    loader = make()
    listed(loader)
    first = loader.state_dict()
    epoch = listed(loader)
    second = loader.state_dict()
    following = listed(loader)
    for states in ([first], [second], [second, first], [first, second]):
        for state in states:  # the last one is loaded into a loader that has others behind it
            caplog.clear()
            loader.load_state_dict(state)
            found = listed(loader)
        expected = epoch if states[-1] is first else following
        has_warned = "persistent workers that had read the stream in epochs before" in caplog.text
        assert has_warned == (draw is not float)
        assert found == expected or has_warned
        assert [batch[0] for batch in found] == [batch[0] for batch in expected]
    loader.close()


class Drawing(Reader):
    """Draws from a global generator, whose state is in its own."""

    def __next__(self) -> Any:
        return *super().__next__(), int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"iterator": dict(super().state_dict()), "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["iterator"])
        torch.set_rng_state(state["generator"])


class OfDrawing(OfIterator):
    def __iter__(self) -> Any:
        return Drawing(list(Stream.__iter__(self)))


def test_a_global_generator_is_where_the_state_of_an_iterator_has_set_it() -> None:
    """Without workers it is the trainer's own, which was elsewhere meanwhile; torchdata does the same."""

    def make() -> DataLoader[Any]:
        return DataLoader(OfDrawing(), 2, collate_fn=list)

    iterator = iter(make())
    states, rests = [iterator.state_dict()], []
    for batch in iterator:
        rests.append(batch)
        states.append(iterator.state_dict())
    for done, state in list(enumerate(states[:-1]))[1:]:
        loader = make()
        loader.load_state_dict(state)
        assert list(loader) == rests[done:], done
