"""Batches that were fetched as a whole: there are no samples to collate.

rows_in_memory  rows of tensors and arrays in memory, known by their numbers; gathered where the batch is to be
ready           a batch that the dataset has collated itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.transport.tensors import Array

Source: TypeAlias = "torch.Tensor | Array"


Gather: TypeAlias = "Callable[[Source, NDArray[np.int64]], torch.Tensor]"
"""Returns these rows of a tensor or an array, as a tensor that is a copy, in memory of its own choice."""


class Whole:
    """A batch in the place of its samples. Has the number of samples as its length.

    Args:
        count: How many samples there are.
        make: Makes the batch.
    """

    def __init__(self, count: int, make: Callable[[Gather], Any]) -> None:
        self._count = count
        self.batch = make

    def __len__(self) -> int:
        return self._count


def ready(data: Any, count: int) -> Whole:
    """Return a batch that the dataset has made. As without automatic batching, arrays in it become tensors."""
    return Whole(count, lambda _: torch.utils.data.default_convert(data))  # type: ignore[no-untyped-call]


class Column(NamedTuple):
    """An entry of all samples, as rows that are still to be gathered.

    Attributes:
        parts: Tensors or arrays that are alike but for their length, and which rows of each, counted from 0.
        order: Which of all those rows is the first of the batch, the second, ...; None if there is one part.
    """

    parts: Sequence[tuple[Source, NDArray[np.int64]]]
    order: NDArray[np.int64] | None = None


Tree: TypeAlias = "list[Column] | tuple[Any, ...] | dict[Any, Any]"
"""The columns of samples that are tuples of rows; or of samples that are tuples or dicts of such samples."""


def rows_in_memory(tree: Tree, count: int) -> Whole:
    """Return what torch's default collation makes of samples that are tuples of rows, or are made of such ones.

    Args:
        tree: A column for each entry of a sample: a tensor in a list, as torch collates tuples.
        count: How many samples there are.
    """
    return Whole(count, partial(_batch, tree))


def _batch(tree: Tree, gather: Gather) -> Any:
    if type(tree) is list:
        return [_gathered(column, gather) for column in tree]
    if isinstance(tree, dict):
        return {name: _batch(part, gather) for name, part in tree.items()}
    return [_batch(part, gather) for part in tree]


def _gathered(column: Column, gather: Gather) -> torch.Tensor:
    if column.order is None:
        return gather(*column.parts[0])
    return gather(torch.cat([_copied(*part) for part in column.parts]), column.order)


def _copied(source: Source, numbers: NDArray[np.int64]) -> torch.Tensor:
    if isinstance(source, np.ndarray):
        return torch.from_numpy(np.take(source, numbers, 0))
    return source.index_select(0, torch.from_numpy(numbers).to(source.device))
