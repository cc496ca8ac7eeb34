"""A connection between trainer and agent whose two ends have proven themselves: frames go both ways.

    bytes ──> FrameReader ──> Owner.on_frame
                  └ large buffers: the loop receives them straight into their memory

Nothing that is sent is copied: a link refers to a buffer until the socket has taken it. Tickets bound how much that
is, since each is answered once. The kernel chooses the sizes of the buffers of the socket, and lets them grow; to
set them would hold them to ``net.core.wmem_max``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from asyncloader.messages.frames import BadFrame, Buffer
from asyncloader.observe.traffic import Traffic
from asyncloader.ray.wire import Frame, FrameReader, frame
from asyncloader.worker.guarded_loop import GuardedLoop


class Owner(Protocol):
    """The object that a link reports to, on its loop."""

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Take a frame; its body is valid during the call only.

        Raises:
            BadFrame: the other side never writes such a frame.
        """

    def on_lost(self, link: Link, why: str) -> None:
        """The connection has ended, whichever side ended it."""


class Link(asyncio.BufferedProtocol):
    """An end of a connection, on its loop.

    Args:
        transport: The connection's transport. From now on the link is its protocol.
        owner: Is told what comes.
        loop: The connection's loop.
        allocate: Gives memory for large buffers.
        traffic: Counts what comes in many pieces, or None.

    Attributes:
        num_bytes: How many bytes have come.
        peer: The address of the other end.
    """

    def __init__(
        self,
        transport: Any,
        owner: Owner,
        loop: GuardedLoop,
        allocate: Callable[[int], memoryview],
        traffic: Traffic | None = None,
    ) -> None:
        self.num_bytes = 0
        self._bytes_before = 0  # the last beat
        self._silent_beats = 0
        self.peer = address_of(transport.get_extra_info("peername"))
        self._is_open = True
        self._owner: Owner | None = owner
        self._loop = loop
        self._reader = FrameReader(allocate)
        self._traffic = traffic
        self._amid_bytes = 0  # of frames that come in several pieces, since the first of these
        self._why = ""
        self._transport = transport
        if transport.is_closing():  # the loop tells the link of the end next
            transport.set_protocol(self)
            return
        transport.pause_reading()  # uvloop looks at the kind of protocol when it begins to read
        transport.set_protocol(self)
        transport.resume_reading()

    def __repr__(self) -> str:
        return f"<Link to {self.peer} {'open' if self._is_open else 'closed'}>"

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 if it is closed."""
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self.num_bytes += nbytes
        self._loop.run(self._received, nbytes)

    def _received(self, nbytes: int) -> None:
        try:
            for whole in self._reader.received(nbytes):
                if self._owner is not None:
                    self._owner.on_frame(self, whole)
        except (BadFrame, MemoryError) as error:
            self.drop(f"it sent what is no frame ({error!r})")
        if self._traffic is not None and (self._amid_bytes or self._reader.is_amid):
            self._count(self._traffic, nbytes)

    def _count(self, traffic: Traffic, nbytes: int) -> None:
        """Note a piece of a frame that comes in several."""
        if not self._amid_bytes:
            traffic.begin()
        self._amid_bytes += nbytes
        if not self._reader.is_amid:
            self._end_amid(traffic)

    def _end_amid(self, traffic: Traffic) -> None:
        nbytes, self._amid_bytes = self._amid_bytes, 0
        traffic.end(nbytes)

    def send(self, kind: int, life: int = 0, *parts: Buffer) -> None:
        """Send a frame without large buffers. After the end it is dropped: the owner is told of the end."""
        if self._is_open:
            self._transport.write(frame(kind, life, parts)[0])

    def send_large(self, kind: int, life: int, parts: list[Buffer], buffers: list[Any]) -> None:
        """Send a frame whose buffers are referred to until they have gone."""
        if self._is_open:
            self._transport.writelines(frame(kind, life, parts, buffers))

    def beat(self) -> int:
        """Return for how many beats in a row nothing has come. Beats are turns of the loop: its own pauses are one."""
        self._silent_beats = self._silent_beats + 1 if self.num_bytes == self._bytes_before else 0
        self._bytes_before = self.num_bytes
        return self._silent_beats

    def drop(self, why: str) -> None:
        """End the connection at once."""
        self._why = self._why or why
        self._is_open = False
        self._transport.abort()

    def close(self) -> None:
        """End the connection when what was written has gone."""
        self._is_open = False
        self._transport.close()

    def eof_received(self) -> None:
        """The other end has gone: no half-closed connection is kept."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self._traffic is not None and self._amid_bytes:
            self._end_amid(self._traffic)
        owner, why = self._owner, self._why or (f"its connection broke ({exc})" if exc else "its connection ended")
        self._owner, self._is_open = None, False  # no cycle with the owner is left
        if owner is not None:
            self._loop.run(owner.on_lost, self, why)


def address_of(name: Any) -> str:
    """Write down the address of a socket."""
    return f"{name[0]}:{name[1]}" if name else "nowhere"
