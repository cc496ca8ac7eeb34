"""Count what one run over the data does, as it goes by.

    loop thread ── the beginning of a row ────────────┐
    consumers (under their lock) ── add ─── its end ──┴── many at once ──> timings ──┬── stats() ──> LoaderStats
    loop thread ── made ── records of a worker ────────── 256 at once ──> WorkerStats

What is known of a batch goes along with it, as clocks have told it, and becomes a row when a consumer takes the batch.
What follows from the numbers is worked out of hundreds of rows at once, with numpy. What workers have noted is counted
beside that: whoever decides about the number of workers asks for batches that nobody has taken yet.

Only consumers add rows, one at a time, and only the loop thread adds records. Any thread may ask for statistics,
without a lock: sums and what is not in them yet change together, in one assignment.

Clocks: `time.perf_counter` is one clock for all processes of a machine (CLOCK_MONOTONIC), so what a worker notes can be
compared with what is noted here.
"""

from __future__ import annotations

import logging
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.log import log
from asyncloader.machine import usable_cores
from asyncloader.observe.faults import Faults
from asyncloader.observe.figures import Stages, Waiting, Workers, WorkerStats
from asyncloader.observe.record import HERE, ROW, Record, whole_row
from asyncloader.observe.stalls import stalled_s
from asyncloader.observe.stats import LoaderStats
from asyncloader.observe.timing import Timing
from asyncloader.observe.trace import Trace

_MOST_ROWS = 256
_LOOK_EVERY_S = 0.02
_STALLS_EVERY_S = 0.1  # to ask takes up to 100 us
_LATE = ("consumer", "sampler", "batch", "training")  # for the first batch nobody trains yet: it waits for the start


