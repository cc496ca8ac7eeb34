"""The parent's end of the channel to one worker: a socketpair, framed messages, read by the loop.

The channel never blocks: bytes that the socket does not take wait in a list, and a writer callback sends them. So a
worker that is busy, stopped or dead never holds up the loop, and the two ends cannot block each other.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from asyncloader.messages.frames import MOST_PARTS, BadFrame, Buffer, FrameBuffer, frame
from asyncloader.worker.guarded_loop import GuardedLoop

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
        self._held: list[Buffer] = []
        self._unsent: deque[memoryview] = deque()
        self._writing = False
        self._open = True

    def open(self) -> None:
        """Hear of what comes. From now on nobody but `close` may close the socket."""
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

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
            sent = self._sock.sendmsg(whole[:MOST_PARTS])
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
            # A copy of what can change: the caller may change or release its memory.
            self._unsent.append(memoryview(part if type(part) is bytes else bytes(part))[sent:])
            sent = 0
        if self._unsent and not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        try:
            while self._unsent:
                parts = [self._unsent[i] for i in range(min(len(self._unsent), MOST_PARTS))]
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
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._unsent.clear()
        self._held.clear()
        self._sock.close()
        self._on_frames, self._on_closed = _ignore, _ignore  # no cycle with the owner is left


def _ignore(*args: object) -> None:
    """Take a call that nobody wants any more."""
