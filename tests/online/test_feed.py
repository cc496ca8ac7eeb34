"""Feeds: producers lease and put, a loader trains; whatever ends, nobody waits in vain, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import itertools
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import BatchTimeoutError, ConfigurationError, DataLoader, StateMismatchError
from asyncloader.datasets.records import Pickles, packed
from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, FeedClosedError, FeedFullError, LeaseLostError, Sample, server
from asyncloader.online.link import ask
from asyncloader.online.runs import Seat
from tests.support.patience import patiently, patiently_async, wait_until

WORKERS = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2, "worker_backend": "thread"}, id="threads"),
    pytest.param({"num_workers": 2}, id="processes"),
]


def with_version(sample: Sample[int]) -> tuple[int, int]:
    """Make a sample of what was put: that, and its version."""
    return sample.value, sample.version


def bad_at_one(sample: Sample[int]) -> int:
    """Make a sample of all but one."""
    if sample.value == 1:
        raise ValueError("bad")
    return sample.value


def first_of(samples: list[Any]) -> Any:
    """Collate a batch of one sample."""
    return samples[0]


async def produce(feed: Feed[Any]) -> None:
    """Lease items and put them, the longest ones last."""
    async for item in feed.leases():
        async with item:
            for _ in range(item.id % 3):
                await asyncio.sleep(0)
            await item.put(item.value)


def fill(feed: Feed[Any], count: int) -> None:
    """Lease and put so many items."""
    for _ in range(count):
        with feed.lease() as item:
            item.put(item.value)


@contextlib.contextmanager
def producing(feed: Feed[Any], count: int) -> Iterator[None]:
    """Have threads lease items and put them, until there are no more."""

    def work() -> None:
        for item in feed.leases():
            with item:
                item.put(item.value)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("staleness", [0, 1, 2, None])
async def test_tasks_and_the_trainer_on_one_loop(staleness: Any, options: dict[str, Any]) -> None:
    """Each item is trained once, and no older than the bound, with whatever the loader prefetches."""
    feed = Feed(range(40), batch_size=4, max_staleness=staleness, fn=with_version)
    tasks = [asyncio.create_task(produce(feed)) for _ in range(5)]
    values, ages = [], []
    async for value, version in DataLoader(feed, **options):
        values += value.tolist()
        ages += (feed.version - version).tolist()
        feed.version += 1
    await asyncio.gather(*tasks)
    assert sorted(values) == [*range(40)]
    assert max(ages) <= (40 if staleness is None else staleness)
    stats = feed.stats()
    assert (stats.counts["trained"], stats.counts["late"]) == (40, 0)
    assert stats.ages == dict(sorted(Counter(ages).items()))


@pytest.mark.parametrize("options", WORKERS)
def test_threads_and_a_trainer_that_blocks(options: dict[str, Any]) -> None:
    """With groups: each is whole, in one batch, side by side."""
    feed = Feed([[n, n + 1] for n in range(0, 40, 2)], batch_size=4, group_size=2, max_staleness=1)
    with producing(feed, 3):
        groups = []
        for batch in DataLoader(feed, **options):
            groups += batch.reshape(-1, 2).tolist()
            feed.version += 1
    assert sorted(groups) == [[n, n + 1] for n in range(0, 40, 2)]


@pytest.mark.parametrize("options", WORKERS)
async def test_a_slow_sample_is_waited_for(options: dict[str, Any]) -> None:
    """Fast ones overtake it only as long as it does not get too old for that."""
    feed = Feed(range(24), batch_size=2, max_staleness=2, fn=with_version)
    loader = aiter(DataLoader(feed, **options))
    async with feed.lease() as slow:
        others = asyncio.create_task(produce(feed))
        seen = []
        with contextlib.suppress(TimeoutError):
            while True:
                seen += (await asyncio.wait_for(anext(loader), 0.5 if seen else 20))[0].tolist()
                feed.version += 1
        assert 0 not in seen
        assert len(seen) >= 4
        await slow.put(slow.value)
    async for value, version in loader:
        seen += value.tolist()
        assert (feed.version - version).max() <= 2
        feed.version += 1
    await others
    assert sorted(seen) == [*range(24)]
    assert not feed.stats().counts["stale"]


@pytest.mark.parametrize("options", WORKERS)
async def test_a_trainer_that_updates_seldom(options: dict[str, Any]) -> None:
    """Versions may come later than the bound allows for: then samples are younger, and nobody waits for ever."""
    feed = Feed(range(40), batch_size=2, max_staleness=1, fn=with_version)
    task = asyncio.create_task(produce(feed))
    batches = 0
    async for _ in DataLoader(feed, **options):
        batches += 1
        feed.version = batches // 5
    await task
    assert batches == 20


async def test_what_a_jump_makes_too_old() -> None:
    """It is dropped, kept, or made again."""
    for on_stale, values, outcome in (
        ("drop", [4], "stale"),
        ("keep", [0, 1], "late"),
        ("recycle", [0, 1], "recycled"),
    ):
        feed = Feed(range(2), batch_size=2, max_staleness=1, on_stale=on_stale)
        fill(feed, 2)
        feed.version = 5
        if on_stale == "drop":
            feed.put_nowait(4)
        if on_stale == "recycle":
            fill(feed, 2)
        feed.close()
        assert torch.cat(list(DataLoader(feed))).tolist() == values
        assert feed.stats().counts[outcome] == 2


# ---------------------------------------------------------------------------------------------------------- leases


async def test_an_item_is_leased_again() -> None:
    """After an error, without samples, after `retry`; not for ever. A task that was cancelled has not failed."""
    feed = Feed(["a"], batch_size=1, max_retries=2)
    for tries in range(2):
        with pytest.raises(OSError, match="engine"):
            async with feed.lease() as item:
                assert (item.value, item.id, item.tries) == ("a", 0, tries)
                raise OSError("engine")
    for _ in range(5):
        with pytest.raises(asyncio.CancelledError):
            async with feed.lease() as item:
                raise asyncio.CancelledError
    with feed.lease() as again:
        again.retry()
        with pytest.raises(LeaseLostError, match="this lease has ended"):
            again.put("late")
    assert feed.stats().counts["failed"] == 1
    with pytest.raises(FeedClosedError, match="the source has ended, and all its items are settled"):
        async with feed.lease():
            pass
    assert list(DataLoader(feed)) == []


async def test_an_item_is_settled_once() -> None:
    """By its samples, or without any."""
    feed = Feed(range(2), batch_size=1)
    async with feed.lease() as item:
        await item.put("x")
        with pytest.raises(LeaseLostError):
            await item.put("x")
    with feed.lease() as other:
        other.drop()
    feed.close()
    assert feed.stats().counts["dropped"] == 1
    assert list(DataLoader(feed)) == [["x"]]


async def test_a_time_limit() -> None:
    """A producer that hangs loses its lease, and another one is woken."""
    feed = Feed(range(1), batch_size=1, max_samples=1, lease_timeout=0.1)
    async with feed.lease() as slow:
        while not feed.stats().ready:
            with contextlib.suppress(LeaseLostError):  # on a busy machine another one is too late as well
                async with feed.lease() as again:
                    assert again.id == slow.id
                    assert again.tries > 0
                    await again.put("in time")
        with pytest.raises(LeaseLostError):
            await slow.put("too late")
    feed.close()
    assert list(DataLoader(feed)) == [["in time"]]
    wait_until(lambda: not any(thread.name == "asyncloader leases" for thread in threading.enumerate()))


@pytest.mark.parametrize("reach", [lambda feed: feed, Feed.handle], ids=["feed", "handle"])
async def test_a_lease_that_is_renewed(reach: Any) -> None:
    """Its time limit begins again; and a producer that is too late is told so before it has made the sample."""
    feed = Feed(range(2), batch_size=1, lease_timeout=600)
    producers, server = reach(feed), feed._server
    async with producers.lease() as first, producers.lease() as second:
        due = [*server._deadlines.values()]
        await first.renew()
        server.look(due[1])  # when the time of both would be over
        with pytest.raises(LeaseLostError, match="after its time limit"):
            await second.renew()
        await first.put("renewed")
        with pytest.raises(LeaseLostError):
            await first.renew()
    again = await asyncio.to_thread(producers.lease().__enter__)
    assert (again.id, again.tries) == (second.id, 1)
    await asyncio.to_thread(again.renew)
    server.look(time.monotonic() + 601)
    with pytest.raises(LeaseLostError):
        await asyncio.to_thread(again.renew)
    assert (feed.stats().ready, feed.stats().running, feed.stats().pending) == (1, 0, 1)
    if producers is not feed:
        producers.close()
    feed.close()


def test_the_time_limit_ends_with_the_feed() -> None:
    """There is no thread left."""
    feed = Feed(range(1), batch_size=1, lease_timeout=100)
    with feed.lease() as item:
        item.put(1)
    del feed, item
    gc.collect()
    wait_until(lambda: not any(thread.name == "asyncloader leases" for thread in threading.enumerate()))


def test_a_lease_that_is_collected_under_the_lock() -> None:
    """The item is given back when the lock is let go."""
    feed = Feed(range(1), batch_size=1)
    item = feed.lease().__enter__()
    with feed._server._lock:
        del item
        gc.collect()
        assert feed._server.ledger.num_running == 1
    feed.stats()
    assert feed.stats().pending == 1


@pytest.mark.parametrize("reach", [lambda feed: feed, Feed.handle], ids=["feed", "handle"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", ["break", "an error before the block", "forgotten"])
def test_a_lease_that_is_dropped_outside_a_block(how: str, is_async: bool, reach: Any) -> None:
    """Its item is leased again, at once: nobody has failed."""
    feed = Feed(range(3), batch_size=1)
    producers = reach(feed)

    def take() -> None:
        for _ in producers.leases():
            if how == "break":
                break
            if how == "forgotten":
                return
            raise KeyError

    async def take_async() -> None:
        async for _ in producers.leases():
            if how == "break":
                break
            if how == "forgotten":
                return
            raise KeyError

    with contextlib.suppress(KeyError):
        asyncio.run(take_async()) if is_async else take()
    gc.collect()  # an error that has ended a task, and that task, refer to each other
    wait_until(lambda: (feed.stats().running, feed.stats().pending) == (0, 1))
    with producers.lease() as item:
        assert (item.value, item.tries) == (0, 0)
        item.put(item.value)
    assert (feed.stats().running, feed.stats().ready) == (0, 1)
    if producers is not feed:
        producers.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_loop_that_was_closed_under_a_producer(is_late: bool) -> None:
    """The item goes to the next one, also if the loop was closed in the moment in which its task was to be woken."""
    feed = Feed(range(9), batch_size=1, max_samples=1)
    held = feed.lease().__enter__()
    loop = asyncio.new_event_loop()
    task = loop.create_task(feed.lease().__aenter__())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    if is_late:
        loop.is_closed = lambda: False  # type: ignore[method-assign]
    pool = ThreadPoolExecutor(1)
    living = pool.submit(feed.lease().__enter__)
    wait_until(lambda: feed.stats().producers_waiting == 2)
    held.drop()
    assert living.result(20).value == 1
    pool.shutdown()
    vars(loop).pop("is_closed", None)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_a_producer_that_is_cancelled_wakes_the_next_one() -> None:
    """The room that it was woken for is not lost."""
    feed = Feed(range(3), batch_size=1, max_samples=1)
    holder = feed.lease()
    held = await holder.__aenter__()
    first, second = (asyncio.create_task(feed.lease().__aenter__()) for _ in range(2))
    await asyncio.sleep(0)
    held.drop()  # which wakes the first one
    first.cancel()
    item = await asyncio.wait_for(second, 20)
    assert item.id == 1
    assert first.cancelled()


# ------------------------------------------------------------------------------------------------------------- puts


async def test_samples_without_leases() -> None:
    """From tasks and threads; whoever finds no room waits, or is told."""
    feed = Feed(batch_size=2, max_samples=4)
    await feed.put(0)
    feed.put_nowait(1)
    feed.put_sync(2)
    many = asyncio.create_task(feed.put_many(range(3, 8)))
    await asyncio.sleep(0)
    with pytest.raises(FeedFullError, match="no room"):
        feed.put_nowait(9)
    with pytest.raises(FeedFullError, match=r"within 0\.05 s"):
        await asyncio.to_thread(feed.put_sync, 9, timeout=0.05)
    batches = []
    async for batch in DataLoader(feed):
        batches.append(batch.tolist())
        if len(batches) == 2:
            waiting = asyncio.create_task(asyncio.to_thread(feed.put_sync, 8))
        if len(batches) == 4:
            await asyncio.gather(many, waiting)
            feed.close()
    assert sorted(itertools.chain(*batches)) == [*range(9)]
    with pytest.raises(FeedClosedError, match="it was closed"):
        feed.put_nowait(9)


async def test_those_who_wait_are_woken_by_the_end() -> None:
    """Tasks and threads, producers and the trainer; with the reason."""
    feed = Feed(itertools.count(), batch_size=1, max_samples=1)
    iterator = aiter(DataLoader(feed))
    with feed.lease():
        tasks = [
            asyncio.create_task(feed.lease().__aenter__()),
            asyncio.create_task(feed.put(1)),
            asyncio.create_task(asyncio.to_thread(feed.put_sync, 1)),
            asyncio.create_task(asyncio.to_thread(feed.lease().__enter__)),
        ]
        trainer = asyncio.create_task(anext(iterator))
        await asyncio.to_thread(wait_until, lambda: feed.stats().producers_waiting == 4)
        feed.close("training is over")
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert [str(error) for error in found] == ["the feed takes no more: training is over"] * 4
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(trainer, 20)


async def test_a_producer_in_the_middle_of_an_item_ends_with_its_loop() -> None:
    """The put of a closed feed is an error, which a loop over leases takes for its end; a single lease raises it."""
    feed = Feed(range(9), batch_size=1)
    reached = []
    async for item in feed.leases():
        async with item:
            feed.close("enough")
            with pytest.raises(FeedClosedError, match="enough"):
                await item.put(0)
            await item.put(0)
            reached.append(item)
    other = Feed(range(9), batch_size=1)
    for held in other.leases():
        with held:
            other.close("enough")
            held.put(0)
            reached.append(held)
    assert not reached
    assert (feed.stats().pending, feed.stats().counts["failed"]) == (1, 0)
    third = Feed(range(9), batch_size=1)
    with pytest.raises(FeedClosedError, match="enough"):
        async with third.lease() as item:
            third.close("enough")
            await item.put(0)


async def test_a_block_that_is_left_closes_the_feed() -> None:
    """An error of the trainer ends its producers."""
    with pytest.raises(KeyError), Feed(range(9), batch_size=1, max_samples=1) as feed:
        task = asyncio.create_task(produce(feed))
        async for _ in DataLoader(feed):
            raise KeyError
    await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("options", WORKERS)
async def test_a_source_that_raises(options: dict[str, Any]) -> None:
    """Whoever leases is told, and the trainer after what is there."""

    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError("no more prompts")

    feed = Feed(items(), batch_size=2, max_samples=8)
    with pytest.raises(OSError, match="no more prompts"):
        await produce(feed)
    with pytest.raises(FeedClosedError, match="its source has raised OSError") as raised:
        await produce(feed)
    assert isinstance(raised.value.__cause__, OSError)
    batches = []
    with pytest.raises(FeedClosedError, match="its source has raised OSError"):
        async for batch in DataLoader(feed, **options):
            batches.append(batch.tolist())
    assert sorted(itertools.chain(*batches)) == [0, 1, 2]


def test_bad_input() -> None:
    """A clear error, and nothing is lost by it."""
    feed = Feed(range(1), batch_size=4, group_size=2, max_cost=10)
    with feed.lease() as item:
        with pytest.raises(ValueError, match=r"a group is a list of 2 samples \(group_size\), but got 3"):
            item.put([1, 2, 3])
        with pytest.raises(ValueError, match="but got a int"):
            item.put(1)
        with pytest.raises(ValueError, match="from 0 to that of the feed, 0, but got 1"):
            item.put([1, 2], version=1, cost=1)
        with pytest.raises(ValueError, match="at most max_cost, 10, but got None"):
            item.put([1, 2])
        with pytest.raises(ValueError, match="at most max_cost, 10, but got 11"):
            item.put([1, 2], cost=11)
        item.put([1, 2], cost=10)
    feed.version = 3
    with pytest.raises(ValueError, match="does not go back from 3, but got 2"):
        feed.version = 2
    feed.close()
    assert torch.cat(list(DataLoader(feed))).tolist() == [1, 2]
    with pytest.raises(ConfigurationError, match="made without a source"):
        Feed(batch_size=1).lease().__enter__()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size should be an integer of at least 1"),
        ({"max_staleness": -1}, "max_staleness should be an integer of at least 0"),
        ({"batch_size": 4, "group_size": 3}, "batch_size should be a multiple of group_size, 3, but is 4"),
        ({"max_samples": 2}, "a batch of 4 samples could never be formed"),
        ({"on_stale": "dorp"}, "on_stale should be one of"),
        ({"max_cost": 0}, "max_cost should be a number above 0"),
        ({"source": 3}, "source should be an iterable of items"),
    ],
)
def test_what_cannot_work(options: dict[str, Any], words: str) -> None:
    """It is refused at construction."""
    with pytest.raises(ConfigurationError, match=words):
        Feed(**{"batch_size": 4, **options})


def some_steps(number: Callable[[int], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return batches of a feed whose integers are of one kind, and its state."""
    numbers = {"batch_size": 2, "max_samples": 6, "max_staleness": 1, "max_retries": 3}
    feed = Feed(range(3), **{name: number(value) for name, value in numbers.items()})
    with feed.lease() as item:
        item.put(item.value, version=number(0), cost=number(1))
    for value in (7, 8, 9):
        feed.put_nowait(value, version=number(0))
    batches = iter(DataLoader(feed))
    got = [next(batches).tolist()]
    feed.version = number(1)
    got.append(next(batches).tolist())
    feed.put_nowait(5, version=number(1))
    state = feed.state_dict()
    feed.close()
    return got, {name: value for name, value in state.items() if name not in ("id", "life")}


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_integers_of_other_libraries(number: Callable[[int], Any]) -> None:
    """They are as good as Python's own, and states have these."""
    (batches, state), (expected, own) = some_steps(number), some_steps(int)
    assert (batches, state) == (expected, own)
    assert state["units"][0]["units"]
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    torch.load(file, weights_only=True)
    with pytest.raises(ConfigurationError, match="batch_size should be an integer of at least 1, but got"):
        Feed(batch_size=number(0))


