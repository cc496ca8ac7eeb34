"""Get the samples of one batch from the dataset, as torch's fetchers do.

Kept apart from collation, which torch's fetchers do in the same call, so that each can be timed and answered for.

With ``on_error="skip"`` or ``"replace"`` a sample that raises does not cost its batch: the fetcher catches it, keeps a
note in ``bad``, and mends the batch without it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

from asyncloader.protocols import has_samples
from asyncloader.seeding import sample_context
from asyncloader.settings import OnError
from asyncloader.workers.child.gather import WholeBatches
from asyncloader.workers.protocol.failure import BadSample, EndOfData, RemoteError
from asyncloader.workers.protocol.indices import listed


class NoGoodSample(Exception):
    """Every sample of a batch raised. ``first`` is what the first one raised."""

    def __init__(self, first: Exception) -> None:
        super().__init__("no sample of the batch is good")
        self.first = first


Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end, always on the same loop."""


class Fetcher(Protocol):
    """Gets the samples of one batch after the other.

    Samples that turn out to be awaitables, of a dataset that could not be known to be async, are awaited: those of a
    batch together.

    Attributes:
        bad: The samples of the last batch that raised, and were left out or replaced.
    """

    bad: Sequence[BadSample]

    def __call__(self, keys: Any) -> Any:
        """Return the list of samples; without automatic batching the one sample."""


