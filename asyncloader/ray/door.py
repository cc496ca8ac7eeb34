"""Where agents come in: the address that the trainer listens at, and who is about to prove itself there.

TCP ──> Door ── TLS, if any ── Link ── proofs ──> the pool's `is_expected` ──> frames
         └ too slow, no TLS, wrong secret, no agent, one of too many: dropped and counted

Connections are accepted here, and not by a server of asyncio's: that says nothing of one until its TLS stands, and
nothing at all of one whose TLS fails. Whoever is accepted is a stranger until it has proven itself. There are never
more than so many of these, half-done TLS among them: the oldest has to go, for the newest may be the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncloader.errors import WorkerStartError
from asyncloader.observe.traffic import Traffic
from asyncloader.ray.handshake import Send, Steps, new_secret, trainer_side
from asyncloader.ray.launcher import MakeContext
from asyncloader.ray.link import Link, Owner
from asyncloader.worker.guarded_loop import GuardedLoop

log = logging.getLogger("asyncloader")

PROOF_S = 5.0
"""So long a connection has to prove itself, its TLS included. Seconds."""

_TURNS = 5
"""In so many turns of the loop that time is counted, so that a pause of the loop itself is but one of them."""

_MOST_STRANGERS = 64
"""So many connections may be about to prove themselves."""

_MOST_REASONS = 32
"""Strangers may have reasons without an end: some are texts of errors, and each is a line in the log."""

_NO_ROOM_S = 1.0
"""Where there was no descriptor for a connection, the next try is so much later. Seconds."""


@dataclass(slots=True)
class _Stranger:
    """What there is of a connection that has not proven itself, beside its link."""

    sock: socket.socket
    timer: asyncio.TimerHandle | None = None


class Door:
    """Owner of the listening socket, and of connections that have not proven themselves. On the loop.

    Args:
        loop: The portal's.
        owner: Of the links.
        is_expected: Says whether an agent of a number that has proven itself may come in by a link.
        allocate: Gives memory for large buffers.
        traffic: Counts what agents send, or None.

    Attributes:
        secret: Of the session.
        refused: Connections that were turned away, by why. Beyond `_MOST_REASONS` of these they are others'.
    """

    def __init__(
        self,
        loop: GuardedLoop,
        owner: Owner,
        is_expected: Callable[[Link, int], bool],
        allocate: Callable[[int], memoryview],
        traffic: Traffic | None = None,
    ) -> None:
        self.secret = new_secret()
        self.refused: Counter[str] = Counter()
        self._loop = loop.loop  # without the guard: no stranger may end a run
        self._guarded = loop
        self._owner = owner
        self._is_expected = is_expected
        self._allocate = allocate
        self._traffic = traffic
        self._strangers: dict[Link, _Stranger] = {}  # the oldest first
        self._connecting: set[asyncio.Task[Any]] = set()
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
        """Where agents are to dial."""
        assert self._sock is not None
        host, port = self._sock.getsockname()[:2]
        return host, port

    # ---------------------------------------------------------------------------------------------- they come

    def _listen(self, sock: socket.socket) -> None:
        """Be told of connections, unless it was closed meanwhile."""
        if sock.fileno() != -1:
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        """Take one connection in: who is behind it has another turn, and who came before has turns to prove itself."""
        try:
            sock, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # it has gone again
        except OSError as error:
            log.warning("Connections from other machines cannot be taken in for now: %s", error)
            self._loop.remove_reader(listening)
            self._loop.call_later(_NO_ROOM_S, self._listen, listening)
            return
        link = Link(self._owner, self._guarded, self._prove, self._allocate, self._traffic)
        link.peer = f"{address[0]}:{address[1]}"
        self._strangers[link] = _Stranger(sock)
        self._wait(link, _TURNS)
        connecting = self._loop.create_task(self._loop.connect_accepted_socket(lambda: link, sock, ssl=self._context))
        self._connecting.add(connecting)
        connecting.add_done_callback(functools.partial(self._on_connected, link, sock))
        if len(self._strangers) > _MOST_STRANGERS:
            self._turn_away(next(iter(self._strangers)), "too many at once")

    def _on_connected(self, link: Link, sock: socket.socket, connecting: asyncio.Task[Any]) -> None:
        """Its TLS stands, if there is to be any; or it has failed, of which nobody else tells the link."""
        self._connecting.discard(connecting)
        error = None if connecting.cancelled() else connecting.exception()
        if link.was_made:
            return
        sock.close()
        if isinstance(error, ssl.SSLError):
            link.drop(f"its TLS failed ({error.reason})")
        elif error is not None and not isinstance(error, ConnectionError):
            link.drop(f"it could not be taken in ({error!r})")
        link.connection_lost(None)

    def _prove(self, link: Link, send: Send) -> Steps:
        return trainer_side(self.secret, send, functools.partial(self._is_expected, link))

    def came_in(self, link: Link) -> None:
        """It has proven itself."""
        self._forget(link)

    # ------------------------------------------------------------------------------------------------ they go

    def _wait(self, link: Link, turns: int) -> None:
        """Turn a stranger away after so many more turns."""
        if turns:
            self._strangers[link].timer = self._loop.call_later(PROOF_S / _TURNS, self._wait, link, turns - 1)
        else:
            self._turn_away(link, "too slow")

    def went_away(self, link: Link, why: str) -> None:
        """A connection has ended; if it had not proven itself it is counted."""
        if self._forget(link) is None:
            return
        if why not in self.refused and len(self.refused) >= _MOST_REASONS:
            why = "another reason"
        self.refused[why] += 1
        if self.refused[why] == 1:
            log.warning("A connection from %s was turned away: %s. More of them are counted.", link.peer, why)

    def _turn_away(self, link: Link, why: str) -> None:
        """Drop a stranger, which is counted at once."""
        sock = self._strangers[link].sock
        self.went_away(link, why)
        _drop(link, sock, why)

    def _forget(self, link: Link) -> _Stranger | None:
        stranger = self._strangers.pop(link, None)
        if stranger is not None and stranger.timer is not None:
            stranger.timer.cancel()
        return stranger

    def close(self) -> None:
        """Listen no more. Idempotent."""
        for link, stranger in tuple(self._strangers.items()):
            self._forget(link)
            _drop(link, stranger.sock, "the session has ended")
        if self._sock is not None and self._sock.fileno() != -1:
            self._loop.remove_reader(self._sock)
            self._sock.close()


def _drop(link: Link, sock: socket.socket, why: str) -> None:
    """End a connection, also one whose TLS does not stand yet: the loop takes that as hung up."""
    link.drop(why)
    if not link.was_made:
        with contextlib.suppress(OSError):  # the other end was quicker
            sock.shutdown(socket.SHUT_RDWR)