def test_the_feed_brings_its_batches() -> None:
    """The loader has no batch size, sampler or order for it."""
    feed = Feed(batch_size=2)
    for given in ({"batch_size": 2}, {"batch_size": None}):
        with pytest.raises(ConfigurationError, match=r"Feed brings its batches: give batch_size to Feed\(\.\.\.\)"):
            DataLoader(feed, **given)
    with pytest.raises(ConfigurationError, match="Feed brings its own order"):
        DataLoader(feed, shuffle=True)
    for given in ({"sampler": range(4)}, {"batch_sampler": [[0, 1]]}, {"sampler": [0], "batch_size": None}):
        with pytest.raises(ConfigurationError, match=r"leave sampler and batch_sampler out\. put\(\.\.\., priority"):
            DataLoader(feed.for_rank(0, 1), **given)
    feed.put_nowait(1)
    feed.put_nowait(2)
    again = DataLoader(feed, batch_sampler=DataLoader(feed).batch_sampler)  # as frameworks do
    assert next(iter(again)).tolist() == [1, 2]


def test_a_loader_that_does_not_follow() -> None:
    """Batches that overtake each other would come twice after a break; a bad sample would tear a group."""
    feed: Feed[Any] = Feed(batch_size=2, group_size=2)
    with pytest.raises(ConfigurationError, match="in_order=False has no place in a feed"):
        DataLoader(feed, num_workers=2, in_order=False)
    for on_error in ("skip", "replace"):
        with pytest.raises(ConfigurationError, match=r"would tear a group of 2 samples \(group_size\) apart"):
            DataLoader(feed, on_error=on_error)
    single = Feed(batch_size=2, fn=bad_at_one)
    for n in range(4):
        single.put_nowait(n)
    single.close()
    loader = DataLoader(single, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[0], [2, 3]]
    assert [*loader.stats().faults.bad_samples] == [(1, 0)]  # not the sample itself
    feed.close()


