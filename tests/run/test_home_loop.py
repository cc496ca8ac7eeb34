"""Async datasets without workers that hold objects of the application's own event loop: they run on that loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from torch.utils.data import ChainDataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.backends.threads import worker as local_worker
from asyncloader.engine.portal import get_portal
from asyncloader.errors import LoaderClosedError
from asyncloader.run.home_loop import bound_objects, find_home
from tests.patience import PATIENCE_S, until

COUNT = 12
sources: list[list[asyncio.Queue[int]]] = []
GLOBAL_QUEUE: asyncio.Queue[int | None] = asyncio.Queue()


async def items(get: Callable[[], Any]) -> AsyncIterator[tuple[int, int]]:
    while (item := await get()) is not None:
        yield item, threading.get_ident()


class FromQueue:
    def __init__(self, queue: asyncio.Queue[int | None]) -> None:
        self.queue = queue

    def __aiter__(self) -> AsyncIterator[tuple[int, int]]:
        return items(self.queue.get)


class FromSource:
    """Holds the queue a few levels in."""

    def __init__(self, queue: asyncio.Queue[int | None]) -> None:
        self.sources = [{"get": partial(queue.get)}]

    def __aiter__(self) -> AsyncIterator[tuple[int, int]]:
        return items(self.sources[0]["get"])


class FromGlobal:
    def __aiter__(self) -> AsyncIterator[tuple[int, int]]:
        return items(GLOBAL_QUEUE.get)


def from_closure(queue: asyncio.Queue[int | None]) -> Any:
    class Closed:
        def __aiter__(self) -> AsyncIterator[tuple[int, int]]:
            return items(queue.get)

    return Closed()


def from_chain(queue: asyncio.Queue[int | None]) -> Any:
    DataLoader(FromQueue(queue))  # torch is told that it is iterable
    dataset: Any = FromQueue(queue)
    return ChainDataset([dataset])


class Key:
    """A map-style dataset whose samples wait for a future of somebody's."""

    def __init__(self, futures: list[asyncio.Future[int]]) -> None:
        self.futures = futures

    def __len__(self) -> int:
        return len(self.futures)

    async def __getitem__(self, index: int) -> tuple[int, int]:
        return await self.futures[index], threading.get_ident()


async def produce(queue: asyncio.Queue[int | None]) -> None:
    """Fill a queue that soon is full, as a task beside the training does."""
    for item in (*range(COUNT), None):
        await queue.put(item)


@pytest.mark.parametrize("make", [FromQueue, FromSource, from_closure, from_chain])
async def test_a_queue_of_the_application_is_read_on_its_loop(make: Callable[[Any], Any]) -> None:
    """Every item comes: this used to wait for ever, for a background loop that nobody wakes."""
    queue: asyncio.Queue[int | None] = asyncio.Queue(2)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(produce(queue))
        batches = [batch async for batch in DataLoader(make(queue), batch_size=4, collate_fn=list)]
    samples = [sample for batch in batches for sample in batch]
    assert [number for number, _ in samples] == list(range(COUNT))
    assert {thread for _, thread in samples} == {threading.get_ident()}


async def test_a_queue_that_methods_know_as_a_global_is_found() -> None:
    """As scripts have it."""
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(produce(GLOBAL_QUEUE))
        batches = [batch async for batch in DataLoader(FromGlobal(), batch_size=None)]
    assert [number for number, _ in batches] == list(range(COUNT))


async def test_futures_of_the_application_are_awaited_on_its_loop() -> None:
    """By the samples of a map-style dataset."""
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(COUNT)]
    for number, future in enumerate(futures):
        loop.call_later(0.001, future.set_result, number)
    async with asyncio.timeout(PATIENCE_S):
        batches = [batch async for batch in DataLoader(Key(futures), batch_size=4, collate_fn=list)]
    assert [number for batch in batches for number, _ in batch] == list(range(COUNT))