class MapFetcher:
    """Fetches from a map-style dataset."""

    bad: Sequence[BadSample] = ()

    def __init__(
        self, dataset: Any, auto_collation: bool, collate_fn: Any, run: Run, *, by_sample: bool = False
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._run = run
        self._whole = WholeBatches(dataset, auto_collation, collate_fn, by_sample)

    def __call__(self, keys: Any) -> Any:
        """Return the list of samples, or a `Whole`; without automatic batching the one sample."""
        dataset = self._dataset
        here = sample_context.here()
        if not self._auto_collation:
            here.position = 0
            return _settled([dataset[keys]], self._run)[0]
        if (rows := self._whole.find(keys)) is not None:
            return rows
        keys = listed(keys)
        if getattr(dataset, "__getitems__", None) and not self._whole.by_sample:
            return self._whole.ready(_settled(dataset.__getitems__(keys), self._run), keys)
        if here.first is not None:  # what turns out to be awaitable draws as well, when it is awaited
            samples = [self._one(key) for here.position, key in enumerate(keys)]
        else:
            samples = [dataset[key] for here.position, key in enumerate(keys)]
        here.position = sample_context.BATCH
        return _settled(samples, self._run)

    def good(self, keys: Any) -> Any:
        """Return the good samples and no others: all, or it raises."""
        return self(keys)

    def _one(self, key: Any) -> Any:
        sample = self._dataset[key]
        return self._run(settle(sample)) if hasattr(type(sample), "__await__") else sample


class IterableFetcher:
    """Fetches from an iterator over an iterable dataset. Raises EndOfData when there is nothing more.

    Attributes:
        iterator: The iterator.
        ended: It has come to its end, and is not asked again.
    """

    bad: Sequence[BadSample] = ()

    def __init__(self, dataset: Any, auto_collation: bool, drop_last: bool, run: Run, iterator: Any = None) -> None:
        self.iterator = iter(dataset) if iterator is None else iterator
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._run = run
        self.ended = False

    def __call__(self, keys: Any) -> Any:
        """Return as many samples as there are keys, or what is left; without automatic batching the next one."""
        if self.ended:
            raise EndOfData
        here = sample_context.here()
        if not self._auto_collation:
            here.position = 0
            return _settled([self._next()], self._run)[0]
        samples = []
        for here.position, _ in enumerate(keys):
            try:
                samples.append(next(self.iterator))
            except StopIteration:
                self.ended = True
                break
        here.position = sample_context.BATCH
        if not samples or (self._drop_last and len(samples) < len(keys)):
            raise EndOfData
        return _settled(samples, self._run)

    def _next(self) -> Any:
        """Read a sample. StopIteration means the end of the data here, and nowhere else."""
        try:
            return next(self.iterator)
        except StopIteration:
            raise EndOfData from None


class ErrorPolicy:
    """Collects the samples of one batch, the bad ones too, and makes the best of them.

    Args:
        on_error: "skip" leaves bad samples out; "replace" puts good ones of the same batch in their places.
        where: For the notes: "in DataLoader worker process 3".
    """

    def __init__(self, on_error: OnError, where: str) -> None:
        self.bad: list[BadSample] = []
        self._samples: list[Any] = []
        self._places: list[int] = []  # in the batch, of each entry of _samples
        self._on_error = on_error
        self._where = where
        self._first: Exception | None = None

    def good(self, position: int, sample: Any) -> None:
        """Take the sample that belongs to this place of the batch."""
        self._samples.append(sample)
        self._places.append(position)

    def failed(self, position: int, key: Any, error: Exception) -> None:
        """Take note of a sample that raised."""
        self._first = self._first or error
        self.bad.append(BadSample(key, position, RemoteError.capture(error, self._where)))

    @property
    def samples(self) -> list[Any]:
        """The good samples, in order."""
        return self._samples

    def mended(self) -> list[Any]:
        """Return the samples in order, without the bad ones or with others in their places.

        Which good sample takes a place depends on the place alone, so that a batch that is made again is the same.

        Raises:
            NoGoodSample: if there is none.
        """
        samples = self._samples
        if not self.bad:
            return samples
        if not samples:
            assert self._first is not None
            raise NoGoodSample(self._first)
        if self._on_error == "skip":
            return samples
        return replaced(samples, self._places, len(samples) + len(self.bad))


def replaced(samples: list[Any], places: Sequence[int], count: int) -> list[Any]:
    """Return a batch of so many samples, of which these are at those places, and good ones of them at the others."""
    by_place = dict(zip(places, samples, strict=True))
    return [by_place.get(i, samples[i % len(samples)]) for i in range(count)]


class TolerantMapFetcher(MapFetcher):
    """Fetches from a map-style dataset, and mends batches with bad samples.

    Where ``__getitems__`` raises, the samples are fetched one by one, to find out which are good.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate_fn: Any,
        run: Run,
        on_error: OnError,
        where: str,
        *,
        by_sample: bool = False,
    ) -> None:
        super().__init__(dataset, auto_collation, collate_fn, run, by_sample=by_sample)
        self._on_error = on_error
        self._where = where

    def __call__(self, keys: Any) -> Any:
        """Return the good samples, mended; see `ErrorPolicy`."""
        fetched = self._fetched(keys)
        if type(fetched) is not ErrorPolicy:
            return fetched
        samples = fetched.mended()
        return samples if self._auto_collation else samples[0]

    def good(self, keys: Any) -> Any:
        """Return the good samples and no others."""
        fetched = self._fetched(keys)
        return fetched.samples if type(fetched) is ErrorPolicy else fetched

    def _fetched(self, keys: Any) -> Any:
        """Return what was fetched of each sample; or of all at once, if none is bad."""
        self.bad = ()
        if (rows := self._whole.find(keys)) is not None:
            return rows
        keys = listed(keys)
        if self._auto_collation and getattr(self._dataset, "__getitems__", None) and not self._whole.by_sample:
            try:
                return self._whole.ready(_settled(self._dataset.__getitems__(keys), self._run), keys)
            except Exception:
                if not has_samples(self._dataset):
                    raise
        policy = ErrorPolicy(self._on_error, self._where)
        here = sample_context.here()
        for position, key in enumerate(keys if self._auto_collation else [keys]):
            here.position = position
            try:
                policy.good(position, _settled([self._dataset[key]], self._run)[0])
            except Exception as error:
                policy.failed(position, key, error)
        here.position = sample_context.BATCH
        self.bad = policy.bad
        return policy


class TolerantIterableFetcher(IterableFetcher):
    """Fetches from an iterator, and passes over samples that raise, as long as the iterator goes on after them.

    A generator does not: what it raises is raised, for the epoch would be silently short. A bad sample takes a place in
    its batch, so an iterator that raises for ever still comes back from each call.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        drop_last: bool,
        run: Run,
        iterator: Any,
        on_error: OnError,
        where: str,
    ) -> None:
        super().__init__(dataset, auto_collation, drop_last, run, iterator)
        self._on_error = on_error
        self._where = where

    def __call__(self, keys: Any) -> Any:
        """Return the good ones of as many samples as there are keys, or of what is left."""
        self.bad = ()
        if self.ended:
            raise EndOfData
        policy = ErrorPolicy(self._on_error, self._where)
        self.bad = policy.bad
        wanted = len(keys) if self._auto_collation else 1
        position = 0
        here = sample_context.here()
        while position < wanted and not self.ended:
            here.position = position
            try:
                policy.good(position, _settled([self._next()], self._run)[0])
            except EndOfData:
                self.ended = True
                break
            except Exception as error:
                if is_over(self.iterator):
                    raise
                policy.failed(position, None, error)
            position += 1
        here.position = sample_context.BATCH
        if not position or (self._auto_collation and self._drop_last and position < wanted):
            raise EndOfData
        samples = policy.mended()
        return samples if self._auto_collation else samples[0]


