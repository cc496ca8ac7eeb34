"""Random generators that datasets and their transforms have beside the global ones: seeded by their states, and alike.

albumentations 2 is one library that has them; its stand-in here has the same attributes. Where it is installed, it is
tested itself.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as Torchs
from torch.utils.data import Dataset, Subset, get_worker_info

from asyncloader import DataLoader, sample_seed
from asyncloader.seeding.own_generators import generators_of
from asyncloader.testing import assert_reproducible

COUNT = 24

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Jitter:
    """A transform as albumentations has them: with generators of its own."""

    def __init__(self, seed: int | None = None) -> None:
        self.set_random_seed(seed)

    def set_random_seed(self, seed: int | None) -> None:
        self.random_generator = np.random.default_rng(seed)
        self.py_random = random.Random(seed)

    def __call__(self, image: float) -> list[float]:
        return [image, self.py_random.random(), float(self.random_generator.random())]


class Compose(Jitter):
    def __init__(self, transforms: list[Jitter], seed: int | None = None) -> None:
        super().__init__(seed)
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


def of_torch(seed: int) -> Callable[[float], float]:
    generator = torch.Generator().manual_seed(seed)
    return lambda image: image + float(torch.rand((), generator=generator))


def of_an_old_kind(seed: int) -> Callable[[float], float]:
    generator = np.random.Generator(np.random.MT19937(seed))
    return partial(lambda generator, image: image + float(generator.random()), generator)


def of_monai(seed: int) -> Callable[[float], float]:
    transform = Randomizable()
    transform.R = np.random.RandomState(seed)
    return transform


TRANSFORMS: dict[str, Callable[[int], Callable[[float], Any]]] = {
    "albumentations": lambda seed: Compose([Jitter(seed), Compose([Jitter(seed + 1)], seed + 2)], seed + 3),
    "MONAI": of_monai,
    "torch, in a closure": of_torch,
    "numpy, in a partial": of_an_old_kind,
}


def samples(dataset: Any, num_workers: int, seed: int = 3, **options: Any) -> list[list[Any]]:
    """Return the samples of two epochs."""
    torch.manual_seed(seed)
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=num_workers, collate_fn=list, **options)
    return [[sample for batch in loader for sample in batch] for _ in range(2)]


def all_kinds(seed: int) -> Callable[[float], list[Any]]:
    """Return a transform that does what those of all kinds do: one run for all of them."""
    transforms = [make(seed) for make in TRANSFORMS.values()]
    return lambda image: [transform(image) for transform in transforms]


def test_generators_of_transforms_are_seeded_for_each_batch() -> None:
    """With any number of workers, wherever they lie: by the seed that they were given, and not by torch's."""
    runs = (
        samples(Photos(all_kinds(5)), 1),
        samples(Subset(Photos(all_kinds(5)), range(COUNT)), 2),
        samples(Photos(all_kinds(6)), 1),
    )
    for place, kind in enumerate(TRANSFORMS):
        first, again, other = ([[sample[place] for sample in epoch] for epoch in run] for run in runs)
        assert first == again != other, kind
        assert sorted(first[0]) != sorted(first[1]), kind


def test_generators_of_transforms_are_seeded_for_each_sample() -> None:
    """With any number of workers and any batch size."""
    options: Any = {"batch_sizes": (4, 3), "shuffle": True, "epochs": 1}
    assert_reproducible(lambda: Photos(all_kinds(5)), num_workers=(0, 2), **options)


def test_generators_of_transforms_are_seeded_in_blocks() -> None:
    """Where a worker makes samples at the same time."""
    make = TRANSFORMS["albumentations"]
    assert_reproducible(lambda: PhotosAtOnce(make(5)), num_workers=(1, 2), concurrency=(8, 2), epochs=1)


def test_each_generator_draws_numbers_of_its_own() -> None:
    """Those of an image's rotation say nothing of its brightness, if they have other seeds."""
    for sample in samples(Photos(TRANSFORMS["albumentations"](5)), 1)[0]:
        drawn = [number for number in sample if number != int(number)]
        assert len(set(drawn)) == len(drawn) == 6


