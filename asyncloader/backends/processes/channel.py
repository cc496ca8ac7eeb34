"""The parent's end of the channel to one worker: a socketpair, framed messages, read by the loop.

The channel never blocks: bytes that the socket does not take wait in a list, and a writer callback sends them. So a
worker that is busy, stopped or dead never holds up the loop, and the two ends cannot block each other.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeAlias

from asyncloader.loops import GuardedLoop
from asyncloader.messages.frames import MOST_PARTS, BadFrame, Buffer, FrameBuffer, frame

OnFrames: TypeAlias = Callable[[Iterable[tuple[int, memoryview]]], None]

_SOCKET_BYTES = 1 << 20


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Return the parent's end, non-blocking, and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    ours.setblocking(False)
    return ours, theirs


class Channel:
    """The parent's end, on the loop.

    Args:
        on_frames: Called once for each read, with an iterator over the frames that are complete by it: kind and body,
            which is valid until the next frame only. May raise BadFrame.
        on_closed: Called once when the other end is gone or what it sends makes no sense, with the error or None.
    """

    def __init__(
        self,
        loop: GuardedLoop,
        sock: socket.socket,
        on_frames: OnFrames,
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._incoming = FrameBuffer()
        self._unsent: deque[memoryview] = deque()
        self._writing = False
        self._open = True

    def open(self) -> None:
        """Hear of what comes. From now on nobody but `close` may close the socket."""
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def send(self, kind: int, *parts: Buffer, more: bool = False) -> None:
        """Send a frame, now if the socket takes it. After the channel closed it is dropped: the death is reported.

        With ``more`` it goes with the next frame, which wakes the other end once for both, or in the loop's next turn:
        then its parts must not change before.
        """
        if not self._open:
            return
        whole = frame(kind, parts)
        self._unsent += map(_lasting if self._writing else memoryview, whole)
        if more:
            self._loop.call_soon(self._flush)
        elif not self._writing:
            self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; the rest when it takes more."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self._sock.sendmsg([*islice(unsent, MOST_PARTS)])
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = unsent[0][sent:]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._unsent = deque(map(_lasting, unsent))
                self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError:
            unsent.clear()  # the other end is gone; the reader finds out
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _on_readable(self) -> None:
        try:
            if self._incoming.read(self._sock.recv_into) == 0:
                self._end(None)
                return
            self._on_frames(self._incoming.frames())
        except BlockingIOError:
            return
        except (BadFrame, OSError, MemoryError) as error:
            self._end(error)

    def drain(self) -> None:
        """Read what a worker that has ended left in the socket, then close."""
        while self._open:
            try:
                if self._incoming.read(self._sock.recv_into) == 0:
                    break
                self._on_frames(self._incoming.frames())
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
        # Before the socket is closed: another thread may be given the number of the descriptor at once, and the loop
        # would watch that one.
        self._loop.remove_reader(self._sock.fileno())
        self._stop_writing()
        self._unsent.clear()
        self._sock.close()
        self._on_frames, self._on_closed = _ignore, _ignore  # no cycle with the owner is left


def _lasting(part: Buffer) -> memoryview:
    """Return a part that waits to be sent: a copy of what can change, since the caller goes on with its memory."""
    contents = memoryview(part)
    return contents if type(contents.obj) is bytes else memoryview(bytes(contents))


def _ignore(*args: object) -> None:
    """Take a call that nobody wants any more."""
