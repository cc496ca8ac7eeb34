"""The two faces of an iterator, and every way to leave one: each batch goes to exactly one consumer, nothing is
left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.engine.engine import Engine
from asyncloader.engine.portal import get_portal
from asyncloader.errors import LoaderClosedError
from asyncloader.run import base_iterator
from asyncloader.run.worker_iterator import WorkerIterator
from tests.support import inside
from tests.support.patience import Stopwatch, until, wait_until

pytestmark = pytest.mark.on_threads

SOON_S = 20.0

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class Numbers(Dataset[Any]):
    """Numbers, some of which take long, or raise."""

    def __init__(
        self, length: int = 40, *, seconds: float = 0.0, error: BaseException | None = None, at: int | None = None
    ) -> None:
        self._length = length
        self._seconds = seconds
        self._error = error
        self._at = at

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Any:
        if self._seconds:
            time.sleep(self._seconds)
        if self._error is not None and (self._at is None or key == self._at):
            raise type(self._error)(*self._error.args)
        return key


class Gated(Numbers):
    """Batches of four; the second one waits for a gate, a file."""

    def __init__(self, gate: Path, length: int = 8) -> None:
        super().__init__(length)
        self._gate = gate

    def __getitem__(self, key: Any) -> Any:
        while key == 4 and not self._gate.exists():
            time.sleep(0.002)
        return key


def numbers(num_workers: int, length: int = 40, **options: Any) -> DataLoader[Any]:
    """Return a loader of batches of four numbers."""
    return DataLoader(Numbers(length), batch_size=4, num_workers=num_workers, **options)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave it to reference counts to let go of things."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------- leaving a loop


@WORKERS
def test_an_exception_in_the_body(num_workers: int) -> None:
    """Is the user's, and ends the loop."""

    def loop() -> None:
        for _ in numbers(num_workers):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()


@WORKERS
async def test_an_exception_in_the_body_async(num_workers: int) -> None:
    """The same by the other face."""

    async def loop() -> None:
        async for _ in numbers(num_workers):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await loop()


@pytest.mark.parametrize("after", ["start", "batch", "error", "timeout", "StopIteration"])
def test_a_dropped_iterator_ends_its_workers_by_its_reference_count(after: str) -> None:
    """Whatever was raised before: no cycle keeps the iterator alive, and dropping it does not wait."""
    error = {"error": ValueError(), "StopIteration": StopIteration()}.get(after)
    dataset = Numbers(error=error, at=0, seconds=0.5 if after == "timeout" else 0)
    loader = DataLoader(dataset, batch_size=1, num_workers=2, timeout=0.05 if after == "timeout" else 0)
    with no_collection():
        iterator = iter(loader)
        workers = inside.workers(iterator)
        if after != "start":
            with contextlib.suppress(ValueError, RuntimeError, TimeoutError):
                next(iterator)
        watch = Stopwatch()
        del iterator
        assert watch.seconds() < 0.4  # a worker that is at a sample needs 0.5 s
        wait_until(lambda: not any(worker.is_alive() for worker in workers))


@pytest.mark.processes
@pytest.mark.parametrize("after", ["start", "batch", "error", "timeout", "StopIteration", "cancellation"])
async def test_a_dropped_async_iterator_ends_its_workers_by_its_reference_count(after: str) -> None:
    """The same by the other face."""
    error = {"error": ValueError(), "StopIteration": StopIteration()}.get(after)
    slow = after in ("timeout", "cancellation")
    dataset = Numbers(error=error, at=0, seconds=0.5 if slow else 0)
    loader = DataLoader(dataset, batch_size=1, num_workers=2, timeout=0.05 if after == "timeout" else 0)
    with no_collection():
        iterator = aiter(loader)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(inside.until_started(iterator), 10)
        workers = inside.workers(iterator)
        assert workers
        if after == "cancellation":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(iterator)
        elif after != "start":
            with contextlib.suppress(ValueError, RuntimeError, TimeoutError):
                await anext(iterator)
        del iterator
        await asyncio.to_thread(wait_until, lambda: not any(worker.is_alive() for worker in workers))