def test_the_trainer_keeps_its_generators() -> None:
    """Those that a dataset in this process shares with it are given back after each batch."""
    transform: Any = TRANSFORMS["albumentations"](5)
    transform.set_random_seed(5)
    before = transform.py_random.getstate(), transform.random_generator.bit_generator.state
    samples(Photos(transform), 0, seeding="sample")
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


KINDS: dict[str, Callable[[int], Any]] = {
    "random.Random": random.Random,
    "RandomState": np.random.RandomState,
    "RandomState of SFC64": lambda seed: np.random.RandomState(np.random.SFC64(seed)),
    "torch.Generator": lambda seed: torch.Generator().manual_seed(seed),
    **{
        kind.__name__: lambda seed, kind=kind: np.random.Generator(kind(seed))
        for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
}


def draw(generator: Any) -> float:
    """Draw one number, and leave the second one of a pair of Gaussians behind, where there is one."""
    if isinstance(generator, random.Random):
        return generator.gauss(0.0, 1.0)
    if isinstance(generator, torch.Generator):
        return float(torch.randn((), generator=generator))
    return float(generator.normal())


class Crop:
    """Crops at random, of a generator of any kind."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        return draw(self.generator)


class Segmentations(Dataset[Any]):
    """Images of all kinds of generators, each with its mask: one run for all of them."""

    def __init__(self, seed: int = 5) -> None:
        self.of_kinds = [Segmentation(kind, seed) for kind in KINDS]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> list[list[float]]:
        return [dataset[index] for dataset in self.of_kinds]


class Segmentation(Dataset[Any]):
    """An image and its mask, each cropped by a generator of its own, and a third number of another one."""

    def __init__(self, kind: str, seed: int | None = 5) -> None:
        make = KINDS[kind]
        self.image, self.masks = Crop(make(5 if seed is None else seed)), [Crop(make(5 if seed is None else seed))]
        self.other = Crop(make(6))
        if seed is None:  # as if nobody had seeded it: another one in each process, or copy of the program
            generator = make(random.SystemRandom().randrange(1 << 31))
            self.image, self.masks = Crop(generator), [Crop(copy.deepcopy(generator))]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> list[float]:
        return [self.image(), self.masks[0](), self.other()]


def crops(loader: Any) -> list[Any]:
    return [sample for batch in loader for sample in batch]


@pytest.mark.parametrize("options", [{}, {"seeding": "sample"}, {"num_workers": 0, "seeding": "sample"}], ids=str)
def test_generators_that_are_alike_draw_alike(options: Any) -> None:
    """Or masks would not fit their images. Other seeds draw other numbers, whatever torch's seed is."""
    loader: Any = DataLoader(Segmentations(), 4, collate_fn=list, **{"num_workers": 2, **options})
    another: Any = DataLoader(Segmentations(7), 4, collate_fn=list, **{"num_workers": 1, **options})
    runs = crops(loader), crops(loader), crops(another)
    for place, kind in enumerate(KINDS):
        drawn, later, others = ([sample[place] for sample in run] for run in runs)
        assert all(image == mask != other for image, mask, other in drawn), kind
        assert len({image for image, *_ in drawn}) == COUNT, kind
        assert [image for image, *_ in later] != [image for image, *_ in drawn], kind
        assert not {image for image, *_ in drawn} & {image for image, *_ in others}, kind


def test_a_run_draws_what_it_has_drawn_whatever_the_trainer_draws_and_in_other_workers() -> None:
    """Workers that are started anew, late ones, those that stay, and other numbers of them."""
    expected = crops(DataLoader(Segmentations(), 4, num_workers=1, collate_fn=list))
    for options in ({"num_workers": 2}, {"num_workers": 3, "persistent_workers": True}):
        dataset = Segmentations()
        loader: Any = DataLoader(dataset, 4, collate_fn=list, **options)  # type: ignore[arg-type]
        iterator = iter(loader)
        drawn = [*next(iterator)]
        dataset[0]  # the trainer looks at a sample
        if options["num_workers"] == 2:
            loader.set_num_workers(3)  # the third is a copy of the trainer's dataset as it is now
        drawn += [sample for batch in iterator for sample in batch]
        assert drawn == expected
        loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_of_workers_that_stay_are_those_of_workers_that_are_made_anew(persistent: bool) -> None:
    """Also where the trainer seeds a generator between two epochs: its seed counts then, in all of them."""
    dataset = Segmentation("PCG64")
    loader: Any = DataLoader(dataset, 4, num_workers=2, persistent_workers=persistent, collate_fn=list)
    epochs = [crops(loader), crops(loader)]
    dataset.image.generator, dataset.masks[0].generator = np.random.default_rng(99), np.random.default_rng(99)
    epochs.append(crops(loader))
    loader.close()
    fresh: Any = DataLoader(Segmentation("PCG64"), 4, num_workers=1, collate_fn=list)
    assert epochs[:2] == [crops(fresh), crops(fresh)]
    fresh.dataset.image.generator, fresh.dataset.masks[0].generator = (
        np.random.default_rng(99),
        np.random.default_rng(99),
    )
    assert epochs[2] == crops(fresh)


def test_a_generator_that_is_seeded_before_an_epoch_fixes_it() -> None:
    """As with torch's loader, whatever ran before; also where an image's generator is new and its mask's is not."""
    dataset = Segmentation("RandomState")
    loader: Any = DataLoader(dataset, 4, num_workers=2, collate_fn=list)
    expected = crops(loader)
    for both in (True, True, False):
        next(iter(loader))
        assert crops(loader) != expected
        dataset.image.generator = np.random.RandomState(5)
        if both:
            dataset.masks[0].generator = np.random.RandomState(5)
            dataset.other.generator = np.random.RandomState(6)
            assert crops(loader) == expected
        else:
            assert [sample[:2] for sample in crops(loader)] == [sample[:2] for sample in expected]


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", [5, None], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("done", [0, 2, 6])
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 0, "seeding": "sample"}], ids=str)
def test_a_resume_goes_on_in_this_epoch_and_in_the_next(options: Any, done: int, seed: int | None) -> None:
    """A generator that nobody has seeded is another one in the program that goes on: its key is in the state."""

    def make() -> Any:
        return DataLoader(Segmentation("PCG64", seed), 4, collate_fn=list, **options)

    loader = make()
    crops(loader)
    iterator = iter(loader)
    for _ in range(done):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [sample for batch in iterator for sample in batch], crops(loader)
    resumed = make()
    resumed.load_state_dict(state)
    if options["num_workers"]:
        resumed.dataset[0]  # the trainer draws between
    assert crops(resumed) == expected[0]
    if not options["num_workers"]:
        assert crops(resumed) == expected[1]
    loader.close()
    resumed.close()