def _columns(numbers: Iterable[NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Return durations, and other numbers, of batches, of the columns of their rows.

    A consumer that has to wait waits for the keys until the ticket is sent; after the batch has come, it reads further.
    What this process makes itself is pinned before it is there, and its CPU time is not told apart from training.
    """
    row = SimpleNamespace(**dict(zip((*ROW, "idle_from"), numbers, strict=True)))
    is_here = row.worker < 0
    work = np.where(is_here, row.read_at - row.began, row.fetch_s + row.collate_s + row.encode_s)
    return {
        "samples": row.samples,
        "bytes": np.maximum(row.nbytes, 0),  # less than 0 where nobody knows
        "ahead": row.ahead,
        "lay_ready": row.lay_ready,
        "queue": row.began - row.sent_at,
        "fetch": work - row.collate_s - row.encode_s,
        "collate": row.collate_s,
        "encode": row.encode_s,
        "work": work,
        "transfer": row.read_at - row.began - work,
        "decode": row.read_at - row.arrived_at,
        "pin": row.pin_s,
        "order": row.ready_at - row.made_at,
        "consumer": row.taken_at - row.asked_at,
        "sampler": np.clip(row.sent_at - row.asked_at, 0.0, row.came_at - row.asked_at) + row.taken_at - row.came_at,
        "batch": row.came_at - row.ready_at,
        "training": row.asked_at - row.idle_from,
    }


def _plus(timings: dict[str, Timing], idle_from: float, rows: array[float], width: int) -> dict[str, Timing]:
    """Return the timings with these rows of so many numbers; the batch before them was taken at ``idle_from``."""
    if not rows or not width:
        return timings
    late = _LATE if not timings else ()
    numbers = whole_row([*np.array(rows).reshape(-1, width).T])
    columns = _columns([*numbers, np.array([idle_from, *numbers[-1][:-1]])])
    return {name: timings.get(name, Timing()).plus(each[name in late :]) for name, each in columns.items()}


_MOST_EVENTS = 1000
_EVENTS_SHOWN = 12


class Meter:
    """The figures of one run.

    Args:
        epoch: Which run of the loader, from 0.
        num_workers: 0 if the consumer's process makes the batches.
        window: Batches being made or waiting at a time.
        faults: Faults that were handled in this run.
        trace: Where a timeline is written.
        options: The facts that the verdict builds on: see `facts_of`.

    Attributes:
        story: The last events that the scheduler was told of. Written by the loop thread.
    """

    def __init__(
        self,
        epoch: int,
        num_workers: int,
        window: int,
        faults: Faults | None = None,
        trace: Trace | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.faults: Faults = faults or Faults()
        self.story: deque[Sequence[Any]] = deque(maxlen=_MOST_EVENTS)
        self._epoch = epoch
        self._num_workers = num_workers
        self._window = window
        self._options = options or {}
        self._trace = trace
        self._began = perf_counter()
        self._mark(f"epoch {epoch}", self._began)
        self._is_logged = False
        # Written by the loop thread.
        self._own: dict[int, tuple[WorkerStats, list[Record]]] = {}
        for worker in range(num_workers):
            self.made(worker, ())
        self._changes: dict[float, int] = {}
        self._renewals = 0
        # Written by consumers, one at a time.
        # Of the batches so far: timings, when the last batch in them was taken, and rows of those that are not in them.
        # In an array: as tuples they pushed code and data of the next batch out of the processor's cache.
        self._state: tuple[dict[str, Timing], float, array[float]] = ({}, 0.0, array("d"))
        self._width = 0  # of a row; known when there is one
        self._look_at = 0.0
        self._first_at = 0.0
        self._first_cpu_s = 0.0
        self._last_cpu_s = 0.0
        self._first_stalled_s = 0.0
        self._last_stalled_s = 0.0
        self._stalls_due_at = 0.0

    @property
    def taken_at(self) -> float:
        """When a batch was taken last; 0.0 before the first one."""
        _, before, rows = self._state
        return rows[-1] if rows else before

    def _mark(self, text: str, at: float) -> None:
        if self._trace is not None:
            self._trace.mark(text, at)

    def _timings(self) -> defaultdict[str, Timing]:
        timings, before, rows = self._state
        return defaultdict(Timing, _plus(timings, before, rows[:], self._width))

    # ------------------------------------------------------------------------------------------- loop thread

    def made(self, worker: int, records: Sequence[Record]) -> None:
        """Count what a worker has noted about batches that it has made, which have just come."""
        stats, news = self._own.get(worker) or (WorkerStats(worker), [])
        news += records
        if len(news) >= _MOST_ROWS or worker not in self._own:
            self._own[worker] = stats.plus(news), []

    def resized(self, num_workers: int, window: int) -> None:
        """Note that a worker has come or gone: so many take batches now."""
        now, before = perf_counter(), self._num_workers
        self._num_workers, self._window = num_workers, window
        if num_workers == before:
            return
        self._changes[now - self._began] = num_workers
        self._mark(f"{num_workers} workers", now)
        log.info("epoch %d: %d workers, after %d", self._epoch, num_workers, before)

    def renewed(self, worker: int) -> None:
        """Note that another process has taken the place of a worker."""
        self._renewals += 1
        stats, news = self._own.get(worker) or (WorkerStats(worker), [])
        self._own[worker] = replace(stats.plus(news), private_bytes=0), []
        self._mark(f"worker {worker} renewed", perf_counter())

    # --------------------------------------------------------------------------------------------- consumers

    def add(self, row: list[float]) -> None:
        """Count a batch that a consumer takes.

        Args:
            row: What `ROW` names; or, of a batch that this process has made itself, and pinned if it is to be, `HERE`.
        """
        self._state[2].fromlist(row)
        if row[-1] > self._look_at:
            self._look(row)

    def _look(self, row: list[float]) -> None:
        """Do what would take longer than counting a batch, if it were done for each."""
        (timings, before, rows), now, self._width = self._state, row[-1], len(row)
        self._last_cpu_s = process_time()
        if len(row) == len(HERE) and now > self._stalls_due_at:
            self._last_stalled_s, self._stalls_due_at = stalled_s(), now + _STALLS_EVERY_S
        if not self._first_at:
            self._first_at, self._first_cpu_s = now, self._last_cpu_s
            self._first_stalled_s = self._last_stalled_s
        if self._trace is None:
            self._look_at = now + min(_LOOK_EVERY_S, 0.002 + 0.01 * (now - self._began))
        else:
            idle_from = rows[-len(row) - 1] if len(rows) > len(row) else before
            self._trace.note(self._epoch, [*whole_row(row), idle_from])
            if self._trace.is_due:
                self._trace.write()
        if len(rows) >= _MOST_ROWS * len(row):
            self._state = _plus(timings, before, rows, len(row)), now, array("d")

    def log_summary(self) -> None:
        """Say in the log, once, how the run went: everything was taken."""
        if self._is_logged:
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

    def last_events(self) -> str:
        """Return the end of the story, for a message."""
        return "; ".join(" ".join(map(str, event)) for event in [*self.story.copy()][-_EVENTS_SHOWN:])

    def stats(self, *, story: bool = False) -> LoaderStats:
        """Return the figures so far, and the story if it is asked for."""
        found = self._timings()
        count = found["work"].count
        each = tuple(stats.plus(news[:]) for stats, news in self._own.copy().values())
        cpu_s, main_cpu_s = sum(worker.cpu_s for worker in each), self._last_cpu_s - self._first_cpu_s
        return LoaderStats(
            epoch=self._epoch,
            num_workers=self._num_workers,
            cores=usable_cores(),
            batches=count,
            samples=round(found["samples"].total_s),
            bytes=round(found["bytes"].total_s),
            elapsed_s=self.taken_at - self._began if count else 0.0,
            first_batch_s=max(0.0, self._first_at - self._began),  # another thread may be at the first one
            training_s=found["training"].total_s,
            main_cpu_s=max(0.0, main_cpu_s - cpu_s * bool(self._options.get("in_process"))),
            waiting=Waiting(
                consumer=found["consumer"],
                sampler=found["sampler"],
                batch=found["batch"],
                window=self._window,
                ahead=found["ahead"].mean_s,
                ready=found["lay_ready"].mean_s,
            ),
            stages=Stages(**{field.name: found[field.name] for field in fields(Stages)}),
            workers=Workers(
                each,
                cpu_s,
                sum(worker.stalled_s for worker in each) + self._last_stalled_s - self._first_stalled_s,
                dict(self._changes),
                self._renewals,
            ),
            faults=self.faults.copy(),
            options=self._options,
            story=tuple(self.story.copy()) if story else (),
        )
