"""What the consumer and the loop share of one run over the data (an epoch)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncloader.engine.actions import Action, Fail, Ticket
from asyncloader.engine.handoff import Handoff
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.tracks import Track, make_tracks
from asyncloader.errors import describe_keys
from asyncloader.observe.faults import Faults
from asyncloader.observe.meter import BatchTimes, Meter
from asyncloader.workers.protocol.failure import stand_in
from asyncloader.workers.protocol.messages import EpochSpec
from asyncloader.workers.protocol.outcome import NO_RECORD, Batch, Failure, LeftOut, Outcome
from asyncloader.workers.protocol.snapshot import Frozen, Start

log = logging.getLogger("asyncloader")


class Item(NamedTuple):
    """What the consumer gets: an outcome whose turn has come.

    Attributes:
        outcome: A batch, what was raised in its place, or nothing, but the place in the window is free; the end of the
            data, where batches are made in this process.
        seq: Number of the batch in the plan; -1 beside the order.
        worker: Who has answered the ticket; -1 for nobody.
        times: The meter's note of a batch.
        number: Of the batch in the stream of its worker.
        keys: Where they may be needed to make the batch again.
        counts: It is in order, and frees a place in the window.
    """

    outcome: Outcome
    seq: int = -1
    worker: int = -1
    times: BatchTimes | None = None
    number: int = -1
    keys: Any = None
    counts: bool = True

    def open(self) -> Any:
        """Return the batch, or raise what came in its place."""
        outcome = self.outcome
        if type(outcome) is Batch:
            return outcome.data
        try:
            if type(outcome) is Failure:
                raise stand_in(outcome.error)
            raise StopIteration
        finally:
            del self, outcome  # the traceback refers to this frame


def failed(error: BaseException, seq: int = -1, *, counts: bool = True) -> Item:
    """Return what is raised in place of a batch that no worker has come to."""
    return Item(Failure(NO_RECORD, error), seq, counts=counts)


class PlanEnd:
    """In the inbox: the sampler has no more."""


class Run:
    """One run over the data (an epoch): what the consumer and the loop share of it.

    The attributes are written by the loop thread and read by consumers.

    Attributes:
        ended: Everything that was planned has been handed over.
        read_until: A consumer that waits may read the sampler on, until it has read so many batches of keys.
        meter: Counts what happens.
        void_count: Tickets that made no batch; each frees a place in the window.
        faults: What went wrong and was mended.
        ends: By worker, the state of its stream after the end, if that outlasts the run.
        tracks: By worker, how far it is, for datasets that workers have a place or a state in.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        epoch: EpochSpec,
        faults: Faults,
        meter: Meter,
        *,
        is_stream: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.meter = meter
        self.epoch = epoch
        self.faults = faults
        self.ends: dict[int, Frozen] = {}
        self._is_stream = is_stream
        self._overlaps = overlaps
        self.begin_at(epoch.starts or {})
        self.handoff: Handoff[Item] = Handoff()
        self.ended = False
        self.read_until = 0
        self.void_count = 0

    def begin_at(self, starts: dict[int, Start]) -> None:
        """Note where workers are at the beginning."""
        key = None if self._is_stream else self.epoch.key
        self.tracks = make_tracks(starts, key, overlaps=self._overlaps)

    def start_of(self, worker: int) -> Start | None:
        """Return where another worker would begin; None where workers have no place in the data."""
        return self.tracks[worker].start if self.tracks else None

    def given(self, worker: int, ticket: Ticket) -> None:
        """Note that a worker gets a ticket."""
        self.faults.retries += ticket.tries > 0
        if isinstance(track := self.tracks.get(worker), Track):
            track.given(ticket.seq)

    def answered(self, item: Item, ticket: Ticket) -> Item:
        """Note that a worker has answered a ticket, which decides where a replacement would begin."""
        snapshot = item.outcome.snapshot
        # What an iterator tells after its end is no place to begin at: some would begin anew.
        place = None if isinstance(snapshot, Frozen) and snapshot.ended else snapshot
        keys = None if self._is_stream else ticket.keys
        return item._replace(number=self.tracks[item.worker].answered(item.seq, place, keys), keys=keys)

    def lost(self, worker: int) -> None:
        """Note that what a worker that is gone had been given was not made."""
        if self.tracks:
            self.tracks[worker].lost()

    def fail(self, action: Fail) -> list[Action]:
        """Make one error of tickets that are given up, and hand it over, or leave the batch out."""
        assert action.cause is not None
        error = action.cause(action.tickets)
        if action.at_once:
            self.handoff.ready.appendleft(failed(error, counts=False))
            self.handoff.wake()
            return []
        (ticket,) = action.tickets
        item = failed(error, ticket.seq)
        if action.leave_out:
            log.warning("The batch with the indices %s is left out: %s", describe_keys(ticket.keys), error)
            self.faults.left_out.append(ticket.keys)
            item = Item(LeftOut(NO_RECORD), ticket.seq)
        return self.scheduler.ready(ticket.seq, item)

    def read_on(self, until: int) -> None:
        """Let a consumer that waits read the sampler on."""
        self.void_count = self.scheduler.void_count
        self.read_until = max(self.read_until, until)
        self.handoff.wake()

    def finish(self) -> None:
        """Tell consumers that everything that was planned has been handed over."""
        self.ended = True
        self.handoff.wake_all()

    def begin_after(self, past: dict[int, Sequence[Start]]) -> None:
        """Note what workers of a stream had been through before, by worker."""
        for worker, runs in past.items():
            self.tracks[worker].begin_after(runs)