def test_a_batch_by_its_number_draws_what_it_has_drawn() -> None:
    loader: Any = DataLoader(Segmentation("RandomState", None), 4, shuffle=True, num_workers=2, collate_fn=list)
    epochs = [list(loader), list(loader)]
    assert [[loader.batch(epoch, number) for number in (0, 5, 3)] for epoch in (0, 1)] == [
        [batches[number] for number in (0, 5, 3)] for batches in epochs
    ]


class KeepsItself(Segmentation):
    """Provides its state, with its generators in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_dataset_with_a_state_keeps_its_generators_itself() -> None:
    """They run on from sample to sample, as it expects, and as with torchdata's loader."""
    expected = [
        crops(loader(KeepsItself("PCG64"), 4, num_workers=1, collate_fn=list)) for loader in (DataLoader, Torchs)
    ]
    assert expected[0] == expected[1]


def reseed(worker: int) -> None:
    """As MONAI's: of the worker's seed, which is torch's and the number of the worker."""
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    for number, crop in enumerate((dataset.image, *dataset.masks, dataset.other)):
        crop.generator = np.random.default_rng([get_worker_info().seed, number // 2])  # type: ignore[union-attr]


def test_generators_that_are_seeded_for_each_worker_follow_from_torchs_seed() -> None:
    """With any number of workers; those that are alike stay alike."""

    def drawn(num_workers: int, seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        dataset = Segmentation("PCG64", None)
        return crops(DataLoader(dataset, 4, num_workers=num_workers, collate_fn=list, worker_init_fn=reseed))

    first = drawn(1, 3)
    assert all(image == mask != other for image, mask, other in first)
    assert first == drawn(2, 3) != drawn(2, 4)


def test_generators_of_a_collate_fn() -> None:
    generator, twin = np.random.default_rng(5), np.random.default_rng(5)
    loader: Any = DataLoader(
        range(COUNT), 4, num_workers=2, collate_fn=lambda keys: (generator.random(), twin.random()),
        multiprocessing_context="fork",
    )  # fmt: skip
    drawn = list(loader)
    assert all(one == other for one, other in drawn)
    assert len(set(drawn)) == len(drawn)
    assert drawn != list(loader)


class OfADevice(random.Random):
    """Has no state that it could be set back to."""

    def random(self) -> float:
        return 0.5

    def getstate(self) -> Any:
        raise OSError("the device tells nothing")


def test_generators_that_could_not_be_given_back_are_left_alone() -> None:
    """They stop no batch, and others beside them are seeded."""

    def make() -> Photos:
        device, own = OfADevice(), np.random.default_rng(5)
        return Photos(lambda image: image + device.random() + float(own.random()))

    forked: Any = {"multiprocessing_context": "fork"}  # others would pickle it
    assert_reproducible(make, num_workers=(0, 1), epochs=1, **forked)
    assert samples(make(), 1, **forked) == samples(make(), 1, **forked)


class Wrapped:
    """A dataset inside another, with annotations as COCO has them before the transforms."""

    def __init__(self, dataset: Any) -> None:
        self.images = [
            {"file": str(number), "boxes": [{"at": [0.0] * 4, "of": []} for _ in range(99)]} for number in range(99)
        ]
        self.by_name = {str(number): [{"boxes": [[1.0]]}] for number in range(99)}
        self.dataset = dataset


@pytest.mark.parametrize("depth", range(4))
def test_generators_are_found_behind_however_many_data(depth: int) -> None:
    """Data are more than would be looked at."""
    dataset: Any = Compose([Jitter(3), Compose([Jitter(4)], 5)], 6)
    expected = {id(generator) for generator in generators_of(dataset).values()}
    for _ in range(depth):
        dataset = Wrapped(dataset)
    assert {id(generator) for generator in generators_of(dataset).values()} == expected
    assert len(expected) > 3


def test_the_global_generators_and_those_of_the_system_are_nobodys_own() -> None:
    """Nor is a generator looked for in what holds none."""
    held: Any = Photos(lambda image: image)
    held.all = [random._inst, np.random.mtrand._rand, torch.default_generator, random.SystemRandom(), OfADevice()]  # type: ignore[attr-defined]
    assert generators_of(held) == {}


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
        assert_reproducible(lambda: Photos(of_monai(5)), num_workers=(1,), seeding="batch")
    with pytest.raises(AssertionError, match=r"^Samples that are made at the same time share random generators"):

        class AtOnce(Photos):
            def __getitem__(self, index: int) -> float:
                time.sleep(0.001 * (index * 7 % 5))
                return random.random()

        assert_reproducible(lambda: AtOnce(float), num_workers=(1,), concurrency=(1, 8), batch_sizes=(8,), epochs=1)


def test_albumentations_itself() -> None:
    """A seeded Compose gives the same with any number of workers."""
    albumentations = pytest.importorskip("albumentations")

    kinds = [albumentations.RandomBrightnessContrast(p=1.0), albumentations.CoarseDropout(p=0.5)]
    compose = albumentations.Compose(kinds, seed=7)

    def transform(image: float) -> Any:
        return compose(image=np.full((8, 8, 3), image, np.uint8))["image"].tolist()

    assert_reproducible(lambda: Photos(transform), num_workers=(0, 2), shuffle=True, epochs=1)


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
    assert list(generators_of(holder).values()) == [holder.rng]
