"""num_workers=0: batches are made in the consumer's process.

- ``for``: in the caller's thread, by torch's own iterator. No thread, no process, everything can be debugged.
- ``async for``: on a thread of the iterator's own, so that the caller's loop stays free; the sampler is still read by
  the caller. One batch at a time, and none before it is asked for: at 0 workers torch prefetches nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from asyncloader.engine import exits
from asyncloader.engine.portal import get_portal, refuse_to_block_the_loop
from asyncloader.engine.run import Item
from asyncloader.errors import LoaderClosedError
from asyncloader.iteration.base_iterator import Faces, check_owner
from asyncloader.iteration.checkpoint import Beginning
from asyncloader.iteration.fetching import LEFT_OUT, FetchThread, Maker, TimedFetcher, fetch_threads
from asyncloader.iteration.plan import Done
from asyncloader.iteration.rng_snapshot import GlobalGenerators
from asyncloader.observe.faults import Faults, make_faults
from asyncloader.observe.meter import Meter
from asyncloader.transport.collate import recycling_collate
from asyncloader.workers.child.fetch import make_fetcher
from asyncloader.workers.protocol.failure import EndOfData, stand_in
from asyncloader.workers.protocol.snapshot import Frozen, Keeper

if TYPE_CHECKING:
    from asyncloader.loader import DataLoader

T_co = TypeVar("T_co", covariant=True)


def _run_on_portal(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await samples that turn out to be awaitables, where there may be a loop already: the caller's."""
    try:
        refuse_to_block_the_loop()
    except BaseException:
        coroutine.close()
        raise
    return asyncio.run_coroutine_threadsafe(coroutine, get_portal().loop).result()


