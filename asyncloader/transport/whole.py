"""Batches that were fetched as a whole: there are no samples to collate.

Rows    rows of tensors and arrays in memory, known by their numbers; gathered where the batch is to be
Ready   what the dataset has collated itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.transport.tensors import Array

Source: TypeAlias = "torch.Tensor | Array"


class Gatherer(Protocol):
    """Gathers rows into memory of its own choice."""

    def rows(self, source: Source, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Return these rows of a tensor or an array, as a tensor that is a copy."""


class Whole:
    """A batch in the place of its samples. Has the number of samples as its length."""

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, gatherer: Gatherer) -> Any:
        """Return the batch."""
        raise NotImplementedError


class Ready(Whole):
    """A batch that the dataset has made. As without automatic batching, arrays in it become tensors.

    Args:
        data: The batch.
        count: How many samples are in it.
    """

    def __init__(self, data: Any, count: int) -> None:
        self._data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, gatherer: Gatherer) -> Any:
        """Return the batch."""
        return torch.utils.data.default_convert(self._data)  # type: ignore[no-untyped-call]


class Column(NamedTuple):
    """One entry of each sample, as rows that are still to be gathered.

    Attributes:
        parts: Tensors or arrays that are alike but for their length, and which rows of each, counted from 0.
        order: Which of all those rows is the first of the batch, the second, ...; None if there is one part.
    """

    parts: Sequence[tuple[Source, NDArray[np.int64]]]
    order: NDArray[np.int64] | None = None


Tree: TypeAlias = "list[Column] | tuple[Any, ...] | dict[Any, Any]"
"""The columns of samples that are tuples of rows; or of samples that are tuples or dicts of such samples."""


class Rows(Whole):
    """What torch's default collation makes of samples that are tuples of rows, or are made of such ones.

    Args:
        tree: A column for each entry of a sample.
        count: How many samples there are.
    """

    def __init__(self, tree: Tree, count: int) -> None:
        self._tree = tree
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, gatherer: Gatherer) -> Any:
        """Gather the rows: a tensor for each column, in a list, as torch collates tuples."""
        return _batch(self._tree, gatherer)


def _batch(tree: Tree, gatherer: Gatherer) -> Any:
    if type(tree) is list:
        return [_gathered(column, gatherer) for column in tree]
    if isinstance(tree, dict):
        return {name: _batch(part, gatherer) for name, part in tree.items()}
    return [_batch(part, gatherer) for part in tree]


def _gathered(column: Column, gatherer: Gatherer) -> torch.Tensor:
    if column.order is None:
        return gatherer.rows(*column.parts[0])
    return gatherer.rows(torch.cat([_copied(*part) for part in column.parts]), column.order)


def _copied(source: Source, numbers: NDArray[np.int64]) -> torch.Tensor:
    if isinstance(source, np.ndarray):
        return torch.from_numpy(np.take(source, numbers, 0))
    return source.index_select(0, torch.from_numpy(numbers).to(source.device))
