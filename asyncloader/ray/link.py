"""A connection between trainer and agent, on a loop: first the proofs, then frames.

    bytes ──> handshake ──> FrameReader ──> Owner.on_frame
              (both sides)      └ large buffers: the loop receives them straight into their place

How long the proofs may take is for whoever made the link to say. What is sent is never copied: a buffer is referred to
until the socket has taken it. That is bounded by tickets, each of which is answered once. Sizes of the socket's buffers
are left to the kernel, which lets them grow with the connection; to set them would hold them to ``net.core.wmem_max``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol

from asyncloader.messages.frames import BadFrame, Buffer
from asyncloader.observe.traffic import Traffic
from asyncloader.ray.handshake import Refused, Send, Steps
from asyncloader.ray.wire import Frame, FrameReader, frame
from asyncloader.worker.guarded_loop import GuardedLoop


class Owner(Protocol):
    """Whom a link reports to, on its loop."""

    def on_open(self, link: Link) -> None:
        """The other side has proven itself, and so has this one."""

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Take a frame; its body is valid during the call only.

        Raises:
            BadFrame: it is not one that the other side writes.
        """

    def on_lost(self, link: Link, why: str) -> None:
        """The connection has ended, whoever ended it."""


class Link(asyncio.BufferedProtocol):
    """One end of a connection. On its loop.

    Args:
        owner: Is told what comes.
        loop: Of the connection. What the other side has to prove itself with is taken beside its guard: a stranger can
            end its own connection at worst.
        handshake: Makes the proofs, given what sends.
        allocate: Gives memory for large buffers.
        traffic: Counts what comes in many pieces, or None.

    Attributes:
        is_open: Frames come and go.
        has_heard: Something has come; whoever watches for silence sets it back.
        num_bytes: How many bytes have come.
        peer: Where the other end is.
    """

    def __init__(
        self,
        owner: Owner,
        loop: GuardedLoop,
        handshake: Callable[[Link, Send], Steps],
        allocate: Callable[[int], memoryview],
        traffic: Traffic | None = None,
    ) -> None:
        self.is_open = False
        self.has_heard = False
        self.num_bytes = 0
        self.peer = "nowhere"
        self._owner = owner
        self._loop = loop
        self._handshake = handshake
        self._allocate = allocate
        self._reader: FrameReader  # from the proofs on: of a stranger as little is kept as can be
        self._traffic = traffic
        self._amid_bytes = 0  # of frames that come in several pieces, since the first of these
        self._steps: Steps | None = None
        self._wanted = memoryview(b"")
        self._got = 0
        self._why = ""
        self._transport: Any = None

    def __repr__(self) -> str:
        return f"<Link to {self.peer} {'open' if self.is_open else 'not proven'}>"

    @property
    def was_made(self) -> bool:
        """Whether there is a connection, or has been one: the loop tells of the end of such a link, and of no other."""
        return self._transport is not None

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 if it is closed."""
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with the proofs, unless it was dropped before it came as far."""
        self._transport = transport
        if name := transport.get_extra_info("peername"):
            self.peer = f"{name[0]}:{name[1]}"
        if self._why:
            self._transport.abort()
            return
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._steps = self._handshake(self, self._transport.write)
        self._step(None)

    def _step(self, data: bytes | None) -> None:
        assert self._steps is not None
        try:
            self._wanted, self._got = memoryview(bytearray(self._steps.send(data))), 0  # type: ignore[arg-type]
        except StopIteration:
            self._steps = None
            self._reader = FrameReader(self._allocate)
            self.is_open = True
            self._loop.run(self._owner.on_open, self)
        except Refused as error:
            self.drop(str(error))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._reader.get_buffer() if self._steps is None else self._wanted[self._got :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self.has_heard = True
        self.num_bytes += nbytes
        if self._steps is not None:
            self._got += nbytes
            if self._got == len(self._wanted):
                self._step(bytes(self._wanted))
        else:
            self._loop.run(self._received, nbytes)

    def _received(self, nbytes: int) -> None:
        try:
            for whole in self._reader.received(nbytes):
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
        """Send a frame without large buffers. After the end it is dropped: the end is told."""
        if self.is_open:
            self._transport.write(frame(kind, life, parts)[0])

    def send_large(self, kind: int, life: int, parts: list[Buffer], buffers: list[Any]) -> None:
        """Send a frame whose buffers are referred to until they have gone."""
        if self.is_open:
            self._transport.writelines(frame(kind, life, parts, buffers))

    def drop(self, why: str) -> None:
        """End the connection at once."""
        self._why = self._why or why
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End the connection when what was written has gone."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def eof_received(self) -> None:
        """The other end has gone: nothing half-closed is kept."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        if self._steps is not None:
            self._steps.close()
        if self._traffic is not None and self._amid_bytes:
            self._end_amid(self._traffic)
        owner, why = self._owner, self._why or (f"its connection broke ({exc})" if exc else "its connection ended")
        self._handshake, self._owner = _ended, _Nobody()  # no cycle with the owner is left
        self.is_open = False
        self._loop.run(owner.on_lost, self, why)


class _Nobody:
    """Takes what comes after the end."""

    def on_open(self, link: Link) -> None:
        """Ignore it."""

    def on_frame(self, link: Link, frame: Frame) -> None:
        """Ignore it."""

    def on_lost(self, link: Link, why: str) -> None:
        """Ignore it."""


def _ended(link: Link, send: Send) -> Steps:
    raise Refused("the link has ended")
    yield 0
