"""The outcome of a ticket, and the one frame in which it crosses the channel.

    BATCH      its data
    FAILURE    what was raised in place of them
    REFUSED    its keys did not come out of their pickle: nothing was made
    LEFT_OUT   none of its samples was good, and so there is no batch; nothing is raised in its place
    EXHAUSTED  the iterable dataset ended before it

    body of a frame:  record, length of the extras │ extras │ payload
                                                       │        └ of a batch, by the codec; a pickled error
                                                       └ pickled: bad samples, snapshot; mostly nothing

`pack` writes the frame in the worker, `unpack` reads it in the trainer.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from asyncloader.messages.failure import BadSample
from asyncloader.messages.frames import BadFrame, Buffer
from asyncloader.messages.messages import Kind
from asyncloader.observe.record import Record

_HEAD = struct.Struct("<QQQddddddQdQ")  # a record, and how many bytes of extras follow
_HEAD_BYTES, _unpack_head = _HEAD.size, _HEAD.unpack_from
_BATCH, _ERRORS = Kind.BATCH, (Kind.FAILURE, Kind.REFUSED)
_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long

NO_RECORD = Record(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Of an outcome that no worker has come to."""


class Outcome(NamedTuple):
    """The result of a ticket.

    Attributes:
        kind: The kind of result, and of its frame.
        record: Times of the ticket.
        data: The data of a batch.
        error: In place of a batch: on its way a `CapturedError`, then the exception itself.
        bad: The samples that raised, and that the batch was made without.
        snapshot: The state of the dataset after the ticket, where one was taken: a `Frozen`, or `Untold`, why it could
            not be taken. At the end of the data the state that the next run begins with.
        nbytes: The size of the data; less than 0 if that is unknown.
    """

    kind: int
    record: Record = NO_RECORD
    data: Any = None
    error: Any = None
    bad: Sequence[BadSample] = ()
    snapshot: Any = None
    nbytes: int = 0


OUTCOMES = frozenset({Kind.BATCH, Kind.FAILURE, Kind.REFUSED, Kind.LEFT_OUT, Kind.EXHAUSTED})
"""Kinds of frames that are outcomes."""


def pack(outcome: Outcome, payload: Sequence[Buffer] = (), encode_s: float = 0.0) -> tuple[int, list[Buffer]]:
    """Return the kind and the body of a frame.

    Args:
        outcome: The outcome.
        payload: The encoded data of a batch.
        encode_s: How long encoding has taken.
    """
    extras = b""
    if outcome.bad or outcome.snapshot is not None:
        extras = _pickled(list(outcome.bad), outcome.snapshot)
    parts: list[Buffer] = [_HEAD.pack(*outcome.record[:-1], encode_s, len(extras)), extras, *payload]
    if outcome.error is not None:
        parts.append(pickle.dumps(outcome.error))
    return outcome.kind, parts


def _pickled(bad: list[BadSample], snapshot: Any) -> bytes:
    try:
        return pickle.dumps((bad, snapshot))
    except Exception:  # keys that unpickle, or they would not be here, but do not pickle
        return pickle.dumps(([sample._replace(key=repr(sample.key)) for sample in bad], snapshot))


Decode: TypeAlias = Callable[[memoryview], tuple[Any, int]]


def unpack(kind: int, body: memoryview, decode: Decode) -> Outcome:
    """Read a frame. An exception that the user's classes raise as they are rebuilt makes a failure.

    Args:
        kind: The kind of the frame.
        body: The body of the frame.
        decode: Makes the data of a batch, and their size, of a payload.

    Raises:
        BadFrame: these bytes are no outcome.
    """
    try:
        *fields, extras_bytes = _unpack_head(body)
    except struct.error as raised:
        raise BadFrame(f"a frame of kind {kind} and {len(body)} bytes, which is too short") from raised
    begin = _HEAD_BYTES + extras_bytes
    data, error, bad, snapshot, nbytes = None, None, (), None, 0
    try:
        if kind == _BATCH:  # whatever the extras are: the slabs that it names have to be known
            data, nbytes = decode(body[begin:])
        elif kind in _ERRORS:
            error = pickle.loads(body[begin:])
    except BaseException as raised:
        kind, error = Kind.FAILURE, _readable(raised)
    if extras_bytes:
        if begin > len(body):
            raise BadFrame(f"a frame of kind {kind} and {len(body)} bytes, {extras_bytes} of them extras")
        try:
            bad, snapshot = pickle.loads(body[_HEAD_BYTES:begin])
        except BaseException as raised:
            kind, data, error, nbytes = Kind.FAILURE, None, _readable(raised), 0
    return _new(Outcome, (kind, _new(Record, fields), data, error, bad, snapshot, nbytes))


def _readable(error: BaseException) -> Exception:
    """Return what stands for a ticket that could not be read: it must not end the loop."""
    if isinstance(error, Exception):
        return error
    other = RuntimeError(f"What a worker sent raised {error!r} while it was unpickled in the main process.")
    other.__cause__ = error
    return other
