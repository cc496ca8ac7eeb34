"""Samples by number: the numbers, as samplers and users name them, and all samples in their order."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)


class ByNumber(Dataset[T_co]):
    """A dataset whose samples have the numbers from 0 on: ``for sample in dataset`` ends after the last one.

    Without a method for it Python would ask for sample after sample until one is an IndexError, which need never come.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[T_co]:
        return map(self.__getitem__, range(len(self)))


def counted(indices: Iterable[int], length: int, what: str) -> NDArray[np.int64]:
    """Return the numbers of some samples, those that were counted from the end from the beginning.

    Args:
        indices: The numbers.
        length: How many samples there are.
        what: The word for a sample in the error.

    Raises:
        IndexError: No sample has this number.
        TypeError: A number is not whole.
    """
    numbers = np.fromiter(map(operator.index, indices), np.int64)
    if (strays := numbers[(numbers < -length) | (numbers >= length)]).size:
        raise IndexError(f"there is no {what} {strays[0]}: there are {length:,}")
    return np.where(numbers < 0, numbers + length, numbers)
