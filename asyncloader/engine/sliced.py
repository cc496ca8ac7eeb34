"""A batch in slices: what has become of each, and what a worker and a consumer are told of it.

    a ticket ── part ──> the number of a whole batch, or Part ──> Sliced: slices by where they begin, room for rows

Decided is nothing here: see :mod:`asyncloader.engine.split`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from asyncloader.engine.actions import VOID, Ticket
from asyncloader.engine.progress import Progress
from asyncloader.transport.rows import RowsOf
from asyncloader.workers.protocol.failure import BadSample
from asyncloader.workers.protocol.messages import Slice, Together
from asyncloader.workers.protocol.outcome import Samples, Written

TOGETHER = -1
"""Where a slice would begin: the ticket that stands for all of them together."""


class Sliced:
    """A batch in slices.

    Attributes:
        number: In the plan.
        keys: Of its samples.
        items: By where in the batch a slice begins, what has become of it; VOID if it was given up.
        missing: How many slices are not here.
        last: The ticket that stands for the batch.
        room: What samples are written into, or None.
        find_room: Looks for that, until it is known what samples are like; None after that.
    """

    __slots__ = ("_finishing", "find_room", "items", "keys", "last", "missing", "number", "room")

    def __init__(
        self, number: int, keys: Any, missing: int, last: int, find_room: Callable[[Sliced], None] | None = None
    ) -> None:
        self.number = number
        self.keys = keys
        self.items: dict[int, Any] = {}
        self.missing = missing
        self.last = last
        self.room: Any = None
        self.find_room = find_room
        self._finishing: Any = None

    def __repr__(self) -> str:
        return f"<Sliced {self.number} {len(self.items)}/{len(self.items) + self.missing}>"

    @property
    def slices(self) -> list[Any]:
        """What has become of the slices, in their order in the batch."""
        return [item for _, item in sorted(self.items.items())]

    @property
    def bad(self) -> list[BadSample]:
        """The samples that raised, in their order in the batch."""
        return [sample for item in self.slices for sample in item.outcome.bad]

    @property
    def times(self) -> list[Any]:
        """What was noted of each slice, for the figures."""
        noted = [item.times for item in self.slices if item is not VOID]
        return [times for times in [*noted, self._finishing] if times is not None]

    @property
    def texts(self) -> list[list[Any]]:
        """Those of all samples, by column, where these were written."""
        columns = zip(*(item.outcome.data for item in self.slices), strict=True)
        return [[text for texts in column for text in texts] for column in columns]

    @property
    def parts(self) -> tuple[Any, ...]:
        """The good samples of each slice: as they have come, or where they were written."""
        bounds = pairwise([*sorted(self.items), len(self.keys)])
        return tuple(
            RowsOf(self.room, begin, end, item.outcome.data) if type(item.outcome) is Written else item.outcome.data
            for item, (begin, end) in zip(self.slices, bounds, strict=True)
        )

    @property
    def rest_is_alike(self) -> bool:
        """Whether samples that were not written can be, for they are like those that were."""
        carried = [item.outcome for item in self.items.values() if type(item.outcome) is not Written]
        return len(carried) < len(self.items) and all(each.snapshot == self.room.layout for each in carried)

    def finish(self, item: Any) -> None:
        """Note that a worker has written these."""
        texts, self._finishing = iter(item.outcome.data), item.times
        for begin, one in sorted(self.items.items()):
            if type(one.outcome) is Samples:
                self.items[begin] = one._replace(outcome=Written(one.outcome.record, next(texts)))

    def let_go(self) -> None:
        """Drop what slices have made."""
        self.items.clear()
        self.room = None


class Part(NamedTuple):
    """What of a batch a ticket is: a slice, by where that begins and ends, or all of them together."""

    batch: Sliced
    begin: int
    end: int

    @property
    def is_slice(self) -> bool:
        """Whether it is one of the slices."""
        return self.begin != TOGETHER


def batch_of(ticket: Ticket) -> tuple[int, Any]:
    """Return the number of the batch that a ticket is of, and the keys of that."""
    part = ticket.part
    if part is None:
        return ticket.seq, ticket.keys
    return (part, ticket.keys) if type(part) is int else (part.batch.number, part.batch.keys)


def batches_of(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Return the batches that these tickets are of, by their numbers in the plan and with all their keys."""
    found: dict[int, Ticket] = {}
    for ticket in tickets:
        number, keys = batch_of(ticket)
        found.setdefault(number, Ticket(number, keys, ticket.worker, ticket.tries))
    return list(found.values())


def times_of(ticket: Ticket) -> tuple[int, list[Any]]:
    """Return the number of the batch that a ticket stands for, and what was noted of its slices."""
    part = ticket.part
    return (part, []) if type(part) is int else (part.batch.number, part.batch.times)


def bytes_of(outcome: Samples | Written, ticket: Ticket) -> int:
    """Return how large the samples of a slice are, which wait for the rest of their batch."""
    if type(outcome) is Samples or ticket.part.batch.room is None:
        return outcome.nbytes
    batch = ticket.part.batch
    share: int = batch.room.nbytes * len(ticket.keys) // len(batch.keys)
    return share


def contents(ticket: Ticket, progress: Progress) -> Any:
    """Return what a worker is to know of a ticket: keys, or what is to be done about a slice."""
    part = ticket.part
    number, keys = batch_of(ticket)
    placed = progress.placed(number, keys)
    if type(part) is not Part:
        return placed
    batch = part.batch
    if part.is_slice:
        if batch.find_room is not None:
            batch.find_room(batch)
        return Slice(placed._replace(keys=ticket.keys, first=placed.first + part.begin), part.begin, batch.room)
    bad = tuple(sample.position for sample in batch.bad)
    rows = batch.room if not bad and batch.rest_is_alike else None
    return Together(placed.first, batch.parts, bad, len(keys), rows)