@pytest.mark.processes
@pytest.mark.parametrize("face", ["for", "async for"])
async def test_dropped_before_what_its_sampler_has_raised_is_due(face: str) -> None:
    """The error that waits for its turn keeps nothing alive."""
    sampler = bad_sampler()
    loader = DataLoader(Numbers(), sampler=sampler, batch_size=2, num_workers=1, prefetch_factor=9)
    with no_collection():
        iterator = iter(loader) if face == "for" else aiter(loader)
        for _ in range(2):
            await anext(iterator) if face == "async for" else next(iterator)
        workers = inside.workers(iterator)
        assert workers
        del iterator
        await asyncio.to_thread(wait_until, lambda: not any(worker.is_alive() for worker in workers))


class Raising:
    """Has no sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> int:
        raise ValueError(key)


@pytest.mark.parametrize("face", ["for", "async for"])
async def test_a_dropped_iterator_without_workers_is_gone_after_an_error(face: str) -> None:
    """And with it its thread: what a sample has raised refers to nothing that keeps the iterator."""
    loader: DataLoader[int] = DataLoader(Raising(), batch_size=4)
    with no_collection():
        iterator = iter(loader) if face == "for" else aiter(loader)
        with contextlib.suppress(ValueError):
            await anext(iterator) if face == "async for" else next(iterator)
        gone = weakref.ref(iterator)
        del iterator
        await asyncio.to_thread(wait_until, lambda: gone() is None)


async def test_a_dropped_iterator_whose_workers_could_not_be_started_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its consumer was told refers to nothing that keeps it."""

    def start(self: Engine) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Engine, "start", start)
    with no_collection():
        iterator = aiter(numbers(1))
        with pytest.raises(OSError, match="no room"):
            await anext(iterator)
        gone = weakref.ref(iterator)
        del iterator
        await asyncio.to_thread(wait_until, lambda: gone() is None)


