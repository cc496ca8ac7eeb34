"""``seeding="sample"``: the same augmentation whoever makes a sample, beside which others, and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, StackDataset, Subset

from asyncloader import DataLoader, sample_rng, sample_seed
from asyncloader.datasets import CachedDataset
from asyncloader.seeding.generators import left_alone
from asyncloader.testing import assert_reproducible, assert_resumable
from tests.support import effort

LENGTH = 10

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def draw() -> tuple[float, ...]:
    """Draw from all four generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(())), float(sample_rng().random())


class Drawing(Dataset[Any]):
    """Samples that are nothing but random numbers."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return (index, *draw())


class Together(Drawing):
    """The same for a batch in one call, which draws otherwise."""

    def __getitems__(self, indices: list[int]) -> Any:
        random.random()
        return [self[index] for index in indices]


class Seeded(Drawing):
    """The same in a block; may be called by several threads."""

    def __getitem__(self, index: int) -> Any:
        with sample_seed():
            return super().__getitem__(index)


class SeededTogether(Dataset[Any]):
    """The samples of a batch in one call, each in a block of its own."""

    seeds_samples = True

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> Any:
        samples = []
        for position, index in enumerate(indices):
            with sample_seed(position):
                samples.append((index, *draw()))
        return samples


class Awaited:
    """An async dataset whose samples come in an order of their own."""

    def __len__(self) -> int:
        return LENGTH

    async def __getitem__(self, index: int) -> Any:
        for _ in range(index % 3):
            await asyncio.sleep(0)
        with sample_seed():
            return (index, *draw())


def samples(dataset: Any, seed: int = 3, **options: Any) -> list[Any]:
    """Return the samples of two epochs."""
    torch.manual_seed(seed)
    loader = DataLoader(dataset, **{"seeding": "sample", "shuffle": True, "collate_fn": list, **options})
    found = [sample for _ in range(2) for batch in loader for sample in batch]
    loader.close()
    return found


@pytest.mark.parametrize("make", [Drawing, Together, lambda: Subset(Drawing(), range(LENGTH)), SeededTogether])
def test_samples_one_after_the_other(make: Callable[[], Any]) -> None:
    """The same with any number of workers, batch size and scheduling; what fetches batches is asked for samples."""
    few: dict[str, Any] = {} if make is Drawing or not effort.is_quick else {"scheduling": ["static"]}
    assert_reproducible(make, num_workers=(0, 2), batch_sizes=(4, 1), epochs=1, shuffle=True, **few)


@pytest.mark.parametrize("make", [Seeded, Awaited, SeededTogether])
def test_samples_at_the_same_time(make: Callable[[], Any]) -> None:
    """The same with any number of them, in blocks, in worker processes."""
    more: dict[str, Any] = {"concurrency": (None, 4), "scheduling": ["static"]}
    assert_reproducible(make, num_workers=(1, 2), epochs=1, shuffle=True, **more)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Awaited, {"num_workers": 0}),
        (Seeded, {"num_workers": 0, "concurrency": 3}),
        (Seeded, {"num_workers": 1, "worker_backend": "thread"}),
    ],
    ids=["coroutines", "sample threads", "worker threads"],
)
def test_blocks_are_refused_where_the_generators_are_the_trainers(make: Callable[[], Any], options: Any) -> None:
    """They would be seeded beside whatever it draws; under another seeding, blocks change nothing."""
    with pytest.raises(RuntimeError, match="entered a sample_seed\\(\\) block"):
        samples(make(), **options)
    assert len(samples(make(), seeding="batch", **options)) == 2 * LENGTH


def test_a_sample_is_seeded_as_a_batch_of_it_alone() -> None:
    """`seeding="batch"` with `batch_size=1` gives the same."""
    alone = samples(Drawing(), num_workers=1, batch_size=1, seeding="batch")
    assert samples(Drawing(), num_workers=2, batch_size=4) == alone


def test_each_sample_and_each_epoch_draws_anew() -> None:
    """No two draws are alike; another seed of the trainer gives others."""
    drawn = [number for _, *numbers in samples(Drawing(), batch_size=4) for number in numbers]
    assert len(set(drawn)) == len(drawn) == 2 * LENGTH * 4
    assert not set(drawn) & {number for _, *numbers in samples(Drawing(), 4, batch_size=4) for number in numbers}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_any_size(num_workers: int) -> None:
    """The place in the order counts, not batch and position."""

    class Uneven(BatchSampler):
        def __iter__(self) -> Any:
            yield from ([3, 1], [4], [0, 9, 8, 7], [2, 5, 6])

    sampler = Uneven(range(LENGTH), 4, False)
    options: dict[str, Any] = {"shuffle": False, "batch_sampler": sampler, "num_workers": num_workers}
    assert samples(Drawing(), **options) == samples(Drawing(), shuffle=False, sampler=[3, 1, 4, 0, 9, 8, 7, 2, 5, 6])


def test_without_batches_each_sample_has_its_place() -> None:
    """`batch_size=None`: each sample stands for itself."""
    found = [samples(Drawing(), batch_size=None, collate_fn=lambda x: [x], num_workers=n) for n in (0, 2)]
    assert found[0] == found[1] == samples(Drawing(), batch_size=3)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_trainer_has_its_generators_back(is_async: bool) -> None:
    """After each batch that is made in its process."""

    async def first() -> Any:
        return await anext(aiter(loader))

    with left_alone():
        loader = DataLoader(Drawing(), batch_size=4, seeding="sample")
        iterator = iter(loader)
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        with left_alone():
            expected = random.random(), float(np.random.rand()), float(torch.rand(()))
        if is_async:
            state = torch.get_rng_state()
            asyncio.run(first())
            torch.set_rng_state(state)  # a new iterator draws a base seed, as torch's does
        else:
            next(iterator)
        assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
        loader.close()


@pytest.mark.parametrize(("num_workers", "others"), [(0, 1), (2, 0), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_seeds_that_it_would_have_had(num_workers: int, others: int) -> None:
    """A run goes on with the seeds that it would have had, with any number of workers, and batches of any size."""

    class Uneven(BatchSampler):
        def __iter__(self) -> Any:
            yield from ([], [3, 1], [4], [0, 9, 8, 7], [], [2, 5, 6])

    def maker(num_workers: int) -> Callable[[], DataLoader[Any]]:
        options: Any = {"batch_sampler": Uneven(range(LENGTH), 4, False), "seeding": "sample", "collate_fn": list}
        return lambda: DataLoader(Drawing(), num_workers=num_workers, **options)

    torch.manual_seed(0)
    assert_resumable(maker(num_workers), resume_with=maker(others))


def test_states_of_datasets_are_brought_back_with_the_same_draws() -> None:
    """What was made since a state is made again, each sample under its own seed."""

    class Remembering(Drawing):
        def __init__(self) -> None:
            self.last = 0.0

        def __getitem__(self, index: int) -> Any:
            before, self.last = self.last, random.random()
            return index, before, self.last

        def state_dict(self) -> Any:
            return {"last": self.last}

        def load_state_dict(self, state: Any) -> None:
            self.last = state["last"]

    for num_workers in (0, 1):
        assert_resumable(
            lambda num_workers=num_workers: DataLoader(  # type: ignore[misc]
                Remembering(),
                5 if num_workers else 3,
                seeding="sample",
                snapshot_every_n_steps=2,
                num_workers=num_workers,
            )
        )


def test_what_is_left_out_keeps_the_others_as_they_are() -> None:
    """A bad sample takes a place in the order."""

    class Bad(Drawing):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise ValueError(index)
            return super().__getitem__(index)

    options: dict[str, Any] = {"shuffle": False, "on_error": "skip", "num_workers": 1}
    expected = [sample for sample in samples(Drawing(), shuffle=False) if sample[0] != 3]
    for batch_size in (1, 4):
        assert samples(Bad(), batch_size=batch_size, **options) == expected


def test_collation_has_numbers_of_its_own() -> None:
    """The same with and without workers, and none of a sample's."""

    def collate(found: list[Any]) -> list[Any]:
        return [*found, (-1, *draw())]

    one, other = (samples(Drawing(), batch_size=4, num_workers=n, collate_fn=collate) for n in (0, 2))
    assert one == other
    numbers = [number for _, *numbers in one for number in numbers]
    assert len(set(numbers)) == len(numbers)


