"""Answer tickets with many samples in flight, on an asyncio loop.

    Line ── messages ──> OverlapServer ── tickets ──> Overlap ── samples ──> collate ── send_batch ──> Line

The loop is the worker's own, or that of the thread that the worker shares with others (num_workers=0). It reads the
line as well, so a new epoch, END, and the question where a batch is are heard at any time.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.protocols import is_resource, members
from asyncloader.workers.child import loops
from asyncloader.workers.child import sample_context as place
from asyncloader.workers.child.fetch import Mender
from asyncloader.workers.child.overlap import Coroutines, Job, Overlap
from asyncloader.workers.child.server import Server
from asyncloader.workers.child.stream import Stream, relive
from asyncloader.workers.child.thread_fetcher import Lanes
from asyncloader.workers.child.transport import micros
from asyncloader.workers.protocol.failure import BadSample, Unreadable
from asyncloader.workers.protocol.messages import Kind, Record


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a loop for a worker: uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class OverlapServer(Server):
    """Answers tickets as their samples come. `open` and `run` as in `Server`; or `serve`, on a loop that runs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Future[None]  # done when told to end, or when it cannot go on
        self._overlap: Overlap | None = None
        self._is_open = False
        self._waited_s: dict[int, float] = {}  # for each ticket, by an idle worker
        self._collating: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Seed and run ``worker_init_fn``. The rest needs the loop."""
        self._enter()

    def run(self) -> None:
        """Answer tickets until END, on a loop of its own."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                if self._line.ends(SystemExit()):
                    runner.run(self.serve())
                else:
                    loops.run(runner, self.serve())
            except BaseException:
                self._line.mute()  # before the runner cancels what is left
                raise

    async def serve(self) -> None:
        """Open what belongs to the loop, answer tickets until END, close."""
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._line.listen(self._loop, self._on_messages)
        try:
            async with AsyncExitStack() as resources:
                await self._open_resources(resources)
                resources.push_async_callback(self._drop)
                if not self._over.done():
                    self._is_open = True
                    self._begin_epoch()
                    self._line.send(Kind.READY)
                    self._feed()
                await self._over
        finally:
            self._line.unlisten()

    # -------------------------------------------------------------------------------------------------- opening

    async def _open_resources(self, resources: AsyncExitStack) -> None:
        """Enter the dataset, and what is inside torch's wrappers. Being told to end cancels that."""
        if self._failure is not None:
            return
        opening = self._loop.create_task(self._enter_all(resources))
        await asyncio.wait({opening, self._over}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        if opening.cancelled():
            return
        try:
            opening.result()
        except Exception as error:
            self._failure = self._line.capture(error)

    async def _enter_all(self, resources: AsyncExitStack) -> None:
        for member in members(self._spec.dataset):
            if is_resource(member):
                await resources.enter_async_context(member)
        place.enter(self._epoch.key, 0)
        await relive(self._spec.dataset, self._past)

    def _make_fetcher(self, dataset: Any) -> None:
        spec = self._spec
        closing: asyncio.Task[None] | None = None
        if self._overlap is not None:
            self._overlap.drop()  # nothing of it may be finished from now on
            closing = self._loop.create_task(self._overlap.aclose())
        self._waited_s.clear()
        for task in self._collating:
            task.cancel()
        keeper = self._make_keeper(dataset)
        common = (self._epoch.key, spec.auto_collation, spec.concurrency, spec.on_error != "raise", self._on_finished)
        if spec.is_iterable:
            told = self._on_exhausted, self._line.ends
            self._overlap = Stream(dataset, spec.drop_last, *told, closing, keeper, *common)
        else:
            self._overlap = Coroutines(dataset, *common) if spec.is_async else self._make_lanes(dataset, common)

    def _make_lanes(self, dataset: Any, common: tuple[Any, ...]) -> Lanes:
        return Lanes(dataset, self._spec.num_workers, self._spec.origin, *common)

    # -------------------------------------------------------------------------------------------------- serving

    def _on_messages(self) -> None:
        try:
            while (message := self._line.receive(wait=False)) is not None:
                self._on_message(*message)
        except BaseException as error:
            self._stop(error)

    def _on_message(self, kind: int, contents: Any) -> None:
        if kind == Kind.TICKETS:
            self._tickets.extend(contents)
            self._feed()
        elif kind == Kind.EPOCH:
            self._tickets.clear()
            self._epoch = contents
            if self._is_open:
                self._begin_epoch()
        elif kind == Kind.WHERE:
            self._line.send(Kind.AWAITS, body=self.where(contents))
        elif kind == Kind.CONFIRM:
            self._confirm(contents)
        elif kind == Kind.END and not self._over.done():
            self._over.set_result(None)

    def where(self, seq: int) -> str:
        """Tell at which awaits the samples of a ticket are."""
        if not self._is_open:
            return "The dataset is being opened (__aenter__).\n"
        try:
            return self._overlap.where(seq) if self._overlap is not None else ""
        except Exception as error:  # of the dataset's own kinds of awaitables
            return f"Where the samples are could not be found out: {error!r}\n"

    def _stop(self, error: BaseException) -> None:
        """End `serve` with an error that no ticket can be answered with. Nothing is told from then on.

        What the dataset says after that is not to be believed: an iterator that raised, or was cancelled, has ended.
        """
        if not self._over.done():
            self._over.set_exception(error)
            self._line.mute()
            if self._overlap is not None:
                self._overlap.drop()

    def _feed(self) -> None:
        """Hand tickets on, once the dataset is open."""
        while self._is_open and self._tickets:
            seq, keys = self._tickets.popleft()
            if type(keys) is Unreadable:
                self._line.send(Kind.REFUSED, self._record(seq, perf_counter()), keys.failure)
            elif self._failure is not None or self._overlap is None:
                self._line.send(Kind.FAILURE, self._record(seq, perf_counter()), self._failure)
            elif not self._ended:
                self._waited_s[seq] = perf_counter() - self._idle_since if self._overlap.is_idle else 0.0
                self._overlap.add(seq, keys)

    def _on_exhausted(self, seq: int) -> None:
        self._ended = True
        self._at_end(partial(self._tell_exhausted, self._overlap, seq))

    def _tell_exhausted(self, overlap: Overlap | None, seq: int, task: asyncio.Task[None] | None = None) -> None:
        """Tell so after batches that are still being collated: whoever is told forgets what else is in flight."""
        if overlap is not self._overlap or not self._is_open:  # another run has begun, or none will
            return
        if self._collating:
            next(iter(self._collating)).add_done_callback(partial(self._tell_exhausted, overlap, seq))
        else:
            self._tell_exhausted_now(self._record(seq, perf_counter()))

    def _on_finished(self, job: Job) -> None:
        """Make a batch of the samples; at the end of the data, if that is so."""
        if job.is_last and job.fatal is None:
            self._at_end(partial(self._make_batch, job))
        else:
            self._make_batch(job)

    def _make_batch(self, job: Job) -> None:
        """Make a batch of the samples. What goes wrong with it must not reach the task that calls."""
        fetched = self._idle_since = perf_counter()
        try:
            if self._keeper is not None and not self._spec.is_iterable:
                job.snapshot = self._keeper.take()  # a stream takes it itself, when the samples have been read
            if job.fatal is not None and self._line.ends(job.fatal):
                self._stop(job.fatal)
            elif (error := self._error(job)) is not None:
                self._fail(self._times(job, fetched), error, ())
            else:
                self._collate(job, fetched)
        except BaseException as error:
            self._stop(error)

    def _error(self, job: Job) -> BaseException | None:
        """Return what one of the samples raised, if that costs the batch. The job does not refer to it any more."""
        error = job.fatal
        if error is None and job.errors:
            costly = self._spec.on_error == "raise"
            errors = (job.errors[position] for position in sorted(job.errors))
            error = next((raised for raised in errors if costly or not isinstance(raised, Exception)), None)
        if error is not None:
            job.fatal = None
            job.errors.clear()
        return error

    def _collate(self, job: Job, fetched: float) -> None:
        bad: list[BadSample] = []
        place.enter(self._epoch.key, job.seq)
        try:
            samples = self._mended(job, bad) if job.errors else job.samples
            job.samples = []  # what a sample lies in is free again with the batch
            if not self._spec.auto_collation:
                (samples,) = samples
            batch = [self._line.collate(self._spec.collate_fn, samples)]
            del samples
            if hasattr(type(batch[0]), "__await__"):
                task = self._loop.create_task(self._await_batch(job, fetched, batch, bad))
                self._collating.add(task)
                task.add_done_callback(self._collating.discard)
            else:
                self._line.send_batch(self._times(job, fetched), batch, bad)
        except BaseException as error:
            if self._line.ends(error):
                raise
            self._fail(self._times(job, fetched), error, bad)

    def _mended(self, job: Job, bad: list[BadSample]) -> list[Any]:
        mender = Mender(self._spec.on_error, self._line.where)
        for position in range(job.count):
            error = job.errors.get(position)
            if isinstance(error, Exception):
                key = None if self._spec.is_iterable else job.keys[position] if self._spec.auto_collation else job.keys
                mender.failed(position, key, error)
            else:
                mender.good(position, job.samples[position])
        job.errors.clear()
        bad += mender.bad
        return mender.mended()

    async def _await_batch(self, job: Job, fetched: float, batch: list[Any], bad: list[BadSample]) -> None:
        """Await an async collate_fn, beside everything else."""
        try:
            try:
                made = [await batch.pop()]
                self._line.send_batch(self._times(job, fetched), made, bad)
            except BaseException as error:
                task = asyncio.current_task()
                is_cancelled = task is not None and task.cancelling()  # by us: nobody waits for this batch any more
                if is_cancelled or self._line.ends(error):
                    raise
                self._fail(self._times(job, fetched), error, bad)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._stop(error)

    def _times(self, job: Job, fetched: float) -> Record:
        self._stalls.look()
        record = self._record(job.seq, job.begun_at, fetched, job.count)
        record = record._replace(wait_us=micros(self._waited_s.pop(job.seq, 0.0)))
        if job.snapshot is not None:
            self._line.send(Kind.STATE, record, job.snapshot)
            job.snapshot = None
        return record

    # --------------------------------------------------------------------------------------------------- ending

    async def _drop(self) -> None:
        """Cancel what is in flight, and wait until it has ended."""
        self._is_open = False
        for task in tuple(self._collating):
            task.cancel()
        if self._collating:
            await asyncio.wait(tuple(self._collating))
        if self._overlap is not None:
            await self._overlap.aclose()
