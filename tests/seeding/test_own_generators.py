"""Random generators that datasets and their transforms have beside the global ones: seeded with these, and given back.

albumentations 2 is one library that has them; its stand-in here has the same attributes. Where it is installed, it is
tested itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from asyncloader import DataLoader, sample_seed
from asyncloader.seeding.generators import left_alone
from asyncloader.seeding.own_generators import OwnGenerators, generators_of
from asyncloader.testing import assert_reproducible

COUNT = 24


class Jitter:
    """A transform as albumentations has them: with generators of its own, which nobody has seeded."""

    def __init__(self) -> None:
        self.set_random_seed(None)

    def set_random_seed(self, seed: int | None) -> None:
        self.random_generator = np.random.default_rng(seed)
        self.py_random = random.Random(seed)

    def __call__(self, image: float) -> list[float]:
        return [image, self.py_random.random(), float(self.random_generator.random())]


class Compose(Jitter):
    def __init__(self, transforms: list[Jitter]) -> None:
        super().__init__()
        self.transforms = transforms

    def __call__(self, image: float) -> list[float]:
        return [self.py_random.random(), *(drawn for transform in self.transforms for drawn in transform(image))]


class Photos(Dataset[Any]):
    def __init__(self, transform: Callable[[float], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.transform(float(index))


class PhotosAtOnce(Photos):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0.001 * (index % 3))
        with sample_seed():
            return self.transform(float(index))


class Randomizable:
    """As MONAI has it: a generator of the class, which an instance may replace."""

    R = np.random.RandomState()

    def __call__(self, image: float) -> float:
        return image + self.R.uniform()


def of_torch() -> Callable[[float], float]:
    generator = torch.Generator()
    generator.seed()
    return lambda image: image + float(torch.rand((), generator=generator))


def of_an_old_kind() -> Callable[[float], float]:
    generator = np.random.Generator(np.random.MT19937())
    return partial(lambda generator, image: image + float(generator.random()), generator)


TRANSFORMS: dict[str, Callable[[], Callable[[float], Any]]] = {
    "albumentations": lambda: Compose([Jitter(), Compose([Jitter()])]),
    "MONAI": Randomizable,
    "torch, in a closure": of_torch,
    "numpy, in a partial": of_an_old_kind,
}


def samples(dataset: Any, num_workers: int, seed: int = 3, **options: Any) -> list[list[Any]]:
    """Return the samples of two epochs."""
    torch.manual_seed(seed)
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=num_workers, collate_fn=list, **options)
    return [[sample for batch in loader for sample in batch] for _ in range(2)]


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_generators_of_transforms_are_seeded_for_each_batch(kind: str) -> None:
    """An unseeded one gave other numbers in each run, a seeded one other numbers with another number of workers."""
    make = TRANSFORMS[kind]
    first = samples(Photos(make()), 1)
    assert first == samples(Photos(make()), 1) == samples(Subset(Photos(make()), range(COUNT)), 2)
    assert sorted(first[0]) != sorted(first[1])
    assert first != samples(Photos(make()), 1, seed=4)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_generators_of_transforms_are_seeded_for_each_sample(kind: str) -> None:
    """With any number of workers and any batch size."""
    make = TRANSFORMS[kind]
    assert_reproducible(lambda: Photos(make()), num_workers=(0, 2), batch_sizes=(4, 3), shuffle=True, epochs=1)


def test_generators_of_transforms_are_seeded_in_blocks() -> None:
    """Where samples are made at the same time, in this process and in workers, with threads too."""
    make = TRANSFORMS["albumentations"]
    backends: Any = ("process", "thread")
    assert_reproducible(
        lambda: PhotosAtOnce(make()), num_workers=(0, 2), concurrency=(8, 2), worker_backends=backends, epochs=1
    )


class PhotosInBlocks(Photos):
    def __getitem__(self, index: int) -> Any:
        with sample_seed():
            return self.transform(float(index))


def give_transform(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.transform = TRANSFORMS["albumentations"]()


@pytest.mark.parametrize("dataset", [PhotosInBlocks, PhotosAtOnce])
@pytest.mark.parametrize("persistent", [False, True])
def test_each_worker_thread_seeds_the_generators_of_its_own_copy(dataset: type[Photos], persistent: bool) -> None:
    """Threads share the process and the epoch, but each has a copy, to which worker_init_fn may give what it likes."""
    options: Any = {"seeding": "sample", "worker_init_fn": give_transform, "persistent_workers": persistent}

    def drawn(num_workers: int, backend: str) -> list[list[Any]]:
        transform = TRANSFORMS["albumentations"]()
        return samples(dataset(transform), num_workers, worker_backend=backend, **options)

    assert drawn(2, "thread") == drawn(1, "thread") == drawn(1, "process")


def test_each_generator_draws_numbers_of_its_own() -> None:
    """Those of an image's rotation say nothing of its brightness."""
    for sample in samples(Photos(TRANSFORMS["albumentations"]()), 1)[0]:
        drawn = [number for number in sample if number != int(number)]
        assert len(set(drawn)) == len(drawn) == 6


