"""Ranks in processes and threads: one feed deals each step to all of them, whatever happens to one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from asyncloader import ConfigurationError, DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, FeedHandle, RanksError, Sample
from tests.patience import wait_until

FORKS = "ignore:This process .* is multi-threaded:DeprecationWarning"


@contextlib.contextmanager
def producing(feed: Feed[Any], cost: Callable[[int], int] = lambda value: 1) -> Iterator[None]:
    """Have two threads lease items and put them, until there are no more or the feed is closed."""

    def work() -> None:
        for item in feed.leases():
            with item:
                item.put(item.value, cost=cost(item.value))

    with ThreadPoolExecutor(2) as pool, feed:
        working = [pool.submit(work) for _ in range(2)]
        yield
    for each in working:
        each.result()


def take(handle: FeedHandle, rank: int, steps: int | None = None, **options: Any) -> list[list[int]]:
    """Take batches, as many or all."""
    batches = []
    for batch in DataLoader(handle.for_rank(rank), **options):
        batches.append(batch.tolist())
        if len(batches) == steps:
            break
    return batches


def in_threads(*ranks: Callable[[], Any]) -> list[Any]:
    """Return what the ranks return, or their errors."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        running = [pool.submit(rank) for rank in ranks]
        return [each.exception(30) or each.result() for each in running]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "worker_backend": "thread"}])
def test_equal_batches_on_all_ranks(options: dict[str, Any]) -> None:
    """Ranks take as many steps, of as many samples and about the same cost, with each sample on one of them."""
    feed = Feed(range(96), batch_size=4, max_staleness=3, num_replicas=3)
    handle = feed.handle()
    with producing(feed, cost=lambda value: value % 17):
        taken = in_threads(*(lambda rank=rank: take(handle, rank, **options) for rank in range(3)))
    assert [len(batches) for batches in taken] == [8, 8, 8]
    assert sorted(value for batches in taken for batch in batches for value in batch) == [*range(96)]
    for step in zip(*taken, strict=True):
        assert [len(batch) for batch in step] == [4, 4, 4]
        costs = [sum(value % 17 for value in batch) for batch in step]
        assert max(costs) - min(costs) <= 16
    handle.close()


def test_the_last_step() -> None:
    """No rank gets an empty batch: where samples are fewer than ranks, some come twice, and with drop_last none."""
    for drop_last, expected in ((False, [[0, 6], [1, 6], [2, 6]]), (True, [[0], [1], [2]])):
        feed = Feed(range(4), batch_size=1, num_replicas=3, drop_last=drop_last)
        handle = feed.handle()
        for item in feed.leases():
            with item:
                item.put(item.value)
        with feed:
            taken = in_threads(*(lambda rank=rank, handle=handle: take(handle, rank) for rank in range(3)))
        first = sorted(batches[0] for batches in taken)
        assert first == [[0], [1], [2]]
        assert [batches[1:] for batches in taken] == ([[]] * 3 if drop_last else [[[3]]] * 3), expected
        handle.close()


def test_batches_within_a_cost() -> None:
    """Each rank's batch costs no more than max_cost."""
    feed = Feed(range(60), batch_size=16, max_cost=20, num_replicas=2)
    handle = feed.handle()
    with producing(feed, cost=lambda value: value % 13):
        taken = in_threads(*(lambda rank=rank: take(handle, rank) for rank in range(2)))
    assert len(taken[0]) == len(taken[1])
    values = [value for batches in taken for batch in batches for value in batch]
    assert sorted(set(values)) == [*range(60)]
    assert len(values) - 60 in (0, 1)  # the last step may have one sample, for two ranks
    assert all(0 < len(batch) <= 16 and sum(n % 13 for n in batch) <= 20 for batches in taken for batch in batches)
    handle.close()


def versioned(sample: Sample[int]) -> tuple[int, int]:
    """Make a sample of its value and its version."""
    return sample.value, sample.version


def be_rank(handle: FeedHandle, rank: int, told: Any) -> None:
    """Train; the first rank updates the weights."""
    found: list[tuple[int, int]] = []
    for batch, versions in DataLoader(handle.for_rank(rank, versioned)):
        now = handle.version
        found += [(value, now - version) for value, version in zip(batch.tolist(), versions.tolist(), strict=True)]
        if rank == 0:
            handle.version += 1
    told.send(found)


