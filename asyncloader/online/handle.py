"""Handle: a feed, as producers in other processes of the machine see it.

    producers ── number, request ──> the feed's door          one connection in each process, made when it is needed
              <── a thread of the handle's own reads answers

The handle is pickled to other processes, as an argument of theirs, and not over a network: it has the feed's secret.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from asyncloader import threads
from asyncloader.online.errors import FeedClosedError, closed
from asyncloader.online.forks import generation, keep_from_forks
from asyncloader.online.keys import Sample
from asyncloader.online.lease import Leased, LeaseRequest, Leases
from asyncloader.online.rank_feed import RankFeed
from asyncloader.online.wire import Unreadable, parts_of, prove, receive

T = TypeVar("T")


class _Answer(Future[Any]):
    """The reply to a request.

    Args:
        number: The number of the request.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Link:
    """The connection of a handle in one process.

    Attributes:
        futures: Requests that are not answered, by number.
        version: The version of the weights when the last answer was sent.
        is_over: The feed has ended.
        is_torn: A part of a message was sent, and not the rest: the connection is of no use any more.
        pid: The process that made it; a fork makes its own.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self.sock = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            self.sock.connect(address)
            prove(self.sock, secret)
            version: int
            _, version = receive(self.sock)
            self.version = version
        except (OSError, EOFError) as error:
            self.sock.close()
            why = (
                "there is no feed behind this handle: it was closed, its process ended, or this is another machine or "
                "another user"
            )
            raise closed(address, why, error) from error
        self.futures: dict[int, _Answer] = {}
        self.is_over = self.is_torn = False
        self.pid = os.getpid()
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        threads.start(partial(_read, self), "asyncloader feed handle", self.close)

    def send(self, name: str, arguments: Any) -> _Answer:
        """Send a request; return what its answer comes to."""
        answer = self.answer()
        self.ask(answer, name, arguments)
        return answer

    def answer(self) -> _Answer:
        """Return what a request will come to, for `ask`; and for `withdraw`, even if `ask` is interrupted."""
        return _Answer(next(self._numbers))

    def ask(self, answer: _Answer, name: str, arguments: Any) -> None:
        """Send a request."""
        parts = parts_of(answer.number, (name, arguments))
        with self._sending:
            self.futures[answer.number] = answer
            try:
                for part in parts:
                    self.sock.sendall(part)
            except OSError:
                self.fail()
            except BaseException:  # the handler of a signal raised: what follows a part of a message cannot be read
                self.is_torn = True
                self.close()
                raise
            if self.is_over:
                self.fail()

    def withdraw(self, answer: _Answer) -> None:
        """Have a request not be carried out any more, if it waits. A lease that comes all the same is given back."""
        answer.add_done_callback(self._refuse)
        if self.futures.get(answer.number) is answer:
            self.send("withdraw", (answer.number,))

    def _refuse(self, answer: Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None and type(value := answer.result()) is Leased:
            self._send_apart("give_back", (value.lease, False))

    def unread(self, number: int) -> None:
        """Have what an answer may have leased be given back, because the answer cannot be unpickled."""
        self._send_apart("unread", (number,))

    def _send_apart(self, name: str, arguments: Any) -> None:
        """Send a request for the thread that reads answers. If that waited, the feed could not answer who sends now."""
        threads.start(partial(self.send, name, arguments), "asyncloader feed handle")

    def fail(self) -> None:
        """Tell those who wait that the feed has ended."""
        self.is_over = True
        why, cause = "the feed was dropped, or its process ended", None
        if self.is_torn:
            why = "the connection to the feed was lost, and is made anew; a sample on its way may have been put"
            cause = InterruptedError("in the middle of a message")
        while self.futures:
            _, future = self.futures.popitem()
            if future.set_running_or_notify_cancel():
                future.set_exception(closed(self._address, why, cause))

    def close(self) -> None:
        """End the connection, which gives the leases of this process back. Not in a fork of the process."""
        self.is_over = True
        if self.pid == os.getpid():
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def _read(link: _Link) -> None:
    try:
        with link.sock, suppress(EOFError, OSError):
            while True:
                number, answer = receive(link.sock)
                if isinstance(answer, Unreadable):
                    text = f"what the feed has sent cannot be unpickled in this process: {answer.reason}"
                    error, value = RuntimeError(text), None
                    link.unread(number)
                else:
                    error, value, link.version = answer
                future = link.futures.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    if error is not None:
                        future.set_exception(error)
                    else:
                        future.set_result(value)
                del future, answer, error, value  # while the next answer is waited for
    finally:
        link.fail()


def _note_error(answer: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging that nobody saw an error."""
    if not answer.cancelled():
        answer.exception()


