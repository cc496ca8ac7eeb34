"""Fetching samples: what torch's fetchers give, collation left aside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatchmethod
from typing import Any

import pytest
import torch.utils.data._utils.fetch as torch_fetch
from torch.utils.data import Dataset, IterableDataset

from asyncloader.messages.failure import EndOfData
from tests.worker.fetching import fetching


class Plain(Dataset[int]):
    """One sample at a time."""

    def __getitem__(self, key: int) -> Any:
        return key * 10


class Batched(Plain):
    """Several at once."""

    def __getitems__(self, keys: list[int]) -> Any:
        return ["together", *keys]


class Unbatched(Plain):
    """Says that it cannot."""

    __getitems__ = None


class Shadowed(Plain):
    """Has an attribute of its own by the method's name, which Python's brackets do not look at."""

    def __init__(self) -> None:
        self.__getitem__ = None  # type: ignore[assignment, method-assign]


class Static:
    """Is given the key alone."""

    @staticmethod
    def __getitem__(key: int) -> Any:
        return key * 10


class ByKind:
    """Python binds its method otherwise than a function."""

    @singledispatchmethod
    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)

    @__getitem__.register
    def _(self, key: int) -> Any:
        return key * 10


class Closed(Plain):
    """Becomes another class when it is first used."""

    def __getitem__(self, key: int) -> Any:
        self.__class__ = Plain
        return key


class Stream(IterableDataset[int]):
    """Some numbers, and a note of how often it was asked for more."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked = 0

    def __iter__(self) -> Any:
        for number in range(self.length):
            self.asked += 1
            yield number
        self.asked += 1


ALL = (Plain, Batched, Unbatched, Shadowed, Static, ByKind, Closed)
NUMBERS = range(0, 80, 10)


@pytest.mark.parametrize("make", [*ALL, partial(list, NUMBERS), lambda: NUMBERS, lambda: None])
@pytest.mark.parametrize(("auto_collation", "keys"), [(True, [3, 1, 2]), (True, []), (False, 7)])
def test_map_style_as_torch(make: Callable[[], Any], auto_collation: bool, keys: Any) -> None:
    """Sample by sample, together where the dataset can, or a single one; and what raises, raises the same."""
    ours = fetching(make(), auto_collation=auto_collation)
    theirs = torch_fetch._MapDatasetFetcher(make(), auto_collation, lambda samples: samples, False)

    def result(fetch: Any) -> Any:
        try:
            return fetch(keys)
        except TypeError as error:
            return str(error)

    assert result(ours) == result(theirs.fetch)


@pytest.mark.parametrize("length", [0, 4, 6, 7])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("auto_collation", [False, True])
def test_iterable_as_torch(length: int, drop_last: bool, auto_collation: bool) -> None:
    """Whole batches, a short last one or none, the end, and not one question more than torch asks."""
    keys = [None] * 3 if auto_collation else None
    datasets = Stream(length), Stream(length)
    ours = fetching(datasets[0], is_iterable=True, auto_collation=auto_collation, drop_last=drop_last)
    fetcher = torch_fetch._IterableDatasetFetcher(datasets[1], auto_collation, lambda samples: samples, drop_last)

    def results(fetch: Any) -> list[Any]:
        found: list[Any] = []
        for _ in range(9):
            try:
                found.append(fetch(keys))
            except (StopIteration, EndOfData):
                found.append("end")
        return found

    assert results(ours) == results(fetcher.fetch)
    assert datasets[0].asked == datasets[1].asked
