"""Producers in other processes: they lease and put by a handle; whichever process ends, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import DataLoader
from asyncloader.online import Feed, FeedClosedError, FeedHandle, LeaseLostError
from asyncloader.online.handle import connect
from asyncloader.online.runs import Seat
from asyncloader.online.wire import Channel, parts_of
from tests.support.nursery import Program
from tests.support.patience import wait_until

# Each that starts a process anew pickles the handle; the fork server has imported torch.
CONTEXTS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


def produce(handle: FeedHandle) -> None:
    """Lease items and put them."""
    for item in handle.leases():
        with item:
            item.put((item.value, os.getpid()))


def produce_async(handle: FeedHandle) -> None:
    """Lease items and put them, on an event loop, several at once."""

    async def one() -> None:
        async for item in handle.leases():
            async with item:
                await asyncio.sleep(0)
                await item.put((item.value, os.getpid()))

    async def several() -> None:
        await asyncio.gather(*(one() for _ in range(4)))

    asyncio.run(several())


def hold_one(handle: FeedHandle, held: Any) -> None:
    """Lease an item and hang."""
    lease = handle.lease()
    held.send(lease.__enter__().value)
    threading.Event().wait()


@pytest.fixture
def begin() -> Iterator[Callable[..., Any]]:
    """Start processes, which are joined at the end."""
    processes = []

    def started(context: str, target: Any, *arguments: Any) -> Any:
        process = mp.get_context(context).Process(target=target, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.join(20)
        assert process.exitcode is not None
        process.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("target", [produce, produce_async])
@pytest.mark.parametrize("context", CONTEXTS)
def test_several_processes(context: str, target: Any, begin: Callable[..., Any]) -> None:
    """Each item is made once, and no older than the bound."""
    feed = Feed(range(60), batch_size=4, max_staleness=1)
    for _ in range(2):
        begin(context, target, feed.handle())
    found: list[int] = []
    for values, _ in DataLoader(feed):
        found += values.tolist()
        feed.version += 1
    assert sorted(found) == [*range(60)]
    assert not feed.stats().counts["late"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_producer_that_is_killed(context: str, begin: Callable[..., Any]) -> None:
    """Its item is leased again."""
    feed = Feed(range(1), batch_size=1, max_samples=1)
    receiving, sending = mp.get_context(context).Pipe(duplex=False)
    process = begin(context, hold_one, feed.handle(), sending)
    assert receiving.recv() == 0
    assert feed.stats().running == 1
    os.kill(process.pid, signal.SIGKILL)
    with feed.lease() as item:
        assert (item.value, item.tries) == (0, 1)
        item.drop()
    for end in (receiving, sending):
        end.close()


def test_a_source_that_raises() -> None:
    """Producers with a handle are told as those of the feed's process are: their loops do not just end."""

    def items() -> Iterator[int]:
        yield 0
        raise OSError("no more prompts")

    feed = Feed(items(), batch_size=1, max_samples=4)
    handle = pickle.loads(pickle.dumps(feed.handle()))
    with pytest.raises(OSError, match="no more prompts"):
        produce(handle)
    with pytest.raises(FeedClosedError, match="its source has raised OSError"):
        produce(handle)
    handle.close()


async def test_a_state_takes_back_the_version_that_a_handle_knows() -> None:
    """A sample is never newer than the weights; one that is said to be is refused."""
    feed = Feed(batch_size=1, max_samples=8, fn=lambda sample: sample.version)
    state, handle = feed.state_dict(), feed.handle()
    feed.version = 5
    assert handle.version == 5
    feed.load_state_dict(state)
    await handle.put("a")
    feed.version = 1  # which the handle knows by the next answer
    await handle.put_many(["b", "c"])
    with pytest.raises(ValueError, match="an integer from 0 to that of the feed, 1, but got 5"):
        await handle.put("d", version=5)
        await handle.flush()
    feed.close()
    assert torch.cat(list(DataLoader(feed))).tolist() == [0, 0, 0]
    handle.close()