def test_the_trainer_keeps_its_generators() -> None:
    """Those that a dataset in this process shares with it are given back after each batch."""
    transform: Any = TRANSFORMS["albumentations"]()
    transform.set_random_seed(5)
    before = transform.py_random.getstate(), transform.random_generator.bit_generator.state
    samples(Photos(transform), 0, seeding="sample")
    samples(PhotosAtOnce(transform), 0, seeding="sample")
    assert (transform.py_random.getstate(), transform.random_generator.bit_generator.state) == before


class Reshuffled(Dataset[int]):
    """Shuffles by its own generator when an epoch is set, which the copy of each worker has to do alike."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.order = list(range(COUNT))

    def set_epoch(self, epoch: int) -> None:
        self.rng.shuffle(self.order)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.rng.random()  # augments
        return self.order[index]


def test_what_is_drawn_outside_of_samples_is_as_without_seeds() -> None:
    """Two workers that have made other batches still draw the same order for the next epoch."""
    loader = DataLoader(Reshuffled(), 4, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(COUNT))
    loader.close()


class Late(Photos):
    """Makes its generator when it first needs it."""

    def __init__(self) -> None:
        super().__init__(lambda image: image)
        self.rng: Any = None

    def __getitem__(self, index: int) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng()
        return float(self.rng.random())


class LateInBlocks(Late):
    def __getitem__(self, index: int) -> float:
        with sample_seed():
            return super().__getitem__(index)


class LateAtOnce(Late):
    async def __getitem__(self, index: int) -> float:  # type: ignore[override]
        with sample_seed():
            return super().__getitem__(index)


@pytest.mark.parametrize(
    ("dataset", "num_workers", "options"),
    [
        (Late, 0, {}),
        (LateInBlocks, 1, {"worker_backend": "thread"}),
        (LateInBlocks, 1, {"worker_backend": "thread", "concurrency": 2}),
        (LateAtOnce, 0, {}),
    ],
    ids=["one by one", "in a thread", "on threads", "awaited"],
)
def test_generators_that_come_too_late_are_told(
    dataset: type[Photos], num_workers: int, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with their name and what to do: their first batch was not seeded."""
    torch.manual_seed(3)
    list(DataLoader(dataset(), 4, num_workers=num_workers, seeding="sample", **options))  # type: ignore[call-arg]
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "(rng), too late to be seeded" in told[0]
    assert "Make them in __init__" in told[0]


class OfADevice(random.Random):
    """Has no state that it could be set back to."""

    def random(self) -> float:
        return 0.5

    def getstate(self) -> Any:
        raise OSError("the device tells nothing")


def test_generators_that_could_not_be_given_back_are_left_alone() -> None:
    """They stop no batch, and others beside them are seeded."""

    def make() -> Photos:
        device, own = OfADevice(), np.random.default_rng()
        return Photos(lambda image: image + device.random() + float(own.random()))

    forked: Any = {"multiprocessing_context": "fork"}  # others would pickle it
    assert_reproducible(make, num_workers=(0, 1), epochs=1, **forked)
    assert samples(make(), 1, **forked) == samples(make(), 1, **forked)


