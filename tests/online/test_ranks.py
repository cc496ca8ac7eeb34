"""Ranks, and peers of ranks, in processes of their own: one feed, as many steps, the same samples for all peers."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import pytest

from asyncloader import ConfigurationError, DataLoader, StateMismatchError
from asyncloader.errors import LoaderClosedError
from asyncloader.online import Feed, FeedHandle, LeaseLostError, Sample
from tests.support.patience import wait_until

SHAPE = [(rank, 2, peer, 2) for rank in range(2) for peer in range(2)]
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def produce(handle: Any) -> None:
    """Make all items; those of leases that a loaded state has ended are leased again."""
    for item in handle.leases():
        with suppress(LeaseLostError), item:
            item.put(item.value)


def noisy(sample: Sample[int]) -> tuple[int, float]:
    """Draw a number for a sample, in a worker."""
    return sample.value, float(np.random.rand())


def taken(batches: Iterable[Any]) -> list[Any]:
    """Return the values of batches."""
    return [batch.tolist() for batch in batches]


def train(handle: FeedHandle, seat: tuple[int, ...], options: dict[str, Any], results: Any, step: Any) -> None:
    """Be a process of the training, to the end of the data."""
    steps = []
    for values, draws in DataLoader(handle.for_rank(*seat, fn=noisy), **options):
        steps.append((values.tolist(), draws.tolist()))
        step.wait(60)  # as in a collective call
        if seat[0] == seat[2] == 0:
            handle.version += 1
    results.put((seat, steps))


def train_and_save(handle: FeedHandle, seat: tuple[int, ...], state: Any, steps: int | None, results: Any) -> None:
    """Go on from a state; say what was trained, and the state."""
    loader = DataLoader(handle.for_rank(*seat))
    if state is not None:
        loader.load_state_dict(state)
    trained = [batch.tolist() for batch in islice(loader, steps)]
    results.put((seat, trained, loader.state_dict()))


@pytest.fixture
def begin() -> Iterator[Callable[..., Any]]:
    """Start processes, which are joined at the end."""
    processes = []

    def started(target: Any, *arguments: Any) -> Any:
        process = mp.get_context("fork").Process(target=target, args=arguments)
        process.start()
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.join(20)
        process.kill()
        process.join()
        process.close()


def test_peers_are_given_the_same_and_ranks_divide(begin: Callable[..., Any]) -> None:
    """All have as many steps; each sample is one rank's; peers draw alike, and ranks do not."""
    options = {"num_workers": 1, "seeding": "sample"}
    feed = Feed[int](range(42), batch_size=4, max_staleness=1)
    results, step = mp.get_context("fork").Queue(), mp.get_context("fork").Barrier(len(SHAPE))
    for seat in SHAPE:
        begin(train, feed.handle(), seat, options, results, step)
    begin(produce, feed.handle())
    steps = dict(results.get(timeout=60) for _ in SHAPE)
    assert {len(each) for each in steps.values()} == {11}
    for rank in range(2):
        values = [[values for values, _ in steps[rank, 2, peer, 2]] for peer in range(2)]
        assert values[0] == values[1]
        assert steps[rank, 2, 0, 2] == steps[rank, 2, 1, 2]
    found = [value for rank in range(2) for values, _ in steps[rank, 2, 0, 2] for value in values]
    assert sorted(found) == [*range(42)]
    assert steps[0, 2, 0, 2][0][1] != steps[1, 2, 0, 2][0][1]
    assert not feed.stats().counts["late"]


def test_the_feed_itself_may_be_a_rank() -> None:
    """Beside handles: the trainer of rank 0 has made it."""
    feed = Feed[int](batch_size=4)
    for number in range(8):
        feed.put_nowait(number)
    handle = feed.handle()
    datasets = [feed.for_rank(0, 2), handle.for_rank(1, 2)]
    handle.stats()  # it is connected
    feed.close()
    with ThreadPoolExecutor() as pool:
        loops = [pool.submit(taken, DataLoader(data)) for data in datasets]
        assert [loop.result(20) for loop in loops] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    handle.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_goes_on_with_any_number_of_ranks(begin: Callable[..., Any], ranks: int) -> None:
    """Rank 0's first peer saves what waits and loads it; nothing is lost, and nothing comes twice."""
    results = mp.get_context("fork").Queue()
    feed = Feed[int](range(24), batch_size=4, max_samples=24)
    produce_all = threading.Thread(target=produce, args=(feed,))
    produce_all.start()
    for seat in SHAPE:
        begin(train_and_save, feed.handle(), seat, None, 3, results)
    saved = {seat: (trained, state) for seat, trained, state in (results.get(timeout=60) for _ in SHAPE)}
    feed.close()
    produce_all.join(20)
    found = [value for rank in range(2) for values in saved[rank, 2, 0, 2][0] for value in values]
    assert len(found) == 12
    again = Feed[int](range(24), batch_size=4, max_samples=24)
    seats = [(rank, ranks, 0, 1) for rank in range(ranks)]
    for seat in seats:
        state = saved[(seat[0], 2, 0, 2)][1]
        begin(train_and_save, again.handle(), seat, state, None, results)
    wait_until(lambda: again._server.has_begun)
    begin(produce, again.handle())
    for _, trained, _ in [results.get(timeout=60) for _ in seats]:
        found += [value for values in trained for value in values]
    assert sorted(found) == [*range(24)]


