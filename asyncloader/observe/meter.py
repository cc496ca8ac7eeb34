"""Count what one run over the data does, as it goes by.

    loop thread ── came, pinned, failed ──┐
    consumers (under their lock) ── took ─┴──> Meter ── stats() in any thread ──> LoaderStats

Each side has numbers of its own, so nothing is locked. A batch costs 2 to 4 us here: one that a worker made, and one
that this process made itself, which is counted when it is taken.

Clocks: `time.perf_counter` is one clock for all processes of a machine (CLOCK_MONOTONIC), so what a worker notes can be
compared with what is noted here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from time import perf_counter, process_time
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncloader.machine import usable_cores
from asyncloader.observe import trace as timeline
from asyncloader.observe.faults import Faults
from asyncloader.observe.figures import Change, Load, Stages, WorkerStats
from asyncloader.observe.record import Record
from asyncloader.observe.stats import LoaderStats
from asyncloader.observe.tally import Tally, Timing
from asyncloader.observe.trace import Trace
from asyncloader.observe.traffic import Traffic

log = logging.getLogger("asyncloader")

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long

_MADE: Final = ("queue", "fetch", "collate", "encode", "transfer", "decode", "work")
_TAKEN: Final = ("used", "lay_ready", "waited", "ready", "order", "training")
_HERE: Final = ("samples", "stalled", "lay_ready", "fetch", "collate", "work", "waited", "ready", "training")
"""The columns where this process makes the batches, in place of the others. Of both, those from "waited" on are counted
after the first batch."""


def _columns_here(rows: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Return the columns of `_HERE`, of rows as `Meter.took_here` adds them."""
    samples, stalled, lay_ready, began, collate, made_at, asked_at, now, idle_from = rows
    work, waited, ready, training = made_at - began, now - asked_at, now - made_at, asked_at - idle_from
    return [samples, stalled, lay_ready, work - collate, collate, work, waited, ready, training]


class Counted(NamedTuple):
    """The figures of a ticket whose batch has been made; ``times`` are the seconds of each of `_MADE`."""

    samples: int
    nbytes: int
    times: list[float]


class BatchTimes:
    """The way of one batch through this process: its number, when it was there, when it was its turn."""

    __slots__ = ("batch", "made_at", "ready_at")

    def __init__(self, batch: int, made_at: float) -> None:
        self.batch = batch
        self.made_at = made_at
        self.ready_at = made_at


