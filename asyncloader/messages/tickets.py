"""Tickets on their way to workers: keys pickled, in the message or, if they are large, in shared memory.

keys ── TicketPickler: Parts, large buffers not copied ──> in a slab: the message says where  ──> keys_of
└─> joined, in the message             ──^
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from asyncloader.messages.failure import with_notes
from asyncloader.messages.frames import Buffer
from asyncloader.messages.indices import Indices
from asyncloader.seeding.sample_context import Placed
from asyncloader.transport.codec import bytes_of
from asyncloader.transport.tensors import Array, Reducers, Reduction

PickledKeys: TypeAlias = "bytes | tuple[int, int]"
"""The keys of a ticket in a pickle of their own, which may not come out; or offset and length of it in the arena."""

PickledTicket: TypeAlias = tuple[int, PickledKeys]
"""A ticket on its way: its number, and its keys."""

Place: TypeAlias = "Callable[[int, Sequence[Buffer]], PickledKeys]"
"""Finds a place for the parts of a pickle: those of the ticket of this number."""

_PACKED = frozenset({Indices, Placed})


def _travelling(keys: Any) -> Any:
    if type(keys) is Placed:
        return Placed(keys.keys.travelling(), keys.first) if type(keys.keys) is Indices else keys
    return keys.travelling()


class Parts(list[Buffer]):
    """A pickle in parts. Bytes from 64 KiB on are the objects that were pickled, and not copies."""

    def write(self, part: Any) -> None:
        """Add a part. Memory of an object that is not told, as that of a long text, is copied: it may be freed."""
        self.append(bytes(part) if type(part) is memoryview else part)


class TicketPickler:
    """Pickles keys. In one thread.

    Tensors and arrays travel as in batches: torch's own way of pickling them copies all of their storage, several
    times.
    """

    def __init__(self) -> None:
        self._reducers = _Reducers(_in_band)

    def __call__(self, keys: Any) -> Parts:
        """Return the pickle, which is to be used before the keys may change."""
        try:
            parts = self._dump(keys)
            return self._dump(keys) if self._reducers.find_shared() else parts
        finally:
            self._reducers.forget()

    def _dump(self, keys: Any) -> Parts:
        pickler = pickle.Pickler(parts := Parts(), 5)
        pickler.dispatch_table = self._reducers
        pickler.dump(keys)
        return parts


class _Reducers(Reducers):
    def _reduce_special(self, tensor: Any) -> Reduction:
        reduction: Reduction = tensor.__reduce_ex__(5)  # keys may be on another device
        return reduction


def _in_band(address: int, array: Array) -> Any:
    """Return what is pickled as a bytearray, whether or not the array may be written to."""
    contents = bytes_of(array)
    return pickle.PickleBuffer(contents.data) if array.flags.writeable else bytearray(contents)


def inline(ticket: int, parts: Sequence[Buffer]) -> bytes:
    """Place a pickle in the message."""
    return b"".join(parts)


def pickle_tickets(
    tickets: Iterable[tuple[int, Any]], dumps: Callable[[Any], Sequence[Buffer]], place: Place = inline
) -> tuple[list[PickledTicket], list[tuple[int, Exception]]]:
    """Pickle the keys of each ticket, and place them; return what can be sent, and why the others cannot."""
    pickled, refused = [], []
    for ticket, keys in tickets:
        try:
            pickled.append((ticket, place(ticket, dumps(_travelling(keys) if type(keys) in _PACKED else keys))))
        except Exception as error:
            refused.append((ticket, _without_frames(error)))
    return pickled, refused


def _without_frames(error: Exception) -> Exception:
    """Return an exception that is raised later, with the frames of the user's classes as a note.

    Frames lead to their callers, and these refer to the exception: whoever it is raised in would stay in a cycle.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    notes = [f"It was raised in:\n{''.join(traceback.format_list(frames))}".rstrip()] if frames else []
    return with_notes(error.with_traceback(None), notes)


def pack_tickets(tickets: list[PickledTicket], returned: Sequence[int] = ()) -> bytes:
    """Return the body of TICKETS.

    Args:
        tickets: The tickets.
        returned: Offsets of slabs that the worker may write to again.
    """
    return pickle.dumps((returned, tickets), 5)


def unpack_tickets(body: bytes | memoryview) -> tuple[Sequence[int], list[PickledTicket]]:
    """Return the slabs and the tickets of TICKETS."""
    returned, tickets = pickle.loads(body)
    return returned, tickets
