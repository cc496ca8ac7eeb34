"""Tickets on their way to workers: a number each, and keys in a pickle of their own, which may not come out."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch

from asyncloader.messages.frames import Buffer
from asyncloader.transport.codec import bytes_of
from asyncloader.transport.tensors import Reducers

# Tensors and arrays travel as in batches, but within the pickle: torch's own way of pickling them copies all of their
# storage, several times.
_reducers = Reducers(lambda _, array: bytearray(bytes_of(array)))
_reducers.seen = deque(maxlen=0)  # those that overlap in memory travel one by one


class _Pickle(list[Buffer]):
    """A pickle in parts. Bytes from 64 KiB on are the objects that were pickled, and not copies."""

    def write(self, part: Buffer) -> None:
        """Add a part."""
        self.append(part)


def as_read(keys: Any, *, in_pickles: bool) -> Any:
    """Return keys as they are now: some samplers fill one list or array anew for each batch, or lists in it.

    Args:
        keys: The keys of a batch.
        in_pickles: Only worker processes are to have them. Ints are pickled at once, and freed, while the processor has
            them in its cache: later, and in another thread, both take twice as long.
    """
    if type(keys) is list:
        kind = type(keys[0]) if keys else None
        if kind is int and in_pickles:
            try:
                return _Pickle([pickle.dumps(keys, 5)])
            except Exception:  # it is told when they are sent
                pass
        if kind in (list, dict):
            return [each.copy() if type(each) in (list, dict) else each for each in keys]
        return keys[:]
    if isinstance(keys, (list, np.ndarray)):
        return copy(keys)
    return keys.clone() if isinstance(keys, torch.Tensor) else keys


def unpickled(keys: Any) -> Any:
    """Return keys as they were read. Of what does not come out of its pickle, a worker tells."""
    try:
        return pickle.loads(keys[0]) if type(keys) is _Pickle else keys
    except Exception:
        return keys


def pickle_keys(keys: Any) -> Sequence[Buffer]:
    """Pickle the keys of a ticket, for a message that is sent before they may change; return the parts."""
    if type(keys) is _Pickle:
        return keys
    pickler = pickle.Pickler(parts := _Pickle(), 5)
    pickler.dispatch_table = _reducers
    pickler.dump(keys)
    return parts


def pickle_tickets(
    tickets: Iterable[tuple[int, Any]], dumps: Callable[[Any], Sequence[Buffer]] = pickle_keys
) -> tuple[list[tuple[int, list[Buffer]]], list[tuple[int, Exception]]]:
    """Pickle the keys of each ticket; return what can be sent, and why the others cannot."""
    pickled, refused = [], []
    for ticket, keys in tickets:
        try:
            pickled.append((ticket, [*dumps(keys)]))
        except Exception as error:
            # Its frames lead to their callers, which refer to it: whoever it is raised in would stay in a cycle.
            refused.append((ticket, error.with_traceback(None)))
    return pickled, refused


def pack_tickets(tickets: Sequence[tuple[int, list[Buffer]]], returned: Sequence[int] = ()) -> Sequence[Buffer]:
    """Return the body of TICKETS, in parts where copying them would take long: the pickle of both.

    Args:
        tickets: The tickets, with pickled keys.
        returned: Offsets of slabs that the worker may write to again.
    """
    pickle.Pickler(parts := _Pickle(), 5).dump((returned, tickets))
    return parts
