"""Samples of many tickets in flight at once, each batch finished as soon as its own samples are there.

    add(ticket, keys) ──> jobs in order ── a slot is free ──> in flight ── last sample of its job ──> finished(job)
                                            ^   (up to `concurrency` samples, of any number of jobs)  │
                                            └──────────────────── a slot is free again ───────────────┘

The contract, whatever gets the samples (tasks here, threads in :mod:`asyncloader.worker.thread_fetcher`, an iterator in
:mod:`asyncloader.worker.stream`):

- success: `finished` is called once for each job, with its samples in the order of its keys.
- failure: a sample that raises ends its own job, and touches no other. The samples after it are cancelled, and those
  before it waited for: if several samples cost the batch, the error of the first one in the batch is raised, as without
  overlap. Where bad samples are tolerated, all are waited for. An error that ends the worker is told at once.
- what comes of a position that is not in `Job.pending` any more is dropped.
- cancellation: `drop` cancels everything in flight, but lets a stream come to its next sample, or to its end;
  `finished` is not called for what was dropped.

All of it belongs to one loop thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.async_face import batch_method, resolved, sample_method
from asyncloader.loops import GuardedLoop
from asyncloader.protocols import has_samples
from asyncloader.seeding.sample_context import BATCH, Placed, SampleContext, enter
from asyncloader.seeding.switch import steps
from asyncloader.worker.batch_maker import BatchMaker
from asyncloader.worker.gather import WholeBatches
from asyncloader.worker.job import Job
from asyncloader.worker.stacks import await_stack

_TASKS_SHOWN = 3


class Overlap:
    """The base of all ways of overlapping: jobs, slots, and the settling of samples.

    Args:
        maker: What makes batches of the samples: it knows how they are fetched in this run.
        finished: Gets each job once.
        stop: Is given an exception of our own code: no sample can be answered for after that.
    """

    def __init__(
        self, maker: BatchMaker, finished: Callable[[Job], None], stop: Callable[[BaseException], None]
    ) -> None:
        self._spec, self._seeder, self._steps = maker.spec, maker.seeder, maker.switch
        self._ends = maker.host.ends
        self._finished = finished
        self._stop = stop
        self._name = type(self._spec.dataset).__name__
        self._auto_collation = self._spec.auto_collation
        self._free = self._spec.samples_at_once
        self._loop = GuardedLoop(asyncio.get_running_loop(), stop)
        self._waiting: deque[Job] = deque()  # with samples that were not asked for
        self._jobs: dict[int, Job] = {}
        self._cancelled: set[asyncio.Task[None]] = set()  # and not ended yet

    def __repr__(self) -> str:
        return f"<{type(self).__name__} jobs={list(self._jobs)} waiting={len(self._waiting)} free={self._free}>"

    @property
    def is_idle(self) -> bool:
        """Whether it has no job."""
        return not self._jobs

    def add(self, ticket: int, keys: Any, waited_s: float = 0.0) -> None:
        """Take another ticket, for which an idle worker had waited so long."""
        job = Job(ticket)
        job.waited_s = waited_s
        if type(keys) is Placed:
            keys, job.first = keys
        job.keys, job.count = keys, len(keys) if self._auto_collation else 1
        job.samples, job.errors, job.pending = [None] * job.count, {}, {}
        self._jobs[ticket] = job
        if job.count:
            self._waiting.append(job)
            self._fill()
        else:
            self._conclude(job)

    def drop(self) -> None:
        """Forget all jobs, and cancel what is in flight."""
        jobs, self._jobs = self._jobs, {}
        self._waiting.clear()
        for job in jobs.values():
            self._cancel(job)
            job.errors.clear()  # their tracebacks refer to frames that have the job

    async def aclose(self, *, runs_on: bool = False) -> None:
        """Drop everything, and wait until nothing runs any more.

        Args:
            runs_on: The dataset goes on from here in another run.
        """
        self.drop()
        while self._cancelled:
            await asyncio.wait(tuple(self._cancelled))

    def where(self, ticket: int) -> str:
        """Tell at which await the samples of a job are; "" if there is nothing to tell."""
        job = self._jobs.get(ticket)
        if job is None:
            return ""
        left = job.count - job.started
        missing = job.count if BATCH in job.pending else left + len(job.pending)
        words = f"{missing} of the {job.count} samples of the batch are not here yet.\n"
        if left:
            words += f"{left} of them were not asked for: all slots are taken by earlier samples.\n"
        stacks = [stack for task in tuple(job.pending.values()) if task is not None and (stack := await_stack(task))]
        return words + "".join(f"A sample is at:\n{stack}" for stack in list(dict.fromkeys(stacks))[:_TASKS_SHOWN])

    def _fill(self) -> None:
        """Ask for samples as long as there is a slot."""
        raise NotImplementedError

    def _spawn(self, job: Job, position: int, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine, name=f"{self._name}: batch {job.ticket}, sample {position}")
        job.pending[position] = task
        return task

    def _take(self, job: Job, position: int, sample: Any, error: BaseException | None = None) -> None:
        """Take what has become of a sample, or of all of them. Its slot is free again."""
        job.pending.pop(position, None)
        self._free += 1
        if error is None:
            if position == BATCH:
                job.samples = sample
            else:
                job.samples[position] = sample
        elif self._ends(error):
            self._stop(error)
            return
        elif position != BATCH and self._tolerates(error):
            job.errors[position] = error
        else:
            self._cost(job, position, error)
        if job.started == job.count and not job.pending:
            self._conclude(job)
        else:
            self._fill()

    def _tolerates(self, error: BaseException) -> bool:
        return self._spec.tolerates and isinstance(error, Exception)

    def _cost(self, job: Job, position: int, error: BaseException) -> None:
        """Note an error that costs the batch: only samples before it are wanted yet, which may have raised as well."""
        job.errors[position] = error
        job.fatal_at = min(job.fatal_at, position)
        self._leave_rest(job, position)

    def _leave_rest(self, job: Job, position: int) -> None:
        if job.started < job.count:
            self._waiting.remove(job)
            job.started = job.count
        self._cancel(job, position)

    def _conclude(self, job: Job) -> None:
        """Finish a job. The next samples are asked for first: they are on their way while the batch is collated."""
        del self._jobs[job.ticket]
        self._fill()
        self._finished(job)

    def _cancel(self, job: Job, after: int = BATCH - 1) -> None:
        """Cancel what is in flight of a job after a position. A slot is free again when its task has ended, not before.

        The error of a task that was cancelled before its first step refers to the frame that has the job: a job that
        referred to the task would keep both, and the dataset.
        """
        for position in [position for position in job.pending if position > after]:
            if (task := job.pending.pop(position)) is not None:
                task.cancel()
                self._cancelled.add(task)
                task.add_done_callback(partial(self._on_cancelled, job.count if position == BATCH else 1))

    def _on_cancelled(self, slots: int, task: asyncio.Task[None]) -> None:
        self._cancelled.discard(task)
        self._free += slots
        if not task.cancelled():
            task.exception()  # nobody wants it, and it should not be reported as lost
        self._fill()


class TaskFetcher(Overlap):
    """Samples of a map-style dataset, each in a task of its own, or all of a batch."""

    def __init__(self, dataset: Any, *run: Any) -> None:
        super().__init__(*run)
        self._dataset = dataset
        self._get_sample = sample_method(dataset)
        self._whole = WholeBatches(dataset, self._spec)
        self._get_samples: Callable[[Any], Any] | None = None
        if self._auto_collation and not self._whole.by_sample:
            self._get_samples = batch_method(dataset)
        self._is_filling = False

    def _fill(self) -> None:
        if self._is_filling:  # a job that is concluded at once comes here again
            return
        self._is_filling = True
        try:
            self._ask_for_samples()
        finally:
            self._is_filling = False

    def _ask_for_samples(self) -> None:
        while self._free > 0 and self._waiting:
            job = self._waiting[0]
            if not job.started:
                job.began = perf_counter()
            if self._get_samples is not None:
                # A batch in one call takes as many slots as samples; more than there are, if need be.
                self._waiting.popleft()
                job.started = job.count
                self._free -= job.count
                self._start(job, BATCH)
            else:
                position = job.started
                job.started += 1
                if job.started == job.count:
                    self._waiting.popleft()
                self._free -= 1
                self._start(job, position)

    def _start(self, job: Job, position: int) -> None:
        """Ask for a sample, or for all of them."""
        self._spawn(job, position, self._get(job, position))

    def _ask(self, job: Job, position: int) -> Any:
        """Ask the dataset for a sample, or for all of them. The result may have to be awaited."""
        if position == BATCH:
            assert self._get_samples is not None
            return self._get_samples(job.keys)
        return self._get_sample(job.keys[position] if self._auto_collation else job.keys)

    def _enter(self, job: Job, position: int) -> SampleContext:
        return enter(self._seeder, job.ticket, position, job.first, self._steps)

    async def _sample(self, job: Job, position: int) -> Any:
        sample = self._ask(job, position)
        if hasattr(type(sample), "__await__"):
            sample = await sample
        if position != BATCH:
            return sample
        if not self._whole.is_collated and any(hasattr(type(each), "__await__") for each in sample):
            return await asyncio.gather(*map(resolved, sample))
        return sample

    async def _get(self, job: Job, position: int) -> None:
        here = self._enter(job, position)
        sample: Any = None
        error: BaseException | None = None
        try:
            if self._steps.is_on:
                sample = await steps(self._steps, here, self._sample(job, position))
            elif position != BATCH:
                sample = self._ask(job, position)
                if hasattr(type(sample), "__await__"):
                    sample = await sample
            else:
                sample = await self._sample(job, position)
        except BaseException as raised:
            error = raised
        try:
            if position in job.pending:
                self._take(job, position, sample, error)
            elif isinstance(error, asyncio.CancelledError):  # ours, not to be swallowed; others are for nobody any more
                raise error
        finally:
            del job, sample, error  # a traceback refers to this frame

    def _take(self, job: Job, position: int, sample: Any, error: BaseException | None = None) -> None:
        if position == BATCH:
            if error is not None and self._tolerates(error) and has_samples(self._dataset):
                del job.pending[BATCH]
                for single in range(job.count):  # one by one, to find out which are good
                    self._start(job, single)
                self._fill()
                return
            self._free += job.count - 1
            if error is None:
                sample = self._whole.ready(sample, job.keys)
        super()._take(job, position, sample, error)
