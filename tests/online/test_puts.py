"""Puts ahead: a task in another process goes on before its sample is in. Each is in once, or somebody is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing as mp
import os
import random
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedClosedError, FeedHandle
from asyncloader.online.handle import Connection
from tests.support.patience import until, wait_until


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


async def test_many_puts_are_few_messages(calls: list[tuple[str, Any]]) -> None:
    """With version, cost and priority of each."""
    feed = Feed(batch_size=8, max_samples=80, fn=tuple)
    feed.version = 3
    handle = feed.handle()
    puts = [handle.put(n, version=n % 4, cost=n + 1, priority=n) for n in range(64)]
    await puts[0]  # its answer gives room for the others
    with handle._connect().puts._lock:  # no answer is heard before all have put: each would let another message go
        await asyncio.gather(*puts[1:])
    await handle.flush()
    assert {name for name, _ in calls} == {"put"}
    assert len(calls) < 10
    units = feed._server.ledger.units.values()
    assert [(*unit.samples, unit.version, unit.cost) for unit in units] == [(n, n % 4, n + 1) for n in range(64)]
    feed.close()
    values = [sample[0] for batch in DataLoader(feed, collate_fn=list) for sample in batch]
    assert values == [*range(63, -1, -1)]


async def test_many_units_do_not_wait_for_an_answer(calls: list[tuple[str, Any]]) -> None:
    """The feed takes these while more are made: neither side waits for the other to have done its part."""
    feed = Feed(batch_size=8, max_samples=400)
    handle = feed.handle()
    await handle.put(0)
    with feed._server._lock:  # it answers nothing
        for number in range(1, 200):
            await handle.put(number)
        assert [len(units) for _, (units,) in calls] == [1, 1, 128]
    await handle.flush()
    assert feed.stats().ready == 200
    feed.close()


async def test_a_task_that_lets_nobody_else_run_is_heard() -> None:
    """What it puts comes at once, although its loop does not turn."""
    feed = Feed(batch_size=8, max_samples=80)
    handle = feed.handle()
    await handle.put(0)
    for number in range(1, 5):
        put = handle.put(number)
        with pytest.raises(StopIteration):
            put.send(None)
        wait_until(lambda: feed.stats().ready == number + 1)  # noqa: B023
    feed.close()


async def test_nothing_is_ahead_without_room() -> None:
    """All processes share what room there is; without any, a put waits."""
    feed = Feed(batch_size=8, max_samples=8)
    handles = [feed.handle(), feed.handle()]
    for handle in handles:
        await handle.put(0)
    await handles[0].flush()
    assert [handle._connect().puts._room for handle in handles] == [3, 3]
    await handles[0].put_many(range(3))
    await handles[0].flush()
    await handles[1].put_many(range(3))
    await handles[1].flush()
    await handles[0].flush()
    assert [handle._connect().puts._room for handle in handles] == [0, 0]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handles[0].put(9), 0.05)
    feed.close()
    assert len(next(iter(DataLoader(feed)))) == 8


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_sample_may_be_changed_when_it_was_put(size: int) -> None:
    """Small ones were pickled, large ones are in."""
    feed = Feed(batch_size=1, max_samples=80)
    handle, sample = feed.handle(), np.zeros(size)
    for number in range(20):
        sample[:] = number
        await handle.put(sample)
    await handle.flush()
    feed.close()
    assert [batch.unique().tolist() for batch in DataLoader(feed)] == [[number] for number in range(20)]


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
    await handle.flush()
    feed.close()
    await asyncio.to_thread(thread.join, 20)
    assert len(found) == 800
    for task in range(40):
        assert [number for owner, number in found if owner == task] == [*range(20)]


async def test_a_task_whose_sample_is_in_goes_on() -> None:
    """Although others wait for room."""
    feed = Feed(batch_size=2, max_samples=5)
    handle = feed.handle()
    tasks = [asyncio.create_task(handle.put(n)) for n in range(12)]
    await until(lambda: sum(task.done() for task in tasks) == 5)
    await until(lambda: feed.stats().producers_waiting == 1)
    assert [task.done() for task in tasks] == [True] * 5 + [False] * 7
    found, thread = taken(feed)
    await asyncio.gather(*tasks, *(handle.put(n) for n in range(12, 20)))
    await handle.flush()
    feed.close()
    await asyncio.to_thread(thread.join, 20)
    assert sorted(found) == [*range(20)]


class Unreadable:
    """Can be pickled, and not made again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("sample", "details", "error", "is_later"),
    [
        (0, {"version": 9}, ValueError, True),
        (0, {"cost": float("nan")}, ValueError, True),
        (lambda: None, {}, Exception, False),
        (Unreadable(), {}, RuntimeError, True),
    ],
    ids=["version", "cost", "pickle", "unpickle"],
)
async def test_an_error_is_raised_once(sample: Any, details: dict[str, Any], error: Any, is_later: bool) -> None:
    """By the put itself, or later; what was put before and afterwards is in, once."""
    feed = Feed(batch_size=1, max_samples=100)
    handle = feed.handle()
    await handle.put_many(range(5))
    if is_later:
        await handle.put(sample, **details)
        with pytest.raises(error):
            await handle.flush()
    else:
        with pytest.raises(error):
            await handle.put(sample, **details)
    await handle.put_many(range(5, 9))
    await handle.flush()
    feed.close()
    assert sorted(value for batch in DataLoader(feed) for value in batch.tolist()) == [*range(9)]