def test_a_workers_copy_makes_samples_only() -> None:
    """The feed stays in the process of the trainer."""
    copy = pickle.loads(pickle.dumps(Feed(range(3), batch_size=1, fn=with_version)))
    assert copy[(0, 0, 7, "x")] == ("x", 7)
    assert not hasattr(copy, "lease")


def in_time(act: Any) -> Any:
    """Return what a thread's call returns, or raises; fail if that waits."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(act).result(20)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.parametrize("update", [1, 5])
def test_a_batch_that_was_promised(update: int) -> None:
    """An update of the weights between the promise and the reading does not take it back.

    The thread of a producer reads with the lock of the run held, and the trainer needs that lock to ask on.
    """
    feed = Feed(range(9), batch_size=1, max_staleness=1)
    keys = iter(feed.make_batch_sampler())
    with feed.lease() as first, feed.lease() as second:
        first.put("a")
        assert [key[3] for key in next(keys)] == ["a"]
        second.put("b")
        assert keys.arrived(1, lambda: None)
        feed.version = update
        assert [key[3] for key in in_time(partial(next, keys))] == ["b"]


@pytest.mark.parametrize("event", ["nothing", "a jump", "a push", "a state", "another loop"])
def test_an_end_that_was_promised(event: str) -> None:
    """Whatever comes between the promise and the reading; and producers are told."""
    feed = Feed(range(3), batch_size=2, max_staleness=0, on_stale="recycle")
    keys = iter(feed.make_batch_sampler())
    with producing(feed, 1):
        in_time(partial(next, keys))
        state = feed.state_dict()
        keys.follow(lambda: 1)
        keys.asked()
        in_time(partial(next, keys))
        keys.follow(lambda: 2)
        keys.asked()
        wait_until(lambda: keys.arrived(1, lambda: None))
    if event == "a jump":
        feed.version = 7
    if event == "a push":
        with pytest.raises(FeedClosedError, match="the trainer was told so"):
            feed.put_nowait(8)
    if event == "a state":
        feed.load_state_dict(state)
    if event == "another loop":
        iter(feed.make_batch_sampler()).arrived(1, lambda: None)
    if event in ("a state", "another loop"):
        with pytest.raises(LoaderClosedError):
            keys.asked()
    else:
        with pytest.raises(StopIteration):
            in_time(partial(next, keys))


def test_a_wake_up_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """All others are woken as well, and the error is in the log."""

    def fail() -> None:
        raise OSError("its loop is broken")

    feed, told = Feed(batch_size=1), threading.Event()
    keys = iter(feed.make_batch_sampler())
    assert not keys.arrived(1, fail)
    assert not keys.arrived(1, told.set)
    feed.put_nowait(0)
    assert told.is_set()
    assert len(next(keys)) == 1
    assert "its loop is broken" in caplog.text


async def test_the_version_is_that_of_the_call() -> None:
    """A sample that waits for room was made with the weights of before; also one whose task has not begun yet."""
    feed = Feed(batch_size=1, max_samples=1, fn=with_version)
    feed.put_nowait("first")
    handle = feed.handle()
    tasks = [asyncio.create_task(feed.put("task")), asyncio.create_task(feed.put_many(["many"]))]
    feed.version = 1
    tasks += [asyncio.create_task(asyncio.to_thread(feed.put_sync, "thread"))]
    await asyncio.to_thread(wait_until, lambda: feed.stats().producers_waiting == 3)
    assert handle.version == 1
    tasks += [asyncio.create_task(handle.put("handle"))]
    await asyncio.to_thread(wait_until, lambda: feed.stats().producers_waiting == 4)
    feed.version = 2
    found = {}
    async for value, version in DataLoader(feed, collate_fn=first_of):
        found[value] = version
        if len(found) == 5:
            break
    await asyncio.gather(*tasks)
    assert found == {"first": 0, "task": 0, "many": 0, "thread": 1, "handle": 1}
    handle.close()
    feed.close()


async def test_a_state_takes_back_the_version_of_who_waits() -> None:
    """A sample is never newer than the weights."""
    feed = Feed(batch_size=1, max_samples=1, fn=with_version)
    feed.put_nowait("first")
    state = feed.state_dict()
    feed.version = 3
    waiting = asyncio.create_task(feed.put("waiting"))
    await asyncio.sleep(0)
    feed.load_state_dict(state)
    batches = aiter(DataLoader(feed, collate_fn=first_of))
    assert [await anext(batches) for _ in range(2)] == [("first", 0), ("waiting", 0)]
    await waiting


@pytest.mark.parametrize("priority", ["high", None, float("nan"), [1]])
def test_a_priority_that_is_none(priority: Any) -> None:
    """It is refused, and what others put is trained."""
    feed = Feed(batch_size=1, max_samples=2)
    with pytest.raises(ValueError, match="priority should be a number"):
        feed.put_nowait(0, priority=priority)
    feed.put_nowait(1, priority=1)
    feed.close()
    assert torch.cat(list(DataLoader(feed))).tolist() == [1]


# ------------------------------------------------------------------------------------------------ order and batches


def test_priorities() -> None:
    """The highest first."""
    feed = Feed(batch_size=2, max_samples=6)
    for n in range(6):
        feed.put_nowait(n, priority=n % 3)
    feed.close()
    assert [batch.tolist() for batch in DataLoader(feed)] == [[2, 5], [1, 4], [0, 3]]


def test_batches_by_cost() -> None:
    """A batch is full with so many tokens, or so many samples."""
    feed = Feed(batch_size=3, max_samples=9, max_cost=10)
    for n, cost in enumerate((4, 6, 1, 10, 3, 3, 3, 1)):
        feed.put_nowait(n, cost=cost)
    feed.close()
    assert [batch.tolist() for batch in DataLoader(feed)] == [[0, 1], [2], [3], [4, 5, 6], [7]]


def test_what_fills_no_batch() -> None:
    """At the end it is trained."""
    feed = Feed(range(3), batch_size=2)
    fill(feed, 3)
    with pytest.raises(FeedClosedError):
        fill(feed, 1)
    assert [batch.tolist() for batch in DataLoader(feed)] == [[0, 1], [2]]


# ----------------------------------------------------------------------------------------------------------- states


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("taken", range(6))
def test_a_state_after_each_batch(taken: int, options: dict[str, Any]) -> None:
    """With samples that wait, batches that were prefetched, and leases that are out: all of it is trained once."""
    feed = Feed(range(12), batch_size=2, max_samples=12)
    fill(feed, 9)
    with feed.lease(), feed.lease() as dropped:
        dropped.drop()
        iterator = iter(DataLoader(feed, **options))
        before = [value for _ in range(min(taken, 4)) for value in next(iterator).tolist()]
        loader = DataLoader(feed, **options)
        state = pickle.dumps(iterator.state_dict())
        feed.close()

    again = Feed(range(12), batch_size=2, max_samples=12)
    loader = DataLoader(again, **options)
    loader.load_state_dict(pickle.loads(state))
    with producing(again, 2):
        after = torch.cat(list(loader)).tolist()
    assert sorted(before + after) == [n for n in range(12) if n != 10]
    assert again.stats().counts["trained"] == 11


def test_a_state_has_what_was_put_since() -> None:
    """A state of the loader is that of the feed when it is asked for, at the last batch that was given."""
    feed = Feed(batch_size=2, max_samples=8)
    feed.put_nowait(0)
    feed.put_nowait(1)
    loader = DataLoader(feed)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    first = loader.state_dict()
    feed.put_nowait(2)
    second = loader.state_dict()
    for state, values in ((first, [[3]]), (second, [[2, 3]])):
        other = Feed(batch_size=2)
        resumed = DataLoader(other)
        resumed.load_state_dict(state)
        other.put_nowait(3)
        other.close()
        assert [batch.tolist() for batch in resumed] == values


@pytest.mark.parametrize("options", WORKERS)
def test_a_state_before_the_first_batch_after_a_resume(options: dict[str, Any]) -> None:
    """It has what was put since the state was loaded."""
    feed = Feed(batch_size=2, max_samples=8)
    loader = DataLoader(feed, **options)
    feed.put_nowait(0)
    loader.load_state_dict(loader.state_dict())
    for n in range(1, 4):
        feed.put_nowait(n)
    states = [loader.state_dict(), loader.state_dict()]
    assert torch.cat([next(batches) for batches in [iter(loader)] for _ in range(2)]).tolist() == [0, 1, 2, 3]
    for state in states:
        other = Feed(batch_size=2, max_samples=8)
        resumed = DataLoader(other, **options)
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        other.close()
        assert torch.cat(list(resumed)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", WORKERS)
def test_a_feed_that_was_closed_early_goes_on(options: dict[str, Any]) -> None:
    """From a state after its last batch, or after its loop: the source was not at its end."""
    feed = Feed(range(6), batch_size=2, max_samples=6)
    fill(feed, 4)
    feed.close("the machine is needed")
    loader = DataLoader(feed, **options)
    batches = iter(loader)
    found, states = [next(batches).tolist(), next(batches).tolist()], [loader.state_dict()]
    assert list(batches) == []
    states.append(loader.state_dict())
    assert found == [[0, 1], [2, 3]]
    for state in states:
        again = Feed(range(6), batch_size=2, max_samples=6)
        resumed = DataLoader(again, **options)
        resumed.load_state_dict(state)
        fill(again, 2)
        again.close()
        assert [batch.tolist() for batch in resumed] == [[4, 5]]


def test_the_state_of_the_feed_alone() -> None:
    """For whoever saves it beside the loader's; with the version, and a source that has a state."""

    class Prompts:
        """Counts, and knows where it is."""

        at = 0

        def __iter__(self) -> Prompts:
            return self

        def __next__(self) -> int:
            self.at += 1
            return self.at

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    feed = Feed(Prompts(), batch_size=2, max_samples=8)
    fill(feed, 5)
    feed.version = 7
    iterator = iter(DataLoader(feed))
    assert next(iterator).tolist() == [1, 2]
    state = pickle.loads(pickle.dumps(feed.state_dict()))
    other = Feed(Prompts(), batch_size=3, max_samples=9)
    other.load_state_dict(state)
    fill(other, 1)
    assert other.version == 7
    assert next(iter(DataLoader(other))).tolist() == [3, 4, 5]
    with pytest.raises(StateMismatchError, match="group_size"):
        Feed(Prompts(), batch_size=2, group_size=2).load_state_dict(state)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_state_for_another_batch_size(size: int) -> None:
    """What was formed for batches of four, and not trained, is in batches of the new size, in the same order."""
    feed = Feed(batch_size=4, max_samples=12)
    for n in range(12):
        feed.put_nowait(n)
    loader = DataLoader(feed, num_workers=1, worker_backend="thread")
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    state = loader.state_dict()
    again = Feed(batch_size=size, max_samples=12)
    resumed = DataLoader(again)
    resumed.load_state_dict(state)
    again.close()
    batches = [batch.tolist() for batch in resumed]
    assert batches == [[*range(n, min(12, n + size))] for n in range(4, 12, size)]


