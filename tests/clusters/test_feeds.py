"""Feeds whose producers are Ray's actors: they use a handle on the trainer's machine, or are awaited from anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedHandle

pytestmark = pytest.mark.timeout(300)  # Ray starts a process for each actor


class Producer:
    """Makes samples, in a process of Ray's."""

    def produce(self, handle: FeedHandle) -> int:
        """Lease items and put them, to the end; return how many."""
        count = 0
        for item in handle.leases():
            with item:
                item.put(item.value * 10)
                count += 1
        return count

    def hold(self, handle: FeedHandle) -> int:
        """Lease an item, and keep it."""
        self.held = handle.lease().__enter__()
        return int(self.held.value)

    def generate(self, value: int) -> int:
        """Make a sample."""
        return value * 10


@pytest.fixture
def actors(add_node: Any) -> Any:
    """Three actors on a node."""
    import ray

    add_node()
    made = [ray.remote(num_cpus=0.5)(Producer).remote() for _ in range(3)]
    yield made
    for actor in made:
        ray.kill(actor)


def test_actors_that_have_a_handle(actors: Any) -> None:
    """Each item is made once, and the item of an actor that is killed is made by another one."""
    import ray

    feed = Feed(range(40), batch_size=4, max_samples=40)
    handle = feed.handle()
    assert ray.get(actors[0].hold.remote(handle)) == 0
    ray.kill(actors[0])
    counts = [actor.produce.remote(handle) for actor in actors[1:]]
    values = [value for batch in DataLoader(feed) for value in batch.tolist()]
    assert sorted(values) == [10 * number for number in range(40)]
    assert sum(ray.get(counts)) == 40


async def test_actors_that_are_awaited(actors: Any) -> None:
    """On whichever machine: a task of the trainer leases, and awaits the actor. One that was killed fails its items."""
    import ray

    feed = Feed(range(40), batch_size=4, max_samples=40)

    async def produce(actor: Any) -> None:
        async for item in feed.leases():
            async with item:
                await item.put(await actor.generate.remote(item.value))

    ray.kill(actors[0])
    tasks = [asyncio.create_task(produce(actor)) for actor in actors]
    values: list[int] = []
    async for batch in DataLoader(feed):
        values += batch.tolist()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(values) == [10 * number for number in range(40)]
    assert [type(error).__name__ for error in ended] == ["ActorDiedError", "NoneType", "NoneType"]
