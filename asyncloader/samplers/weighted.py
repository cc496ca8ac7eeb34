"""WeightedSampler: samples by weights of their own, which may change, resumable anywhere on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.ordered import ENDLESS, Order, OrderedSampler, Run, count_of
from asyncloader.samplers.shuffle import scramble
from asyncloader.samplers.weights import ChangingWeights, Update
from asyncloader.seeding.hashing import mix

Row = Sequence[Any] | NDArray[Any] | torch.Tensor
_LEAST, _MOST = 1e-150, 1e150


class WeightedSampler(OrderedSampler):
    """Draw each sample with a probability of its own; go on anywhere, on any number of ranks.

    In place of :class:`torch.utils.data.WeightedRandomSampler`, with its arguments and those of a distributed sampler.

    Weights may change (:meth:`update`): at the next epoch, or from a sample of this one on. States have what has
    changed: an epoch that is resumed goes on with the updates that were made before, and as it would have if those
    after it are made again.

    Called from the thread that reads it; `update` from any.

    Args:
        weights: A weight for each sample: 0, or from 1e-150 to 1e150. 24 bytes are kept for each, 8 without
            replacement, and 16 for each weight that was changed in the last epochs.
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
        self._initial = _checked(_row(weights))
        self.num_samples = count_of("num_samples", self._initial.size if num_samples is None else num_samples)
        self.replacement = replacement
        self._check_drawable(self._initial)
        self._weights = ChangingWeights(self._initial)
        self._is_to_load = False  # a loader has been given a state, which this loads when the loader is iterated over

    def update(self, indices: Row, weights: Row, *, at: int | None = None) -> None:
        """Change the weights of some samples. All ranks have to make the same calls.

        Args:
            indices: The samples, (N,), integers: those of a batch, for instance. If a sample comes several times, its
                last weight counts.
            weights: A weight for each of them, (N,): 0, or from 1e-150 to 1e150.
            at: The sample of this epoch from which on the weights hold, counted over all ranks. Loaders read ahead:
                name one that lies well ahead of what is trained on. By default the weights hold from the beginning of
                the next epoch on; an epoch that nobody has begun to read is the next one.

        Raises:
            ConfigurationError: if indices or weights are bad, or leave too few samples to draw; if samples beyond `at`
                were drawn, or `at` is given without replacement, where the order of an epoch is drawn as a whole; if a
                loader has been given a state, and was not iterated over since.
        """
        if self._is_to_load:
            raise ConfigurationError(
                "a loader has been given a state, which it brings this sampler to when it is iterated over: the update "
                "would be lost. Make it after iter(loader)"
            )
        begin = self._reading + self._is_begun, 0
        if at is not None:
            begin = self._reading, count_of("at", at, least=0)
            if not self.replacement:
                raise ConfigurationError("without replacement, weights change from the next epoch on: leave `at` out")
        indices, weights = _row(indices), _checked(_row(weights))
        if indices.shape != weights.shape:
            raise ConfigurationError(
                f"there should be a row of indices, and a weight for each, but their shapes are {indices.shape} and "
                f"{weights.shape}"
            )
        if not len(indices):
            return
        if indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= len(self._initial):
            raise ConfigurationError(
                f"indices should be integers from 0 to {len(self._initial) - 1}, but are {indices}"
            )
        if not weights.all():
            after = self._weights.at((begin[0] + 1, 0))
            after[indices] = weights
            self._check_drawable(after)
        with self._changed_from(ENDLESS if at is None else begin[1]):
            self._weights.add(Update(begin, indices.astype(np.int64), weights))

    def order(self) -> Order:
        """Return the order of the epoch that is set. Updates change it after what was drawn."""
        key, reading, weights = np.uint64(mix(self.seed, self.epoch)), self._reading, self._weights
        if self.replacement:
            return Order(
                self.num_samples,
                lambda positions: weights.find(reading, positions, _uniform(positions, key)),
                repeats=False,
            )
        whole = cache(lambda: _race(weights.at((reading, 0)), key)[: self.num_samples])
        return Order(self.num_samples, lambda positions: whole()[positions])

    def num_indices(self) -> int:
        """Return below which number all of its indices are."""
        return len(self._initial)

    def preload(self, state: dict[str, Any]) -> None:
        """Refuse updates until a state is loaded that a loader has been given: they would be lost."""
        self._is_to_load = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks, with the weights in it.

        Raises:
            StateMismatchError: if the state is of another sampler, data or order, or a later version.
        """
        super().load_state_dict(state)
        since = self._reading, state["cursor"] if self.replacement else 0
        self._weights = ChangingWeights(self._initial, state["updates"], since)
        self._is_to_load = False

    def _begin_run(self) -> Run:
        self._is_to_load = False
        return super()._begin_run()

    def _check_drawable(self, weights: NDArray[np.float64]) -> None:
        least, drawable = 1 if self.replacement else self.num_samples, np.count_nonzero(weights)
        if drawable < least:
            raise ConfigurationError(f"{drawable} samples have a weight above 0, and {least} are needed")

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "weights": self._checksum}

    def _bare_state(self, run: Run, items: int) -> dict[str, Any]:
        return {**super()._bare_state(run, items), "updates": run.reading}  # of which they are added later

    def _whole_state(self, bare: dict[str, Any]) -> dict[str, Any]:
        return {**bare, "updates": self._weights.state((bare["updates"], bare["cursor"]))}

    @cached_property
    def _checksum(self) -> dict[str, int]:
        return checksum(self._initial)


def _row(numbers: Row) -> NDArray[Any]:
    """Return numbers as an array of their own: what the trainer writes into its row later is no update."""
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
