"""The base of both kinds of iterators: statistics, state, context managers, and a loop that turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _sharding_worker_init_fn

from asyncloader import threads
from asyncloader.engine import exits
from asyncloader.engine.finisher import accelerator
from asyncloader.errors import LoaderClosedError
from asyncloader.log import log
from asyncloader.messages.imports import imports_here
from asyncloader.messages.messages import WorkerSpec
from asyncloader.messages.modes import Modes
from asyncloader.messages.snapshot import outlasting
from asyncloader.observe.meter import Meter
from asyncloader.observe.notices import warn
from asyncloader.observe.stats import LoaderStats
from asyncloader.options import Options
from asyncloader.run.checkpoint import Checkpointer
from asyncloader.run.plan import order_generators
from asyncloader.run.run_start import Drawn, RunStart, begin
from asyncloader.run.runs import Runs
from asyncloader.run.state import ALL, LoaderState

T_co = TypeVar("T_co", covariant=True)

_REPLICAS = (
    "For multiprocessing data-loading, this could be caused by not properly configuring the "
    "IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
)

_profiler_enabled = torch._C._autograd._profiler_enabled

FOR, ASYNC_FOR = "for", "async for"
"""The faces of an iterator, which has one of them."""

iterators_here: weakref.WeakSet[BaseIterator[Any]] = weakref.WeakSet()
"""Those that are there."""

LONGEST_TURN_S = 0.002
"""`async for` over batches that are always ready lets its loop turn after this time. Seconds."""


class ClosableIterator:
    """An iterator and an asynchronous one, each of which is a context manager that closes it."""

    def close(self) -> None:
        """End the run and let go of everything; wait for it, 3 s at most."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        await asyncio.to_thread(self.close)

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
    """It was closed before its end, or by a `load_state_dict` of its loader."""
    _is_made = False
    """There is something to close: a constructor that raises leaves an iterator, which tracebacks keep."""
    _is_finalizing = staticmethod(sys.is_finalizing)
    """At the end of the interpreter all has been closed, and the names of modules are gone: a ``__del__`` of the user's
    may still call the iterator."""
    _last_turn = 0.0
    _last_warned = 0
    _meter: Meter
    _checkpointer: Checkpointer
    face: str = ""
    """How it is read: that of `aiter` by ``async for``; otherwise the first call decides."""
    _pass: object = None
    """`exits.token`, when a call by ``for`` was let in, as long as nothing has changed since."""
    _lock: threading.Lock
    """Held by a thread for the whole of its call. Whoever makes a state, closes, or looks at figures needs it not."""
    _loop: asyncio.AbstractEventLoop | None = None
    _turn = asyncio.Lock()

    def __init__(self, loader: DataLoader[T_co], options: Options, runs: Runs) -> None:
        self._loader: Callable[[], Any] = weakref.ref(loader)
        self._options = options
        self._runs = runs
        self._lock, self._pid = threading.Lock(), os.getpid()
        iterators_here.add(self)

    def _construct(self, loader: DataLoader[T_co]) -> None:
        """Run torch's constructor, which iterates over the sampler and draws the base seed."""
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
        if state is not None and (chosen := self._runs.set_epochs.of_another(state, self._options)):
            rng = order_generators(self._options)
            before, set_by_trainer = rng.capture(), self._runs.set_by_trainer(rng)
            left = self._leave_epoch(begin_run(state, prepare=prepare), chosen)
            rng.restore(before, set_by_trainer)
            prepare = None if self._options.persistent_workers else prepare  # which keep the seed
            start = begin_run(None, prepare=prepare, left=left, iterator=self)
        else:
            start = begin_run(state, prepare=prepare, iterator=self)
        self._checkpointer = start.checkpointer
        start.plan.end_with(self)
        self._keys_arrive = start.plan.arrives
        self._base_seed = start.checkpointer.key[0]
        self._shared_seed = start.checkpointer.common.shared_seed
        self._sampler_iter = start.plan
        self._num_yielded = start.checkpointer.progress.now.position
        return start

    def _leave_epoch(self, start: RunStart, chosen: Sequence[int | None]) -> RunStart:
        """Leave a run that was resumed, as another epoch was set since its state was loaded: that begins now."""
        start.plan.leave()
        made = start.checkpointer
        self._base_seed = made.key[0]
        self._runs.set_epochs.choose(chosen, self._options)
        epochs = [each for each in chosen if each is not None]
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
        return partial(_sharding_worker_init_fn, options.worker_init_fn, self._world_size, self._rank)

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

    def leave_out(self) -> None:
        """Read the batches that the state leaves out, and drop them; or all, and begin the next run.

        After `aiter` the first ``anext`` does, which does not block its loop.
        """
        made = self._checkpointer
        with contextlib.suppress(StopIteration):
            while made.left_out:
                next(self)
                made.left_out -= made.left_out != ALL
        self.face, self._pass = "", None  # the consumer's first call decides
        self._note_left_out()

    async def _leave_out_aside(self) -> None:
        made = self._checkpointer
        with contextlib.suppress(StopAsyncIteration):
            while made.left_out:
                await self._take_async(perf_counter())
                made.left_out -= made.left_out != ALL
        self._note_left_out()

    def _note_left_out(self) -> None:
        """Go on after what was left out."""

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

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop. Who cancels this has ended the run all the same."""
        if self._pid == os.getpid():
            self.leave()
        await super().aclose()

    # -------------------------------------------------------------------------------------------- taking, by one face

    def __next__(self) -> Any:
        asked_at = perf_counter()
        if _profiler_enabled():
            with torch.autograd.profiler.record_function(self._profile_name):
                return self._take(asked_at)
        return self._take(asked_at)

    async def __anext__(self) -> Any:
        asked_at = perf_counter()
        await self.let_the_loop_turn()
        check_owner(self._pid)
        async with self._turn_of_task():
            self._enter(ASYNC_FOR)
            if self._checkpointer.left_out:
                await self._leave_out_aside()
            return await self._take_async(asked_at)

    def _take(self, asked_at: float) -> Any:
        """Return the next batch, with `_lock` held meanwhile: each batch goes to exactly one of the threads that share.

        Raises:
            StopIteration: if everything was taken.
        """
        raise NotImplementedError

    async def _take_async(self, asked_at: float) -> Any:
        """Return the next batch as `_take` does, without blocking the loop. Tasks take turns.

        Raises:
            StopAsyncIteration: if everything was taken.
        """
        raise NotImplementedError

    def _check_usable(self) -> None:
        """Refuse to give batches of an iterator that was closed, unless it is at its end."""
        raise NotImplementedError

    def _enter(self, face: str) -> None:
        """Look whether a call may go on, by this face.

        As long as nothing changes, that is looked at once: `close` takes the pass away, and it is void in a fork and at
        the end of the program. It is there before the look, so that one that is taken meanwhile stays away.
        """
        check_owner(self._pid)
        check_face(self.face, face)
        self.face = face
        if face == ASYNC_FOR or self._keys_arrive:  # by a feed, which ends with all who are noted
            exits.note_user()
        if face == FOR and not exits.is_exiting:
            self._pass = exits.token
        elif face == FOR and exits.is_left_behind():
            self._lock.release()
            exits.stop_daemon()
        try:
            self._check_usable()
        except BaseException:
            self._pass = None
            raise

    def _turn_of_task(self) -> asyncio.Lock:
        """Return the lock that tasks hold, one after the other: those of one loop.

        Raises:
            RuntimeError: if tasks of another loop, which still runs, have taken batches.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_running():
                raise RuntimeError("this iterator is read by tasks of another event loop; make one for each loop")
            self._loop, self._turn = loop, asyncio.Lock()
        return self._turn

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


def _renew_locks() -> None:
    """Let a fork refuse calls, also of an iterator that a thread of its parent was just taking from."""
    for iterator in threads.copied(iterators_here):
        iterator._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def check_owner(pid: int) -> None:
    """Refuse to work in a fork of the process that made the iterator: its workers and its loop are not there."""
    if pid != os.getpid():
        raise LoaderClosedError(
            "this iterator belongs to the process that made it, not to a fork of it; call iter(loader) here"
        )


def check_face(before: str, face: str) -> None:
    """Refuse a call by another face than that of the calls before, "" if there were none."""
    if before not in ("", face):
        raise RuntimeError(
            f"this iterator is read by `{before}`, so it cannot be read by `{face}` as well; make another one for that "
            "(iter(loader) or aiter(loader))"
        )
