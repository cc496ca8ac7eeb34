"""The figures of a run over the data: what the verdict is worked out from, and what statistics show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from asyncloader.observe.record import Record
from asyncloader.observe.timing import Timing


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """The work of one worker. It does not change: with further batches there are other figures.

    Attributes:
        worker_id: From 0.
        batches: Batches that it made.
        busy_s: Seconds that it worked.
        first_s: The part of them that its first batch took, in which it may have opened files.
        idle_s: Seconds that it waited for something to do, its first ticket left aside.
        cpu_s: CPU seconds of its work.
        stalled_s: Seconds that it was ready to run while others had the cores.
        private_bytes: Memory that it has to itself, looked at about once a second; 0 if that is not known. Memory
            shared with this process or with other workers does not count: batches, the dataset of a forked worker.
    """

    worker_id: int
    batches: int = 0
    busy_s: float = 0.0
    first_s: float = 0.0
    idle_s: float = 0.0
    private_bytes: int = 0
    cpu_s: float = 0.0
    stalled_s: float = 0.0

    def plus(self, records: Sequence[Record]) -> WorkerStats:
        """Return the figures with what it has noted about further batches."""
        if not records:
            return self
        busy_s = [record.busy_s for record in records]
        return WorkerStats(
            self.worker_id,
            self.batches + len(records),
            self.busy_s + sum(busy_s),
            self.first_s if self.batches else busy_s[0],
            self.idle_s + sum(record.wait_s for record in records[not self.batches :]),  # it has waited for the start
            records[-1].private_bytes,
            self.cpu_s + sum(record.cpu_s for record in records),
            self.stalled_s + sum(record.stalled_s for record in records),
        )


@dataclass(frozen=True, slots=True)
class Workers:
    """What the workers of a run did.

    Attributes:
        each: The work of each worker, those that have left included; those that came later are the last ones.
        cpu_s: CPU seconds of all of them.
        stalled_s: Seconds that they were ready to run while others had the cores.
        changes: How many workers there were from a moment on, by the seconds since ``iter()``: some came or went.
        renewals: Workers whose place another process has taken, by ``max_worker_memory``.
    """

    each: tuple[WorkerStats, ...] = ()
    cpu_s: float = 0.0
    stalled_s: float = 0.0
    changes: dict[float, int] = field(default_factory=dict)
    renewals: int = 0

    def _sum(self, name: str) -> float:
        return float(sum(getattr(worker, name) for worker in self.each))

    @property
    def batches(self) -> int:
        """Batches that they have made; some may not have been taken yet."""
        return int(self._sum("batches"))

    @property
    def busy_s(self) -> float:
        """Seconds that they worked."""
        return self._sum("busy_s")

    @property
    def busy_share(self) -> float:
        """Share of the workers' time in which they worked; where they fetch several batches at once, at most 1."""
        all_s = self.busy_s + self._sum("idle_s")
        return min(1.0, self.busy_s / all_s) if all_s else 0.0

    @property
    def opening_s(self) -> float:
        """How much longer their first batches took than others, in seconds: their datasets may have opened files."""
        first_s, count = self._sum("first_s"), sum(worker.batches > 0 for worker in self.each)
        later = self.batches - count
        return max(0.0, first_s - count * (self.busy_s - first_s) / later) if later else 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waited for what.

    Attributes:
        consumer: How long the consumer waited for each batch after the first.
        sampler: The part of that in which keys were waited for: the sampler was read in the meantime, or the place that
            samples come from, a stream or a feed, had none yet.
        batch: How long each batch waited for the consumer, once it was its turn.
        window: Batches that are being made or waiting at a time: ``prefetch_factor * num_workers``.
        ahead: Batches that were being made or waiting when the consumer came, on average; more than `window` where
            workers ran ahead.
        ready: Batches that lay ready when the consumer came, on average.
    """

    consumer: Timing
    sampler: Timing
    batch: Timing
    window: int
    ahead: float
    ready: float


@dataclass(frozen=True, slots=True)
class Stages:
    """How long each stage of a batch took.

    Attributes:
        queue: In the worker's queue, behind other batches.
        fetch: In the dataset's ``__getitem__`` or iterator.
        collate: In ``collate_fn``.
        encode: Making it ready to be sent: nothing for tensors and arrays in shared memory, pickling for the rest.
        work: The three stages before, together.
        transfer: From the worker to this process, reading included.
        decode: The part of `transfer` that this process spent on reading.
        pin: Copying into page-locked memory, on a side thread.
        order: Waiting for an earlier batch, once it was there.
    """

    queue: Timing
    fetch: Timing
    collate: Timing
    encode: Timing
    work: Timing
    transfer: Timing
    decode: Timing
    pin: Timing
    order: Timing

    def __iter__(self) -> Iterator[tuple[str, Timing]]:
        return ((each.name, getattr(self, each.name)) for each in fields(self))
