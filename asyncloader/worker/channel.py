"""The worker's end of its channel to the parent."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from asyncloader.messages.frames import Buffer, FrameBuffer, frame

_JOINED_BYTES = 256 << 10
"""A frame up to this size is one call. The parts of a larger one are large, so that to copy them would take longer."""


SILENCE_S = 10.0
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds


class WorkerChannel:
    """The worker's end: blocking, in the thread that serves."""

    def __init__(self, sock: socket.socket) -> None:
        # The kernel ends a blocking read after so long: to wait by a call of its own would be one more for each read.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(round(1e6 * SILENCE_S), 1_000_000))
        )
        self._sock = sock
        self._incoming = FrameBuffer()
        self._frames: Iterator[tuple[int, memoryview]] = iter(())  # that came with the last read

    def receive(self, *, wait: bool) -> tuple[int, Buffer] | None:
        """Return the next frame; None if there is none, or none within ten seconds where ``wait`` is true.

        Raises:
            EOFError: if the parent is gone.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        while (found := next(self._frames, None)) is None:
            try:
                count = self._incoming.read(lambda view: self._sock.recv_into(view, 0, flags))
            except BlockingIOError:
                return None
            if count == 0:
                raise EOFError("the parent closed the channel")
            self._frames = iter(self._incoming.frames())
        kind, body = found
        return kind, body if body.readonly else bytes(body)

    def fileno(self) -> int:
        """Return the descriptor, for a loop to watch."""
        return self._sock.fileno()

    def send(self, kind: int, *parts: Buffer) -> None:
        """Send a frame whole."""
        whole = frame(kind, parts)
        for part in [b"".join(whole)] if sum(map(len, whole)) <= _JOINED_BYTES else whole:
            self._sock.sendall(part)

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
