"""The figures of a run over the data: what the verdict is worked out from, and what statistics show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from asyncloader.observe.tally import Timing
from asyncloader.observe.traffic import Received


@dataclass(slots=True)
class WorkerStats:
    """The work of one worker. Statistics have copies, which do not change.

    Attributes:
        worker_id: From 0.
        batches: Batches that it made.
        busy_s: Seconds that it worked.
        idle_s: Seconds that it waited for something to do, its first ticket left aside.
        private_bytes: Memory that it has to itself, looked at about once a second; 0 if that is not known. Memory
            shared with this process or with other workers does not count: batches, the dataset of a forked worker.
        grown_bytes: How much more that is than it was at the first look in this run, or since the worker was renewed.
        node: The machine that it is on, by name; "" for this one.
    """

    worker_id: int
    batches: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    private_bytes: int = 0
    grown_bytes: int = 0
    node: str = ""

    @property
    def busy_share(self) -> float:
        """Share of its time that it worked; where it fetches several batches at once, at most 1."""
        total = self.busy_s + self.idle_s
        return min(1.0, self.busy_s / total) if total else 0.0


class Change(NamedTuple):
    """From then on there were so many workers.

    Attributes:
        at_s: Seconds since ``iter()``.
        num_workers: How many take batches.
    """

    at_s: float
    num_workers: int


class Load(NamedTuple):
    """Sums of a run from its beginning to one moment. Times in seconds.

    Attributes:
        at_s: When that is.
        num_workers: Workers that take tickets.
        taken: Batches that consumers have taken.
        waited_s: How long they waited for these.
        trained_s: How long they did not.
        made: Batches that workers have made.
        work_s: How long that took them.
        cpu_s: How long they had a core for it, or wanted one.
        main_cpu_s: How long this process had one.
    """

    at_s: float
    num_workers: int
    taken: int
    waited_s: float
    trained_s: float
    made: int
    work_s: float
    cpu_s: float
    main_cpu_s: float


@dataclass(frozen=True, slots=True)
class Stages:
    """How long each stage of a batch took.

    Attributes:
        queue: In the worker's queue, behind other batches.
        fetch: In the dataset's ``__getitem__`` or iterator.
        collate: In ``collate_fn``.
        encode: Making it ready to be sent: nothing for tensors and arrays in shared memory, pickling for the rest.
        transfer: From the worker to this process, reading included.
        decode: The part of `transfer` that this process spent on reading.
        pin: Copying into page-locked memory, on a side thread.
        order: Waiting for an earlier batch, once it was there.
    """

    queue: Timing
    fetch: Timing
    collate: Timing
    encode: Timing
    transfer: Timing
    decode: Timing
    pin: Timing
    order: Timing

    def __iter__(self) -> Iterator[tuple[str, Timing]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run over the data at one moment; :class:`asyncloader.LoaderStats` says what each figure is."""

    epoch: int
    num_workers: int
    cores: int
    batches: int
    samples: int
    bytes: int
    elapsed_s: float
    first_batch_s: float
    training_s: float
    waited: Timing
    ready: Timing
    stages: Stages
    work: Timing
    workers: tuple[WorkerStats, ...]
    worker_cpu_s: float
    worker_stalled_s: float
    remote_cpu_s: float
    received: Received
    main_cpu_s: float
    window: int
    window_used: float
    window_ready: float
    errors: int
    retries: int
    replacements: int
    timeouts: int
    bad_count: int
    bad_samples: tuple[Any, ...]
    left_out: tuple[Any, ...]
    changes: tuple[Change, ...]
    renewals: int
    options: dict[str, Any]
    ranks_s: float = 0.0

    @property
    def busy_share(self) -> float:
        """Share of the workers' time in which they worked."""
        busy_s, idle_s = (sum(getattr(worker, name) for worker in self.workers) for name in ("busy_s", "idle_s"))
        return min(1.0, busy_s / (busy_s + idle_s)) if busy_s + idle_s else 0.0

    @property
    def receiving_share(self) -> float:
        """Share of the time since the first batch in which one of other machines was on its way."""
        elapsed_s = self.elapsed_s - self.first_batch_s
        return min(1.0, self.received.seconds / elapsed_s) if elapsed_s > 0 else 0.0

    @property
    def waited_share(self) -> float:
        """Share of the time since the first batch in which the consumer waited; at most 1 with several consumers."""
        total = self.waited.total_s + self.training_s + self.ranks_s
        return self.waited.total_s / total if total else 0.0
