"""Where agents come in: the address that the trainer listens at, and who is about to prove itself there.

TCP ──> Door ── Link ── proofs ──> the pool's `is_expected` ──> frames
         └ too slow, wrong secret, no agent, too many at once: dropped and counted
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from asyncloader.errors import WorkerStartError
from asyncloader.observe.traffic import Traffic
from asyncloader.protocols import MakeContext
from asyncloader.workers.remote.handshake import Refused, Send, Steps, new_secret, trainer_side
from asyncloader.workers.remote.link import Link, Owner

log = logging.getLogger("asyncloader")

_MOST_STRANGERS = 64
"""So many connections may be about to prove themselves."""


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
        refused: Connections that were turned away, by why.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        owner: Owner,
        is_expected: Callable[[Link, int], bool],
        allocate: Callable[[int], memoryview],
        traffic: Traffic | None = None,
    ) -> None:
        self.secret = new_secret()
        self.refused: Counter[str] = Counter()
        self._loop = loop
        self._owner = owner
        self._is_expected = is_expected
        self._allocate = allocate
        self._traffic = traffic
        self._strangers: set[Link] = set()
        self._sock: socket.socket | None = None
        self._serving: asyncio.Task[asyncio.Server] | None = None

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
        context = None if make_context is None else make_context(ssl.Purpose.CLIENT_AUTH)
        self._serving = self._loop.create_task(self._serve(self._sock, context))

    async def _serve(self, sock: socket.socket, context: ssl.SSLContext | None) -> asyncio.Server:
        return await self._loop.create_server(self._make_link, sock=sock, ssl=context)

    @property
    def address(self) -> tuple[str, int]:
        """Where agents are to dial."""
        assert self._sock is not None
        host, port = self._sock.getsockname()[:2]
        return host, port

    def _make_link(self) -> Link:
        link = Link(self._owner, self._loop, self._prove, self._allocate, self._traffic)
        self._strangers.add(link)
        return link

    def _prove(self, link: Link, send: Send) -> Steps:
        if len(self._strangers) > _MOST_STRANGERS:
            raise Refused("too many at once")
        yield from trainer_side(self.secret, send, functools.partial(self._is_expected, link))

    def came_in(self, link: Link) -> None:
        """It has proven itself."""
        self._strangers.discard(link)

    def went_away(self, link: Link, why: str) -> None:
        """A connection has ended; if it had not proven itself it is counted."""
        if link not in self._strangers:
            return
        self._strangers.discard(link)
        self.refused[why] += 1
        if self.refused[why] == 1:
            log.warning("A connection from %s was turned away: %s. More of them are counted.", link.peer, why)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        strangers, self._strangers = self._strangers, set()
        for link in strangers:
            link.drop("the session has ended")
        if self._sock is None:
            return
        if self._serving is None:
            self._sock.close()
        elif self._serving.done():
            _stop(self._sock, self._serving)
        else:  # to be cancelled it is no good: what it has begun would listen on
            self._serving.add_done_callback(functools.partial(_stop, self._sock))


def _stop(sock: socket.socket, serving: asyncio.Task[asyncio.Server]) -> None:
    if not serving.cancelled() and serving.exception() is None:
        serving.result().close()  # before the socket: asyncio asks for its number
    sock.close()
