"""Batches that were fetched as a whole: there are no samples to collate.

rows_in_memory  rows of tensors in memory, known by their numbers; gathered where the batch is to be
ready           a batch that the dataset has collated itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Gather: TypeAlias = "Callable[[torch.Tensor, NDArray[np.int64]], torch.Tensor]"
"""Returns these rows of a tensor, as a tensor that is a copy, in memory of its own choice."""


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


def rows_in_memory(tensors: Sequence[torch.Tensor], numbers: NDArray[np.int64]) -> Whole:
    """Return what torch's default collation makes of samples that are tuples of rows: a list of tensors.

    Args:
        tensors: A tensor for each entry of a sample.
        numbers: Which rows, counted from 0.
    """
    return Whole(len(numbers), lambda gather: [gather(tensor, numbers) for tensor in tensors])
