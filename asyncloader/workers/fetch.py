"""Get the samples of one batch from the dataset, as torch's fetchers do.

Kept apart from collation, which torch's fetchers do in the same call, so that each can be timed and answered for.

With ``on_error="skip"`` or ``"replace"`` a sample that raises does not cost its batch: the fetcher catches it, keeps a
note in ``bad``, and mends the batch without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from asyncloader.options import OnError
from asyncloader.workers.failure import RemoteError


class BadSample(NamedTuple):
    """A sample that raised: its key, its place in the batch, and what it raised."""

    key: Any
    position: int
    error: RemoteError


class NoGoodSample(Exception):
    """Every sample of a batch raised. ``first`` is what the first one raised."""

    def __init__(self, first: Exception) -> None:
        super().__init__("no sample of the batch is good")
        self.first = first


class Fetcher(Protocol):
    """Gets the samples of one batch after the other.

    Attributes:
        bad: The samples of the last batch that raised, and were left out or replaced.
    """

    bad: Sequence[BadSample]

    def __call__(self, keys: Any) -> Any:
        """Return the list of samples; without automatic batching the one sample."""


class MapFetcher:
    """Fetches from a map-style dataset."""

    bad: Sequence[BadSample] = ()

    def __init__(self, dataset: Any, auto_collation: bool) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation

    def __call__(self, keys: Any) -> Any:
        """Return the list of samples; without automatic batching the one sample."""
        dataset = self._dataset
        if not self._auto_collation:
            return dataset[keys]
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(keys)
        return [dataset[key] for key in keys]


class IterableFetcher:
    """Fetches from an iterator over an iterable dataset. Raises StopIteration when there is nothing more."""

    bad: Sequence[BadSample] = ()

    def __init__(self, dataset: Any, auto_collation: bool, drop_last: bool) -> None:
        self._iterator = iter(dataset)
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._ended = False

    def __call__(self, keys: Any) -> Any:
        """Return as many samples as there are keys, or what is left; without automatic batching the next one."""
        if self._ended:
            raise StopIteration
        if not self._auto_collation:
            return next(self._iterator)
        samples = []
        for _ in keys:
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                self._ended = True
                break
        if not samples or (self._drop_last and len(samples) < len(keys)):
            raise StopIteration
        return samples


class Mender:
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
        by_place = dict(zip(self._places, samples, strict=True))
        return [by_place.get(i, samples[i % len(samples)]) for i in range(len(samples) + len(self.bad))]


class TolerantMapFetcher(MapFetcher):
    """Fetches from a map-style dataset, and mends batches with bad samples.

    Where ``__getitems__`` raises, the samples are fetched one by one, to find out which are good.
    """

    def __init__(self, dataset: Any, auto_collation: bool, on_error: OnError, where: str) -> None:
        super().__init__(dataset, auto_collation)
        self._on_error = on_error
        self._where = where

    def __call__(self, keys: Any) -> Any:
        """Return the good samples; see `Mender`."""
        self.bad = ()
        if self._auto_collation and getattr(self._dataset, "__getitems__", None):
            try:
                return self._dataset.__getitems__(keys)
            except Exception:
                pass
        mender = Mender(self._on_error, self._where)
        for position, key in enumerate(keys if self._auto_collation else [keys]):
            try:
                mender.good(position, self._dataset[key])
            except Exception as error:
                mender.failed(position, key, error)
        self.bad = mender.bad
        samples = mender.mended()
        return samples if self._auto_collation else samples[0]


class TolerantIterableFetcher(IterableFetcher):
    """Fetches from an iterator, and passes over samples that raise, as long as the iterator goes on after them.

    A generator does not: what it raises is raised, for the epoch would be silently short. A bad sample takes a place in
    its batch, so an iterator that raises for ever still comes back from each call.
    """

    def __init__(self, dataset: Any, auto_collation: bool, drop_last: bool, on_error: OnError, where: str) -> None:
        super().__init__(dataset, auto_collation, drop_last)
        self._on_error = on_error
        self._where = where

    def __call__(self, keys: Any) -> Any:
        """Return the good ones of as many samples as there are keys, or of what is left."""
        self.bad = ()
        if self._ended:
            raise StopIteration
        mender = Mender(self._on_error, self._where)
        self.bad = mender.bad
        wanted = len(keys) if self._auto_collation else 1
        position = 0
        while position < wanted and not self._ended:
            try:
                mender.good(position, next(self._iterator))
            except StopIteration:
                self._ended = True
                break
            except Exception as error:
                if _is_over(self._iterator):
                    raise
                mender.failed(position, None, error)
            position += 1
        if not position or (self._auto_collation and self._drop_last and position < wanted):
            raise StopIteration
        samples = mender.mended()
        return samples if self._auto_collation else samples[0]


def _is_over(iterator: Any) -> bool:
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


def make_fetcher(
    dataset: Any,
    *,
    is_iterable: bool,
    auto_collation: bool,
    drop_last: bool,
    on_error: OnError = "raise",
    where: str = "",
) -> Fetcher:
    """Return the fetcher for a dataset."""
    if on_error == "raise":
        if is_iterable:
            return IterableFetcher(dataset, auto_collation, drop_last)
        return MapFetcher(dataset, auto_collation)
    if is_iterable:
        return TolerantIterableFetcher(dataset, auto_collation, drop_last, on_error, where)
    return TolerantMapFetcher(dataset, auto_collation, on_error, where)