@pytest.mark.parametrize("waits", ["ready", "in a batch"])
def test_a_state_that_would_lose_what_was_put(waits: str) -> None:
    """It is refused, by the loader as well, and all goes on. A state that has it makes it good."""
    early = Feed(batch_size=2).state_dict()
    feed = Feed(batch_size=2)
    loader = DataLoader(feed, num_workers=1, worker_backend="thread")
    of_loader = loader.state_dict()
    for n in range(2):
        feed.put_nowait(n)
    keys = iter(feed.make_batch_sampler())
    if waits == "in a batch":
        next(keys)
    for load in (partial(feed.load_state_dict, early), partial(loader.load_state_dict, of_loader)):
        with pytest.raises(StateMismatchError, match=r"0 when it was taken, and is 2 now\. 2 that wait were put"):
            load()
    feed.load_state_dict(feed.state_dict())
    feed.put_nowait(2)
    feed.put_nowait(3)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(StateMismatchError, match=r"0 when it was taken, and is 4 now\. 2 that wait were put"):
        feed.load_state_dict(early)  # the batch that the loader was given last is not trained yet


def test_a_state_of_the_past() -> None:
    """What a state brought may go with an older one."""
    old = Feed(batch_size=1, max_samples=8)
    states = [old.state_dict()]
    old.put_nowait(0)
    states.append(old.state_dict())
    feed = Feed(batch_size=1, max_samples=8)
    feed.load_state_dict(states[1])
    feed.load_state_dict(states[0])
    assert feed.stats().ready == 0