def serve_until_killed(pipe: Any) -> None:
    """Be the trainer's process."""
    feed = Feed(range(3), batch_size=1, max_samples=1)
    pipe.send(feed.handle())
    threading.Event().wait()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_trainer_that_is_killed(is_async: bool, begin: Callable[..., Any]) -> None:
    """Those who wait are told."""
    receiving, sending = mp.get_context("forkserver").Pipe(duplex=False)
    process = begin("forkserver", serve_until_killed, sending)
    handle = receiving.recv()
    held = handle.lease().__enter__()
    threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(FeedClosedError, match="was dropped, or its process ended"):
        if is_async:
            asyncio.run(_wait(handle))
        else:
            handle.lease().__enter__()
    with pytest.raises(FeedClosedError):
        held.put(1)
    handle.close()
    with pytest.raises(FeedClosedError, match="the feed behind this handle was dropped"):
        handle.put_sync(1)
    for end in (receiving, sending):
        end.close()


def fork_and_hang(pipe: Any) -> None:
    """Be a trainer's process that forks another one, which outlives it."""
    feed = Feed(range(3), batch_size=1, max_samples=1)
    pipe.send(feed.handle())
    pipe.recv()
    if child := os.fork():
        pipe.send(child)
    threading.Event().wait()


def test_forks_of_the_trainer_hold_no_connections(begin: Callable[..., Any]) -> None:
    """The end of the trainer is seen while they go on."""
    ours, theirs = mp.get_context("forkserver").Pipe()
    process = begin("forkserver", fork_and_hang, theirs)
    handle = ours.recv()
    held = handle.lease().__enter__()
    ours.send("connected")
    fork = ours.recv()
    try:
        threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(FeedClosedError, match="was dropped, or its process ended"):
            handle.lease().__enter__()
        handle.close()
        with pytest.raises(FeedClosedError, match="the feed behind this handle was dropped"):
            handle.put_sync(held.value)
    finally:
        os.kill(fork, signal.SIGKILL)
    for end in (ours, theirs):
        end.close()


USES: dict[str, Callable[[Feed[Any], Any], object]] = {
    "put": lambda feed, _: asyncio.run(feed.put(1)),
    "put_many": lambda feed, _: asyncio.run(feed.put_many([1])),
    "put_nowait": lambda feed, _: feed.put_nowait(1),
    "put_sync": lambda feed, _: feed.put_sync(1),
    "lease": lambda feed, _: feed.lease().__enter__(),
    "leases": lambda feed, _: next(feed.leases()),
    "put of a lease": lambda _, held: held.put(1),
    "drop of a lease": lambda _, held: held.drop(),
    "version": lambda feed, _: feed.version,
    "set version": lambda feed, _: setattr(feed, "version", 1),
    "handle": lambda feed, _: feed.handle(),
    "stats": lambda feed, _: feed.stats(),
    "state": lambda feed, _: feed.state_dict(),
    "load": lambda feed, _: feed.load_state_dict(feed.state_dict()),
    "iterate": lambda feed, _: next(iter(DataLoader(feed))),
}


