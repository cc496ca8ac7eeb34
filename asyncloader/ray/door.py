"""The door: the address at which the trainer listens, and the strangers that are about to prove themselves there.

TCP ──> Door ── TLS, if any ── proofs ──> `is_expected` ──> `on_open`
         └ too slow, no TLS, wrong secret, no agent, one of too many: dropped and counted

The door accepts connections itself: a server of asyncio says nothing of a connection until its TLS stands, and nothing
at all if the TLS fails. Each stranger is a task, in which TLS and proofs follow each other. At most
`_MOST_STRANGERS` may wait: when one more comes the oldest has to go, because the newest may be the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncloader.errors import WorkerStartError
from asyncloader.ray.handshake import PROOF_BYTES, Refused, Stranger, new_secret, prove, trainer_side
from asyncloader.ray.launcher import MakeContext
from asyncloader.ray.link import address_of
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

PROOF_S = 5.0
"""A connection has so long to prove itself, its TLS included. Seconds."""

_TURNS = 5
"""The time is counted in so many turns of the loop, so that a pause of the loop itself is only one of them."""

_MOST_STRANGERS = 64
"""So many connections may be about to prove themselves."""

_MOST_REASONS = 32
"""Strangers may have reasons without an end: some are texts of errors, and each is a line in the log."""

_NO_ROOM_S = 1.0
"""Where there was no descriptor for a connection, the next try is so much later. Seconds."""


_CLOSED = "the session has ended"


class Door:
    """Owner of the listening socket, and of connections that have not proven themselves. On the loop.

    Args:
        loop: The portal's.
        is_expected: Says whether an agent of a number, which has proven itself, may come in now.
        on_open: Gets the transport of an agent that has come in, and its number.

    Attributes:
        secret: The secret of the session.
        refused: Connections that were turned away, by reason. Beyond `_MOST_REASONS` they share one reason.
    """

    def __init__(
        self, loop: GuardedLoop, is_expected: Callable[[int], bool], on_open: Callable[[Any, int], None]
    ) -> None:
        self.secret = new_secret()
        self.refused: Counter[str] = Counter()
        self._loop = loop.loop  # without the guard: no stranger may end a run
        self._guarded = loop
        self._is_expected = is_expected
        self._on_open = on_open
        self._strangers: dict[asyncio.Task[str], asyncio.TimerHandle] = {}  # the oldest first
        self._taken: set[socket.socket] = set()  # sockets of strangers that the loop has
        self._sock: socket.socket | None = None
        self._context: ssl.SSLContext | None = None

    def open(self, address: str, port: int, make_context: MakeContext | None) -> None:
        """Listen there, and nowhere else.

        Args:
            address: By which agents reach this machine.
            port: 0 for any that is free.
            make_context: Makes the context for TLS, or None for none.

        Raises:
            WorkerStartError: if that cannot be.
        """
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._sock = socket.create_server((address, port), family=family)
        except OSError as error:
            raise WorkerStartError(
                f"Agents on other machines are to reach this one at {address}, port {port or 'any'}, but it cannot "
                f"listen there: {error}"
            ) from error
        self._sock.setblocking(False)
        self._context = None if make_context is None else make_context(ssl.Purpose.CLIENT_AUTH)
        self._listen(self._sock)

    @property
    def address(self) -> tuple[str, int]:
        """The address that agents are to dial."""
        assert self._sock is not None
        host, port = self._sock.getsockname()[:2]
        return host, port

    def _listen(self, sock: socket.socket) -> None:
        """Be told of connections, unless the socket was closed meanwhile."""
        if sock.fileno() != -1:
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        """Take one connection in. Before the next one the strangers that are there have a turn to prove themselves."""
        try:
            sock, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # it has gone again
        except OSError as error:
            log.warning("Connections from other machines cannot be taken in for now: %s", error)
            self._loop.remove_reader(listening)
            self._loop.call_later(_NO_ROOM_S, self._listen, listening)
            return
        stranger = self._loop.create_task(self._prove(sock))
        stranger.add_done_callback(partial(self._on_end, sock, address_of(address)))
        self._wait(stranger, _TURNS)
        if len(self._strangers) > _MOST_STRANGERS:
            self._turn_away(next(iter(self._strangers)), "too many at once")

    def _wait(self, stranger: asyncio.Task[str], turns: int) -> None:
        """Turn a stranger away after so many more turns."""
        if turns:
            self._strangers[stranger] = self._loop.call_later(PROOF_S / _TURNS, self._wait, stranger, turns - 1)
        else:
            self._turn_away(stranger, "too slow")

    def _turn_away(self, stranger: asyncio.Task[str], why: str) -> None:
        self._strangers.pop(stranger).cancel()
        stranger.cancel(why)

    async def _prove(self, sock: socket.socket) -> str:
        """Let a stranger in that proves itself; otherwise return why not."""
        reader = asyncio.StreamReader(PROOF_BYTES, self._loop)
        connected = self._loop.connect_accepted_socket(lambda: Stranger(reader), sock, ssl=self._context)
        transport: Any = None
        self._taken.add(sock)
        try:
            transport, _ = await connected
            number = await prove(trainer_side(self.secret, transport.write, self._is_expected), reader)
        except BaseException as error:
            if transport is not None:
                transport.abort()
            match error:
                case Refused():
                    return str(error)
                case ssl.SSLError():
                    return f"its TLS failed ({error.reason})"
                case EOFError() | ConnectionError():
                    return "its connection ended"
                case Exception():
                    return f"it could not be taken in ({error!r})"
            raise
        self._taken.discard(sock)
        self._guarded.run(self._on_open, transport, number)
        return ""

    def _on_end(self, sock: socket.socket, peer: str, stranger: asyncio.Task[str]) -> None:
        """A stranger has come in, or not. Connections that did not are dropped and counted."""
        if (timer := self._strangers.pop(stranger, None)) is not None:
            timer.cancel()
        try:
            why = stranger.result()
        except asyncio.CancelledError as error:
            why = str(error)
        if not why:
            return
        with contextlib.suppress(OSError):  # the other end was quicker, or the loop has closed the socket
            sock.shutdown(socket.SHUT_RDWR)  # the loop closes a socket that it has
        if sock not in self._taken:
            sock.close()
        self._taken.discard(sock)
        if why == _CLOSED:
            return
        if why not in self.refused and len(self.refused) >= _MOST_REASONS:
            why = "another reason"
        self.refused[why] += 1
        if self.refused[why] == 1:
            log.warning("A connection from %s was turned away: %s. More of them are counted.", peer, why)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        for stranger in tuple(self._strangers):
            self._turn_away(stranger, _CLOSED)
        if self._sock is not None and self._sock.fileno() != -1:
            self._loop.remove_reader(self._sock)
            self._sock.close()
