"""Feeds and Ray: in the trainer's process, beside actors that make samples, or in an actor of their own.

Producers and the processes of a training are actors on other nodes. Starting one takes seconds, so that tests share
them, and only those that are killed are replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, FeedClosedError, FeedHandle, LeaseLostError
from asyncloader.ray import FeedActor

SHAPE = [(rank, 2, peer, 2) for rank in range(2) for peer in range(2)]


class Process:
    """A producer, or a process of the training."""

    def produce(self, handle: FeedHandle) -> int:
        """Make all items; return how many."""
        count = 0
        for item in handle.leases():
            with suppress(LeaseLostError), item:
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

    def begin(self, handle: FeedHandle, seat: tuple[int, ...], state: Any, steps: int) -> Any:
        """Train some steps; return the samples of each, and the state."""
        self.loader = DataLoader(handle.for_rank(*seat))
        if state is not None:
            self.loader.load_state_dict(state)
        self.batches = iter(self.loader)
        return [batch.tolist() for batch in islice(self.batches, steps)], self.loader.state_dict()

    def go_on(self) -> Any:
        """Train to the end; return the samples of each step, or what went wrong."""
        try:
            return [batch.tolist() for batch in self.batches]
        except LoaderClosedError as error:
            return str(error)


class Processes:
    """The actors that tests share."""

    def __init__(self) -> None:
        self._actors: list[Any] = []

    def take(self, count: int) -> list[Any]:
        """Return so many that live."""
        import ray

        remote = ray.remote(num_cpus=0, resources={"stays": 0.001})(Process)
        self._actors += [remote.remote() for _ in range(count - len(self._actors))]
        return self._actors[:count]

    def kill(self, actor: Any) -> None:
        """Kill one, and wait for its death, which takes a while."""
        self._actors.remove(actor)
        kill(actor, lambda: actor.generate.remote(0))

    def end(self) -> None:
        """Kill all."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


def kill(actor: Any, call: Callable[[], Any]) -> None:
    """Kill an actor, and wait for its death: Ray kills later, and until then calls are answered."""
    import ray

    ray.kill(actor)
    with suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(call())


@pytest.fixture(scope="module")
def processes(cluster: Any) -> Iterator[Processes]:
    """Have actors on other nodes."""
    made = Processes()
    yield made
    made.end()


def start(count: int | None, **options: Any) -> FeedHandle:
    """Start an actor with a feed of so many items, or without a source."""
    return FeedActor.start(lambda: Feed(None if count is None else range(count), **options), num_cpus=0)


# ------------------------------------------------------------------------------------- feeds in the trainer's process


def test_actors_that_have_a_handle(processes: Processes) -> None:
    """Each item is made once, and the item of an actor that is killed is made by another one."""
    import ray

    feed = Feed(range(40), batch_size=4, max_samples=40)
    handle = feed.handle()
    victim, *others = processes.take(3)
    assert ray.get(victim.hold.remote(handle)) == 0
    processes.kill(victim)
    counts = [actor.produce.remote(handle) for actor in others]
    values = [value for batch in DataLoader(feed) for value in batch.tolist()]
    assert sorted(values) == [10 * number for number in range(40)]
    assert sum(ray.get(counts)) == 40


async def test_actors_that_are_awaited(processes: Processes) -> None:
    """On whichever machine: a task of the trainer leases, and awaits the actor. One that was killed fails its items."""
    feed = Feed(range(40), batch_size=4, max_samples=40)

    async def produce(actor: Any) -> None:
        async for item in feed.leases():
            async with item:
                await item.put(await actor.generate.remote(item.value))

    actors = processes.take(3)[::-1]
    processes.kill(actors[0])
    tasks = [asyncio.create_task(produce(actor)) for actor in actors]
    values: list[int] = []
    async for batch in DataLoader(feed):
        values += batch.tolist()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(values) == [10 * number for number in range(40)]
    assert [type(error).__name__ for error in ended] == ["ActorDiedError", "NoneType", "NoneType"]


# ------------------------------------------------------------------------------------------------- feeds in an actor


