"""Handle: a feed, as producers in other processes of the machine see it.

    producers ── number, call ──> the feed's door      one connection in each process, made when it is needed
              <── answers, on an event loop in a thread of the connection's own

The handle is pickled to other processes, as an argument of theirs.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from asyncloader import threads
from asyncloader.online.errors import closed
from asyncloader.online.forks import generation, keep_from_forks
from asyncloader.online.link import Leased, Link, Request, ask
from asyncloader.online.producers import Producers, cancel_later
from asyncloader.online.puts import Puts
from asyncloader.online.wire import Channel, Unreadable, peer


class Connection:
    """The connection of a handle in one process: a `Link`.

    Args:
        address: That of the feed.
        make_channel: Makes what messages travel by, on a loop.

    Raises:
        FeedClosedError: if there is no feed.

    Attributes:
        address: That of the feed.
        version: The version of the weights when the last answer was sent.
    """

    address: str
    version: int

    def __init__(self, address: str, make_channel: Callable[[asyncio.AbstractEventLoop], Any]) -> None:
        self.address, self.version = address, -1
        self._requests: dict[int, Request] = {}
        self._is_over, self._process = False, generation()
        self._local = threading.local()  # one event loop runs in a thread
        self._loop = asyncio.new_event_loop()
        self._channel = make_channel(self._loop)
        greeting = self._requests[0] = Request()
        threads.start(self._run, "asyncloader feed handle", self.close)
        greeting.result()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._channel.run(self._receive))
        finally:
            self._fail()

    def call(self, request: Request, name: str, *arguments: Any) -> None:
        """Make a call of the feed's server."""
        self._requests[request.number] = request
        try:
            request.name = name
            self._channel.send(request.number, (name, *arguments))
        except BaseException:  # it cannot be pickled
            self._requests.pop(request.number, None)
            raise
        if self._is_over:
            self._fail()

    def withdraw(self, request: Request) -> None:
        """Have a call that waits be answered now."""
        self._channel.send(request.number, ("withdraw",))

    def give_back(self, lease: int, *, failed: bool) -> None:
        """Have what is leased be leased again."""
        self._channel.send(lease, ("give_back", failed))

    def puts(self) -> Puts:
        """Return what puts for the tasks of this event loop."""
        loop = asyncio.get_running_loop()
        puts: Puts | None = getattr(self._local, "puts", None)
        if puts is None or puts.loop is not loop:
            puts = self._local.puts = Puts(weakref.proxy(self), loop)
        return puts

    def close(self) -> None:
        """End the connection, which gives the leases of this process back. Not in a fork of the process."""
        if self._process == generation():
            self._channel.close()

    def _receive(self, number: int, message: Any) -> None:
        if (request := self._requests.pop(number, None)) is None:
            return
        if isinstance(message, Unreadable):
            if request.name == "lease":
                self._channel.send(number, ("refuse",))
            text = f"what the feed has sent cannot be unpickled in this process: {message.reason}"
            request.answer(None, RuntimeError(text))
            return
        error, value, self.version = message
        if request.name == "lease" and value is not None:
            value = Leased(self, *value)
        request.answer(value, error)

    def _fail(self) -> None:
        """Tell those who wait that the feed has ended."""
        self._is_over = True
        while self._requests:
            _, request = self._requests.popitem()
            error = closed(self.address, "the feed was dropped, or its process ended")
            request.answer(None, no_feed(self.address, ConnectionRefusedError()) if self.version < 0 else error)


def connect(address: str, user: int) -> Connection:
    """Connect to the feed behind a socket, in a process of this user's.

    Raises:
        FeedClosedError: if there is no feed.
    """
    sock = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.connect(address)
        if peer(sock) != user:  # somebody else's, in the place of one that was
            raise PermissionError(f"the process of user {peer(sock)} listens there")
    except OSError as error:
        sock.close()
        raise no_feed(address, error) from error
    return Connection(address, partial(Channel, sock))


def no_feed(address: str, error: Exception) -> Exception:
    """Return the error of a handle whose feed is not there."""
    return closed(address, "there is no feed behind this handle: it was closed, or its process ended", error)


class FeedHandle(Producers):
    """A feed, as other processes of the machine see it: :meth:`asyncloader.online.Feed.handle` returns it.

    Give it to processes as an argument. Each connects when it first uses it. If a process ends, its leases are given
    back; if the feed or its process ends, whoever waits gets a `FeedClosedError`.

    Args:
        connect: Connects a process to the feed.
        identity: What states of the feed belong to.

    Raises:
        FeedClosedError: on use, if there is no feed behind it any more.
    """

    def __init__(self, connect: Callable[[], Connection], identity: dict[str, Any]) -> None:
        self._connects, self.identity = connect, identity
        self._lock, self._process = threading.Lock(), generation()
        self._connection: Connection | None = None

    def __reduce__(self) -> Any:
        return FeedHandle, (self._connects, self.identity)

    def put(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> Coroutine[Any, Any, None]:
        """Put a sample, or a group: see `Feed.put`. What tasks put in one turn of their loop travels together.

        Args:
            samples: As there, and so on.
            version: As there.
            cost: As there.
            priority: As there.
        """
        return self._put_unit((samples, *self._made_with(version), cost, priority))

    async def _put_unit(self, unit: tuple[Any, ...]) -> None:
        connection = self._connect()
        try:
            if await connection.puts().put(unit):
                cancel_later()
        finally:
            del connection  # an error has the frames that it was raised in

    def close_feed(self, reason: str = "it was closed") -> None:
        """Close the feed, for all: see `Feed.close`.

        Args:
            reason: As there.
        """
        ask(self._connect(), "shut", reason)

    def close(self) -> None:
        """End the connection of this process."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _link(self) -> Link:
        return self._connect()

    def _connect(self) -> Connection:
        if self._process != generation():  # a thread that is not in this fork may have had the lock
            self._lock, self._connection, self._process = threading.Lock(), None, generation()
        with self._lock:
            if self._connection is None:
                self._connection = self._connects()
                weakref.finalize(self, self._connection.close)
            return self._connection
