"""Batches in slices: each is divided over the workers that are free, and put together again.

    planned(keys) ──> Slicer.cut ──┬─ a slice ──────────> Scheduler ──> Send ──> any worker: makes the samples
                                   ├─ a slice ──────────>     │
                                   └─ the whole, held back    │  ready x n: all slices are here
                                            │                 ├─ written into the batch ──> Assemble ──> Deliver
                                            └─────────────────┴──> Send ──> any worker: collates them all ──> Deliver

A slice is a ticket like any other, so what the `Scheduler` does about workers that die, hang, come and go it does about
slices. The last ticket of a batch in slices stands for it: the others are passed over in the order (`PART`), and that
one is held back until all of them are here. Where all samples were written into the batch itself there is nothing left
to be done (`Assemble`). Otherwise it is sent with their samples, and a worker makes the batch of them; or, if most were
written, writes them beside those. Where a slice has failed it is not sent either.

While nobody knows what samples cost each worker makes one, and the rest is cut when the first of them has come
(`_cut_anew`). By then tickets are numbered, for as many slices as there might be; spare ones are passed over.

A batch that is not worth dividing is one ticket, as under the other ways of scheduling.

Tickets have numbers of their own here. What consumers see is counted in batches: `Read`, `Window`, `void_count`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from asyncloader.engine.actions import PART, VOID, Action, Assemble, Read, Ticket, Window
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.sliced import TOGETHER, Part, Sliced
from asyncloader.engine.slicer import Slicer
from asyncloader.observe.faults import Faults
from asyncloader.settings import OnError
from asyncloader.workers.protocol.outcome import Batch, Failure, LeftOut, Samples, Stuck, Written

_LIKELY_S = 0.01
"""What a slice is thought to take while nothing is known: so each worker has one, and none waits behind it."""


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
        self._size = batch_size  # of the last batch
        self._slices = len(slicer.cut(batch_size, num_workers)) - 1
        self._is_guessed = False  # batches were cut when nobody knew what samples cost
        self._is_deciding = False  # a slice has returned, and is not ready yet, on which depends who gets what
        self._read_until = 0
        self._tickets = self.window
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
        return actions + self._note_window() + self._assign()

    def _cut(self, keys: Any) -> list[int]:
        if not isinstance(keys, (list, tuple)):
            self._size, self._slices = 1, 1
            return [0, 0]
        bounds = self._slicer.cut(len(keys), self.roster.num_takers)
        self._size, self._slices = len(keys), len(bounds) - 1
        self._is_guessed |= self._slicer.is_guessing
        return bounds

    def _divide(self, number: int, keys: Any, bounds: list[int]) -> None:
        count = len(bounds) - 1
        find_room = None if self._make_room is None else self._find_room
        batch = Sliced(number, keys, count, self.planned_count + count, find_room)
        for begin, end in pairwise(bounds):
            part = Part(batch, begin, end)
            seq = self._next_seq()
            self._parts[seq] = part
            self._queue([Ticket(seq, keys[begin:end], part=part)])
        self._parts[self._next_seq()] = Part(batch, TOGETHER, TOGETHER)

    def _find_room(self, batch: Sliced) -> None:
        """Have samples written into the batch, if it is known what they are like, and there is memory."""
        if (layout := self._slicer.layout) is not None and self._make_room is not None:
            batch.room, batch.find_room = self._make_room(layout, len(batch.keys)), None

    def _next_seq(self) -> int:
        seq = self.planned_count
        self.planned_count += 1
        return seq

    def returned(self, worker: int, seq: int, busy_s: float = 0.0, wait_s: float = 0.0) -> list[Action]:
        """The worker is done with this ticket; see `Scheduler.returned`.

        Whoever has returned the last slice of a batch gets nothing yet: it may be that the batch is to be put together,
        which would otherwise wait behind a slice of a later one. Nor do those who return the first slices of all: what
        samples cost will be known in a moment. What follows is decided in `ready`.
        """
        part = self._parts.get(seq) if self._parts else None
        self._is_deciding = part is not None and part.is_slice and (part.batch.missing == 1 or self._is_guessed)
        return super().returned(worker, seq, busy_s, wait_s)

    def _assign(self, idle: int | None = None) -> list[Action]:
        return [] if self._is_deciding else super()._assign(idle)

    def ready(self, seq: int, outcome: Any, nbytes: int = 0) -> list[Action]:
        """The outcome of a returned ticket is here; see `Scheduler.ready`."""
        was_deciding, self._is_deciding = self._is_deciding, False
        part = self._parts.pop(seq, None) if self._parts else None
        if outcome is not VOID and not self._slicer.is_whole:
            self._learn(part, outcome.outcome)
        if part is None:
            return super().ready(seq, outcome, nbytes)
        batch = part.batch
        if not part.is_slice:
            return self._put_together(seq, outcome, part)
        batch.items[part.begin] = outcome
        batch.missing -= 1
        actions = super().ready(seq, PART, nbytes)
        if outcome is VOID or type(outcome.outcome) is LeftOut:
            actions += self._pass_over(batch, 0)
        elif type(outcome.outcome) is Failure:  # one of an earlier slice would count
            actions += self._pass_over(batch, part.begin)
        if self._is_guessed and not self._slicer.is_guessing:
            self._is_guessed = False
            actions += self._cut_anew()
        if not batch.missing:
            actions += self._conclude(batch)
        elif not was_deciding:
            return actions
        return actions + self._assign()

    def _put_together(self, seq: int, item: Any, part: Part) -> list[Action]:
        """A worker has made a batch of slices, or has written those samples into it that were not; or could not."""
        batch = part.batch
        if item is not VOID:
            if type(item.outcome) is Stuck:
                return self._make_whole(batch)
            if type(item.outcome) is Written:
                batch.finish(item)
                self._parts[seq] = part
                return [Assemble(batch)]
            if item.worker >= 0 and (bad := batch.bad):
                item = item._replace(outcome=item.outcome._replace(bad=bad))
        batch.let_go()
        return super().ready(seq, item)

    def _learn(self, part: Part | None, outcome: Any) -> None:
        """Note what samples cost."""
        kind, record, slicer = type(outcome), outcome.record, self._slicer
        if part is None:
            if kind is Batch:
                slicer.made(record.samples, record.busy_s)
        elif not part.is_slice:
            if kind is Batch:
                slicer.opened(len(part.batch.keys), record.fetch_s)
        elif kind is Samples or kind is Written:
            slicer.made(record.samples, record.fetch_s if kind is Samples else record.busy_s)
            slicer.sent(record.samples, record.encode_s)
            if kind is Samples and not outcome.bad:
                room = part.batch.room
                slicer.told(outcome.snapshot, missed=room is not None and room.layout != outcome.snapshot)

    # ---------------------------------------------------------------------------------------------- decisions

    def _cut_anew(self) -> list[Action]:
        """It is known by now what samples cost: cut anew what nobody has yet."""
        runs: list[list[Ticket]] = [[]]
        for _, ticket in sorted(self._unsent):
            if not (runs[-1] and _goes_on(runs[-1][-1], ticket)):
                runs.append([])
            runs[-1].append(ticket)
        spare = {seq for run in runs if len(run) > 1 for seq in self._cut_run(run)}
        actions = self._spare(spare)
        self._slices = len(self._slicer.cut(self._size, self.roster.num_takers)) - 1
        return actions + self._note_window()

    def _cut_run(self, run: list[Ticket]) -> list[int]:
        """Cut slices of a batch, one after the other, anew; return the tickets that are not needed any more."""
        batch, first, _ = run[0].part
        bounds = self._slicer.cut(run[-1].part.end - first, self.roster.num_takers)
        if len(bounds) > len(run):
            return []
        if bounds[1] == len(batch.keys):  # nothing of it is made, and it stays whole
            del self._parts[run[0].seq]
            run[0].part, run[0].keys = batch.number, batch.keys
            return [*(ticket.seq for ticket in run[1:]), batch.last]
        for ticket, (begin, end) in zip(run, pairwise(bounds), strict=False):
            ticket.part = self._parts[ticket.seq] = Part(batch, first + begin, first + end)
            ticket.keys = batch.keys[first + begin : first + end]
        spare = [ticket.seq for ticket in run[len(bounds) - 1 :]]
        batch.missing -= len(spare)
        return spare

    def _pass_over(self, batch: Sliced, begin: int) -> list[Action]:
        """Have nobody make the slices from ``begin`` on that no worker has: the batch comes to nothing without them."""
        spare = {
            ticket.seq
            for _, ticket in self._unsent
            if type(ticket.part) is Part and ticket.part.batch is batch and ticket.part.begin >= begin
        }
        batch.missing -= len(spare)
        return self._spare(spare)

    def _spare(self, seqs: set[int]) -> list[Action]:
        """Tickets are not needed any more: nobody gets them, and they are passed over in the order."""
        if not seqs:
            return []
        self._unsent = [entry for entry in sorted(self._unsent) if entry[0] not in seqs]
        actions: list[Action] = []
        for seq in sorted(seqs):
            self._parts.pop(seq)
            actions += super().ready(seq, PART)
        return actions

    def _conclude(self, batch: Sliced) -> list[Action]:
        """All slices are here: have them put together, unless it is known what becomes of the batch."""
        items = batch.slices
        if any(item is VOID for item in items):
            return self.ready(batch.last, VOID)
        outcomes = [item.outcome for item in items]
        for costly in (LeftOut, Failure):
            if (index := _first(outcomes, costly)) is not None:
                return self.ready(batch.last, items[index])
        if _first(outcomes, Stuck) is not None:
            return self._make_whole(batch)
        if all(type(outcome) is Written for outcome in outcomes):
            return [Assemble(batch)]
        if len(batch.bad) == len(batch.keys):
            return self.ready(batch.last, self._none_good(batch))
        self._queue([Ticket(batch.last, batch.keys, part=self._parts[batch.last])])
        return []

    def _none_good(self, batch: Sliced) -> Any:
        """Return what becomes of a batch of which no sample is good."""
        item, first = batch.slices[0], batch.bad[0]
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
        return self._slicer.window(self._slices, self._tickets, self._prefetch_factor)

    def _note_window(self) -> list[Action]:
        before, self.window = self.window, self._batch_window()
        return [] if self.window == before else [Window(self.window)]

    def _resize(self, change: int) -> Window:
        super()._resize(change)
        self._tickets = self.window
        self.window = self._batch_window()
        return Window(self.window)

    def _read(self) -> Read:
        missing = self._read_until - self.planned_count
        return Read(self._num_batches + math.ceil(missing / (self._slices + (self._slices > 1))))


def _goes_on(one: Ticket, other: Ticket) -> bool:
    """Whether two tickets are slices one after the other of the same batch, and nobody has tried them."""
    parts = one.part, other.part
    are_slices = all(type(part) is Part and part.is_slice for part in parts) and not one.tries + other.tries
    return are_slices and one.part.batch is other.part.batch and one.part.end == other.part.begin


def _first(outcomes: list[Any], kind: type) -> int | None:
    return next((index for index, outcome in enumerate(outcomes) if type(outcome) is kind), None)