def test_producers_and_ranks_on_other_nodes(processes: Processes) -> None:
    """Each item is trained once, by one rank; peers are given the same; a run goes on from a state with fewer ranks."""
    import ray

    handle = start(40, batch_size=4, max_samples=40)
    *trainers, one, other = processes.take(6)
    producers = [actor.produce.remote(handle) for actor in (one, other)]
    begun = [actor.begin.remote(handle, seat, None, 5) for actor, seat in zip(trainers, SHAPE, strict=True)]
    first, first_peer, second, second_peer = ray.get(begun)
    assert first[0] == first_peer[0]
    assert second[0] == second_peer[0]
    found = [value for batch in first[0] + second[0] for value in batch]
    assert len(found) == 20
    rest, _ = ray.get(trainers[0].begin.remote(handle, (0, 1), first[1], 6))
    found += [value for batch in rest for value in batch]
    assert sorted(found) == [10 * number for number in range(40)]
    assert sum(ray.get(producers)) >= 40
    handle.close()


def test_a_producer_that_is_killed(processes: Processes) -> None:
    """Its item is leased again, and counts as a failure."""
    import ray

    handle = start(1, batch_size=1, max_samples=1)
    (victim,) = processes.take(1)
    assert ray.get(victim.hold.remote(handle)) == 0
    processes.kill(victim)
    with handle.lease() as item:
        assert (item.value, item.tries) == (0, 1)
        item.put(7)
    assert next(iter(DataLoader(handle.for_rank(0, 1)))).tolist() == [7]
    handle.close()


def test_a_process_of_the_training_that_is_killed(processes: Processes) -> None:
    """The others are told who has left; all begin again from the state."""
    import ray

    handle = start(None, batch_size=4, max_samples=40)
    for number in range(8):
        handle.put_sync(number)
    state = DataLoader(handle.for_rank(0, 2, 0, 2)).state_dict()
    for victim in (0, 3):
        actors = processes.take(4)
        ray.get([actor.begin.remote(handle, seat, state, 2) for actor, seat in zip(actors, SHAPE, strict=True)])
        processes.kill(actors[victim])
        left = f"rank {SHAPE[victim][0]}, peer {SHAPE[victim][2]} has left"
        assert all(left in ray.get(actor.go_on.remote()) for actor in actors if actor is not actors[victim])
    handle.close_feed()
    seats = zip(processes.take(4), SHAPE, strict=True)
    again = ray.get([actor.begin.remote(handle, seat, state, 3) for actor, seat in seats])
    assert [values for values, _ in again[::2]] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    handle.close()


async def test_what_tasks_put_and_take_back(cluster: Any) -> None:
    """Many at once, in turn; one that is cancelled is not put; an error is that of one put."""
    handle = start(None, batch_size=1, max_samples=100)
    await asyncio.gather(*(handle.put((number, "a")) for number in range(100)))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(handle.put("late"), 0.2)
    with pytest.raises(ValueError, match="version should be"):
        await handle.put("wrong", version=3)
    handle.close_feed("enough")
    with pytest.raises(FeedClosedError, match="enough"):
        await handle.put("later")
    batches = [batch async for batch in DataLoader(handle.for_rank(0, 1), collate_fn=list)]
    assert batches == [[(number, "a")] for number in range(100)]
    handle.close()


def test_a_loop_over_leases_ends_with_the_feed(cluster: Any) -> None:
    """Also in the middle of an item: nothing is raised."""
    handle = start(3, batch_size=4)
    for item in handle.leases():
        with item:
            handle.close_feed()
            item.put(item.value)
    handle.close()


def test_an_actor_that_dies(cluster: Any) -> None:
    """Whoever waits, and whoever comes, is told."""
    handle = start(1, batch_size=1)
    actor = handle._connects.args[0]  # type: ignore[attr-defined]
    with handle.lease() as item, ThreadPoolExecutor() as pool:
        waiting = pool.submit(list, handle.leases())
        kill(actor, actor.identity.remote)
        assert waiting.result() == []
        with pytest.raises(FeedClosedError, match="was dropped, or its process ended"):
            item.put(0)
        item._leased.end()  # type: ignore[union-attr]
    with pytest.raises(FeedClosedError):
        handle.put_sync(1)
