"""Going on from a state: exactly the batches that were left, whatever the sampler, the workers and the face."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asyncloader import DataLoader, StateMismatchError, sample_rng
from asyncloader.samplers import ElasticSampler
from asyncloader.testing import assert_resumable, assert_resumable_async
from tests.support import effort
from tests.support.leftovers import descendants

LENGTH = 14

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Noisy(Dataset[Any]):
    """Indices, each with an augmentation out of all three generators, or without."""

    def __init__(self, noise: bool = True, length: int = LENGTH) -> None:
        self.noise = noise
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not self.noise:
            return index
        return {"index": index, "noise": (random.random(), np.random.rand(), torch.rand(2))}


class Awaited(Noisy):
    """The same from afar; the augmentation is drawn from generators that are not shared."""

    async def __getitem__(self, index: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.001 * (index % 3))
        return {"index": index, "noise": sample_rng().random(2)}


class Deadly(Noisy):
    """Kills the worker that gets at one index, once for each marker that it finds."""

    def __init__(self, folder: Path, index: int = 7) -> None:
        super().__init__()
        self.folder = folder
        self.index = index

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            for marker in self.folder.iterdir():
                marker.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Broken(Noisy):
    """Two samples raise."""

    def __getitem__(self, index: int) -> Any:
        if index in (3, 8):
            raise ValueError(index)
        return super().__getitem__(index)


class Shuffled(Sampler[int]):
    """Draws from Python's global generator, as soon as it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return LENGTH


