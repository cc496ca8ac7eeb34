"""The channel between the parent and one worker: a socketpair, framed messages, read by the loop in the parent.

Both ends belong to one thread each: the parent's to the loop thread, the worker's to the thread that serves. The
parent's end never blocks: what the socket does not take waits in a list, and a writer callback sends it on. So a worker
that is busy, stopped or dead never holds up the loop, and the two ends cannot block each other.

A frame that cannot be (of unknown kind, or longer than
:data:`~asyncloader.workers.protocol.messages.MAX_FRAME_BYTES`) ends the channel with an error.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from asyncloader.workers.protocol.messages import HEADER, KINDS, MAX_FRAME_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

_READ_BYTES = 256 << 10
_SOCKET_BYTES = 1 << 20
_MOST_PARTS = 512  # of one sendmsg; the kernel takes 1024


class BadFrame(Exception):
    """What was read is no frame of ours."""


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Return the parent's end, non-blocking, and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    ours.setblocking(False)
    return ours, theirs


def frame(kind: int, parts: Sequence[Buffer]) -> list[Buffer]:
    """Put the header before the parts of a body."""
    return [HEADER.pack(sum(map(len, parts)), kind), *parts]


class FrameBuffer:
    """Bytes as they come in, cut into frames.

    Small frames are cut from one buffer that is used again: their bodies are valid until the next `read`. A frame that
    does not fit gets a buffer of its own, filled in place.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._large: bytearray | None = None
        self._large_kind = 0
        self._large_end = 0

    def read(self, receive: Callable[[memoryview], int]) -> int:
        """Receive once, into the right place; return how many bytes came."""
        if self._large is not None:
            count = receive(memoryview(self._large)[self._large_end :])
            self._large_end += count
            return count
        if self._start:
            self._compact()
        count = receive(self._view[self._end :])
        self._end += count
        return count

    def frames(self) -> Iterable[tuple[int, memoryview]]:
        """Yield the complete frames that are there: kind and body."""
        while True:
            if self._large is not None:
                if self._large_end < len(self._large):
                    return
                body, self._large = memoryview(self._large), None
                yield self._large_kind, body
                continue
            available = self._end - self._start
            if available < HEADER.size:
                return
            length, kind = HEADER.unpack_from(self._buffer, self._start)
            if kind not in KINDS or length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of kind {kind} and {length} bytes")
            begin = self._start + HEADER.size
            if length > _READ_BYTES - HEADER.size:
                self._begin_large(kind, length, begin)
                continue
            if available < HEADER.size + length:
                return
            self._start = begin + length
            yield kind, self._view[begin : begin + length]

    def _begin_large(self, kind: int, length: int, begin: int) -> None:
        there = self._end - begin
        self._large = bytearray(length)
        self._large[:there] = self._view[begin : self._end]
        self._large_kind, self._large_end = kind, there
        self._start = self._end = 0

    def _compact(self) -> None:
        rest = self._end - self._start
        if rest:
            self._view[:rest] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, rest