class Meter:
    """The figures of one run.

    Args:
        epoch: Which run of the loader, from 0.
        num_workers: 0 if the consumer's process makes the batches.
        window: Batches being made or waiting at a time.
        faults: Faults that were handled in this run.
        trace: Where a timeline is written.
        traffic: Counts what comes from other machines.
        loader: The number of the loader in the timeline.
        options: Options of the loader that the verdict builds on.

    Attributes:
        held_back: Batches that were taken, and are held until ranks have agreed on a step for them.
    """

    def __init__(
        self,
        epoch: int,
        num_workers: int,
        window: int,
        faults: Faults | None = None,
        trace: Trace | None = None,
        traffic: Traffic | None = None,
        loader: int = 0,
        **options: Any,
    ) -> None:
        self.faults = faults or Faults()
        self._epoch = epoch
        self._num_workers = num_workers
        self._is_here = num_workers == 0
        self._window = window
        self._options = options
        self._trace = trace
        self._loader = loader
        self._traffic = traffic or Traffic()
        self._received_before = self._traffic.received
        self._note: Callable[..., None] = _not_noted if trace is None else trace.note
        self._began = perf_counter()
        self._note(timeline.epoch, self._began, epoch)
        self._is_logged = False
        # Written by the loop thread.
        self._made = Tally(len(_MADE))
        self._here = Tally(len(_HERE), late=3, columns=_columns_here)  # in place of the others; written by consumers
        self._pinned = Tally(1)
        self._own = {worker: WorkerStats(worker) for worker in range(num_workers)}
        self._first_bytes: dict[int, int] = {}  # by worker, the memory that it had to itself at the first look
        self._left: list[WorkerStats] = []  # whose ids are others' by now
        self._changes: list[Change] = []
        self._renewals = 0
        self._cpu_s = self._remote_cpu_s = 0.0
        self._stalled_s = 0.0
        self._samples = 0
        self._bytes = 0
        self._errors = 0
        # Written by consumers, one at a time.
        self._taken = Tally(len(_TAKEN), late=4)
        self._taken_count = 0
        self._first_at = 0.0
        self._last_at = self._began
        self._first_cpu_s = 0.0
        self._last_cpu_s = 0.0
        self._cpu_due_at = 0.0  # a system call for each batch would take as long as counting it otherwise
        self._idle_from = 0.0  # since when the consumer trains: it has its batch, and waits for no other rank
        self._ranks_s = 0.0
        self._ranks_until = 0.0  # what that was when a batch was taken last
        self.held_back = 0

    # ------------------------------------------------------------------------------------------- loop thread

    def made(self, worker: int, record: Record, sent_at: float, arrived_at: float, nbytes: int, number: int) -> Counted:
        """Count what a worker did for a ticket, whose outcome has just been read; the batch is counted by `came`.

        Args:
            worker: The id of the worker that made it.
            record: The worker's notes about it.
            sent_at: When its ticket was sent.
            arrived_at: When it began to be read.
            nbytes: Its size.
            number: The batch's number in the plan.
        """
        now = perf_counter()
        fetch, collate, encode, began = record.fetch_s, record.collate_s, record.encode_s, record.began
        work = fetch + collate + encode
        transfer = max(0.0, now - began - work)
        if (own := self._own.get(worker)) is None:
            own = self._own[worker] = WorkerStats(worker)
        if own.batches:  # its first wait was for the start
            own.idle_s += record.wait_s
        own.batches += 1
        own.busy_s += work
        if (private := record.private_bytes) != own.private_bytes:
            own.private_bytes = private
            own.grown_bytes = max(0, private - self._first_bytes.setdefault(worker, private))
            self._note(timeline.memory, now, worker, private)
        self._cpu_s += record.cpu_s
        self._stalled_s += record.stalled_s
        if own.node:
            self._remote_cpu_s += record.cpu_s + record.stalled_s
        if self._trace is not None:
            stages = (("fetch", fetch), ("collate", collate), ("encode", encode))
            self._note(timeline.batch, own.node, number, worker, sent_at, began, stages, arrived_at, now)
        times = [max(0.0, began - sent_at), fetch, collate, encode, transfer, now - arrived_at, work]
        return _new(Counted, (record.samples, nbytes, times))

    def came(self, number: int, made: Sequence[Counted]) -> BatchTimes:
        """Count a batch: the work of all its tickets, the first one's wait to be begun, the last one's way.

        Args:
            number: The number of the batch in the plan.
            made: The figures of its tickets, in the order of their samples.
        """
        samples, nbytes, row = made[0]
        if len(made) > 1:
            counts, sizes, times = zip(*made, strict=True)
            _, fetch, collate, encode, _, _, work = map(sum, zip(*times, strict=True))
            samples, nbytes = sum(counts), sum(sizes)
            row = [row[0], fetch, collate, encode, times[-1][4], times[-1][5], work]
        self._made.add(row)
        self._samples += samples
        self._bytes += nbytes
        return BatchTimes(number, perf_counter())

    def pinned(self, times: BatchTimes, seconds: float) -> None:
        """Count a copy into page-locked memory, which has just been made."""
        self._pinned.add([seconds])
        times.made_at = times.ready_at = perf_counter()
        self._note(timeline.pinned, times.batch, times.ready_at, seconds)

    def resized(self, num_workers: int, window: int) -> None:
        """Note that a worker has come or gone: so many take batches now."""
        now, before = perf_counter(), self._num_workers
        self._num_workers, self._window = num_workers, window
        if num_workers == before:
            return
        self._changes.append(Change(now - self._began, num_workers))
        self._note(timeline.workers, now, num_workers)
        log.info("epoch %d: %d workers, after %d", self._epoch, num_workers, before)

    def renewed(self, worker: int) -> None:
        """Note that another process has taken the place of a worker."""
        self._renewals += 1
        self._first_bytes.pop(worker, None)
        if (own := self._own.get(worker)) is not None:
            own.private_bytes = own.grown_bytes = 0
        self._note(timeline.renewed, perf_counter(), worker)

    def private_bytes(self) -> dict[int, int]:
        """Return, by worker, what it has to itself, as far as that is known and on this machine."""
        return {worker: own.private_bytes for worker, own in self._own.items() if own.private_bytes and not own.node}

    def joined(self, worker: int, node: str) -> None:
        """Note on which machine a worker is that has come: "" for this one. Its id may have been another's."""
        own = self._own.get(worker) or WorkerStats(worker)
        if own.node != node:
            if own.batches:
                self._left.append(own)
            self._first_bytes.pop(worker, None)
            self._own[worker] = WorkerStats(worker, node=node)

    def load(self, now: float, num_workers: int) -> Load:
        """Return what the run has come to, for who decides about the number of workers. 0.1 ms."""
        made, taken = self._made.take().all, self._taken.take().all
        waited_s, training_s = (float(taken.sums[_TAKEN.index(name)]) for name in ("waited", "training"))
        worker_cpu_s = self._cpu_s + self._stalled_s
        main_cpu_s = self._last_cpu_s - self._first_cpu_s
        if self._options.get("in_process"):
            main_cpu_s = max(0.0, main_cpu_s - self._cpu_s)
        work_s = float(made.sums[-1])
        return Load(now, num_workers, taken.rows, waited_s, training_s, made.rows, work_s, worker_cpu_s, main_cpu_s)

    def slowest_s(self) -> float:
        """Return the work of the slowest batch so far, in seconds. 0.1 ms."""
        return float(self._made.take().all.longest[-1])

    def failed(self) -> None:
        """Count an exception that is handed over in place of a batch."""
        self._errors += 1

    # --------------------------------------------------------------------------------------------- consumers

    def took(self, asked_at: float, times: BatchTimes, used: int, ready: int) -> None:
        """Count a batch that a consumer takes.

        Args:
            asked_at: Since when the consumer waited for it, 0.0 if it did not.
            times: The batch's own.
            used: Batches being made or waiting.
            ready: Batches that lay ready.
        """
        now = perf_counter()
        asked_at = asked_at or now
        ready_at, made_at = times.ready_at, times.made_at
        self._taken.add([used, ready, now - asked_at, now - ready_at, ready_at - made_at, asked_at - self._idle_from])
        self._count_taken(times.batch, asked_at, now, ready)

    def took_here(self, asked_at: float, record: Record, made_at: float, ready: int) -> None:
        """Count a batch that this process has made itself, and pinned if it is to be, and that a consumer takes."""
        now = perf_counter()
        samples, began, collate_s, stalled_s = record.samples, record.began, record.collate_s, record.stalled_s
        self._here.add([samples, stalled_s, ready, began, collate_s, made_at, asked_at, now, self._idle_from])
        if self._trace is not None:
            stages = (("fetch", made_at - began - collate_s), ("collate", collate_s))
            self._note(timeline.batch, "", record.ticket, -1, 0.0, began, stages, 0.0, now)
        self._count_taken(record.ticket, asked_at, now, ready)

    def _count_taken(self, batch: int, asked_at: float, now: float, ready: int) -> None:
        if now > self._cpu_due_at:
            self._last_cpu_s = process_time()
            self._cpu_due_at = now + 0.001 + 0.01 * (now - self._began)
        if not self._taken_count:
            self._first_at, self._first_cpu_s = now, self._last_cpu_s
        if self._trace is not None:
            last_at = self._last_at if self._taken_count else 0.0
            waited_from = asked_at if asked_at < now else 0.0
            self._note(timeline.taken, batch, last_at, waited_from, now, ready, self._loader, self._epoch)
            if self._trace.is_due:
                self._trace.write()
        self._last_at = self._idle_from = now
        self._ranks_until = self._ranks_s
        self._taken_count += 1

    def waited_for_ranks(self, seconds: float) -> None:
        """Note that a consumer has waited for other ranks: that is not training."""
        if self._taken_count:
            self._ranks_s += seconds
            self._idle_from += seconds

    def log_summary(self, *, is_over: bool = False) -> None:
        """Say in the log, once, how the run went: everything was taken, and nothing is held back, or never given."""
        if self._is_logged or (self.held_back and not is_over):
            return
        self._is_logged = True
        self.write_trace()
        if log.isEnabledFor(logging.INFO):
            stats = self.stats()
            log.info(
                "epoch %d: %d batches in %.3g s (%.4g/s); %s",
                stats.epoch,
                stats.batches,
                stats.elapsed_s,
                stats.batches_per_s,
                stats.verdict,
                extra={"stats": stats.as_dict()},  # plain: formatters that write JSON write it down
            )

    # -------------------------------------------------------------------------------------------- any thread

    def write_trace(self) -> None:
        """See that the timeline is in its file so far."""
        if self._trace is not None:
            self._trace.write()

    def stats(self) -> LoaderStats:
        """Return the figures so far."""
        tallies = ((self._made, _MADE), (self._taken, _TAKEN), (self._pinned, ("pin",)))
        here = ((self._here, _HERE),) if self._is_here else ()
        timing: dict[str, Timing] = {}
        for tally, names in (*tallies, *here):
            snapshot = tally.take()
            timing.update((name, Timing(snapshot, column)) for column, name in enumerate(names))
        stages = Stages(**{name: each for name, each in timing.items() if name in Stages.__dataclass_fields__})
        workers = sorted((*self._own.copy().values(), *self._left), key=attrgetter("worker_id"))
        count = self._taken_count

        def total(name: str) -> float:
            return timing[name].total_s if name in timing else 0.0

        return LoaderStats(
            epoch=self._epoch,
            num_workers=self._num_workers,
            cores=usable_cores(),
            batches=count - self.held_back,
            samples=self._samples + round(total("samples")),
            bytes=self._bytes,
            elapsed_s=self._last_at - self._began,
            first_batch_s=self._first_at - self._began if count else 0.0,
            training_s=total("training"),
            waited=timing["waited"],
            ready=timing["ready"],
            work=timing["work"],
            stages=stages,
            workers=tuple(map(copy.copy, workers)),
            worker_cpu_s=self._cpu_s,
            worker_stalled_s=self._stalled_s + total("stalled"),
            remote_cpu_s=self._remote_cpu_s,
            received=self._traffic.received.since(self._received_before),
            main_cpu_s=self._last_cpu_s - self._first_cpu_s,
            window=self._window,
            window_used=total("used") / max(1, count),
            window_ready=total("lay_ready") / max(1, count),
            errors=self._errors,
            **self.faults.figures(),
            changes=tuple(self._changes),
            renewals=self._renewals,
            options=self._options,
            ranks_s=self._ranks_until,
        )


def _not_noted(*values: Any) -> None:
    """Note nothing: there is no timeline."""