class Remembering(Sampler[int]):
    """Tells where it is, and begins anew when it has come to its end."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield (self.at * 5) % LENGTH
        self.at = 0

    def __len__(self) -> int:
        return LENGTH

    def state_dict(self) -> dict[str, Any]:
        return vars(self)  # the live one, which changes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class RememberingIterator:
    """The same by its iterator; its state does not go through JSON."""

    def __init__(self) -> None:
        self.at = torch.zeros((), dtype=torch.int64)

    def __iter__(self) -> RememberingIterator:
        return self

    def __next__(self) -> list[int]:
        if self.at == LENGTH:
            raise StopIteration
        self.at += 2
        return [int(self.at) - 2, int(self.at) - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OfIterators:
    """A batch sampler whose iterators have the state."""

    def __iter__(self) -> RememberingIterator:
        return RememberingIterator()


def seven() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# Options of the loader; what can be called makes the option anew for each loader. Then the workers of the run that is
# saved, and of the one that goes on.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "in order": ({}, 2, 3),
    "shuffled": ({"shuffle": True}, 1, 3),
    "shuffled in the main process": ({"shuffle": True}, 0, 0),
    "shuffled, into the main process": ({"shuffle": True, "noise": False}, 2, 0),
    "shuffled, out of the main process": ({"shuffle": True, "noise": False}, 0, 2),
    "a generator": ({"shuffle": True, "generator": seven}, 3, 1),
    "a generator of the sampler's, short batches dropped": (
        {
            "batch_size": 1,
            "batch_sampler": lambda: BatchSampler(RandomSampler(range(LENGTH), generator=seven()), 4, True),
        },
        0,
        0,
    ),
    "with replacement": ({"sampler": lambda: RandomSampler(range(LENGTH), True, 11)}, 2, 1),
    "weighted, dynamic": (
        {"sampler": lambda: WeightedRandomSampler([1.0] * LENGTH, 13), "scheduling": "dynamic"},
        2,
        3,
    ),
    "a subset, persistent workers": (
        {"sampler": lambda: SubsetRandomSampler(range(3, LENGTH)), "persistent_workers": True},
        2,
        1,
    ),
    "distributed": ({"sampler": lambda: DistributedSampler(range(LENGTH), 2, 1)}, 1, 2),
    "elastic": ({"sampler": lambda: ElasticSampler(LENGTH, 2, 1)}, 2, 1),
    "a sampler that draws from Python's generator": ({"sampler": Shuffled}, 0, 0),
    "a sampler with a state": ({"sampler": Remembering, "batch_size": 4}, 2, 1),
    "iterators with a state": ({"batch_sampler": OfIterators, "batch_size": 1}, 1, 0),
    "no batching": ({"shuffle": True, "batch_size": None, "length": 5}, 1, 2),
    "async, another concurrency": ({"dataset": Awaited, "shuffle": True, "concurrency": 7}, 2, 1),
    "async, in the main process": ({"dataset": Awaited, "shuffle": True}, 0, 0),
    "on threads": ({"dataset": lambda: Noisy(False), "shuffle": True, "worker_backend": "thread"}, 2, 1),
    "bad samples left out": ({"dataset": lambda: Broken(length=9), "on_error": "skip", "batch_size": 1}, 1, 1),
}


def maker(num_workers: int, noise: bool = True, length: int = LENGTH, **options: Any) -> Callable[[], DataLoader[Any]]:
    """Return a function that makes loaders with new samplers, generators and datasets."""

    def make() -> DataLoader[Any]:
        made = {name: option() if callable(option) else option for name, option in options.items()}
        made = {"dataset": Noisy(noise, length), "batch_size": 3, **made}
        return DataLoader(num_workers=num_workers, **made)

    return make


ON_PROCESSES = ("a subset, persistent workers",)
"""Some of those that are about orders; all others of these run on threads, and on processes each night."""


def placed_cases() -> list[Any]:
    """Return the cases, each with the kind of workers; threads share the generators that augmentations draw from."""
    found = []
    for name, (options, *workers) in CASES.items():
        is_about_order = any(workers) and "dataset" not in options
        slow = [pytest.mark.slow] if is_about_order and name not in ON_PROCESSES else []
        found.append(pytest.param(name, "process", marks=slow))
        if is_about_order:
            found.append(pytest.param(name, "thread"))
    return found


@pytest.mark.parametrize(("case", "backend"), placed_cases())
def test_a_run_goes_on_from_every_batch(case: str, backend: str) -> None:
    """The rest of the epoch and the next one are the same, bit for bit, where the number of workers is another too."""
    options, saved_with, resumed_with = CASES[case]
    if backend == "thread":
        options = {**options, "noise": False, "worker_backend": backend}
    if effort.is_quick and saved_with + resumed_with:
        options = {"batch_size": 5, **options}  # each batch is a state, which is gone on from in new workers
    if saved_with != resumed_with == 0:
        options = {**options, "noise": False}  # seeds of batches are a matter of workers
    make, resume = maker(saved_with, **options), maker(resumed_with, **options)
    # Without workers the augmentation is drawn from the trainer's own generators.
    assert_resumable(make, resume_with=resume, restore_generators=saved_with == 0 or case == "distributed")


@pytest.mark.parametrize(
    "workers", [(2, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in ((0, 2), (1, 0)))]
)
async def test_a_run_goes_on_in_async_for(workers: tuple[int, int]) -> None:
    """The same by the other face."""
    make, resume = (maker(number, shuffle=True, noise=0 not in workers, batch_size=5) for number in workers)
    await assert_resumable_async(make, resume_with=resume)


def everything(loader: Any) -> list[Any]:
    """Run through a loader; return what came as text, which shows every bit."""
    return [repr([batch["index"].tolist(), [part.tolist() for part in batch["noise"]]]) for batch in loader]


@pytest.mark.slow
def test_batches_are_the_same_however_they_are_made(tmp_path: Path) -> None:
    """Any number of workers, window, start method and scheduling; after crashes; across a resume: bit for bit."""

    def make(num_workers: int, dataset: Any = None, **options: Any) -> DataLoader[Any]:
        torch.manual_seed(11)
        return DataLoader(dataset or Noisy(), batch_size=3, shuffle=True, num_workers=num_workers, **options)

    expected = everything(make(1))
    for num_workers, options in (
        (2, {}),
        (3, {"prefetch_factor": 1}),
        (5, {"prefetch_factor": 4, "scheduling": "dynamic"}),
        (2, {"multiprocessing_context": "spawn", "max_buffered_bytes": 0}),
        (2, {"multiprocessing_context": "forkserver", "scheduling": "dynamic"}),
    ):
        assert everything(make(num_workers, **options)) == expected

    for marker in "ab":
        (tmp_path / marker).touch()
    loader = make(2, Deadly(tmp_path))
    states, found = [], []
    for batch in loader:
        states.append(loader.state_dict())
        found += everything([batch])
    assert found == expected
    assert not list(tmp_path.iterdir())
    for at, num_workers, method in ((0, 3, "fork"), (2, 1, "spawn"), (3, 2, "fork")):
        (tmp_path / "again").touch()
        resumed = make(num_workers, Deadly(tmp_path), multiprocessing_context=method)
        resumed.load_state_dict(states[at])
        assert everything(resumed) == expected[at + 1 :]


@pytest.mark.on_threads
def test_out_of_order_nothing_is_lost_or_repeated() -> None:
    """Batches that came early are not made again; which come first may differ."""
    make = maker(3, shuffle=True, in_order=False)
    loader = make()
    states, found = [], []
    for batch in loader:
        found += batch["index"].tolist()
        states.append((list(found), loader.state_dict()))
    for num_workers in (2, 0):
        for before, state in states:
            resumed = maker(num_workers, shuffle=True)()
            resumed.load_state_dict(state)
            assert sorted(before + [i for batch in resumed for i in batch["index"].tolist()]) == list(range(LENGTH))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_has_no_effects(num_workers: int) -> None:
    """No worker, no draw, no iterator; plain data; what is loaded is told; strange keys and changes do no harm."""
    make = maker(num_workers, shuffle=True, noise=False)
    torch.manual_seed(1)
    children, generator = descendants(os.getpid()), torch.get_rng_state()
    loader = make()
    initial = loader.state_dict()
    assert descendants(os.getpid()) == children
    assert torch.equal(torch.get_rng_state(), generator)
    assert loader._iterator is None
    first = [batch.tolist() for batch in loader]

    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state == iterator.state_dict() == json.loads(json.dumps(state))
    kept = copy.deepcopy(state)
    rest = [batch.tolist() for batch in iterator]
    assert state == kept
    assert len(rest) == 4

    changed = loader.state_dict()
    changed["fits"].clear()
    changed["position"] = "nowhere"
    state["_iterator_finished"] = False  # Accelerate's
    for given, expected in ((initial, first), (state, rest)):
        other = make()
        other.load_state_dict(given)
        assert other.state_dict() == given
        assert [batch.tolist() for batch in other] == expected

    loader.load_state_dict({})
    assert loader.state_dict()["position"] == loader.state_dict()["epoch"] == 0
    assert len(list(loader)) == 5


@pytest.mark.on_threads
@pytest.mark.parametrize("num_workers", [0, 2])
def test_breaks_ends_and_iterators(num_workers: int) -> None:
    """After a break the state is in the middle; from the last body nothing is left; after the end all of the next."""
    loader = maker(num_workers, noise=False)()
    whole = [batch.tolist() for batch in loader]
    for batch in loader:
        if 5 in batch:
            break
    resumed = maker(num_workers, noise=False)()
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in resumed] == whole[2:]
    assert [batch.tolist() for batch in resumed] == whole

    iterator = iter(loader)
    states = [iterator.state_dict() for _ in iterator]
    for at, left in ((-1, []), (1, whole[2:])):
        loader.load_state_dict(states[at])
        assert [batch.tolist() for batch in loader] == left
    assert [batch.tolist() for batch in loader] == whole


def test_what_does_not_fit_is_refused() -> None:
    """By `load_state_dict`, with the field, what it was and what it is."""
    state = maker(0, shuffle=True)().state_dict()
    others: dict[str, dict[str, Any]] = {
        "dataset_length": {"length": 15},
        "batch_size": {"batch_size": 4},
        "drop_last": {"drop_last": True},
        "sampler": {"shuffle": False},
        "samples": {"sampler": lambda: RandomSampler(range(LENGTH), num_samples=5)},
    }
    for field, options in others.items():
        with pytest.raises(StateMismatchError, match=rf"{field} was .* when it was taken, and is .* now") as caught:
            maker(0, **{"shuffle": "sampler" not in options, **options})().load_state_dict(state)
        assert caught.value.field == field
    distributed = maker(0, sampler=lambda: DistributedSampler(range(LENGTH), 2, 1))().state_dict()
    with pytest.raises(StateMismatchError, match="rank was 1"):
        maker(0, sampler=lambda: DistributedSampler(range(LENGTH), 2, 0))().load_state_dict(distributed)
    for strange in ({"_num_yielded": 3}, {**state, "version": 1}):
        with pytest.raises(StateMismatchError, match="version"):
            maker(0, shuffle=True)().load_state_dict(strange)


def test_a_state_fits_what_its_epoch_was_drawn_for() -> None:
    """Inside an epoch, before a state is taken, a data set may grow, weights be set, and batches to another size."""
    growing = [*range(20)]
    loader = DataLoader(growing, 4, shuffle=True)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    growing += [20, 21]
    with pytest.raises(StateMismatchError, match="dataset_length was 20 when it was taken, and is 22 now"):
        loader.load_state_dict(loader.state_dict())
    sampler = WeightedRandomSampler([1.0] * 20, 20)
    loader = DataLoader(growing, 4, sampler=sampler)  # type: ignore[arg-type]
    next(iter(loader))
    sampler.weights[3] = 5.0
    with pytest.raises(StateMismatchError, match="weights was"):
        loader.load_state_dict(loader.state_dict())
    batches = iter(loader)
    for size in (4, 2, 4):
        loader.batch_sampler.batch_size = size  # type: ignore[union-attr]
        assert len(next(batches)) == size
    with pytest.raises(StateMismatchError, match="batch_size was 'changed in the middle of the epoch'"):
        loader.load_state_dict(loader.state_dict())
    loader.batch_sampler.batch_size = 2  # type: ignore[union-attr]
    rest = [batch.tolist() for batch in batches]
    assert {len(batch) for batch in rest} == {2}
    assert_resumable(lambda: loader)


def test_the_helper_finds_what_is_not_resumable() -> None:
    """A sampler that never gives the same again is named with the batch that differs."""

    class Fickle(Shuffled):
        def __iter__(self) -> Iterator[int]:
            return iter(random.SystemRandom().sample(range(1000), LENGTH))

    with pytest.raises(AssertionError, match=r"The state before the first epoch: the rest of the epoch: batch 1 is"):
        assert_resumable(lambda: DataLoader(range(1000), batch_size=7, sampler=Fickle()))  # type: ignore[arg-type]


def test_the_helper_goes_on_to_the_epoch_after() -> None:
    """A dataset that is right up to the end of the epoch of its state, and not in the next one."""

    class WrongLater(Dataset[Any]):
        given, was_loaded = 0, False

        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> tuple[int, bool]:
            self.given += 1
            return index, self.was_loaded and self.given > LENGTH

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.given, self.was_loaded = state["given"], True

    with pytest.raises(AssertionError, match="The state before the first epoch: the epoch after: batch 1 is"):
        assert_resumable(lambda: DataLoader(WrongLater(), batch_size=7))
