"""Pieces of samples that are longer than a block: their keys, and reading them from any dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from asyncloader.async_face import batch_method, resolved, sample_method
from asyncloader.protocols import OpensDataset, probe


class Piece(NamedTuple):
    """The key of a part of a sample: its tokens from `start` up to `stop`, which is not among them."""

    sample: int
    start: int
    stop: int

    def __index__(self) -> int:
        """Refuse to be the index of a list: a dataset that is asked for pieces has to know them.

        Raises:
            TypeError: Always; the message says what to do.
        """
        raise TypeError(_NO_INDEX)

    def __lt__(self, other: Any) -> bool:
        """Compare with another piece; with a number, as torch's ConcatDataset does, it is refused."""
        if isinstance(other, int):
            raise TypeError(_NO_INDEX)
        return tuple.__lt__(self, other)


_NO_INDEX = (
    'PackingBatchSampler(too_long="split") asks for pieces of samples, and this dataset has only whole ones: wrap it '
    "in asyncloader.samplers.Pieces; DataLoader(**packed(dataset, sampler)) does so"
)


class Pieces(OpensDataset, Dataset[Any]):
    """A dataset that can be asked for a :class:`Piece` of a sample too: that sample is read, and cut.

    Samples are rows of tokens (tensors, arrays, lists), or dictionaries with such a row under "input_ids", whose other
    rows of the same length are cut alike; labels, or a row of numbers, of another length are a ValueError. An async
    dataset stays one; whatever else a dataset has, such as `set_epoch`
    or a state, is had of the pieces too.

    Args:
        dataset: A map-style dataset, plain or async.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        if callable(probe(dataset, "__getitems__")):  # torch looks for it in the dataset
            self.__getitems__ = self._fetch
        if batch_method(dataset) is None:
            self.getitems = None  # type: ignore[method-assign, assignment]  # samples are awaited one by one

    def __getattr__(self, name: str) -> Any:
        """Return what the dataset has: `set_epoch`, a state."""
        if name == "dataset":  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        return cut(self.dataset[_index(key)], key)

    def _fetch(self, keys: list[Any]) -> Any:
        return list(map(cut, self.dataset.__getitems__([*map(_index, keys)]), keys))

    async def getitem(self, key: Any) -> Any:
        """Return a piece, without blocking the loop."""
        return cut(await resolved(sample_method(self.dataset)(_index(key))), key)

    async def getitems(self, keys: list[Any]) -> Any:
        """Return the pieces of a batch, without blocking the loop."""
        get_samples = batch_method(self.dataset)
        assert get_samples is not None
        return list(map(cut, await resolved(get_samples([*map(_index, keys)])), keys))


def cut(sample: Any, key: Any) -> Any:
    """Return what a key names of its sample."""
    if type(key) is not Piece:
        return sample
    part = slice(key.start, key.stop)
    if not isinstance(sample, Mapping):
        return sample[part]
    length, whose = len(sample["input_ids"]), f"sample {key.sample}"
    return {name: row[part] if is_row(row, name, length, whose) else row for name, row in sample.items()}


def is_row(row: Any, name: str, length: int, whose: str) -> bool:
    """Whether something in a sample is a row with an item for each of its tokens.

    Args:
        row: Anything in the sample.
        name: Its name in the sample.
        length: How many tokens the sample has.
        whose: The sample, for an error.

    Raises:
        ValueError: This is a row of numbers, or labels, of another length.
    """
    try:
        count = None if isinstance(row, (str, bytes, Mapping)) else len(row)
    except TypeError:
        count = None
    if count == length:
        return True
    if (name == "labels" and row is not None) or (count and _are_numbers(row)):
        raise ValueError(
            f"{whose}: {name!r} has {'no' if count is None else count} items, but there are {length} input_ids: a row "
            "has one item for each token. Leave other numbers out of the sample"
        )
    return False


def _are_numbers(row: Any) -> bool:
    if isinstance(row, torch.Tensor):
        return row.ndim == 1
    try:
        array = np.asarray(row)
    except ValueError:  # rows of several lengths in one
        return False
    return array.ndim == 1 and array.dtype.kind in "biufc"


def _index(key: Any) -> Any:
    return key.sample if type(key) is Piece else key
