"""Samples of a window, divided into units: batches or blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.samplers.shuffle import Shuffle

Array = NDArray[np.int64]


class Units:
    """Samples in an order, and where in it one unit ends and the next one begins.

    Args:
        indices: Of samples, in the order of their units.
        sizes: How many samples each unit has, in order.
    """

    def __init__(self, indices: Array, sizes: Array) -> None:
        self.indices = indices
        self._bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def keys(self, unit: int) -> list[Any]:
        """Return the keys of the samples in a unit."""
        keys: list[Any] = self.indices[self.slice(unit)].tolist()
        return keys

    def slice(self, unit: int) -> slice:
        """Return where the samples of a unit are."""
        return slice(self._bounds[unit], self._bounds[unit + 1])


def shuffled(sizes: Array, *key: int) -> tuple[Array, Array]:
    """Shuffle units that lie one behind the other.

    Returns:
        Where the samples of the shuffled units are now, and the sizes of these.
    """
    begins = np.cumsum(sizes) - sizes
    chosen = Shuffle(len(sizes), *key)(np.arange(len(sizes)))
    sizes, begins = sizes[chosen], begins[chosen]
    moved = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    return np.arange(len(moved)) + moved, sizes