def is_over(iterator: Any) -> bool:
    """Whether this is a generator that has ended: after an exception it will yield no more."""
    if inspect.isasyncgen(iterator):
        return iterator.ag_frame is None
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


def _settled(samples: Any, run: Run) -> Any:
    """Return the samples; those that are still to be awaited, awaited."""
    if hasattr(type(samples), "__await__"):
        samples = run(settle(samples))
    # Looked at type by type: most batches have one, and a look at each of a thousand samples would take as long as
    # fetching them.
    if type(samples) is list and any(hasattr(kind, "__await__") for kind in set(map(type, samples))):
        return run(_gather(samples))
    return samples


async def _gather(samples: list[Any]) -> list[Any]:
    return await asyncio.gather(*map(settle, samples))


async def settle(sample: Any) -> Any:
    """Await a sample, or what a StackDataset put together of the samples of several datasets."""
    if hasattr(type(sample), "__await__"):
        return await sample
    if type(sample) is tuple:
        return tuple(await asyncio.gather(*map(settle, sample)))
    if type(sample) is dict:
        return dict(zip(sample, await asyncio.gather(*map(settle, sample.values())), strict=True))
    return sample


def fetch_and_drop(fetch: Callable[[Any], Any] | None, keys: Any) -> bool:
    """Fetch a batch for nobody; False if there is none: the stream has come to its end."""
    assert fetch is not None
    try:
        fetch(keys)
    except EndOfData:
        return False
    except Exception:  # it was raised in its time
        pass
    return True


def make_fetcher(
    dataset: Any,
    *,
    is_iterable: bool,
    auto_collation: bool,
    drop_last: bool,
    collate_fn: Any = None,
    run: Run = asyncio.run,
    on_error: OnError = "raise",
    where: str = "",
    iterator: Any = None,
    by_sample: bool = False,
) -> Fetcher:
    """Return the fetcher for a dataset; for an iterable one with this iterator, if there is one already.

    What it returns is to be collated with ``collate_fn``. With ``by_sample`` samples are asked for one by one where
    what one draws would else depend on the others.
    """
    if on_error == "raise":
        if is_iterable:
            return IterableFetcher(dataset, auto_collation, drop_last, run, iterator)
        return MapFetcher(dataset, auto_collation, collate_fn, run, by_sample=by_sample)
    if is_iterable:
        return TolerantIterableFetcher(dataset, auto_collation, drop_last, run, iterator, on_error, where)
    return TolerantMapFetcher(dataset, auto_collation, collate_fn, run, on_error, where, by_sample=by_sample)
