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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self

from asyncloader import threads
from asyncloader.datasets.records import packed, pickled
from asyncloader.online.errors import FeedClosedError, closed
from asyncloader.online.forks import generation, keep_from_forks
from asyncloader.online.link import Item, Leased, Link, Request, ask
from asyncloader.online.producers import Producers
from asyncloader.online.puts import Puts
from asyncloader.online.wire import Channel, Unreadable, peer

_GONE = "the feed behind this handle was dropped, or its process ended"


class Connection:
    """The connection of a handle in one process: a `Link`.

    Args:
        make_channel: Makes what messages travel by, on a loop.

    Raises:
        FeedClosedError: if there is no feed.

    Attributes:
        address: That of the feed.
        version: The version of the weights when the last answer was sent.
        puts: What this process puts ahead.
    """

    address: str
    version: int

    def __init__(self, make_channel: Callable[[asyncio.AbstractEventLoop], Any]) -> None:
        self.address, self.version = "", -1
        self.puts: Puts = Puts(weakref.proxy(self))
        self._requests: dict[int, Request] = {}
        self._is_over, self._process = False, generation()
        self._loop = asyncio.new_event_loop()
        self._channel = make_channel(self._loop)
        greeting = self._requests[0] = Request()
        threads.start(self._run, "asyncloader feed handle", self.finish)
        self.address = greeting.result()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._channel.run(self._receive))
        finally:
            self._fail()

    def call(self, request: Request, name: str, *arguments: Any) -> None:
        """Make a call of the feed's server, after what was put ahead."""
        self.puts.send()
        note = partial(self._requests.__setitem__, request.number, request)
        self._channel.send(request.number, (name, *arguments), note)
        if self._is_over:
            self._fail()

    def withdraw(self, request: Request) -> None:
        """Have a call that waits be answered now."""
        self._channel.send(request.number, ("withdraw",))

    def give_back(self, lease: int, failed: bool, *made: Any) -> None:
        """Have what is leased be leased again. A fork of the process leaves that to its parent."""
        if self._process == generation():
            self._channel.send(lease, ("give_back", failed, *map(pickled, made)))

    def dropped(self, reader: int, given: Callable[[], int]) -> None:
        """Note how many batches the consumer of an iterator was given in all. Not in a fork of the process."""
        if self._process == generation():
            self._channel.send(reader, ("dropped", given))

    def close(self) -> None:
        """End the connection when what was put ahead is in, which gives the leases of this process back.

        In a fork of the process, do nothing.
        """
        if self._process == generation():
            self.puts.close()

    def end(self) -> None:
        """End the connection."""
        self._channel.close()

    def finish(self) -> None:
        """At the end of the program, wait until what was put ahead is in, and end the connection."""
        if self.puts.is_ahead:
            with suppress(FeedClosedError):
                ask(self, "put", [], timeout=threads.LONGEST_S)
        self.close()

    def _receive(self, number: int, message: Any) -> None:
        if (request := self._requests.pop(number, None)) is None:
            return
        if isinstance(message, Unreadable):
            self._channel.send(number, ("refuse",))
            request.answer(None, RuntimeError(f"what the feed has sent cannot be unpickled in this process: {message}"))
            return
        error, value, self.version = message
        request.answer(Leased(self, value) if isinstance(value, Item) else value, error)

    def _fail(self) -> None:
        """Tell those who wait that the feed has ended."""
        self._is_over = True
        cause = ConnectionResetError() if self.version < 0 else None  # it has never answered
        while self._requests:
            _, request = self._requests.popitem()
            request.answer(None, closed(self.address, _GONE, cause))


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
        raise closed(address, _GONE, error) from error
    return Connection(partial(Channel, sock))


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
        self._connects = connect
        self.identity: dict[str, Any] = identity
        self._lock, self._process = threading.Lock(), generation()
        self._connection: Connection | None = None

    def __reduce__(self) -> Any:
        return FeedHandle, (self._connects, self.identity)

    async def flush(self) -> None:
        """Wait until all that this process has put is in the feed.

        Raises:
            Exception: of what was put, and is not in.
        """
        puts = self._connect().puts
        await self._answer(puts.request(), "put", [])
        puts.check()

    async def _put(self, unit: tuple[Any, ...]) -> None:
        puts = self._connect().puts
        small, large = packed(unit)
        if large:  # whose memory is the caller's again when this is over
            await self._answer(puts.request(), "put", [unit])
        elif not puts.put(small):
            async with puts.turn():
                if not puts.put(small):
                    await self._answer(puts.request(), "put", [unit])

    def close_feed(self, reason: str = "it was closed") -> None:
        """Close the feed, for all: see `Feed.close`.

        Args:
            reason: As there.
        """
        ask(self._connect(), "shut", reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """Wait until what was put is in, unless an error has ended the block; end the connection of this process."""
        try:
            if kind is None:
                await self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """End the connection of this process, as soon as what it has put is in."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _link(self) -> Link:
        return self._connect()

    def _connect(self) -> Connection:
        if self._process != generation():  # a thread that is not in this fork may have had the lock
            self._lock, self._connection, self._process = threading.Lock(), None, generation()
        if (connection := self._connection) is None:
            with self._lock:
                if (connection := self._connection) is None:
                    connection = self._connection = self._connects()
                    weakref.finalize(self, connection.close)
        return connection
