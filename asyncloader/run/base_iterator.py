"""What both kinds of iterators share: statistics, state, context managers, and a loop that turns."""

from __future__ import annotations

import asyncio
import copy
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from asyncloader.engine.handoff import Handoff
from asyncloader.engine.progress import Call
from asyncloader.engine.taking import Item
from asyncloader.epochs import Told
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.iterating_thread import IteratingThread
from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.modes import Modes
from asyncloader.observe.meter import Meter
from asyncloader.observe.notices import warn
from asyncloader.observe.stats import LoaderStats
from asyncloader.options import Options
from asyncloader.run.checkpoint import Checkpointer, check
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.seeding_epochs import SeedingEpochs
from asyncloader.worker.data_pipes import shard

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
    """What both kinds of iterators share: statistics, state, context managers, and a loop that turns.

    Args:
        loader: For torch's constructor, and nothing else.
        options: What is iterated over, and how.
        runs: Of the loader, which is told of this one.
    """

    _last_turn = 0.0
    _last_warned = 0
    _meter: Meter
    _checkpointer: Checkpointer

    def __init__(self, loader: DataLoader[T_co], options: Options, runs: Runs) -> None:
        self._loader = weakref.ref(loader)
        self._options = options
        self._runs = runs
        self._seeding = SeedingEpochs()
        if options.seeds_here:
            self._seeding.end_with(self)

    def _construct(self, loader: DataLoader[T_co]) -> None:
        """Run torch's constructor, which iterates over the sampler and draws the base seed."""
        super().__init__(loader)

    def _begin(
        self,
        iterate: Callable[[], object],
        state: dict[str, Any] | None = None,
        *,
        prepare: Callable[[], object] | None = None,
        inline: bool = False,
        last: Checkpointer | None = None,
    ) -> RunStart:
        """Begin a run, and put our reader of the sampler in the place of torch's. See `begin`."""

        def draw() -> Drawn:
            iterate()
            return Drawn(self._sampler_iter, int(self._base_seed), self._shared_seed, self._num_yielded)

        start = begin(self._options, state, self._runs, draw, prepare=prepare, inline=inline, last=last)
        self._checkpointer = start.checkpointer
        if self._options.seeds_here:
            self._seeding.begin(start.key)
        self._base_seed = start.checkpointer.base_seed
        self._shared_seed = start.checkpointer.shared_seed
        self._sampler_iter = start.plan
        self._num_yielded = start.checkpointer.progress.now.position
        return start

    def _worker_spec(self) -> WorkerSpec:
        """Return what batches are made with."""
        options = self._options
        own: dict[str, Any] = {
            "dataset": self._dataset,
            "worker_init_fn": self._init_fn(),
            "base_seed": int(self._base_seed),
            "modes": self._modes(),
            "thread": IteratingThread.of_this_thread() if options.has_workers or options.overlaps else None,
            "epochs": self._epochs(),
        }
        shared = {each.name: getattr(options, each.name) for each in fields(WorkerSpec) if each.name not in own}
        return WorkerSpec(**shared, **own)

    def _epochs(self) -> tuple[Told, ...]:
        """Return what the dataset was told by `set_epoch`, if workers have copies of it."""
        return self._runs.heard(self._dataset) if self._options.has_workers else ()

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

    def stats(self) -> LoaderStats:
        """Return where the time of this run has gone so far. Takes 20 us, in any thread."""
        return self._meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the batches that were yielded: see :meth:`asyncloader.DataLoader.state_dict`."""
        return self._checkpointer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, with this iterator: what it was at is dropped, and its workers are started anew.

        Raises:
            StateMismatchError: if the state is of something else.
            LoaderClosedError: if the loader is gone.
        """
        loader = self._loader()
        if loader is None:
            raise LoaderClosedError("the loader of this iterator is gone; load the state into a new loader")
        check(state, self._options)
        self._runs.note_epochs(self._options)
        self._begin_anew(loader, copy.deepcopy(state))

    def _begin_anew(self, loader: DataLoader[T_co], state: dict[str, Any]) -> None:
        raise NotImplementedError

    # Ctrl-C may hit after any call; see `asyncloader.engine.progress`. So a batch is given by assignments, behind which
    # there is nothing but `return`; what is raised in its place likewise, and the end.

    def __next__(self) -> Any:
        call = Call()
        try:
            item = self.next_item(call)
            batch, error = item.open()
            if error is None and self._IterableDataset_len_called is not None:
                self.check_length()
        except StopIteration:
            progress = self._checkpointer.progress
            progress.is_over = not progress.is_broken
            call.item = None
            raise
        except BaseException:
            call.is_over = True
            self._handoff.wake()  # somebody else may take it
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
            progress = self._checkpointer.progress
            progress.is_over = not progress.is_broken
            call.item = None
            raise
        except BaseException:
            call.is_over = True
            self._handoff.wake()
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

    @property
    def _handoff(self) -> Handoff[Item]:
        """What is taken from."""
        raise NotImplementedError

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
        raise NotImplementedError

    def _next(self, call: Call) -> Item:
        raise NotImplementedError

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
