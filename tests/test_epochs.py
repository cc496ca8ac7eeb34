"""`set_epoch`: samplers, the dataset and every worker's copy of it hear of an epoch before its first sample."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DistributedSampler, IterableDataset, Subset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from asyncloader import ConfigurationError, DataLoader
from asyncloader.samplers import ElasticSampler

pytestmark = pytest.mark.on_threads

WAYS = [(0, False), (2, False), (2, True)]


class Shown:
    """Augments by the epoch, and shows it."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.epoch = 0
        self.calls: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls = [*self.calls, epoch]  # the copies of worker threads are shallow

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


class Hidden(Shown):
    """Keeps the epoch to itself."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self._epoch = 0
        self.calls = []

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self.calls = [*self.calls, epoch]  # the copies of worker threads are shallow

    def __getitem__(self, index: int) -> int:
        return 100 * self._epoch + index


class Stream(IterableDataset[int]):
    """Shuffles by the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        share = range(8) if info is None else range(info.id, 8, info.num_workers)
        return iter([100 * self.epoch + index for index in share])


class Counting(Hidden):
    """Counts epochs by itself, in each copy."""

    def __getitem__(self, index: int) -> int:
        sample = super().__getitem__(index)
        self._epoch += index in (6, 7)  # the last that either of two workers reads
        return sample


def samples(loader: Any) -> list[int]:
    """Return what an epoch gives, sorted."""
    return sorted(int(sample) for batch in loader for sample in batch)


def in_epoch(epoch: int, length: int = 8) -> list[int]:
    """Return what it should give."""
    return [100 * epoch + index for index in range(length)]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
@pytest.mark.parametrize("kind", [Shown, Hidden, Stream])
def test_every_copy_hears_of_it(kind: type[Any], num_workers: int, persistent: bool) -> None:
    """Fresh workers, persistent ones and none give the same; out of order, and twice the same, too."""
    loader = DataLoader(kind(), batch_size=2, num_workers=num_workers, persistent_workers=persistent)
    for epoch in (0, 1, 5, 5, 2):
        loader.set_epoch(epoch)
        assert samples(loader) == in_epoch(epoch)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_are_not_forked(method: str) -> None:
    """Their copy is older than the call."""
    loader = DataLoader(Hidden(), batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context=method)
    for epoch in (1, 4):
        loader.set_epoch(epoch)
        assert samples(loader) == in_epoch(epoch)


async def test_copies_hear_of_it_in_async_for() -> None:
    """The same."""
    loader = DataLoader(Shown(), batch_size=2, num_workers=2, persistent_workers=True)
    for epoch in (3, 1):
        loader.set_epoch(epoch)
        assert sorted([int(sample) async for batch in loader for sample in batch]) == in_epoch(epoch)


def test_a_dataset_that_the_user_tells_himself() -> None:
    """As Accelerate does, where it shows its epoch."""
    dataset = Shown()
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True)
    for epoch in (0, 2, 1):
        dataset.set_epoch(epoch)
        assert samples(loader) == in_epoch(epoch)


def test_datasets_inside_of_wrappers_hear_of_it() -> None:
    """torch's own do not pass it on."""
    first, second = Shown(3), Hidden(5)
    loader = DataLoader(
        ConcatDataset([Subset(cast(Any, first), [2, 0]), cast(Any, second)]), num_workers=2, persistent_workers=True
    )
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        assert samples(loader) == sorted([100 * epoch + 2, 100 * epoch, *in_epoch(epoch, 5)])
    assert first.calls == second.calls == [1, 2]


@pytest.mark.parametrize("persistent", [False, True])
def test_what_counts_by_itself_is_left_alone(persistent: bool) -> None:
    """As long as nobody sets anything; then that holds."""
    loader = DataLoader(Counting(), batch_size=1, num_workers=2, persistent_workers=persistent)
    found = [samples(loader), samples(loader)]
    assert found == [in_epoch(0), in_epoch(1 if persistent else 0)]
    loader.set_epoch(0)
    assert samples(loader) == in_epoch(0)


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_the_dataset_of_the_trainer_is_told_once(backend: str) -> None:
    """By the loader, at once; workers tell their copies."""
    dataset = Hidden()
    loader = DataLoader(dataset, num_workers=2, worker_backend=cast(Any, backend), persistent_workers=True)
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        assert dataset.calls[-1] == epoch
        assert samples(loader) == in_epoch(epoch)
    assert dataset.calls == [1, 2]


class Fatal(Hidden):
    """Kills its worker once in epoch 2."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if self._epoch == 2 and index == 5 and not self.mark.exists():
            self.mark.touch()
            os._exit(1)
        return super().__getitem__(index)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_who_takes_the_place_of_a_dead_worker_hears_of_it(method: str, tmp_path: Path) -> None:
    """Its copy is that of the first run, where it is not forked."""
    loader = DataLoader(
        Fatal(tmp_path / "mark"),
        batch_size=2,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    for epoch in (1, 2, 3):
        loader.set_epoch(epoch)
        assert samples(loader) == in_epoch(epoch)
    assert (tmp_path / "mark").exists()


def test_samplers_hear_of_it() -> None:
    """Those of a batch sampler too."""
    samplers: list[Any] = [
        DistributedSampler(cast(Any, range(16)), num_replicas=2, rank=0),
        ElasticSampler(16, num_replicas=2, rank=0),
    ]
    for sampler in samplers:
        batches = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
        for loader in (
            DataLoader(cast(Any, range(16)), sampler=sampler),
            DataLoader(cast(Any, range(16)), batch_sampler=batches),
        ):
            orders = []
            for epoch in (0, 1, 0):
                loader.set_epoch(epoch)
                orders.append([int(sample) for batch in loader for sample in batch])
            assert orders[0] == orders[2] != orders[1]


class Refusing(Shown):
    """Does not like an epoch, in workers."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if epoch == 2 and get_worker_info() is not None:
            raise ValueError("no epoch 2")