def test_samples_of_several_datasets() -> None:
    """What torch's StackDataset fetches part by part is fetched sample by sample."""
    assert_reproducible(lambda: StackDataset(Drawing(), Together()), num_workers=(0, 2), scheduling=["static"])


def test_transforms_after_a_cache_draw_the_same_whether_it_had_the_sample(tmp_path: Path) -> None:
    """What the sample drew when it was made does not matter."""

    def dataset(folder: str) -> Any:
        first = lambda sample: (sample[0], *draw()[:3])  # noqa: E731
        return CachedDataset(Drawing(), tmp_path / folder, fingerprint="v1", transform=first)

    full = dataset("full")
    samples(full, shuffle=False)
    assert samples(full) == samples(dataset("empty"), num_workers=1, batch_size=5)


@pytest.mark.parametrize("options", [{"num_workers": 1, "worker_backend": "thread"}, {"concurrency": 2}])
def test_transforms_after_a_cache_draw_as_ever_where_the_generators_are_the_trainers(
    options: Any, tmp_path: Path
) -> None:
    """The cache has a block, which is not the user's own."""
    drawn = lambda sample: (sample[0], *draw())  # noqa: E731
    cached = CachedDataset(Drawing(), tmp_path, fingerprint="v1", transform=drawn)
    assert len(samples(cached, **options)) == 2 * LENGTH


