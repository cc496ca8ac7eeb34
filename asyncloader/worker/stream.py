"""The samples of an async iterable dataset: read one after the other, awaited several at once.

An iterator has one position, so there is one reader. Samples may be awaitables: then up to `concurrency` of them are in
flight, and the reader goes on. See :mod:`asyncloader.worker.overlap` for the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Any

from torch.utils.data import ChainDataset

from asyncloader.async_face import resolved
from asyncloader.messages.snapshot import Keeper
from asyncloader.protocols import answers_of, is_async, reads_async
from asyncloader.seeding import sample_context
from asyncloader.worker.fetch import discard, is_over
from asyncloader.worker.job import Job
from asyncloader.worker.overlap import Overlap
from asyncloader.worker.stacks import await_stack

_PATIENCE_S = 1.0
"""A stream that is left has so long to come to its next sample, or to its end, before that is cancelled: what it awaits
may be its own cleanup, as `async with` in a generator does it after the last sample. From outside both look alike."""


_END: Any = object()
"""In place of a sample: there are no more."""


class Stream(Overlap):
    """Samples of one run over an iterable dataset.

    A batch in which a sample raised is read to its end all the same, so that what the next batch begins with does not
    depend on timing.

    Args:
        dataset: Async iterable, or an iterable of samples of which some are awaitables.
        run: As of `Overlap`.
        exhausted: Called once with the first ticket that there are no samples for, after all before it are finished.
        after: The end of the run before: the dataset is not read twice at a time.
        keeper: Keeps the state of the dataset, if that is to be kept.
    """

    def __init__(
        self,
        dataset: Any,
        run: tuple[Any, Any, Any],
        exhausted: Callable[[int], None],
        after: asyncio.Task[None] | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        super().__init__(*run)
        self._exhausted = exhausted
        self._iterator = open_stream(dataset)
        self._keeper = keeper
        self._is_async = hasattr(type(self._iterator), "__anext__")
        self._ends_with = StopAsyncIteration if self._is_async else StopIteration  # the other one is a bug
        self._has_ended = keeper is not None and keeper.attach(self._iterator)
        self._too_late: list[int] = []  # tickets after the end of the data
        self._work = asyncio.Event()
        self._reading: Job | None = None
        self._is_awaited = False  # the iterator, by the reader
        self._is_unread = not self._has_ended
        self._reader = self._loop.create_task(self._read(after), name="stream")

    def add(self, ticket: int, keys: Any, waited_s: float = 0.0) -> None:
        """Take another ticket; its keys say how many samples it has."""
        if self._has_ended:
            self._too_late.append(ticket)
            self._tell_if_exhausted()
        else:
            super().add(ticket, keys, waited_s)

    def drop(self) -> None:
        """Forget all jobs, and read nothing more. A read that the iterator awaits is not cancelled yet."""
        super().drop()
        self._too_late.clear()
        if not self._is_awaited:
            self._reader.cancel()

    async def aclose(self, *, runs_on: bool = False) -> None:
        """Leave everything, and let the iterator end in its own way."""
        self.drop()
        try:
            await asyncio.wait({self._reader}, timeout=_PATIENCE_S)
        finally:
            self._reader.cancel()
        await asyncio.wait({self._reader})
        if not self._reader.cancelled():
            self._reader.result()
        await super().aclose()
        if runs_on and self._is_unread and self._keeper is not None and self._keeper.is_put_back:
            with contextlib.suppress(Exception):  # see `BatchMaker`: otherwise the next run would begin there
                iterator, is_async = self._iterator, self._is_async
                discard(await asyncio.wait_for(anext(iterator), _PATIENCE_S) if is_async else next(iterator))
        if (close := getattr(self._iterator, "aclose", None)) is not None:
            await close()
        self._iterator = None  # a plain one ends with its last reference

    def where(self, ticket: int) -> str:
        """Tell at which await the samples of a job are, or the reader."""
        words = super().where(ticket)
        if self._reading is not None and self._reading.ticket <= ticket:
            words += f"The dataset is read at:\n{await_stack(self._iterator) or await_stack(self._reader)}"
        return words

    def _fill(self) -> None:
        self._work.set()

    async def _read(self, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait({after})
        while not self._has_ended:
            while not self._waiting or self._free <= 0:
                self._work.clear()
                await self._work.wait()
            job = self._reading = self._waiting[0]
            if not job.started and self._keeper is not None:
                for _ in range(self._keeper.gap()):
                    await self._leave_out(job)
                    await asyncio.sleep(0)  # the line is read meanwhile
                    if self._has_ended:
                        return
            await self._read_sample(job)
            self._reading = None

    async def _leave_out(self, job: Job) -> None:
        """Read over a batch that was made already, and that this one comes after. Nothing in it is awaited."""
        for position in range(job.count):
            sample_context.enter(self._seeder, job.ticket, position)
            try:
                sample = await self._next(job)
            except BaseException as error:  # it was raised in its time
                if job.ticket not in self._jobs or self._ends(error):
                    raise
                if self._costs_batch(error):
                    return
                continue
            if sample is _END:
                self._end(job)  # not asked again: some iterators would begin anew
                return
            discard(sample)

    def _costs_batch(self, error: BaseException) -> bool:
        """Whether a batch ends where the iterator raised this; otherwise it goes on with the next sample."""
        return not self._tolerates(error) or is_over(self._iterator)

    async def _read_sample(self, job: Job) -> None:
        position = job.started
        if not position:
            job.began = perf_counter()
        sample_context.enter(self._seeder, job.ticket, position)
        try:
            sample = await self._next(job)
        except BaseException as error:
            if job.ticket not in self._jobs:
                raise
            self._fail(job, position, error)
            return
        if sample is _END:
            self._end(job)
            return
        self._advance(job)
        if hasattr(type(sample), "__await__"):
            task = self._spawn(job, position, self._await(job, position, sample))
            task.add_done_callback(partial(_close, sample))
        else:
            self._take(job, position, sample)

    async def _next(self, job: Job) -> Any:
        """Read a sample for a job; `_END` at the end of the data.

        Whatever comes of that after the job was dropped is a cancellation. The iterator may have caught the one that it
        got, and have ended, or yielded, or raised something else.
        """
        try:
            self._is_awaited, self._is_unread = self._is_async, False
            sample = await anext(self._iterator) if self._is_async else next(self._iterator)
        except BaseException as error:
            if job.ticket not in self._jobs:
                raise asyncio.CancelledError from None
            if isinstance(error, self._ends_with):
                return _END
            raise
        finally:
            self._is_awaited = False
        if job.ticket not in self._jobs:
            discard(sample)
            raise asyncio.CancelledError
        return sample

    def _advance(self, job: Job) -> None:
        self._free -= 1
        job.started += 1
        if job.started == job.count:
            self._waiting.popleft()
            self._keep(job)

    def _keep(self, job: Job) -> None:
        """Take the state of the dataset: exactly the samples up to those of this job have been read."""
        if self._keeper is not None:
            job.snapshot = self._keeper.take(ended=self._has_ended)

    async def _await(self, job: Job, position: int, sample: Any) -> None:
        sample_context.enter(self._seeder, job.ticket, position)
        error: BaseException | None = None
        try:
            sample = await resolved(sample)
        except BaseException as raised:
            if position not in job.pending and isinstance(raised, asyncio.CancelledError):
                raise
            error = raised
        if position in job.pending:
            try:
                self._take(job, position, sample, error)
            finally:
                del job, sample, error  # a traceback refers to this frame

    def _leave_rest(self, job: Job, position: int) -> None:
        """The other samples are asked for, and waited for, all the same."""

    def _fail(self, job: Job, position: int, error: BaseException) -> None:
        """The iterator raised. If it can go on, this cost a sample; otherwise, or if none may be bad, the batch."""
        if self._ends(error):
            self._stop(error)
        elif self._costs_batch(error):
            self._cost(job, position, error)
            self._cut(job, position)
        else:
            self._advance(job)
            self._take(job, position, None, error)

    def _end(self, job: Job) -> None:
        """Note the end of the data, which was found while a sample of this job was read."""
        self._has_ended = True
        kept = job.started > 0 and not (self._spec.drop_last and self._auto_collation)
        if not kept:
            self._too_late.append(job.ticket)
            self._waiting.popleft()
            del self._jobs[job.ticket]
            self._cancel(job)
        self._too_late += [late.ticket for late in self._waiting if late is not job]
        for ticket in self._too_late:
            self._jobs.pop(ticket, None)
        if kept:
            job.is_last = True
            self._cut(job, job.started)
        self._waiting.clear()
        self._tell_if_exhausted()

    def _cut(self, job: Job, count: int) -> None:
        """Make do with fewer samples than there are keys."""
        job.count = count
        del job.samples[count:]
        self._waiting.popleft()
        self._keep(job)
        if job.started == job.count and not job.pending:
            self._conclude(job)

    def _conclude(self, job: Job) -> None:
        super()._conclude(job)
        self._tell_if_exhausted()

    def _tell_if_exhausted(self) -> None:
        # Not before, for whoever is told forgets what else this worker has in flight.
        if self._has_ended and self._too_late and not self._jobs:
            ticket, self._too_late = self._too_late[0], []
            self._exhausted(ticket)


def open_stream(dataset: Any) -> Any:
    """Begin to iterate over a dataset: an async iterator, or a plain one."""
    if isinstance(dataset, ChainDataset) and is_async(dataset):
        return _chain(dataset.datasets)
    return aiter(dataset) if reads_async(dataset) else iter(dataset)


async def _chain(datasets: Iterable[Any]) -> AsyncIterator[Any]:
    for dataset in datasets:
        iterator = open_stream(dataset)
        if hasattr(type(iterator), "__anext__"):
            while (sample := await anext(iterator, _END)) is not _END:  # it is not iterated over anew
                yield sample
        else:
            for sample in answers_of(iterator):
                yield sample


def _close(sample: Any, task: asyncio.Task[None]) -> None:
    """Close a coroutine that never began, because its task was cancelled before; otherwise Python warns of it."""
    if inspect.iscoroutine(sample) and inspect.getcoroutinestate(sample) == inspect.CORO_CREATED:
        sample.close()
