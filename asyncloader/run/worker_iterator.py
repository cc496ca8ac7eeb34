"""Batches that workers make: ``for`` and ``async for`` over one run.

    _BaseDataLoaderIter (torch's: sampler, base seed, flags)
    ├── WorkerIterator    over an engine: with workers, or samples that overlap on a loop without any
    └── InlineIterator    otherwise without workers, in asyncloader.run.inline_iterator

Taking and waiting are here; what a consumer reads and counts is in :mod:`asyncloader.engine.run`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from asyncloader.backends.backend import END_GRACE_S
from asyncloader.backends.processes.pool import WorkerHandle
from asyncloader.backends.processes.process import WorkerProcess
from asyncloader.engine import exits
from asyncloader.engine.engine import Engine, State
from asyncloader.engine.finisher import Finisher
from asyncloader.engine.item import Item
from asyncloader.engine.portal import get_portal, refuse_to_block_the_loop
from asyncloader.engine.progress import Progress
from asyncloader.engine.run import Run
from asyncloader.errors import BatchTimeoutError, LoaderClosedError, loop_blocked
from asyncloader.messages.failure import stand_in
from asyncloader.messages.messages import EpochSpec, Kind
from asyncloader.options import AutoWorkers, Options
from asyncloader.run import home_loop, workplace
from asyncloader.run.base_iterator import FOR, BaseIterator, check_owner
from asyncloader.run.run_start import RunStart
from asyncloader.run.runs import Runs
from asyncloader.run.state import ALL, LoaderState
from asyncloader.weak import while_alive
from asyncloader.worker.bootstrap import refuse_in_main
from asyncloader.worker.guarded_loop import GuardedLoop

T_co = TypeVar("T_co", covariant=True)

_ANSWER_S = 10.0  # the loop answers within a second; where a machine is overloaded, starting a worker takes some


class WorkerIterator(BaseIterator[T_co]):
    """Batches that workers make, in order.

    Several threads or tasks may take from one iterator; each batch goes to exactly one of them. After an exception that
    stands for a batch the iterator goes on with the next one.

    Args:
        loader: For torch's constructor, and nothing else.
        options: The loader's.
        runs: The loader's.
        wait_for_start: Return when the workers have been started (``iter``); otherwise the first ``anext`` waits.
        state: To begin from.

    Attributes:
        asked: The options that the loader gave last; workers keep what they were started with.
    """

    _run: Run

    def __init__(
        self,
        loader: DataLoader[T_co],
        options: Options,
        runs: Runs,
        *,
        wait_for_start: bool,
        state: LoaderState | None = None,
    ) -> None:
        if wait_for_start:
            refuse_to_block_the_loop()
        if options.num_workers and not options.is_in_process and options.start_context.get_start_method() != "fork":
            refuse_in_main()
        super().__init__(loader, options, runs)
        self.asked = options
        self._start(loader, state, wait=wait_for_start)

    def _start(self, loader: DataLoader[T_co], state: LoaderState | None, *, wait: bool) -> None:
        """Start workers and the first run."""
        has_home = self._options.is_async and not self._options.has_workers
        self._home = home_loop.find_home(self._options.dataset, get_portal().loop) if has_home else None
        if wait:
            home_loop.refuse_to_block(self._home)
        iterate = partial(self._reset, loader, first_iter=True)
        start = self._begin(iterate, state, prepare=partial(self._construct, loader))
        self._run_numbers = count(1)
        run = self._make_run(self._epoch_of(start), start.plan, start.checkpointer.progress)
        self._engine = self._make_engine(run)
        self._engine.close_with(self)
        run.read_first(self._engine.waker())
        self._take_from(run)
        # The first window is read before the workers start: they find their tickets waiting.
        self._started: Future[None] | None = None
        if wait:
            self._start_here()
        else:
            self._started = self._engine.start_apart()

    def _start_here(self) -> None:
        try:
            self._engine.start()
        except LoaderClosedError:
            self._engine.portal.stop_daemon()
            raise

    def _construct(self, loader: DataLoader[T_co]) -> None:
        super()._construct(loader)
        if self._options.num_workers and not self._options.prefetch_factor:
            raise AssertionError("prefetch_factor must be positive")

    def _reset(self, loader: DataLoader[T_co], first_iter: bool = False) -> None:
        """Iterate over the sampler, as torch's iterator does for each run."""
        shared_seed = self._shared_seed
        super()._reset(loader, first_iter)
        if first_iter:
            self._shared_seed = shared_seed  # workers that are started get the first one, as torch's do

    def begin_next(self, loader: DataLoader[T_co], options: Options) -> None:
        """Begin a new run with the same workers: what ``iter(loader)`` does with persistent workers."""
        self._run.leave()
        first = self._options
        if first.is_auto:
            first = replace(first, num_workers=AutoWorkers(len(self._engine.workforce.wanted)))
        if first is not self._options or options is not self.asked:
            self._options, self.asked = options.with_workers_of(first), options
        start = self._begin(partial(self._reset, loader), last=self._checkpointer)
        run = self._make_run(self._epoch_of(start), start.plan, start.checkpointer.progress)
        self._engine.push(run)
        run.read_first(self._engine.waker())
        self._take_from(run)

    def leave_out(self, loader: DataLoader[T_co], count: int) -> None:
        """Read so many batches and drop them; or ALL, and begin the next run."""
        super().leave_out(loader, count)
        if count == ALL:
            deque(self, maxlen=0)
            self.begin_next(loader, self.asked)

    def _take_from(self, run: Run) -> None:
        """Have consumers take from a run that has begun."""
        self._run, self.is_closed, self._face, self._pass = run, False, "", None  # the next call decides the face
        self._meter = self._runs.meter = run.meter
        self._seeding.end_others(run.epoch.key)

    def _restart(self, loader: Any, state: LoaderState) -> None:
        self._run.leave()
        self.leave()
        self._seeding.end()
        if (options := self._options).is_auto:
            number = state.num_workers or len(self._engine.workforce.wanted)
            self._options = replace(options, num_workers=AutoWorkers(min(number, options.most_waiting)))
            loader._note_num_workers(self._options.num_workers)
        try:
            self._start(loader, state, wait=False)
        except BaseException:  # nobody may wait for workers that were not started
            self._engine.request_close()
            raise

    def _epoch_of(self, start: RunStart) -> EpochSpec:
        """Return the run in the form that workers receive."""
        return start.checkpointer.epoch_spec(next(self._run_numbers), start.starts)

    def _make_run(self, epoch: EpochSpec, plan: Iterator[Any], progress: Progress) -> Run:
        return workplace.make_run(self._options, self._runs, epoch, plan, progress)

    # ------------------------------------------------------------------------------------------------- workers

    def _make_engine(self, run: Run) -> Engine:
        spec, tell = self._worker_spec(), while_alive(self.note_number, None)
        return workplace.make_engine(self._options, self._runs, spec, run, self._home, self._make_finisher, tell)

    def _make_finisher(self, loop: GuardedLoop) -> Finisher | None:
        return None if self._pinned_for is None else Finisher(loop, self._pinned_for)

    def note_number(self, num_workers: int) -> None:
        """Note the number of workers, which looks after itself, for the loader and for states. On the loop thread."""
        if self._options.is_auto:  # otherwise it was set meanwhile
            self._checkpointer.num_workers = num_workers
            if (loader := self._loader()) is not None:
                loader._note_num_workers(num_workers)

    @property
    def is_usable(self) -> bool:
        """Whether it can begin another run."""
        engine = self._engine
        is_there = engine.pid == os.getpid() and engine.state in (State.NEW, State.OPEN)
        return is_there and engine.error is None and not engine.recovery.has_lost_for_good

    def set_num_workers(self, num_workers: int) -> None:
        """Have so many workers from now on: see :meth:`asyncloader.DataLoader.set_num_workers`."""
        if self.is_usable:
            self._options = replace(self._options, num_workers=num_workers)
            self._num_workers = num_workers
            resize = partial(self._engine.post, self._engine.resize, num_workers)
            if self._started is None:
                resize()
            else:  # the workers of the beginning are being launched, in another thread
                self._started.add_done_callback(lambda _: resize())

    # -------------------------------------------------------------------------------------------------- taking

    @property
    def _is_made(self) -> bool:
        return "_run" in vars(self)

    def is_ready(self) -> bool:
        """Whether the next batch is there."""
        return self._run.has_ready

    def _take(self, asked_at: float) -> Any:
        item = None
        try:
            with self._lock:
                if self._pass is not exits.token:
                    self._enter(FOR)
                if (item := self._run.first()) is not None:
                    return self._give(item, 0.0, asked_at)
                item = self._wait_for_item()
                return self._give(item, asked_at, perf_counter())
        finally:
            item = None  # the traceback of an error refers to this frame

    def _wait_for_item(self) -> Item:
        refuse_to_block_the_loop()
        home_loop.refuse_to_block(self._home)
        if self._started is not None:
            self._wait_started(self._started)
        deadline = self._deadline()
        while (item := self._look()) is None:
            run = self._run  # another one, if the iterator has begun it meanwhile
            if not run.handoff.wait(run.has_news, deadline) and not run.has_news():
                self._raise_unless_news(self._wait_report())
                deadline = self._deadline()
        return item

    async def _take_async(self, asked_at: float) -> Any:
        item = None
        try:
            if self._started is not None:
                await self._until_started()
            if (item := self._run.first()) is not None:
                return self._give(item, 0.0, asked_at, in_async_for=True)
            item = await self._wait_for_item_async()
            return self._give(item, asked_at, perf_counter(), in_async_for=True)
        finally:
            item = None

    async def _wait_for_item_async(self) -> Item:
        deadline = self._deadline()
        try:
            while (item := self._look()) is None:
                run = self._run
                if not await run.handoff.wait_async(run.has_news, deadline) and not run.has_news():
                    self._raise_unless_news(await self._wait_report_async())
                    deadline = self._deadline()
                self._last_turn = time.monotonic()
        except StopIteration:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:  # of the sampler
            raise stand_in(error, in_async_for=True) from error
        return item

    def _deadline(self) -> float | None:
        """Return until when a consumer that comes now waits for a batch."""
        timeout = self._options.timeout
        return time.monotonic() + timeout if timeout > 0 else None

    def _look(self) -> Item | None:
        """Return the first item, or find out that there will be none, or do what can be done before waiting.

        Raises:
            StopIteration: if everything was taken.
        """
        run = self._run
        if (item := run.first()) is not None:
            return item
        self._check_usable()
        try:
            run.check()
            run.read_on()
        except StopIteration:
            self._run.progress.note_end()
            raise
        finally:
            if run.all_taken:
                if not self._persistent_workers:
                    self._engine.request_close()  # the workers may go
                self._seeding.end_one(run.epoch.key)  # samples of a batch that was given up may still be in work
        return None

    def _give(self, item: Item, asked_at: float, came_at: float, *, in_async_for: bool = False) -> Any:
        """Return the batch of an item, or raise what is in its place; it is counted last.

        Args:
            item: The item.
            asked_at: Since when the consumer has waited; 0.0 if it has just come.
            came_at: Since when it need not wait.
            in_async_for: What is raised is to end no ``async for``.
        """
        run, outcome = self._run, item.outcome
        run.read_for(item, asked_at, came_at)
        if outcome.kind == Kind.BATCH:
            if self._IterableDataset_len_called is not None:
                self.check_length()
            run.count(item)
            self._num_yielded += 1
            return outcome.data
        error = stand_in(outcome.error, in_async_for=in_async_for)
        run.count(item)
        try:
            raise error
        finally:
            del error, item, outcome  # a traceback that refers to this frame would keep the iterator, and its workers

    def _wait_started(self, started: Future[None]) -> None:
        try:
            started.result()
        except LoaderClosedError:
            self._engine.portal.stop_daemon()
            raise
        finally:
            if started.done():
                self._started = None
            del started  # a traceback that refers to this frame, and to which the future refers, would be a cycle

    async def _until_started(self) -> None:
        """Wait until workers are started, as `_wait_started` does."""
        if (started := self._started) is not None:
            try:
                await asyncio.shield(asyncio.wrap_future(started))
            except LoaderClosedError:
                self._engine.portal.stop_daemon()
                raise
            finally:
                if started.done():
                    self._started = None
                del started
        self._check_usable()

    def _check_usable(self) -> None:
        engine = self._engine
        check_owner(engine.pid)
        run = self._run
        is_closing = self.is_closed or engine.state in (State.CLOSING, State.CLOSED)
        if is_closing and not run.all_taken and run.error is None:
            engine.portal.stop_daemon()
            raise LoaderClosedError("this iterator was closed; call iter(loader) for a new one")

    # ------------------------------------------------------------------------------------------------- timeouts

    def _wait_report(self) -> BatchTimeoutError | None:
        """Wait for the engine's answer, which comes within a second, unless something blocks its loop."""
        try:
            return self._engine.report_overdue(self._options.timeout).result(_ANSWER_S)
        except TimeoutError:
            return loop_blocked(self._options.timeout, self._engine.portal.where())

    async def _wait_report_async(self) -> BatchTimeoutError | None:
        try:  # in no variable: the future holds the error, whose traceback refers to these frames
            return await asyncio.wait_for(
                asyncio.wrap_future(self._engine.report_overdue(self._options.timeout)), _ANSWER_S
            )
        except TimeoutError:
            return loop_blocked(self._options.timeout, self._engine.portal.where())

    def _raise_unless_news(self, error: BaseException | None) -> None:
        """Raise what the engine has reported, unless the batch has come in the last moment."""
        try:
            if error is not None and not self._run.has_news():
                raise error
        finally:
            del error  # a frame of its own traceback that holds it would keep the iterator, and its workers, alive

    # --------------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """End the run: workers finish what they are at, and are killed after 3 s. Returns when they are gone.

        On the loop that the dataset itself runs on, which cannot be waited for there, returns at once.
        """
        if not self._is_finalizing() and self._is_made and self._engine.pid == os.getpid():
            self.leave()
            refuse_to_block_the_loop()
            if home_loop.is_here(self._home):  # where the dataset is closed, once the caller lets the loop turn
                self._seeding.end()
            else:
                self._wait_closed()

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        if self._engine.pid == os.getpid():
            self.leave()
            await asyncio.to_thread(self._wait_closed)

    def leave(self) -> None:
        """End the run as `close` does, without waiting for it."""
        if self._is_made and self._engine.pid == os.getpid():
            self.is_closed, self._pass = True, None  # batches that are ready are not given either
            self._engine.request_close()

    def _wait_closed(self) -> None:
        self._seeding.end()
        self._engine.wait_closed(END_GRACE_S + 1.0)

    def _shutdown_workers(self) -> None:
        """End the workers, under the name that torch's iterator has for it, which some programs use."""
        self.close()

    @property
    def _workers(self) -> list[WorkerHandle]:
        """The worker processes, as torch's iterator shows them; none if the workers are in this one."""
        if self._is_finalizing():
            return []
        workers = sorted(self._engine.pool.processes.items())
        return [WorkerHandle(worker) for _, worker in workers if isinstance(worker, WorkerProcess)]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} taken={self._run.taken} {self._engine!r}>"