@pytest.mark.parametrize("reach", [lambda feed: feed, Feed.handle], ids=["feed", "handle"])
async def test_the_end_of_another_feed(reach: Any) -> None:
    """A put into it that fails is an error of the block, which has made nothing for its own feed."""
    ended, feed = Feed(batch_size=1), Feed(range(1), batch_size=1)
    other = reach(ended)
    assert other.version == 0  # it is connected
    ended.close()
    with pytest.raises(FeedClosedError, match="it was closed"):
        async for item in reach(feed).leases():
            async with item:
                await other.put(item.value)
    with feed.lease() as item:
        assert (item.value, item.tries) == (0, 1)
        item.put(item.value)


def test_a_state_of_a_feed_with_another_source() -> None:
    """With a source, its items are leased again; without one, nobody could."""
    with_source, without = Feed(range(3), batch_size=1), Feed(batch_size=1)
    for feed, other in ((with_source, without), (without, with_source)):
        with pytest.raises(StateMismatchError, match="has_source"):
            feed.load_state_dict(other.state_dict())


def test_leases_of_before_a_state_have_ended() -> None:
    """Their items are leased again."""
    feed = Feed(range(2), batch_size=1)
    state = feed.state_dict()
    with feed.lease() as item:
        feed.load_state_dict(state)
        with pytest.raises(LeaseLostError):
            item.put(0)
    fill(feed, 2)
    feed.close()
    assert torch.cat(list(DataLoader(feed))).tolist() == [0, 1]


