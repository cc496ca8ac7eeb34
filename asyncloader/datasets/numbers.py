"""Samples by number, all of them in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

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