@pytest.mark.filterwarnings(FORKS)
def test_ranks_in_processes() -> None:
    """The feed's process only makes samples; the bound on staleness holds for the rank that updates the weights."""
    feed = Feed(range(40), batch_size=4, max_staleness=1, num_replicas=2, step_timeout=60)
    processes = mp.get_context("fork")
    pipes = [processes.Pipe(duplex=False) for _ in range(2)]
    ranks = [processes.Process(target=be_rank, args=(feed.handle(), rank, pipes[rank][1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    with producing(feed):
        told = [receiving.recv() for receiving, _ in pipes]
    for rank, ends in zip(ranks, pipes, strict=True):
        rank.join(20)
        assert rank.exitcode == 0
        rank.close()
        for end in ends:
            end.close()
    assert sorted(value for found in told for value, _ in found) == [*range(40)]
    assert [len(found) for found in told] == [20, 20]
    assert max(age for _, age in told[0]) <= 1
    assert feed.version == 5


def take_one_and_hang(handle: FeedHandle, rank: int, told: Any) -> None:
    """Take a batch and wait to be killed."""
    batches = iter(DataLoader(handle.for_rank(rank)))
    told.send(next(batches).tolist())
    threading.Event().wait()


@pytest.mark.filterwarnings(FORKS)
def test_a_rank_that_is_killed() -> None:
    """The others are told after the steps that were dealt to all, and what is left is in a state."""
    feed = Feed(range(8), batch_size=1, num_replicas=2, max_samples=8)
    handle = feed.handle()
    receiving, sending = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=take_one_and_hang, args=(handle, 1, sending))
    process.start()
    with producing(feed):
        loader = DataLoader(handle.for_rank(0))
        batches = iter(loader)
        values = [next(batches).tolist(), receiving.recv()]
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        with pytest.raises(RanksError, match="rank 1 has left this run, after 0 steps"):
            for _ in range(8):
                next(batches)
        assert len({value for batch in values for value in batch}) == 2
        stats = feed.stats()
        assert stats.ready + stats.in_batches + stats.counts["trained"] == 8
    for end in (receiving, sending):
        end.close()
    process.close()
    handle.close()


def test_ranks_that_do_not_come_in_time() -> None:
    """Whoever waits is told for whom: a rank that did not begin, one that trains for too long, or producers."""
    feed = Feed(range(8), batch_size=1, max_staleness=0, num_replicas=2, step_timeout=0.2)
    handle = feed.handle()
    with pytest.raises(RanksError, match=r"rank 0 waited 0.2 s for rank 1 to begin a run"):
        take(handle, 0)
    ranks = [iter(DataLoader(handle.for_rank(rank))) for rank in range(2)]
    reason = r"ranks 0, 1 waited 0.2 s for step 0 of this run: 0 of 2 samples or groups are there, 0 are leased"
    for error in in_threads(*(lambda rank=rank: next(rank) for rank in ranks)):
        assert isinstance(error, RanksError)
        with pytest.raises(RanksError, match=reason):
            raise error
    with producing(feed):
        ranks = [iter(DataLoader(handle.for_rank(rank))) for rank in range(2)]
        assert sorted(map(int, in_threads(*(lambda rank=rank: next(rank) for rank in ranks)))) == [0, 1]
        reason = r"rank 0 waited 0.2 s for step 1 of this run: rank 1 did not ask for it; \d of 2 samples"
        with pytest.raises(RanksError, match=reason):
            next(ranks[0])
        with pytest.raises(RanksError, match=reason):
            next(ranks[1])
    handle.close()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 3}])
def test_states_for_other_numbers_of_ranks(options: dict[str, Any]) -> None:
    """What three ranks were given, and two after them, and one at last, is each item once."""
    values: list[int] = []
    state: Any = None
    for count, steps in ((3, 2), (2, 3), (4, None)):
        feed = Feed(range(50), batch_size=2, num_replicas=count, max_samples=24)
        handle = feed.handle()
        loaders = [DataLoader(handle.for_rank(rank), **options) for rank in range(count)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)

        def train(loader: Any, steps: int | None = steps) -> tuple[list[list[int]], Any]:
            batches = []
            for batch in loader:
                batches.append(batch.tolist())
                if len(batches) == steps:
                    break
            return batches, loader.state_dict()

        with producing(feed):
            taken = in_threads(*(lambda loader=loader: train(loader) for loader in loaders))
        assert len({len(batches) for batches, _ in taken}) == 1
        values += [value for batches, _ in taken for batch in batches for value in batch]
        state = taken[-1][1]
        handle.close()
    assert sorted(set(values)) == [*range(50)]
    assert len(values) - 50 in (0, 1, 2, 3)  # the last step has fewer samples than ranks


