"""Where items come from: sources that are waited for, and the place in them that states have."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.online import Feed, FeedClosedError
from tests.online.test_feed import WORKERS, fill, produce
from tests.support.patience import wait_until


class Numbers:
    """Counts, says where it is, and which numbers it was asked for."""

    def __init__(self, length: int) -> None:
        self.at, self.length = 0, length
        self.asked: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def _next(self) -> int:
        self.asked.append(self.at)
        self.at += 1
        return self.at - 1


class AsyncNumbers(Numbers):
    """The same, for ``async for``."""

    async def __aiter__(self) -> AsyncIterator[int]:
        while self.at < self.length:
            await asyncio.sleep(0)
            yield self._next()


class PlainNumbers(Numbers):
    """The same, for ``for``."""

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            yield self._next()


class StreamNumbers(PlainNumbers, IterableDataset[int]):
    """The same, as a stream that is read ahead."""


async def numbers(length: int) -> AsyncIterator[int]:
    """Count, without a state."""
    for number in range(length):
        yield number


STATELESS = [lambda: range(30), lambda: numbers(30), lambda: lambda: numbers(30)]
STATEFUL = [lambda: PlainNumbers(30), lambda: StreamNumbers(30), lambda: AsyncNumbers(30)]


def readers() -> list[threading.Thread]:
    """The threads that read sources."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncloader stream")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("source", STATELESS + STATEFUL)
async def test_each_item_is_leased_once(source: Any, options: dict[str, Any]) -> None:
    """From whatever gives them, within the bound, to the end; then no thread is left."""
    feed = Feed(source(), batch_size=4, max_staleness=1)
    tasks = [asyncio.create_task(produce(feed)) for _ in range(5)]
    values = []
    async for batch in DataLoader(feed, **options):
        values += batch.tolist()
        feed.version += 1
    await asyncio.gather(*tasks)
    assert sorted(values) == [*range(30)]
    wait_until(lambda: not readers())


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("before", "after"), [*itertools.product(STATELESS, STATELESS), *itertools.product(STATEFUL, STATEFUL)]
)
@pytest.mark.parametrize("leased", [0, 1, 9, 30])
def test_a_state_has_the_place(before: Any, after: Any, leased: int) -> None:
    """Of each kind of source, for each kind: nothing is left out, and nothing comes twice."""
    feed = Feed(before(), batch_size=2, max_samples=40)
    fill(feed, leased)
    state = pickle.loads(pickle.dumps(feed.state_dict()))
    feed.close()
    again = Feed(after(), batch_size=2, max_samples=40)
    again.load_state_dict(state)
    with pytest.raises(FeedClosedError, match="the source has ended"):
        fill(again, 31)
    assert torch.cat(list(DataLoader(again))).tolist() == [*range(30)]
    wait_until(lambda: not readers())


@pytest.mark.parametrize("kind", [PlainNumbers, StreamNumbers, AsyncNumbers])
def test_a_source_with_a_state_is_not_read_again(kind: Any) -> None:
    """What was leased before is not asked for, or no more of it than the last state of a stream says."""
    source = kind(2000)
    feed = Feed(source, batch_size=2, max_samples=2000)
    fill(feed, 1500)
    state = feed.state_dict()
    feed.close()
    again = kind(2000)
    resumed = Feed(again, batch_size=2, max_samples=2000)
    resumed.load_state_dict(state)
    with resumed.lease() as item:
        assert item.value == 1500
        item.drop()
    resumed.close()
    assert 0 < min(again.asked) <= 1500


