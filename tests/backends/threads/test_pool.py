"""Workers in this process, in their places: what is told of which one, driven by hand on a loop of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from asyncloader.backends.backend import Came
from asyncloader.backends.threads.pool import LocalPool
from asyncloader.backends.worker import Worker, WorkerState
from asyncloader.loops import GuardedLoop
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from tests.support.patience import until

EPOCHS = [EpochSpec(number, (1, number, 0)) for number in (0, 1, 2)]


class Held:
    """Samples that are their keys. Those in `doors` wait until theirs is opened."""

    def __init__(self, *keys: int) -> None:
        self.doors = {key: threading.Event() for key in keys}
        self.at: list[int] = []

    def __getitem__(self, key: int) -> int:
        self.at.append(key)
        if key in self.doors:
            self.doors[key].wait(30)
        if key < 0:
            raise ValueError(key)
        return key

    def open(self) -> None:
        """Let all go."""
        for door in self.doors.values():
            door.set()


class AwaitedHeld(Held):
    """The same, awaited: those with doors until they are cancelled."""

    async def __getitem__(self, key: int) -> int:  # type: ignore[override]
        self.at.append(key)
        if key in self.doors:
            await asyncio.Event().wait()
        return key


class Heard:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.closed = 0

    def on_ready(self, worker: int) -> None:
        self.told.append(("ready", worker))

    def on_outcomes(self, worker: int, came: Sequence[Came]) -> None:
        for outcome, _, _ in came:
            data = outcome.data if outcome.kind == Kind.BATCH else outcome.kind
            self.told.append((worker, outcome.record.ticket, data))

    def on_died(self, worker: int, process: Worker) -> None:
        self.told.append(("died", worker))

    def on_closed(self) -> None:
        self.closed += 1

    def outcomes(self) -> list[Any]:
        """Return what has become of tickets: worker, number, batch."""
        return [told for told in self.told if isinstance(told[0], int)]


Start = Callable[..., tuple[LocalPool, Heard]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a pool on the loop of the test; ends it."""
    made: list[tuple[LocalPool, Any]] = []

    def start(dataset: Any, num_workers: int = 1, *, on_threads: bool = True) -> tuple[LocalPool, Heard]:
        awaits = isinstance(dataset, AwaitedHeld)
        spec = WorkerSpec(dataset, False, False, lambda sample: sample, False, None, num_workers, 0, False,
                          samples_at_once=4 if awaits else 1, is_async=awaits)  # fmt: skip
        pool = LocalPool(GuardedLoop(asyncio.get_running_loop()), spec, on_threads=on_threads)
        made.append((pool, dataset))
        heard = Heard()
        pool.listener = heard
        assert list(pool.start(EPOCHS[0], lambda: heard.told.append("started"))) == []
        return pool, heard

    yield start
    for pool, dataset in made:
        dataset.open()
        pool.end(5.0)
        await until(lambda pool=pool: pool.listener is None)
        assert await asyncio.to_thread(pool.wait_dead, 5.0)


@pytest.mark.parametrize("on_threads", [True, False])
async def test_each_is_told_of_as_it_is_started(start: Start, on_threads: bool) -> None:
    """Before the next one; on the loop there is one, whatever is asked for."""
    pool, heard = start(AwaitedHeld() if not on_threads else Held(), 2 * on_threads, on_threads=on_threads)
    count = 2 if on_threads else 1
    assert heard.told == ["started"] * count
    assert [worker.worker_id for worker in pool.processes.values()] == list(pool.processes) == list(range(count))
    await until(lambda: len(heard.told) == 2 * count)
    assert {told for told in heard.told if told != "started"} == {("ready", worker) for worker in range(count)}
    assert all(worker.is_ready for worker in pool.processes.values())


async def test_tickets_go_to_the_worker_that_they_are_for(start: Start) -> None:
    """What raises is an outcome as others are."""
    pool, heard = start(Held(), 2)
    pool.send(1, [(0, 5), (1, -1)])
    pool.send(0, [(2, 6)])
    await until(lambda: len(heard.outcomes()) == 3)
    assert sorted(heard.outcomes(), key=lambda outcome: outcome[1]) == [(1, 0, 5), (1, 1, Kind.FAILURE), (0, 2, 6)]


