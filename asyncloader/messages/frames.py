"""Messages as frames of bytes: what both ends of a channel do with them.

A frame that cannot be (of unknown kind, or longer than
:data:`~asyncloader.messages.messages.MAX_FRAME_BYTES`) ends the channel with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from asyncloader.messages.messages import HEADER, KINDS, MAX_FRAME_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

MOST_PARTS = 512
"""Buffers of one sendmsg; the kernel takes 1024."""

_READ_BYTES = 256 << 10
_HEADER_BYTES, _unpack_header = HEADER.size, HEADER.unpack_from


class BadFrame(Exception):
    """The bytes that were read are no frame of ours."""


def frame(kind: int, parts: Sequence[Buffer]) -> list[Buffer]:
    """Put the header before the parts of a body."""
    return [HEADER.pack(sum(map(len, parts)), kind), *parts]


class FrameBuffer:
    """Bytes as they come in, cut into frames.

    Small frames are cut from one buffer that is used again: their bodies are valid until the next `read`. A frame that
    does not fit gets memory of its own, which grows with what has come: a length that was never sent costs nothing. Its
    body is read-only.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._large: bytearray | None = None
        self._large_kind = 0
        self._large_bytes = 0

    def read(self, receive: Callable[[memoryview], int]) -> int:
        """Receive once, into the right place; return how many bytes came."""
        view = self._view
        if self._large is not None:
            count = receive(view[: self._large_bytes - len(self._large)])
            self._large += view[:count]
            return count
        if self._start:
            rest = bytes(view[self._start : self._end])
            self._start, self._end = 0, len(rest)
            view[: self._end] = rest
        count = receive(view[self._end :])
        self._end += count
        return count

    def frames(self) -> Iterable[tuple[int, memoryview]]:
        """Yield the complete frames that are there: kind and body."""
        if self._large is not None:  # then the buffer is empty
            if len(self._large) == self._large_bytes:
                body, self._large = memoryview(self._large).toreadonly(), None
                yield self._large_kind, body
            return
        buffer, view, start, received = self._buffer, self._view, self._start, self._end
        while (begin := start + _HEADER_BYTES) <= received:  # each batch comes this way
            length, kind = _unpack_header(buffer, start)
            end = begin + length
            if end > received or kind not in KINDS:
                if length > MAX_FRAME_BYTES or kind not in KINDS:
                    raise BadFrame(f"a frame of kind {kind} and {length} bytes")
                if length > _READ_BYTES - _HEADER_BYTES:
                    self._large, self._large_kind, self._large_bytes = bytearray(view[begin:received]), kind, length
                    self._start = self._end = 0
                return
            self._start = start = end
            yield kind, view[begin:end]
