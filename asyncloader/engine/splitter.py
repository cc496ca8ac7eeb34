"""Divide batches into slices, which are ordinary tickets, and make a batch of what becomes of these.

    planned(keys) ── Slicer.cut ──> a ticket for each slice ──> Scheduler ──> Send ──> any worker: a batch of its keys
                                                                                            │
    Deliver <── Scheduler.ready <── joined <── JoinSlices <── ready x n: all are here <────┘
                     ^                 └─ cannot be joined: the last ticket again, with the keys of the whole batch
                     └─ what the first slice has raised, or nothing

A slice has a sequence number of its own, so the `Scheduler` handles workers that die, hang, come and go slice by slice.
When all slices are here, the last ticket stands for the batch in the order; the others are passed over (`PART`). A
batch that is not worth dividing is one ticket.

The scheduler counts tickets. Consumers count batches, in `Read`, `Window` and `num_void`; this module translates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Literal

from asyncloader.engine.actions import PART, VOID, Action, JoinSlices, Read, Ticket, Window
from asyncloader.engine.progress import Progress
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.slicer import Slicer
from asyncloader.messages.failure import BadSample
from asyncloader.messages.messages import Slice
from asyncloader.messages.outcome import NO_RECORD, Batch, Failure, LeftOut, Outcome
from asyncloader.observe.faults import Faults
from asyncloader.options import OnError
from asyncloader.transport.batch_slabs import BatchSlabs
from asyncloader.transport.join import Columns, columns_of


class SplitBatch:
    """A batch of the plan, in one slice or in several.

    Attributes:
        number: In the plan.
        keys: The keys of its samples.
        first: Number of its first ticket.
        bounds: Where in the batch slices begin, and where the last one ends.
        items: The item of each slice: None as long as the slice is not here, VOID if its ticket is void.
        sizes: The bytes of each slice.
        missing: How many slices are not here.
        slabs: Slabs that workers may write the batch into, or None.
    """

    __slots__ = ("bounds", "first", "items", "keys", "missing", "number", "sizes", "slabs")

    def __init__(self, number: int, keys: Any, first: int, bounds: list[int]) -> None:
        self.number = number
        self.keys = keys
        self.first = first
        self.bounds = bounds
        self.missing = len(bounds) - 1
        self.items: list[Any] = [None] * self.missing
        self.sizes = [0] * self.missing
        self.slabs: BatchSlabs | None = None

    def __repr__(self) -> str:
        return f"<SplitBatch {self.number} {self.missing}/{len(self.items)} missing>"

    @property
    def is_whole(self) -> bool:
        """Whether it is one ticket."""
        return len(self.items) == 1

    @property
    def tickets(self) -> range:
        """The numbers of its tickets."""
        return range(self.first, self.first + len(self.items))

    @property
    def slices(self) -> list[Any]:
        """The keys of each ticket."""
        return [self.keys] if self.is_whole else [self.keys[begin:end] for begin, end in pairwise(self.bounds)]

    def bad(self, num_slices: int | None = None) -> list[BadSample]:
        """Return the samples that raised, of the first slices or of all, by their places in the batch."""
        return [
            sample._replace(position=begin + sample.position)
            for begin, item in list(zip(self.bounds, self.items, strict=False))[:num_slices]
            for sample in item.outcome.bad
        ]


class Splitter:
    """Stands between plan and scheduler of one run. Called from the loop thread only.

    Args:
        scheduler: Decides about tickets.
        slicer: Decides into how many slices batches are divided.
        first: Number of the first batch.
        on_error: How bad samples are handled.
        faults: Notes the batches of the run that are left out.
        prefetch_factor: Batches in flight or waiting in all, where each has work for all workers.
        batch_size: How many samples a batch has, as far as is known before.
        obtain: Gets slabs for a batch with these large tensors and so many samples; None if there are none.

    Attributes:
        num_void: Batches that came to nothing, and were raised of beside the order.
        window: Batches in flight or waiting.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        slicer: Slicer,
        *,
        first: int,
        on_error: OnError,
        faults: Faults,
        prefetch_factor: int,
        batch_size: int,
        obtain: Callable[[Columns, int], BatchSlabs | None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._slicer = slicer
        self._on_error = on_error
        self._faults = faults
        self._prefetch_factor = prefetch_factor
        self._obtain = obtain
        self._num_batches = first
        self.num_void = 0
        self._batches: dict[int, SplitBatch] = {}  # that are not handed over yet, by ticket
        self._num_slices = len(self._cut(batch_size)) - 1  # of the last batch
        self.window = self.count_window()

    # ------------------------------------------------------------------------------------------------- events

    def planned(self, batches: Iterable[Any]) -> list[Action]:
        """The consumer read these batches of keys from the sampler; see `Scheduler.planned`."""
        tickets: list[Any] = []
        for keys in batches:
            if keys is VOID:
                self.num_void += 1
                tickets.append(VOID)
            else:
                bounds = self._cut(len(keys)) if isinstance(keys, (list, tuple)) else [0, 0]
                batch = SplitBatch(self._num_batches, keys, self._scheduler.planned_count + len(tickets), bounds)
                self._batches |= dict.fromkeys(batch.tickets, batch)
                self._num_slices = len(batch.items)
                tickets += batch.slices
            self._num_batches += 1
        return [*self._scheduler.planned(tickets), *self._note_window()]

    def ready(self, seq: int, item: Any, nbytes: int = 0) -> list[Action]:
        """The outcome of a returned ticket is here; see `Scheduler.ready`."""
        batch = self._batches[seq]
        if item is not VOID and type(item.outcome) is Batch:
            self._slicer.made(item.outcome.record.samples, item.outcome.record.busy_s)
        place = seq - batch.first
        batch.items[place], batch.sizes[place] = item, nbytes
        batch.missing -= 1
        return self._note_window() + ([] if batch.missing else self._conclude(batch))

    def lost(self, tickets: Iterable[Ticket]) -> list[Action]:
        """These tickets are void, and were raised of: the batches that they are of come to nothing."""
        return [action for ticket in tickets for action in self.ready(ticket.seq, VOID)]

    def joined(self, batch: SplitBatch, item: Any) -> list[Action]:
        """The slices of a batch were joined; or that has raised."""
        if type(item.outcome) is Batch:
            self._slicer.joined(columns_of(item.outcome.data))
        return self._hand_over(batch, item)

    def make_again(self, batch: SplitBatch) -> list[Action]:
        """The slices of a batch cannot be joined: have it made whole, in the place of its last ticket."""
        self._slicer.refused()
        *others, last = batch.tickets
        actions = self._pass_over(batch, others)
        self._batches[last] = SplitBatch(batch.number, batch.keys, last, [0, len(batch.keys)])
        return actions + self._scheduler.again(last, batch.keys)

    # ------------------------------------------------------------------------------------------------ answers

    def batch(self, seq: int) -> SplitBatch:
        """Return the batch that a ticket is of."""
        return self._batches[seq]

    def batches_of(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Return the batches that these tickets are of, by their numbers in the plan and with all their keys."""
        found: dict[int, Ticket] = {}
        for ticket in tickets:
            batch = self._batches[ticket.seq]
            found.setdefault(batch.number, Ticket(batch.number, batch.keys, ticket.worker, ticket.tries))
        return list(found.values())

    def is_finishing(self) -> bool:
        """Whether all slices of the batch whose turn it is are here: they are being joined, or the batch is pinned."""
        batch = self._batches.get(self._scheduler.gone_count)
        return batch is not None and not batch.missing and self._scheduler.is_finishing()

    def contents(self, ticket: Ticket, progress: Progress) -> Any:
        """Return what a worker is to know of a ticket. With the first one slabs are obtained for the batch."""
        batch = self._batches[ticket.seq]
        placed = progress.placed(batch.number, batch.keys)
        if batch.is_whole:
            return placed
        if ticket.seq == batch.first and batch.slabs is None and self._obtain is not None:
            batch.slabs = self._obtain(self._slicer.columns, len(batch.keys))
        place = ticket.seq - batch.first
        begin, end = batch.bounds[place : place + 2]
        rows = () if batch.slabs is None else batch.slabs.rows(begin, end)
        return Slice(placed._replace(keys=ticket.keys, first=placed.first + begin), rows)

    def count_window(self) -> int:
        """Return the window now: batches that have as many tickets as that of the scheduler, and not too few.

        While nobody knows what samples cost no batch is divided without need: cheap ones would be, too.
        """
        least = 1 if self._slicer.is_guessing else self._prefetch_factor
        self.window = max(least, math.ceil(self._scheduler.window / self._num_slices))
        return self.window

    def read_until(self, num_tickets: int) -> int:
        """Return how far the sampler is to be read for so many tickets in all. In batches."""
        return self._num_batches + math.ceil((num_tickets - self._scheduler.planned_count) / self._num_slices)

    # ---------------------------------------------------------------------------------------------- decisions

    def _cut(self, count: int) -> list[int]:
        return self._slicer.cut(count, self._scheduler.roster.num_takers)

    def _note_window(self) -> list[Action]:
        before = self.window
        return [] if self.count_window() == before else [Window(self.window)]

    def _conclude(self, batch: SplitBatch) -> list[Action]:
        """All slices are here: have them joined, unless it is known what becomes of the batch."""
        if any(item is VOID for item in batch.items):
            self.num_void += 1
            actions = self._pass_over(batch, batch.tickets)
            return [*actions, Read(0)]  # a void batch frees its place in the window
        if batch.is_whole:
            return self._hand_over(batch, batch.items[0])
        fate = self._fate(batch)
        if fate == "joined":
            slices = [item.outcome.data for item in batch.items if type(item.outcome) is Batch]
            batch.items = [_without_data(item) for item in batch.items]
            return [JoinSlices(batch, slices)]
        if fate == "made again":
            return self.make_again(batch)
        return self._hand_over(batch, batch.items[0]._replace(outcome=fate, times=None))

    def _fate(self, batch: SplitBatch) -> Outcome | Literal["joined", "made again"]:
        """Say what is to be done about slices: what raised in one place would, perhaps, not in a whole batch."""
        outcomes = [item.outcome for item in batch.items]
        if any(type(outcome) is LeftOut and not outcome.bad for outcome in outcomes):  # with its worker
            return LeftOut(NO_RECORD)
        replaces = self._on_error == "replace"
        for count, outcome in enumerate(outcomes, 1):
            # Where it is collating that has raised, the words are about a part of the samples: not those of the batch.
            if type(outcome) is Failure and not outcome.record.collate_s and not (replaces and outcome.bad):
                return outcome._replace(bad=batch.bad(count))
        bad = batch.bad()
        counts = [outcome.record.samples + len(outcome.bad) for outcome in outcomes]
        is_complete = counts == [end - begin for begin, end in pairwise(batch.bounds)]
        if not is_complete or (replaces and bad) or any(type(outcome) is Failure for outcome in outcomes):
            return "made again"
        if len(bad) == len(batch.keys):
            return LeftOut(outcomes[0].record, bad)
        return "joined"

    def _hand_over(self, batch: SplitBatch, item: Any) -> list[Action]:
        """Let the last ticket stand for the batch."""
        if type(item.outcome) is LeftOut:
            self._faults.left_out.append(batch.keys)
        *others, last = batch.tickets
        actions = self._pass_over(batch, others)
        del self._batches[last]
        return actions + self._scheduler.ready(last, item, batch.sizes[-1])

    def _pass_over(self, batch: SplitBatch, tickets: Iterable[int]) -> list[Action]:
        """Let nothing stand for these tickets; those that are void are passed over already."""
        actions: list[Action] = []
        for seq in tickets:
            del self._batches[seq]
            if batch.items[place := seq - batch.first] is not VOID:
                actions += self._scheduler.ready(seq, PART, batch.sizes[place])
        return actions


def _without_data(item: Any) -> Any:
    outcome = item.outcome
    return item._replace(outcome=outcome._replace(data=None)) if type(outcome) is Batch else item
