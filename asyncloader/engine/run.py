"""What the consumer and the loop share of one run over the data (an epoch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncloader.engine.handoff import Handoff
from asyncloader.engine.scheduler import Scheduler
from asyncloader.engine.tracks import make_tracks
from asyncloader.observe.faults import Faults
from asyncloader.observe.meter import Meter, Passage
from asyncloader.workers.protocol.failure import BadSample, stand_in
from asyncloader.workers.protocol.messages import EpochSpec
from asyncloader.workers.protocol.snapshot import Frozen, Start


class Item(NamedTuple):
    """What the consumer gets: a batch, or an exception in its place.

    ``counts`` is false for an error beside the order, which frees no place in the window. ``bad`` are the samples that
    the batch was made without. With ``left_out`` there is nothing to hand over, but its place in the window is free.
    ``passage`` is the meter's note of a batch. ``seq`` is its number in the plan; -1 beside the order. ``worker`` has
    answered the ticket, or nobody (-1), and ``snapshot`` is the state of its dataset then; ``number`` is that of the
    batch in its stream. ``keys`` are there where they may be needed to make the batch again. ``ended`` stands for the
    end of the data, where batches are made in this process.
    """

    batch: Any
    error: BaseException | None = None
    counts: bool = True
    bad: Sequence[BadSample] = ()
    left_out: bool = False
    passage: Passage | None = None
    seq: int = -1
    worker: int = -1
    snapshot: Any = None
    number: int = -1
    keys: Any = None
    ended: bool = False

    def open(self) -> Any:
        """Return the batch, or raise what came in its place."""
        if self.ended:
            raise StopIteration
        if self.error is None:
            return self.batch
        try:
            raise stand_in(self.error)
        finally:
            del self  # the traceback refers to this frame


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
        bad: By sequence number, the bad samples of batches that are on their way.
        snapshots: By sequence number, states of the dataset after batches that are on their way.
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
        self.bad: dict[int, Sequence[BadSample]] = {}
        self.snapshots: dict[int, Any] = {}
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

    def begin_after(self, past: dict[int, Sequence[Start]]) -> None:
        """Note what workers of a stream had been through before, by worker."""
        for worker, runs in past.items():
            self.tracks[worker].begin_after(runs)