@pytest.mark.parametrize("options", WORKERS)
def test_a_loop_that_was_left_loses_nothing(options: dict[str, Any]) -> None:
    """The next one begins with the batches that the first one had prefetched."""
    feed = Feed(batch_size=1, max_samples=8)
    for n in range(8):
        feed.put_nowait(n)
    loader = DataLoader(feed, **options)
    seen = []
    for step, batch in enumerate(loader):
        seen += batch.tolist()
        if step == 2:
            break
    feed.close()
    old = iter(loader)
    seen += next(old).tolist()
    new = iter(loader)
    seen += torch.cat(list(new)).tolist()
    assert seen == [*range(8)]
    with pytest.raises(LoaderClosedError, match="another iterator"):
        next(old)


@pytest.mark.parametrize("options", WORKERS)
def test_a_state_at_the_end(options: dict[str, Any]) -> None:
    """Of a closed feed: the next epoch takes what comes then."""
    feed = Feed(batch_size=1)
    feed.put_nowait(0)
    feed.close()
    loader = DataLoader(feed, **options)
    assert [batch.tolist() for batch in loader] == [[0]]
    state = loader.state_dict()
    again = Feed(batch_size=1)
    resumed = DataLoader(again, **options)
    resumed.load_state_dict(state)
    again.put_nowait(1)
    again.close()
    assert [batch.tolist() for batch in resumed] == [[1]]