def test_what_is_raised_because_the_program_ends_comes_out_of_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no iterator that nobody would make batches for."""

    def start(self: Engine) -> None:
        raise LoaderClosedError("the interpreter is exiting")

    monkeypatch.setattr(Engine, "start", start)
    with pytest.raises(LoaderClosedError, match="exiting"):
        iter(numbers(1))


@WORKERS
def test_with_closes(num_workers: int) -> None:
    """`with` ends everything, waits for it, and what comes after is refused."""
    with iter(numbers(num_workers)) as iterator:
        assert next(iterator).tolist() == [0, 1, 2, 3]
        workers = getattr(iterator, "_workers", [])
    assert not any(worker.is_alive() for worker in workers)
    for _ in range(2):
        with pytest.raises(LoaderClosedError):
            next(iterator)
    iterator.close()


@WORKERS
async def test_async_with_closes(num_workers: int) -> None:
    """The same by the other face."""
    async with aiter(numbers(num_workers)) as iterator:
        assert (await anext(iterator)).tolist() == [0, 1, 2, 3]
        workers = getattr(iterator, "_workers", [])
    assert not any(worker.is_alive() for worker in workers)
    for _ in range(2):
        with pytest.raises(LoaderClosedError):
            await anext(iterator)
    await iterator.aclose()


@WORKERS
@pytest.mark.parametrize("length", [4, 400])
def test_closing_is_not_the_end_of_the_data(num_workers: int, length: int) -> None:
    """A closed iterator never seems exhausted, even if all batches had been made; an exhausted one stays so."""
    loader = numbers(num_workers, length)
    closed, exhausted = iter(loader), iter(loader)
    for _ in exhausted:
        pass
    exhausted.close()
    if num_workers:
        wait_until(lambda: inside.run(closed).handoff.ready)  # batches of the other one are made
    closed.close()
    with pytest.raises(LoaderClosedError):
        next(closed)
    assert next(exhausted, None) is None


@WORKERS
def test_loader_close_closes_the_newest_iterator(num_workers: int) -> None:
    """And nothing else; without an iterator it does nothing."""
    loader = numbers(num_workers)
    loader.close()
    older, newest = iter(loader), iter(loader)
    loader.close()
    assert next(older).tolist() == [0, 1, 2, 3]
    with pytest.raises(LoaderClosedError):
        next(newest)
    older.close()


@WORKERS
def test_close_wakes_those_who_wait(num_workers: int) -> None:
    """A thread that waits for a batch while another closes the iterator gets LoaderClosedError, not the end."""
    if num_workers == 0:
        pytest.skip("nobody waits: the thread makes the batch itself")
    iterator = iter(DataLoader(Numbers(seconds=0.3), batch_size=4, num_workers=num_workers))
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(next, iterator) for _ in range(3)]
        wait_until(lambda: inside.is_waiting(iterator))
        iterator.close()
        for future in waiting:
            assert isinstance(future.exception(SOON_S), LoaderClosedError)


@WORKERS
async def test_aclose_wakes_those_who_wait(num_workers: int) -> None:
    """The same by the other face."""
    iterator = aiter(DataLoader(Numbers(seconds=0.1), batch_size=4, num_workers=num_workers))
    tasks = [asyncio.create_task(anext(iterator)) for _ in range(3)]
    await until(lambda: inside.is_waiting(iterator))
    await iterator.aclose()
    for task in tasks:
        with pytest.raises(LoaderClosedError):
            await task


@WORKERS
async def test_an_aclose_that_is_cancelled_has_ended_the_run(num_workers: int) -> None:
    """As it waits, or before: all threads that the loop has for such things may be busy."""
    iterator: Any = aiter(numbers(num_workers, 8))
    await anext(iterator)
    may_end = threading.Event()
    loop, executor = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    loop.set_default_executor(executor)
    busy = loop.run_in_executor(None, may_end.wait, 60.0)
    closing = asyncio.create_task(iterator.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(LoaderClosedError):
        await anext(iterator)
    may_end.set()
    await busy


# ------------------------------------------------------------------------------------------- several at the same time


@WORKERS
async def test_nested_loops_of_both_faces(num_workers: int) -> None:
    """A `for` inside a running loop, and an `async for` in its body; as in a notebook."""
    outer, inner = numbers(num_workers, 8), numbers(num_workers, 12)
    seen = []
    for a in outer:
        async for b in inner:
            seen.append((int(a[0]), int(b[0])))
    assert seen == [(a, b) for a in (0, 4) for b in (0, 4, 8)]


@WORKERS
@pytest.mark.parametrize("in_order", [True, False])
def test_threads_share_an_iterator(num_workers: int, in_order: bool) -> None:
    """Each batch goes to one of them, in order for each; all see the end."""
    iterator = iter(numbers(num_workers, 800, in_order=in_order))
    with ThreadPoolExecutor(4) as threads:
        shares = [future.result(SOON_S) for future in [threads.submit(list, iterator) for _ in range(4)]]
    starts = [[int(batch[0]) for batch in share] for share in shares]
    assert sorted(itertools.chain(*starts)) == list(range(0, 800, 4))
    assert not in_order or all(share == sorted(share) for share in starts)


@WORKERS
async def test_tasks_share_an_iterator(num_workers: int) -> None:
    """Each batch goes to one of them; all see the end."""
    iterator = aiter(numbers(num_workers, 800))

    async def take() -> list[int]:
        return [int(batch[0]) async for batch in iterator]

    shares = await asyncio.wait_for(asyncio.gather(*(take() for _ in range(5))), SOON_S)
    assert sorted(itertools.chain(*shares)) == list(range(0, 800, 4))


@WORKERS
async def test_nothing_is_lost_by_cancelling_at_any_moment(num_workers: int) -> None:
    """Many tasks share an iterator, and are cancelled, run out of time and start anew by chance."""
    iterator = aiter(DataLoader(Numbers(1200), batch_size=4, num_workers=num_workers))
    chance = random.Random(1)
    seen: list[int] = []
    at_the_end = False

    async def take() -> None:
        nonlocal at_the_end
        async for batch in iterator:
            seen.append(int(batch[0]))
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        at_the_end = True

    tasks: list[asyncio.Task[None]] = []
    async with asyncio.timeout(SOON_S):
        while not at_the_end:
            tasks = [task for task in tasks if not task.done()]
            while len(tasks) < 4:
                tasks.append(asyncio.create_task(take()))
            await asyncio.sleep(chance.choice([0, 0, 0.0005, 0.002]))
            chance.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(seen) == list(range(0, 1200, 4))


@WORKERS
async def test_the_end_is_told_when_the_last_batch_is_taken(num_workers: int, tmp_path: Path) -> None:
    """A task that finds nothing more to be made gets the batch of one that is cancelled, and the end after it."""
    gate = tmp_path / "gate"
    iterator = aiter(DataLoader(Gated(gate), batch_size=4, num_workers=num_workers))
    assert (await anext(iterator)).tolist() == [0, 1, 2, 3]
    first, second, third = (asyncio.ensure_future(anext(iterator)) for _ in range(3))
    await until(lambda: inside.is_waiting(iterator))
    first.cancel()
    await asyncio.sleep(0)
    gate.touch()
    ended = await asyncio.gather(second, third, return_exceptions=True)
    assert sorted(type(one).__name__ for one in ended) == ["StopAsyncIteration", "Tensor"]
    (batch,) = (one for one in ended if isinstance(one, torch.Tensor))
    assert batch.tolist() == [4, 5, 6, 7]
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


@WORKERS
def test_several_loops_in_several_threads(num_workers: int) -> None:
    """On asyncio's loops and on uvloop's at the same time, with an iterator each: one is of one loop."""
    uvloop = pytest.importorskip("uvloop")
    loader = numbers(num_workers, 400)

    def run(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> list[int]:
        async def main() -> list[int]:
            return [int(batch[0]) async for batch in loader]

        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(main())

    factories = [asyncio.new_event_loop, uvloop.new_event_loop] * 2
    with ThreadPoolExecutor(4) as threads:
        shares = list(threads.map(run, factories))
    assert shares == [list(range(0, 400, 4))] * 4


@WORKERS
async def test_an_iterator_is_of_one_loop(num_workers: int) -> None:
    """Another one that runs beside it is refused; one that comes after it goes on."""
    iterator = await asyncio.to_thread(asyncio.run, taken(aiter(numbers(num_workers, 12)), 1))
    assert (await anext(iterator)).tolist() == [4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="tasks of another event loop"):
        await asyncio.to_thread(asyncio.run, taken(iterator, 1))
    assert (await anext(iterator)).tolist() == [8, 9, 10, 11]


async def taken(iterator: Any, count: int) -> Any:
    """Return an iterator that has given so many batches."""
    for _ in range(count):
        await anext(iterator)
    return iterator


@WORKERS
async def test_an_iterator_has_one_face(num_workers: int) -> None:
    """`aiter` decides, or the first call; a call by the other face says so, and costs nothing."""
    by_for, by_async_for = iter(numbers(num_workers, 8)), aiter(numbers(num_workers, 8))
    with pytest.raises(RuntimeError, match="read by `async for`, so it cannot be read by `for`"):
        next(by_async_for)
    seen = [next(by_for).tolist(), (await anext(by_async_for)).tolist()]
    with pytest.raises(RuntimeError, match="read by `for`, so it cannot be read by `async for`"):
        await anext(by_for)
    with pytest.raises(RuntimeError, match="read by `async for`, so it cannot be read by `for`"):
        next(by_async_for)
    seen += [next(by_for).tolist(), (await anext(by_async_for)).tolist()]
    assert seen == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert list(by_for) == [batch async for batch in by_async_for] == []


class Interrupting:
    """A sampler whose second order is interrupted: a handler raises in the middle of it."""

    def __init__(self) -> None:
        self.orders = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        self.orders += 1
        yield 0
        if self.orders == 2:
            raise KeyboardInterrupt
        yield from range(1, 40)


def test_nobody_waits_for_a_run_that_an_interrupt_has_cut_off() -> None:
    """Workers were told of the next run, which nobody takes from. The iterator is closed; another has new workers."""
    loader: Any = DataLoader(Numbers(), 2, sampler=Interrupting(), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(next, iterator)
        with pytest.raises(LoaderClosedError):
            taken.result(SOON_S)
    assert len(list(loader)) == 20


@pytest.mark.parametrize("how", ["an interrupt", "a load"])
def test_what_was_left_is_not_used_again_before_the_loop_has_closed_it(how: str) -> None:
    """The thread of the loop is told, and may have something else to do."""
    sampler = Interrupting() if how == "an interrupt" else None
    loader: Any = DataLoader(Numbers(), 2, sampler=sampler, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    may_go_on = threading.Event()
    get_portal().post(may_go_on.wait, 60.0)
    if how == "a load":
        loader.load_state_dict(loader.state_dict())
    else:
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    threading.Timer(0.1, may_go_on.set).start()
    assert iter(loader) is not iterator
    assert len(list(loader)) == 20


def test_a_thread_that_waits_goes_on_in_the_run_that_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been woken before that run was there, and wait for the last one again."""
    loader: Any = DataLoader(Gated(tmp_path / "gate"), 4, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    take_from = WorkerIterator._take_from

    def late(self: Any, run: Any) -> None:
        wait_until(lambda: inside.engine(self).run is run)
        time.sleep(0.1)
        take_from(self, run)

    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(next, iterator)
        wait_until(lambda: inside.is_waiting(iterator))
        with monkeypatch.context() as patch:
            patch.setattr(WorkerIterator, "_take_from", late)
            assert iter(loader) is iterator
        (tmp_path / "gate").touch()
        assert taken.result(SOON_S).tolist() == [0, 1, 2, 3]
    assert [batch.tolist() for batch in iterator] == [[4, 5, 6, 7]]


def test_a_batch_counts_for_the_run_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread begins the next run in the instant in which a batch of the last one is given."""
    loader: Any = numbers(2, persistent_workers=True)
    iterator = iter(loader)
    give = WorkerIterator._give

    def restarted(self: Any, run: Any, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(WorkerIterator, "_give", give)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(iter, loader).result(SOON_S)
        return give(self, run, *args, **options)

    monkeypatch.setattr(WorkerIterator, "_give", restarted)
    first = next(iterator)
    assert first.tolist() == next(iterator).tolist()
    assert sum(len(batch) for batch in iterator) == 36


async def test_each_run_of_persistent_workers_has_one_face() -> None:
    """Whatever that of the run before was: a thread and a task that wait for one batch would never hear of it both."""
    loader: Any = numbers(1, 8, persistent_workers=True)

    async def take(face: str) -> Any:
        return (await asyncio.to_thread(next, iterator) if face == "for" else await anext(iterator)).tolist()

    for first, second in (("for", "async for"), ("async for", "for"), ("for", "async for")):
        iterator = iter(loader) if first == "for" else aiter(loader)
        assert await take(first) == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match=f"read by `{first}`, so it cannot be read by `{second}`"):
            await take(second)
        assert await take(first) == [4, 5, 6, 7]
        assert not [each async for each in iterator] if first == "async for" else not list(iterator)
    await iterator.aclose()


@WORKERS
async def test_batches_that_are_always_ready_leave_other_tasks_their_turns(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here after each batch; otherwise when the loop had no turn for a while."""
    monkeypatch.setattr(base_iterator, "LONGEST_TURN_S", -1.0)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(turn())
    count = 0
    async for _ in numbers(num_workers, 400):
        count += 1
        assert turns >= count
    other.cancel()
    assert count == 100


# ------------------------------------------------------------------------------------------------------- exceptions


async def results_of(iterator: AsyncIterator[Any]) -> list[Any]:
    """Return all batches as lists, and in the place of a batch what was raised."""
    results: list[Any] = []
    while True:
        try:
            results.append((await anext(iterator)).tolist())
        except StopAsyncIteration:
            return results
        except Exception as error:
            results.append(error)


def results_of_for(iterator: Iterator[Any]) -> list[Any]:
    """The same by the other face."""
    results: list[Any] = []
    while True:
        try:
            results.append(next(iterator).tolist())
        except StopIteration:
            return results
        except Exception as error:
            results.append(error)


@WORKERS
def test_a_cancelled_error_of_a_sample_costs_its_batch(num_workers: int) -> None:
    """Of a loop of its own, for example: nothing has cancelled the consumer, for whom the batch would be kept."""
    dataset = Numbers(16, error=asyncio.CancelledError(), at=5)
    results = results_of_for(iter(DataLoader(dataset, batch_size=4, num_workers=num_workers)))
    error = results.pop(1)
    assert type(error) is RuntimeError
    assert "CancelledError" in str(error)
    assert results == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15]]


