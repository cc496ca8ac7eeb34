"""Get the samples of one batch from the dataset, as torch's fetchers do.

Kept apart from collation, which torch's fetchers do in the same call, so that each can be timed and answered for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Fetch: TypeAlias = Callable[[Any], Any]


class MapFetcher:
    """Fetches from a map-style dataset."""

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


def make_fetcher(dataset: Any, *, is_iterable: bool, auto_collation: bool, drop_last: bool) -> Fetch:
    """Return the fetcher for a dataset."""
    if is_iterable:
        return IterableFetcher(dataset, auto_collation, drop_last)
    return MapFetcher(dataset, auto_collation)
