"""Frames between trainer and agent: those of a worker's channel, followed by large buffers as they are.

    header │ number of a worker's life (u32), number of buffers (u32), their sizes │ body │ buffer │ buffer ...

    header: as :mod:`asyncloader.messages.frames` has it
    body:   as the worker's own channel has it (see :mod:`asyncloader.messages.messages`); or one of `Word`

The sizes come first, so that buffers are received where they are to stay. The body of a batch is its record and its
pickle; the pickle refers to the buffers. An impossible frame ends the connection. Nothing in here does I/O.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncloader.messages import frames
from asyncloader.messages.frames import BadFrame, Buffer, FrameBuffer
from asyncloader.messages.messages import KINDS

_HEAD = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_MOST_BUFFERS = 1 << 20
_MOST_BYTES = 1 << 40


SECONDS = struct.Struct("<d")
NUMBER = struct.Struct("<Q")
"""Bodies of frames that are a time, or a number."""


class Word(enum.IntEnum):
    """Kinds of frames beside those of a worker's channel."""

    # trainer -> agent
    WELCOME = 64  # (WorkerSpec without what is the user's, EpochSpec), pickled: the agent may begin
    ADD = 65  # (worker id, num_workers, where it begins), pickled: start a worker; the life in the head is its own
    DISMISS = 66  # seconds of grace (f64): let it finish
    DISCARD = 67  # kill it
    PING = 68  # the trainer's clock (f64)
    STACK = 69  # sequence number (u64): tell where it is; and the answer: text
    END = 70  # seconds of grace (f64): end everything, and go
    # Besides, with a life: TICKETS without loans; and EPOCH, for all.
    # agent -> trainer
    HELLO = 80  # what is there, as JSON
    PONG = 81  # what PING said, and the agent's clock (f64, f64)
    DIED = 82  # a `Death`, pickled
    LEAVING = 83  # it wants no more tickets
    BYE = 84  # all its workers have ended
    FAILED = 85  # a traceback as text: something of the agent's own has failed
    # Besides, with a life: READY with a pid (u64), and what has become of tickets.


class Death(NamedTuple):
    """How a worker ended, as its agent tells it.

    Attributes:
        exitcode: Negative for a signal; None if nobody knows, or if it could not even be started.
        output: Its last words.
        was_set_up: Whether it came as far as the user's code.
    """

    exitcode: int | None
    output: bytes
    was_set_up: bool


class Frame(NamedTuple):
    """A frame as it has come. The body is valid until the reader is given more, a buffer as long as it is used."""

    kind: int
    life: int
    body: memoryview
    buffers: list[memoryview]


def frame(kind: int, life: int = 0, parts: Sequence[Buffer] = (), buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return what to send, in order: one piece for all that is small, then the buffers themselves."""
    sizes = [_SIZE.pack(len(buffer)) for buffer in buffers]
    return [b"".join(frames.frame(kind, [_HEAD.pack(life, len(buffers)), *sizes, *parts])), *buffers]


def decode(buffers: list[memoryview], payload: memoryview) -> tuple[Any, int]:
    """Make a batch of what has come; a large pickle is the last of the buffers."""
    nbytes = len(payload) + sum(map(len, buffers))
    stream = payload if len(payload) else buffers.pop()
    return pickle.loads(stream, buffers=buffers), nbytes


class FrameReader:
    """Bytes as they come in, cut into frames. Large buffers are read straight into their own memory.

    Args:
        allocate: Gives memory of a size for a buffer. An error of `allocate` ends the connection.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._frames = FrameBuffer(KINDS | {*Word})
        self._amid: Frame | None = None  # whose buffers are not all here
        self._sizes: deque[int] = deque()  # of its buffers that are not begun
        self._filled = 0  # bytes of its newest buffer

    @property
    def is_amid(self) -> bool:
        """Whether a large frame has begun, and not all of it is here."""
        return self._amid is not None or self._frames.is_amid

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go."""
        return self._frames.get_buffer() if self._amid is None else self._amid.buffers[-1][self._filled :]

    def received(self, count: int) -> Iterator[Frame]:
        """So many bytes have come to where the last `get_buffer` said: yield the frames that are whole now.

        Raises:
            BadFrame: they are no frames of ours.
            MemoryError: there is no memory for what comes.
        """
        if (amid := self._amid) is None:
            self._frames.received(count)
        else:
            self._filled += count
            if not self._fill(amid):
                return
            yield amid
        for kind, body in self._frames.frames():
            begun = self._begin(kind, body)
            if not self._fill(begun):
                return
            yield begun

    def _begin(self, kind: int, body: memoryview) -> Frame:
        life, count = _HEAD.unpack_from(body) if len(body) >= _HEAD.size else (0, _MOST_BUFFERS + 1)
        rest = _HEAD.size + count * _SIZE.size
        if count > _MOST_BUFFERS or len(body) < rest:
            raise BadFrame(f"a frame of kind {kind} with {count} buffers and {len(body)} bytes")
        self._sizes.extend(size for (size,) in _SIZE.iter_unpack(body[_HEAD.size : rest]))
        body = body[rest:]
        # The memory of the body is used for other things while buffers come.
        return Frame(kind, life, memoryview(bytes(body)) if count else body, [])

    def _fill(self, begun: Frame) -> bool:
        """Receive what there is of a frame's buffers; return whether it is whole."""
        while True:
            if begun.buffers:
                rest = begun.buffers[-1][self._filled :]
                self._filled += self._frames.take(rest)
                if self._filled < len(begun.buffers[-1]):
                    self._amid = begun
                    return False
            if not self._sizes:
                self._amid = None
                return True
            if (size := self._sizes.popleft()) > _MOST_BYTES:
                raise BadFrame(f"a buffer of {size} bytes")
            begun.buffers.append(self._allocate(size))
            self._filled = 0