def test_iterable_datasets_keep_torchs_streams() -> None:
    """They have no order that a sample would have a place in."""

    class Numbers(torch.utils.data.IterableDataset[float]):
        def __iter__(self) -> Any:
            return (random.random() for _ in range(4))

    def run(seeding: Any) -> list[Any]:
        torch.manual_seed(1)
        return list(DataLoader(Numbers(), num_workers=1, seeding=seeding))

    assert run("sample") == run("worker")


def test_what_is_not_reproducible_is_told() -> None:
    """With the loader and the sample that differs."""
    with pytest.raises(AssertionError, match=r"With num_workers=1, batch_size=4, .*: sample 1 is not the same: \[1\]"):
        assert_reproducible(Drawing, batch_sizes=[4], num_workers=(0, 1), seeding="worker")


def test_options_of_workers_are_for_loaders_that_have_some() -> None:
    """The first loader has none, which is no error."""
    of_workers: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 3, "multiprocessing_context": "fork"}
    assert_reproducible(Drawing, num_workers=(0, 1), batch_sizes=[4], epochs=1, timeout=60, **of_workers)


def test_workers_that_come_and_go_in_the_middle() -> None:
    """What they make is what others would have made."""
    torch.manual_seed(3)
    loader = DataLoader(Drawing(), 1, num_workers=1, prefetch_factor=1, seeding="sample", shuffle=True, collate_fn=list)
    found = []
    for (sample,) in loader:
        found.append(sample)
        loader.set_num_workers(2 if len(found) < 6 else 1)
    assert found == samples(Drawing(), batch_size=4)[:LENGTH]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_in_memory_are_gathered_as_ever(num_workers: int) -> None:
    """Nothing is drawn for them."""
    data = torch.utils.data.TensorDataset(torch.arange(LENGTH))
    loader = DataLoader(data, 4, seeding="sample", num_workers=num_workers)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
