"""Frames between trainer and agent: lengths first, so that large buffers are received where they are to stay.

    head │ sizes of the buffers │ body │ buffer │ buffer ...

    head:  kind (u8), number of a worker's life (u32), how many buffers (u32), bytes of the body (u64)
    body:  as the worker's own channel has it (see :mod:`asyncloader.messages.messages`); or one of `Word`

Of a batch the body is its record and its pickle, the buffers are what the pickle refers to. A frame that cannot be ends
the connection. Nothing in here does I/O, and nothing is read before both sides have proven themselves.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncloader.messages.frames import BadFrame, Buffer

_HEAD = struct.Struct("<BxxxIIxxxxQ")
_SIZE = struct.Struct("<Q")
_STAGING_BYTES = 256 << 10
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
    """A frame as it has come. The body is valid until the reader is given more; buffers are who refers to them's."""

    kind: int
    life: int
    body: memoryview
    buffers: list[memoryview]


def frame(kind: int, life: int = 0, parts: Sequence[Buffer] = (), buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return what to send, in order: one piece for all that is small, then the buffers themselves."""
    head = _HEAD.pack(kind, life, len(buffers), sum(map(len, parts)))
    sizes = [_SIZE.pack(len(buffer)) for buffer in buffers]
    return [b"".join((head, *sizes, *parts)), *buffers]


def decode(buffers: list[memoryview], payload: memoryview) -> tuple[Any, int]:
    """Make a batch of what has come; a large pickle is the last of the buffers."""
    nbytes = len(payload) + sum(map(len, buffers))
    stream = payload if len(payload) else buffers.pop()
    return pickle.loads(stream, buffers=buffers), nbytes


class _Partial:
    """A frame of which something large is on its way."""

    def __init__(self, kind: int, life: int, num_buffers: int, rest: memoryview) -> None:
        self.kind = kind
        self.life = life
        self.rest = rest  # sizes and body
        self.num_buffers = num_buffers
        self.buffers: list[memoryview] = []

    def next_size(self) -> int | None:
        """Return the size of the buffer that comes next; None if all have come."""
        at = len(self.buffers)
        return None if at == self.num_buffers else int(_SIZE.unpack_from(self.rest, at * _SIZE.size)[0])


class FrameReader:
    """Bytes as they come in, cut into frames.

    What is small is read into one buffer, which is used again; what is not is read straight into its own memory.

    Args:
        allocate: Gives memory of a size for a buffer. What it raises ends the connection.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._start = self._end = 0
        self._partial: _Partial | None = None
        self._target: memoryview | None = None
        self._filled = 0

    @property
    def is_amid(self) -> bool:
        """Whether a frame with something large has begun, and not all of it is here."""
        return self._partial is not None

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go."""
        if self._target is not None:
            return self._target[self._filled :]
        rest = self._end - self._start
        if rest and self._start:
            self._staging[:rest] = bytes(self._staging[self._start : self._end])
        self._start, self._end = 0, rest
        return self._staging[rest:]

    def received(self, count: int) -> Iterator[Frame]:
        """So many bytes have come to where the last `get_buffer` said: yield the frames that are whole now.

        Raises:
            BadFrame: they are no frames of ours.
            MemoryError: there is no memory for what comes.
        """
        if self._target is not None:
            self._filled += count
        else:
            self._end += count
        while (partial := self._partial or self._begin()) is not None:
            self._partial = partial
            if not self._is_filled(partial):
                return
            self._partial = None
            body = partial.rest[partial.num_buffers * _SIZE.size :]
            yield Frame(partial.kind, partial.life, body, partial.buffers)

    def _begin(self) -> _Partial | None:
        """Look at the next frame; None if too little of it is here."""
        available = self._end - self._start
        if available < _HEAD.size:
            return None
        kind, life, num_buffers, body_bytes = _HEAD.unpack_from(self._staging, self._start)
        if num_buffers > _MOST_BUFFERS or body_bytes > _MOST_BYTES:
            raise BadFrame(f"a frame of kind {kind} with {num_buffers} buffers and {body_bytes} bytes")
        rest_bytes = num_buffers * _SIZE.size + body_bytes
        at = self._start + _HEAD.size
        if _HEAD.size + rest_bytes > _STAGING_BYTES:
            self._start = at
            partial = _Partial(kind, life, num_buffers, memoryview(bytearray(rest_bytes)))
            self._aim(partial.rest)
            return partial
        if available < _HEAD.size + rest_bytes:
            return None
        self._start = at + rest_bytes
        rest = self._staging[at : self._start]
        if num_buffers:  # it is looked at again when the buffers have come, and this memory is used for other things
            rest = memoryview(bytes(rest))
        return _Partial(kind, life, num_buffers, rest)

    def _is_filled(self, partial: _Partial) -> bool:
        """Receive what there is of a frame; whether it is whole."""
        while True:
            if self._target is not None:
                self._take()
                if self._filled < len(self._target):
                    return False
                self._target = None
            if (size := partial.next_size()) is None:
                return True
            if size > _MOST_BYTES:
                raise BadFrame(f"a buffer of {size} bytes")
            buffer = self._allocate(size)
            partial.buffers.append(buffer)
            self._aim(buffer)

    def _aim(self, target: memoryview) -> None:
        self._target, self._filled = target, 0

    def _take(self) -> None:
        """Copy to the target what has been read beyond what came before it."""
        assert self._target is not None
        count = min(len(self._target) - self._filled, self._end - self._start)
        if count:
            self._target[self._filled : self._filled + count] = self._staging[self._start : self._start + count]
            self._filled += count
            self._start += count