def test_ranks_at_different_places() -> None:
    """No rank goes on if one has loaded a state and another has not."""
    feed = Feed(range(8), batch_size=1, num_replicas=2)
    handle = feed.handle()
    with producing(feed):
        loaders = [DataLoader(handle.for_rank(rank)) for rank in range(2)]
        iterators = [iter(loader) for loader in loaders]
        assert sorted(map(int, in_threads(*(lambda each=each: next(each) for each in iterators)))) == [0, 1]
        state = loaders[0].state_dict()
        assert state["samplers"] == loaders[1].state_dict()["samplers"]
        loaders[0].load_state_dict(state)
        for error in in_threads(*(lambda loader=loader: next(iter(loader)) for loader in loaders)):
            assert isinstance(error, RanksError)
            assert "rank 0 goes on from state " in str(error)
            assert "; rank 1 goes on after 1 step. Load one state on all of them" in str(error)
        loaders[1].load_state_dict(state)
        assert sorted(map(int, in_threads(*(lambda each=each: next(iter(each)) for each in loaders)))) == [2, 3]
    handle.close()


def some(loader: Any, steps: int) -> list[int]:
    """Take the first batches, and leave the loop."""
    return [value for _, batch in zip(range(steps), loader, strict=False) for value in batch.tolist()]


def test_a_state_between_two_loops() -> None:
    """A rank that has begun the next loop before others has been given what it was given in the last one."""
    feed = Feed(range(12), batch_size=1, num_replicas=2, max_samples=24)
    handle = feed.handle()
    for item in feed.leases():
        with item:
            item.put(item.value)
    loaders = [DataLoader(handle.for_rank(rank)) for rank in range(2)]
    taken = in_threads(*(lambda loader=loader: some(loader, 3) for loader in loaders))
    iterators, states = [], []
    for loader in loaders:
        iterators.append(iter(loader))
        states.append(loader.state_dict()["samplers"])
    assert states[0] == states[1]
    units = states[0]["sampler"]["units"][0]["units"]
    assert sorted([*chain.from_iterable(taken), *(unit[0] for unit in units)]) == [*range(12)]
    feed.close()
    handle.close()


def two_ranks() -> tuple[Feed[int], FeedHandle, list[Any]]:
    """Make a feed of four samples for two ranks."""
    feed: Feed[int] = Feed(batch_size=1, num_replicas=2)
    for n in range(4):
        feed.put_nowait(n)
    handle = feed.handle()
    return feed, handle, [handle.for_rank(rank) for rank in range(2)]


def test_a_rank_that_leaves_before_it_hears_that_a_run_has_begun() -> None:
    """It goes on where the others do, which have heard of that, however often."""
    feed, handle, ranks = two_ranks()
    loaders = [DataLoader(rank) for rank in ranks]
    for number in range(1, 3):
        iterators = [iter(loader) for loader in loaders]
        wait_until(lambda number=number: feed._server.run is not None and feed._server.run.number == number)
    iterators = [iter(loader) for loader in loaders]
    assert sorted(map(int, in_threads(*(lambda each=each: next(each) for each in iterators)))) == [0, 1]
    feed.close()
    handle.close()


def test_iterating_again() -> None:
    """All ranks leave a loop and begin another one: it goes on."""
    feed = Feed(range(12), batch_size=2, num_replicas=2)
    handle = feed.handle()
    with producing(feed):
        loaders = [DataLoader(handle.for_rank(rank)) for rank in range(2)]

        def twice(loader: Any) -> list[int]:
            found = []
            for steps in (1, 3):
                for number, batch in enumerate(loader, 1):
                    found += batch.tolist()
                    if number == steps:
                        break
            return found

        taken = in_threads(*(lambda loader=loader: twice(loader) for loader in loaders))
    assert all(isinstance(each, list) for each in taken), taken
    assert sorted(chain.from_iterable(taken)) == [*range(12)]
    handle.close()


