"""What a worker thread has of the dataset: a copy of its own, of what holds the data. Who waits for whom on a loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from asyncloader import DataLoader
from asyncloader.backends.threads import worker as local_worker
from asyncloader.backends.threads.worker import LocalWorker, private_copy
from asyncloader.loops import GuardedLoop
from tests.support import inside
from tests.support.patience import PATIENCE_S, until


class Rows(Dataset[int]):
    def __init__(self) -> None:
        self.rows = [1, 2, 3]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return self.rows[index]


class Lines(IterableDataset[int]):
    def __init__(self) -> None:
        self.rows = [1, 2]

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


WRAPPED = {
    "bare": (Rows, lambda dataset: dataset),
    "subset": (lambda: Subset(Rows(), [0, 2]), lambda dataset: dataset.dataset),
    "subset of a subset": (lambda: Subset(Subset(Rows(), [0]), [0]), lambda dataset: dataset.dataset.dataset),
    "concatenated": (lambda: ConcatDataset([Rows(), Rows()]), lambda dataset: dataset.datasets[1]),
    "stacked": (lambda: StackDataset(Rows(), Rows()), lambda dataset: dataset.datasets[1]),
    "stacked by name": (lambda: StackDataset(a=Rows(), b=Rows()), lambda dataset: dataset.datasets["b"]),
    "chained": (lambda: ChainDataset([Lines(), Lines()]), lambda dataset: dataset.datasets[1]),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_a_worker_sets_is_its_own_and_the_data_are_shared(kind: str) -> None:
    """However deep it lies in torch's wrappers, which stay what they are."""
    make, within = WRAPPED[kind]
    dataset: Any = make()
    copied = private_copy(dataset)
    assert type(copied) is type(dataset)
    within(copied).session = object()
    assert not hasattr(within(dataset), "session")
    assert within(copied).rows is within(dataset).rows


def test_what_cannot_be_copied_is_shared() -> None:
    """A dataset may refuse."""

    class Refusing(Rows):
        def __copy__(self) -> Any:
            raise TypeError

    dataset = Refusing()
    assert private_copy(dataset) is dataset


class CountsItself:
    """An async stream whose place is its own, and which takes its time to go back to the beginning."""

    def __init__(self) -> None:
        self.at = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            while self.at < 5000:
                self.at += 1
                yield self.at
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            self.at = 0


def test_a_run_waits_for_the_end_of_one_that_was_left_over_the_same_dataset() -> None:
    """Whoever leaves an epoch and begins the next at once begins at the beginning."""
    loader = DataLoader(CountsItself(), batch_size=2)
    for _ in range(3):
        iterator = iter(loader)
        assert next(iterator).tolist() == [1, 2]
        del iterator
    iterator = iter(loader)
    assert next(iterator).tolist() == [1, 2]
    iterator.close()  # type: ignore[attr-defined]


class Nobody:
    """To whom nothing that a worker says matters."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def test_workers_that_end_before_they_begin_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for themselves nor for each other, though all are about to close the same dataset."""
    monkeypatch.setattr(local_worker, "_HANDOVER_S", 2 * PATIENCE_S)
    async with aiter(DataLoader(CountsItself(), batch_size=2)) as iterator:
        spec, epoch = iterator._worker_spec(), inside.run(iterator).epoch
    loop = GuardedLoop(asyncio.get_running_loop())
    workers = [LocalWorker(number, loop, Nobody(), on_thread=False) for number in range(2)]
    for worker in workers:
        worker.start(spec, epoch)
        worker.end(2 * PATIENCE_S)
    await until(lambda: not any(worker.is_alive for worker in workers))