async def test_whoever_leases_waits_for_the_source() -> None:
    """Several producers, and one that is cancelled: no item is lost. Others are not held up meanwhile."""
    gate = threading.Semaphore(0)

    class Slow(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            for number in itertools.count():
                if not gate.acquire(timeout=20) or number == 4:
                    return
                yield number

    feed = Feed(Slow(), batch_size=1, max_samples=8)
    leased: list[int] = []

    async def lease() -> None:
        async with feed.lease() as item:
            leased.append(item.value)
            await item.put(item.value)

    tasks = [asyncio.create_task(lease()) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert feed.stats().producers_waiting == 5
    tasks[0].cancel()
    feed.put_nowait(100)
    batches = aiter(DataLoader(feed))
    assert (await anext(batches)).tolist() == [100]
    for number in range(4):
        gate.release()
        assert (await anext(batches)).tolist() == [number]
    await asyncio.gather(*tasks[1:])
    assert tasks[0].cancelled()
    assert leased == [0, 1, 2, 3]
    last = asyncio.create_task(lease())
    gate.release()
    with pytest.raises(FeedClosedError, match="the source has ended, and all its items are settled"):
        await asyncio.wait_for(last, 20)
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


async def test_the_end_of_a_feed_wakes_those_who_wait_for_its_source() -> None:
    """And a source that waits for ever, on a loop of its own, is left."""

    async def never() -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 0

    feed = Feed(never(), batch_size=1)
    task = asyncio.create_task(feed.lease().__aenter__())
    await asyncio.sleep(0.01)
    feed.close("enough")
    with pytest.raises(FeedClosedError, match="enough"):
        await asyncio.wait_for(task, 20)
    wait_until(lambda: not readers())
    dropped = Feed(never(), batch_size=1)
    task = asyncio.create_task(dropped.lease().__aenter__())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    del dropped, task
    wait_until(lambda: not readers())


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stream_that_raises(is_async: bool) -> None:
    """Whoever leases is told, and a resumed run asks for that item again."""

    async def asynchronously() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        raise OSError("no more prompts")

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(3)
            raise OSError("no more prompts")

    feed = Feed(asynchronously() if is_async else Stream(), batch_size=3)
    with pytest.raises(OSError, match="no more prompts"):
        await produce(feed)
    state = feed.state_dict()
    assert torch.cat([await anext(aiter(DataLoader(feed)))]).tolist() == [0, 1, 2]
    wait_until(lambda: not readers())
    resumed = Feed(numbers(5), batch_size=5, max_samples=8)
    resumed.load_state_dict(state)
    await produce(resumed)
    assert torch.cat(list(DataLoader(resumed))).tolist() == [*range(5)]


@pytest.mark.parametrize("source", [lambda: iter(range(9)), lambda: (n for n in range(9)), lambda: numbers(9)])
def test_a_generator_that_was_read_cannot_be_read_again(source: Any) -> None:
    """The state is refused: items would be left out. In a new process the same generator is fine."""
    feed = Feed(source(), batch_size=1)
    state = feed.state_dict()
    fill(feed, 2)
    with pytest.raises(ConfigurationError, match="an iterator that was read"):
        feed.load_state_dict(state)
    assert feed.stats().ready == 2
    feed.close()


class Curriculum:
    """A source that looks at its feed: when it is read, or where a state of it is taken or loaded."""

    def __init__(self, looks_in: str) -> None:
        self.feed: Any = None
        self.looks_in = looks_in

    def look(self, where: str) -> Any:
        """Look at the feed there, when it is there."""
        return self.feed.stats() if self.looks_in == where and self.feed is not None else None

    def __iter__(self) -> Curriculum:
        return self

    def __next__(self) -> int:
        self.look("next")
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return something."""
        self.look("state_dict")
        return {"some": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.look("load_state_dict")


@pytest.mark.parametrize("looks_in", ["next", "state_dict", "load_state_dict"])
def test_a_source_that_uses_its_feed(looks_in: str) -> None:
    """None of its code runs while the feed is locked."""
    source = Curriculum(looks_in)
    feed = source.feed = Feed(source, batch_size=1)
    for _ in range(2):
        with feed.lease() as item:
            item.put(item.value)
        feed.load_state_dict(feed.state_dict())
    assert feed.stats().ready == 2
    feed.close()


async def test_an_async_source_that_raises_as_if_it_were_cancelled() -> None:
    """It is an error of the source, as any other: nobody waits for more."""

    async def source() -> AsyncIterator[int]:
        yield 0
        raise asyncio.CancelledError

    feed = Feed(source, batch_size=1)
    async with asyncio.timeout(20):
        async with feed.lease() as item:
            await item.put(item.value)
        with pytest.raises((RuntimeError, FeedClosedError), match=r"CancelledError|source has raised"):
            async with feed.lease():
                pass
        async with aiter(DataLoader(feed)) as batches:
            assert (await anext(batches)).tolist() == [0]
            with pytest.raises(FeedClosedError, match="source has raised"):
                await anext(batches)
