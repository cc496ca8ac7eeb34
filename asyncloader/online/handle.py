"""Handle: a feed, as producers in other processes of the machine see it.

    producers ── number, request ──> the feed's door          one connection in each process, made when it is needed
              <── a thread of the handle's own reads answers

The handle is pickled to other processes, as an argument of theirs, and not over a network: it has the feed's secret.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from asyncloader import threads
from asyncloader.online.errors import FeedClosedError
from asyncloader.online.forks import keep_from_forks
from asyncloader.online.keys import Sample
from asyncloader.online.lease import LeaseRequest, Leases
from asyncloader.online.rank_feed import RankFeed
from asyncloader.online.wire import parts_of, prove, receive

T = TypeVar("T")


class _Leased(NamedTuple):
    """What is leased, as `Unit` says it."""

    id: int
    item: Any
    version: int
    tries: int
    lease: int


class _Link:
    """The connection of a handle in one process.

    Attributes:
        futures: Requests that are not answered, by number.
        version: Of the weights, when the last answer was sent.
        is_over: The feed has ended.
        pid: Of the process; a fork makes its own.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.sock = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            self.sock.connect(address)
            prove(self.sock, secret)
            self.version: int = receive(self.sock)
        except (OSError, EOFError) as error:
            self.sock.close()
            raise FeedClosedError(
                "there is no feed behind this handle: it was closed, its process ended, or this is another machine"
            ) from error
        self.futures: dict[int, Future[Any]] = {}
        self.is_over = False
        self.pid = os.getpid()
        self._numbers = 0
        self._sending = threading.Lock()
        threads.start(partial(_read, self), "asyncloader feed handle", self.close)

    def send(self, name: str, arguments: Any) -> Future[Any]:
        """Send a request; return what its answer comes to."""
        future: Future[Any] = Future()
        with self._sending:
            number = self._numbers = self._numbers + 1
            parts = parts_of((number, name, arguments))
            self.futures[number] = future
            try:
                for part in parts:
                    self.sock.sendall(part)
            except OSError:
                self.fail()
            if self.is_over:
                self.fail()
        return future

    def fail(self) -> None:
        """Tell those who wait that the feed has ended."""
        self.is_over = True
        while self.futures:
            _, future = self.futures.popitem()
            if future.set_running_or_notify_cancel():
                future.set_exception(FeedClosedError("the feed was dropped, or its process ended"))

    def close(self) -> None:
        """End the connection, which gives the leases of this process back. Not in a fork of the process."""
        self.is_over = True
        if self.pid == os.getpid():
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def _read(link: _Link) -> None:
    with link.sock, suppress(EOFError, OSError):
        while True:
            number, error, value, link.version = receive(link.sock)
            if (future := link.futures.pop(number, None)) is None:
                continue
            if not future.set_running_or_notify_cancel():
                if value is not None:  # a lease that nobody waits for any more
                    link.send("give_back", (_Leased(*value).lease, False))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)
            del future, error, value  # while the next answer is waited for
    link.fail()


class FeedHandle:
    """A feed, as producers in other processes of the machine see it: :meth:`asyncloader.online.Feed.handle` returns it.

    Give it to processes as an argument. Each connects when it first uses it. If a process ends, its leases are given
    back; if the feed or its process ends, whoever waits gets a `FeedClosedError`.

    Raises:
        FeedClosedError: on use, if there is no feed behind it any more.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address, self._secret = address, secret
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def __reduce__(self) -> Any:
        return FeedHandle, (self._address, self._secret)

    def lease(self) -> LeaseRequest:
        """Wait for the next item of the source, in ``async with`` or ``with``: see :meth:`Feed.lease`."""
        return LeaseRequest(self)

    def leases(self) -> Leases:
        """Iterate over leases, with ``async for`` or ``for``: see :meth:`Feed.leases`."""
        return Leases(self)

    async def put(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put a sample, or the list of a group; wait until there is room: see :meth:`Feed.put`."""
        await asyncio.wrap_future(self._send("put", (samples, self._made_with(version), cost, priority)))

    async def put_many(self, many: Iterable[Any], *, version: int | None = None) -> None:
        """Put many samples, or groups, in one message: see :meth:`Feed.put_many`."""
        await asyncio.wrap_future(self._send("put_many", (list(many), self._made_with(version))))

    def put_sync(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put a sample, or a group, from a thread, which waits until there is room: see :meth:`Feed.put`."""
        self._send("put", (samples, self._made_with(version), cost, priority)).result()

    @property
    def version(self) -> int:
        """Of the weights, as of the last answer of the feed: a lease brings the newest."""
        return self._connected().version

    @version.setter
    def version(self, version: int) -> None:
        self.ask("set_version", version)

    def for_rank(self, rank: int, fn: Callable[[Sample[Any]], T] | None = None) -> RankFeed[T]:
        """Return the batches of a rank, of a feed that has ``num_replicas``, as a dataset for its loader.

        Args:
            rank: From 0 to ``num_replicas`` - 1.
            fn: Makes of a `Sample` what is collated, in a worker of the loader. By default it is what was put.

        Raises:
            ConfigurationError: if the feed has no such rank.
        """
        return RankFeed(self, rank, fn)

    def close(self) -> None:
        """End the connection of this process."""
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None

    # What leases call.

    def wait_lease(self) -> Any:
        """Wait for a lease, in a thread."""
        return _Leased(*self._send("lease", ()).result())

    async def await_lease(self) -> Any:
        """Wait for a lease."""
        return _Leased(*await asyncio.wrap_future(self._send("lease", ())))

    def put_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease."""
        self._send("put_leased", (lease, samples, version, cost, priority)).result()

    async def aput_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease, without blocking the loop."""
        await asyncio.wrap_future(self._send("put_leased", (lease, samples, version, cost, priority)))

    def drop_leased(self, lease: int, cost: float | None) -> None:
        """Settle what is leased without samples."""
        self._send("drop_leased", (lease, cost)).result()

    def give_back(self, lease: int, *, failed: bool) -> None:
        """Have what is leased be leased again."""
        with suppress(FeedClosedError):
            self._send("give_back", (lease, failed))

    def _made_with(self, version: int | None) -> int:
        return self.version if version is None else version

    # What ranks call.

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what the feed answers; wait for it, in a thread."""
        return self._send(name, arguments).result()

    def connect(self) -> _Link:
        """Return a connection of one's own."""
        return _Link(self._address, self._secret)

    def _send(self, name: str, arguments: Any) -> Future[Any]:
        return self._connected().send(name, arguments)

    def _connected(self) -> _Link:
        with self._lock:
            link = self._link
            if link is not None and link.pid != os.getpid():
                link.sock.close()  # this process's copy of it
                link = None
            if link is None:
                link = self._link = _Link(self._address, self._secret)
                weakref.finalize(self, link.close)
            return link