class Large:
    """A sample that says when it has gone."""


@pytest.mark.parametrize("how", ["put", "put_sync", "ahead"])
async def test_an_error_of_a_put_keeps_no_sample(how: str) -> None:
    """No frame that has the error is one of its own: what they hold goes with it, without a collection of garbage."""
    feed = Feed(batch_size=1, max_samples=100)
    handle = feed.handle()
    puts = {"put": feed.put, "put_sync": feed.put_sync, "ahead": handle.put}
    if how == "ahead":
        await handle.put(0)  # from now on it knows that there is room
        await handle.put(1, version=7)
        await until(lambda: handle._connect().puts._error is not None)
    sample = Large()
    alive = weakref.ref(sample)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            made = puts[how](sample, version=7)
            if made is not None:
                await made
            pytest.fail("it was put")
        made = sample = None  # type: ignore[assignment]
        assert alive() is None
    finally:
        gc.enable()
        feed.close()


async def test_the_next_put_raises_what_became_of_one_before() -> None:
    """And puts nothing; nor does the error come again."""
    feed = Feed(batch_size=1, max_samples=100)
    handle = feed.handle()
    await handle.put(0)
    await handle.put(1, version=7)
    await until(lambda: handle._connect().puts._error is not None)
    with pytest.raises(ValueError, match="version should be"):
        await handle.put(2)
    await handle.put(3)
    await handle.flush()
    assert feed.stats().ready == 2
    feed.close()


async def test_a_block_ends_when_all_is_in() -> None:
    """And raises what became of what is not."""
    feed = Feed(batch_size=1, max_samples=100)
    async with feed.handle() as handle:
        await handle.put_many(range(50))
    assert feed.stats().ready == 50
    with pytest.raises(ValueError, match="version should be"):
        async with feed.handle() as handle:
            await handle.put(0)
            await handle.put(1, version=7)
    feed.close()
    with pytest.raises(FeedClosedError):
        async with feed.handle() as handle:
            pass


async def test_later_calls_come_after_what_was_put() -> None:
    """A feed that is closed by the same process has all of it."""
    feed = Feed(batch_size=1, max_samples=1000)
    handle = feed.handle()
    await handle.put_many(range(500))
    handle.close_feed()
    await handle.flush()
    assert feed.stats().ready == 500


async def test_an_error_that_nobody_hears_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """When the process has left its feed."""
    feed = Feed(batch_size=1, max_samples=100)
    handle = feed.handle()
    await handle.put(0)
    await handle.put(1, version=7)
    handle.close()
    await until(lambda: "is not in: version should be" in caplog.text)
    feed.close()


def put_and_end(handle: FeedHandle, how: str) -> None:
    """Put samples, and end in one of several ways, without a word."""

    async def put() -> None:
        await handle.put_many(range(500))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(put())
    if how == "closed":
        handle.close()


@pytest.mark.parametrize("how", ["returned", "closed", "killed"])
def test_a_process_that_ends(how: str) -> None:
    """All that it has put is in; of one that is killed, what was put first: the rest is as if never put."""
    feed = Feed(batch_size=1, max_samples=1000)
    process = mp.get_context("fork").Process(target=put_and_end, args=(feed.handle(), how))
    process.start()
    process.join(20)
    wait_until(lambda: not feed.stats().handles)
    feed.close()
    found = [value for batch in DataLoader(feed) for value in batch.tolist()]
    assert found == [*range(len(found))]
    assert len(found) == 500 or (how == "killed" and found)


async def test_a_feed_that_is_closed() -> None:
    """All who wait are told, and what is in is trained."""
    feed = Feed(batch_size=1, max_samples=3)
    handle = feed.handle()
    tasks = [asyncio.create_task(handle.put(n)) for n in range(10)]
    await until(lambda: feed.stats().producers_waiting == 1)
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
    await until(lambda: feed.stats().producers_waiting == 1)
    tasks += [asyncio.create_task(handle.put(n)) for n in range(3)]
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
    await handle.flush()
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
    asyncio.run(handle.flush())
    feed.close()
    found = [batch[0] for batch in DataLoader(feed, collate_fn=list)]
    assert sorted(value for value in found if value != "left") == [*range(150)]
    assert found.count("left") <= 1


async def test_large_samples_are_sent_once(calls: list[tuple[str, Any]]) -> None:
    """However little room there is: they wait at the feed."""
    feed = Feed(batch_size=1, max_samples=1)
    handle = feed.handle()
    found, thread = taken(feed)
    await asyncio.gather(*(handle.put(np.full(100_000, number)) for number in range(16)))
    feed.close()
    await asyncio.to_thread(thread.join, 20)
    assert sorted(int(array[0]) for array in found) == [*range(16)]
    assert len(calls) == 16
