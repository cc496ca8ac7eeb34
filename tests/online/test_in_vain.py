"""Nobody works in vain: producers hear when what they make would not be taken, and when the weights have changed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedClosedError, LeaseLostError
from asyncloader.online.link import ask
from tests.support.patience import until

REACH = pytest.mark.parametrize("reach", [lambda feed: feed, Feed.handle], ids=["feed", "handle"])


def give_back(feed: Feed[Any], item: Any) -> None:
    item.retry()


def go_back(feed: Feed[Any], item: Any) -> None:
    feed.load_state_dict(feed.state_dict())


def jump(feed: Feed[Any], item: Any) -> None:
    feed.version = 2


@REACH
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (give_back, "the lease has ended"),
        (go_back, "the lease has ended"),
        (jump, "what is made of it is too old by now"),
        (lambda feed, item: feed.close(), "the feed is closed"),
    ],
)
async def test_a_lease_that_is_lost(reach: Any, end: Callable[..., None], words: str) -> None:
    """Whatever ends it, all who watch it are told, once; those who ask later as well."""
    feed = Feed(range(4), batch_size=2, max_staleness=1, max_samples=4)
    producers = reach(feed)
    async with contextlib.AsyncExitStack() as leases:
        item = await leases.enter_async_context(producers.lease())
        other = await leases.enter_async_context(producers.lease())
        watchers = [asyncio.create_task(item.lost()) for _ in range(2)]
        feed.version = 1
        await other.put(other.value)
        await asyncio.sleep(0.05)
        assert not any(watcher.done() for watcher in watchers)
        end(feed, item)
        assert await asyncio.wait_for(asyncio.gather(*watchers), 10) == [words, words]
        assert await asyncio.wait_for(item.lost(), 10) in (words, "the lease has ended")
        assert await asyncio.wait_for(other.lost(), 10) == "the lease has ended"
    assert not feed._server._watchers
    feed.close()


@REACH
async def test_generation_that_is_cancelled(reach: Any) -> None:
    """By a time limit of the lease: the next producer has the item, and the first one has stopped."""
    feed = Feed(range(1), batch_size=1, lease_timeout=0.2)
    producers, stopped = reach(feed), []

    async def generate(item: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(item.id)

    async with producers.lease() as item:
        generation, lost = asyncio.create_task(generate(item)), asyncio.create_task(item.lost())
        await asyncio.wait({generation, lost}, return_when=asyncio.FIRST_COMPLETED)
        generation.cancel()
        await asyncio.wait({generation})
        assert (lost.result(), stopped) == ("the lease has ended", [0])
    while not feed.stats().ready:
        with contextlib.suppress(LeaseLostError):  # on a busy machine the next one may be too late as well
            async with producers.lease() as item:
                assert item.tries > 0
                await item.put(1)
    feed.close()


@REACH
async def test_a_watcher_that_is_cancelled(reach: Any) -> None:
    """Generation that has ended first takes its watcher back, and nothing is left of it."""
    feed = Feed(range(3), batch_size=1, max_samples=3)
    producers = reach(feed)
    for _ in range(3):
        async with producers.lease() as item:
            lost = asyncio.create_task(item.lost())
            await asyncio.sleep(0.01)
            lost.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost
            await item.put(item.value)
    await until(lambda: not any(feed._server._watchers.values()))
    feed.close()


@REACH
async def test_a_version_that_changes(reach: Any) -> None:
    """All who wait for another one are told, and those who come later need not wait; a closed feed has none."""
    feed = Feed(batch_size=1)
    producers = reach(feed)
    waiting = [asyncio.create_task(producers.version_changed(0)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    feed.version = 3
    assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [3, 3, 3]
    assert producers.version == 3
    assert await asyncio.wait_for(producers.version_changed(2), 10) == 3
    last = asyncio.create_task(producers.version_changed(3))
    await asyncio.sleep(0.05)
    feed.close()
    with pytest.raises(FeedClosedError):
        await asyncio.wait_for(last, 10)


async def test_a_feed_that_goes_away() -> None:
    """A handle's watchers are told, and none of them is left waiting."""
    feed = Feed(range(1), batch_size=1)
    handle = feed.handle()
    async with handle.lease() as item:
        lost = asyncio.create_task(item.lost())
        changed = asyncio.create_task(handle.version_changed(0))
        await asyncio.sleep(0.05)
        feed._server._door.end()  # type: ignore[union-attr]
        assert "was dropped, or its process ended" in await asyncio.wait_for(lost, 10)
        with pytest.raises(FeedClosedError):
            await asyncio.wait_for(changed, 10)
        with pytest.raises(FeedClosedError):
            await item.put(1)
    feed.close()


@REACH
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_feed_that_is_paused(reach: Any, is_async: bool) -> None:
    """Nothing is leased meanwhile, also of what was given back; what is leased may be put, and is trained."""
    feed = Feed(range(3), batch_size=1, max_samples=3)
    producers = reach(feed)
    with producers.lease() as item, producers.lease() as other:
        feed.pause()
        item.put(item.value)
        other.retry()
    assert next(iter(DataLoader(feed))).tolist() == [0]
    leased: list[int] = []

    def lease() -> None:
        with producers.lease() as item:
            leased.append(item.id)

    async def lease_async() -> None:
        async with producers.lease() as item:
            leased.append(item.id)

    task = asyncio.create_task(lease_async() if is_async else asyncio.to_thread(lease))
    await asyncio.sleep(0.2)
    assert not leased
    assert "it is paused" in ask(feed._server, "why_no_keys", True)
    feed.resume()
    await asyncio.wait_for(task, 10)
    assert leased == [1]
    feed.pause()
    last = asyncio.create_task(lease_async())
    await asyncio.sleep(0.05)
    feed.close()
    with pytest.raises(FeedClosedError):
        await asyncio.wait_for(last, 10)


async def test_watchers_beside_many_leases() -> None:
    """A lease that is settled looks at its own watchers only."""
    feed = Feed(range(200), batch_size=200, max_samples=200)
    tried: list[int] = []
    whole = feed._server.ledger.why_lost
    feed._server.ledger.why_lost = lambda lease: (tried.append(lease), whole(lease))[1]  # type: ignore[method-assign]
    async with contextlib.AsyncExitStack() as leases:
        items = [await leases.enter_async_context(feed.lease()) for _ in range(200)]
        watchers = [asyncio.create_task(item.lost()) for item in items]
        await asyncio.sleep(0)
        tried.clear()
        for item in items:
            await item.put(item.value)
        assert len(tried) <= 200
        assert set(await asyncio.gather(*watchers)) == {"the lease has ended"}
    with pytest.raises(LeaseLostError):
        await items[0].put(1)
    feed.close()


def test_a_version_that_a_thread_sets() -> None:
    """A task on another loop is woken by it."""
    feed, seen = Feed(batch_size=1), list[int]()

    async def follow() -> None:
        version = 0
        while version < 3:
            version = await feed.version_changed(version)
            seen.append(version)

    thread = threading.Thread(target=asyncio.run, args=(follow(),))
    thread.start()
    for version in range(1, 4):
        feed.version = version
    thread.join(20)
    assert seen[-1] == 3
    assert seen == sorted(set(seen))
    feed.close()
