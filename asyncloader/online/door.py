"""Door: where handles in other processes of the machine reach a feed. On an event loop, in a thread of its own.

    FeedHandle ── number, name of a call, arguments ──> the feed's server
               <── number, error, answer, version ──┘

The socket is in a folder that only this user enters, and the kernel says whose process has connected: what comes is
unpickled. A connection that ends gives back what it was leased, and its calls that wait are withdrawn.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

from asyncloader import threads
from asyncloader.log import log
from asyncloader.online.forks import keep_from_forks
from asyncloader.online.link import Leased, Link, Request
from asyncloader.online.wire import Channel, Unreadable, peer

_RETRY_S = 0.5
_ROOT = 0
_NO_LEASE = -1
_SETTLE = ("settle", "hand_over")
_OF_LEASES = (*_SETTLE, "renew", "lost")


class Door:
    """Serves handles until the feed is dropped; or closed, and the last handle has gone.

    Args:
        server: Is not kept alive.

    Attributes:
        path: Of the socket.
    """

    def __init__(self, server: Link) -> None:
        self.path: str = str(Path(util.get_temp_dir()) / f"feed-{secrets.token_hex(4)}")
        self._listener = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(self.path)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._server = weakref.ref(server)
        weakref.finalize(server, self.end)  # unlike a callback of the reference, not while modules are torn down
        self._connections: set[asyncio.Task[None]] = set()
        self._closed, self._ended = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="asyncloader feed", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """How many processes are connected."""
        return len(self._connections)

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
        ended = asyncio.create_task(self._ended.wait())
        self._listen()
        await self._closed.wait()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        while self._connections and not ended.done():
            await asyncio.wait({ended, *self._connections}, return_when=asyncio.FIRST_COMPLETED)

    def _listen(self) -> None:
        if not self._closed.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Take one connection in. Not `sock_accept`: a task that is cancelled as it returns would lose a connection."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # whoever came has gone
            return
        except OSError as error:  # there are too many descriptors, for example
            log.warning("A handle could not connect to its feed, and is accepted later: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_RETRY_S, self._listen)
            return
        if peer(sock) not in (os.geteuid(), _ROOT):
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(Channel(keep_from_forks(sock), self._loop), self._server)
        task = self._loop.create_task(connection.serve())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(partial(_close, sock))  # also of one that was cancelled before it began


class _Connection:
    """The connection of the handles of a process.

    Args:
        channel: Its messages.
        server: Returns the feed; None when it is gone.
    """

    def __init__(self, channel: Channel, server: Callable[[], Link | None]) -> None:
        self._channel, self._server = channel, server
        self._requests: dict[int, Request] = {}  # that wait, or have leased what is not settled

    async def serve(self) -> None:
        """Answer calls until the connection ends; give its leases back then."""
        try:
            self._send(0, None, None)
            await self._channel.run(self._receive)
        finally:
            if (server := self._server()) is not None:
                for request in tuple(self._requests.values()):
                    server.withdraw(request, failed=True)

    def _receive(self, number: int, message: Any) -> None:
        if (server := self._server()) is None:
            raise EOFError
        request = self._requests[number] = Request()
        request.add_done_callback(partial(self._channel.soon, self._answer, number))
        if isinstance(message, Unreadable):
            error = RuntimeError(f"what was sent cannot be unpickled in the feed's process: {message.reason}")
            request.answer(None, error)
            return
        name, *arguments = message
        if name == "withdraw":
            self._withdraw(server, request, *arguments)
        elif name in _OF_LEASES:
            self._with_lease(server, request, name, *arguments)
        else:
            server.call(request, name, *arguments)

    def _withdraw(self, server: Link, request: Request, number: int, failed: bool) -> None:
        """Have a call be answered now, or give back what it has leased: nobody waits for that."""
        if (withdrawn := self._requests.get(number)) is not None:
            server.withdraw(withdrawn, failed=failed)
            if withdrawn.outcome[1] is None and isinstance(withdrawn.outcome[0], Leased):
                del self._requests[number]
        request.answer(None)

    def _with_lease(self, server: Link, request: Request, name: str, number: int, *made: Any) -> None:
        """Settle, hand over, renew or watch what was leased by the call of a number."""
        leased = self._requests[number].outcome[0] if number in self._requests else None
        server.call(request, name, leased.lease if isinstance(leased, Leased) else _NO_LEASE, *made)
        if name in _SETTLE and request.outcome[1] is None:
            del self._requests[number]

    def _answer(self, number: int, request: Request) -> None:
        """Send an answer. On the loop."""
        value, error = request.outcome
        is_lease = isinstance(value, Leased) and self._requests.get(number) is request
        if not is_lease:
            self._requests.pop(number, None)
        try:
            if error is not None:
                pickle.loads(pickle.dumps(error))  # some can be pickled, and not made again
            self._send(number, error, (value.id, value.item, value.version, value.tries) if is_lease else value)
        except Exception as raised:  # what the source gave, or raised, cannot travel
            if is_lease and (server := self._server()) is not None:
                server.withdraw(self._requests.pop(number), failed=True)
            told = raised if error is None else error
            self._send(number, RuntimeError(f"{type(told).__name__}: {told}"), None)

    def _send(self, number: int, error: Exception | None, value: Any) -> None:
        server = self._server()
        self._channel.send(number, (error, value, 0 if server is None else server.version))


def _close(sock: socket.socket, task: asyncio.Task[None]) -> None:
    sock.close()
