"""A feed in an actor: producers and the processes of a training are other actors, on any node, and are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, FeedClosedError, FeedHandle, LeaseLostError
from asyncloader.ray import FeedActor
from tests.support.patience import wait_until

pytestmark = pytest.mark.timeout(300)  # Ray starts a process for each actor
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

    def train(self, handle: FeedHandle, seat: tuple[int, ...], state: Any, steps: int | None) -> Any:
        """Train some steps, or to the end; return the samples of each and the state, or what went wrong."""
        loader = DataLoader(handle.for_rank(*seat))
        if state is not None:
            loader.load_state_dict(state)
        try:
            return [batch.tolist() for batch in islice(loader, steps)], loader.state_dict()
        except LoaderClosedError as error:
            return str(error), None


@pytest.fixture
def begin(add_node: Any) -> Iterator[Callable[[], Any]]:
    """Start actors, which are ended after the test."""
    import ray

    add_node()
    made: list[Any] = []

    def started() -> Any:
        made.append(ray.remote(num_cpus=0)(Process).remote())
        return made[-1]

    yield started
    for actor in made:
        ray.kill(actor)


def start(count: int | None, **options: Any) -> FeedHandle:
    """Start an actor with a feed of so many items, or without a source."""
    return FeedActor.start(lambda: Feed(None if count is None else range(count), **options), num_cpus=0)


def test_producers_and_ranks_on_other_nodes(begin: Callable[[], Any]) -> None:
    """Each item is trained once, by one rank; peers are given the same; a run goes on from a state with fewer ranks."""
    import ray

    handle = start(40, batch_size=4, max_samples=40)
    producers = [begin().produce.remote(handle) for _ in range(2)]
    trained = ray.get([begin().train.remote(handle, seat, None, 5) for seat in SHAPE])
    steps = dict(zip(SHAPE, [values for values, _ in trained], strict=True))
    for rank in range(2):
        assert steps[rank, 2, 0, 2] == steps[rank, 2, 1, 2]
    found = [value for rank in range(2) for batch in steps[rank, 2, 0, 2] for value in batch]
    assert len(found) == 20
    rest, _ = ray.get(begin().train.remote(handle, (0, 1), trained[0][1], None))
    found += [value for batch in rest for value in batch]
    assert sorted(found) == [10 * number for number in range(40)]
    assert sum(ray.get(producers)) >= 40


def test_a_producer_that_is_killed(begin: Callable[[], Any]) -> None:
    """Its item is leased again, and counts as a failure."""
    import ray

    handle = start(1, batch_size=1, max_samples=1)
    victim = begin()
    assert ray.get(victim.hold.remote(handle)) == 0
    ray.kill(victim)
    with handle.lease() as item:
        assert (item.value, item.tries) == (0, 1)
        item.put(7)
    assert next(iter(DataLoader(handle.for_rank(0, 1)))).tolist() == [7]
    handle.close()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_process_of_the_training_that_is_killed(begin: Callable[[], Any], victim: int) -> None:
    """The others are told who has left; all begin again from the state."""
    import ray

    handle = start(None, batch_size=4, max_samples=40)
    for number in range(8):
        handle.put_sync(number)
    state = DataLoader(handle.for_rank(0, 2, 0, 2)).state_dict()
    actors = [begin() for _ in SHAPE]
    trained = [actor.train.remote(handle, seat, state, None) for actor, seat in zip(actors, SHAPE, strict=True)]
    wait_until(lambda: handle.stats().in_batches == 0 and handle.stats().counts["trained"] == 8)
    ray.kill(actors[victim])
    rank, _, peer, _ = SHAPE[victim]
    for number, answer in enumerate(trained):
        if number != victim:
            assert f"rank {rank}, peer {peer} has left" in ray.get(answer)[0]
    handle.close_feed()
    again = ray.get([begin().train.remote(handle, seat, state, None) for seat in SHAPE])
    assert [values for values, _ in again[::2]] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    handle.close()


async def test_what_tasks_put_and_take_back() -> None:
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


def test_an_actor_that_dies() -> None:
    """Whoever waits, and whoever comes, is told."""
    import ray

    handle = start(1, batch_size=1)
    actor = handle._connects.args[0]  # type: ignore[attr-defined]
    with handle.lease() as item:
        ray.kill(actor)
        with pytest.raises(FeedClosedError, match="was dropped, or its process ended"):
            item.put(0)
        item._leased.end()  # type: ignore[union-attr]
    with pytest.raises(FeedClosedError):
        handle.put_sync(1)