def use_copy(feed: Feed[Any], held: Any, pipe: Any) -> None:
    """Use a feed in a fork, while the lock of the copy is held."""
    for use in USES.values():
        try:
            pipe.send(repr(use(feed, held)))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    held.retry()
    feed.close()
    pipe.send(feed._server.ledger.closed)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_that_uses_the_feed_is_refused(begin: Callable[..., Any]) -> None:
    """It is told to use a handle; the trainer's feed is as if nothing had been."""
    feed: Feed[Any] = Feed(range(2), batch_size=1)
    feed.put_nowait("before")
    held = feed.lease().__enter__()
    receiving, sending = mp.get_context("fork").Pipe(duplex=False)
    with feed._server._lock:  # as a thread of the trainer may have it at the moment
        begin("fork", use_copy, feed, held, sending)
    sending.close()
    for name in USES:
        assert receiving.poll(20), name
        assert receiving.recv().startswith("RuntimeError: this feed is in another process"), name
    assert receiving.recv() is False
    with pytest.raises(EOFError):
        receiving.recv()
    receiving.close()
    held.put("leased")
    feed.put_nowait("after")
    with feed.lease() as item:
        assert item.value == 1
    feed.close()
    assert [sample for batch in DataLoader(feed) for sample in batch] == ["before", "leased", "after"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_a_thread_uses_the_handle(begin: Callable[..., Any]) -> None:
    """The fork does not wait for that thread, which it has not."""
    feed = Feed(range(4), batch_size=4)
    handle = feed.handle()
    with handle._lock:  # as a thread has it at the moment
        begin("fork", produce, handle)
    assert [items.tolist() for items, _ in DataLoader(feed)] == [[0, 1, 2, 3]]
    handle.close()


async def _wait(handle: FeedHandle) -> None:
    async with handle.lease():
        pass


async def test_everything_that_a_feed_does() -> None:
    """The same calls, errors and versions, beside the feed."""
    feed = Feed(range(4), batch_size=2, group_size=2, max_samples=4)
    feed.version = 3
    handle = pickle.loads(pickle.dumps(feed.handle()))
    assert handle.version == 3
    async with handle.lease() as item:
        assert (item.id, item.value, item.version, item.tries) == (0, 0, 3, 0)
        with pytest.raises(ValueError, match=r"a group is a list of 2 samples"):
            await item.put([1])
        await item.put([1, 2], version=2)
        with pytest.raises(LeaseLostError):
            await item.put([1, 2])
    with pytest.raises(KeyError):
        async with handle.lease():
            raise KeyError
    async with handle.lease() as item:
        assert (item.value, item.tries) == (1, 1)
        item.retry()
    async with handle.lease() as item:
        assert item.tries == 2
        item.drop()
    await handle.put([3, 4])
    many = asyncio.create_task(handle.put_many([[5, 6], [7, 8]]))
    single = asyncio.create_task(asyncio.to_thread(handle.put_sync, [9, 10]))
    await asyncio.sleep(0.1)
    assert not many.done()
    feed.version = 4
    batches = []
    async for batch in DataLoader(feed):
        batches.append(batch.tolist())
        if len(batches) == 4:
            await asyncio.gather(many, single)
            feed.close("enough")
    assert sorted(batches) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    with pytest.raises(FeedClosedError, match="enough"):
        await handle.put([1, 2])
    assert handle.version == 4
    handle.close()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", ["drop", "retry"])
def test_what_was_said_before_a_handle_is_closed(how: str, is_async: bool) -> None:
    """It is heard, and the caller does not wait for that: here while the feed is busy."""
    feed = Feed(range(1), batch_size=1)
    handle = feed.handle()

    async def leave(item: Any) -> None:
        async with item:
            item.drop() if how == "drop" else item.retry(value="half")

    lease = handle.lease().__enter__()
    with feed._server._lock:
        if is_async:
            asyncio.run(leave(lease))
        else:
            with lease:
                lease.drop() if how == "drop" else lease.retry(value="half")
        handle.close()
    wait_until(lambda: not feed.stats().handles)
    stats = feed.stats()
    if how == "drop":
        assert (stats.counts["dropped"], stats.pending) == (1, 0)
    else:
        with feed.lease() as item:
            assert (item.value, item.tries) == ("half", 0)
            item.drop()


@pytest.mark.parametrize("name", ["lease", "begin"])
def test_an_answer_to_a_process_that_has_ended(name: str) -> None:
    """What it was given is given back: the end may be seen in the turn of the loop that has heard the call."""
    feed = Feed(range(1), batch_size=1)
    here, there = socket.socketpair()
    door = feed._server.open_door()
    with feed._server._lock:
        door._loop.call_soon_threadsafe(lambda: door._loop.create_task(door._serve(Channel(there, door._loop))))
        arguments = () if name == "lease" else (Seat(0, 1), int)
        here.sendall(b"".join(parts_of(7, (name, *arguments))))
        here.close()  # before the feed has read anything
        wait_until(lambda: feed._server.clients)
    wait_until(lambda: not feed.stats().handles)
    if name == "lease":
        with feed.lease() as item:
            assert (item.value, item.tries) == (0, 1)
            item.drop()
    else:
        wait_until(lambda: feed._server._runs._gone is not None)


def test_messages_that_do_not_fit_into_the_socket() -> None:
    """They come whole, and in their order, whichever thread has sent them."""
    here, there = socket.socketpair()
    loop, found = asyncio.new_event_loop(), list[Any]()
    sender, reader = Channel(here, loop), Channel(there, loop)

    def receive(tag: int, message: Any) -> None:
        found.append((tag, message[0], len(message[1])))
        if len(found) == 60:
            reader.close()

    async def run() -> None:
        with ThreadPoolExecutor(3) as pool:
            for thread in range(3):
                pool.submit(lambda tag: [sender.send(tag, (n, bytes(70_000 * (n % 3)))) for n in range(20)], thread)
        assert sender._outbox
        await asyncio.gather(sender.run(receive), reader.run(receive))

    loop.run_until_complete(run())
    loop.close()
    assert sorted(found) == [(tag, n, 70_000 * (n % 3)) for tag in range(3) for n in range(20)]
    for tag in range(3):
        assert [n for of, n, _ in found if of == tag] == [*range(20)]
    sender.send(0, "nobody hears this")
    assert not sender._outbox


async def test_a_task_that_is_cancelled_holds_no_lease() -> None:
    """Its request is withdrawn, or the lease that comes too late for it is given back."""
    feed = Feed(range(2), batch_size=1, max_samples=1)
    handle = feed.handle()
    async with feed.lease() as held:
        task = asyncio.create_task(_wait(handle))
        await asyncio.to_thread(wait_until, lambda: feed.stats().producers_waiting == 1)
        task.cancel()
        await asyncio.wait({task})
        held.drop()
    async with feed.lease() as again:
        assert (again.value, again.tries) == (1, 0)
        again.drop()
    handle.close()
    feed.close()


def is_answered(handle: FeedHandle) -> bool:
    """Whether a handle has had all its answers."""
    assert handle._connection is not None
    return not handle._connection._requests


async def test_a_lease_that_came_before_the_task_was_cancelled() -> None:
    """The loop was busy, and had not told the task: the lease is given back."""
    feed = Feed(range(3), batch_size=1, max_samples=1)
    handle = feed.handle()
    for _ in range(3):
        task = asyncio.create_task(_wait(handle))
        with feed._server._lock:  # the task waits before there is an answer
            await asyncio.sleep(0)
        wait_until(lambda: feed.stats().running == 1 and is_answered(handle))  # without letting the loop go on
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await asyncio.to_thread(wait_until, lambda: feed.stats().pending == 1)
    async with handle.lease() as item:
        assert (item.value, item.tries) == (0, 0)
        item.drop()
    handle.close()
    feed.close()


class InterruptError(BaseException):
    """What the handler of a signal raises, as Ctrl-C does."""


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Interrupt the main thread, which waits in this block, when a condition holds."""

    def handler(*_: object) -> None:
        raise InterruptError

    def watch() -> None:
        wait_until(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=watch)
    try:
        thread.start()
        with pytest.raises(InterruptError):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_thread_that_is_interrupted() -> None:
    """Its lease is given back, and its put is not carried out."""
    feed = Feed(range(3), batch_size=1, max_samples=1)
    handle = feed.handle()
    held = feed.lease().__enter__()
    with interrupted_when(lambda: feed.stats().producers_waiting == 1):
        handle.lease().__enter__()
    wait_until(lambda: feed.stats().producers_waiting == 0)
    with interrupted_when(lambda: feed.stats().producers_waiting == 1):
        handle.put_sync("interrupted")
    wait_until(lambda: feed.stats().producers_waiting == 0)
    held.put("held")
    assert handle.version == 0
    feed.close()
    assert list(DataLoader(feed)) == [["held"]]
    handle.close()


@pytest.mark.parametrize("is_many", [False, True])
async def test_a_put_that_is_cancelled_is_not_carried_out(is_many: bool) -> None:
    """Who tries again puts the sample once, as with the feed itself."""
    feed = Feed(batch_size=1, max_samples=1)
    handle = feed.handle()
    await handle.put("a")
    for _ in range(3):
        put = handle.put_many(["b", "c"]) if is_many else handle.put("b")
        task = asyncio.create_task(put)
        await asyncio.to_thread(wait_until, lambda: feed.stats().producers_waiting == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert feed.stats().producers_waiting == 0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.put("b"), 0.05)
    last = asyncio.create_task(handle.put("last"))
    found: list[str] = []
    async for batch in DataLoader(feed):
        found += batch
        if len(found) == 2:
            await last
            feed.close()
    assert found == ["a", "last"]
    handle.close()


async def test_a_put_that_was_done_before_it_was_cancelled() -> None:
    """A time limit takes it as done; whoever is cancelled for good is so at the next await."""
    feed = Feed(batch_size=1, max_samples=9)
    handle = feed.handle()
    done: list[str] = []

    async def put(sample: str) -> None:
        await handle.put(sample)
        done.append(sample)
        await asyncio.sleep(20)

    def wait_for_put(count: int) -> None:
        wait_until(lambda: feed.stats().ready == count and is_answered(handle))  # without letting the loop go on

    task = asyncio.create_task(put("cancelled"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it was sent, with what others have put in this turn
    wait_for_put(1)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert done == ["cancelled"]
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        loop.call_soon(loop.call_soon, wait_for_put, 2)
        loop.call_soon(limit.reschedule, 0)
        await handle.put("limited")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    feed.close()
    assert [batch async for batch in DataLoader(feed)] == [["cancelled"], ["limited"]]
    handle.close()


async def test_a_put_of_a_lease_that_was_done_before_it_was_cancelled() -> None:
    """It is done for the producer as well."""
    feed = Feed(range(1), batch_size=1)
    handle = feed.handle()

    def wait_for_put() -> None:
        wait_until(lambda: feed.stats().ready == 1 and is_answered(handle))

    async with handle.lease() as item:
        asyncio.get_running_loop().call_soon(wait_for_put)
        async with asyncio.timeout(0):
            await item.put("limited")
    feed.close()
    assert [batch async for batch in DataLoader(feed)] == [["limited"]]
    handle.close()


class Closed:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise LookupError("no such class here")


class OddError(Exception):
    """Cannot be unpickled, as many that have two arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


async def test_a_sample_that_the_trainer_cannot_unpickle() -> None:
    """The producer is told each time, its item has failed, and its other requests go on."""
    feed = Feed(range(1), batch_size=1, max_samples=2, max_retries=1)
    handle = feed.handle()
    for tries in range(2):
        with pytest.raises(RuntimeError, match="cannot be unpickled in the feed's process: LookupError: no such class"):
            async with handle.lease() as item:
                assert (item.value, item.tries) == (0, tries)
                await item.put(Closed())
    for put in (handle.put(Closed()), handle.put_many([1, Closed()])):
        with pytest.raises(RuntimeError, match="cannot be unpickled in the feed's process"):
            await put
            await handle.flush()
    with pytest.raises(RuntimeError, match="cannot be unpickled in the feed's process"):
        handle.put_sync(Closed())
    await handle.put("good")
    await handle.flush()
    feed.close()
    assert [batch async for batch in DataLoader(feed, collate_fn=list)] == [[1], ["good"]]
    assert feed.stats().counts["failed"] == 1
    handle.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_that_the_producer_cannot_unpickle(is_async: bool) -> None:
    """The producer is told; an item counts as failed, and is nobody's no more."""

    def source() -> Iterator[Any]:
        yield Closed()
        yield "good"
        raise OddError(1, 2)

    feed = Feed(source(), batch_size=1, max_samples=2, max_retries=0)
    handle = feed.handle()

    def lease() -> object:
        return asyncio.run(_lease(handle)) if is_async else _lease_sync(handle)

    with pytest.raises(RuntimeError, match="cannot be unpickled in this process: LookupError: no such class here"):
        lease()
    wait_until(lambda: feed.stats().running == 0)
    assert lease() == "good"
    assert feed.stats().counts["failed"] == 1
    with pytest.raises(RuntimeError, match="OddError: 1 2"):
        lease()
    handle.close()


def _lease_sync(handle: FeedHandle) -> object:
    with handle.lease() as item:
        item.drop()
        return item.value


async def _lease(handle: FeedHandle) -> object:
    async with handle.lease() as item:
        item.drop()
        return item.value


async def test_large_arrays() -> None:
    """They travel beside the pickle, and can be written to."""
    feed = Feed(batch_size=2)
    handle = feed.handle()
    for n in range(2):
        await handle.put(np.full((1000, 1000), n, np.float32))
    (batch,) = [batch async for batch in _first(feed)]
    assert batch.shape == (2, 1000, 1000)
    assert torch.equal(batch[1], torch.ones(1000, 1000))
    handle.close()
    feed.close()


def test_views_travel_without_the_memory_around_them() -> None:
    """Rows of a batch are what engines return."""
    rows = torch.arange(64 * 4096).reshape(64, 4096)
    sent = sum(memoryview(part).nbytes for row in rows for part in parts_of(1, ("put", [row])))
    assert rows.nbytes < sent < 1.1 * rows.nbytes


async def _first(feed: Feed[Any]) -> Any:
    async for batch in DataLoader(feed):
        yield batch
        return


@pytest.mark.parametrize("is_large", [False, True])
def test_an_interrupt_while_a_message_is_on_its_way(is_large: bool) -> None:
    """The handle goes on, and other threads do."""
    feed = Feed(batch_size=1, max_samples=8)
    handle = feed.handle()
    assert handle.version == 0
    with ThreadPoolExecutor(1) as pool:
        with feed._server._lock:  # the feed answers nothing
            other = pool.submit(handle.put_sync, "other")
            wait_until(lambda: not is_answered(handle))
            with interrupted_when(lambda: len(handle._connection._requests) == 2):  # type: ignore[union-attr]
                handle.put_sync(bytes(16 << 20) if is_large else "interrupted")
        other.result(20)
    handle.put_sync("again")
    feed.close()
    found = [sample for batch in DataLoader(feed) for sample in batch]
    assert (found[0], found[-1]) == ("other", "again")
    assert len(found) in (2, 3)  # what had been sent was put, as there was room at once
    handle.close()


def test_only_this_user_reaches_a_feed() -> None:
    """The socket is in a folder of this user's, and goes with the feed, not later: the folder may be removed then."""
    feed: Feed[int] = Feed(batch_size=1)
    path = Path(feed._server.open_door().path)
    assert (path.parent.stat().st_mode & 0o777, path.parent.stat().st_uid) == (0o700, os.geteuid())
    assert path.is_socket()
    del feed
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_are_refused() -> None:
    """Before a byte is sent to them, though the folder were open: the kernel says whose process has connected.

    Connections that say nothing hold no descriptor of the trainer's, however many there are, and keep no handle out.
    """
    feed: Feed[int] = Feed(batch_size=1)
    handle = feed.handle()
    handle.put_sync(1)
    path = Path(feed._server.open_door().path)
    path.parent.chmod(0o711)
    path.chmod(0o666)
    script = f"""
import os, socket
os.setuid(65534)
strangers = [socket.socket(socket.AF_UNIX) for _ in range(300)]
for stranger in strangers:
    stranger.settimeout(20)
    stranger.connect({str(path)!r})
print({{len(stranger.recv(1)) for stranger in strangers}}, flush=True)
input()
"""
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
        assert strangers.stdout is not None
        assert strangers.stdout.readline() == b"{0}\n"
        path.parent.chmod(0o700)
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # the pipes of this test
        handle.put_sync(2)
        strangers.communicate(b"\n", 20)
    feed.close()
    assert [int(number) for batch in DataLoader(feed) for number in batch] == [1, 2]
    handle.close()


def test_a_feed_that_is_not_the_one() -> None:
    """Somebody else's process that listens in the place of a feed that was: nothing of what it says is unpickled."""
    feed: Feed[int] = Feed(batch_size=1)
    path = feed._server.open_door().path
    with pytest.raises(FeedClosedError, match="the feed behind this handle was dropped"):
        FeedHandle(partial(connect, path, os.geteuid() + 1), feed.identity).put_sync(1)
    feed.close()


def test_handles_that_come_all_at_once_are_served() -> None:
    """However many."""
    feed: Feed[int] = Feed(batch_size=1, max_samples=200)
    handles = [feed.handle() for _ in range(100)]
    with ThreadPoolExecutor(100) as pool:
        list(pool.map(lambda numbered: numbered[1].put_sync(numbered[0]), enumerate(handles)))
    feed.close()
    assert sorted(int(number) for batch in DataLoader(feed) for number in batch) == [*range(100)]
    for handle in handles:
        handle.close()


def test_what_cannot_be_pickled() -> None:
    """It is an error of the call, and the item is not lost: it has failed once, and is leased again."""
    feed = Feed([lambda: 0, 1], batch_size=1, max_retries=1)
    handle = feed.handle()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Can't pickle|local object"):  # as Python 3.12 or 3.13 puts it
            handle.lease().__enter__()
    assert feed.stats().counts["failed"] == 1
    with pytest.raises(Exception, match=r"pickle|local object"), handle.lease() as item:
        item.put(lambda: 0)
    wait_until(lambda: feed.stats().pending == 1)
    handle.close()
    feed.close()
    with pytest.raises(FeedClosedError):
        feed.handle()


@pytest.mark.interpreter
def test_a_program_that_ends_with_a_feed(run: Callable[..., Program]) -> None:
    """It says nothing: a process that trains nothing has no loader, which would end the feed's thread before."""
    script = "from asyncloader.online import Feed; feed = Feed(batch_size=1); handle = feed.handle(); handle.version"
    ended = run(script)
    assert (ended.returncode, ended.err) == (0, "")


def test_nothing_is_left_of_a_feed_that_was_dropped() -> None:
    """Its thread ends, and handles are told."""
    feed = Feed(range(1), batch_size=1)
    handle = feed.handle()
    with handle.lease() as item:
        item.put(0)
    del feed
    gc.collect()
    wait_until(lambda: not any(thread.name == "asyncloader feed" for thread in threading.enumerate()))
    with pytest.raises(FeedClosedError):
        handle.put_sync(1)


class _Torn:
    """Is large, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _tear, (bytes(4 << 20),)


def _tear(data: bytes) -> None:
    raise ValueError(len(data))


def test_answers_are_read_while_the_handle_sends() -> None:
    """The feed answers before it reads on; so whoever sends a lot waits for the thread that reads answers."""
    feed = Feed((_Torn() for _ in range(24)), batch_size=1, max_retries=0, max_samples=100)
    handle = feed.handle()
    large = np.zeros(16 << 20, np.uint8)

    def lease() -> int:
        errors = 0
        with contextlib.suppress(FeedClosedError):
            for _ in range(8):
                try:
                    with handle.lease():
                        pass
                except RuntimeError as error:
                    errors += "unpickled" in str(error)
        return errors

    with ThreadPoolExecutor(6) as pool:
        leasing = [pool.submit(lease) for _ in range(3)]
        putting = [pool.submit(handle.put_sync, large) for _ in range(12)]
        assert [each.result(30) for each in leasing] == [8, 8, 8]
        for each in putting:
            each.result(30)
    handle.close()


def _fork_and_end(handle: FeedHandle, said: Any) -> None:
    with handle.lease() as item:
        if not (pid := os.fork()):
            sys.exit(0)  # which leaves the block
        os.waitpid(pid, 0)
        item.put(item.value)
    said.put("put")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_within_a_lease(begin: Callable[..., Any]) -> None:
    """A fork that leaves the block, because it ends, does not give back what its parent has leased."""
    feed, said = Feed([7], batch_size=1, max_retries=0), mp.get_context("fork").SimpleQueue()
    begin("fork", _fork_and_end, feed.handle(), said)
    assert said.get() == "put"
    feed.close()
    assert [batch.tolist() for batch in DataLoader(feed)] == [[7]]


async def test_a_door_that_cannot_accept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It tries again: the descriptors that were lacking are there later."""
    feed, tries = Feed([7], batch_size=1), []
    accept = socket.socket.accept

    def scarce(listener: socket.socket) -> Any:
        tries.append(listener)
        if len(tries) == 1:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    handle = feed.handle()
    async with handle.lease() as item:
        await item.put(item.value)
    assert "could not connect to its feed, and is accepted later" in caplog.text
    handle.close()
