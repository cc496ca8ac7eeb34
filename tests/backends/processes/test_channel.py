"""Both ends of a socketpair: frames of any size in both directions, full pipes, ends, and what is no frame."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from asyncloader.backends.processes.channel import Channel, open_pair
from asyncloader.loops import GuardedLoop
from asyncloader.messages.frames import BadFrame, frame
from asyncloader.messages.messages import HEADER, Kind
from asyncloader.worker.channel import WorkerChannel
from tests.messages.test_frames import wire

SOON_S = 10.0


class Parent:
    """The parent's end, and what came over it."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.ends: list[Exception | None] = []
        self.changed = asyncio.Event()
        self.channel = Channel(GuardedLoop(asyncio.get_running_loop()), sock, self._on_frames, self._on_closed)
        self.channel.open()

    def _on_frames(self, frames: Iterable[tuple[int, memoryview]]) -> None:
        for kind, body in frames:
            self.frames.append((kind, bytes(body)))
            self.changed.set()

    def _on_closed(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has come."""
        async with asyncio.timeout(SOON_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Parent, socket.socket]]:
    """The parent's end and the worker's socket."""
    ours, theirs = open_pair()
    parent = Parent(ours)
    yield parent, theirs
    parent.channel.close()
    theirs.close()


async def test_both_directions(ends: tuple[Parent, socket.socket]) -> None:
    """Frames in several parts, small and large."""
    parent, theirs = ends
    worker = WorkerChannel(theirs)
    parent.channel.send(Kind.TICKETS, b"ab", memoryview(b"cd"), bytearray(b"ef"))
    assert await asyncio.to_thread(worker.receive, wait=True) == (Kind.TICKETS, b"abcdef")
    assert worker.receive(wait=False) is None
    large = os.urandom(5 << 20)
    sending = asyncio.create_task(asyncio.to_thread(worker.send, Kind.BATCH, b"record", large))
    await parent.until(lambda: bool(parent.frames))
    await sending
    assert parent.frames == [(Kind.BATCH, b"record" + large)]


async def test_many_parts(ends: tuple[Parent, socket.socket]) -> None:
    """More than the kernel takes at once."""
    parent, theirs = ends
    parts = [bytes([i % 256]) * (i % 50) for i in range(5000)]
    sending = asyncio.create_task(asyncio.to_thread(WorkerChannel(theirs).send, Kind.BATCH, *parts))
    await parent.until(lambda: bool(parent.frames))
    await sending
    assert parent.frames == [(Kind.BATCH, b"".join(parts))]


async def test_a_frame_that_more_follow_waits_for_the_next(ends: tuple[Parent, socket.socket]) -> None:
    """Both go at once, in order; alone it goes in the loop's next turn; also where the socket takes nothing."""
    parent, theirs = ends
    worker = WorkerChannel(theirs)
    parent.channel.send(Kind.EPOCH, b"one", more=True)
    assert worker.receive(wait=False) is None
    parent.channel.send(Kind.TICKETS, b"two")
    assert theirs.recv(100) == wire([(Kind.EPOCH, b"one"), (Kind.TICKETS, b"two")])
    parent.channel.send(Kind.EPOCH, b"alone", more=True)
    await asyncio.sleep(0)
    assert worker.receive(wait=False) == (Kind.EPOCH, b"alone")
    large = b"x" * (4 << 20)
    parent.channel.send(Kind.TICKETS, large)
    parent.channel.send(Kind.EPOCH, b"behind", more=True)
    parent.channel.send(Kind.TICKETS, b"last")
    frames = await asyncio.to_thread(lambda: [worker.receive(wait=True) for _ in range(3)])
    assert frames == [(Kind.TICKETS, large), (Kind.EPOCH, b"behind"), (Kind.TICKETS, b"last")]
    parent.channel.send(Kind.EPOCH, b"never", more=True)
    parent.channel.close()  # the call that would have sent it finds nothing
    await asyncio.sleep(0)


async def test_a_worker_that_does_not_read_holds_up_nobody(ends: tuple[Parent, socket.socket]) -> None:
    """What the socket does not take waits, in order, and goes out when the worker reads on; memory may be used
    again."""
    parent, theirs = ends
    memory = bytearray(700_000)
    for number in range(8):
        memory[:] = bytes([number]) * len(memory)
        parent.channel.send(Kind.TICKETS, memory)
        parent.channel.send(Kind.CONFIRM, b"small")
    memory[:] = b"\xff" * len(memory)
    assert parent.channel._unsent
    worker = WorkerChannel(theirs)

    def read_all() -> list[Any]:
        return [worker.receive(wait=True) for _ in range(16)]

    received = await asyncio.to_thread(read_all)
    assert received[1::2] == [(Kind.CONFIRM, b"small")] * 8
    assert [(kind, body[0], len(set(body)), len(body)) for kind, body in received[::2]] == [
        (Kind.TICKETS, number, 1, 700_000) for number in range(8)
    ]
    assert not parent.channel._unsent


async def test_full_in_both_directions(ends: tuple[Parent, socket.socket]) -> None:
    """The parent reads while it cannot write, so the two cannot block each other."""
    parent, theirs = ends
    worker = WorkerChannel(theirs)
    large = b"x" * (4 << 20)
    parent.channel.send(Kind.TICKETS, large)

    def answer() -> list[int]:
        worker.send(Kind.BATCH, large)  # before it has read anything
        frames = [worker.receive(wait=True) for _ in range(2)]
        return [len(received[1]) for received in frames if received is not None]

    answering = asyncio.create_task(asyncio.to_thread(answer))
    await parent.until(lambda: bool(parent.frames))
    parent.channel.send(Kind.TICKETS, b"more")
    assert await answering == [4 << 20, 4]


async def test_the_end_is_told_once(ends: tuple[Parent, socket.socket]) -> None:
    """What was sent before comes first."""
    parent, theirs = ends
    worker = WorkerChannel(theirs)
    worker.send(Kind.READY)
    worker.send(Kind.BATCH, b"last words")
    worker.close()
    await parent.until(lambda: bool(parent.ends))
    assert parent.frames == [(Kind.READY, b""), (Kind.BATCH, b"last words")]
    assert parent.ends == [None]
    parent.channel.send(Kind.TICKETS, b"too late")  # dropped
    parent.channel.close()


async def test_a_truncated_frame_is_dropped(ends: tuple[Parent, socket.socket]) -> None:
    """The worker died while it sent."""
    parent, theirs = ends
    theirs.sendall(b"".join(frame(Kind.READY, [])) + HEADER.pack(100, Kind.BATCH) + b"only so much")
    theirs.close()
    await parent.until(lambda: bool(parent.ends))
    assert (parent.frames, parent.ends) == ([(Kind.READY, b"")], [None])


async def test_garbage_ends_the_channel(ends: tuple[Parent, socket.socket]) -> None:
    """With an error that says what it was; the frames before it are delivered."""
    parent, theirs = ends
    theirs.sendall(b"".join(frame(Kind.READY, [])) + HEADER.pack(12, 77) + b"x" * 12)
    await parent.until(lambda: bool(parent.ends))
    assert parent.frames == [(Kind.READY, b"")]
    (error,) = parent.ends
    assert isinstance(error, BadFrame)
    assert "kind 77 and 12 bytes" in str(error)


async def test_what_dealing_with_a_frame_raises_is_told() -> None:
    """It is a bug of ours, which ends the run: a batch may be lost that its consumer would wait for."""
    ours, theirs = open_pair()
    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def take(frames: Iterable[tuple[int, memoryview]]) -> None:
        raise ValueError(bytes(next(iter(frames))[1]))

    channel = Channel(GuardedLoop(asyncio.get_running_loop(), told.set_result), ours, take, lambda error: None)
    channel.open()
    theirs.sendall(wire([(Kind.BATCH, b"1")]))
    async with asyncio.timeout(SOON_S):
        error = await told
    channel.close()
    theirs.close()
    assert repr(error) == repr(ValueError(b"1"))


async def test_drain_reads_what_a_dead_worker_left(ends: tuple[Parent, socket.socket]) -> None:
    """Also while a child of the worker still holds the other end, so that there is no end to be seen."""
    parent, theirs = ends
    loop = asyncio.get_running_loop()
    worker = WorkerChannel(theirs)
    bodies = [os.urandom(100_000) for _ in range(5)]
    for body in bodies:
        worker.send(Kind.BATCH, body)
    loop.call_soon(parent.channel.drain)
    await parent.until(lambda: len(parent.frames) == 5)
    assert [body for _, body in parent.frames] == bodies
    assert parent.ends == []


def test_the_worker_learns_that_the_parent_is_gone() -> None:
    """While it waits, and while it sends."""
    ours, theirs = open_pair()
    worker = WorkerChannel(theirs)
    timer = threading.Timer(0.05, ours.close)
    timer.start()
    with pytest.raises(EOFError):
        worker.receive(wait=True)
    with pytest.raises(OSError, match="pipe"):
        worker.send(Kind.BATCH, b"x" * (8 << 20))
    timer.join()
    worker.close()
