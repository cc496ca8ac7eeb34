"""The lengths of samples: an array in memory or mapped, or a function; looked at where they are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum

log = logging.getLogger("asyncloader")

LengthsLike = Sequence[int] | NDArray[Any] | torch.Tensor | str | PathLike[str] | Callable[[NDArray[np.int64]], Any]
_PROBES = 256


class Lengths:
    """Lengths of samples, by index.

    Args:
        lengths: One integer for each sample: a list, an array (also one that is mapped), a tensor, the path of a .npy
            file, which is mapped; or a function of an array of indices that returns the array of their lengths.
        count: How many samples there are; needed for a function only.

    Raises:
        ConfigurationError: if they are not integers of at least 0; those that are not in memory are looked at when
            their samples are planned.
    """

    def __init__(self, lengths: LengthsLike, count: int | None = None) -> None:
        self._row: NDArray[Any] | None = None  # in memory or mapped
        if callable(lengths):
            if count is None:
                raise ConfigurationError("of a function of lengths, num_samples should say how many samples there are")
            self._look_up, self.count = lengths, count
        else:
            row = np.load(lengths, mmap_mode="r") if isinstance(lengths, (str, PathLike)) else np.asarray(lengths)
            if row.ndim != 1 or row.dtype.kind not in "iu":
                raise ConfigurationError(f"lengths should be one row of integers, but are {row.dtype}{row.shape}")
            if count not in (None, len(row)):
                raise ConfigurationError(f"there are {len(row)} lengths, but num_samples is {count}")
            self._row, self._look_up, self.count = row, row.__getitem__, len(row)
        if not self.count:
            raise ConfigurationError("there are no lengths")
        if self._row is not None and not isinstance(self._row, np.memmap):
            self(np.array([self._row.argmin()]))  # refuses the least one if it is negative
        self._probed = checksum(self.sample(_PROBES))["checksum"]

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of these samples."""
        lengths = np.asarray(self._look_up(indices))
        if lengths.shape != indices.shape or lengths.dtype.kind not in "iu":
            raise ConfigurationError(
                f"lengths of {len(indices)} samples should be as many integers, but are {lengths.dtype}{lengths.shape}"
            )
        if len(lengths) and lengths.min() < 0:
            worst = int(lengths.argmin())
            raise ConfigurationError(f"sample {indices[worst]} has a length of {lengths[worst]}")
        return lengths.astype(np.int64)

    def sample(self, count: int) -> NDArray[np.int64]:
        """Return so many lengths at the most, of samples evenly spread over all."""
        return self(np.linspace(0, self.count - 1, min(count, self.count)).astype(np.int64))

    def longest(self) -> tuple[int, int] | None:
        """Return which sample is the longest, and how long it is; None if that is not known without reading all."""
        if self._row is None or isinstance(self._row, np.memmap):
            return None
        index = int(self._row.argmax())
        return index, int(self._row[index])

    @cached_property
    def identity(self) -> dict[str, int]:
        """What tells them from other lengths: a checksum of some hundreds, and of all if they are in memory or mapped.

        Made once, when a first state is: 0.7 s for 100 million of them.
        """
        found = {"count": self.count, "checksum": self._probed}
        return found if self._row is None else {**found, "all": checksum(self._row)["checksum"]}

    def say_what_is_compared(self) -> None:
        """Say after a state was loaded if its lengths cannot all be compared to these."""
        if self._row is None:
            log.warning(
                "A function returns the lengths: of %d, the state is compared with %d. Where others differ, samples "
                "are lost or come twice. Arrays and .npy files are compared whole.",
                self.count,
                _PROBES,
            )