class InlineIterator(Faces[T_co], _SingleProcessDataLoaderIter):
    """Batches made in this process."""

    def __init__(self, loader: DataLoader[T_co], state: dict[str, Any] | None = None) -> None:
        beginning = Beginning(loader, state, inline=True)
        super().__init__(loader)
        self._open_plan(loader, beginning)
        beginning.end()
        faults = make_faults(loader)
        epoch = self._record.epoch
        self._meter = loader._meter = Meter(epoch, 0, 0, faults, loader._open_trace())
        self._dataset_fetcher = self._make_fetcher(loader, faults, (int(self._base_seed), epoch, self._rank))
        self._pid = os.getpid()
        self._fetching = FetchThread(self._dataset_fetcher)
        self._finalizer = weakref.finalize(self, self._fetching.stop)
        self._finalizer.atexit = False
        self._closed = False
        self._exhausted = False
        self._taking = threading.Lock()
        self._asking = self._record.progress.lock  # held to read the sampler, and to change the thread's two numbers
        _iterators.add(self)

    def _make_fetcher(self, loader: DataLoader[T_co], faults: Faults, key: tuple[int, int, int]) -> TimedFetcher:
        """Return what makes batches, with a clock around it."""
        is_iterable = self._dataset_kind != 0
        # torch's own fetcher has begun to iterate, which a dataset may count.
        iterator = self._dataset_fetcher.dataset_iter if is_iterable else None
        keeper, generators = None, GlobalGenerators()
        if (starts := self._record.starts) is not None:
            keeper = Keeper(self._dataset, loader.snapshot_every_n_steps or 0, starts[0])
            if starts[0].snapshot is not None:
                iterator = None  # that was made before the dataset was in its state
        timed = TimedFetcher(self._meter, recycling_collate(self._collate_fn), self._auto_collation, keeper, generators)
        options = loader._checked_options()
        fetch = make_fetcher(
            self._dataset,
            is_iterable=is_iterable,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            run=_run_on_portal,
            on_error=options.on_error,
            where="in the main process",
            iterator=iterator,
        )
        timed.attach(fetch)
        timed.fetcher = Maker(
            key, self._record.progress.position, fetch, timed.collate, options.on_error == "skip", faults
        )
        return timed

    def _next_data(self) -> Any:
        while True:
            try:
                batch = super()._next_data()  # type: ignore[no-untyped-call]
            except EndOfData:
                self._finish()
                raise StopIteration from None
            except StopIteration:  # of the sampler
                raise
            except Exception:
                self._answered(None, self._dataset_fetcher.keys)
                raise
            self._answered(self._dataset_fetcher.snapshot, self._dataset_fetcher.keys)
            if batch is not LEFT_OUT:
                return batch

    def _answered(self, snapshot: Any, keys: Any) -> None:
        """Note what has become of the dataset by the last batch that was counted."""
        progress = self._record.progress
        progress.answered(0, snapshot, -1 if self._dataset_kind != 0 else progress.position - 1, keys)

    def _finish(self) -> None:
        """A stream has come to its end."""
        if isinstance(last := self._dataset_fetcher.last_state, Frozen):
            self._record.progress.ends = {0: last}
        self._record.progress.finished = True

    def __next__(self) -> Any:
        while True:
            self._check_usable()
            with self._taking:
                if not (exits.is_exiting and exits.is_left_behind()):
                    return self._next_from_thread() if self._fetching.unserved else self._next_made_here()
            exits.stop_daemon()

    def _next_made_here(self) -> Any:
        asked_at = time.perf_counter()
        try:
            batch = self._next_here()
        except StopIteration:
            self._meter.told()
            raise
        except Exception:
            self._meter.failed()
            raise
        self._meter.took(asked_at, self._dataset_fetcher.passage, 0, 0)
        return batch

    def _next_here(self) -> Any:
        if torch._C._autograd._profiler_enabled() or self._dataset_kind != 0:
            return super().__next__()
        batch = self._next_data()
        self._num_yielded += 1
        return batch

    def _next_from_thread(self) -> Any:
        """Take a batch that was asked for by a task that was cancelled, or the next one while tasks wait for theirs."""
        asked_at = time.perf_counter()
        fetching = self._fetching
        self._want(fetching, 1)
        try:
            while (item := self._take_or_request(asked_at)) is None:
                if self._exhausted and fetching.unserved < fetching.wanting:
                    raise StopIteration  # what comes is for tasks, perhaps of a loop in this thread
                fetching.handoff.wait(self._has_news, None)
                self._check_usable()
        finally:
            self._want(fetching, -1)
        try:
            return item.open()
        finally:
            del item

    async def __anext__(self) -> Any:
        self._check_usable()
        await self._let_the_loop_turn()
        item = await self._wait_async(time.perf_counter())
        try:
            return item.open()
        except StopIteration:
            raise StopAsyncIteration from None
        except StopAsyncIteration as error:
            raise stand_in(error, in_async_for=True) from error
        finally:
            del item

    async def _wait_async(self, asked_at: float) -> Item:
        exits.note_user()
        while True:
            fetching = self._fetching
            self._want(fetching, 1)
            try:
                while fetching is self._fetching:  # else the iterator has begun anew, from a state
                    try:
                        item = self._take_or_request(asked_at)
                    except StopIteration:
                        raise StopAsyncIteration from None
                    except StopAsyncIteration as error:  # of the sampler
                        raise stand_in(error, in_async_for=True) from error
                    if item is not None:
                        return item
                    await fetching.handoff.wait_async(self._has_news, None)
                    self._check_usable()
            finally:
                self._want(fetching, -1)

    def _want(self, fetching: FetchThread, change: int) -> None:
        with self._asking:
            fetching.wanting += change

    def _has_news(self) -> bool:
        return bool(self._fetching.handoff.ready) or self._closed or self._is_at_end

    @property
    def _is_at_end(self) -> bool:
        """Whether the sampler has ended, and what was asked for is taken."""
        return self._exhausted and not self._fetching.unserved

    def _take_or_request(self, asked_at: float) -> Item | None:
        """Take a batch, or see that one is on its way for each consumer that waits.

        A batch whose consumer was cancelled waits for the next one: what was asked for is not asked for again. And one
        may be taken by a consumer that has just come, from under those who have waited: so this is looked at anew after
        each wait.

        Raises:
            StopIteration: if everything was taken.
        """
        fetching = self._fetching
        with self._asking:
            while True:
                try:
                    item = fetching.handoff.ready.popleft()
                except IndexError:
                    if fetching.unserved < fetching.wanting:
                        self._request()
                    return None
                self._serve(item)
                if not item.left_out:
                    self._count(item, asked_at)
                    return item

    def _serve(self, item: Item) -> None:
        """Count an item that is taken; after the last one, those who still wait learn that there is no more."""
        self._fetching.unserved -= 1
        self._count_one(item)
        if self._is_at_end:
            self._record.progress.finished = True
            self._fetching.handoff.wake_all()

    def _count(self, item: Item, asked_at: float) -> None:
        if item.passage is not None:
            self._meter.took(asked_at, item.passage, 0, len(self._fetching.handoff.ready))
        elif not item.ended:
            self._meter.failed()

    def _next_index(self) -> Any:
        with self._asking:
            keys = self._read_sampler()
            self._count_one()
            return keys

    def _request(self) -> None:
        """Ask for another batch. If there is none, one may be on its way whose consumer is cancelled: it is waited for.

        Raises:
            StopIteration: if everything was taken.
        """
        if not self._exhausted:
            with contextlib.suppress(StopIteration):
                self._fetching.request(self._read_sampler())
                return
        if self._is_at_end:
            self._meter.told()
            raise StopIteration

    def _read_sampler(self) -> Any:
        """Read the next batch of keys that is still to be made."""
        try:
            while (keys := next(self._sampler_iter)) is Done:
                pass
            return keys
        except StopIteration:
            self._exhausted = True
            self._record.progress.finished = not self._fetching.unserved
            raise

    def _count_one(self, item: Item | None = None) -> None:
        """Count a batch that is handed over, left out or raises now."""
        progress = self._record.progress
        progress.done(progress.position)
        if item is not None and item.worker >= 0:
            self._answered(item.snapshot, item.keys)
        elif item is not None and self._dataset_kind != 0:
            self._finish()

    def _begin_anew(self, loader: DataLoader[T_co], state: dict[str, Any]) -> None:
        self.close()
        InlineIterator.__init__(self, loader, state)

    def _check_usable(self) -> None:
        check_owner(self._pid)
        if self._closed and (self._fetching.unserved or not self._exhausted):
            raise LoaderClosedError("this iterator was closed; call iter(loader) for a new one")

    def close(self) -> None:
        """End; a batch in work on the thread is waited for, 3 s at most."""
        self._closed = True
        self._finalizer()
        self._fetching.handoff.wake_all()
        self._fetching.join(3.0)

    async def aclose(self) -> None:
        """End as `close` does, without blocking the loop."""
        await asyncio.to_thread(self.close)

    def wait_made(self, timeout_s: float) -> None:
        """Wait until no batch is being made in a caller's thread, which a fork of that process does not have."""
        if self._pid == os.getpid() and self._taking.acquire(timeout=timeout_s):
            self._taking.release()


# ------------------------------------------------------------------------------------------------- interpreter's exit

_iterators: weakref.WeakSet[InlineIterator[Any]] = weakref.WeakSet()


def _stop_at_exit() -> None:
    """Have our threads end, and let daemon threads of the user's finish their batch.

    See :mod:`asyncloader.workers.child.threads` for what would happen to them in the middle of one. Our own are waited
    for when everything else has ended.
    """
    exits.begin()
    for fetching in exits.copied(fetch_threads):
        fetching.stop()
    for iterator in exits.copied(_iterators):
        iterator.wait_made(exits.grace_left_s())


threading._register_atexit(_stop_at_exit)  # type: ignore[attr-defined]
