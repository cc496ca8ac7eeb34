"""Pinning on its side thread, with a copy function of the tests' own in place of page-locked memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.engine.finisher import Finisher
from asyncloader.loops import GuardedLoop
from asyncloader.run.worker_iterator import WorkerIterator
from tests.support import inside
from tests.support.patience import wait_until
from tests.support.pins import pins


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is the tensor i."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Large(Numbers):
    """Samples large enough for shared memory."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100_000,), float(index))


class Pinning(WorkerIterator[Any]):
    """An iterator that pins with a given function."""

    copy: Callable[[Any], Any]

    def _make_finisher(self, loop: GuardedLoop) -> Finisher:
        return pins(loop, type(self).copy)


def pinned(copy: Callable[[Any], Any], dataset: Any = None, **options: Any) -> Pinning:
    """Begin to iterate over batches of 4 of the dataset, pinned by ``copy``."""
    kind = type("Pinning", (Pinning,), {"copy": staticmethod(copy)})
    loader = DataLoader(dataset or Numbers(), batch_size=4, num_workers=2, **options)
    return inside.iterator_of(kind, loader)


def test_batches_are_copied_on_a_thread_beside_the_consumer_and_the_loop() -> None:
    """Every batch goes through the copy, in order, on one thread that is neither the consumer's nor the loop's."""
    threads: set[str] = set()

    def copy(batch: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return batch + 1000

    with pinned(copy) as batches:
        assert torch.cat(list(batches)).tolist() == [1000 + i for i in range(40)]
    assert threads == {"asyncloader finish"}


def test_async_for_gets_pinned_batches_in_order() -> None:
    """The async face gets the copies as well."""

    async def collect() -> list[int]:
        async with pinned(lambda batch: batch * 2) as batches:
            return torch.cat([batch async for batch in batches]).tolist()

    assert asyncio.run(collect()) == [2 * i for i in range(40)]


def test_an_error_in_the_copy_comes_in_the_place_of_its_batch() -> None:
    """What the copy raises is raised for its batch, with torch's words; the batches around it arrive."""

    def copy(batch: torch.Tensor) -> torch.Tensor:
        if 12 in batch:
            raise RuntimeError("no page-locked memory")
        return batch

    seen: list[Any] = []
    notes: list[str] = []
    with pinned(copy) as batches:
        while len(seen) < 10:
            try:
                seen.append(next(batches).tolist())
            except RuntimeError as error:
                notes += error.__notes__
                seen.append(str(error))
    assert any("in pin memory thread for device" in note for note in notes)
    assert seen == [
        "no page-locked memory" if first == 12 else list(range(first, first + 4)) for first in range(0, 40, 4)
    ]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_copy_that_is_slow_holds_up_no_worker(in_order: bool) -> None:
    """While the first copy is held back, workers go on; once it is let go, everything arrives."""
    others_are_made, let_go = threading.Event(), threading.Event()

    def copy(batch: torch.Tensor) -> torch.Tensor:
        if 0 in batch:
            assert others_are_made.wait(30)
            let_go.set()
        return batch

    batches = pinned(copy, in_order=in_order)
    with batches:
        scheduler = inside.run(batches).scheduler
        deadline = threading.Event()
        while sum(map(len, scheduler.in_flight.values())) and not deadline.wait(0.01):
            pass  # the window is made although nothing of it has been pinned
        others_are_made.set()
        seen = torch.cat(list(batches)).tolist()
    assert let_go.is_set()
    assert sorted(seen) == list(range(40))
    assert not in_order or seen == list(range(40))


def test_the_slab_is_free_once_the_copy_is_made() -> None:
    """Kept copies hold no shared memory: the values stay right while slabs are used again."""
    with pinned(lambda batch: batch.clone(), dataset=Large()) as batches:
        kept = list(batches)
    assert [int(row[0]) for batch in kept for row in batch] == list(range(40))
    assert all((row == row[0]).all() for batch in kept for row in batch)


def test_breaking_off_ends_the_pin_thread() -> None:
    """After close no side thread is left."""
    batches = pinned(lambda batch: batch)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncloader finish"]


def test_dropping_the_iterator_ends_the_pin_thread() -> None:
    """The reference count alone suffices."""
    batches = pinned(lambda batch: batch)
    next(batches)
    del batches
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "asyncloader finish"])