def test_the_statistics_say_who_limits() -> None:
    """A trainer that waits, or producers that do."""
    feed = Feed(batch_size=1, max_samples=1)
    iterator = iter(DataLoader(feed))

    def produce() -> None:
        wait_until(lambda: feed.stats().trainer_waited_s > 0.1)
        feed.put_nowait(0)

    producer = threading.Thread(target=produce)
    producer.start()
    assert next(iterator).tolist() == [0]
    producer.join()
    stats = feed.stats()
    assert stats.trainer_waited_s > 0.1
    assert stats.verdict.startswith("producers limit: the trainer has waited")
    with pytest.raises(FeedFullError):
        feed.put_sync(1, timeout=1)
    assert feed.stats().producers_waited_s > 0.9
    assert feed.stats().verdict.startswith("the trainer limits: the trainer has waited")
    feed.close()


async def test_the_statistics_are_readable() -> None:
    """What became of samples, how old they were, and who is there."""
    feed = Feed(range(8), batch_size=2, on_stale="keep")
    handle = feed.handle()
    assert handle.version == 0
    fill(feed, 2)
    feed.version = 3
    iterator = iter(DataLoader(feed))
    next(iterator)
    async with handle.lease():
        words = str(feed.stats()).splitlines()
    assert words[:3] == [
        "version 3: 1 leased, 0 to be leased again, 0 ready, 2 in batches",
        "so far: nothing (older than the newest weights: 2 by 3 versions)",
        "1 other processes connected, 0 producers wait",
    ]
    assert ": the trainer has waited" in words[3]
    handle.close()
    wait_until(lambda: feed.stats().handles == 0)
    feed.close()


@pytest.mark.parametrize("is_async", [False, True])
async def test_slow_producers_are_what_limits(is_async: bool) -> None:
    """Without workers the loader's verdict is the feed's, in either face: more workers would make nothing faster."""
    feed = Feed(range(16), batch_size=2)

    def produce_slowly() -> None:
        for item in feed.leases():
            with item:
                time.sleep(0.02)
                item.put(item.value)

    threading.Thread(target=produce_slowly, daemon=True).start()
    loader = DataLoader(feed)
    if is_async:
        assert len([batch async for batch in loader]) == 8
    else:
        assert len([*loader]) == 8
    assert loader.stats().verdict.limit == "source"
    assert not loader.stats().verdict.advice
    assert feed.stats().verdict.startswith("producers limit")


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_leased", [False, True])
@pytest.mark.parametrize("options", WORKERS)
async def test_a_silence_of_producers_is_named(is_leased: bool, is_async: bool, options: dict[str, Any]) -> None:
    """By a time limit, also without workers; the next call goes on."""
    feed = Feed(range(2), batch_size=2, max_samples=3)
    words = "producers have leases of 1" if is_leased else "no producer has a lease"
    async with contextlib.AsyncExitStack() as leases:
        if is_leased:
            await leases.enter_async_context(feed.lease())
        loader: Any = DataLoader(feed, timeout=0.5, **options)
        iterator = aiter(loader) if is_async else iter(loader)
        with pytest.raises(BatchTimeoutError, match=f"0 of 2 samples or groups, and {words}"):
            await anext(iterator) if is_async else next(iterator)
    fill(feed, 2)
    rest = patiently_async(iterator) if is_async else patiently(iterator)
    batch = await anext(rest) if is_async else next(rest)  # type: ignore[call-overload]
    assert sorted(batch.tolist()) == [0, 1]
    await iterator.aclose()
    feed.close()


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_a_cost_that_is_none(cost: float) -> None:
    """It is refused, and the lease goes on."""
    feed = Feed(range(1), batch_size=1, max_cost=10)
    with feed.lease() as item:
        with pytest.raises(ValueError, match="cost should be"):
            item.put(0, cost=cost)
        item.put(0, cost=10)
    assert feed.stats().ready == 1


@pytest.mark.parametrize("reach", [lambda feed: feed, Feed.handle], ids=["feed", "handle"])
@pytest.mark.parametrize("room", [0, 3, 4])
async def test_a_put_of_many_that_is_cancelled_says_how_many_are_in(room: int, reach: Any) -> None:
    """So whoever goes on puts the rest, and each sample is trained once."""
    feed = Feed(batch_size=2, max_samples=4)
    producers, samples = reach(feed), list(range(4 - room, 4 - room + 7))
    for n in range(4 - room):
        feed.put_nowait(n)
    with pytest.raises(TimeoutError) as limited:
        async with asyncio.timeout(0.2):
            await producers.put_many(samples)
    count = limited.value.__cause__.num_put  # type: ignore[union-attr]
    assert (count, feed.stats().ready, feed.stats().producers_waiting) == (room, 4, 0)
    rest = asyncio.create_task(producers.put_many(samples[count:]))
    found: list[int] = []
    async for batch in DataLoader(feed):
        found += batch.tolist()
        if len(found) == (11 - room) // 2 * 2:
            await rest
            feed.close()
    assert found == list(range(11 - room))
    if producers is not feed:
        producers.close()


