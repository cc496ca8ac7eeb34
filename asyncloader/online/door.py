"""Door: where handles in other processes of the machine reach a feed. On an event loop, in a thread of its own.

    FeedHandle ── number, request ──> a task for each that waits ──> the feed
               <── number, error, value, version ──┘

A connection that ends gives the leases back that it was given.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from asyncloader import threads
from asyncloader.online.errors import FeedFullError
from asyncloader.online.lease import GivesLeases
from asyncloader.online.wire import check, keep_from_forks, parts_of, receive_async

_LONGEST_PROOF_S = 10.0


class ServesHandles(GivesLeases, Protocol):
    """A feed, as its door knows it."""

    @property
    def version(self) -> int:
        """Of the weights."""

    def put_nowait(self, samples: Any, *, version: int | None, cost: float | None, priority: float) -> None:
        """Put a sample without waiting."""

    async def put(self, samples: Any, *, version: int | None, cost: float | None, priority: float) -> None:
        """Put a sample; wait until there is room."""

    async def put_many(self, many: list[Any], *, version: int | None) -> None:
        """Put many samples; wait until there is room."""


class Door:
    """Serves handles until the feed is dropped; or closed, and the last handle has gone.

    Args:
        feed: Is not kept alive.

    Attributes:
        address: Of its socket, which has no file.
        secret: Whoever knows it may lease and put.
    """

    def __init__(self, feed: ServesHandles) -> None:
        self.address = f"\0asyncloader-feed-{os.getpid()}-{secrets.token_hex(8)}"
        self.secret = secrets.token_bytes(32)
        self._listener = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._feed = weakref.ref(feed, lambda _: self.end())
        self._connections: set[asyncio.Task[None]] = set()
        self._closed, self._ended = asyncio.Event(), asyncio.Event()
        threads.start(self._run, "asyncloader feed", self.end)

    def close(self) -> None:
        """Accept no more handles; the thread ends with the last one."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._closed.set)

    def end(self) -> None:
        """Let go of all handles. Also inside the garbage collector."""
        self.close()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_all())

    async def _serve_all(self) -> None:
        accepting, ended = asyncio.create_task(self._accept()), asyncio.create_task(self._ended.wait())
        await self._closed.wait()
        accepting.cancel()
        await asyncio.wait({accepting})
        self._listener.close()
        while self._connections and not ended.done():
            await asyncio.wait({ended, *self._connections}, return_when=asyncio.FIRST_COMPLETED)

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._listener)
            keep_from_forks(sock).setblocking(False)
            task = asyncio.create_task(_Connection(sock, self._feed).serve(self.secret))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)


class _Connection:
    """The connection of one handle.

    Args:
        sock: Its socket.
        feed: Returns the feed; None when it is gone.
    """

    def __init__(self, sock: socket.socket, feed: Callable[[], ServesHandles | None]) -> None:
        self._sock = sock
        self._feed = feed
        self._leases: set[int] = set()  # that the handle was given
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()

    async def serve(self, secret: bytes) -> None:
        """Answer requests until the connection ends; give its leases back then."""
        try:
            async with asyncio.timeout(_LONGEST_PROOF_S):
                await check(self._sock, secret)
            if (feed := self._feed()) is not None:
                await asyncio.get_running_loop().sock_sendall(self._sock, b"".join(parts_of(feed.version)))
            del feed
            while True:
                number, name, arguments = await receive_async(self._sock)
                if (feed := self._feed()) is None:
                    return
                if (answer := self._answer_now(feed, name, arguments)) is not None:
                    await self._send(number, *answer, feed.version)
                else:
                    task = asyncio.create_task(self._answer_later(feed, number, name, arguments))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    del task
                del feed, arguments
        except (EOFError, OSError):
            pass
        finally:
            for each in tuple(self._tasks):
                each.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._sock.close()
            if (feed := self._feed()) is not None:
                for lease in self._leases:
                    feed.give_back(lease, failed=True)

    def _answer_now(self, feed: ServesHandles, name: str, arguments: Any) -> tuple[Exception | None, Any] | None:
        """Return the error, or what was asked for; None if that may have to be waited for."""
        try:
            if name == "put_leased":
                feed.put_leased(*arguments)
                self._leases.discard(arguments[0])
            elif name == "drop_leased":
                feed.drop_leased(*arguments)
                self._leases.discard(arguments[0])
            elif name == "give_back":
                feed.give_back(arguments[0], failed=arguments[1])
                self._leases.discard(arguments[0])
            elif name == "put":
                samples, version, cost, priority = arguments
                feed.put_nowait(samples, version=version, cost=cost, priority=priority)
            else:
                return None
        except FeedFullError:
            return None
        except Exception as error:
            return error, None
        return None, None

    async def _answer_later(self, feed: ServesHandles, number: int, name: str, arguments: Any) -> None:
        error: Exception | None = None
        value = None
        try:
            if name == "lease":
                unit = await feed.await_lease()
                self._leases.add(unit.lease)
                value = (unit.id, unit.item, unit.version, unit.tries, unit.lease)
            elif name == "put":
                samples, version, cost, priority = arguments
                await feed.put(samples, version=version, cost=cost, priority=priority)
            else:
                await feed.put_many(arguments[0], version=arguments[1])
        except Exception as raised:
            error = raised
        with suppress(OSError):  # the connection has ended, which `serve` sees as well
            await self._send(number, error, value, feed.version)

    async def _send(self, number: int, error: Exception | None, value: Any, version: int) -> None:
        try:
            parts = parts_of((number, error, value, version))
        except Exception as raised:  # what the source gave, or raised, cannot be pickled; `serve` gives it back
            parts = parts_of((number, RuntimeError(f"{type(raised).__name__}: {raised} ({error!r})"), None, version))
        async with self._sending:
            for part in parts:
                await asyncio.get_running_loop().sock_sendall(self._sock, part)
