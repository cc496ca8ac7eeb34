"""Batches that several workers make together, in slices: the one place that knows slices.

    unsent ticket ── cut ──> the next slice: an ordinary ticket ──> a worker
                       └──> the rest of the batch stays unsent         │
    the batch <── join, pin: `Finisher` <── fate <── add: all are here <┘
              └── or it is made again, whole; or what the first of them has raised stands for it

A worker that is free gets the next slice of the first unsent batch, so how large that is can follow from what samples
have cost so far. A slice costs what a ticket costs: some 0.4 ms of the loop thread, and of a worker that waits for the
next one. So a slice takes a worker a while at least, and a batch of cheap samples stays whole. Otherwise slices become
smaller towards the end of a batch: where samples take unlike times, or workers start at different ones, that keeps all
workers busy until the batch is done. While nobody knows what a sample costs, slices go down to a single sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

from asyncloader.engine.actions import VOID, Ticket
from asyncloader.engine.taking import Item
from asyncloader.messages.failure import BadSample
from asyncloader.messages.messages import Kind, Slice
from asyncloader.messages.outcome import Outcome
from asyncloader.observe.meter import Counted
from asyncloader.options import OnError, Options
from asyncloader.seeding.sample_context import Placed
from asyncloader.transport.batch_slabs import BatchSlabs
from asyncloader.transport.join import Columns, join
from asyncloader.worker.digesting import make_digester

_LEAST_SLICE_S = 0.02
"""A slice that takes a worker less is not worth its ticket: 2 % of it."""
_SHARE = 2
"""A slice has what is left of the batch, divided by the workers and by this: guided self-scheduling (Polychronopoulos
and Kuck, 1987). The first ones are large, the last ones as small as they may be, and all workers are done at once."""
_FADE = 0.97
"""What a ticket tells counts so much less with each later one."""
_MOST_MADE_AGAIN = 8
"""Batches stay whole where more than one in so many that were divided had to be made again."""
_DIVISIBLE = (list, tuple)
"""A sampler of the user's may yield keys of any other kind, which only the dataset understands."""

Digest: TypeAlias = Callable[[Any], int]

Fate: TypeAlias = 'Outcome | Literal["void", "join", "again"]'