async def test_outcomes_of_a_run_that_is_over_are_dropped(start: Start) -> None:
    """The sample in work is finished for nobody; the same number means another batch."""
    dataset = Held(1)
    pool, heard = start(dataset)
    pool.send(0, [(0, 1), (1, 2)])
    await until(lambda: dataset.at == [1])
    pool.begin_epoch(EPOCHS[1])
    pool.send(0, [(0, 3)])
    dataset.open()
    await until(heard.outcomes)
    assert heard.outcomes() == [(0, 0, 3)]
    assert dataset.at[-1] == 3


@pytest.mark.parametrize("kind", [Held, AwaitedHeld])
async def test_nothing_is_told_of_a_worker_that_was_discarded(start: Start, kind: type[Held]) -> None:
    """Neither its end nor what it comes to make; its place is taken."""
    dataset = kind(1)
    pool, heard = start(dataset, on_threads=kind is Held)
    pool.send(0, [(0, 1)])
    await until(lambda: dataset.at == [1])
    (discarded,) = pool.processes.values()
    pool.dismiss(0, 0.0)
    pool.add(0, 1)
    await until(lambda: discarded.state is WorkerState.DEAD)
    assert pool.processes[0] is not discarded
    pool.send(0, [(0, 2)])
    dataset.open()
    await until(heard.outcomes)
    assert heard.outcomes() == [(0, 0, 2)]
    assert ("died", 0) not in heard.told
    told = list(heard.told)
    pool.on_message(discarded, Kind.READY, None, 0.0)  # posted before it was discarded, taken after
    assert heard.told == told


async def test_a_worker_that_ends_by_itself_has_died(start: Start) -> None:
    """Who listens is told, once; the pool is not closed by it."""
    pool, heard = start(Held(), 2)
    await until(lambda: len(heard.told) == 4)
    pool.processes[0]._transport.hang_up()  # as at the end of the interpreter
    await until(lambda: ("died", 0) in heard.told)
    assert pool.processes[1].is_alive
    assert (heard.told.count(("died", 0)), heard.closed) == (1, 0)


async def test_workers_that_come_and_go(start: Start) -> None:
    """One that is dismissed has no place, and nothing is told of it; the end waits for it as for all."""
    dataset = Held(1)
    pool, heard = start(dataset)
    pool.add(7, 2)
    await until(lambda: ("ready", 7) in heard.told)
    pool.send(7, [(0, 5)])
    await until(heard.outcomes)
    pool.send(0, [(1, 1)])
    await until(lambda: dataset.at[-1] == 1)
    dismissed = pool.processes[0]
    pool.dismiss(0, 20.0)
    pool.dismiss(0, 20.0)  # again
    assert list(pool.processes) == [7]
    pool.end(20.0)
    await until(lambda: not pool.processes[7].is_alive)
    assert (dismissed.state, heard.closed) == (WorkerState.ENDING, 0)
    dataset.open()
    await until(lambda: heard.closed)
    assert dismissed.state is WorkerState.DEAD
    assert heard.outcomes() == [(7, 0, 5)]
    assert not {("died", 0), ("died", 7)} & set(heard.told)


async def test_the_end_is_told_when_the_last_has_ended(start: Start) -> None:
    """Once, and those that ended because they were told to have not died."""
    dataset = Held(1)
    pool, heard = start(dataset, 2)
    await until(lambda: len(heard.told) == 4)
    pool.send(0, [(0, 1)])
    await until(lambda: dataset.at == [1])
    pool.end(20.0)
    await until(lambda: not pool.processes[1].is_alive)
    assert heard.closed == 0
    dataset.open()
    await until(lambda: heard.closed)
    assert (heard.closed, pool.listener) == (1, None)
    assert ("died", 1) not in heard.told
    pool.end(1.0)  # again
    assert heard.closed == 1


async def test_what_hangs_at_the_end_is_abandoned(start: Start) -> None:
    """Its thread ends when what it is at returns."""
    dataset = Held(1)
    pool, heard = start(dataset)
    pool.send(0, [(0, 1)])
    await until(lambda: dataset.at == [1])
    thread = pool.processes[0]._thread
    assert thread is not None
    pool.end(0.0)
    await until(lambda: heard.closed)
    assert await asyncio.to_thread(pool.wait_dead, 0.0)
    assert thread.is_alive()
    dataset.open()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    assert heard.outcomes() == []
