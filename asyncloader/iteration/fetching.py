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
from functools import partial
from typing import Any

from asyncloader.engine.handoff import Handoff
from asyncloader.engine.run import Item
from asyncloader.iteration.rng_snapshot import GlobalGenerators
from asyncloader.observe.faults import Faults
from asyncloader.observe.meter import Meter, Passage
from asyncloader.workers.child import sample_context as place
from asyncloader.workers.child import threads
from asyncloader.workers.child.fetch import Fetcher, IterableFetcher, NoGoodSample
from asyncloader.workers.protocol.failure import EndOfData, stand_in
from asyncloader.workers.protocol.modes import Modes
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
        leaves_out: A batch without a good sample is left out; else what its first sample raised is raised.
        faults: Where bad samples are counted.
    """

    def __init__(
        self, key: tuple[int, int, int], first: int, fetch: Fetcher, collate_fn: Any, leaves_out: bool, faults: Faults
    ) -> None:
        self.faults = faults
        self._key = key
        self._fetch = fetch
        self._collate_fn = collate_fn
        self._leaves_out = leaves_out
        self._planned_samples = 0
        self._seq = first - 1

    def fetch(self, keys: Any) -> Any:
        """Return the batch, or LEFT_OUT."""
        self._planned_samples += len(keys) if isinstance(keys, list) else 1
        self._seq += 1
        outside = place.current.set(place.Place(self._key, self._seq))
        try:
            return self._make(keys)
        finally:
            place.current.reset(outside)  # the caller's thread goes on with other things

    def _make(self, keys: Any) -> Any:
        try:
            samples = self._fetch(keys)
        except NoGoodSample as nothing:
            self._count()
            if not self._leaves_out:
                raise nothing.first from None
            self.faults.leave_out(keys, "all its samples raised")
            return LEFT_OUT
        self._count()
        return self._collate_fn(samples)

    def _count(self) -> None:
        if self._fetch.bad:
            error = self.faults.count_bad(list(self._fetch.bad), self._planned_samples)
            if error is not None:
                raise error


class TimedFetcher:
    """A fetcher with a clock: how long it took for the samples, and how long to collate them.

    Args:
        meter: Where that is counted.
        collate_fn: What the fetcher is to collate with, through `collate`.
        auto_collation: Whether a batch is made of several samples.
        keeper: Keeps the state of the dataset, if it has one.
        generators: As they were before that was loaded.
    """

    fetcher: Any  # set once it was made, with our `collate`
    passage: Passage  # of the last batch
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
    ) -> None:
        self._meter = meter
        self._keeper = keeper
        self._generators = generators
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
            self.passage = self._meter.made_here(began, self._collate_s, self._count)
        return batch

    def _catch_up(self, keeper: Keeper) -> None:
        """Make again, and drop, what was made of a map-style dataset after the state that it has begun with."""
        if not keeper.made:
            return
        with self._generators.left_alone():
            for made in keeper.made:
                outside = place.current.set(place.Place(made.key, made.seq))
                try:
                    self._make_and_drop(made.keys)
                finally:
                    place.current.reset(outside)

    def _leave_out(self, keeper: Keeper, keys: Any) -> None:
        """Read over the batches of a stream that come before this one, and were made already."""
        self.keys = None if isinstance(self._fetch, IterableFetcher) else keys
        if gap := keeper.gap():
            with self._generators.left_alone():
                for _ in range(gap):
                    if not self._make_and_drop(keys):
                        return

    def _make_and_drop(self, keys: Any) -> bool:
        """Fetch a batch for nobody; False if there is none: the stream has come to its end."""
        try:
            self._fetch(keys)
        except EndOfData:
            return False
        except Exception:  # it was raised in its time
            pass
        return True

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
    """A thread that makes batches from keys, in order, and hands them over. Started at the first request.

    Holds the fetcher, not the iterator: so a dropped iterator ends it.
    """

    def __init__(self, fetcher: Any) -> None:
        self.handoff: Handoff[Item] = Handoff()
        self.unserved = 0  # requests less batches taken; changed by consumers, one at a time
        self.wanting = 0  # consumers that wait for one; likewise
        self._fetcher = fetcher
        self._requests: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        fetch_threads.add(self)

    def request(self, keys: Any) -> None:
        """Ask for the batch of these keys."""
        if self._thread is None:
            modes = Modes.of_this_thread()
            self._thread = threads.start(partial(self._run, modes), "asyncloader fetch")
        self.unserved += 1
        self._requests.put([keys])

    def stop(self) -> None:
        """End the thread after the batch in work. Returns at once."""
        self._requests.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, modes: Modes) -> None:
        with modes.active():
            self._serve()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                batch = self._fetcher.fetch(request.pop())
                left_out = batch is LEFT_OUT
                passage = None if left_out else self._fetcher.passage
                made = None if left_out else batch
                snapshot, keys = self._fetcher.snapshot, self._fetcher.keys
                item = Item(made, left_out=left_out, passage=passage, worker=0, snapshot=snapshot, keys=keys)
                del batch, made
            except EndOfData:
                item = Item(None, ended=True)
            except BaseException as error:  # SystemExit as well: nobody else would tell the consumer
                item = Item(None, error, worker=0)
            self.handoff.put(item)
            del item


fetch_threads: weakref.WeakSet[FetchThread] = weakref.WeakSet()
"""All that are there, for the end of the interpreter."""
