"""Batches that workers make: ``for`` and ``async for`` over one run.

    _BaseDataLoaderIter (torch's: sampler, base seed, flags)
    ├── WorkerIterator    over an engine: with workers, or samples that overlap on a loop without any
    └── InlineIterator    otherwise without workers, in asyncloader.run.inline_iterator

Taking and waiting are here; what a consumer reads and counts is in :mod:`asyncloader.engine.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from asyncloader.backends.backend import END_GRACE_S, Backend
from asyncloader.backends.processes.pool import Pool, WorkerHandle
from asyncloader.backends.processes.process import WorkerProcess
from asyncloader.backends.threads.pool import LocalPool
from asyncloader.engine import exits
from asyncloader.engine.controller import Controller
from asyncloader.engine.engine import Engine, State
from asyncloader.engine.finisher import Finisher
from asyncloader.engine.item import Item
from asyncloader.engine.portal import get_portal, refuse_to_block_the_loop
from asyncloader.engine.run import Run
from asyncloader.engine.scheduler import Scheduler
from asyncloader.errors import BatchTimeoutError, LoaderClosedError, loop_blocked
from asyncloader.loops import GuardedLoop
from asyncloader.messages.failure import is_of_opening, stand_in
from asyncloader.messages.messages import Kind
from asyncloader.options import AutoWorkers, Options
from asyncloader.run.base_iterator import FOR, BaseIterator
from asyncloader.run.plan import may_be_looked_at
from asyncloader.run.run_start import RunStart
from asyncloader.run.runs import Runs
from asyncloader.run.state import ALL, LoaderState
from asyncloader.weak import while_alive
from asyncloader.worker.bootstrap import refuse_in_main

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
    is_closed: bool

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
        self.asked: Options = options
        iterate = partial(self._reset, loader, first_iter=True)
        start = self._begin(iterate, state, prepare=partial(self._construct, loader))
        self._run_numbers = count(1)
        run = self._make_run(start)
        portal = get_portal()
        loop = GuardedLoop(portal.loop)
        pool, finisher = self._make_pool(loop), self._make_finisher(loop)
        controller = Controller(options, options.num_workers) if options.is_auto else None
        tell = while_alive(self.note_number, None)
        self._engine = engine = Engine(portal, loop, pool, run, options, finisher, controller, tell)
        engine.close_with(self)
        run.read_first(while_alive(engine.wake, None))
        self._take_from(run)
        # The first window is read before the workers start: they find their tickets waiting.
        self._started: Future[None] | None = None
        try:
            if wait_for_start:
                engine.start()
            else:  # in a thread of its own, which holds up neither the caller's loop nor, on the portal's, others
                self._started = portal.call_apart(engine.start)
        except LoaderClosedError:
            portal.stop_daemon()
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
        before = self._run
        before.leave()
        first = self._options
        if first.is_auto:
            first = replace(first, num_workers=AutoWorkers(len(self._engine.workforce.wanted)))
        if first is not self._options or options is not self.asked:
            self._options, self.asked = options.with_workers_of(first), options
        start = self._begin(partial(self._reset, loader), last=self._checkpointer)
        run = self._make_run(start)
        try:
            self._engine.push(run)
            run.read_first(while_alive(self._engine.wake, None))
            self._take_from(run)
        except BaseException:  # an interrupt: workers may be at a run of which nobody takes
            self.leave()
            raise
        finally:
            # A consumer may wait in another thread, for the last run. It looks again now: at this run, or at the end. A
            # wake-up by the loop thread, at the beginning of this run, may have found it with the last one still.
            before.handoff.wake()

    def _note_left_out(self) -> None:
        """Begin the next run after one of which all was left out."""
        if self._checkpointer.left_out == ALL:
            if (loader := self._loader()) is None:
                raise LoaderClosedError("the loader of this iterator is gone; load the state into a new loader")
            self.begin_next(loader, self.asked)

    def _take_from(self, run: Run) -> None:
        """Have consumers take from a run that has begun."""
        self._run, self._is_made, self.is_closed, self._pass = run, True, False, None
        self.face: str = ""  # the next call decides it
        self._meter = run.meter

    def _make_run(self, start: RunStart) -> Run:
        """Return a run, which nobody has begun."""
        options, plan, progress = self._options, start.plan, start.checkpointer.progress
        epoch = start.checkpointer.epoch_spec(next(self._run_numbers), start.starts)  # as workers are to know it
        scheduler = Scheduler(
            options,
            first=progress.now.position,
            next_worker=progress.now.next_worker,
            runs_ahead=not may_be_looked_at(options.index_sampler),
        )
        meter = self._runs.make_meter(options.num_at_start, scheduler.window, keys_arrive=plan.arrives)
        return Run(options, scheduler, epoch, meter, plan, progress)

    # ------------------------------------------------------------------------------------------------- workers

    def _make_finisher(self, loop: GuardedLoop) -> Finisher | None:
        return None if self._pinned_for is None else Finisher(loop, self._pinned_for)

    def _make_pool(self, loop: GuardedLoop) -> Backend[Any]:
        """Decide where the workers run: on a loop (0 of them), on threads, in processes, where a provider has them.

        Raises:
            Exception: as the pickling of the dataset or a function raises it, or as a provider's backend does.
        """
        options, spec = self._options, self._worker_spec()
        if options.is_in_process:
            return LocalPool(loop, spec, on_threads=options.num_workers > 0)
        if options.provider is not None:
            backend: Backend[Any] = options.provider.make_backend(options, spec, loop)
            return backend
        pool = Pool(loop, options.start_context, spec)
        pool.pack()
        return pool

    def note_number(self, num_workers: int) -> None:
        """Note the number of workers, which looks after itself, for the loader. On the loop thread."""
        if (loader := self._loader()) is not None:
            loader._note_num_workers(num_workers)  # unless it was set meanwhile

    @property
    def is_usable(self) -> bool:
        """Whether it can begin another run."""
        engine = self._engine
        is_there = self._pid == os.getpid() and engine.state in (State.NEW, State.OPEN)
        return is_there and not self.is_closed and engine.error is None and not engine.recovery.has_lost_for_good

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

    def is_ready(self) -> bool:
        """Whether the next batch is there."""
        return self._run.has_ready

    def _take(self, asked_at: float) -> Any:
        item = None
        try:
            with self._lock:
                if self._pass is not exits.token:
                    self._enter(FOR)
                run = self._run
                if (item := run.first()) is not None:
                    return self._give(run, item, 0.0, asked_at)
                run, item = self._wait_for_item()
                return self._give(run, item, asked_at, perf_counter())
        finally:
            item = None  # the traceback of an error refers to this frame

    def _wait_for_item(self) -> tuple[Run, Item]:
        refuse_to_block_the_loop()
        deadline = self._begin_wait()
        while (item := self._look(run := self._run)) is None:  # another one, if the iterator has begun it meanwhile
            if not run.handoff.wait(run.has_news, deadline) and not run.has_news():
                deadline = self._ask(run)
            elif run.is_answered:
                deadline = self._begin_wait()
        return run, item

    async def _take_async(self, asked_at: float) -> Any:
        item = None
        try:
            if self._started is not None:
                await self._until_started()
            run = self._run
            if (item := run.first()) is not None:
                return self._give(run, item, 0.0, asked_at)
            run, item = await self._wait_for_item_async()
            return self._give(run, item, asked_at, perf_counter())
        finally:
            item = None

    async def _wait_for_item_async(self) -> tuple[Run, Item]:
        deadline = self._begin_wait()
        try:
            while (item := self._look(run := self._run)) is None:
                if not await run.handoff.wait_async(run.has_news, deadline) and not run.has_news():
                    deadline = self._ask(run)
                elif run.is_answered:
                    deadline = self._begin_wait()
                self._last_turn = time.monotonic()
        except StopIteration:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:  # of the sampler
            raise stand_in(error, in_async_for=True) from error
        return run, item

    def check_first(self) -> None:
        """Wait until the first batch is there, and raise what stands for it if its worker could not be set up."""
        with contextlib.suppress(StopIteration, BatchTimeoutError):  # which the consumer is told of by `next`
            if not self._keys_arrive and is_of_opening(self._wait_for_item()[1].outcome.error):
                next(self)

    def _begin_wait(self) -> float | None:
        """Return until when a consumer waits for a batch from now on, before it asks what the batch waits for."""
        # In this order: an answer to an earlier question, which the loop thread is about to give, is for nobody.
        self._run.is_asked = self._run.is_answered = False
        timeout = self._options.timeout
        return time.monotonic() + timeout if timeout > 0 else None

    def _ask(self, run: Run) -> float:
        """Have the engine find out what a batch waits for that has not come in time; return until when it is to answer.

        The answer comes as other items do: an error that is raised first, or nothing but a wake-up.

        Raises:
            BatchTimeoutError: if the engine was asked, and has not answered: something blocks its loop.
        """
        timeout = self._options.timeout
        if run.is_asked:
            raise loop_blocked(timeout, self._engine.portal.where())
        run.is_asked = True
        self._engine.post(self._engine.look_for_overdue, run, timeout)
        return time.monotonic() + _ANSWER_S

    def _look(self, run: Run) -> Item | None:
        """Return the first item, or find out that there will be none, or do what can be done before waiting.

        Raises:
            StopIteration: if everything was taken.
        """
        if (item := run.first()) is not None:
            return item
        self._check_usable()
        try:
            run.check()
            run.read_on()
        except StopIteration:
            run.progress.note_end()
            raise
        finally:
            if run.all_taken and not self._persistent_workers:
                self._engine.request_close()  # the workers may go
        return None

    def _give(self, run: Run, item: Item, asked_at: float, came_at: float) -> Any:
        """Return the batch of an item, or raise what is in its place; it is counted last.

        Args:
            run: The run that has the item: another thread may have begun the next one since.
            item: The item.
            asked_at: Since when the consumer has waited; 0.0 if it has just come.
            came_at: Since when it need not wait.
        """
        outcome = item.outcome
        run.read_for(item, asked_at, came_at)
        if outcome.kind == Kind.BATCH:
            if self._IterableDataset_len_called is not None:
                self.check_length()
            run.count(item)
            self._num_yielded += 1
            return outcome.data
        error = stand_in(outcome.error, in_async_for=self.face != FOR)
        run.count(item)
        try:
            raise error
        finally:
            del error, item, outcome  # a traceback that refers to this frame would keep the iterator, and its workers

    async def _until_started(self) -> None:
        """Wait until workers are started."""
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
        engine, run = self._engine, self._run
        is_closing = self.is_closed or engine.state in (State.CLOSING, State.CLOSED)
        if is_closing and not run.all_taken and run.error is None:
            engine.portal.stop_daemon()
            raise LoaderClosedError("this iterator was closed; call iter(loader) for a new one")

    # --------------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """End the run: workers finish what they are at, and are killed after 3 s. Returns when they are gone."""
        if not self._is_finalizing() and self._is_made and self._pid == os.getpid():
            self.leave()
            refuse_to_block_the_loop()
            self._wait_closed()

    def leave(self) -> None:
        """End the run as `close` does, without waiting for it."""
        if self._is_made:
            self.is_closed, self._pass = True, None  # batches that are ready are not given either
            self._engine.request_close()

    def _wait_closed(self) -> None:
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