async def test_a_run_that_is_left_is_over_before_the_next_one_begins() -> None:
    """`break` leaves a task on the caller's loop, which ends the dataset before another run reads it."""
    queue: asyncio.Queue[int | None] = asyncio.Queue(1)
    open_now: list[int] = []

    class Counted(FromQueue):
        async def __aiter__(self) -> AsyncIterator[int]:  # type: ignore[override]
            open_now.append(1)
            assert len(open_now) == 1
            try:
                while (item := await self.queue.get()) is not None:
                    yield item
            finally:
                open_now.pop()

    async def give() -> None:
        while True:
            await queue.put(1)

    loader: Any = DataLoader(Counted(queue), batch_size=None)
    async with asyncio.timeout(PATIENCE_S):
        giving = asyncio.create_task(give())
        for _ in range(3):
            async for item in loader:
                assert item == 1
                break
        loader.close()  # on the very loop: it cannot be waited for here
        await until(lambda: not open_now)
        giving.cancel()


async def test_for_on_the_loop_that_the_dataset_needs_is_refused() -> None:
    """It would block that loop for ever; in a thread it works."""
    future = asyncio.get_running_loop().create_future()
    loader = DataLoader(Key([future]), batch_size=None)
    with pytest.raises(ConfigurationError, match="use `async for`"):
        iter(loader)
    iterator = await asyncio.to_thread(iter, loader)
    with pytest.raises(ConfigurationError, match="use `async for`"):
        next(iterator)
    future.set_result(7)
    assert [number for number, _ in await asyncio.to_thread(list, iterator)] == [7]


def test_consumers_elsewhere_learn_that_the_loop_has_ended() -> None:
    """What waits for a batch gets an error when the loop of the dataset is over, and does not wait for ever."""
    raised: list[BaseException] = []
    consumers: list[threading.Thread] = []

    def consume(loader: Any) -> None:
        try:
            list(loader)
        except BaseException as error:
            raised.append(error)

    async def serve() -> None:
        waiting = asyncio.get_running_loop().create_future()
        dataset = Key([waiting])
        consumers.append(threading.Thread(target=consume, args=(DataLoader(dataset),)))
        consumers[0].start()
        await until(lambda: waiting._callbacks)  # type: ignore[attr-defined]  # the sample awaits it

    asyncio.run(serve())
    consumers[0].join(PATIENCE_S)
    assert [type(error) for error in raised] == [LoaderClosedError]
    assert "the event loop that the dataset ran on" in str(raised[0])


async def test_a_dataset_with_objects_of_its_own_stays_on_the_background_loop() -> None:
    """Locks and semaphores limit its own samples; and there they overlap with a trainer that blocks its loop."""

    class Limited:
        def __init__(self) -> None:
            self.limit = asyncio.Semaphore(2)
            self.lock = asyncio.Lock()

        def __len__(self) -> int:
            return COUNT

        async def __getitem__(self, index: int) -> int:
            async with self.limit, self.lock:
                await asyncio.sleep(0)
                return threading.get_ident()

    dataset: Any = Limited()
    for _ in range(2):  # the second time they belong to the background loop
        found = {thread async for thread in DataLoader(dataset, batch_size=None)}
        assert found == {get_portal().call(threading.get_ident).result(PATIENCE_S)}


async def test_what_is_not_found_does_not_wait_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line says where the dataset runs, what it waits for, and what to do; once."""
    monkeypatch.setattr(local_worker, "_SILENT_S", 0.05)
    queue: asyncio.Queue[int] = asyncio.Queue()
    sources.append([queue])

    class Hidden:
        async def __aiter__(self) -> AsyncIterator[int]:
            while True:
                yield await sources[0][0].get()

    assert find_home(Hidden(), get_portal().loop) is None
    async with aiter(DataLoader(Hidden(), batch_size=2)) as iterator:
        waiting = asyncio.ensure_future(anext(iterator))
        await until(lambda: caplog.records)
        waiting.cancel()
    sources.clear()
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "runs on the background event loop" in record.getMessage()
    assert "await sources[0]" in record.getMessage()


def test_where_it_is_found_is_told() -> None:
    """As a path from the dataset; nothing is called for it."""

    class Touchy:
        def __init__(self) -> None:
            self.inner = {"events": [asyncio.Event()]}

        @property
        def never(self) -> Any:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    assert [bound.path for bound in bound_objects(Touchy())] == ["inner.events.0"]


def test_a_loop_that_has_ended_is_nobodys_home() -> None:
    """A session that was left open on a loop of the past is no reason to go there."""

    async def make() -> Any:
        dataset: Any = FromQueue(asyncio.Queue())
        dataset.left = asyncio.get_running_loop().create_future()
        return dataset

    dataset = asyncio.run(make())
    assert find_home(dataset, get_portal().loop) is None
