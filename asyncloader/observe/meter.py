"""Count what one run over the data does, as it goes by.

    loop thread ── made, pinned ──────────┐
    consumers (under their lock) ── took ─┴──> Meter ── stats() in any thread ──> LoaderStats

Each side has numbers of its own, so nothing is locked. A batch costs 2 to 4 us here: one that a worker made, and one
that this process made itself, which is counted when it is taken.

Clocks: `time.perf_counter` is one clock for all processes of a machine (CLOCK_MONOTONIC), so what a worker notes can be
compared with what is noted here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import fields
from operator import attrgetter
from time import perf_counter, process_time
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncloader.machine import usable_cores
from asyncloader.observe import trace as timeline
from asyncloader.observe.faults import Faults
from asyncloader.observe.figures import Change, Load, Stages, Waiting, Workers, WorkerStats
from asyncloader.observe.record import Record
from asyncloader.observe.stats import LoaderStats
from asyncloader.observe.tally import Tally
from asyncloader.observe.trace import Trace

log = logging.getLogger("asyncloader")

Columns: TypeAlias = NDArray[np.float64] | list[NDArray[np.float64]]

# Rows are noted as clocks have told them. What follows from that is worked out of many rows at a time.


def _made_columns(rows: Columns) -> list[NDArray[np.float64]]:
    samples, nbytes, cpu, stalled, sent_at, began, fetch, collate, encode, arrived_at, now = rows
    work = fetch + collate + encode
    transfer = np.maximum(0.0, now - began - work)
    return [samples, nbytes, cpu, stalled, began - sent_at, fetch, collate, encode, work, transfer, now - arrived_at]


def _taken_columns(rows: Columns) -> list[NDArray[np.float64]]:
    """A consumer that has to wait waits for the keys until the ticket is sent; after it has come, it reads further."""
    ahead, lay_ready, asked_at, sent_at, ready_at, made_at, came_at, now, idle_from = rows
    sampler = np.clip(sent_at - asked_at, 0.0, came_at - asked_at) + now - came_at
    training = asked_at - idle_from
    return [ahead, lay_ready, ready_at - made_at, now - asked_at, sampler, came_at - ready_at, training]


def _here_columns(rows: Columns) -> list[NDArray[np.float64]]:
    samples, stalled, lay_ready, began, collate, made_at, asked_at, now, idle_from = rows
    work, sampler, training = made_at - began, np.maximum(0.0, began - asked_at), asked_at - idle_from
    return [
        samples,
        stalled,
        lay_ready,
        work - collate,
        collate,
        work,
        now - asked_at,
        sampler,
        now - made_at,
        training,
    ]


class BatchTimes:
    """The way of one batch through this process: its number, when its ticket was sent, when it was there, its turn."""

    __slots__ = ("batch", "made_at", "ready_at", "sent_at")

    def __init__(self, batch: int, sent_at: float, made_at: float) -> None:
        self.batch = batch
        self.sent_at = sent_at
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
        **options: Any,
    ) -> None:
        self.faults = faults or Faults()
        self._epoch = epoch
        self._num_workers = num_workers
        self._is_here = num_workers == 0
        self._window = window
        self._options = options
        self._trace = trace
        self._note: Callable[..., None] = _not_noted if trace is None else trace.note
        self._began = perf_counter()
        self._note(timeline.epoch, self._began, epoch)
        self._is_logged = False
        # Written by the loop thread.
        self._made = Tally(
            *("samples", "bytes", "cpu", "stalled"),
            *("queue", "fetch", "collate", "encode", "work", "transfer", "decode"),
            columns=_made_columns,
        )
        self._pinned = Tally("pin")
        self._own = {worker: WorkerStats(worker) for worker in range(num_workers)}
        self._changes: list[Change] = []
        self._renewals = 0
        # Written by consumers, one at a time. What waits, and training, is counted after the first batch.
        waits = ("consumer", "sampler", "batch", "training")
        self._taken = Tally("ahead", "lay_ready", "order", *waits, late=4, width=9, columns=_taken_columns)
        self._here = Tally(  # in place of the others
            *("samples", "stalled", "lay_ready", "fetch", "collate", "work", *waits),
            late=4,
            width=9,
            columns=_here_columns,
        )
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

    def made(
        self, worker: int, record: Record, sent_at: float, arrived_at: float, nbytes: int, number: int
    ) -> BatchTimes:
        """Count what a worker did for a ticket, whose outcome has just been read.

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
        cpu, stalled = record.cpu_s, record.stalled_s
        work = fetch + collate + encode
        if (own := self._own.get(worker)) is None:
            own = self._own[worker] = WorkerStats(worker)
        if own.batches:
            own.idle_s += record.wait_s
        else:  # it has waited for the start
            own.first_s = work
        own.batches += 1
        own.busy_s += work
        if (private := record.private_bytes) != own.private_bytes:
            own.private_bytes = private
            self._note(timeline.memory, now, worker, private)
        if self._trace is not None:
            stages = (("fetch", fetch), ("collate", collate), ("encode", encode))
            self._note(timeline.batch, number, worker, sent_at, began, stages, arrived_at, now)
        samples = record.samples
        self._made.add([samples, nbytes, cpu, stalled, sent_at, began, fetch, collate, encode, arrived_at, now])
        return BatchTimes(number, sent_at, now)

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
        if (own := self._own.get(worker)) is not None:
            own.private_bytes = 0
        self._note(timeline.renewed, perf_counter(), worker)

    def private_bytes(self) -> dict[int, int]:
        """Return, by worker, what it has to itself, as far as that is known."""
        return {worker: own.private_bytes for worker, own in self._own.items() if own.private_bytes}

    def load(self, now: float, num_workers: int) -> Load:
        """Return what the run has come to, for who decides about the number of workers. 0.1 ms."""
        made, taken = self._made.timings(), self._taken.timings()
        waited_s, training_s, work = taken["consumer"].total_s, taken["training"].total_s, made["work"]
        cpu_s, stalled_s = made["cpu"].total_s, made["stalled"].total_s
        main_cpu_s = self._last_cpu_s - self._first_cpu_s
        if self._options.get("in_process"):
            main_cpu_s = max(0.0, main_cpu_s - cpu_s)
        count, work_s = self._taken_count, work.total_s
        return Load(now, num_workers, count, waited_s, training_s, work.count, work_s, cpu_s + stalled_s, main_cpu_s)

    def slowest_s(self) -> float:
        """Return the work of the slowest batch so far, in seconds. 0.1 ms."""
        return self._made.timings()["work"].longest_s

    # --------------------------------------------------------------------------------------------- consumers

    def took(self, asked_at: float, came_at: float, times: BatchTimes, ahead: int, ready: int) -> None:
        """Count a batch that a consumer takes, which may have read the sampler on for it.

        Args:
            asked_at: Since when the consumer has waited for the batch; 0.0 if it lay ready.
            came_at: Since when it need not wait.
            times: The batch's own.
            ahead: Batches being made or waiting.
            ready: Batches that lay ready.
        """
        now, asked_at = perf_counter(), asked_at or came_at
        made_at, idle_from = times.made_at, self._idle_from
        self._taken.add([ahead, ready, asked_at, times.sent_at, times.ready_at, made_at, came_at, now, idle_from])
        self._count_taken(times.batch, asked_at, now, ready)

    def took_here(self, asked_at: float, record: Record, made_at: float, ready: int) -> None:
        """Count a batch that this process has made itself, and pinned if it is to be, and that a consumer takes."""
        now = perf_counter()
        samples, began, collate_s, stalled_s = record.samples, record.began, record.collate_s, record.stalled_s
        self._here.add([samples, stalled_s, ready, began, collate_s, made_at, asked_at, now, self._idle_from])
        if self._trace is not None:
            stages = (("fetch", made_at - began - collate_s), ("collate", collate_s))
            self._note(timeline.batch, record.ticket, -1, 0.0, began, stages, 0.0, now)
        self._count_taken(record.ticket, asked_at, now, ready)

    def _count_taken(self, batch: int, asked_at: float, now: float, ready: int) -> None:
        if now > self._cpu_due_at:
            self._last_cpu_s = process_time()
            self._cpu_due_at = now + 0.001 + 0.01 * (now - self._began)
        if not self._taken_count:
            self._first_at, self._first_cpu_s = now, self._last_cpu_s
        if self._trace is not None:
            last_at = self._last_at if self._taken_count else 0.0
            self._note(timeline.taken, batch, last_at, asked_at, now, ready, self._epoch)
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
        found = {**self._made.timings(), **self._pinned.timings(), **self._taken.timings()}
        if self._is_here:
            found |= self._here.timings()
        total = {name: timing.total_s for name, timing in found.items()}
        count = self._taken_count
        return LoaderStats(
            epoch=self._epoch,
            num_workers=self._num_workers,
            cores=usable_cores(),
            batches=count - self.held_back,
            samples=round(total["samples"]),
            bytes=round(total["bytes"]),
            elapsed_s=self._last_at - self._began,
            first_batch_s=self._first_at - self._began if count else 0.0,
            training_s=total["training"],
            main_cpu_s=self._last_cpu_s - self._first_cpu_s,
            waiting=Waiting(
                consumer=found["consumer"],
                sampler=found["sampler"],
                batch=found["batch"],
                window=self._window,
                ahead=total["ahead"] / max(1, count),
                ready=total["lay_ready"] / max(1, count),
            ),
            stages=Stages(**{field.name: found[field.name] for field in fields(Stages)}),
            workers=Workers(
                tuple(map(copy, sorted(self._own.copy().values(), key=attrgetter("worker_id")))),
                total["cpu"],
                total["stalled"],
                tuple(self._changes),
                self._renewals,
            ),
            faults=self.faults.copy(),
            options=self._options,
            ranks_s=self._ranks_until,
        )


def _not_noted(*values: Any) -> None:
    """Note nothing: there is no timeline."""