def test_only_rank_0_loads_what_it_has_saved() -> None:
    """The state of another rank has nothing of the feed, and says so."""
    feed = Feed[int](batch_size=2)
    state = DataLoader(feed.for_rank(1, 2)).state_dict()
    with pytest.raises(StateMismatchError, match="rank 0"):
        DataLoader(feed.for_rank(0, 2)).load_state_dict(state)


def test_a_process_of_the_training_that_is_killed(begin: Callable[..., Any]) -> None:
    """The others are told; a training that begins anew from the state has each sample once."""
    results, goes_on, victim = mp.get_context("fork").Queue(), threading.Event(), 3

    def prompts() -> Iterator[int]:
        yield from range(8)  # two steps
        goes_on.wait(60)
        yield from range(8, 40)

    feed = Feed[int](prompts, batch_size=4, max_staleness=2)
    state = feed.state_dict()
    thread = threading.Thread(target=produce, args=(feed,))
    thread.start()
    handle = feed.handle()
    pipes = [mp.get_context("fork").Pipe(duplex=False) for _ in SHAPE]  # a queue's lock might be killed with its holder
    processes = [begin(hang_after_two, handle, seat, sent) for seat, (_, sent) in zip(SHAPE, pipes, strict=True)]
    assert [pipe.recv() for pipe, _ in pipes] == [*SHAPE]
    os.kill(processes[victim].pid, signal.SIGKILL)
    told = [pipe.recv() for number, (pipe, _) in enumerate(pipes) if number != victim]
    assert all(f"rank {SHAPE[victim][0]}, peer {SHAPE[victim][2]} has left" in words for words in told)
    goes_on.set()
    feed.load_state_dict(state)
    step = mp.get_context("fork").Barrier(len(SHAPE))
    for seat in SHAPE:
        begin(train, handle, seat, {}, results, step)
    steps = dict(results.get(timeout=60) for _ in SHAPE)
    thread.join(20)
    found = [value for rank in range(2) for values, _ in steps[rank, 2, 0, 2] for value in values]
    assert sorted(found) == [*range(40)]


def hang_after_two(handle: FeedHandle, seat: tuple[int, ...], pipe: Any) -> None:
    """Train two steps, and then wait for more until another process has died."""
    loader = iter(DataLoader(handle.for_rank(*seat)))
    next(loader)
    next(loader)
    pipe.send(seat)
    try:
        list(loader)
    except LoaderClosedError as error:
        pipe.send(str(error))
    else:
        pipe.send("ended")


def break_off(handle: FeedHandle, pipe: Any, may_end: Any) -> None:
    """Break two loops off, each of a loader of its own, and say what was trained, and end when that is allowed."""
    for _ in range(2):
        pipe.send([batch.tolist() for batch in islice(DataLoader(handle.for_rank(0, 1)), 2)])
    may_end.wait(60)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_loop_that_is_broken_off(begin: Callable[..., Any], is_remote: bool) -> None:
    """The batch that it was given last is trained: a loop of another loader begins with the next one."""
    feed = Feed[int](batch_size=2, max_samples=20)
    for number in range(10):
        feed.put_nowait(number)
    receiving, sending = mp.get_context("fork").Pipe(duplex=False)
    may_end = mp.get_context("fork").Event()
    if is_remote:
        begin(break_off, feed.handle(), sending, may_end)
    else:
        may_end.set()
        break_off(feed, sending, may_end)  # type: ignore[arg-type]
    assert [receiving.recv() for _ in range(2)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    wait_until(lambda: feed.stats().counts["trained"] == 8)
    may_end.set()


def test_a_rank_that_waits_for_others_says_so() -> None:
    """A timeout names how many have begun."""
    feed = Feed[int](batch_size=2)
    feed.put_nowait(0)
    feed.put_nowait(1)
    with pytest.raises(TimeoutError, match="only 1 processes of the training have begun"):
        next(iter(DataLoader(feed.for_rank(0, 2), timeout=0.2)))


def test_a_second_loop_begins_when_all_have_left_the_first() -> None:
    """A rank that is early takes nothing away from the others."""
    feed = Feed[int](batch_size=2, max_samples=12)
    for number in range(12):
        feed.put_nowait(number)
    loaders = [DataLoader(feed.for_rank(rank, 2)) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        first = [pool.submit(taken, islice(loader, 3)) for loader in loaders]
        assert [loop.result(20) for loop in first] == [[[0], [2], [4]], [[1], [3], [5]]]
        early = pool.submit(taken, loaders[0])
        wait_until(lambda: len(feed._server._runs.coming) == 1)
        feed.close()
        assert taken(loaders[1]) == [[7], [9], [11]]
        assert early.result(20) == [[6], [8], [10]]


@pytest.mark.parametrize(("numbers", "words"), [((2, 2), "no rank 2 of 2"), ((0, 2, 1, 1), "a peer 1 of 1")])
def test_ranks_that_cannot_be(numbers: tuple[int, ...], words: str) -> None:
    """They are refused at once."""
    with pytest.raises(ConfigurationError, match=words):
        Feed(batch_size=2).for_rank(*numbers)
