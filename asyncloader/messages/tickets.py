"""Tickets on their way to workers: a number each, and keys in a pickle of their own, which may not come out."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

from asyncloader.messages.frames import Buffer
from asyncloader.transport.codec import bytes_of
from asyncloader.transport.tensors import Reducers

PickledTicket: TypeAlias = "tuple[int, Sequence[Buffer]]"
"""A ticket on its way: its number, and its keys, in parts."""

# Tensors and arrays travel as in batches, but within the pickle: torch's own way of pickling them copies all of their
# storage, several times.
_reducers = Reducers(lambda _, array: bytearray(bytes_of(array)))
_reducers.seen = deque(maxlen=0)  # those that overlap in memory travel one by one


class _Parts(list[Buffer]):
    """A pickle in parts. Bytes from 64 KiB on are the objects that were pickled, and not copies."""

    def write(self, part: Buffer) -> None:
        """Add a part. Memory of an object that is not told, as that of a long text, is copied: it may be freed."""
        self.append(bytes(part) if type(part) is memoryview else part)


def pickle_keys(keys: Any) -> list[Buffer]:
    """Pickle the keys of a ticket, for a message that is sent before they may change."""
    if type(keys) is list and keys and type(keys[0]) is int:  # as of most samplers: the table has nothing for these
        return [pickle.dumps(keys, 5)]
    pickler = pickle.Pickler(parts := _Parts(), 5)
    pickler.dispatch_table = _reducers
    pickler.dump(keys)
    return parts


def pickle_tickets(
    tickets: Iterable[tuple[int, Any]], dumps: Callable[[Any], Sequence[Buffer]] = pickle_keys
) -> tuple[list[PickledTicket], list[tuple[int, Exception]]]:
    """Pickle the keys of each ticket; return what can be sent, and why the others cannot."""
    pickled, refused = [], []
    for ticket, keys in tickets:
        try:
            pickled.append((ticket, dumps(keys)))
        except Exception as error:
            # Its frames lead to their callers, which refer to it: whoever it is raised in would stay in a cycle.
            refused.append((ticket, error.with_traceback(None)))
    return pickled, refused


def pack_tickets(tickets: list[PickledTicket], returned: Sequence[int] = ()) -> list[Buffer]:
    """Return the body of TICKETS, in parts where copying them would take long.

    Args:
        tickets: The tickets.
        returned: Offsets of slabs that the worker may write to again.
    """
    numbers, keys = list(map(itemgetter(0), tickets)), list(map(itemgetter(1), tickets))
    parts = list(chain.from_iterable(keys))
    is_small = len(parts) == len(keys)
    sizes = list(map(len, parts)) if is_small else [sum(map(len, each)) for each in keys]
    parts.insert(0, pickle.dumps((returned, numbers, sizes), 5))
    return [b"".join(parts)] if is_small else parts


def unpack_tickets(body: Buffer) -> tuple[Sequence[int], list[tuple[int, memoryview]]]:
    """Return the slabs, and the tickets with their pickled keys, of TICKETS."""
    returned, numbers, sizes = pickle.loads(body)  # the rest of the body are the keys, up to its end
    view, tickets = memoryview(body), []
    at = len(view) - sum(sizes)
    for ticket, nbytes in zip(numbers, sizes, strict=True):
        tickets.append((ticket, view[at : at + nbytes]))
        at += nbytes
    return returned, tickets
