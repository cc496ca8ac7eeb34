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
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from asyncloader.engine import exits
from asyncloader.engine.actions import VOID
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.handoff import Handoff
from asyncloader.engine.portal import get_portal, refuse_to_block_the_loop
from asyncloader.engine.progress import Call
from asyncloader.engine.taking import Item, Taking
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.failure import stand_in
from asyncloader.messages.messages import EpochSpec
from asyncloader.messages.outcome import Batch, Exhausted
from asyncloader.messages.snapshot import Frozen
from asyncloader.observe.faults import Faults
from asyncloader.observe.meter import Meter
from asyncloader.options import Options
from asyncloader.run.base_iterator import BaseIterator, check_owner
from asyncloader.run.fetching import FetchThread, InlineHost, InlineMaker, fetch_threads
from asyncloader.run.rng_snapshot import GlobalGenerators
from asyncloader.run.run_start import RunStart
from asyncloader.run.runs import Runs
from asyncloader.seeding.turns import Drawing, alone
from asyncloader.worker.batch_maker import BatchMaker

T_co = TypeVar("T_co", covariant=True)


_NOTHING: Any = object()


def _run_on_portal(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await samples that turn out to be awaitables, where there may be a loop already: the caller's."""
    try:
        refuse_to_block_the_loop()
    except BaseException:
        coroutine.close()
        raise
    future = asyncio.run_coroutine_threadsafe(coroutine, get_portal().loop)
    try:
        return future.result()
    except SystemExit as error:
        if future.done() and not future.cancelled() and future.exception() is error:
            error.asyncloader_of_a_sample = True  # type: ignore[attr-defined]
        raise


class InlineIterator(BaseIterator[T_co], _SingleProcessDataLoaderIter):
    """Batches made in this process.

    Args:
        loader: For torch's constructor, and nothing else.
        options: What is iterated over, and how.
        runs: Of the loader.
        state: To begin from.
    """

    def __init__(
        self, loader: DataLoader[T_co], options: Options, runs: Runs, state: dict[str, Any] | None = None
    ) -> None:
        super().__init__(loader, options, runs)
        self._start(loader, state)

    def _start(self, loader: DataLoader[T_co], state: dict[str, Any] | None) -> None:
        """Begin a run."""
        start = self._begin(partial(self._construct, loader), state, inline=True)
        self._progress = start.checkpointer.progress
        faults = Faults()
        taking = Taking(self._progress, ErrorLimit(self._options, self._progress, faults))
        trace = self._runs.open_trace(self._options)
        self._meter = self._runs.meter = Meter(start.checkpointer.epoch, 0, 0, faults, trace)
        self._dataset_fetcher = self._make_maker(start, faults)
        self._pid = os.getpid()
        self._fetching = FetchThread(self._dataset_fetcher, taking)
        self._ready = taking.handoff.ready
        self._fetching.stop_with(self)
        self._closed = False
        self._exhausted = False
        self._held: Any = _NOTHING  # keys that were read of the sampler, and whose batch nobody is to make yet
        self._here: tuple[int, Any] | None = None  # the batch that a consumer's thread makes, or was interrupted at
        self._is_torn = False  # a batch of a stream was interrupted: what was read for it is gone
        self._making = threading.Lock()
        self._asking = self._progress.lock  # held to read the sampler, to ask for a batch and to take one
        _iterators.add(self)

    def _make_maker(self, start: RunStart, faults: Faults) -> InlineMaker:
        """Return what makes batches, its dataset where the run begins. What that raises is raised."""
        options, generators = self._options, GlobalGenerators()
        # torch's own fetcher has begun to iterate, which a dataset may count; but before the dataset was in its state.
        is_begun = options.is_iterable and not (start.starts and start.starts[0].snapshot)
        iterator = self._dataset_fetcher.dataset_iter if is_begun else None
        host = InlineHost(self._collate_fn)
        maker = BatchMaker(0, self._worker_spec(), host, _run_on_portal, aside=generators.left_alone)

        def open_source(dataset: Any) -> None:
            maker.open_fetcher(dataset, iterator)
            generators.loaded()

        with Drawing():  # a state of the dataset may set global generators
            maker.begin(EpochSpec(0, start.key, starts=start.starts), open_source)
        if maker.failure is not None:
            raise maker.failure
        pin = partial(pin_memory, device=self._pin_memory_device) if self._pin_memory else None
        aside = partial(alone, start.key) if options.seeds_each_sample else None
        kind = {"is_stream": options.is_iterable, "is_batched": options.auto_collation}
        return InlineMaker(maker, faults, pin, aside, **kind)

    # -------------------------------------------------------------------------------------------------- taking
    #
    # What was read of the sampler is held until a thread is to make its batch: ours, by a request that is put, or a
    # consumer's, which may be interrupted. Then the next one who comes makes it, or asks for it.

    @property
    def _handoff(self) -> Handoff[Item]:
        return self._fetching.taking.handoff

    def _next(self, call: Call) -> Item:
        while True:
            if self._closed or self._is_torn or self._pid != exits.pid:
                self._check_usable()
            with self._making:
                if not (exits.is_exiting and exits.is_left_behind()):
                    asked_at = time.perf_counter()
                    if self._here is None and self._fetching.unserved:
                        return self._take_from_thread(call, asked_at)
                    self._make_here()
                    item = self._take(call, asked_at)
                    if self._exhausted:
                        self._handoff.wake_all()  # tasks have waited for this batch: its maker might be interrupted
                    if item is not None:
                        return item
                    continue
            exits.stop_daemon()

    def _make_here(self) -> None:
        """Make the next batch in this thread."""
        try:
            with self._asking:
                if self._here is None:
                    here = self._read_sampler()
                    self._here, self._held = here, _NOTHING
                seq, keys = self._here
        except StopIteration:
            self._meter.log_summary()
            raise
        fetching, ready = self._fetching, self._ready
        try:
            item = self._dataset_fetcher.item(seq, keys)
        except BaseException:
            self._is_torn = self._options.is_iterable
            raise
        self._here = None
        fetching.requested += 1
        ready.append(item)  # nothing that an interrupt could follow is called in these three lines before it is done

    def _take_from_thread(self, call: Call, asked_at: float) -> Item:
        """Take a batch that was asked for by a task that was cancelled, or the next one while tasks wait for theirs."""
        fetching = self._fetching
        try:
            fetching.wanting.add(call)
            while (item := self._take_or_request(call, asked_at)) is None:
                if self._exhausted and fetching.unserved < len(fetching.wanting):
                    raise StopIteration  # what comes is for tasks, perhaps of a loop in this thread
                self._handoff.wait(self._has_news, None)
                self._check_usable()
        finally:
            fetching.wanting.discard(call)
        return item

    async def next_item_async(self, call: Call) -> Item:
        """Take what comes next: see `BaseIterator`."""
        self._check_usable()
        exits.note_user()
        asked_at = time.perf_counter()
        while True:
            fetching = self._fetching
            try:
                fetching.wanting.add(call)
                while fetching is self._fetching:  # otherwise the iterator has begun anew, from a state
                    try:
                        item = self._take_or_request(call, asked_at)
                    except StopIteration:
                        raise StopAsyncIteration from None
                    except StopAsyncIteration as error:  # of the sampler
                        raise stand_in(error, in_async_for=True) from error
                    if item is not None:
                        return item
                    await self._handoff.wait_async(self._has_news, None)
                    self._check_usable()
            finally:
                fetching.wanting.discard(call)

    def _take_or_request(self, call: Call, asked_at: float) -> Item | None:
        """Take a batch, or see that one is on its way for each consumer that waits.

        A batch whose consumer was cancelled waits for the next one: what was asked for is not asked for again. And one
        may be taken by a consumer that has just come, from under those who have waited: so this is looked at anew after
        each wait.

        Raises:
            StopIteration: if everything was taken.
        """
        fetching = self._fetching
        with self._asking:
            item = self._take(call, asked_at)
            if item is None and fetching.unserved < len(fetching.wanting):
                self._request()
        if self._is_at_end:
            self._handoff.wake_all()  # those who still wait learn that there is no more
        return item

    def _take(self, call: Call, asked_at: float) -> Item | None:
        """Take a batch that is ready.

        Raises:
            StopIteration: if the end of the data is.
        """
        with self._asking:
            item = self._fetching.taking.take(call)
        if item is None:
            return None
        outcome = item.outcome
        if type(outcome) is Exhausted:
            self._meter.log_summary()
            if isinstance(outcome.snapshot, Frozen):
                self._progress.ends = {0: outcome.snapshot}
            raise StopIteration
        if type(outcome) is Batch:
            self._meter.took_here(asked_at, outcome.record, item.times, len(self._ready))
        else:
            self._meter.failed()
        return item

    def _has_news(self) -> bool:
        return self._fetching.taking.has_ready or self._closed or self._is_at_end

    @property
    def _is_at_end(self) -> bool:
        """Whether the sampler has ended, what was asked for is taken, and nobody makes a batch."""
        return self._exhausted and self._here is None and not self._fetching.unserved

    def _request(self) -> None:
        """Ask for another batch. If there is none, one may be on its way whose consumer is cancelled: it is waited for.

        Raises:
            StopIteration: if everything was taken.
        """
        is_left = self._here is not None and not self._making.locked()  # by a consumer that was interrupted
        if is_left or not self._exhausted:
            with contextlib.suppress(StopIteration):
                request: Any = self._here if is_left else self._read_sampler()
                request = list(request)
                self._fetching.start()
                put = self._fetching.requests.put
                self._fetching.requested += 1
                if is_left:
                    self._here = None
                else:
                    self._held = _NOTHING
                put(request)  # nothing that an interrupt could follow is called in these lines before it is done
                return
        if self._is_at_end:
            self._meter.log_summary()
            raise StopIteration

    def _read_sampler(self) -> tuple[int, Any]:
        """Read the next batch of keys that is still to be made; return its number and them.

        They are held until the batch is made, or asked for.
        """
        if self._held is _NOTHING:
            # Not `next`: an interrupt between its end and the assignment would lose what it has returned.
            for keys in self._sampler_iter:
                if keys is not VOID:
                    self._held = keys
                    break
            else:
                self._exhausted = True
                raise StopIteration
        seq = self._progress.read - 1
        return seq, self._progress.placed(seq, self._held)

    def _begin_anew(self, loader: DataLoader[T_co], state: dict[str, Any]) -> None:
        self.close()
        self._start(loader, state)

    def _check_usable(self) -> None:
        check_owner(self._pid)
        if self._closed and not self._is_at_end:
            raise LoaderClosedError("this iterator was closed; call iter(loader) for a new one")
        if self._is_torn:
            raise LoaderClosedError(
                "this iterator was interrupted while it read its dataset, and what it had read of a batch is gone; "
                "to go on, load the loader's state_dict() and call iter(loader)"
            )

    def close(self) -> None:
        """End; a batch in work on the thread is waited for, 3 s at most."""
        self._closed = True
        self._fetching.stop()
        self._handoff.wake_all()
        self._fetching.join(3.0)
        self._seeding.end()

    async def aclose(self) -> None:
        """End as `close` does, without blocking the loop."""
        await asyncio.to_thread(self.close)

    def wait_made(self, timeout_s: float) -> None:
        """Wait until no batch is being made in a caller's thread, which a fork of that process does not have."""
        if self._pid == os.getpid() and self._making.acquire(timeout=timeout_s):
            self._making.release()


# ------------------------------------------------------------------------------------------------- interpreter's exit

_iterators: weakref.WeakSet[InlineIterator[Any]] = weakref.WeakSet()


def _stop_at_exit() -> None:
    """Have our threads end, and let daemon threads of the user's finish their batch.

    See :mod:`asyncloader.worker.threads` for what would happen to them in the middle of one. Our own are waited
    for when everything else has ended.
    """
    for fetching in exits.copied(fetch_threads):
        fetching.stop()
    for iterator in exits.copied(_iterators):
        iterator.wait_made(exits.grace_left_s())


exits.at_exit(_stop_at_exit)
