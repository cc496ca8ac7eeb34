"""The base of both kinds of iterators: statistics, state, context managers, and a loop that turns."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from asyncloader.engine.finisher import accelerator
from asyncloader.engine.progress import Call
from asyncloader.engine.taking import Item
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.failure import stand_in
from asyncloader.messages.imports import imports_here
from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.modes import Modes
from asyncloader.messages.snapshot import outlasting
from asyncloader.observe.meter import Meter
from asyncloader.observe.notices import warn
from asyncloader.observe.stats import LoaderStats
from asyncloader.options import Options
from asyncloader.run.checkpoint import Checkpointer
from asyncloader.run.fits import check
from asyncloader.run.plan import order_generators
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.seeding_epochs import SeedingEpochs
from asyncloader.run.set_epochs import Chosen
from asyncloader.run.state import LoaderState
from asyncloader.worker.data_pipes import one_walks, shard

log = logging.getLogger("asyncloader")

T_co = TypeVar("T_co", covariant=True)

_REPLICAS = (
    "For multiprocessing data-loading, this could be caused by not properly configuring the "
    "IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
)

_profiler_enabled = torch._C._autograd._profiler_enabled

LONGEST_TURN_S = 0.002
"""`async for` over batches that are always ready lets its loop turn after this time. Seconds."""


class ClosableIterator:
    """An iterator and an asynchronous one, each of which is a context manager that closes it."""

    def close(self) -> None:
        """End the run and let go of everything; wait for it, 3 s at most."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self


