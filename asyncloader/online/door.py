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
from asyncloader.online.forks import generation, keep_from_forks
from asyncloader.online.link import Leased, Request
from asyncloader.online.wire import Channel, Unreadable, peer, unpacked

_RETRY_S = 0.5
_ROOT = 0


class Door:
    """Serves handles until the feed is dropped.

    Args:
        server: Is not kept alive.

    Attributes:
        path: Of the socket.
    """

    def __init__(self, server: Any) -> None:
        self._process = generation()
        self.path: str = str(Path(util.get_temp_dir()) / f"feed-{secrets.token_hex(4)}")
        self._listener = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(self.path)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._server = weakref.ref(server)
        weakref.finalize(server, self.end)  # unlike a callback of the reference, not while modules are torn down
        self._connections: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="asyncloader feed", daemon=True)
        self._thread.start()

    def end_at_exit(self) -> None:
        """Let go of all handles when the interpreter ends: whoever trains has begun, and is waited for then."""
        threads.adopt(self._thread, self.end)

    def end(self) -> None:
        """Let go of all handles. Also inside the garbage collector.

        The socket is removed here and not by the thread: at the end of the process, the folder is being removed.
        """
        if self._process == generation():  # a fork has a copy of this
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ended.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_all())

    async def _serve_all(self) -> None:
        self._listen()
        await self._ended.wait()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def _serve(self, channel: Channel) -> None:
        """Answer the calls of a process until its connection ends."""
        client = Client(channel, self._server)
        try:
            await channel.run(client.receive)
        finally:
            client.end()

    def _listen(self) -> None:
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
        task = self._loop.create_task(self._serve(Channel(keep_from_forks(sock), self._loop)))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(partial(_close, sock))  # also of one that was cancelled before it began


class Client:
    """The calls of the handles in one process. On the loop of its channel.

    Args:
        channel: Its messages.
        server: Returns the feed; None when it is gone.
    """

    def __init__(self, channel: Any, server: Callable[[], Any]) -> None:
        self._channel, self._server = channel, server
        self._waiting: dict[int, Request] = {}
        self._leases: dict[int, int] = {}  # that are not settled, and by which call each was given
        self._readers: list[int] = []
        self._has_ended = False
        if (alive := server()) is not None:
            alive.clients.add(self)
            self._send(0, None, alive.address)

    def end(self) -> None:
        """Give leases back: the process has ended."""
        self._has_ended = True
        if (server := self._server()) is not None:
            server.clients.discard(self)
            for request in tuple(self._waiting.values()):
                server.withdraw(request)
            for lease in self._leases:
                server.give_back(lease, True)
            for reader in self._readers:
                server.leave(reader)

    def receive(self, number: int, message: Any) -> None:
        """Take a message.

        Raises:
            EOFError: if the feed is gone.
        """
        if (server := self._server()) is None:
            raise EOFError
        name, *arguments = ("",) if isinstance(message, Unreadable) else message
        if name == "withdraw":
            if (waiting := self._waiting.get(number)) is not None:
                server.withdraw(waiting)
        elif name == "give_back":
            self._give_back(server, number, *arguments)
        elif name == "dropped":
            server.dropped(number, *arguments)
        elif name == "state":  # it takes its time, and others go on
            threads.start(partial(self._send_state, number, server, arguments), "asyncloader feed state")
        elif name == "refuse":  # what was given by this call cannot be unpickled there: a lease, it may be
            for lease in [lease for lease, call in self._leases.items() if call == number]:
                self._give_back(server, lease, True)
        else:
            request = self._waiting[number] = Request()
            settled = arguments[0] if name == "settle" else None
            request.when_done(partial(self._channel.soon, self._answer, number, name, settled))
            if isinstance(message, Unreadable):
                request.answer(None, _not_unpickled(message))
                return
            if name == "put":
                arguments = [map(_unit, *arguments)]
            server.call(request, name, *arguments)

    def _send_state(self, number: int, server: Any, where: list[int]) -> None:
        try:
            self._send(number, None, server.write_state(*where))
        except Exception as error:  # of the user's classes
            self._send(number, RuntimeError(f"{type(error).__name__}: {error}"), None)

    def _give_back(self, server: Any, lease: int, failed: bool, *packed: bytes) -> None:
        if self._leases.pop(lease, None) is not None:
            made = [*map(unpacked, packed)]
            if made and isinstance(made[0], Unreadable):  # the item is as it was
                failed, made = True, []
            server.give_back(lease, failed, *made)

    def _answer(self, number: int, name: str, settled: int | None, request: Request) -> None:
        """Send an answer."""
        del self._waiting[number]
        value, error = request.outcome
        if isinstance(value, Leased):
            value.end()
            value = value.item
            self._leases[value.lease] = number
        elif error is None and settled is not None:
            self._leases.pop(settled, None)
        elif error is None and name == "begin":
            self._readers.append(value)
        try:
            if error is not None:
                pickle.loads(pickle.dumps(error))  # some can be pickled, and not made again
            self._send(number, error, value)
        except Exception as raised:  # what the source gave, or raised, cannot travel
            if name == "lease" and error is None and (server := self._server()) is not None:
                self._give_back(server, value.lease, True)
            told = raised if error is None else error
            self._send(number, RuntimeError(f"{type(told).__name__}: {told}"), None)
        if self._has_ended:  # meanwhile: what this has given is given back as well
            self.end()

    def _send(self, number: int, error: Exception | None, value: Any) -> None:
        server = self._server()
        self._channel.send(number, (error, value, 0 if server is None else server.version))


def _unit(unit: Any) -> Any:
    """Return a unit, or what is raised in place of it. One that was put ahead is a pickle of its own."""
    made = unpacked(unit) if isinstance(unit, bytes) else unit
    return _not_unpickled(made) if isinstance(made, Unreadable) else made


def _not_unpickled(reason: Unreadable) -> Exception:
    return RuntimeError(f"what was sent cannot be unpickled in the feed's process: {reason}")


def _close(sock: socket.socket, task: asyncio.Task[None]) -> None:
    sock.close()