async def test_async_for() -> None:
    """Two ranks on one event loop, beside the producers."""
    feed = Feed(range(24), batch_size=2, max_staleness=0, num_replicas=2)
    handle = feed.handle()

    async def produce() -> None:
        async for item in feed.leases():
            async with item:
                await item.put(item.value)

    async def train(rank: int) -> list[int]:
        return [value async for batch in DataLoader(handle.for_rank(rank)) for value in batch.tolist()]

    *taken, _ = await asyncio.gather(train(0), train(1), produce())
    assert sorted(chain.from_iterable(taken)) == [*range(24)]
    assert len(taken[0]) == 12
    handle.close()


def test_what_cannot_be() -> None:
    """Errors name what is wrong, and lose nothing."""
    with pytest.raises(ConfigurationError, match="num_replicas"):
        Feed(batch_size=1, num_replicas=0)
    with pytest.raises(ConfigurationError, match="step_timeout is for ranks"):
        Feed(batch_size=1, step_timeout=1.0)
    with pytest.raises(ConfigurationError, match="give fn to for_rank"):
        Feed(batch_size=1, num_replicas=1, fn=versioned)
    with pytest.raises(ConfigurationError, match="at least batch_size, for each of 2 ranks"):
        Feed(batch_size=3, num_replicas=2, max_samples=5)
    single = Feed(batch_size=1)
    with pytest.raises(ConfigurationError, match="made without num_replicas"):
        single.handle().for_rank(0)
    single.close()
    feed = Feed(batch_size=1, num_replicas=2)
    handle = feed.handle()
    with pytest.raises(ConfigurationError, match=r"handle\(\).for_rank\(rank\)"):
        DataLoader(feed)
    with pytest.raises(ConfigurationError, match="take the state of the loader of a rank"):
        feed.state_dict()
    for rank in (-1, 2, "0", True):
        with pytest.raises(ConfigurationError, match="rank should be an integer from 0 to 1"):
            handle.for_rank(rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not go back"):
        handle.version = -1
    first, second = (iter(DataLoader(handle.for_rank(0))) for _ in range(2))
    other = iter(DataLoader(handle.for_rank(1)))
    feed.put_nowait(0)
    feed.put_nowait(1)
    with pytest.raises((RanksError, LoaderClosedError)):
        next(first)
    assert sorted(map(int, in_threads(lambda: next(second), lambda: next(other)))) == [0, 1]
    feed.close()
    handle.close()


def test_nothing_is_left_of_ranks() -> None:
    """The threads of iterators that were dropped end, also while the feed goes on."""
    feed = Feed(batch_size=1, num_replicas=1)
    handle = feed.handle()
    batches = iter(DataLoader(handle.for_rank(0)))
    feed.put_nowait(3)
    assert next(batches).tolist() == [3]
    handle.close()
    del batches
    gc.collect()
    wait_until(lambda: not any(thread.name == "asyncloader feed handle" for thread in threading.enumerate()))
    feed.close()


def test_several_states_at_one_step() -> None:
    """The n-th state of each rank at a step is one, in whichever order the ranks take them, whoever is ahead."""
    feed = Feed[int](batch_size=2, num_replicas=2, step_timeout=5)
    handle, again = feed.handle(), Feed[int](batch_size=2, num_replicas=2, step_timeout=5)
    for number in range(12):
        feed.put_nowait(number)
    loaders = [DataLoader(handle.for_rank(rank)) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    first = in_threads(*(lambda each=each: next(each).tolist() for each in iterators))
    states = [[loaders[0].state_dict() for _ in range(2)]]
    next(iterators[0])
    loaders[0].state_dict()  # of the next step
    states.append([loaders[1].state_dict() for _ in range(3)])
    other = again.handle()
    resumed = [DataLoader(other.for_rank(rank)) for rank in range(2)]
    for loader, taken in zip(resumed, states, strict=True):
        loader.load_state_dict(taken[1])
    second = in_threads(*(lambda each=each: next(iter(each)).tolist() for each in resumed))
    assert sorted(chain(*first, *second)) == [*range(8)]
    handle.close(), other.close()


def test_the_other_ranks_do_not_begin_again() -> None:
    """A rank that begins another run waits for the others no longer than for a step, also after a whole run."""
    feed = Feed[int](batch_size=2, num_replicas=2, step_timeout=0.5)
    handle = feed.handle()
    for number in range(8):
        feed.put_nowait(number)
    feed.close()
    loaders = [DataLoader(handle.for_rank(rank)) for rank in range(2)]
    in_threads(*(lambda each=each: list(each) for each in loaders))
    with pytest.raises(RanksError, match=r"rank 0 waited 0\.5 s for rank 1 to begin a run"):
        list(loaders[0])
    handle.close()
