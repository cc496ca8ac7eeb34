"""WeightedSampler: samples by weights of their own, resumable anywhere on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.checks import at_least
from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.ordered import Order, OrderedSampler
from asyncloader.samplers.shuffle import scramble
from asyncloader.seeding.hashing import mix


class WeightedSampler(OrderedSampler):
    """Draw each sample with a probability of its own; go on anywhere, on any number of ranks.

    In place of :class:`torch.utils.data.WeightedRandomSampler`, with its arguments and those of a distributed sampler.

    Called from the thread that reads it.

    Args:
        weights: One for each sample, 0 or more. 8 bytes are kept for each, and 8 more with replacement.
        num_samples: How many to draw in an epoch, over all ranks; by default as many as there are weights.
        replacement: Draw each time from all samples; otherwise each sample comes once at most. Without it the whole
            epoch is drawn at its beginning and after `load_state_dict`: a second for 10 million samples.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Where the samples cannot be divided evenly, leave out the last ones; otherwise samples from the
            beginning of the epoch's order are repeated at its end.

    Raises:
        ConfigurationError: if weights are negative or all 0, or too few to be drawn without replacement.
    """

    def __init__(
        self,
        weights: Sequence[float] | NDArray[Any],
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(num_replicas, rank, seed, drop_last)
        self._weights = np.asarray(weights, dtype=np.float64)
        self.num_samples = self._weights.size if num_samples is None else num_samples
        self.replacement = replacement
        if self._weights.ndim != 1 or not (np.isfinite(self._weights).all() and (self._weights >= 0).all()):
            raise ConfigurationError("weights should be one row of numbers that are 0 or more")
        drawable = np.count_nonzero(self._weights)
        if not drawable:
            raise ConfigurationError("weights should not be all 0")
        at_least("num_samples", self.num_samples, least=1)
        if not replacement and self.num_samples > drawable:
            raise ConfigurationError(
                f"{self.num_samples} samples cannot be drawn without replacement: {drawable} have a weight above 0"
            )
        # Scaled by a power of two, which changes no bit of an ordinary weight: otherwise sums of the largest weights
        # are infinite, and fractions of the smallest ones are rounded to whole steps.
        self._ends = np.cumsum(np.ldexp(self._weights, -np.frexp(self._weights.max())[1])) if replacement else None

    def order(self) -> Order:
        """Return the order of the epoch that is set, which does not change afterwards."""
        key = np.uint64(mix(self.seed, self.epoch))
        if self._ends is not None:
            return Order(self.num_samples, partial(_draw, key, self._ends))
        # Whoever comes first in a race of exponential clocks, whose rates are the weights, is drawn first. Arrivals are
        # compared by exponent, then by mantissa: as floats, those of the smallest weights would be infinite.
        racing = np.flatnonzero(self._weights)
        mantissas, exponents = np.frexp(self._weights[racing])
        arrivals, more = np.frexp(-np.log1p(-_uniform(racing, key)) / mantissas)
        order = np.lexsort((arrivals, (more - exponents).astype(np.int16)))  # 16 bits are sorted in one pass
        return Order(self.num_samples, racing[order[: self.num_samples]].__getitem__)

    def num_indices(self) -> int:
        """Return below which number all of its indices are."""
        return len(self._weights)

    def _num_positions(self) -> int:
        return self.num_samples

    def _state_identity(self) -> dict[str, Any]:
        drawn = {"num_samples": self.num_samples, "replacement": self.replacement}
        return {**super()._state_identity(), "weights": self._checksum, **drawn}

    @cached_property
    def _checksum(self) -> dict[str, int]:
        return checksum(self._weights)


def _draw(key: np.uint64, ends: NDArray[np.float64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the samples that are drawn at these positions, with replacement."""
    found: NDArray[np.int64] = np.searchsorted(ends, _uniform(positions, key) * ends[-1], side="right")
    # The product may be rounded up to the end.
    found = np.minimum(found, np.searchsorted(ends, ends[-1]))
    return found


def _uniform(numbers: NDArray[np.int64], key: np.uint64) -> NDArray[np.float64]:
    """Return a number between 0 and 1, below 1, for each of these."""
    return (scramble(numbers.astype(np.uint64), key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