def bad_sampler() -> Iterator[int]:
    """Name six numbers, then raise."""
    yield from range(6)
    raise OSError("no more")


class Flickering:
    """A sampler that raises now and then, and goes on."""

    def __iter__(self) -> Iterator[Any]:
        self._count = 0
        return self

    def __next__(self) -> list[int]:
        self._count += 1
        if self._count > 9:
            raise StopIteration
        if self._count % 3 == 0:
            raise OSError(self._count)
        return [self._count]


@WORKERS
@pytest.mark.parametrize("face", ["for", "async for"])
async def test_what_a_sampler_raises_comes_in_its_place(num_workers: int, face: str) -> None:
    """After the batches before it, as the user raised it; then the end, for a generator has no more."""
    loader = DataLoader(Numbers(), sampler=bad_sampler(), batch_size=2, num_workers=num_workers)
    results = results_of_for(iter(loader)) if face == "for" else await results_of(aiter(loader))
    assert results[:3] == [[0, 1], [2, 3], [4, 5]]
    (error,) = results[3:]
    assert repr(error) == "OSError('no more')"


@WORKERS
@pytest.mark.parametrize("face", ["for", "async for"])
async def test_a_sampler_that_goes_on_after_raising(num_workers: int, face: str) -> None:
    """So does the iterator."""
    loader = DataLoader(Numbers(), batch_sampler=Flickering(), num_workers=num_workers)
    results = results_of_for(iter(loader)) if face == "for" else await results_of(aiter(loader))
    assert [str(result) for result in results] == ["[1]", "[2]", "3", "[4]", "[5]", "6", "[7]", "[8]", "9"]


