"""num_workers=0: batches are made in the consumer's process. Samples that overlap there have a session, as workers do.

- ``for``: in the caller's thread. No thread, no process, everything can be debugged.
- ``async for``: on a thread of the run's own, so that the caller's loop stays free. The caller still reads the sampler.

Batches are made one at a time, and none before a consumer asks for it: without workers torch prefetches nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from asyncloader.engine import exits
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.finisher import pinned
from asyncloader.engine.portal import get_portal, refuse_to_block_the_loop
from asyncloader.engine.progress import Call
from asyncloader.engine.taking import Item, Taking
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.messages import Kind
from asyncloader.messages.snapshot import Frozen
from asyncloader.observe.faults import Faults
from asyncloader.options import Options
from asyncloader.run.base_iterator import BaseIterator, check_owner
from asyncloader.run.inline_run import InlineHost, InlineRun
from asyncloader.run.run_start import RunStart, reads_again
from asyncloader.run.runs import Runs
from asyncloader.run.state import LoaderState
from asyncloader.seeding.generators import GLOBAL, check_of, left_alone
from asyncloader.seeding.turns import Drawing, alone, untouched
from asyncloader.worker.batch_maker import BatchMaker

T_co = TypeVar("T_co", covariant=True)


def _run_on_portal(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await samples that turn out to be awaitables, where there may be a loop already: the caller's."""
    try:
        refuse_to_block_the_loop()
    except BaseException:
        coroutine.close()
        raise
    future = get_portal().run(coroutine)
    try:
        return future.result()
    except SystemExit as error:
        if future.done() and not future.cancelled() and future.exception() is error:
            error.asyncloader_of_a_sample = True  # type: ignore[attr-defined]
        raise


def _has_heard(run: InlineRun) -> bool:
    return not run.has_asked


def _checks() -> list[int]:
    with untouched():
        return list(map(check_of, GLOBAL))


@contextlib.contextmanager
def _left_alone(generators: Iterable[Any]) -> Iterator[None]:
    with untouched(), left_alone(generators):
        yield


