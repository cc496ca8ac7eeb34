"""WeightedSampler: samples by weights of their own, which may change, resumable anywhere on any number of ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.agreement import gathered
from asyncloader.samplers.live_weights import LiveWeights, Moment, Update
from asyncloader.samplers.ordered import Order, OrderedSampler, Run, count_of
from asyncloader.samplers.shuffle import scramble
from asyncloader.samplers.sums import CumulativeSums, SumTree
from asyncloader.seeding.hashing import mix

Row = Sequence[Any] | NDArray[Any] | torch.Tensor
_LEAST, _MOST = 1e-150, 1e150
_FEWEST_AT_ONCE = 64


class WeightedSampler(OrderedSampler):
    """Draw each sample with a probability of its own; go on anywhere, on any number of ranks.

    In place of :class:`torch.utils.data.WeightedRandomSampler`, with its arguments and those of a distributed sampler.

    Weights may change (:meth:`update`), in the middle of an epoch too. States have what has changed: an epoch that is
    resumed goes on with the updates that were made before, and as it would have if those after it are made again.

    Called from the thread that reads it; `update` from any.

    Args:
        weights: A weight for each sample, 0 or more. 8 bytes are kept for each, and 8 more with replacement. From the
            first update on they are 24 in all, and 24 for each weight that was changed lately: for as many as there are
            samples, or a million.
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
        weights: Row,
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(num_replicas, rank, seed, drop_last)
        self._initial = _row(weights).astype(np.float64, copy=False)
        self.replacement = replacement
        if self._initial.ndim != 1 or not (np.isfinite(self._initial).all() and (self._initial >= 0).all()):
            raise ConfigurationError("weights should be one row of numbers that are 0 or more")
        drawable = np.count_nonzero(self._initial)
        if not drawable:
            raise ConfigurationError("weights should not be all 0")
        self.num_samples = count_of("num_samples", self._initial.size if num_samples is None else num_samples)
        if not replacement and self.num_samples > drawable:
            raise ConfigurationError(
                f"{self.num_samples} samples cannot be drawn without replacement: {drawable} have a weight above 0"
            )
        self._live = LiveWeights(self._initial)
        self._pass = 0  # how many epochs were begun before this one, since the sampler was made, or has loaded a state
        self._is_given_out = False  # the order of this pass, as a whole
        self._history = 0  # a checksum of all updates
        self._had_begun = False  # the epoch of a state that was loaded, of which nothing was taken
        self._is_to_load = False  # a loader has been given a state, which this loads when the loader is iterated over

    def __iter__(self) -> Iterator[int]:
        self._is_to_load = self._had_begun = False
        if self._next == self._beginning:
            self._begin_pass()
        yield from super().__iter__()

    def update(
        self, indices: Row, weights: Row, *, at: int | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Change the weights of some samples, in an epoch or between two.

        With replacement, the new weights hold from the next sample that is drawn. Loaders read ahead: batches that are
        planned are not changed. Without replacement, or where a batch sampler of :mod:`asyncloader.samplers` has this
        one inside, the order of an epoch is made as a whole: new weights hold from the next epoch on.

        All ranks have to make the same calls. If there are several, and a process group is initialised, the call is a
        collective one: the ranks agree on the sample, and compare checksums of all weights.

        Args:
            indices: The samples, (N,), integers: those of a batch, for instance. If a sample comes several times, its
                last weight counts.
            weights: A weight for each of them, (N,): 0, or from 1e-150 to 1e150.
            at: The sample of the epoch from which on the weights hold, counted over all ranks; by default the first
                that no rank has drawn. If it is given, the epoch does not depend on how far the loader reads ahead.
            group: The ranks that make this call; by default all of the process group.

        Raises:
            ConfigurationError: if indices or weights are bad, or leave too few samples to draw; if samples were drawn
                beyond `at`, or it cannot be chosen; if ranks differ, or cannot agree without a process group; if a
                loader has been given a state, and was not iterated over since.
        """
        if self._is_to_load:
            raise ConfigurationError(
                "a loader has been given a state, which it brings this sampler to when it is iterated over: the update "
                "would be lost. Make it after iter(loader)"
            )
        indices, weights = _row(indices), _row(weights)
        first, can_wait = self._first_moment(), at is None
        if self.num_replicas > 1 and dist.is_available() and dist.is_initialized():
            given = {"indices": checksum(indices), "weights": checksum(weights), "at": at, "epoch": self.epoch}
            before = {"the weights at construction": self._checksum, "all updates before": self._history}
            first, can_wait = max(gathered(first, {**given, **before}, group)), False
        elif self.num_replicas > 1 and self._is_drawn_singly and at is None:
            raise ConfigurationError(
                "without a process group, ranks cannot agree on the sample from which on the weights hold: name it, "
                "the same on all ranks, as in update(indices, weights, at=40_000)"
            )
        if at is not None and (at < first[1] or not self._is_drawn_singly):
            raise ConfigurationError(
                f"weights can change from sample {first[1]} on, but not from {at}: those before it are drawn"
                if self._is_drawn_singly
                else "weights change from the next epoch on, since the order is made as a whole: leave `at` out"
            )
        self._check(indices, weights)
        if len(indices):
            begin = first if at is None else (first[0], at)
            update = Update(begin, indices.astype(np.int64), weights.astype(np.float64), can_wait)
            self._history = zlib.crc32(update.weights.data, zlib.crc32(update.indices.data, self._history))
            self._live.post(update)

    def order(self) -> Order:
        """Return the order of the epoch that is set, with the weights of its beginning; later it does not change."""
        began = self._pass, 0
        self._live.advance(began, began)
        self._is_given_out = True
        sums = self._live.sums_at(began)
        if self.replacement:
            return Order(self.num_samples, partial(_draw, self._key, sums))
        # Whoever comes first in a race of exponential clocks, whose rates are the weights, is drawn first. Arrivals are
        # compared by exponent, then by mantissa: as floats, those of the smallest weights would be infinite.
        racing = np.flatnonzero(sums.weights)
        mantissas, exponents = np.frexp(sums.weights[racing])
        arrivals, more = np.frexp(-np.log1p(-_uniform(racing, self._key)) / mantissas)
        order = np.lexsort((arrivals, (more - exponents).astype(np.int16)))  # 16 bits are sorted in one pass
        return Order(self.num_samples, racing[order[: self.num_samples]].__getitem__)

    def num_indices(self) -> int:
        """Return below which number all of its indices are."""
        return len(self._initial)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        if epoch != self.epoch:
            self._begin_pass()
        super().set_epoch(epoch)

    def preload(self, state: dict[str, Any]) -> None:
        """Refuse updates until a state is loaded that a loader has been given: they would be lost."""
        self._is_to_load = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks, with the weights in it.

        Raises:
            StateMismatchError: if the state is of another sampler, data or order, or a later version.
        """
        super().load_state_dict(state)
        updates = state.get("updates")
        self._live.load(updates)
        self._pass, self._is_given_out, self._is_to_load = 0, False, False
        self._had_begun = any(number for number, *_ in (updates or {"waiting": ()})["waiting"])
        self._history = 0 if updates is None else zlib.crc32(json.dumps(updates).encode())

    def _deal(self, run: Run) -> Iterator[int]:
        if not self.replacement:
            yield from super()._deal(run)
            return
        live, key, number = self._live, self._key, self._pass
        positions, at_once = self._positions(run.start), self._most_at_once
        self._is_given_out = False
        while positions:
            piece, latest = positions[:at_once], live.latest
            if run is self._run:  # updates are made for the newest iterator; others draw by the weights that it has
                live.advance((number, piece.start - self.num_replicas + 1), (number, piece.start))
                change = live.next_moment()
                if change[0] == number:
                    piece = piece[: len(range(piece.start, change[1], piece.step))]
            # Positions beyond the end begin anew.
            places = np.arange(piece.start, piece.stop, piece.step) % self.num_samples
            count = 0
            for index in _draw(key, live.sums, places).tolist():
                yield index
                count += 1
                if live.latest is not latest:  # what is left is drawn anew; where updates come often, little is left
                    break
            at_once = _FEWEST_AT_ONCE if live.latest is not latest else min(2 * at_once, self._most_at_once)
            positions = positions[count:]

    def _begin_pass(self) -> None:
        """Let all updates hold that were made, if anything was drawn since they could for the last time."""
        if self._is_given_out or self._had_begun or self._drawn()[1]:
            self._pass += 1
            self._is_given_out = self._had_begun = False

    def _drawn(self) -> Moment:
        """Return up to where the newest iterator was read."""
        return self._pass, self._cursor_after(self._run.read)

    @property
    def _is_drawn_singly(self) -> bool:
        """Whether updates may hold from the middle of an epoch on."""
        return self.replacement and not (self._is_given_out and not self._drawn()[1])

    def _first_moment(self) -> Moment:
        """Return the first moment at which weights may still change."""
        number, drawn = self._drawn()
        has_begun = self._is_given_out or drawn > 0
        return (number + 1, 0) if has_begun and not self._is_drawn_singly else (number, drawn)

    def _check(self, indices: NDArray[Any], weights: NDArray[Any]) -> None:
        """See whether an update is one.

        Raises:
            ConfigurationError: if it is not, or leaves too few samples to draw.
        """
        count = len(self._initial)
        if indices.shape != weights.shape or indices.ndim != 1:
            raise ConfigurationError(
                f"there should be a row of indices, and a weight for each, but their shapes are {indices.shape} and "
                f"{weights.shape}"
            )
        if indices.size and indices.dtype.kind not in "iu":
            raise ConfigurationError(f"indices should be integers, but are of the dtype {indices.dtype}")
        if indices.size and (indices.min() < 0 or indices.max() >= count):
            raise ConfigurationError(f"indices should be from 0 to {count - 1}: {indices.min()} to {indices.max()}")
        if weights.dtype.kind not in "biuf" or not _can_be_added(weights):
            raise ConfigurationError(f"weights should be 0, or from {_LEAST} to {_MOST}, but got {weights}")
        if not self._is_updatable:
            raise ConfigurationError(
                f"weights that are updated should be 0, or from {_LEAST} to {_MOST} from the start"
            )
        least = 1 if self.replacement else self.num_samples
        if not weights.all() and (least > 1 or not weights.any()):
            left = self._live.after_all()
            left[indices.astype(np.int64)] = weights
            if (drawable := np.count_nonzero(left)) < least:
                raise ConfigurationError(f"{drawable} samples would have a weight above 0, and {least} are needed")

    def _num_positions(self) -> int:
        return self.num_samples

    def _state_identity(self) -> dict[str, Any]:
        drawn = {"num_samples": self.num_samples, "replacement": self.replacement}
        return {**super()._state_identity(), "weights": self._checksum, **drawn}

    def _bare_state(self, items: int | None = None) -> dict[str, Any]:
        return {**super()._bare_state(items), "pass": self._pass}

    def _whole_state(self, bare: dict[str, Any]) -> dict[str, Any]:
        updates = self._live.state((bare.get("pass", 0), bare["cursor"]), self._drawn())
        rest = {name: bare[name] for name in bare if name not in ("pass", "updates")}
        return rest if updates is None else {**rest, "updates": updates}

    @property
    def _key(self) -> np.uint64:
        return np.uint64(mix(self.seed, self.epoch))

    @cached_property
    def _checksum(self) -> dict[str, int]:
        return checksum(self._initial)

    @cached_property
    def _is_updatable(self) -> bool:
        return _can_be_added(self._initial)


def _row(numbers: Row) -> NDArray[Any]:
    """Return numbers as an array of their own: what the trainer writes into its row later is no update."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.detach().cpu()
        numbers = (numbers.double() if numbers.is_floating_point() else numbers).numpy()
    return np.array(numbers)


def _can_be_added(weights: NDArray[Any]) -> bool:
    """Whether no sum of weights is infinite, or rounded to whole steps of the smallest float."""
    return bool((((weights >= _LEAST) & (weights <= _MOST)) | (weights == 0)).all())


def _draw(key: np.uint64, sums: CumulativeSums | SumTree, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the samples that are drawn at these positions, with replacement."""
    return sums.find(_uniform(positions, key))


def _uniform(numbers: NDArray[np.int64], key: np.uint64) -> NDArray[np.float64]:
    """Return a number between 0 and 1, below 1, for each of these."""
    return (scramble(numbers.astype(np.uint64), key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