@pytest.mark.parametrize("num_consumers", [2, 5])
@pytest.mark.parametrize("sampler", [bad_sampler, Flickering])
def test_what_a_sampler_raises_reaches_one_of_many(num_consumers: int, sampler: Callable[[], Any]) -> None:
    """One thread gets it, and may never come again; the others come to the end."""
    if sampler is Flickering:
        loader = DataLoader(Numbers(seconds=0.01), batch_sampler=sampler(), num_workers=2)
    else:
        loader = DataLoader(Numbers(seconds=0.01), sampler=sampler(), batch_size=2, num_workers=2)
    iterator = iter(loader)
    errors: list[BaseException] = []
    batches: list[list[int]] = []

    def take() -> None:
        try:
            for batch in iterator:
                batches.append(batch.tolist())
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(num_consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)
    if sampler is bad_sampler:
        assert (len(errors), sorted(batches)) == (1, [[0, 1], [2, 3], [4, 5]])
    else:
        assert len(errors) == min(3, num_consumers)


class Unfriendly:
    """A key that can neither be pickled nor shown."""

    def __reduce__(self) -> Any:
        raise TypeError("this key stays here")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.processes
@pytest.mark.parametrize("face", ["for", "async for"])
async def test_keys_that_cannot_be_sent(face: str) -> None:
    """The error stands in the place of that batch, says which keys they were, and the next batch comes."""
    keys = [[0], [Unfriendly()], [2], [lambda: None], [4]]
    loader = DataLoader(Numbers(), batch_sampler=keys, num_workers=2)
    results = results_of_for(iter(loader)) if face == "for" else await results_of(aiter(loader))
    assert [result for result in results if isinstance(result, list)] == [[0], [2], [4]]
    assert str(results[1]) == "this key stays here"
    assert any("Unfriendly whose repr raised RuntimeError" in note for note in results[1].__notes__)
    assert any("lambda" in note for note in results[3].__notes__)


