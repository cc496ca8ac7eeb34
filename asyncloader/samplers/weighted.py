"""WeightedSampler: samples by weights of their own, resumable anywhere on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.ordered import Order, OrderedSampler, count_of
from asyncloader.samplers.shuffle import scramble
from asyncloader.seeding.hashing import mix

Row = Sequence[Any] | NDArray[Any] | torch.Tensor
_LEAST, _MOST = 1e-150, 1e150


class WeightedSampler(OrderedSampler):
    """Draw each sample with a probability of its own; go on anywhere, on any number of ranks.

    In place of :class:`torch.utils.data.WeightedRandomSampler`, with its arguments and those of a distributed sampler.
    Its weights stay as they are: for others make another sampler, and another loader.

    Called from the thread that reads it.

    Args:
        weights: A weight for each sample: 0, or from 1e-150 to 1e150. 16 bytes are kept for each.
        num_samples: How many to draw in an epoch, over all ranks; by default as many as there are weights.
        replacement: Draw each time from all samples; otherwise each sample comes once at most. Without it the whole
            epoch is drawn at its beginning and after `load_state_dict`: a second for 10 million samples.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Where the samples cannot be divided evenly, leave out the last ones; otherwise some more are drawn
            (without replacement, samples from the beginning of the epoch's order are repeated at its end).

    Raises:
        ConfigurationError: if weights are out of bounds or all 0, or too few to be drawn without replacement.
    """

    def __init__(
        self,
        weights: Row,
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)
        self._weights = _checked(_row(weights))
        self.num_samples: int = count_of("num_samples", self._weights.size if num_samples is None else num_samples)
        self.replacement = replacement
        least, drawable = 1 if replacement else self.num_samples, np.flatnonzero(self._weights)
        if len(drawable) < least:
            raise ConfigurationError(f"{len(drawable)} samples have a weight above 0, and {least} are needed")
        self._sums, self._last = np.cumsum(self._weights), drawable[-1]

    def order(self) -> Order:
        """Return the order of the epoch that is set, which does not change afterwards."""
        key, weights, count = np.uint64(mix(self.seed, self.epoch)), self._weights, self.num_samples
        if not self.replacement:
            whole = cache(lambda: _race(weights, key)[:count])
            return Order(count, lambda positions: whole()[positions])
        sums, last = self._sums, self._last

        def indices_at(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            found: NDArray[np.int64] = np.searchsorted(sums, _uniform(positions, key) * sums[-1], side="right")
            return found.clip(max=last)  # a share may be rounded up to the sum of all

        return Order(count, indices_at, repeats=False)

    def num_indices(self) -> int:
        """Return below which number all of its indices are."""
        return len(self._weights)

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "weights": self._checksum}

    @cached_property
    def _checksum(self) -> dict[str, int]:
        return checksum(self._weights)


def _row(numbers: Row) -> NDArray[Any]:
    """Return numbers as an array of their own, into which the trainer does not write."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.detach().cpu()
        numbers = (numbers.double() if numbers.is_floating_point() else numbers).numpy()
    return np.array(numbers)


def _checked(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return weights of which no sum is infinite, or rounded to whole steps of the smallest float."""
    is_row = weights.ndim == 1 and weights.dtype.kind in "biuf"
    if not is_row or not (((weights >= _LEAST) & (weights <= _MOST)) | (weights == 0)).all():
        raise ConfigurationError(f"weights should be one row of 0, or from {_LEAST} to {_MOST}, but are {weights}")
    return weights.astype(np.float64)


def _race(weights: NDArray[np.float64], key: np.uint64) -> NDArray[np.int64]:
    """Return samples without replacement, by their arrival in a race of exponential clocks, whose rates are weights."""
    racing = np.flatnonzero(weights)
    return racing[np.argsort(-np.log1p(-_uniform(racing, key)) / weights[racing], kind="stable")]


def _uniform(numbers: NDArray[np.int64], key: np.uint64) -> NDArray[np.float64]:
    """Return a number between 0 and 1, below 1, for each of these."""
    return (scramble(numbers.astype(np.uint64), key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
