"""num_workers=0: what makes batches in this process, with a clock around it, and the thread of ``async for``.

Maker         as torch's fetchers do; if so asked without the samples that raise
TimedFetcher  times it, and keeps the state of the dataset
FetchThread   takes keys, hands batches over
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncloader.engine.handoff import Handoff
from asyncloader.engine.run import Item
from asyncloader.iteration.rng_snapshot import GlobalGenerators
from asyncloader.observe.meter import BatchTimes, Meter
from asyncloader.workers.child import sample_context, threads
from asyncloader.workers.child.fetch import Fetcher, IterableFetcher, NoGoodSample, fetch_and_drop
from asyncloader.workers.protocol.failure import EndOfData, stand_in
from asyncloader.workers.protocol.modes import Modes
from asyncloader.workers.protocol.outcome import NO_RECORD, Batch, Exhausted, Failure, LeftOut
from asyncloader.workers.protocol.snapshot import Keeper

LEFT_OUT: Any = object()
"""What a fetcher returns when no sample of a batch was good, and there is none."""


class Maker:
    """Makes batches as torch's fetchers do; if so asked without the samples that raise.

    Args:
        key: Base seed, epoch, rank: for `sample_rng`.
        first: Number of the first batch.
        fetch: Gets the samples, and catches what they raise.
        collate_fn: Makes a batch of them.
        leaves_out: A batch without a good sample is left out; otherwise what its first sample raised is raised.
    """

    def __init__(
        self, key: tuple[int, int, int], first: int, fetch: Fetcher, collate_fn: Any, leaves_out: bool
    ) -> None:
        self._key = key
        self._fetch = fetch
        self._collate_fn = collate_fn
        self._leaves_out = leaves_out
        self._seq = first

    def fetch(self, keys: Any) -> Any:
        """Return the batch, or LEFT_OUT. After an interruption the same batch is made again."""
        outside = sample_context.current.set(sample_context.SampleContext(self._key, self._seq))
        try:
            batch = self._make(keys)
        except Exception:
            self._seq += 1
            raise
        finally:
            sample_context.current.reset(outside)  # the caller's thread goes on with other things
        self._seq += 1
        return batch

    def _make(self, keys: Any) -> Any:
        try:
            samples = self._fetch(keys)
        except NoGoodSample as nothing:
            if not self._leaves_out:
                raise nothing.first from None
            return LEFT_OUT
        return self._collate_fn(samples)


def is_of_a_sample(error: BaseException) -> bool:
    """Whether a SystemExit was raised by an awaited sample, on the loop, and not by a signal handler in this thread."""
    return getattr(error, "asyncloader_of_a_sample", False) is True


class TimedFetcher:
    """A fetcher with a clock: how long it took for the samples, and how long to collate them.

    Args:
        meter: Where that is counted.
        collate_fn: What the fetcher is to collate with, through `collate`.
        auto_collation: Whether a batch is made of several samples.
        keeper: Keeps the state of the dataset, if it has one.
        generators: As they were before that was loaded.
        pin: Pins a batch; None if it is not to be pinned.
    """

    fetcher: Any  # set once it was made, with our `collate`
    times: BatchTimes  # of the last batch
    keys: Any = None  # of the last batch, where they may be needed to make it again
    snapshot: Any = None  # of the dataset, after the last batch
    last_state: Any = None  # of a stream, after its end

    def __init__(
        self,
        meter: Meter,
        collate_fn: Any,
        auto_collation: bool,
        keeper: Keeper | None,
        generators: GlobalGenerators,
        pin: Callable[[Any], Any] | None = None,
    ) -> None:
        self._meter = meter
        self._keeper = keeper
        self._generators = generators
        self._pin = pin
        self._fetch: Any = None
        self._collate_fn = collate_fn
        self._auto_collation = auto_collation
        self._collate_s = 0.0
        self._count = 0
        self._one_at_a_time = threading.Lock()  # `for` in one thread, the thread of `async for`

    def fetch(self, keys: Any) -> Any:
        """Make the batch of these keys."""
        with self._one_at_a_time:
            try:
                return self._make(keys)
            except StopIteration as error:  # it would be taken for the sampler's
                raise stand_in(error) from error

    def item(self, keys: Any) -> Item:
        """Make the batch of these keys, or take what is raised in its place. An interruption passes through."""
        try:
            batch = self.fetch(keys)
        except EndOfData:
            return Item(Exhausted(NO_RECORD))
        except BaseException as error:
            if not (isinstance(error, Exception) or is_of_a_sample(error)):
                raise
            return Item(Failure(NO_RECORD, error, tuple(self._fetch.bad)), worker=0, keys=self.keys)
        bad = self._fetch.bad
        if bad:
            bad = tuple(bad)
            if batch is LEFT_OUT:
                return Item(LeftOut(NO_RECORD, bad, self.snapshot), worker=0, keys=self.keys)
        return Item(Batch(NO_RECORD, batch, 0, bad, self.snapshot), -1, 0, self.times, -1, self.keys)

    def _make(self, keys: Any) -> Any:
        began = time.perf_counter()
        keeper, self.snapshot = self._keeper, None
        if keeper is not None:
            self._leave_out(keeper, keys)
        try:
            batch = self.fetcher.fetch(keys)
        except EndOfData:
            if keeper is not None:
                self.last_state = keeper.take_last()
            raise
        if keeper is not None:
            self.snapshot = keeper.take(ended=getattr(self._fetch, "ended", False))
        if batch is not LEFT_OUT:
            if self._pin is not None:
                batch = self._pin(batch)
            self.times = self._meter.made_here(began, self._collate_s, self._count)
        return batch

    def _catch_up(self, keeper: Keeper) -> None:
        """Make again, and drop, what was made of a map-style dataset after the state that it has begun with."""
        if not keeper.made:
            return
        with self._generators.left_alone():
            for made in keeper.made:
                outside = sample_context.current.set(sample_context.SampleContext(made.key, made.seq))
                try:
                    fetch_and_drop(self._fetch, made.keys)
                finally:
                    sample_context.current.reset(outside)

    def _leave_out(self, keeper: Keeper, keys: Any) -> None:
        """Read over the batches of a stream that come before this one, and were made already."""
        self.keys = None if isinstance(self._fetch, IterableFetcher) else keys
        if gap := keeper.gap():
            with self._generators.left_alone():
                for _ in range(gap):
                    if not fetch_and_drop(self._fetch, keys):
                        return

    def attach(self, fetch: Fetcher | None) -> None:
        """Have the state kept of the iterator that the samples come from, if they do."""
        self._fetch = fetch
        if self._keeper is not None:
            ended = self._keeper.attach(getattr(fetch, "iterator", None))
            self._generators.loaded()
            if isinstance(fetch, IterableFetcher):
                fetch.ended = ended
            else:
                self._catch_up(self._keeper)

    def collate(self, samples: Any) -> Any:
        """Make a batch of samples."""
        began = time.perf_counter()
        self._count = len(samples) if self._auto_collation and hasattr(samples, "__len__") else 1
        batch = self._collate_fn(samples)
        self._collate_s = time.perf_counter() - began
        return batch


class FetchThread:
    """A thread that makes batches from keys, in order, and hands them over.

    Holds the fetcher, not the iterator: so a dropped iterator ends it.
    """

    def __init__(self, fetcher: TimedFetcher) -> None:
        self.handoff: Handoff[Item] = Handoff()
        self.unserved = 0  # requests less batches taken; changed by consumers, one at a time
        self.wanting: set[object] = set()  # consumers that wait for one
        self._fetcher = fetcher
        self.requests: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()  # keys in a list of their own
        self._thread: threading.Thread | None = None
        fetch_threads.add(self)

    def start(self) -> None:
        """Start the thread, if there is none yet."""
        if self._thread is None:
            modes = Modes.of_this_thread()
            self._thread = threads.start(partial(self._run, modes), "asyncloader fetch")

    def stop(self) -> None:
        """End the thread after the batch in work. Returns at once."""
        self.requests.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self, modes: Modes) -> None:
        with modes.active():
            self._serve()

    def _serve(self) -> None:
        while (request := self.requests.get()) is not None:
            try:
                item = self._fetcher.item(request.pop())
            except BaseException as error:  # SystemExit as well: nobody else would tell the consumer
                item = Item(Failure(NO_RECORD, error), worker=0)
            self.handoff.put(item)
            del item
        self.requests.put(None)  # for another one, if a Ctrl-C inside `Thread.start` had two of them started


fetch_threads: weakref.WeakSet[FetchThread] = weakref.WeakSet()
"""All that are there, for the end of the interpreter."""