def test_the_global_generators_and_those_of_the_system_are_nobodys_own() -> None:
    """Nor is a generator looked for in what holds none."""
    held: Any = Photos(lambda image: image)
    held.all = [random._inst, np.random.mtrand._rand, torch.default_generator, random.SystemRandom(), OfADevice()]  # type: ignore[attr-defined]
    assert generators_of(held) == {}
    assert not OwnGenerators(held)


UNSEEDED = "The same loader, seeded alike, gives other samples in a second run"


def test_assert_reproducible_names_the_cause_and_then_the_samples() -> None:
    """A generator that nobody can find, a state of the dataset's own, a seeding that is not by sample."""
    hidden: Any = Photos(lambda image: float(np.random.default_rng().random()))
    with pytest.raises(AssertionError, match=rf"^{UNSEEDED}(.|\n)*asyncloader\.sample_rng(.|\n)*\nWith num_workers=1"):
        assert_reproducible(lambda: hidden, num_workers=(0, 1))

    class Counts(Photos):
        made = 0

        def __getitem__(self, index: int) -> int:
            self.made += 1
            return self.made

    with pytest.raises(AssertionError, match=r"^A sample depends on what its worker has made before"):
        assert_reproducible(lambda: Counts(float), num_workers=(1, 2))
    with pytest.raises(AssertionError, match=r"^With seeding='batch', (.|\n)*seeding=\"sample\" does without"):
        assert_reproducible(lambda: Photos(Randomizable()), num_workers=(1,), seeding="batch")
    with pytest.raises(AssertionError, match=r"^Samples that are made at the same time share random generators"):

        class AtOnce(Photos):
            async def __getitem__(self, index: int) -> float:
                await asyncio.sleep(0.001 * (index * 7 % 5))
                return random.random()

        assert_reproducible(lambda: AtOnce(float), num_workers=(1,), concurrency=(1, 8), batch_sizes=(8,), epochs=1)


def test_albumentations_itself() -> None:
    """An unseeded Compose gives the same with any number of workers, and so does a seeded one."""
    albumentations = pytest.importorskip("albumentations")

    def transform(seed: int | None, image: float) -> Any:
        return compose[seed](image=np.full((8, 8, 3), image, np.uint8))["image"].tolist()

    kinds = [albumentations.RandomBrightnessContrast(p=1.0), albumentations.CoarseDropout(p=0.5)]
    compose = {seed: albumentations.Compose(kinds, seed=seed) for seed in (None, 7)}
    for seed in compose:
        assert_reproducible(
            lambda seed=seed: Photos(partial(transform, seed)), num_workers=(0, 2), shuffle=True, epochs=1
        )


class _RaisesItsClass:
    @property
    def __class__(self):
        raise RuntimeError("not loaded")


class _RaisesItsAttributes:
    @property
    def __dict__(self):
        raise RuntimeError("not loaded")


class _RaisesItsItems(dict):
    def items(self):
        raise RuntimeError("not loaded")


class _RaisesItsEntries(list):
    def __iter__(self):
        raise RuntimeError("not loaded")


class _RaisesItsText:
    def __str__(self):
        raise RuntimeError("no text")


class _OfNoModule:
    __module__ = None


@pytest.mark.parametrize(
    "make_odd",
    [
        _RaisesItsClass,
        _RaisesItsAttributes,
        partial(_RaisesItsItems, a=1),
        partial(_RaisesItsEntries, [1]),
        lambda: {_RaisesItsText(): 1},
        _OfNoModule,
        partial(mock.MagicMock, spec=np.random.Generator),
    ],
    ids=["class", "attributes", "items", "entries", "text", "module", "mock"],
)
def test_odd_objects_beside_a_generator_do_not_stop_the_search(make_odd):
    holder = SimpleNamespace(odd=make_odd(), rng=random.Random(1))
    own = OwnGenerators(holder)
    assert len(own) == 1
    with left_alone(own):
        own.seed(5)
    assert holder.rng.getstate() == random.Random(1).getstate()
