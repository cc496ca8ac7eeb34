"""Puts of tasks in another process: those of one turn of their loop travel together, and each is in once, or not."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedClosedError
from asyncloader.online.handle import Connection
from tests.support.patience import until


def taken(feed: Feed[Any]) -> tuple[list[Any], threading.Thread]:
    """Have a thread take all batches; return where their samples come."""
    found: list[Any] = []

    def take() -> None:
        for batch in DataLoader(feed, collate_fn=list):
            found.extend(batch)

    thread = threading.Thread(target=take)
    thread.start()
    return found, thread


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What connections of this process call."""
    found: list[tuple[str, Any]] = []
    call: Callable[..., None] = Connection.call

    def noted(connection: Any, request: Any, name: str, *arguments: Any) -> None:
        found.append((name, arguments))
        call(connection, request, name, *arguments)

    monkeypatch.setattr(Connection, "call", noted)
    return found


async def test_the_puts_of_one_turn_are_one_message(calls: list[tuple[str, Any]]) -> None:
    """With version, cost and priority of each."""
    feed = Feed(batch_size=8, max_samples=80, order="priority", fn=tuple)
    feed.version = 3
    handle = feed.handle()
    await asyncio.gather(*(handle.put(n, version=n % 4, cost=n + 1, priority=n) for n in range(64)))
    assert [name for name, _ in calls] == ["put"]
    units = feed._server.ledger.units.values()
    assert [(*unit.samples, unit.version, unit.cost) for unit in units] == [(n, n % 4, n + 1) for n in range(64)]
    feed.close()
    values = [sample[0] for batch in DataLoader(feed, collate_fn=list) for sample in batch]
    assert values == [*range(63, -1, -1)]


@pytest.mark.parametrize("room", [1, 3, 64, 1000])
async def test_many_tasks(room: int) -> None:
    """Each sample comes once, in the order in which its task has put it, whatever room there is."""
    feed = Feed(batch_size=1, max_samples=room)
    handle = feed.handle()
    found, thread = taken(feed)

    async def put(task: int) -> None:
        for number in range(20):
            await handle.put((task, number))

    await asyncio.gather(*map(put, range(40)))
    feed.close()
    await asyncio.to_thread(thread.join, 20)
    assert len(found) == 800
    for task in range(40):
        assert [number for owner, number in found if owner == task] == [*range(20)]


async def test_a_task_whose_sample_is_in_goes_on() -> None:
    """Although others of its turn wait for room; and all who wait are counted."""
    feed = Feed(batch_size=2, max_samples=5)
    handle = feed.handle()
    tasks = [asyncio.create_task(handle.put(n)) for n in range(12)]
    await until(lambda: sum(task.done() for task in tasks) == 5)
    await until(lambda: feed.stats().producers_waiting == 7)
    assert [task.done() for task in tasks] == [True] * 5 + [False] * 7
    late = [asyncio.create_task(handle.put(n)) for n in range(12, 20)]
    await until(lambda: feed.stats().producers_waiting == 15)
    found, thread = taken(feed)
    await asyncio.gather(*tasks, *late)
    feed.close()
    await asyncio.to_thread(thread.join, 20)
    assert sorted(found) == [*range(20)]