class Undescribed(Numbers):
    """Raises for a key that cannot be shown."""

    def __getitem__(self, key: Any) -> Any:
        raise ValueError("bad key")


class Shy:
    """A key that can be pickled, but not shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_an_error_about_a_key_that_cannot_be_shown() -> None:
    """The note about the indices must not get in the way of the error."""
    with pytest.raises(ValueError, match="bad key") as caught:
        next(iter(DataLoader(Undescribed(), sampler=[Shy()], num_workers=1)))
    assert "Shy whose repr raised" in caught.value.__notes__[-1]


async def test_a_second_run_before_the_workers_of_the_first_are_started() -> None:
    """What was read for the first run is not made in the second."""
    orders = iter(([0, 1, 2, 3], [7, 6, 5, 4]))

    class Orders:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter(next(orders))

    loader = DataLoader(Numbers(8), 2, sampler=Orders(), num_workers=2, persistent_workers=True)
    gate = threading.Event()
    get_portal().post(gate.wait, SOON_S)
    aiter(loader)
    second = aiter(loader)
    gate.set()
    assert [batch.tolist() async for batch in second] == [[7, 6], [5, 4]]
    await second.aclose()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_a_batch_sampler_that_fills_one_list_anew(num_workers: int, make: Callable[[list[int]], Any]) -> None:
    """Workers are told what a batch was when it was given, and not what is there by the time it is sent."""

    def batches() -> Iterator[Any]:
        batch = make([0, 0, 0])
        for first in range(0, 60, 3):
            for place in range(3):
                batch[place] = first + place
            yield batch

    loader = DataLoader(range(60), batch_sampler=batches(), num_workers=num_workers)  # type: ignore[arg-type]
    assert torch.cat([*loader]).tolist() == [*range(60)]


class Lookup(Dataset[int]):
    """Its keys hold a number."""

    def __getitem__(self, key: Any) -> int:
        return int(key[0])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make", [lambda: [0], lambda: {0: 0}], ids=["list", "dict"])
def test_a_batch_sampler_that_fills_the_keys_of_one_list_anew(num_workers: int, make: Callable[[], Any]) -> None:
    """The same, one level further in."""

    def batches() -> Iterator[Any]:
        batch = [make() for _ in range(3)]
        for first in range(0, 60, 3):
            for place in range(3):
                batch[place][0] = first + place
            yield batch

    loader = DataLoader(Lookup(), batch_sampler=batches(), num_workers=num_workers)  # type: ignore[arg-type]
    assert torch.cat([*loader]).tolist() == [*range(60)]
