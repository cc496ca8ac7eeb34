"""`shutdown()`: the background thread ends while nobody needs it, and comes back with the next loader."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import psutil
import pytest
import torch

import asyncloader
from asyncloader import ConfigurationError, DataLoader
from asyncloader.engine.portal import get_portal
from asyncloader.transport.slab import slab_pool
from asyncloader.typing import AsyncDataset
from tests.forks import forked

DATA = [torch.full((1 << 16,), float(number)) for number in range(8)]


pytestmark = [
    pytest.mark.leaks("the background thread is another one than before"),
    pytest.mark.usefixtures("another_thread"),
]


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def shut_down() -> None:
    asyncloader.shutdown()
    assert "asyncloader" not in names()


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_left_early", [False, True])
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_after_an_epoch(backend: str, is_left_early: bool) -> None:
    """Workers that are about to end are waited for: nothing of ours is left, and the next loader works."""
    descriptors = psutil.Process().num_fds()
    for _ in range(3):
        shut_down()
        assert psutil.Process().num_fds() < descriptors
        batches = []
        for batch in DataLoader(DATA, num_workers=2, worker_backend=backend):  # type: ignore[arg-type]
            batches.append(batch)
            if is_left_early and len(batches) == 2:
                break
        assert [float(batch[0, 0]) for batch in batches] == list(range(len(batches)))
        del batch, batches
    assert "asyncloader" in names()


def test_twice_and_before_the_first_loader() -> None:
    """There is nothing to be done then."""
    shut_down()
    shut_down()


def test_memory_is_given_back() -> None:
    """What is free, at once; batches that are kept stay as they are, and go with the next loader."""
    gc.collect()  # of iterators that other tests have left early
    kept = list(DataLoader(DATA, num_workers=2))[1:3]
    shut_down()
    assert slab_pool().reserved_bytes == slab_pool().leased_bytes
    assert [float(batch[0, 0]) for batch in kept] == [1.0, 2.0]
    kept.clear()
    list(DataLoader(DATA, num_workers=2))
    shut_down()
    assert slab_pool().reserved_bytes == 0


def test_it_refuses_while_an_iterator_is_alive() -> None:
    """And harms nothing; closed ones do not count."""
    loader = DataLoader(DATA, num_workers=1, persistent_workers=True)
    for _ in range(2):
        iterator = iter(loader)
        assert float(next(iterator)[0, 0]) == 0.0
        with pytest.raises(ConfigurationError, match=r"1 iterators of loaders are alive: close them"):
            asyncloader.shutdown()
        assert [float(batch[0, 0]) for batch in iterator] == list(range(1, 8))
    with pytest.raises(ConfigurationError, match=r"close them"):
        asyncloader.shutdown()
    loader.close()
    shut_down()


def test_it_refuses_while_something_blocks_the_thread() -> None:
    """It says what; and loaders that begin meanwhile need not wait for it."""
    list(DataLoader(DATA, num_workers=1))
    portal, go_on = get_portal(), threading.Event()
    portal.post(go_on.wait)
    errors: list[Any] = []

    def refused() -> None:
        with pytest.raises(ConfigurationError) as caught:
            asyncloader.shutdown()
        errors.append(str(caught.value))

    thread = threading.Thread(target=refused)
    thread.start()
    while thread.is_alive():
        assert get_portal() is portal
        thread.join(0.05)
    go_on.set()
    assert "blocks the event loop" in errors[0]
    assert "wait" in errors[0]
    assert len(list(DataLoader(DATA, num_workers=1))) == len(DATA)


def test_it_refuses_on_the_thread_itself() -> None:
    """Which would wait for its own end."""
    error = get_portal().call(asyncloader.shutdown).exception(10)
    assert isinstance(error, ConfigurationError)


class Shutting(AsyncDataset[int]):
    """Shuts down while it is awaited."""

    def __len__(self) -> int:
        return 1

    async def __getitem__(self, index: int) -> int:
        with pytest.raises(ConfigurationError):
            await asyncio.to_thread(asyncloader.shutdown)
        return index


def test_it_refuses_while_a_dataset_is_awaited_there() -> None:
    """Without workers samples are awaited on that loop."""
    assert [batch.tolist() for batch in DataLoader(Shutting())] == [[0]]


def test_a_forked_child_has_its_own() -> None:
    """What it ends is not the parent's."""
    list(DataLoader(DATA, num_workers=1))

    def use_its_own() -> None:
        asyncloader.shutdown()
        assert "asyncloader" not in names()
        loader = DataLoader(range(8), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
        assert len(list(loader)) == 8

    assert forked(use_its_own).wait() == 0
    assert "asyncloader" in names()
    assert get_portal().call(lambda: 7).result(5) == 7