class RefusingAwaited(Refusing):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


class RefusingStream(Stream):
    """Does not begin epoch 2 in workers."""

    def __iter__(self) -> Iterator[int]:
        if self.epoch == 2 and get_worker_info() is not None:
            raise ValueError("no epoch 2")
        return super().__iter__()


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("dataset", [Refusing(), RefusingAwaited(), RefusingStream()], ids=lambda it: type(it).__name__)
def test_what_a_copy_raises_stands_for_its_batches(dataset: Any, backend: Any) -> None:
    """And the next epoch is none the worse."""
    loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True, worker_backend=backend)
    samples(loader)
    for _ in range(2):
        loader.set_epoch(2)
        with pytest.raises(ValueError, match="no epoch 2"):
            samples(loader)
        loader.set_epoch(3)
        seen = samples(loader)
        dataset.set_epoch(3)
        assert seen == samples(DataLoader(dataset, batch_size=2))


class Numpys(Shown):
    """Shows an epoch as it was told, and counts with it."""

    def __getitem__(self, index: int) -> int:
        return int(super().__getitem__(index))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.array, torch.tensor, int])
@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
def test_integers_of_any_kind(kind: Any, num_workers: int, persistent: bool) -> None:
    """Whoever tells the dataset of them; states have Python's own."""
    dataset = Numpys()
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers, persistent_workers=persistent)
    for epoch in (0, 2, 1):
        dataset.set_epoch(kind(epoch))
        assert samples(loader) == in_epoch(epoch)
    for epoch in (3, 0):
        loader.set_epoch(kind(epoch))
        assert type(dataset.epoch) is int
        assert samples(loader) == in_epoch(epoch)
    dataset.set_epoch(kind(4))
    next(iterator := iter(loader))
    assert json.loads(json.dumps(loader.state_dict()))["dataset_epochs"] == [4]
    iterator.close()


@pytest.mark.parametrize("epoch", ["1", 1.0, True, None, np.float64(1), np.bool_(True), np.array([1, 2]), [1]])
def test_what_is_no_epoch_is_refused(epoch: Any) -> None:
    """Before anybody is told."""
    dataset = Shown()
    with pytest.raises(ConfigurationError, match="an integer, but got"):
        DataLoader(dataset).set_epoch(epoch)
    assert dataset.calls == []


class Remembers(Stream):
    """Has a state, the epoch among others, as shards have."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[int]:
        samples = list(super().__iter__())
        begin, self.position = self.position, 0
        for self.position in range(begin + 1, len(samples) + 1):
            yield samples[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position % (8 if get_worker_info() is None else 4)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


@pytest.mark.parametrize(("num_workers", "persistent"), WAYS)
def test_an_epoch_that_is_set_goes_before_the_state_of_the_one_that_has_ended(
    num_workers: int, persistent: bool
) -> None:
    """But not before that of one that goes on, in which it says what is so already."""

    def make() -> DataLoader[int]:
        return DataLoader(Remembers(), batch_size=2, num_workers=num_workers, persistent_workers=persistent)

    loader = make()
    loader.set_epoch(3)
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(2)]
    middle = loader.state_dict()
    list(iterator)
    end = loader.state_dict()
    del iterator
    other = make()
    other.load_state_dict(middle)
    other.set_epoch(3)
    assert sorted([*first[0], *first[1], *samples(other)]) == in_epoch(3)
    other = make()
    other.load_state_dict(end)
    for epoch in (4, 5):
        other.set_epoch(epoch)
        assert samples(other) == in_epoch(epoch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_is_set_between_iter_and_the_first_batch(num_workers: int) -> None:
    """torch's samplers look at it when they are read: a state is of the epoch whose order was drawn."""

    def make() -> DataLoader[int]:
        data = cast(Any, range(24))
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        return DataLoader(data, batch_size=2, sampler=sampler, num_workers=num_workers)

    loader = make()
    iterator = iter(loader)
    loader.set_epoch(5)
    batches = [next(iterator).tolist() for _ in range(3)]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest
    assert len({sample for batch in batches + rest for sample in batch}) == 12


@pytest.mark.processes
def test_a_pipe_is_shuffled_anew_in_each_epoch_of_persistent_workers() -> None:
    """By a seed that is drawn for each."""
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = IterableWrapper(range(12)).shuffle()
        loader = DataLoader(pipe, 12, shuffle=True, num_workers=1, persistent_workers=True)
        epochs = [batch.tolist() for _ in range(2) for batch in loader]
    loader.close()
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(12)]
    assert epochs[0] != epochs[1]
