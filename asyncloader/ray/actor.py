"""A worker as an actor of Ray: the loop over tickets that worker processes have, on a thread of the actor.

    trainer ── tell(number, kind, body) ──> WorkerActor ── messages ──> SerialLoop, OverlapLoop (a thread)
            <── hear() ────────────────────             <── what is sent ──┘
            <── ray.put: large buffers of batches ─────────────────────────┘

The actor is asynchronous, so it hears of a new epoch, of its end, and the question where a batch is, while samples are
being made. Ray carries out the calls of such actors in any order: each message has a number.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray

from asyncloader.loops import GuardedLoop
from asyncloader.messages.failure import CapturedError, with_notes
from asyncloader.messages.messages import EpochSpec, Kind
from asyncloader.ray.facts import facts
from asyncloader.stack_text import stack_of, traceback_of
from asyncloader.transport.codec import Encoder
from asyncloader.transport.recycle import RECYCLED_MIN, Recycler
from asyncloader.worker.bootstrap import keep_freed_memory
from asyncloader.worker.overlap_loop import make_loop
from asyncloader.worker.serve import exit_code, opened
from asyncloader.worker.transport import ProcessTransport, WorkerTransport

_MISSING = frozenset({"FileNotFoundError", "ModuleNotFoundError", "ImportError", "NotADirectoryError"})
_ELSEWHERE = (
    "If that is only on the trainer's machine: files belong on storage that all nodes have, modules into the "
    "runtime_env of RayWorkers, or of ray.init."
)


class Message(NamedTuple):
    """What a worker sends: a frame, whose large buffers are one of Ray's objects."""

    kind: int
    body: bytes
    buffers: Any = None


class Hello(NamedTuple):
    """What is at the other end: versions and processor, Ray's id of the node, and the process."""

    facts: dict[str, str]
    node: str
    pid: int


class WorkerActor:
    """One worker. Its methods run on the loop of the actor.

    Args:
        worker_id: From 0.
    """

    def __init__(self, worker_id: int) -> None:
        self._id = worker_id
        self._early: dict[int, tuple[int, bytes]] = {}  # messages that came before their turn, by number
        self._next = 0
        self._transport: ActorTransport | None = None
        self._sent: list[Message] = []
        self._has_sent = asyncio.Event()
        self._thread: threading.Thread

    def __repr__(self) -> str:  # Ray's log has it before each line
        return f"asyncloader worker {self._id}"

    async def hello(self) -> Hello:
        """Say what the trainer has to know before it sends anything that depends on versions."""
        return Hello(facts(), ray.get_runtime_context().get_node_id(), os.getpid())

    async def open(self, parts: Sequence[Any], are_read_only: Sequence[bool], epoch: EpochSpec) -> None:
        """Begin to work.

        Args:
            parts: The pickle of the spec, and its buffers, in the memory that Ray keeps once for each node.
            are_read_only: Of each, whether nobody writes to it: it stays there. Others are copied.
            epoch: The run over the data that the first tickets belong to.
        """
        source = partial(_unpickle, parts, are_read_only)
        loop = asyncio.get_running_loop()
        self._transport = ActorTransport(self._id, lambda message: loop.call_soon_threadsafe(self._send, message))
        self._thread = threading.Thread(target=self._serve, args=(source, epoch), daemon=True)
        self._thread.start()
        self._deliver()

    async def tell(self, number: int, kind: int, body: bytes) -> None:
        """Take a message of this number, counted from 0."""
        self._early[number] = kind, body
        self._deliver()

    async def hear(self) -> list[Message]:
        """Wait for what the worker sends next. One call at a time; it fails when the actor has ended."""
        await self._has_sent.wait()
        self._has_sent.clear()
        sent, self._sent = self._sent, []
        return sent

    async def where(self) -> str:
        """Return the stack of the thread that makes samples."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else stack_of(frame)

    def _deliver(self) -> None:
        while self._transport is not None and self._next in self._early:
            self._transport.put(*self._early.pop(self._next))
            self._next += 1

    def _send(self, message: Message) -> None:
        self._sent.append(message)
        self._has_sent.set()

    def _serve(self, source: Any, epoch: EpochSpec) -> None:
        transport = self._transport
        assert transport is not None
        code, words = 0, ""
        try:
            keep_freed_memory()
            transport.come_up()
            loop = make_loop(self._id, transport, epoch, opened(source))
            del source
            loop.work()
        except BaseException as error:  # as worker processes do, the worker ends; the trainer ends the actor
            code, words = exit_code(error), traceback_of(error)
        transport.send(Kind.END, (code, words))


def _unpickle(parts: Sequence[Any], are_read_only: Sequence[bool]) -> Any:
    buffers = [part if stays else bytearray(part) for part, stays in zip(parts, are_read_only, strict=True)]
    return pickle.loads(buffers[0], buffers=buffers[1:])


class ActorTransport(ProcessTransport):
    """The connection of a worker whose messages an actor has. What it sends is put into Ray's memory by its thread.

    So a sample may use its own memory again for the next batch.

    Args:
        worker_id: From 0.
        send: Hands a `Message` to the actor, in any thread.
    """

    def __init__(self, worker_id: int, send: Callable[[Message], Any]) -> None:
        self._messages = _Messages(send)
        super().__init__(worker_id, self._messages, None)  # type: ignore[arg-type]  # of a channel, it has what is used
        node = ray.get_runtime_context().get_node_id()
        self.where: str = f"{self.where} on node {socket.gethostname()}/{node[:8]}"
        self._encoder = _BuffersApart()

    def put(self, kind: int, body: bytes) -> None:
        """Give the worker a message. On the loop of the actor."""
        self._messages.incoming.put((kind, body))
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(self._ready)

    def listen(self, loop: GuardedLoop, ready: Callable[[], None]) -> None:
        """Have ``ready`` called when a message was put."""
        WorkerTransport.listen(self, loop, ready)

    def unlisten(self) -> None:
        """Do so no more."""
        WorkerTransport.unlisten(self)

    def capture(self, error: BaseException) -> CapturedError:
        """Make of an exception what the trainer is sent; with advice, where something is not on this machine."""
        is_missing = type(error).__name__ in _MISSING
        return CapturedError.capture(with_notes(error, [_ELSEWHERE] * is_missing), self.where)


class _Messages:
    """Stands for the channel of a worker process."""

    def __init__(self, send: Callable[[Message], Any]) -> None:
        self.incoming: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._send = send

    def receive(self, *, wait: bool) -> tuple[int, bytes] | None:
        try:
            return self.incoming.get(wait)
        except queue.Empty:
            return None

    def send(self, kind: int, *parts: Any) -> None:
        """Send a frame: the large buffers of a batch come after its record, extras and pickle."""
        small, large = parts[:3], parts[3:]
        buffers = ray.put([np.frombuffer(part, np.uint8) for part in large]) if large else None
        self._send(Message(kind, b"".join(small), buffers))


class _BuffersApart(Encoder):
    """Leaves large buffers as they are, behind the pickle; they are in memory that is used again."""

    def __init__(self) -> None:
        super().__init__()
        self._recycler = Recycler()

    def __enter__(self) -> None:
        self._recycler.begin_batch()
        super().__enter__()

    def allocate(self, nbytes: int) -> memoryview | None:
        return self._recycler.allocate(nbytes) if nbytes >= RECYCLED_MIN else None

    def _framed(self, stream: bytes) -> list[Any]:
        return [stream, *(contents.data for contents in self._raw)]
