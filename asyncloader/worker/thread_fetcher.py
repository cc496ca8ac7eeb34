"""The samples of a plain map-style dataset, several at once, on threads: for calls that block.

    add ──> queue of samples, in order ──> up to `concurrency` threads, each one sample at a time
                                              └── done: a deque, and one call to the loop for all that is in it

A thread takes its next sample from the queue by itself, whether or not the loop has its turn. A thread that hangs holds
one sample, and so one batch. See :mod:`asyncloader.worker.overlap` for the contract. A thread cannot be cancelled; the
samples of a job that was dropped are passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader import threads
from asyncloader.messages.modes import Modes
from asyncloader.stack_text import stack_of
from asyncloader.worker.fetch import refuse_awaitables
from asyncloader.worker.job import Job
from asyncloader.worker.overlap import TaskFetcher


class ThreadFetcher(TaskFetcher):
    """Samples on threads of their own, started as they are needed."""

    def __init__(self, dataset: Any, *run: Any) -> None:
        super().__init__(dataset, *run)
        self._most = self._free
        self._free = sys.maxsize  # all samples are in the queue: that there are no more threads bounds what is in work
        self._modes = Modes.of_this_thread()
        self._samples: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()  # None ends a thread
        self._at: dict[int, int] = {}  # by thread, the ticket that it is at
        self._threads: list[threading.Thread] = []
        self._done: deque[tuple[Job, int, Any, BaseException | None]] = deque()
        self._is_told = False  # the loop will look at what is done
        self._ended = asyncio.Semaphore(0)  # counts threads
        try:
            self._start_thread()
        except RuntimeError as error:
            error.add_note(
                "Samples are fetched on threads (concurrency=), and the system allows not even one: see `ulimit -u` "
                "and, in containers, the limit of processes (pids.max)."
            )
            raise

    def drop(self) -> None:
        """Forget all jobs; threads end after the sample that each is at."""
        super().drop()
        for _ in self._threads:
            self._samples.put(None)

    async def aclose(self, *, runs_on: bool = False) -> None:
        """Drop everything, and wait until the threads have ended."""
        self.drop()
        for _ in self._threads:
            await self._ended.acquire()
        for thread in self._threads:
            thread.join()  # it has only to return

    def where(self, ticket: int) -> str:
        """Tell where the threads are that have samples of a job."""
        words = super().where(ticket)
        frames = sys._current_frames()
        for ident, at in tuple(self._at.items()):
            if words and at == ticket and ident in frames:
                words += f"A sample is at:\n{stack_of(frames[ident])}"
        return words

    def _ask_for_samples(self) -> None:
        super()._ask_for_samples()
        try:
            while self._samples.qsize() and len(self._threads) < self._most:
                self._start_thread()
        except RuntimeError:  # the system has no room for one more
            self._most = len(self._threads)

    def _start_thread(self) -> None:
        run = partial(contextvars.copy_context().run, self._serve)
        self._threads.append(threads.start(run, f"asyncloader sample thread {len(self._threads)}"))

    def _start(self, job: Job, position: int) -> None:
        job.pending[position] = None
        self._samples.put((job, position))

    def _take_done(self) -> None:
        """Take what has become of samples: on the loop."""
        self._is_told = False  # whoever is done with a sample from now on tells again
        while self._done:
            job, position, sample, error = self._done.popleft()
            if position in job.pending:
                self._take(job, position, sample, error)
            del job, sample, error

    # -------------------------------------------------------------------------------------------------- a thread

    def _serve(self) -> None:
        ident = threading.get_ident()
        try:
            with self._modes.active():
                while (work := self._samples.get()) is not None:
                    self._at[ident] = work[0].ticket
                    self._get_here(*work)
                    del self._at[ident], work
        except BaseException as error:  # what samples raise is told with them
            self._tell(self._loop.fail, error)
        self._tell(self._ended.release)

    def _get_here(self, job: Job, position: int) -> None:
        if position not in job.pending:  # not wanted any more
            return
        self._enter(job, position)
        if is_watched := self._steps.is_on:
            self._steps.begin(None)
        if position <= 0:
            job.began = perf_counter()
        sample: Any = None
        error: BaseException | None = None
        try:
            sample = self._ask(job, position)
            refuse_awaitables([sample] if position >= 0 else sample, self._dataset)
        except BaseException as raised:
            error = raised
        if is_watched:
            self._steps.end(None, is_last=True)
        self._done.append((job, position, sample, error))
        del job, sample, error  # a traceback refers to this frame
        # Either this thread finds `_is_told` false, and tells; or the loop has not come to `_take_done`, which sets it
        # false and empties the deque after that: the sample is in there already.
        if not self._is_told:
            self._is_told = True
            self._tell(self._take_done)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)
