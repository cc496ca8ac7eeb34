"""The lengths or costs of samples: an array in memory or mapped, or a function; looked at where they are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, ClassVar

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
        lengths: An integer for each sample: a list, an array (also one that is mapped), a tensor, the path of a .npy
            file, which is mapped; or a function of an array of indices that returns the array of their lengths.
        count: How many samples there are; needed for a function only.

    Raises:
        ConfigurationError: if they are not integers of at least 0; those that are not in memory are looked at when
            their samples are planned.
    """

    noun: ClassVar[str] = "length"
    _numbers: ClassVar[str] = "integers"
    _kinds: ClassVar[str] = "iu"
    _dtype: ClassVar[type] = np.int64

    def __init__(self, lengths: LengthsLike, count: int | None = None) -> None:
        self._row: NDArray[Any] | None = None  # in memory or mapped
        if callable(lengths):
            if count is None:
                raise ConfigurationError(
                    f"of a function of {self.noun}s, num_samples should say how many samples there are"
                )
            self._look_up, self.count = lengths, count
        else:
            row = np.load(lengths, mmap_mode="r") if isinstance(lengths, (str, PathLike)) else np.asarray(lengths)
            if row.ndim != 1 or row.dtype.kind not in self._kinds:
                raise ConfigurationError(
                    f"{self.noun}s should be one row of {self._numbers}, but are {row.dtype}{row.shape}"
                )
            if count not in (None, len(row)):
                raise ConfigurationError(f"there are {len(row)} {self.noun}s, but num_samples is {count}")
            self._row, self._look_up, self.count = row, row.__getitem__, len(row)
        if not self.count:
            raise ConfigurationError(f"there are no {self.noun}s")
        if self._row is not None and not isinstance(self._row, np.memmap):
            self(np.array([self._row.argmin(), self._row.argmax()]))  # refuses the least one if it is negative
        self._probed = checksum(self.sample(_PROBES))["checksum"]

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return the lengths of these samples."""
        lengths = np.asarray(self._look_up(indices))
        if lengths.shape != indices.shape or lengths.dtype.kind not in self._kinds:
            raise ConfigurationError(
                f"{self.noun}s of {len(indices)} samples should be as many {self._numbers}, but are "
                f"{lengths.dtype}{lengths.shape}"
            )
        bad = np.flatnonzero(~((lengths >= 0) & (lengths < np.inf)))
        if bad.size:
            raise ConfigurationError(f"sample {indices[bad[0]]} has a {self.noun} of {lengths[bad[0]]}")
        return lengths.astype(self._dtype)

    def sample(self, count: int) -> NDArray[Any]:
        """Return so many lengths at the most, of samples evenly spread over all."""
        return self(np.linspace(0, self.count - 1, min(count, self.count)).astype(np.int64))

    def longest(self) -> tuple[int, Any] | None:
        """Return which sample is the longest, and how long it is; None if that is not known without reading all."""
        if self._row is None or isinstance(self._row, np.memmap):
            return None
        index = int(self._row.argmax())
        return index, self._row[index].item()

    @cached_property
    def identity(self) -> dict[str, int]:
        """Tell these lengths from others: a checksum of some hundreds, and of all if they are in memory or mapped.

        Made once, when a first state is: 0.7 s for 100 million of them.
        """
        found = {"count": self.count, "checksum": self._probed}
        return found if self._row is None else {**found, "all": checksum(self._row)["checksum"]}

    def say_what_is_compared(self) -> None:
        """Say after a state was loaded if its lengths cannot all be compared to these."""
        if self._row is None:
            log.warning(
                "A function returns the %ss: of %d, the state is compared with %d. Where others differ, samples are "
                "lost or come twice. Arrays and .npy files are compared whole.",
                self.noun,
                self.count,
                _PROBES,
            )


class Costs(Lengths):
    """Costs of samples, by index: numbers of any kind, in any unit; otherwise as lengths."""

    noun = "cost"
    _numbers = "numbers"
    _kinds = "iuf"
    _dtype = np.float64