def test_producers_wait_for_batches_that_may_be_recycled() -> None:
    """A loop that is left leaves prefetched batches, which may be too old for the next one: their items are leased."""
    feed = Feed(range(8), batch_size=2, max_staleness=4, on_stale="recycle")
    with producing(feed, 1):
        loader = DataLoader(feed, num_workers=1, worker_backend="thread", prefetch_factor=4)
        for batch in loader:
            wait_until(lambda: feed.stats().in_batches == 8)
            assert batch.tolist() == [0, 1]
            break
        feed.version = 10
        rest = [value for batch in loader for value in batch.tolist()]
    assert sorted(rest) == [*range(2, 8)]


class Slow:
    """Takes its time when it is pickled."""

    begun, goes_on = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        self.begun.set()
        self.goes_on.wait(20)
        return Slow, ()


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_state_is_copied_while_producers_and_the_trainer_go_on(is_remote: bool) -> None:
    """Whatever is in it, nobody waits for that: in this process, or behind the handle that asks for it, or another."""
    Slow.begun.clear()
    Slow.goes_on.clear()
    feed = Feed(batch_size=1, max_samples=8, fn=lambda sample: sample.id)
    feed.put_nowait(Slow())
    handle = feed.handle()
    with ThreadPoolExecutor(2) as pool:
        taking = pool.submit(handle.state_dict if is_remote else feed.state_dict)
        assert Slow.begun.wait(20)
        pool.submit(handle.put_sync, 1).result(10)
        batches = iter(DataLoader(feed))
        assert [next(batches).tolist() for _ in range(2)] == [[0], [1]]
        assert not taking.done()
        Slow.goes_on.set()
        (units,) = taking.result(20)["units"]
    assert [unit[0] for unit in units["units"]] == [0]


async def test_the_trainers_loop_goes_on_while_its_state_is_taken() -> None:
    """Where it asks for the state in a thread; and what is put meanwhile is not in it."""
    Slow.begun.clear()
    Slow.goes_on.clear()
    feed, others = Feed(batch_size=1, max_samples=8, fn=lambda sample: sample.id), 0
    for sample in (0, Slow()):
        await feed.put(sample)
    loader = DataLoader(feed)
    batches = aiter(loader)
    assert (await anext(batches)).tolist() == [0]
    taking = asyncio.create_task(asyncio.to_thread(loader.state_dict))
    async with asyncio.timeout(20):
        while not Slow.begun.is_set() or others < 3:
            await asyncio.sleep(0.001)
            if Slow.begun.is_set():
                await feed.put(others := others + 1)
    assert not taking.done()
    Slow.goes_on.set()
    resumed = Feed(batch_size=1, max_samples=8, fn=lambda sample: sample.id)
    (loader := DataLoader(resumed)).load_state_dict(await taking)
    for each in (feed, resumed):
        each.close()
    assert [batch.tolist() for batch in loader] == [[1]]
    assert [batch.tolist() async for batch in batches] == [[1], [2], [3], [4]]


def test_no_unit_is_written_down_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait: producers and the trainer go on while a state is written."""
    feed, locked = Feed(batch_size=1, max_samples=1000), list[bool]()

    def written(units: Any) -> Pickles:
        locked.extend(feed._server._lock.locked() for _ in units)
        return Pickles(units)

    monkeypatch.setattr(server, "Pickles", written)
    for number in range(1000):
        feed.put_nowait(number)
    (units,) = feed.state_dict()["units"]
    assert len(units["units"]) == 1000
    assert locked == [False] * 1000
    feed.close()


def test_large_memory_is_no_part_of_a_pickle() -> None:
    """Whoever pickles holds up all threads until a pickle is done; numpy copies, and sockets send, while others run."""
    feed = Feed(batch_size=1, max_samples=8)
    feed.put_nowait(large := torch.arange(1 << 20))
    pickled, (sent,) = packed(feed._server.write_state())
    assert len(pickled) < 4096
    assert np.frombuffer(sent, np.int64).ctypes.data == large.data_ptr()
    for state in (feed.state_dict(), feed.handle().state_dict()):
        ((_, _, (copy,), *_),) = state["units"][0]["units"]
        assert torch.equal(copy, large)
        assert copy.data_ptr() != large.data_ptr()


@pytest.mark.parametrize("is_remote", [False, True])
def test_what_units_share_stays_shared_in_a_state(is_remote: bool) -> None:
    """It is there once, and a view is no more than it shows."""
    feed = Feed(batch_size=1, max_samples=64)
    large, common = torch.zeros(64, 4096), torch.ones(1000)
    for row in large:
        feed.put_nowait((row, common))
    (units,) = (feed.handle() if is_remote else feed).state_dict()["units"]
    samples = [unit[2][0] for unit in units["units"]]
    assert all(row.untyped_storage().nbytes() == 4 * 4096 for row, _ in samples)
    assert len({shared.untyped_storage().data_ptr() for _, shared in samples}) == 1


def test_a_reader_whose_feed_loads_a_state() -> None:
    """It has nothing to wait for any more, and is told so."""
    feed = Feed[int](batch_size=2)
    state = feed.state_dict()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: next(iter(DataLoader(feed))))
        wait_until(lambda: feed._server.has_begun)
        feed.load_state_dict(state)
        with pytest.raises(LoaderClosedError, match="another iterator"):
            waiting.result(10)


def test_a_reader_that_comes_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not forgotten: whoever has the lock answers those who wait, and this one waits for the lock."""
    feed = Feed[int](batch_size=1)
    server, asks = feed._server, threading.Event()
    keys: Any = iter(feed.make_batch_sampler())
    keys.reader, keys._link = ask(server, "begin", Seat(), int), server
    step = server.step
    monkeypatch.setattr(server, "step", lambda *arguments: (asks.set(), step(*arguments)))
    with ThreadPoolExecutor(1) as pool:
        with server._lock:
            reading = pool.submit(next, keys)
            assert asks.wait(10)
            server._serve()
        feed.put_nowait(0)
        assert len(reading.result(10)) == 1
