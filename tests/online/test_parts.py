"""Groups of any size that are made in parts, and work that another producer goes on with."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import signal
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedHandle, LeaseLostError, Sample
from tests.support.patience import wait_until

REACH = pytest.mark.parametrize("reach", [lambda feed: feed, Feed.handle], ids=["feed", "handle"])
WORKERS = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2, "worker_backend": "thread"}, id="threads"),
    pytest.param({"num_workers": 2}, id="processes"),
]


def told(sample: Sample[Any]) -> tuple[int, int, int, Any]:
    """Make a sample of all that is known of one."""
    return sample.id, sample.position, sample.version, sample.value


async def make_in_parts(producers: Any) -> None:
    """Make as many samples of an item as its value says, the last ones first to end."""
    async for item in producers.leases():
        async with item:

            async def part(turn: int, item: Any = item) -> None:
                for _ in range(item.value - turn):
                    await asyncio.sleep(0)
                item.add([item.value, turn])

            await asyncio.gather(*map(part, range(item.value)))
            await item.done()


@pytest.mark.covering(1)
@REACH
@pytest.mark.parametrize("options", WORKERS)
async def test_groups_of_any_size(reach: Any, options: dict[str, Any]) -> None:
    """A group is in one batch, side by side and whole, and counts as one of its batch."""
    feed = Feed([1, 5, 2, 3, 4, 1], batch_size=2, max_staleness=1, fn=told)
    tasks = [asyncio.create_task(make_in_parts(reach(feed))) for _ in range(2)]
    sizes: dict[int, int] = {}
    async for batch in DataLoader(feed, collate_fn=list, **options):
        groups = list(dict.fromkeys(sample[0] for sample in batch))
        assert len(groups) == 2
        assert [sample[:2] for sample in batch] == [
            (group, place) for group in groups for place in range(sum(s[0] == group for s in batch))
        ]
        for group in groups:
            values = sorted(sample[3] for sample in batch if sample[0] == group)
            assert values == [[len(values), turn] for turn in range(len(values))]
            sizes[group] = len(values)
        feed.version += 1
    await asyncio.gather(*tasks)
    assert [sizes[number] for number in range(6)] == [1, 5, 2, 3, 4, 1]


@REACH
def test_versions_and_costs_of_parts(reach: Any) -> None:
    """A group is as old as its oldest part, and costs what all of them do: a batch is full by either."""
    feed = Feed(range(3), batch_size=8, max_cost=10, fn=told)
    feed.version = 4
    producers = reach(feed)
    for costs in ([3, 4], [3], [1]):
        with producers.lease() as item:
            for cost in costs:
                item.add(cost, version=4 if cost == 4 else 2, cost=cost)
            item.done()
    assert [(unit.version, unit.cost) for unit in feed._server.ledger.units.values()] == [(2, 7), (2, 3), (2, 1)]
    feed.close()
    assert [len(batch) for batch in DataLoader(feed, collate_fn=list)] == [3, 1]


@REACH
async def test_what_is_wrong_with_parts(reach: Any) -> None:
    """The lease goes on; a group of a fixed size has that size."""
    feed = Feed(range(2), batch_size=2, group_size=2, max_samples=4)
    async with reach(feed).lease() as item:
        with pytest.raises(ValueError, match="nothing was added"):
            await item.done()
        item.add(1)
        with pytest.raises(ValueError, match="a group is a list of 2 samples"):
            await item.done()
        item.add(2)
        await item.done()
        with pytest.raises(LeaseLostError):
            await item.done()
    feed.close()
    assert [batch.tolist() for batch in DataLoader(feed)] == [[1, 2]]


def test_parts_in_a_state() -> None:
    """Groups that wait are saved whole, and what is partly made as well."""
    feed = Feed(range(4), batch_size=2)
    for number in range(2):
        with feed.lease() as item:
            for part in range(number + 1):
                item.add([number, part])
            item.done()
    with feed.lease() as item:
        item.retry(value={"turns": [1, 2]})
    again = Feed(range(4), batch_size=2)
    again.load_state_dict(feed.state_dict())
    for each in (feed, again):
        with each.lease() as item:
            assert (item.id, item.value, item.tries) == (2, {"turns": [1, 2]}, 0)
            item.add("end")
            item.done()
        each.close()
        loader = DataLoader(each, collate_fn=list, drop_last=False)
        assert [*loader] == [[[0, 0], [1, 0], [1, 1]], ["end"]]


@REACH
@pytest.mark.parametrize("is_async", [False, True])
async def test_another_producer_goes_on(reach: Any, is_async: bool) -> None:
    """With what was made so far, by the version that it was begun with; handing over is no failure."""
    feed = Feed(range(1), batch_size=1, max_staleness=1, max_retries=0, fn=told)
    producers = reach(feed)
    for turn in range(4):
        if is_async:
            async with producers.lease() as item:
                item.retry(value=[*(item.value or []), turn])
        else:
            with producers.lease() as item:
                item.retry(value=[*(item.value or []), turn])
    feed.version = 1
    async with producers.lease() as item:
        assert (item.value, item.version, item.tries) == ([0, 1, 2, 3], 0, 0)
        await item.put("whole")
    feed.close()
    assert [batch async for batch in DataLoader(feed, collate_fn=list)] == [[(0, 0, 0, "whole")]]


def test_what_was_begun_is_not_overtaken_by_its_bound() -> None:
    """The trainer waits for it as for a slow producer, so it is not too old for having changed hands."""
    feed = Feed(range(8), batch_size=1, max_staleness=1)
    with feed.lease() as item:
        item.retry(value="begun")
    slow = feed.lease()
    held = slow.__enter__()
    assert held.value == "begun"
    iterator = iter(DataLoader(feed, timeout=0.3))
    with feed.lease() as item:
        item.put(item.value)
    assert next(iterator).tolist() == [1]
    feed.version = 1
    held.retry(value="begun twice")
    del slow, held
    with feed.lease() as item:
        assert (item.value, item.version) == ("begun twice", 0)
        item.put(70)
    assert next(iterator).tolist() == [70]
    assert feed.stats().counts["stale"] == 0
    feed.close()


@pytest.mark.parametrize("on_stale", ["drop", "recycle", "keep"])
def test_what_was_begun_is_begun_anew_when_it_is_too_old(on_stale: Any) -> None:
    """After a jump of the version; it is kept if what is too old is."""
    feed = Feed(["a"], batch_size=1, max_staleness=0, on_stale=on_stale)
    with feed.lease() as item:
        item.retry(value="a...")
    feed.version = 5
    with feed.lease() as item:
        assert (item.value, item.version) == (("a...", 0) if on_stale == "keep" else ("a", 5))
        item.put(item.value)
    feed.close()
    assert [*DataLoader(feed, collate_fn=list)] == [["a" if on_stale != "keep" else "a..."]]


class Unreadable:
    """Can be pickled, and not made again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


async def test_what_cannot_be_handed_over() -> None:
    """What the feed cannot unpickle is a failure, and the item is leased as it was; what cannot be pickled is told."""
    feed = Feed(["a"], batch_size=1)
    handle = feed.handle()
    async with handle.lease() as item:
        with pytest.raises(Exception, match=r"pickle|local object"):
            item.retry(value=lambda: None)
        item.retry(value=Unreadable())
    async with handle.lease() as item:
        assert (item.value, item.tries) == ("a", 1)
        await item.put(1)
    feed.close()


def add_and_die(handle: FeedHandle) -> None:
    """Make a part of an item, and die."""
    item = handle.lease().__enter__()
    item.add("lost")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_producer_that_dies_in_the_middle_of_a_group() -> None:
    """Its parts go with it: the item is made anew, whole."""
    feed = Feed(["a"], batch_size=1)
    process = mp.get_context("fork").Process(target=add_and_die, args=(feed.handle(),))
    process.start()
    process.join(20)
    wait_until(lambda: feed.stats().pending == 1)
    with feed.lease() as item:
        assert item.tries == 1
        item.add(1)
        item.add(2)
        item.done()
    feed.close()
    assert [batch.tolist() for batch in DataLoader(feed)] == [[1, 2]]