class Channel:
    """The parent's end, on the loop.

    Args:
        on_frame: Called with kind and body; the body is valid during the call only.
        on_closed: Called once when the other end is gone or what it sends makes no sense, with the error or None.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[int, memoryview], None],
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._incoming = FrameBuffer()
        self._held: list[Buffer] = []
        self._unsent: deque[memoryview] = deque()
        self._writing = False
        self._open = True
        loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, kind: int, *parts: Buffer, more: bool = False) -> None:
        """Send a frame, now if the socket takes it. After the channel closed it is dropped: the death is reported.

        With ``more`` it goes with the next frame, which wakes the other end once for both, or in the loop's next turn.
        """
        if not self._open:
            return
        self._held += frame(kind, parts)
        if more:
            self._loop.call_soon(self._send_held)
        else:
            self._send_held()

    def _send_held(self) -> None:
        whole, self._held = self._held, []
        if not whole:
            return
        if self._unsent:
            self._keep(whole, 0)
            return
        try:
            sent = self._sock.sendmsg(whole[:_MOST_PARTS])
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the other end is gone; the reader finds out
        self._keep(whole, sent)

    def _keep(self, parts: Sequence[Buffer], sent: int) -> None:
        """Remember what the socket did not take."""
        for part in parts:
            if sent >= len(part):
                sent -= len(part)
                continue
            # A copy: the caller may change or release its memory.
            self._unsent.append(memoryview(bytes(memoryview(part)[sent:])))
            sent = 0
        if self._unsent and not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        try:
            while self._unsent:
                parts = [self._unsent[i] for i in range(min(len(self._unsent), _MOST_PARTS))]
                self._drop(self._sock.sendmsg(parts))
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        self._writing = False
        self._loop.remove_writer(self._sock.fileno())

    def _drop(self, sent: int) -> None:
        while self._unsent and sent >= len(self._unsent[0]):
            sent -= len(self._unsent.popleft())
        if sent:
            self._unsent[0] = self._unsent[0][sent:]

    def _on_readable(self) -> None:
        try:
            if self._incoming.read(self._sock.recv_into) == 0:
                self._end(None)
                return
            self._take_frames()
        except BlockingIOError:
            return
        except (BadFrame, OSError, MemoryError) as error:
            self._end(error)

    def _take_frames(self) -> None:
        for kind, body in self._incoming.frames():
            try:
                self._on_frame(kind, body)
            except Exception as error:  # the frames behind it are none the worse
                words = f"A frame of kind {kind} from a worker could not be dealt with"
                self._loop.call_exception_handler({"message": words, "exception": error})

    def drain(self) -> None:
        """Read what a worker that has ended left in the socket, then close."""
        while self._open:
            try:
                if self._incoming.read(self._sock.recv_into) == 0:
                    break
                self._take_frames()
            except (BadFrame, OSError, MemoryError):
                break  # BlockingIOError among them: a child of the worker holds the other end
        self.close()

    def _end(self, error: Exception | None) -> None:
        on_closed = self._on_closed
        self.close()
        on_closed(error)

    def close(self) -> None:
        """Close this end. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._unsent.clear()
        self._held.clear()
        self._sock.close()
        self._on_frame, self._on_closed = _ignore, _ignore  # no cycle with the owner is left


def _ignore(*args: object) -> None:
    """Take a call that nobody wants any more."""


class WorkerChannel:
    """The worker's end: blocking, in the thread that serves."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._incoming = FrameBuffer()
        self._frames: deque[tuple[int, bytes]] = deque()

    def receive(self, *, wait: bool) -> tuple[int, bytes] | None:
        """Return the next frame; None if there is none and ``wait`` is false.

        Raises:
            EOFError: if the parent is gone.
        """
        if self._frames:
            return self._frames.popleft()
        flags = 0 if wait else socket.MSG_DONTWAIT
        while not self._frames:
            try:
                count = self._incoming.read(lambda view: self._sock.recv_into(view, 0, flags))
            except BlockingIOError:
                return None
            if count == 0:
                raise EOFError("the parent closed the channel")
            self._frames.extend((kind, bytes(body)) for kind, body in self._incoming.frames())
        return self._frames.popleft()

    def put_back(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Let these frames be received next, in this order."""
        self._frames.extendleft(reversed(frames))

    def fileno(self) -> int:
        """Return the descriptor, for a loop to watch."""
        return self._sock.fileno()

    def send(self, kind: int, *parts: Buffer) -> None:
        """Send a frame whole."""
        whole = frame(kind, parts)
        total = sum(map(len, whole))
        sent = self._sock.sendmsg(whole[:_MOST_PARTS])
        if sent == total:
            return
        for part in whole:
            if sent >= len(part):
                sent -= len(part)
                continue
            self._sock.sendall(memoryview(part)[sent:])
            sent = 0

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
