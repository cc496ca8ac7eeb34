"""The outcome of a ticket, and the one frame in which it crosses the channel.

    Batch      its data
    Failure    what was raised in place of them
    Refused    its keys did not come out of their pickle
    LeftOut    none of its samples was good, and so there is no batch
    Exhausted  the iterable dataset ended before it

    body of a frame:  record, length of the extras │ extras │ payload
                                                       │        └ of a batch, by the codec; a pickled error
                                                       └ pickled: bad samples, snapshot; mostly nothing

Each has the `Record` of its ticket; the bad samples that a batch was made without; and the state of the dataset after
it, where one was taken (a `Frozen`, or `Untold`: why it could not be taken).
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

NO_RECORD = Record(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Of an outcome that no worker has come to."""


class Batch(NamedTuple):
    """A batch. ``nbytes`` is less than 0 if its size is unknown."""

    record: Record
    data: Any
    nbytes: int = 0
    bad: Sequence[BadSample] = ()
    snapshot: Any = None


class Failure(NamedTuple):
    """The exception in place of a batch: on its way a `RemoteError` or a `LocalError`, then the exception itself."""

    record: Record
    error: Any
    bad: Sequence[BadSample] = ()
    snapshot: Any = None


class Refused(NamedTuple):
    """The keys of the ticket did not unpickle, as a `RemoteError` says: nothing was made."""

    record: Record
    error: Any
    bad: Sequence[BadSample] = ()
    snapshot: Any = None


class LeftOut(NamedTuple):
    """All samples of the batch were left out; nothing is raised in its place."""

    record: Record
    bad: Sequence[BadSample] = ()
    snapshot: Any = None


class Exhausted(NamedTuple):
    """The iterable dataset ended before this ticket. ``snapshot`` is the state that the next run begins with."""

    record: Record
    bad: Sequence[BadSample] = ()
    snapshot: Any = None


Outcome: TypeAlias = Batch | Failure | Refused | LeftOut | Exhausted

_KINDS = {
    Batch: Kind.BATCH,
    Failure: Kind.FAILURE,
    Refused: Kind.REFUSED,
    LeftOut: Kind.LEFT_OUT,
    Exhausted: Kind.EXHAUSTED,
}


OUTCOMES = frozenset(int(kind) for kind in _KINDS.values())
"""Kinds of frames that are outcomes."""

_EMPTY: dict[int, type[LeftOut | Exhausted]] = {Kind.LEFT_OUT: LeftOut, Kind.EXHAUSTED: Exhausted}

_BATCH = int(Kind.BATCH)  # to be compared with a million times: members of an enum take five times as long


def pack(outcome: Outcome, payload: Sequence[Buffer] = ()) -> tuple[int, list[Buffer]]:
    """Return the kind and the body of a frame.

    Args:
        outcome: The outcome.
        payload: The encoded data of a `Batch`.
    """
    extras = b""
    if outcome.bad or outcome.snapshot is not None:
        extras = _pickled(list(outcome.bad), outcome.snapshot)
    parts: list[Buffer] = [_HEAD.pack(*outcome.record, len(extras)), extras, *payload]
    if type(outcome) is Failure or type(outcome) is Refused:
        parts.append(pickle.dumps(outcome.error))
    return _KINDS[type(outcome)], parts


def _pickled(bad: list[BadSample], snapshot: Any) -> bytes:
    try:
        return pickle.dumps((bad, snapshot))
    except Exception:  # keys that unpickle, or they would not be here, but do not pickle
        return pickle.dumps(([sample._replace(key=repr(sample.key)) for sample in bad], snapshot))


Decode: TypeAlias = Callable[[memoryview], tuple[Any, int]]


def unpack(kind: int, body: memoryview, decode: Decode) -> Outcome:
    """Read a frame. An exception that the user's classes raise as they are rebuilt makes a `Failure`.

    Args:
        kind: The kind of the frame.
        body: The body of the frame.
        decode: Makes the data of a batch, and their size, of a payload.

    Raises:
        BadFrame: these bytes are no outcome.
    """
    if len(body) < _HEAD.size:
        raise BadFrame(f"a frame of kind {kind} and {len(body)} bytes, which is too short")
    fields = _HEAD.unpack_from(body)
    record, extras_bytes = Record._make(fields[:-1]), fields[-1]
    begin = _HEAD.size + extras_bytes
    if begin > len(body):
        raise BadFrame(f"a frame of kind {kind} and {len(body)} bytes, {extras_bytes} of them extras")
    bad: Sequence[BadSample] = ()
    data, nbytes, snapshot, unreadable = None, 0, None, None
    try:
        if kind == _BATCH:  # whatever the extras are: the slabs that it names have to be known
            data, nbytes = decode(body[begin:])
        elif kind in (Kind.FAILURE, Kind.REFUSED):
            data = pickle.loads(body[begin:])
    except BaseException as error:
        unreadable = _readable(error)
    if extras_bytes:
        try:
            bad, snapshot = pickle.loads(body[_HEAD.size : begin])
        except BaseException as error:
            unreadable = _readable(error)
    if unreadable is not None:
        return Failure(record, unreadable, bad, snapshot)
    if kind == _BATCH:
        return Batch(record, data, nbytes, bad, snapshot)
    if kind == Kind.FAILURE:
        return Failure(record, data, bad, snapshot)
    if kind == Kind.REFUSED:
        return Refused(record, data)
    return _EMPTY[kind](record, bad, snapshot)


def split(body: memoryview) -> tuple[memoryview, memoryview]:
    """Return what comes before the payload of a frame, and the payload: for who passes it on.

    Raises:
        BadFrame: these bytes are no outcome.
    """
    begin = _HEAD.size + (_HEAD.unpack_from(body)[-1] if len(body) >= _HEAD.size else 0)
    if begin > len(body):
        raise BadFrame(f"an outcome of {len(body)} bytes, which is too short")
    return body[:begin], body[begin:]


def _readable(error: BaseException) -> Exception:
    """Return what stands for a ticket that could not be read: it must not end the loop."""
    if isinstance(error, Exception):
        return error
    other = RuntimeError(f"What a worker sent raised {error!r} while it was unpickled in the main process.")
    other.__cause__ = error
    return other
