"""Batches in slices: each is divided over the workers that are free, and put together again.

    planned(keys) ──> Slicer.cut ──┬─ a slice ──────────> Scheduler ──> Send ──> any worker: makes the samples
                                   ├─ a slice ──────────>     │
                                   └─ the whole, held back    │  ready x n: all slices are here
                                            │                 ├─ written into the batch ──> Assemble ──> Deliver
                                            └─────────────────┴──> Send ──> any worker: collates them all ──> Deliver

A slice is a ticket like any other, so what the `Scheduler` does about workers that die, hang, come and go it does about
slices. The last ticket of a batch in slices stands for it: the others are passed over in the order (`PART`), and that
one is held back until all of them are here. Where all samples were written into the batch itself there is nothing left
to be done (`Assemble`). Otherwise it is sent with their samples, and a worker makes the batch of them. Where a slice
has failed it is not sent either.

A batch that is not worth dividing is one ticket, as under the other ways of scheduling.

Tickets have numbers of their own here. What consumers see is counted in batches: `Read`, `Window`, `void_count`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from asyncloader.engine.actions import PART, VOID, Action, Assemble, Read, Ticket, Window
from asyncloader.engine.progress import Progress
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.slicer import Slicer
from asyncloader.observe.faults import Faults
from asyncloader.settings import OnError
from asyncloader.transport.rows import RowsOf
from asyncloader.workers.protocol.failure import BadSample
from asyncloader.workers.protocol.messages import Slice, Together
from asyncloader.workers.protocol.outcome import Batch, Failure, LeftOut, Samples, Stuck, Written

_TOGETHER = -1
_LIKELY_S = 0.01
"""What a slice is thought to take while nothing is known: so each worker has one, and none waits behind it."""


class Sliced:
    """A batch in slices.

    Attributes:
        number: In the plan.
        keys: Of its samples.
        bounds: Where in the batch slices begin, and where the last one ends.
        items: By slice, what has become of it; None while it is not here, VOID if it was given up.
        missing: How many are not here.
        last: The ticket that stands for the batch.
        room: What samples are written into, or None.
        make_room: Makes that, when the first slice is sent; None after that.
    """

    __slots__ = ("bounds", "items", "keys", "last", "make_room", "missing", "number", "room")

    def __init__(
        self, number: int, keys: Any, bounds: list[int], last: int, make_room: Callable[[int], Any] | None = None
    ) -> None:
        self.number = number
        self.keys = keys
        self.bounds = bounds
        self.items: list[Any] = [None] * (len(bounds) - 1)
        self.missing = len(self.items)
        self.last = last
        self.room: Any = None
        self.make_room = make_room

    def __repr__(self) -> str:
        return f"<Sliced {self.number} {len(self.items) - self.missing}/{len(self.items)}>"

    @property
    def bad(self) -> list[BadSample]:
        """The samples that raised, in their order in the batch."""
        return [sample for item in self.items for sample in item.outcome.bad]

    @property
    def times(self) -> list[Any]:
        """What was noted of each slice, for the figures."""
        return [item.times for item in self.items if item is not VOID and item.times is not None]

    @property
    def texts(self) -> list[list[Any]]:
        """Those of all samples, by column, where these were written."""
        columns = zip(*(item.outcome.data for item in self.items), strict=True)
        return [[text for texts in column for text in texts] for column in columns]

    def let_go(self) -> None:
        """Drop what slices have made."""
        self.items.clear()
        self.room = None


class Part(NamedTuple):
    """What of a batch a ticket is: a slice, by its number, or all of them together."""

    batch: Sliced
    number: int

    @property
    def is_slice(self) -> bool:
        """Whether it is one of the slices."""
        return self.number != _TOGETHER


class SplitScheduler(Scheduler):
    """Decides about slices, as a `Scheduler` about batches; and about the batches that they are of.

    Args:
        slicer: Knows what samples cost.
        first: Number of the first batch.
        on_error: What becomes of bad samples.
        faults: Of the run: batches that are left out because no sample of them is good.
        num_workers: Workers at the beginning.
        prefetch_factor: Batches in flight or waiting in all, where each has work for all workers.
        batch_size: How many samples a batch has, as far as is known before.
        make_room: Finds room for a batch of such samples (their layout, their number) that all workers write into.
        options: Of a `Scheduler`.
    """

    def __init__(
        self,
        slicer: Slicer,
        *,
        first: int,
        on_error: OnError,
        faults: Faults,
        num_workers: int,
        prefetch_factor: int,
        batch_size: int,
        make_room: Callable[[Any, int], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_workers=num_workers, prefetch_factor=prefetch_factor, scheduling="dynamic", **options)
        self._slicer = slicer
        self._on_error = on_error
        self._faults = faults
        self._make_room = make_room
        self._num_batches = first
        self._parts: dict[int, Part] = {}  # of batches that are not handed over yet, by ticket
        self._slices = len(slicer.cut(batch_size, num_workers)) - 1  # of the last batch
        self._is_concluding = False  # the last slice of a batch has returned, and is not ready yet
        self._read_until = 0
        self._run_ahead.returned(_LIKELY_S, 0.0, False)
        self.window = self._batch_window()

    # ------------------------------------------------------------------------------------------------- events

    def planned(self, batches: Iterable[Any]) -> list[Action]:
        """The consumer read these batches of keys from the sampler; for VOID nothing is to be done."""
        actions: list[Action] = []
        for keys in batches:
            number = self._num_batches
            self._num_batches += 1
            if keys is VOID:
                actions += super().ready(self._next_seq(), VOID)
                continue
            bounds = self._cut(keys)
            if len(bounds) == 2:
                seq = self._next_seq()
                heapq.heappush(self._unsent, (seq, Ticket(seq, keys, part=number)))
            else:
                self._divide(number, keys, bounds)
        if (window := self._batch_window()) != self.window:
            self.window = window
            actions.append(Window(window))
        return actions + self._assign()

    def _cut(self, keys: Any) -> list[int]:
        can_be_cut = isinstance(keys, (list, tuple))
        bounds = self._slicer.cut(len(keys), self.roster.num_takers) if can_be_cut else [0, 0]
        self._slices = len(bounds) - 1
        return bounds

    def _divide(self, number: int, keys: Any, bounds: list[int]) -> None:
        make_room = None if self._make_room is None else self._room
        batch = Sliced(number, keys, bounds, self.planned_count + len(bounds) - 1, make_room)
        for index, (begin, end) in enumerate(pairwise(bounds)):
            part = Part(batch, index)
            seq = self._next_seq()
            self._parts[seq] = part
            self._queue([Ticket(seq, keys[begin:end], part=part)])
        self._parts[self._next_seq()] = Part(batch, _TOGETHER)

    def _room(self, count: int) -> Any:
        layout = self._slicer.layout
        return None if layout is None or self._make_room is None else self._make_room(layout, count)

    def _next_seq(self) -> int:
        seq = self.planned_count
        self.planned_count += 1
        return seq

    def returned(self, worker: int, seq: int, busy_s: float = 0.0, wait_s: float = 0.0) -> list[Action]:
        """The worker is done with this ticket; see `Scheduler.returned`.

        Whoever has returned the last slice of a batch gets nothing yet: it may be that the batch is to be put together,
        which would otherwise wait behind a slice of a later one. What follows is decided in `ready`.
        """
        part = self._parts.get(seq) if self._parts else None
        self._is_concluding = part is not None and part.is_slice and part.batch.missing == 1
        return super().returned(worker, seq, busy_s, wait_s)

    def _assign(self, idle: int | None = None) -> list[Action]:
        return [] if self._is_concluding else super()._assign(idle)

    def ready(self, seq: int, outcome: Any, nbytes: int = 0) -> list[Action]:
        """The outcome of a returned ticket is here; see `Scheduler.ready`."""
        self._is_concluding = False
        part = self._parts.pop(seq, None) if self._parts else None
        if outcome is not VOID and not self._slicer.is_whole:
            self._learn(part, outcome.outcome)
        if part is None:
            return super().ready(seq, outcome, nbytes)
        batch, number = part
        if not part.is_slice:
            if outcome is not VOID and type(outcome.outcome) is Stuck:
                return self._make_whole(batch)
            return super().ready(seq, _made_together(outcome, batch))
        batch.items[number] = outcome
        batch.missing -= 1
        actions = super().ready(seq, PART, nbytes)
        return actions if batch.missing else actions + self._conclude(batch) + self._assign()

    def _learn(self, part: Part | None, outcome: Any) -> None:
        """Note what samples cost."""
        kind, record, slicer = type(outcome), outcome.record, self._slicer
        if kind is Batch and part is None:
            slicer.made(record.samples, record.busy_s)
        elif kind is Batch and part is not None:
            slicer.opened(len(part.batch.keys), record.fetch_s)
        elif kind is Samples or kind is Written:
            slicer.made(record.samples, record.fetch_s)
            slicer.sent(record.samples, record.encode_s)
            if kind is Samples and not outcome.bad and part is not None:
                slicer.told(outcome.snapshot, missed=part.batch.room is not None)

    # ---------------------------------------------------------------------------------------------- decisions

    def _conclude(self, batch: Sliced) -> list[Action]:
        """All slices are here: have them put together, unless it is known what becomes of the batch."""
        if any(item is VOID for item in batch.items):
            return self.ready(batch.last, VOID)
        outcomes = [item.outcome for item in batch.items]
        for costly in (LeftOut, Failure):
            if (index := _first(outcomes, costly)) is not None:
                return self.ready(batch.last, batch.items[index])
        if _first(outcomes, Stuck) is not None:
            return self._make_whole(batch)
        if all(type(outcome) is Written for outcome in outcomes):
            return [Assemble(batch)]
        if len(batch.bad) == len(batch.keys):
            return self.ready(batch.last, self._none_good(batch))
        self._queue([Ticket(batch.last, batch.keys, part=Part(batch, _TOGETHER))])
        return []

    def _none_good(self, batch: Sliced) -> Any:
        """Return what becomes of a batch of which no sample is good."""
        item, first = batch.items[0], batch.bad[0]
        record = item.outcome.record
        outcome: Any = LeftOut(record)
        if self._on_error == "skip":
            self._faults.left_out.append(batch.keys)
        else:
            outcome = Failure(record, first.error.rebuild(batch.keys))
        return item._replace(outcome=outcome, times=None)

    def _make_whole(self, batch: Sliced) -> list[Action]:
        """Have one worker make the batch: samples cannot be brought together."""
        self._slicer.is_whole = True
        self._parts.pop(batch.last, None)
        self._queue([Ticket(batch.last, batch.keys, part=batch.number)])
        return self._assign()

    # --------------------------------------------------------------------------------------- counted in batches

    def _batch_window(self) -> int:
        return self._slicer.window(self._slices, max(1, self.num_workers), self._prefetch_factor)

    def _resize(self, change: int) -> Window:
        self.num_workers += change
        self.window = self._batch_window()
        return Window(self.window)

    def _read(self) -> Read:
        missing = self._read_until - self.planned_count
        return Read(self._num_batches + math.ceil(missing / (self._slices + (self._slices > 1))))


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
        begin = batch.bounds[part.number]
        if batch.make_room is not None:
            batch.room, batch.make_room = batch.make_room(len(keys)), None
        return Slice(placed._replace(keys=ticket.keys, first=placed.first + begin), begin, batch.room)
    samples = tuple(
        RowsOf(batch.room, begin, end, item.outcome.data) if type(item.outcome) is Written else item.outcome.data
        for item, (begin, end) in zip(batch.items, pairwise(batch.bounds), strict=True)
    )
    return Together(placed.first, samples, tuple(sample.position for sample in batch.bad), len(keys))


def _first(outcomes: list[Any], kind: type) -> int | None:
    return next((index for index, outcome in enumerate(outcomes) if type(outcome) is kind), None)


def _made_together(item: Any, batch: Sliced) -> Any:
    """Have what a worker has made of all samples tell of the bad ones among them; let go of the slices."""
    if item is not VOID and item.worker >= 0 and (bad := batch.bad):
        item = item._replace(outcome=item.outcome._replace(bad=bad))
    batch.let_go()
    return item