class Slicer:
    """Knows what the samples of a loader cost and what its batches look like, from run to run. On the loop thread.

    Attributes:
        is_whole: Batches stay whole, whatever their samples cost.
        each: How many slices the last batch had; without end while nobody knows.
        columns: The large tensors of the last batch that was joined.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.each = math.inf
        self.columns: Columns = ()
        self._seconds = 0.0
        self._samples = 0.0
        self._num_joined = 0
        self._num_made_again = 0

    def __repr__(self) -> str:
        return f"<Slicer {self._seconds:.3g} s for {self._samples:.3g} samples, whole={self.is_whole}>"

    @property
    def is_guessing(self) -> bool:
        """Whether nobody knows what a sample costs. Before a batch is here it is the cost of some, perhaps odd ones."""
        return math.isinf(self.each) or not self._samples

    def made(self, count: int, seconds: float) -> None:
        """A worker has made so many samples in this time."""
        self._seconds = _FADE * self._seconds + seconds
        self._samples = _FADE * self._samples + count

    def joined(self, columns: Columns) -> None:
        """The slices of a batch were joined, which has these large tensors."""
        self._num_joined += 1
        self.columns = columns

    def not_joined(self) -> None:
        """The slices of a batch could not be joined, and it is made again."""
        self._num_made_again += 1
        self.is_whole |= _MOST_MADE_AGAIN * self._num_made_again > self._num_joined + _MOST_MADE_AGAIN

    def size(self, left: int, num_workers: int) -> int:
        """Return how many samples the next slice has of a batch of which so many are left."""
        if self.is_whole or num_workers < 2:
            return left
        guided = max(1, left // (_SHARE * num_workers))
        if self.is_guessing:
            return guided
        each_s = self._seconds / self._samples
        return left if each_s * left < 2 * _LEAST_SLICE_S else max(guided, math.ceil(_LEAST_SLICE_S / each_s))


class Divided:
    """A batch in slices.

    Attributes:
        keys: The keys of the batch.
        on_error: How bad samples are handled.
        digest: Makes the digest of a batch, where batches have fingerprints. Used by the finisher.
        missing: How many of its samples are not here.
        items: By where in the batch a slice begins, what has become of it: an `Item`, or VOID.
        slabs: Slabs that workers may write the batch into, or None.
    """

    __slots__ = ("digest", "items", "keys", "missing", "on_error", "slabs")

    def __init__(self, keys: Any, on_error: OnError, digest: Digest | None) -> None:
        self.keys = keys
        self.on_error = on_error
        self.digest = digest
        self.missing = len(keys)
        self.items: dict[int, Any] = {}
        self.slabs: BatchSlabs | None = None

    def in_order(self) -> list[tuple[int, Any]]:
        """Return the slices: where each begins, and what has become of it."""
        return sorted(self.items.items(), key=lambda item: item[0])

    def bad(self, num_slices: int | None = None) -> list[BadSample]:
        """Return the samples that raised, of the first slices or of all, by their places in the batch."""
        return [
            sample._replace(position=begin + sample.position)
            for begin, item in self.in_order()[:num_slices]
            for sample in item.outcome.bad
        ]

    def to_join(self, number: int) -> tuple[Item, list[Counted], Callable[[], Outcome]]:
        """Return the batch of this number without its data, what is counted of its slices, and what joins these."""
        items = [item for _, item in self.in_order() if item.outcome.kind == Kind.BATCH]
        sizes, parts = [item.outcome.nbytes for item in items], [item.outcome.data for item in items]
        batch = Outcome(Kind.BATCH, bad=self.bad(), nbytes=min(sizes) if min(sizes) < 0 else sum(sizes))
        whole = None if self.slabs is None else self.slabs.whole
        return Item(batch, number), [item.times for item in items], partial(_joined, parts, whole, batch, self.digest)

    def fate(self) -> Fate:
        """Say what becomes of the batch: what raised in one place would, perhaps, not in a whole batch."""
        if VOID in self.items.values():
            return "void"
        outcomes: list[Outcome] = [item.outcome for _, item in self.in_order()]
        if any(outcome.kind == Kind.LEFT_OUT and not outcome.bad for outcome in outcomes):  # with its worker
            return Outcome(Kind.LEFT_OUT)
        replaces, bad = self.on_error == "replace", self.bad()
        for count, outcome in enumerate(outcomes, 1):
            # Where it is collating that has raised, the words are about a part of the samples: not those of the batch.
            if outcome.kind == Kind.FAILURE and not outcome.record.collate_s and not (replaces and outcome.bad):
                return outcome._replace(bad=self.bad(count))
        num_samples = sum(outcome.record.samples + len(outcome.bad) for outcome in outcomes)
        has_failed = any(outcome.kind == Kind.FAILURE for outcome in outcomes)
        if num_samples != len(self.keys) or (replaces and bad) or has_failed:
            return "again"
        return Outcome(Kind.LEFT_OUT, outcomes[0].record, bad=bad) if len(bad) == len(self.keys) else "join"


def _joined(parts: list[Any], whole: Any, batch: Outcome, digest: Digest | None) -> Outcome:
    """Return the batch with its data, and with their digest where that is wanted."""
    data = join(parts, whole)
    record = batch.record if digest is None else batch.record._replace(digest=digest(data))
    return batch._replace(record=record, data=data)


class Slices:
    """Divides the batches of one run. On the loop thread.

    Args:
        options: The options of the run: how bad samples are handled, and whether batches have fingerprints.
        slicer: Decides how large slices are.
        obtain: Gets slabs for a batch with these large tensors and so many samples; None if there are none.
    """

    def __init__(
        self,
        options: Options,
        slicer: Slicer,
        obtain: Callable[[Columns, int], BatchSlabs | None] | None = None,
    ) -> None:
        self.slicer = slicer
        self._on_error = options.on_error
        self._digest = make_digester(options.fingerprint)
        self._obtain = obtain
        self._batches: dict[int, Divided] = {}  # of which slices are missing, by number

    def cut(self, ticket: Ticket, num_workers: int) -> Ticket:
        """Return a ticket for the next slice, and leave the rest in this one; or this one, if it is not divided."""
        if not isinstance(ticket.keys, _DIVISIBLE):
            return ticket
        begin, end = ticket.bounds or (0, len(ticket.keys))
        if (size := self.slicer.size(end - begin, num_workers)) >= end - begin:
            self.slicer.each = self.slicer.each if ticket.bounds else 1
            return ticket
        if ticket.bounds is None:
            self._batches[ticket.batch] = Divided(ticket.keys, self._on_error, self._digest)
        ticket.bounds = begin + size, end
        return Ticket(ticket.batch, ticket.keys, -1, (begin, begin + size))

    def made(self, ticket: Ticket, seconds: float) -> None:
        """A worker is done with a ticket, which took it so long."""
        if isinstance(ticket.keys, _DIVISIBLE):
            begin, end = ticket.bounds or (0, len(ticket.keys))
            self.slicer.made(end - begin, seconds)

    def contents(self, ticket: Ticket, keys: Any) -> Any:
        """Return what a worker is to know of a ticket, whose batch has these keys; slabs come with the first slice."""
        if ticket.bounds is None:
            return keys
        divided, (begin, end) = self._batches[ticket.batch], ticket.bounds
        if not begin and divided.slabs is None and self._obtain is not None:
            divided.slabs = self._obtain(self.slicer.columns, len(ticket.keys))
        slabs = divided.slabs
        rows = () if slabs is None else slabs.rows(begin, end)
        return Slice(Placed(ticket.own_keys, keys.first + begin), rows, slabs)

    def add(self, ticket: Ticket, item: Any) -> Divided | None:
        """Note what has become of a slice; return its batch if no slice is missing any more."""
        batch, (begin, end) = self._batches[ticket.batch], ticket.bounds or (0, 0)
        batch.items[begin] = item
        batch.missing -= end - begin
        if batch.missing:
            return None
        self.slicer.each = len(batch.items)
        return self._batches.pop(ticket.batch)
