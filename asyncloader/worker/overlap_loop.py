"""Answer tickets with many samples in flight, on an asyncio loop.

    WorkerTransport ── messages ──> OverlapLoop ── tickets ──> Overlap ── samples ──> BatchMaker ── outcomes ──>

The loop is the worker's own, or a loop that the worker shares with others (num_workers=0). The loop also reads the
channel, so a new epoch, END, and the question where a batch is are heard at any time.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader import loops
from asyncloader.loops import GuardedLoop
from asyncloader.messages.failure import CapturedError, EndOfData
from asyncloader.messages.messages import EpochSpec, Kind, WorkerSpec
from asyncloader.protocols import is_resource, members
from asyncloader.seeding.sample_context import begin_task, tell_tasks_apart
from asyncloader.seeding.switch import GeneratorSwitch
from asyncloader.worker.job import Job
from asyncloader.worker.overlap import Overlap, TaskFetcher
from asyncloader.worker.serial_loop import SerialLoop
from asyncloader.worker.stream import Stream
from asyncloader.worker.thread_fetcher import ThreadFetcher
from asyncloader.worker.transport import WorkerTransport


def make_loop(worker_id: int, transport: WorkerTransport, epoch: EpochSpec, spec: WorkerSpec | Exception) -> SerialLoop:
    """Return what answers tickets as `spec` wants it."""
    if isinstance(spec, WorkerSpec) and spec.overlaps:
        return OverlapLoop(worker_id, transport, epoch, spec)
    return SerialLoop(worker_id, transport, epoch, spec)


class OverlapLoop(SerialLoop):
    """Answers tickets as their samples come: `run`, or `serve` on a loop that runs."""

    def __init__(self, worker_id: int, transport: WorkerTransport, epoch: EpochSpec, spec: WorkerSpec) -> None:
        super().__init__(worker_id, transport, epoch, spec)
        self._loop: asyncio.AbstractEventLoop
        self._guarded: GuardedLoop  # the same: what messages raise ends `serve`
        self._over: asyncio.Future[None]  # done when told to end, or when it cannot go on
        self._overlap: Overlap | None = None
        self._is_open = False

    def run(self) -> None:
        """Answer tickets until END, on a loop of its own."""
        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
            try:
                if self._transport.ends(SystemExit()):
                    runner.run(self.serve())
                else:
                    loops.run(runner, self.serve())
            except BaseException:
                self._transport.mute()  # before the runner cancels what is left
                raise

    async def serve(self) -> None:
        """Open what belongs to the loop, answer tickets until END, close."""
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        tell_tasks_apart(self._loop)
        self._guarded = GuardedLoop(self._loop, self._stop)
        self._transport.listen(self._guarded, self._on_messages)
        try:
            async with AsyncExitStack() as resources:
                await self._open_resources(resources)
                resources.push_async_callback(self._drop)
                if not self._over.done():
                    self._is_open = True
                    self._begin()
                    self._transport.send(Kind.READY)
                    self._feed()
                await self._over
        finally:
            self._transport.unlisten()
            self._overlap = None  # it refers to the dataset, and by its callbacks to this loop

    # -------------------------------------------------------------------------------------------------- opening

    async def _open_resources(self, resources: AsyncExitStack) -> None:
        """Enter the dataset, and what is inside torch's wrappers. Being told to end cancels that."""
        if self._maker.failure is not None:
            return
        opening = self._loop.create_task(self._enter_all(resources), name="open the dataset")
        await asyncio.wait({opening, self._over}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        if opening.cancelled():
            return
        with self._maker.opening():
            opening.result()

    async def _enter_all(self, resources: AsyncExitStack) -> None:
        for member in members(self._maker.spec.dataset):
            if is_resource(member):
                await resources.enter_async_context(member)

    def _begin(self) -> None:
        if self._overlap is not None:
            # Nothing of the last run is finished from now on, also if this run cannot begin: it would be told as of it.
            self._overlap.drop()
        if self._is_open:
            super()._begin()

    def _open_source(self, dataset: Any) -> None:
        spec, keeper = self._maker.spec, self._maker.keeper
        closing: asyncio.Task[None] | None = None
        if self._overlap is not None:
            runs_on = keeper is None or not keeper.is_put_back
            closing = self._loop.create_task(self._overlap.aclose(runs_on=runs_on), name="leave the last epoch")
        switch, run = self._maker.switch, (self._maker, self._on_finished, self._stop)
        if isinstance(switch, GeneratorSwitch):
            self._loop.set_task_factory(partial(begin_task, switch.make_task))
        if spec.is_iterable:
            self._overlap = Stream(dataset, run, self._on_exhausted, closing, keeper)
        else:
            self._overlap = (TaskFetcher if spec.is_async else ThreadFetcher)(dataset, *run)

    # -------------------------------------------------------------------------------------------------- serving

    def _on_messages(self) -> None:
        while (message := self._transport.receive(wait=False)) is not None:
            self._on_message(*message)

    def _on_message(self, kind: int, contents: Any) -> None:
        if kind == Kind.WHERE:
            self._transport.send(Kind.AWAITS, self.where(contents))
        elif kind == Kind.CONFIRM:
            # Not at once: what stood on the loop when the data seemed to end, the end of the worker too, comes first.
            self._guarded.call_soon(self._confirm, contents)
        elif kind != Kind.END:
            self._take_message(kind, contents)
            self._feed()
        elif not self._over.done():
            self._over.set_result(None)

    def where(self, ticket: int) -> str:
        """Tell at which awaits the samples of a ticket are."""
        if not self._is_open:
            return "The dataset is being opened (__aenter__).\n"
        try:
            return self._overlap.where(ticket) if self._overlap is not None else ""
        except Exception as error:  # of the dataset's own kinds of awaitables
            return f"Where the samples are could not be found out: {error!r}\n"

    def _stop(self, error: BaseException) -> None:
        """End `serve` with an error that no ticket can be answered with. Nothing is told from then on.

        Samples and ends that the dataset gives after that are ignored: an iterator that was cancelled seems to end.
        """
        if not self._over.done():
            self._over.set_exception(error)
            self._transport.mute()
            if self._overlap is not None:
                self._overlap.drop()

    def _feed(self) -> None:
        """Hand tickets on, once the dataset is open."""
        while self._is_open and self._tickets:
            ticket, keys = self._tickets.popleft()
            if self._maker.failure is not None or type(keys) is CapturedError:
                self._transport.send_outcome([self._maker.refused(ticket, keys)])
            elif self._overlap is not None and not self._ended:
                self._overlap.add(ticket, keys, perf_counter() - self._idle_since if self._overlap.is_idle else 0.0)

    def _on_exhausted(self, ticket: int) -> None:
        self._ended = True
        self._tell_at_end([self._maker.failed(Job(ticket), EndOfData())])

    def _on_finished(self, job: Job) -> None:
        """Make a batch of the samples. An exception must not reach the task that calls."""
        job.fetched = self._idle_since = perf_counter()
        try:
            held = [self._maker.gathered(job)]
            self._maker.switch.on_batch()
            if job.is_last:
                self._tell_at_end(held)
            else:
                self._transport.send_outcome(held)
        except BaseException as error:
            self._stop(error)

    # --------------------------------------------------------------------------------------------------- ending

    async def _drop(self) -> None:
        """Leave what is in flight, and wait until it has ended."""
        self._is_open = False
        if self._overlap is not None:
            await self._overlap.aclose()