class Unreadable:
    """Can be pickled, and not made again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("sample", "details", "error"),
    [
        (0, {"version": 9}, ValueError),
        (0, {"cost": float("nan")}, ValueError),
        (lambda: None, {}, Exception),
        (Unreadable(), {}, RuntimeError),
    ],
    ids=["version", "cost", "pickle", "unpickle"],
)
async def test_an_error_is_that_of_one_put(sample: Any, details: dict[str, Any], error: type[Exception]) -> None:
    """The others of its turn are in, once."""
    feed = Feed(batch_size=1, max_samples=100)
    handle = feed.handle()
    bad = handle.put(sample, **details)
    results = await asyncio.gather(
        *map(handle.put, range(5)), bad, *map(handle.put, range(5, 9)), return_exceptions=True
    )
    assert [type(result) for result in results[:5] + results[6:]] == [type(None)] * 9
    assert isinstance(results[5], error)
    feed.close()
    assert sorted(value for batch in DataLoader(feed) for value in batch.tolist()) == [*range(9)]


async def test_a_feed_that_is_closed() -> None:
    """All who wait are told, and what is in is trained."""
    feed = Feed(batch_size=1, max_samples=3)
    handle = feed.handle()
    tasks = [asyncio.create_task(handle.put(n)) for n in range(10)]
    await until(lambda: feed.stats().producers_waiting == 7)
    feed.close("enough")
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    closed = [result for result in results if isinstance(result, FeedClosedError)]
    assert [str(error) for error in closed] == ["the feed takes no more: enough"] * 7
    assert [batch.tolist() for batch in DataLoader(feed)] == [[n] for n, result in enumerate(results) if result is None]


async def test_a_connection_that_ends() -> None:
    """Whoever waits for an answer is told, and so is whoever has not sent yet."""
    feed = Feed(batch_size=1, max_samples=1)
    handle = feed.handle()
    await handle.put(0)
    tasks = [asyncio.create_task(handle.put(n)) for n in range(3)]
    await until(lambda: feed.stats().producers_waiting == 3)
    tasks += [asyncio.create_task(handle.put(n)) for n in range(3)]  # they wait for the answer to those before
    await asyncio.sleep(0)
    feed._server._door.end()  # type: ignore[union-attr]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert [type(result) for result in results] == [FeedClosedError] * 6
    feed.close()


@pytest.mark.parametrize("room", [2, 50])
@pytest.mark.parametrize("seed", range(3))
async def test_puts_that_are_cancelled(room: int, seed: int) -> None:
    """At any moment: a sample is in if, and only if, its put has returned."""
    feed = Feed(batch_size=1, max_samples=room)
    handle, draws, told = feed.handle(), random.Random(seed), Counter[int]()
    found, thread = taken(feed)

    async def put(sample: int) -> None:
        limit = draws.choice([0, 0, 0.001, 0.003, 10])
        while True:
            for _ in range(draws.randint(0, 3)):
                await asyncio.sleep(0)
            try:
                async with asyncio.timeout(limit):
                    await handle.put(sample)
                    told[sample] += 1
                return
            except TimeoutError:
                limit = limit * 2 + 0.001

    async def put_until_cancelled(sample: int) -> None:
        await handle.put(sample)
        told[sample] += 1

    tasks = []
    for number in range(100):
        cancelled = asyncio.create_task(put_until_cancelled(1000 + number))
        tasks += [asyncio.create_task(put(number)), cancelled]
        if draws.random() < 0.8:
            asyncio.get_running_loop().call_later(draws.choice([0, 0, 0.001, 0.01]), cancelled.cancel)
        if number % 10 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 40)
    feed.close()
    await asyncio.to_thread(thread.join, 20)
    assert Counter(found) == told
    assert set(range(100)) <= set(told)


def test_two_loops_after_each_other_and_at_once() -> None:
    """Each has its own turns; a loop that was closed holds nothing up."""
    feed = Feed(batch_size=1, max_samples=1000)
    handle = feed.handle()

    async def put(first: int) -> None:
        await asyncio.gather(*map(handle.put, range(first, first + 50)))

    async def leave() -> None:
        task = asyncio.create_task(handle.put("left"))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(put(0))
    asyncio.run(leave())
    threads = [threading.Thread(target=asyncio.run, args=(put(first),)) for first in (50, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    feed.close()
    found = [batch[0] for batch in DataLoader(feed, collate_fn=list)]
    assert sorted(value for value in found if value != "left") == [*range(150)]
    assert found.count("left") <= 1


async def test_large_samples_are_sent_twice_at_most(calls: list[tuple[str, Any]]) -> None:
    """However little room there is: those for which there was none wait at the feed."""
    feed = Feed(batch_size=1, max_samples=1)
    handle = feed.handle()
    found, thread = taken(feed)
    await asyncio.gather(*(handle.put(np.full(100_000, number)) for number in range(16)))
    feed.close()
    await asyncio.to_thread(thread.join, 20)
    assert sorted(int(array[0]) for array in found) == [*range(16)]
    sent = Counter(int(unit[0][0]) for name, (units,) in calls if name == "put" for unit in units)
    assert max(sent.values()) <= 2
