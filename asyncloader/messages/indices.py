"""Indices of a batch as an array, for datasets whose rows are gathered: nobody of the user's sees them there.

    Plan ── Indices: a list, with the array beside it ── pack_tickets: Numbers: the array alone ──> gather

To pickle, unpickle, check and convert a thousand ints takes as long as to gather a hundred kB of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Indices(list[int]):
    """The indices of one batch, as they are shown and kept, and as an array.

    Args:
        indices: Python's own ints.
        array: The same.
    """

    def __init__(self, indices: Iterable[int], array: NDArray[np.int64]) -> None:
        super().__init__(indices)
        self.array = array

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def travelling(self) -> Numbers:
        """Return what a worker gets."""
        return Numbers(self.array)


class Numbers:
    """An array of indices on its way, of which Python's own ints come out."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[np.int64]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __getitem__(self, at: int | slice) -> Any:
        return self.array[at].tolist()

    def __reduce__(self) -> Any:
        return _from_memory, (bytearray(self.array.data),)  # in a quarter of the time of the array's own way


def _from_memory(memory: bytearray) -> Numbers:
    return Numbers(np.frombuffer(memory, np.int64))


def listed(keys: Any) -> Any:
    """Return keys as user code is to see them."""
    return list(keys) if type(keys) is Numbers or type(keys) is Indices else keys