class InlineIterator(BaseIterator[T_co], _SingleProcessDataLoaderIter):
    """Batches made in this process.

    Args:
        loader: For torch's constructor, and nothing else.
        options: The loader's.
        runs: The loader's.
        state: To begin from.
    """

    _run: InlineRun

    def __init__(
        self, loader: DataLoader[T_co], options: Options, runs: Runs, state: LoaderState | None = None
    ) -> None:
        super().__init__(loader, options, runs)
        self._start(loader, state)

    def _start(self, loader: DataLoader[T_co], state: LoaderState | None) -> None:
        """Begin a run."""
        start, options = self._begin(partial(self._construct, loader), state), self._options
        progress, faults = start.checkpointer.progress, Faults()
        arrives = bool(getattr(start.plan, "arrives", False))
        self._meter = self._runs.make_meter(options, start.checkpointer.epoch, 0, 0, faults, keys_arrive=arrives)
        self._runs.meter = self._meter
        taking = Taking(progress, ErrorLimit(options, progress, faults))
        pin = None if self._pinned_for is None else partial(pinned, device=self._pinned_for)
        self.is_closed = False
        maker, made = self._make_maker(start), start.checkpointer
        aside = partial(alone, made.key, maker.seeder.own) if options.seeds_each_sample else None
        self._run = InlineRun(start.plan, taking, maker, pin, aside)
        self._run.stop_with(self)
        if arrives:  # whoever brings keys may wait for those who take batches
            exits.note_user()
        self._dataset_fetcher = None  # torch's
        self._pid = os.getpid()

    def _make_maker(self, start: RunStart) -> BatchMaker:
        """Return what makes batches, its dataset where the run begins. Raises whatever the dataset raises.

        Making batches again from the dataset's state draws what was drawn before the trainer saved the global
        generators. So these are put back afterwards, but for those that the state itself has set. A stream that is read
        again from its beginning has its order drawn again.
        """
        options, checks, kept = self._options, _checks(), list(GLOBAL)
        order = start.checkpointer.order if reads_again(self._options, start.starts) else None

        def aside() -> contextlib.AbstractContextManager[None]:
            return order.first() if order is not None and order.is_due else _left_alone(kept)

        # torch's own fetcher has begun to iterate, which a dataset may count; but before the dataset was in its state.
        is_begun = options.is_iterable and not (start.starts and start.starts[0].snapshot)
        iterator = self._dataset_fetcher.dataset_iter if is_begun else None
        maker = BatchMaker(0, self._worker_spec(), InlineHost(), _run_on_portal, aside=aside)

        def open_source(dataset: Any) -> None:
            maker.open_fetcher(dataset, iterator)
            kept[:] = [each for each, before, now in zip(GLOBAL, checks, _checks(), strict=True) if before == now]

        with Drawing():  # a state of the dataset may set global generators
            maker.begin(start.checkpointer.epoch_spec(0, start.starts), open_source)
        if maker.failure is not None:
            raise maker.failure
        return maker

    # -------------------------------------------------------------------------------------------------- taking

    def _next(self, call: Call) -> Item:
        asked_at = perf_counter()
        while True:
            run = self._run
            if run.closed or run.is_torn or self._pid != exits.pid:
                self._check_usable()
            with run.making:
                if not (is_left := exits.is_exiting and exits.is_left_behind()):
                    try:
                        run.taking.progress.follower()  # before the batch is read: it may depend on that
                        if not (run.ready or run.taking.num_dropped) and (run.to_do or run.read()):
                            run.make()
                        if (item := self._take(run, call, asked_at)) is not None:
                            return item
                    finally:
                        run.handoff.wake()  # a task may have waited for this batch, or for the end
                        item = None  # what a sample has raised may refer to this frame
            if is_left:
                exits.stop_daemon()
            if run.has_asked:
                run.handoff.wait(partial(_has_heard, run), None)

    async def _until_started(self) -> None:
        exits.note_user()

    def _take_or_ask(self, call: Call, asked_at: float, *, has_waited: bool) -> Item | None:
        """Take a batch, or see that there is one to do for each task that waits.

        The batch of a task that was cancelled is taken by the next consumer. So a task that has waited may find nothing
        and asks again.
        """
        self._check_usable()
        run = self._run
        with run.taking.progress.lock:
            if (item := self._take(run, call, asked_at)) is None and run.lacks(run.handoff.waiting + 1):
                run.read()
        if run.to_do:
            run.kick()
        elif run.is_over:
            run.handoff.wake()  # a task that still waits learns that there is no more
        return item

    def _take(self, run: InlineRun, call: Call, asked_at: float) -> Item | None:
        """Take what is ready.

        Raises:
            StopIteration: at the end of the data.
        """
        taking = run.taking
        with taking.progress.lock:
            item = taking.take(call)
        if item is None:
            if not run.is_over:
                return None
        elif (outcome := item.outcome).kind == Kind.BATCH:
            self._meter.took_here(asked_at, outcome.record, item.times, len(run.ready))
            return item
        elif outcome.kind != Kind.EXHAUSTED:
            self._meter.faults.errors += 1
            return item
        elif isinstance(outcome.snapshot, Frozen):
            taking.progress.ends = {0: outcome.snapshot}
        self._meter.log_summary()
        run.handoff.wake_all()  # tasks that still wait learn that there is no more
        raise StopIteration

    def _restart(self, loader: DataLoader[T_co], state: LoaderState) -> None:
        self.close()
        self._start(loader, state)

    def _check_usable(self) -> None:
        check_owner(self._pid)
        run = self._run
        if run.closed and not run.is_over:
            raise LoaderClosedError("this iterator was closed; call iter(loader) for a new one")
        if run.is_torn:
            raise LoaderClosedError(
                "this iterator was interrupted while it read its dataset, and what it had read of a batch is gone; "
                "to go on, load the loader's state_dict() and call iter(loader)"
            )

    def close(self) -> None:
        """End; a batch in work on the thread is waited for, 3 s at most."""
        if self._is_finalizing() or not self._is_made:
            return
        self.leave()
        self._run.join(3.0)
        self._seeding.end()

    def leave(self) -> None:
        """End the run as `close` does, without waiting for it."""
        self.is_closed = True
        if not self._is_made:
            return
        self._run.close()
        self._run.stop()
        self._run.handoff.wake_all()

    async def aclose(self) -> None:
        """End as `close` does, without blocking the loop."""
        await asyncio.to_thread(self.close)
