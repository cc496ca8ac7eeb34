"""What goes with a loader that is dropped: the dataset and its copies, and what they have open, with no collection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from asyncloader import DataLoader
from tests.support.patience import wait_until

WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "concurrency": {"concurrency": 4},
    "threads": {"num_workers": 2, "worker_backend": "thread"},
    "threads with concurrency": {"num_workers": 2, "worker_backend": "thread", "concurrency": 4},
    "threads that stay": {"num_workers": 2, "worker_backend": "thread", "persistent_workers": True},
    "processes": {"num_workers": 1, "worker_backend": "process"},
}


class Noted:
    """Samples that are their keys; the dataset and each copy of it are noted."""

    def __init__(self, there: weakref.WeakSet[Noted]) -> None:
        self.there = there
        there.add(self)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, key: int) -> int:
        if key == 9:
            raise ValueError(key)
        return key

    def __copy__(self) -> Noted:
        return type(self)(self.there)


class NotedAsync(Noted):
    """The same, awaited."""

    async def getitem(self, key: int) -> int:
        """Return a sample."""
        await asyncio.sleep(0)
        return self[key]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection, until the test is over."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def read(loader: Any, num_batches: int) -> None:
    """Take so many batches, and leave."""
    for number, _ in enumerate(loader, 1):
        if number == num_batches:
            break


async def aread(loader: Any, num_batches: int) -> None:
    """Take as many in a loop of one's own."""
    number = 0
    async for _ in loader:
        number += 1
        if number == num_batches:
            break


@pytest.mark.covering(2)
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("face", ["for", "async for"])
@pytest.mark.parametrize("kind", [Noted, NotedAsync])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_goes_with_the_loader(workers: str, kind: type[Noted], face: str) -> None:
    """After a whole epoch, one that was left, and one that failed: a dataset may have connections and files open."""
    there = weakref.WeakSet[Noted]()
    for num_batches, keys in ((4, range(8)), (1, range(8)), (4, range(12)), (1, range(9))):
        loader: Any = DataLoader(kind(there), batch_size=2, sampler=keys, **WORKERS[workers])  # type: ignore[arg-type]
        with contextlib.suppress(ValueError):
            if face == "for":
                read(loader, num_batches)
            else:
                asyncio.run(aread(loader, num_batches))
        del loader
        wait_until(lambda: not there)


class Late(Noted):
    """The first sample of the second batch comes late, and the second one raises meanwhile."""

    goes_on, has_raised = threading.Event(), threading.Event()

    def __getitem__(self, key: int) -> int:
        if key == 2:
            self.goes_on.wait(20)
        if key == 3:
            self.has_raised.set()
            raise ValueError(key)
        return key


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("workers", ["concurrency", "threads with concurrency"])
def test_a_dataset_goes_though_a_batch_that_nobody_waits_for_has_an_error(workers: str) -> None:
    """The error refers to frames that have the batch, which has the error."""
    Late.goes_on.clear()
    Late.has_raised.clear()
    there = weakref.WeakSet[Noted]()
    loader: Any = DataLoader(Late(there), batch_size=2, **WORKERS[workers])  # type: ignore[arg-type]
    for _ in loader:
        assert Late.has_raised.wait(20)
        time.sleep(0.05)  # the worker hears of it
        break
    del loader
    Late.goes_on.set()
    wait_until(lambda: not there)
