"""The lengths or costs of samples: an array in memory, or one that is mapped, and looked at where it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum

LengthsLike = Sequence[int] | NDArray[Any] | torch.Tensor | str | PathLike[str]
_PROBES = 256


class Lengths:
    """Lengths of samples, by index; or their costs, which are numbers of any kind.

    Args:
        lengths: An integer for each sample: a list, an array (also one that is mapped), a tensor, or the path of a .npy
            file, which is mapped.
        noun: "length" or "cost".

    Raises:
        ConfigurationError: if they are not integers of at least 0; those that are mapped are looked at when their
            samples are planned.
    """

    count: int

    def __init__(self, lengths: LengthsLike, noun: str = "length") -> None:
        of_costs = noun == "cost"
        numbers, kinds = ("numbers", "iuf") if of_costs else ("integers", "iu")
        self._dtype: type = np.float64 if of_costs else np.int64
        row = np.load(lengths, mmap_mode="r") if isinstance(lengths, (str, PathLike)) else np.asarray(lengths)
        if row.ndim != 1 or row.dtype.kind not in kinds:
            raise ConfigurationError(f"{noun}s should be one row of {numbers}, but are {row.dtype}{row.shape}")
        if not len(row):
            raise ConfigurationError(f"there are no {noun}s")
        self._noun, self._row, self.count = noun, row, len(row)
        self._is_in_memory = not isinstance(row, np.memmap)
        if self._is_in_memory:
            self(np.array([row.argmin(), row.argmax()]))  # refuses the least one if it is negative

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return the lengths of these samples."""
        lengths: NDArray[Any] = self._row[indices].astype(self._dtype)
        bad = np.flatnonzero(~((lengths >= 0) & (lengths < np.inf)))
        if bad.size:
            raise ConfigurationError(f"sample {indices[bad[0]]} has a {self._noun} of {lengths[bad[0]]}")
        return lengths

    def sample(self) -> NDArray[Any]:
        """Return some hundreds of lengths, of samples evenly spread over all."""
        return self(np.linspace(0, self.count - 1, min(_PROBES, self.count)).astype(np.int64))

    def longest(self) -> NDArray[np.int64]:
        """Return the index of the longest sample; none of lengths that are mapped, which are not read as a whole."""
        return np.array([self._row.argmax()] if self._is_in_memory else [], np.int64)

    @cached_property
    def identity(self) -> dict[str, int]:
        """Tell these lengths from others: a checksum of all. Made with a first state: 0.7 s for 100 million of them."""
        return checksum(self._row)
