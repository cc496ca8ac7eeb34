"""The samples of a plain map-style dataset, several at once, on threads: for calls that block.

    add ──> samples to do, in order ──> up to k lanes (threads), each one sample at a time
                                           └── the last sample of a job, or a bad one ──> the loop: finished(job)

The loop has nothing to do with single samples: a lane takes the next one itself. A lane that hangs holds one sample,
and so one batch. See :mod:`asyncloader.workers.child.overlap` for the contract; what a lane is at cannot be
cancelled, but what a dropped job still had to do is passed over.

Threads that do not wait for anything only get into each other's way: for samples that take 14 us, 16 of them took 2.4
times as long as one. So there is one lane, or one for each core that the worker may count on, until lanes are seen to
wait: every 5 ms their CPU time is looked at. While they use less than half a core twice as many are woken, as long as
there is something to do; one goes back to sleep while they use as much as they can get.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.machine import usable_cores
from asyncloader.protocols import has_samples
from asyncloader.seeding import sample_context
from asyncloader.workers.child import threads
from asyncloader.workers.child.fetch import settle
from asyncloader.workers.child.gather import WholeBatches
from asyncloader.workers.child.overlap import Base, Job
from asyncloader.workers.protocol.modes import Modes
from asyncloader.workers.protocol.origin import Origin

_TICK_S = 0.005
_WAITING = 0.5  # cores: lanes that use less in all are waiting for something
_COMPUTING = 0.9  # for each core of the worker's share: more is not to be had


class ThreadFetcher(Base):
    """Samples on threads of their own, started as they are needed."""

    def __init__(
        self,
        dataset: Any,
        batches: WholeBatches,
        num_workers: int,
        origin: Origin | None,
        key: tuple[int, int, int],
        auto_collation: bool,
        concurrency: int,
        *rest: Any,
    ) -> None:
        super().__init__(key, auto_collation, concurrency, *rest)
        self._dataset = dataset
        self._batches = batches
        self._is_filling = False
        self._most = concurrency
        self._cores = max(1, min(concurrency, usable_cores() // max(1, num_workers)))
        self._whole = getattr(dataset, "__getitems__", None) if auto_collation and not batches.by_sample else None
        self._modes = Modes.of_this_thread()
        self._origin = None if num_workers else origin  # a thread of a worker inherits that of the worker
        self._to_do: deque[tuple[Job, int]] = deque()
        self._at: dict[int, tuple[Job, int]] = {}  # by thread, what it is at
        self._tick: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._cpu_s = 0.0  # of all lanes, then
        self._lock = threading.Lock()  # held to change the next two
        self._num_awake = 0
        self._num_to_sleep = 0
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()  # wake a lane each; False ends it
        self._lanes: list[threading.Thread] = []
        self._clocks: list[int] = []
        self._num_running = 0
        self._lane_ended = asyncio.Event()

    def drop(self) -> None:
        """Forget all jobs; lanes end after the sample that each is at."""
        super().drop()
        self._to_do.clear()
        if self._tick is not None:
            self._tick.cancel()
        for _ in self._lanes:
            self._tokens.put(False)

    async def aclose(self) -> None:
        """Drop everything, and wait until the lanes have ended."""
        self.drop()
        while self._num_running:
            self._lane_ended.clear()
            await self._lane_ended.wait()
        for lane in self._lanes:
            lane.join()  # it has only to return

    def where(self, seq: int) -> str:
        """Tell where the lanes are that have samples of a job."""
        words = super().where(seq)
        frames = sys._current_frames()
        for ident, (job, _) in tuple(self._at.items()):
            if job.seq == seq and not job.is_over and ident in frames:
                words += f"A sample is at:\n{''.join(traceback.format_stack(frames[ident]))}"
        return words

    def _fill(self) -> None:
        """Let the lanes know of all samples: that there are no more lanes bounds what is in flight."""
        if not self._waiting or self._is_filling:
            return
        self._is_filling = True  # jobs that are finished at once come here again
        try:
            while self._waiting:
                self._begin(self._waiting.popleft())
        finally:
            self._is_filling = False
        if not self._to_do:
            return
        try:
            with self._lock:
                if not self._num_awake:
                    self._wake_lane()
        except RuntimeError as error:
            self._give_up(error)
            return
        if self._tick is None:
            self._look()

    def _give_up(self, error: RuntimeError) -> None:
        """The system allows not even one thread: that is what becomes of all jobs."""
        error.add_note(
            f"Samples are fetched on up to {self._most} threads (concurrency=), and the system allows not even one: "
            "see `ulimit -u` and, in containers, the limit of processes (pids.max)."
        )
        jobs = list(dict.fromkeys(job for job, _ in self._to_do))
        self._to_do.clear()
        for job in jobs:
            if not job.is_over:
                job.fatal = error
                self._conclude(job)

    def _begin(self, job: Job) -> None:
        """Let the lanes know of the samples of a job, but for rows in memory, where no lane would have to wait."""
        job.started = job.count
        began = perf_counter()
        if (rows := self._batches.find(job.keys)) is not None:
            job.began, job.samples, job.missing = began, rows, 0
            self._conclude(job)
            return
        positions = range(job.count) if self._whole is None else [sample_context.BATCH]
        self._to_do.extend((job, position) for position in positions)

    def _wake_lane(self) -> None:
        """Let one more lane work. With the lock held. Where the system has no room for it, those that are there do all.

        Raises:
            RuntimeError: if there is none, and no room for the first.
        """
        if self._num_awake == len(self._lanes):
            context = contextvars.copy_context()
            name = f"asyncloader lane {len(self._lanes)}"
            try:
                self._lanes.append(threads.start(partial(context.run, self._run), name))
            except RuntimeError:
                if not self._lanes:
                    raise
                self._most = len(self._lanes)
                return
            self._num_running += 1
        self._tokens.put(True)
        self._num_awake += 1

    def _look(self) -> None:
        """Begin to measure."""
        self._looked_at, self._cpu_s = perf_counter(), self._lanes_cpu_s()
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        """Wake lanes if those that are awake wait for something, or let one sleep if they get in each other's way."""
        self._tick = None
        if not self._to_do:
            return
        cores = (self._lanes_cpu_s() - self._cpu_s) / (perf_counter() - self._looked_at)
        with self._lock:
            if cores < _WAITING or self._num_awake < self._cores:
                self._num_to_sleep = 0
                for _ in range(min(max(1, self._num_awake), self._most - self._num_awake, len(self._to_do))):
                    self._wake_lane()
            elif cores > _COMPUTING * self._cores and self._num_awake > self._cores:
                self._num_to_sleep = 1
        self._look()

    def _lanes_cpu_s(self) -> float:
        return sum(time.clock_gettime(clock) for clock in tuple(self._clocks))

    # ---------------------------------------------------------------------------------------------------- a lane

    def _run(self) -> None:
        ident = threading.get_ident()
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS, where all lanes are always awake
            self._clocks.append(time.pthread_getcpuclockid(ident))
        if self._origin is not None:
            self._origin.adopt()
        try:
            with self._modes.active():
                while self._tokens.get():
                    self._work(ident)
        except BaseException as error:  # what samples raise is in their jobs
            self._tell(self._loop.fail, error)
        self._tell(self._on_lane_end)

    def _work(self, ident: int) -> None:
        while (work := self._next()) is not None:
            job, position = work
            if not (job.is_over or (job.costs_at is not None and position > job.costs_at)):
                self._at[ident] = work
                self._get(job, position)
                del self._at[ident]
            del work, job

    def _next(self) -> tuple[Job, int] | None:
        """Take the next sample to do; None if there is none, or others are to do it: then the lane sleeps."""
        while True:
            with self._lock:
                if self._num_to_sleep and self._num_awake > 1:
                    self._num_to_sleep = 0
                    self._num_awake -= 1
                    return None
            try:
                return self._to_do.popleft()
            except IndexError:
                with self._lock:
                    if not self._to_do:
                        self._num_awake -= 1
                        return None

    def _get(self, job: Job, position: int) -> None:
        sample_context.enter(self._key, job.seq, position, job.first)
        if position <= 0:
            job.began = perf_counter()
        try:
            if position == sample_context.BATCH:
                self._get_whole(job)
            else:
                sample = self._dataset[job.keys[position] if self._auto_collation else job.keys]
                job.samples[position] = self._awaited(sample) if hasattr(type(sample), "__await__") else sample
        except BaseException as error:
            if position == sample_context.BATCH and self._may_go_on(error) and has_samples(self._dataset):
                self._to_do.extendleft((job, single) for single in reversed(range(job.count)))
                return
            if position == sample_context.BATCH or not self._may_go_on(error):
                self._tell(self._on_bad, job, position, error)
                return
            job.errors[position] = error
        # Each step is one operation on a list. Two lanes may both see that the job is complete: it is told twice.
        job.arrived.append(position)
        if position == sample_context.BATCH or len(job.arrived) == job.count:
            self._tell(self._on_complete, job)
        elif job.costs_at is not None:  # looked at after this one has arrived: `_on_bad` does it the other way round
            self._tell(self._conclude_if_decided, job)

    def _get_whole(self, job: Job) -> None:
        assert self._whole is not None
        job.samples = self._batches.ready(self._whole(job.keys), job.keys)

    def _awaited(self, sample: Any) -> Any:
        """Await a sample of a dataset that nobody could know to be async, on the loop."""
        return asyncio.run_coroutine_threadsafe(settle(sample), self._loop.loop).result()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    # -------------------------------------------------------------------------------------------------- the loop

    def _on_lane_end(self) -> None:
        self._num_running -= 1
        self._lane_ended.set()

    def _on_complete(self, job: Job) -> None:
        if not job.is_over:
            job.missing = 0
            self._conclude(job)

    def _on_bad(self, job: Job, position: int, error: BaseException) -> None:
        if job.is_over:
            return
        if position == sample_context.BATCH:
            job.fatal = error
        else:
            self._cost(job, position, error)
            job.errors[position] = error
        self._conclude_if_decided(job)

    def _conclude_if_decided(self, job: Job) -> None:
        if not job.is_over and self._is_decided(job):
            self._conclude(job)

    def _has_all_before(self, job: Job, position: int) -> bool:
        return sum(other < position for other in job.arrived) == position