class BaseIterator(ClosableIterator, _BaseDataLoaderIter, Generic[T_co]):
    """The base of both kinds of iterators: statistics, state, context managers, and a loop that turns.

    Args:
        loader: For torch's constructor, and nothing else.
        options: The loader's.
        runs: The loader's; they are told of this iterator's runs.
    """

    is_closed = False
    """It was closed before its end, or has been given up by a `load_state_dict` of its loader."""
    _is_finalizing = staticmethod(sys.is_finalizing)
    """At the end of the interpreter all has been closed, and the names of modules are gone: a ``__del__`` of the user's
    may still call the iterator."""
    _last_turn = 0.0
    _last_warned = 0
    _meter: Meter
    _checkpointer: Checkpointer
    _run: Any
    """A `Run` or an `InlineRun`."""

    def __init__(self, loader: DataLoader[T_co], options: Options, runs: Runs) -> None:
        self._loader: Callable[[], Any] = weakref.ref(loader)
        self._options = options
        self._runs = runs
        self._seeding = SeedingEpochs()
        if options.seeds_here:
            self._seeding.end_with(self)

    @property
    def _is_made(self) -> bool:
        """Whether there is something to close: a constructor that raises leaves an iterator, which tracebacks keep."""
        return "_run" in vars(self)

    def _construct(self, loader: DataLoader[T_co]) -> None:
        """Run torch's constructor, which iterates over the sampler and draws the base seed."""
        with one_walks(loader.dataset):  # torch seeds each pipe of a graph
            super().__init__(loader)
        self._pinned_for = accelerator() if self._pin_memory else None

    def _begin(
        self,
        iterate: Callable[[], object],
        state: LoaderState | None = None,
        *,
        prepare: Callable[[], object] | None = None,
        last: Checkpointer | None = None,
    ) -> RunStart:
        """Begin a run, and put our reader of the sampler in the place of torch's. See `begin`."""

        def draw() -> Drawn:
            iterate()
            return Drawn(self._sampler_iter, int(self._base_seed), self._shared_seed, self._num_yielded)

        begin_run = partial(begin, self._options, runs=self._runs, draw=draw, last=last)
        if state is not None and (chosen := self._runs.set_epochs.of_another(state, self._options)) is not None:
            rng = order_generators(self._options)
            before, set_by_trainer = rng.capture(), self._runs.set_by_trainer(rng)
            left = self._leave_epoch(begin_run(state, prepare=prepare), chosen)
            rng.restore(before, set_by_trainer)
            prepare = None if self._options.persistent_workers else prepare  # which keep the seed
            start = begin_run(None, prepare=prepare, left=left)
        else:
            start = begin_run(state, prepare=prepare)
        self._runs.current.hand_on(self)
        self._checkpointer = start.checkpointer
        start.plan.end_with(self)
        if self._options.seeds_here:
            self._seeding.begin(start.checkpointer.key)
        self._base_seed = start.checkpointer.base_seed
        self._shared_seed = start.checkpointer.shared_seed
        self._sampler_iter = start.plan
        self._num_yielded = start.checkpointer.progress.now.position
        return start

    def _leave_epoch(self, start: RunStart, chosen: Chosen) -> RunStart:
        """Leave a run that was resumed, as another epoch was set since its state was loaded: that begins now."""
        start.plan.leave()
        made = start.checkpointer
        self._base_seed = made.base_seed
        self._runs.set_epochs.choose(chosen, self._options)
        epochs = [each for each in (*chosen.samplers, *chosen.dataset) if each is not None]
        log.warning(
            "Epoch %d was set after a state was loaded that is of another epoch, after %d batches of that. Epoch %d "
            "begins at its beginning. To go on in the middle of the other epoch, set that one, or none.",
            epochs[0],
            made.progress.now.position,
            epochs[0],
        )
        return start

    def _worker_spec(self) -> WorkerSpec:
        """Return what batches are made with."""
        options = self._options
        own: dict[str, Any] = {
            "dataset": self._dataset,
            "worker_init_fn": self._init_fn(),
            "base_seed": int(self._base_seed),
            "modes": self._modes(),
            "importing": imports_here(),
        }
        shared = {each.name: getattr(options, each.name) for each in fields(WorkerSpec) if each.name not in own}
        return WorkerSpec(**shared, **own)

    def _modes(self) -> Modes | None:
        """Look at torch's modes of the caller, where torch's workers would be forked with them."""
        options = self._options
        if not options.has_workers:
            return None
        is_forked = options.worker_backend == "thread" or options.start_context.get_start_method() == "fork"
        return Modes.of_this_thread() if is_forked else None

    def _init_fn(self) -> Any:
        """Return the user's function, with torch's sharding of data pipes before it."""
        options = self._options
        if not options.has_workers:
            return None
        if not isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            return options.worker_init_fn
        return partial(shard, options.worker_init_fn, self._world_size, self._rank)

    def set_num_workers(self, num_workers: int) -> None:
        """Do nothing: batches are made without workers, as long as this iterator is there."""

    @property
    def seeds(self) -> tuple[int, int, int]:
        """The numbers that seed this run: base seed, how many runs had it before, and the rank of the data."""
        return self._checkpointer.key

    def is_ready(self) -> bool:
        """Whether the next batch is there, so that `next` does not wait for it. Without workers none is made ahead."""
        return False

    def stats(self) -> LoaderStats:
        """Return where the time of this run has gone so far. Takes 20 us, in any thread."""
        return self._meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the batches that were yielded: see :meth:`asyncloader.DataLoader.state_dict`."""
        return self._runs.state_of(self._checkpointer).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, with this iterator: what it was at is dropped, and its workers are started anew.

        Raises:
            StateMismatchError: if the state is of something else.
            LoaderClosedError: if the loader is gone.
        """
        loader = self._loader()
        if loader is None:
            raise LoaderClosedError("the loader of this iterator is gone; load the state into a new loader")
        loaded = LoaderState.from_dict(state)
        check(loaded, self._options)
        self._runs.note_load(loaded, self._options)
        self._restart(loader, loaded)

    def finish(self) -> None:
        """End the run here, as if the data were at their end: states are those of the next run."""
        progress = self._checkpointer.progress
        for worker, start in (progress.now.workers or {}).items():
            if start.snapshot is not None:  # of a dataset that is left in the middle of its data
                progress.ends.setdefault(worker, outlasting(start.snapshot, self._dataset))
        self._meter.log_summary()
        if not self._persistent_workers:
            self.leave()
        progress.note_end()

    def leave(self) -> None:
        """End the run as `close` does, without waiting for it."""
        raise NotImplementedError

    def _restart(self, loader: DataLoader[T_co], state: LoaderState) -> None:
        raise NotImplementedError

    # Ctrl-C may hit after any call; see `asyncloader.engine.progress`. So a batch is given by assignments, behind which
    # there is nothing but `return`; what is raised in its place likewise, and the end.

    def __next__(self) -> Any:
        call = Call()
        try:
            item = self.next_item(call) if _profiler_enabled() else self._next(call)
            batch, error = item.open()
            if error is None and self._IterableDataset_len_called is not None:
                self.check_length()
        except StopIteration:
            self._checkpointer.progress.note_end()
            call.item = None
            raise
        except BaseException:
            call.is_interrupted = True
            self._run.handoff.wake()  # somebody else may take it
            raise
        if error is None:
            self._num_yielded += 1
            call.item = None
            return batch
        try:
            call.item = None
            raise error
        finally:
            del item, error  # a traceback that refers to this frame would keep the iterator, and its workers, alive

    async def __anext__(self) -> Any:
        await self.let_the_loop_turn()
        call = Call()
        try:
            item = await self.next_item_async(call)
            batch, error = item.open(in_async_for=True)
            if error is None and self._IterableDataset_len_called is not None:
                self.check_length()
        except StopAsyncIteration:
            self._checkpointer.progress.note_end()
            call.item = None
            raise
        except BaseException:
            call.is_interrupted = True
            self._run.handoff.wake()
            raise
        if error is None:
            self._num_yielded += 1
            call.item = None
            return batch
        try:
            call.item = None
            raise error
        finally:
            del item, error

    def next_item(self, call: Call) -> Item:
        """Take what comes next, for this call: it is on its way then, until ``call.item`` is None.

        Raises:
            StopIteration: if everything was taken.
        """
        if _profiler_enabled():
            with torch.autograd.profiler.record_function(self._profile_name):
                return self._next(call)
        return self._next(call)

    async def next_item_async(self, call: Call) -> Item:
        """Take what comes next as `next_item` does, without blocking the loop.

        Raises:
            StopAsyncIteration: if everything was taken.
        """
        asked_at, has_waited = time.perf_counter(), False
        await self._until_started()
        deadline = self._deadline()
        try:
            while (item := self._take_or_ask(call, asked_at, has_waited=has_waited)) is None:
                run = self._run  # another one, if the iterator has begun it meanwhile
                if not await run.handoff.wait_async(run.has_news, deadline) and not run.has_news():
                    await self._raise_overdue()
                    deadline = self._deadline()
                self._last_turn, has_waited = time.monotonic(), True
        except StopIteration:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:  # of the sampler
            raise stand_in(error, in_async_for=True) from error
        try:
            return item
        finally:
            del item  # the traceback of an error of the sampler may refer to this frame

    def _deadline(self) -> float | None:
        """Return until when a consumer that comes now waits for a batch."""
        timeout = self._options.timeout
        return time.monotonic() + timeout if timeout > 0 else None

    def _next(self, call: Call) -> Item:
        raise NotImplementedError

    async def _until_started(self) -> None:
        """Wait for what a batch cannot come before."""
        raise NotImplementedError

    def _take_or_ask(self, call: Call, asked_at: float, *, has_waited: bool) -> Item | None:
        """Take what is there. Otherwise do what can be done before waiting.

        Raises:
            StopIteration: if everything was taken.
        """
        raise NotImplementedError

    async def _raise_overdue(self) -> None:
        """Raise what there is to say of a batch that has not come in time."""

    def check_length(self) -> None:
        """Warn as torch does when an iterable dataset gives more than it said; once a batch, also if that raises."""
        length, count = self._IterableDataset_len_called, self._num_yielded + 1
        if count > max(length or 0, self._last_warned) and self._dataset_kind != _DatasetKind.Map:
            self._last_warned = count
            warn(
                f"Length of IterableDataset {self._dataset} was reported to be {length}"
                f"(when accessing len(dataloader)), but {count} samples have been fetched. "
                + (_REPLICAS if self._num_workers else "")
            )

    async def let_the_loop_turn(self) -> None:
        """Give other tasks a turn, if there was none for a while."""
        now = time.monotonic()
        if now - self._last_turn > LONGEST_TURN_S:
            await asyncio.sleep(0)
            self._last_turn = time.monotonic()


def check_owner(pid: int) -> None:
    """Refuse to work in a fork of the process that made the iterator: its workers and its loop are not there."""
    if pid != os.getpid():
        raise LoaderClosedError(
            "this iterator belongs to the process that made it, not to a fork of it; call iter(loader) here"
        )
