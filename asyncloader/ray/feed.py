"""A feed in an actor of Ray's: producers, and the processes of a training, reach it from any node.

    FeedHandle ── Connection ── tell(process, number, tag, body) ──> FeedActor ── Client ──> the feed's server
                            <── hear(process): answers ──────────

Messages are those of a feed's door. Ray carries them, and knows who may connect; it carries out the calls of an
asynchronous actor in any order, so each message has a number. That a process has ended is seen by an object which it
owns and which never comes: who waits for that is told that its owner has died, within some seconds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from asyncloader.datasets.records import pickled
from asyncloader.errors import ConfigurationError
from asyncloader.online import Feed, FeedHandle
from asyncloader.online.door import Client
from asyncloader.online.handle import Connection
from asyncloader.online.wire import unpacked
from asyncloader.signals import HandlersWait

_MOST_CALLS = 100_000
"""Three calls of each process wait in the actor."""


class FeedActor:
    """A feed that lives in an actor of Ray's. Experimental.

    `start` starts one, and returns what all processes of the cluster use.

    Args:
        make_feed: Makes the feed, in the actor.
    """

    def __init__(self, make_feed: Callable[[], Feed[Any]]) -> None:
        self._feed = make_feed()
        self._processes: dict[str, _Process] = {}
        self._never = asyncio.Event()

    @classmethod
    def start(cls, make_feed: Callable[[], Feed[Any]], **actor_options: Any) -> FeedHandle:
        """Start an actor, and return a handle of its feed, for producers and for the ranks of a training on any node.

        The handle can be pickled. The actor ends with the process that calls this, or when no handle is left. If it
        dies, whoever waits gets a `FeedClosedError`. A process that dies gives its leases back within some seconds.

        Args:
            make_feed: A function that returns the `Feed`, called in the actor. The source is read there.
            **actor_options: Options of Ray's actors, such as ``num_cpus`` and ``scheduling_strategy``.

        Raises:
            ConfigurationError: Ray is not installed.
            Exception: of ``make_feed``, as Ray raises it.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError("a feed in an actor needs Ray: pip install 'asyncloader[ray]'") from error
        if not ray.is_initialized():
            ray.init()
        actor = ray.remote(cls).options(max_concurrency=_MOST_CALLS, **actor_options).remote(make_feed)
        identity: dict[str, Any] = ray.get(actor.identity.remote())
        return FeedHandle(partial(_connect, actor), identity)

    async def identity(self) -> dict[str, Any]:
        """Return what states of the feed belong to."""
        return self._feed.identity

    async def tell(self, process: str, number: int, tag: int, body: bytes) -> None:
        """Take a message of a process, of this number among all of its messages, counted from 0."""
        self._process(process).take(number, tag, body)

    async def hear(self, process: str) -> list[tuple[int, bytes]]:
        """Wait for answers; none come any more after an empty list. One call of a process at a time."""
        return await self._process(process).hear()

    async def hold(self) -> None:
        """Wait for ever."""
        await self._never.wait()

    async def watch(self, process: str, held: list[Any]) -> None:
        """Wait until the process has ended that waits for `hold`."""
        with suppress(Exception):
            await held[0]
        await self.leave(process)

    async def leave(self, process: str) -> None:
        """Give back what a process has leased: it has ended, or its connection."""
        if (ended := self._processes.pop(process, None)) is not None:
            ended.client.end()
            ended.end()

    def _process(self, process: str) -> _Process:
        if process not in self._processes:
            self._processes[process] = _Process(self._feed)
        return self._processes[process]


class _Process:
    """A process that has a handle, as the actor knows it: the channel of its `Client`. On the actor's loop.

    Args:
        feed: The feed.
    """

    def __init__(self, feed: Feed[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._early: dict[int, tuple[int, bytes]] = {}  # messages that came before their turn, by number
        self._next = 0
        self._answers: list[tuple[int, bytes]] = []
        self._has_answers = asyncio.Event()
        self.client = Client(self, feed._link)

    def take(self, number: int, tag: int, body: bytes) -> None:
        """Have messages be received in turn."""
        self._early[number] = tag, body
        while self._next in self._early:
            tag, body = self._early.pop(self._next)
            self._next += 1
            self.client.receive(tag, unpacked(body))

    def send(self, tag: int, message: Any) -> None:
        """Send an answer. In any thread."""
        self.soon(self._add, (tag, pickled(message)))

    def _add(self, answer: tuple[int, bytes]) -> None:
        self._answers.append(answer)
        self._has_answers.set()

    def soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have this be called on the loop. In any thread."""
        self._loop.call_soon_threadsafe(call, *arguments)

    async def hear(self) -> list[tuple[int, bytes]]:
        """Wait for answers."""
        await self._has_answers.wait()
        self._has_answers.clear()
        answers, self._answers = self._answers, []
        return answers

    def end(self) -> None:
        """Have whoever waits for answers hear that there are no more."""
        self._answers.clear()
        self._has_answers.set()


class ActorChannel:
    """The other end: how a process of the cluster reaches the actor. Like a `Channel`.

    Args:
        actor: The handle of the actor.
        loop: The event loop on which it runs, in a thread of its own.
    """

    def __init__(self, actor: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._actor, self._loop = actor, loop
        self._running: asyncio.Task[Any] | None = None
        self._process, self._number = secrets.token_hex(8), 0
        self._held = actor.hold.remote()  # this process owns it
        self._watched = actor.watch.remote(self._process, [self._held])

    def send(self, tag: int, message: Any, note: Callable[[], object] = bool) -> None:
        """Send a message, some time, and note that. In any thread, and in the garbage collector."""
        body = pickled(message)
        with HandlersWait():
            note()
            self._soon(self._tell, tag, body)

    def close(self) -> None:
        """End the connection. In any thread, and in the garbage collector."""
        self._soon(self._end)

    async def run(self, receive: Callable[[int, Any], object]) -> None:
        """Have each answer be received, until the connection, the actor or Ray has ended."""
        from ray.exceptions import RayError

        self._running = asyncio.current_task()
        with suppress(RayError, asyncio.CancelledError):
            while answers := await self._actor.hear.remote(self._process):
                for tag, body in answers:
                    receive(tag, unpacked(body))

    def _tell(self, tag: int, body: bytes) -> None:
        if self._call("tell", self._number, tag, body):
            self._number += 1
        else:
            self._end()

    def _end(self) -> None:
        self._call("leave")
        if self._running is not None:
            self._running.cancel()

    def _call(self, method: str, *arguments: Any) -> bool:
        """Call the actor, unless Ray was shut down: a call would begin another one."""
        import ray

        if is_there := ray.is_initialized():
            getattr(self._actor, method).remote(self._process, *arguments)
        return bool(is_there)

    def _soon(self, call: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(call, *arguments)


def _connect(actor: Any) -> Connection:
    return Connection(partial(ActorChannel, actor))