def _cancel_later() -> None:
    """Have this task be cancelled at its next await, because a cancellation came too late for this one.

    A time limit that ends with this await takes the cancellation back, and the task goes on.
    """
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if task.cancelling():
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(cancel)


class FeedHandle:
    """A feed, as producers in other processes of the machine see it: :meth:`asyncloader.online.Feed.handle` returns it.

    Give it to processes as an argument. Each connects when it first uses it. If a process ends, its leases are given
    back; if the feed or its process ends, whoever waits gets a `FeedClosedError`.

    Attributes:
        address: The address of the feed.

    Raises:
        FeedClosedError: on use, if there is no feed behind it any more.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.address, self._secret = address, secret
        self._lock, self._process = threading.Lock(), generation()
        self._link: _Link | None = None

    def __reduce__(self) -> Any:
        return FeedHandle, (self.address, self._secret)

    def lease(self) -> LeaseRequest:
        """Wait for the next item of the source, in ``async with`` or ``with``: see :meth:`Feed.lease`."""
        return LeaseRequest(self)

    def leases(self) -> Leases:
        """Iterate over leases, with ``async for`` or ``for``: see :meth:`Feed.leases`."""
        return Leases(self)

    async def put(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put a sample, or the list of a group; wait until there is room: see :meth:`Feed.put`.

        If the task is cancelled meanwhile, by a time limit for example, the sample is not put. If it was put before the
        feed heard of that, this returns, and the task is cancelled at its next ``await``, unless the time limit has
        ended.
        """
        await self._until("put", (samples, self._made_with(version), cost, priority))

    async def put_many(self, many: Iterable[Any], *, version: int | None = None) -> None:
        """Put many samples, or groups, in one message: see :meth:`Feed.put_many`."""
        await self._until("put_many", (list(many), self._made_with(version)))

    def put_sync(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put a sample, or a group, from a thread, which waits until there is room: see :meth:`Feed.put`."""
        self._until_sync("put", (samples, self._made_with(version), cost, priority), lambda answer: None)

    @property
    def version(self) -> int:
        """The version of the weights, as of the last answer of the feed: a lease brings the newest."""
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

    def wait_lease(self, take: Callable[[Leased], object]) -> None:
        """Wait for a lease, in a thread, and have it taken."""
        self._until_sync("lease", (), take)

    async def await_lease(self, take: Callable[[Leased], object]) -> None:
        """Wait for a lease, and have it taken."""
        take(await self._until("lease", ()))

    def put_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease."""
        self._send("put_leased", (lease, samples, version, cost, priority)).result()

    async def aput_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease, without blocking the loop."""
        await self._until("put_leased", (lease, samples, version, cost, priority))

    def drop_leased(self, lease: int, cost: float | None) -> None:
        """Settle what is leased without samples."""
        self._send("drop_leased", (lease, cost)).result()

    def give_back(self, lease: int, *, failed: bool) -> None:
        """Have what is leased be leased again."""
        with suppress(FeedClosedError):
            self._send("give_back", (lease, failed))

    def _made_with(self, version: int | None) -> tuple[int, bool]:
        """Return the version of samples, and whether that is what this process knows, not what the caller says."""
        return (self.version, True) if version is None else (version, False)

    # What ranks call.

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what the feed answers; wait for it, in a thread."""
        return self._send(name, arguments).result()

    def connect(self) -> _Link:
        """Return a connection of one's own."""
        return _Link(self.address, self._secret)

    def _send(self, name: str, arguments: Any) -> _Answer:
        return self._connected().send(name, arguments)

    async def _until(self, name: str, arguments: Any) -> Any:
        """Return the answer to a request that may wait. If the task is cancelled, the request is withdrawn."""
        link = self._connected()
        answer = link.send(name, arguments)
        wrapped = asyncio.wrap_future(answer)
        try:
            await asyncio.wait({wrapped})
        except asyncio.CancelledError:
            link.withdraw(answer)
            wrapped.add_done_callback(_note_error)
            if name == "lease":  # which is given back
                raise
            await asyncio.wait({wrapped})
            if wrapped.exception() is not None:
                raise
            _cancel_later()
        return wrapped.result()

    def _until_sync(self, name: str, arguments: Any, take: Callable[[Any], object]) -> None:
        """Do as `_until`, in a thread, whose signals may raise, and have the answer taken."""
        link = self._connected()
        answer = link.answer()
        try:
            link.ask(answer, name, arguments)
            take(answer.result())
        except BaseException:
            link.withdraw(answer)
            raise

    def _connected(self) -> _Link:
        if self._process != generation():  # a thread that is not in this fork may have had the lock
            self._lock, self._link, self._process = threading.Lock(), None, generation()
        with self._lock:
            link = self._link
            if link is None or link.is_torn:
                link = self._link = _Link(self.address, self._secret)
                weakref.finalize(self, link.close)
            return link
