"""The samples of a plain map-style dataset, several at once, on threads: for calls that block.

    add ──> queue of samples, in order ──> up to `concurrency` threads, each one sample at a time
                                              └── the last sample of a job, or a bad one ──> the loop: finished(job)

The loop has nothing to do with single samples: a thread takes the next one itself. A thread that hangs holds one
sample, and so one batch. See :mod:`asyncloader.worker.overlap` for the contract. What a thread is at cannot be
cancelled; the other samples of a job that was dropped are passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.messages.modes import Modes
from asyncloader.messages.origin import Origin
from asyncloader.protocols import has_samples
from asyncloader.seeding import sample_context
from asyncloader.seeding.seeder import Seeder
from asyncloader.stack_text import stack_of
from asyncloader.worker import threads
from asyncloader.worker.fetch import settle
from asyncloader.worker.gather import WholeBatches
from asyncloader.worker.overlap import Base, Job


class ThreadFetcher(Base):
    """Samples on threads of their own, started as they are needed."""

    def __init__(
        self,
        dataset: Any,
        batches: WholeBatches,
        origin: Origin | None,
        seeder: Seeder,
        auto_collation: bool,
        concurrency: int,
        *rest: Any,
    ) -> None:
        super().__init__(seeder, auto_collation, concurrency, *rest)
        self._dataset = dataset
        self._batches = batches
        self._is_filling = False
        self._most = concurrency
        self._whole = getattr(dataset, "__getitems__", None) if auto_collation and not batches.by_sample else None
        self._modes = Modes.of_this_thread()
        self._origin = origin
        self._samples: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()  # None ends a thread
        self._at: dict[int, tuple[Job, int]] = {}  # by thread, what it is at
        self._threads: list[threading.Thread] = []
        self._num_running = 0
        self._thread_ended = asyncio.Event()

    def drop(self) -> None:
        """Forget all jobs; threads end after the sample that each is at."""
        super().drop()
        for _ in self._threads:
            self._samples.put(None)

    async def aclose(self) -> None:
        """Drop everything, and wait until the threads have ended."""
        self.drop()
        while self._num_running:
            self._thread_ended.clear()
            await self._thread_ended.wait()
        for thread in self._threads:
            thread.join()  # it has only to return

    def where(self, seq: int) -> str:
        """Tell where the threads are that have samples of a job."""
        words = super().where(seq)
        frames = sys._current_frames()
        for ident, (job, _) in tuple(self._at.items()):
            if job.seq == seq and not job.is_over and ident in frames:
                words += f"A sample is at:\n{stack_of(frames[ident])}"
        return words

    def _fill(self) -> None:
        """Put all samples into the queue: that there are no more threads bounds what is in flight."""
        if self._is_filling:  # jobs that are finished at once come here again
            return
        self._is_filling = True
        try:
            while self._waiting:
                self._begin(self._waiting.popleft())
            while self._samples.qsize() and len(self._threads) < self._most:
                self._start_thread()
        except RuntimeError as error:  # the system has no room for one more
            self._most = len(self._threads) or self._most
            if not self._threads:
                self._give_up(error)
        finally:
            self._is_filling = False

    def _give_up(self, error: RuntimeError) -> None:
        """The system allows not even one thread: that is what becomes of all jobs."""
        error.add_note(
            f"Samples are fetched on up to {self._most} threads (concurrency=), and the system allows not even one: "
            "see `ulimit -u` and, in containers, the limit of processes (pids.max)."
        )
        for job in tuple(self._jobs.values()):
            job.fatal = error
            self._conclude(job)

    def _begin(self, job: Job) -> None:
        """Put the samples of a job into the queue, but for rows in memory, where no thread would have to wait."""
        job.started = job.count
        began = perf_counter()
        if (rows := self._batches.find(job.keys)) is not None:
            job.began, job.samples, job.missing = began, rows, 0
            self._conclude(job)
            return
        for position in range(job.count) if self._whole is None else [sample_context.BATCH]:
            self._samples.put((job, position))

    def _start_thread(self) -> None:
        """Start one more thread.

        Raises:
            RuntimeError: if the system has no room for it.
        """
        run = partial(contextvars.copy_context().run, self._run)
        self._threads.append(threads.start(run, f"asyncloader sample thread {len(self._threads)}"))
        self._num_running += 1

    # -------------------------------------------------------------------------------------------------- a thread

    def _run(self) -> None:
        ident = threading.get_ident()
        if self._origin is not None:
            self._origin.adopt()
        try:
            with self._modes.active():
                while (work := self._samples.get()) is not None:
                    self._at[ident] = work
                    self._get(*work)
                    del self._at[ident], work
        except BaseException as error:  # what samples raise is in their jobs
            self._tell(self._loop.fail, error)
        self._tell(self._on_thread_end)

    def _get(self, job: Job, position: int) -> None:
        if job.is_over or (job.costs_at is not None and position > job.costs_at):
            return
        sample_context.enter(self._seeder, job.seq, position, job.first)
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
                for single in range(job.count):  # to find out which are good
                    self._samples.put((job, single))
                return
            if position == sample_context.BATCH or not self._may_go_on(error):
                self._tell(self._on_bad, job, position, error)
                return
            job.errors[position] = error
        # Each step is one operation on a list. Two threads may both see that the job is complete: it is told twice.
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

    def _on_thread_end(self) -> None:
        self._num_running -= 1
        self._thread_ended.set()

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
