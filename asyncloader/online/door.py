"""Door: where handles in other processes of the machine reach a feed. On an event loop, in a thread of its own.

    FeedHandle ── number, request ──> a task for each that waits ──> the feed
               <── number, error, value, version ──┘

A connection that ends gives the leases back that it was given.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from asyncloader import identity, threads
from asyncloader.online.errors import FeedFullError
from asyncloader.online.forks import keep_from_forks
from asyncloader.online.keys import SampleKey
from asyncloader.online.lease import GivesLeases, Leased
from asyncloader.online.ranks import RankPlace, Seat
from asyncloader.online.wire import Unreadable, Withdrawn, check, parts_of, receive_async

log = logging.getLogger("asyncloader")

_LONGEST_PROOF_S = 10.0
_MOST_STRANGERS = 32
_GRACE_S = 1.0
"""So long a connection may take to prove that it knows the secret while others wait for its place."""
_RETRY_S = 0.5
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ROOT = 0


class ServesHandles(GivesLeases, Protocol):
    """A feed, as its door knows it."""

    version: int
    batch_size: int

    def put_nowait(self, samples: Any, *, version: int | None, cost: float | None, priority: float) -> None:
        """Put a sample without waiting."""

    async def put(self, samples: Any, *, version: int | None, cost: float | None, priority: float) -> None:
        """Put a sample; wait until there is room."""

    async def put_many(self, many: list[Any], *, version: int | None) -> None:
        """Put many samples; wait until there is room."""

    def check_rank(self, rank: int) -> None:
        """See that there is a rank."""

    def rank_state(self, rank: int, run: int, step: int) -> dict[str, Any]:
        """Return the state before a step of a run."""

    def rank_load(self, rank: int, state: dict[str, Any]) -> None:
        """Go on from a state that all ranks load."""

    async def begin_rank(self, rank: int, place: RankPlace, take: Callable[[Seat], object]) -> int:
        """Begin a run with all ranks."""

    async def rank_step(self, seat: Seat, number: int) -> list[SampleKey] | None:
        """Return the part of a rank in a step."""

    def rank_asks(self, seat: Seat, given: int, now: float) -> None:
        """Note that the consumer of a rank asks for another step."""

    def rank_leaves(self, seat: Seat) -> None:
        """Note that the iterator of a rank is gone."""

    def look_at_ranks(self, now: float) -> float | None:
        """End the run if consumers have waited for too long; return when to look again, or None. Seconds."""


class Door:
    """Serves handles until the feed is dropped; or closed, and the last handle has gone.

    Args:
        feed: Is not kept alive.

    Attributes:
        secret: Whoever knows it may lease and put.
    """

    def __init__(self, feed: ServesHandles) -> None:
        self.secret = secrets.token_bytes(32)
        self._listener = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(feed.address)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._feed = weakref.ref(feed)
        weakref.finalize(feed, self.end)  # unlike a callback of the reference, not while modules are torn down
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[_Connection, asyncio.Task[None]] = {}  # that have proved nothing yet, the oldest first
        self._fewer_strangers = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closed, self._ended = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="asyncloader feed", daemon=True)
        self._thread.start()

    def end_at_exit(self) -> None:
        """Let go of all handles when the interpreter ends: whoever trains has begun, and is waited for then."""
        threads.adopt(self._thread, self.end)

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
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # there are too many descriptors, for example
                log.warning("A handle could not connect to its feed, and is accepted later: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if not _is_of_this_user(sock):
                sock.close()
                continue
            keep_from_forks(sock).setblocking(False)
            await self._make_room()
            self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        connection = _Connection(sock, self._feed, self._look_at_ranks, self._not_strange)
        task = self._strangers[connection] = asyncio.create_task(connection.serve(self.secret))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _make_room(self) -> None:
        """Wait until few connections have proved nothing yet. The oldest goes when it has had its time.

        Each of them takes a descriptor of the trainer. Handles that come all at once are no reason to end one of them:
        each proves what it knows as soon as its process runs.
        """
        while len(self._strangers) >= _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            self._fewer_strangers.clear()
            try:
                async with asyncio.timeout_at(oldest.began_at + _GRACE_S):
                    await self._fewer_strangers.wait()
            except TimeoutError:
                if (task := self._strangers.pop(oldest, None)) is not None:
                    task.cancel()

    def _not_strange(self, connection: _Connection) -> None:
        """A connection has proved that it knows the secret, or has ended."""
        self._strangers.pop(connection, None)
        self._fewer_strangers.set()

    def _look_at_ranks(self) -> None:
        """End a run whose ranks have waited for too long, now or when it is time."""
        if self._timer is not None:
            self._timer.cancel()
        feed = self._feed()
        due = None if feed is None else feed.look_at_ranks(self._loop.time())
        self._timer = None if due is None else self._loop.call_at(due, self._look_at_ranks)


class _Connection:
    """The connection of one handle.

    Args:
        sock: Its socket.
        feed: Returns the feed; None when it is gone.
        look: Is called when the consumer of a rank waits.
        known: Is called when the handle has proved that it knows the secret, or the connection has ended.

    Attributes:
        began_at: When, on the loop's clock.
    """

    def __init__(
        self,
        sock: socket.socket,
        feed: Callable[[], ServesHandles | None],
        look: Callable[[], object],
        known: Callable[[_Connection], object],
    ) -> None:
        self.began_at = asyncio.get_running_loop().time()
        self._sock = sock
        self._feed, self._look, self._known = feed, look, known
        self._seat: Seat | None = None  # of the rank whose iterator this is
        self._leases: dict[int, int] = {}  # that the handle was given, and the numbers of the requests
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Task[None]] = {}  # those whose requests can be withdrawn, by number
        self._sending = asyncio.Lock()

    async def serve(self, secret: bytes) -> None:
        """Answer requests until the connection ends; give its leases back then."""
        try:
            async with asyncio.timeout(_LONGEST_PROOF_S):
                await check(self._sock, secret)
            self._known(self)
            if (feed := self._feed()) is not None:
                await asyncio.get_running_loop().sock_sendall(self._sock, b"".join(parts_of(0, feed.version)))
            del feed
            while True:
                number, request = await receive_async(self._sock)
                if (feed := self._feed()) is None:
                    return
                await self._serve_one(feed, number, request)
                del feed, request  # while the next one is waited for
        except (EOFError, OSError):
            pass
        finally:
            for each in tuple(self._tasks):
                each.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._sock.close()
            self._known(self)
            if (feed := self._feed()) is not None:
                for lease in self._leases:
                    feed.give_back(lease, failed=True)
                if self._seat is not None:
                    feed.rank_leaves(self._seat)

    async def _serve_one(self, feed: ServesHandles, number: int, request: Any) -> None:
        if isinstance(request, Unreadable):
            error = RuntimeError(f"what was sent cannot be unpickled in the feed's process: {request.reason}")
            await self._send(number, error, None, feed.version)
            return
        name, arguments = request
        if name == "withdraw":
            await asyncio.sleep(0)  # a task that has not begun would end without an answer
        if (answer := self._answer_now(feed, name, arguments)) is not None:
            await self._send(number, *answer, feed.version)
        else:
            task = asyncio.create_task(self._answer_later(feed, number, name, arguments))
            self._tasks.add(task)
            self._waiting[number] = task
            task.add_done_callback(self._tasks.discard)

    def _answer_now(self, feed: ServesHandles, name: str, arguments: Any) -> tuple[Exception | None, Any] | None:
        """Return the error, or what was asked for; None if that may have to be waited for."""
        if (answer := getattr(self, f"_{name}_now", None)) is None:
            return None
        try:
            return None, answer(feed, *arguments)
        except FeedFullError:
            return None
        except Exception as error:
            return error, None

    async def _answer_later(self, feed: ServesHandles, number: int, name: str, arguments: Any) -> None:
        error: Exception | None = None
        value: Any = None
        try:
            value = await getattr(self, f"_{name}")(feed, *arguments)
        except asyncio.CancelledError:
            if number in self._waiting:  # not withdrawn: the connection or the program ends
                raise
            error = Withdrawn()
        except Exception as raised:
            error = raised
        # There is no await between what was done and this: a request that is withdrawn was not carried out.
        self._waiting.pop(number, None)
        if type(value) is Leased:
            self._leases[value.lease] = number
        with suppress(OSError):  # the connection has ended, which `serve` sees as well
            await self._send(number, error, value, feed.version)

    def _put_leased_now(self, feed: ServesHandles, lease: int, *put: Any) -> None:
        feed.put_leased(lease, *put)
        self._leases.pop(lease, None)

    def _drop_leased_now(self, feed: ServesHandles, lease: int, cost: float) -> None:
        feed.drop_leased(lease, cost)
        self._leases.pop(lease, None)

    def _give_back_now(self, feed: ServesHandles, lease: int, failed: bool) -> None:
        feed.give_back(lease, failed=failed)
        self._leases.pop(lease, None)

    def _put_now(
        self, feed: ServesHandles, samples: Any, made: tuple[int, bool], cost: float | None, priority: float
    ) -> None:
        feed.put_nowait(samples, version=_version(feed, *made), cost=cost, priority=priority)

    async def _put(
        self, feed: ServesHandles, samples: Any, made: tuple[int, bool], cost: float | None, priority: float
    ) -> None:
        await feed.put(samples, version=_version(feed, *made), cost=cost, priority=priority)

    async def _put_many(self, feed: ServesHandles, many: list[Any], made: tuple[int, bool]) -> None:
        await feed.put_many(many, version=_version(feed, *made))

    async def _lease(self, feed: ServesHandles) -> Leased:
        taken: list[Leased] = []
        await feed.await_lease(taken.append)
        return taken[0]

    def _withdraw_now(self, feed: ServesHandles, number: int) -> None:
        """Have a request be answered now, by `Withdrawn` if it waits: nobody waits for what it would come to."""
        if (task := self._waiting.pop(number, None)) is not None:
            task.cancel()

    def _unread_now(self, feed: ServesHandles, number: int) -> None:
        """Give back the lease that the answer to a request had: the handle could not unpickle it."""
        for lease in [each for each, request in self._leases.items() if request == number]:
            self._give_back_now(feed, lease, failed=True)

    def _set_version_now(self, feed: ServesHandles, version: int) -> None:
        feed.version = version

    # Of ranks. A connection is one iterator of a rank, until it ends.

    def _rank_now(self, feed: ServesHandles, rank: int) -> Any:
        feed.check_rank(rank)
        return feed.batch_size, identity.of(feed)

    def _rank_state_now(self, feed: ServesHandles, *where: Any) -> dict[str, Any]:
        return feed.rank_state(*where)

    def _rank_load_now(self, feed: ServesHandles, rank: int, state: dict[str, Any]) -> None:
        feed.rank_load(rank, state)

    async def _ask(self, feed: ServesHandles, given: int) -> None:  # in a task, as `_begin`: in the order of messages
        if self._seat is not None:
            feed.rank_asks(self._seat, given, asyncio.get_running_loop().time())
            self._look()

    async def _begin(self, feed: ServesHandles, rank: int, place: RankPlace) -> int:
        return await feed.begin_rank(rank, place, self._sit)

    def _sit(self, seat: Seat) -> None:
        self._seat = seat

    async def _step(self, feed: ServesHandles, number: int) -> list[SampleKey] | None:
        assert self._seat is not None
        return await feed.rank_step(self._seat, number)

    async def _send(self, number: int, error: Exception | None, value: Any, version: int) -> None:
        try:
            parts = parts_of(number, (error, value, version))
        except Exception as raised:  # what the source gave, or raised, cannot be pickled
            if type(value) is Leased and (feed := self._feed()) is not None:
                self._give_back_now(feed, value.lease, failed=True)
            of = type(value if error is None else error).__name__
            parts = parts_of(number, (RuntimeError(f"{type(raised).__name__}: {raised} (of {of})"), None, version))
        async with self._sending:
            for part in parts:
                await asyncio.get_running_loop().sock_sendall(self._sock, part)


def _is_of_this_user(sock: socket.socket) -> bool:
    """Whether a process of the trainer's user, or of root, has connected; abstract sockets have no permissions."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user in (os.geteuid(), _ROOT)


def _version(feed: ServesHandles, version: int, is_default: bool) -> int:
    """Return the version of samples. A state that was loaded may have taken that back which the handle knows."""
    return min(version, feed.version) if is_default else version
