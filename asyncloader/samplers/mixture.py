"""MixtureSampler: sources by weight, resumable anywhere on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.log import log
from asyncloader.samplers.ordered import Order, OrderedSampler, count_of, length_of
from asyncloader.samplers.shares import Schedule
from asyncloader.samplers.shuffle import by_group, reshuffled

Stop = Literal["first", "all"]
Weights = Sequence[float] | Sequence[tuple[int, Sequence[float]]]
_LEAST_SHARE = 1e-9
_AT = "the sample from which on weights hold"


class MixtureSampler(OrderedSampler):
    """Mix several sources by weight, over the indices of a `ConcatDataset`.

    In every 1,000 samples of all ranks together (the first 1,000 of the same weights, the next ...) each source has its
    share to within one sample, spread evenly; what is rounded evens out over time. A source that comes to its end
    begins anew in another order. Nothing is stored of the order: memory and states are as small for any lengths, and a
    state, of any one rank, is resumed on any number of ranks. A mixture without an end may have more sources then, at
    the end of the list: those that were there go on, and from there on its own weights hold, as by `set_weights`.

    Called from the thread that reads it.

    Args:
        lengths: How many samples each source has: numbers, or the datasets themselves, or a `ConcatDataset` of them.
        weights: The share of each source, in any unit: `[7, 2, 1]`. Or a curriculum: pairs of the sample, counted
            over all ranks, from which on weights hold, and these weights:
            `[(0, [1, 0]), (50_000, [1, 1])]`. By default sources are weighted by their lengths.
        by: What the samples of each source cost: for each an array, such as their numbers of tokens, or the mean. Then
            weights are shares of that, exact over whole epochs of a source. Without it they are shares of samples.
        stop: Where an epoch ends: "first" when a source has come to its end and would begin anew, "all" when every
            source has been gone through at least once, None never.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        shuffle: Draw each source in an order that `seed`, epoch and its own epoch determine; or else in its own.
        seed: The same on all ranks.
        drop_last: Where the samples of an epoch cannot be divided evenly among ranks, leave out the last ones; else
            those from its beginning are repeated at its end.

    Raises:
        ConfigurationError: if weights are negative or all 0, do not fit the lengths, or never let an epoch end.
    """

    def __init__(
        self,
        lengths: Sequence[int | Sized] | ConcatDataset[Any],
        weights: Weights | None = None,
        *,
        by: Sequence[Any] | None = None,
        stop: Stop | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)
        if isinstance(lengths, Mapping):
            raise ConfigurationError(
                "lengths should be a list of sources, whose order the indices and the weights follow; of a mapping, "
                f"give its values: {[*lengths]}"
            )
        sources: Iterable[Any] = lengths.datasets if isinstance(lengths, ConcatDataset) else lengths
        self.lengths: list[int] = [*map(length_of, sources)]
        if stop is not None:
            one_of("stop", stop, Stop)
        if not self.lengths or min(self.lengths) < 0:
            raise ConfigurationError(f"lengths should name sources, with no less than 0 samples: {self.lengths}")
        self.stop = stop
        self.shuffle = shuffle
        self._costs = None if by is None else [float(np.mean(own)) for own in by]
        if self._costs and (
            len(self._costs) != len(self.lengths) or not all(0 < cost < math.inf for cost in self._costs)
        ):
            raise ConfigurationError(f"by should be the costs of {len(self.lengths)} sources, above 0: {self._costs}")
        self._begin(stages_of(self._shares(self.lengths, 1) if weights is None else weights))

    @property
    def weights(self) -> list[tuple[int, list[float]]]:
        """The weights, and from which sample on they hold."""
        return [(at, [*own]) for at, own in self._stages]

    def set_weights(self, weights: Sequence[float], at: int) -> None:
        """Let other weights hold from a sample on, which is recorded in states. All ranks have to say the same.

        Samples that were read, or planned by a sampler around this one, keep their weights: loaders read ahead, so name
        a sample well ahead of the one that is trained on.

        Args:
            weights: The weight of each source.
            at: From which sample on, counted over all ranks.

        Raises:
            ConfigurationError: if weights are bad, or samples there were read or have got other weights already; or if
                the mixture has an end, which would move.
        """
        if self.stop is not None:
            raise ConfigurationError(
                "weights can be set on the way where stop=None; otherwise name them all at construction"
            )
        at, last = count_of(_AT, at, least=0), self._stages[-1][0]
        if at < last:
            raise ConfigurationError(f"weights can't be set from sample {at} on: from {last} on others were set before")
        self._check(weights)
        with self._changed_from(at):
            self._add(at, weights)

    def order(self) -> Order:
        """Return the order of the epoch that is set. `set_weights` changes it after what was read."""
        shuffles = [
            reshuffled(length, self.shuffle, self.seed, self.epoch, number)
            for number, length in enumerate(self.lengths)
        ]
        starts = np.cumsum([0, *self.lengths[:-1]])
        schedule = self._schedule

        def indices_at(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            return by_group(*schedule.draws(positions), lambda number, own: starts[number] + shuffles[number](own))

        return Order(self._length, indices_at)

    def num_indices(self) -> int:
        """Return below which number all of its indices are."""
        return sum(self.lengths)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks, with the weights in it.

        Raises:
            StateMismatchError: if the state is of other sources, or a later version.
        """
        super().load_state_dict(state)
        mine, saved, at = self.weights, [(at, [*own]) for at, own in state["weights"]], state["cursor"]
        if num_new := len(self.lengths) - len(state["lengths"]):
            before = [(start, own + [0.0] * num_new) for start, own in saved if start < at]
            here = [own for start, own in mine if start <= at][-1]
            self._begin([*before, (at, here), *((start, own) for start, own in mine if start > at)])
        elif saved != mine:
            log.warning(
                "The state was taken with weights %s, which the mixture goes on with; it was made with %s. Use "
                "set_weights to change them from here on.",
                saved,
                mine,
            )
            self._begin(saved)

    def _check_state(self, state: dict[str, Any]) -> None:
        is_more = self.stop is None and has_more_sources(state, self.lengths)
        more = {"lengths": self.lengths, "by": self._costs} if is_more else {}
        super()._check_state({**state, **more})

    def _begin(self, stages: Sequence[Any]) -> None:
        self._schedule, self._stages = Schedule(), list[tuple[int, list[float]]]()
        for at, weights in stages:
            self._check(weights)
            self._add(at, weights)
        self._length = self._find_end()

    def _add(self, at: int, weights: Sequence[float]) -> None:
        self._schedule.add(at, self._shares(weights, -1))
        self._stages = [*(stage for stage in self._stages if stage[0] < at), (at, [*map(float, weights)])]

    def _shares(self, weights: Sequence[float], power: int) -> list[float]:
        """Return weights times a power of what samples cost."""
        return [own * cost**power for own, cost in zip(weights, self._costs or [1] * len(weights), strict=True)]

    def _check(self, weights: Sequence[float]) -> None:
        check_weights(weights, len(self.lengths))
        if any(0 < weight < _LEAST_SHARE * sum(weights) for weight in weights):
            raise ConfigurationError(f"a weight should be 0 or at least {_LEAST_SHARE} of all, but got {weights}")
        if any(weight and not length for weight, length in zip(weights, self.lengths, strict=True)):
            raise ConfigurationError(
                f"a source without samples has a weight: lengths {self.lengths}, weights {weights}"
            )

    def _find_end(self) -> int | None:
        """Return how many samples an epoch has."""
        if self.stop is None:
            return None
        drawn = [
            source
            for source in range(len(self.lengths))
            if any(stage.weights[source] for stage in self._schedule.stages)
        ]
        if self.stop == "first":
            ends = [self._schedule.find(source, self.lengths[source]) for source in drawn]
            return min(end for end in ends if end is not None)  # a source that is still drawn comes to its end
        lasts = [self._schedule.find(source, self.lengths[source] - 1) for source in drawn]
        if None in lasts:
            source = drawn[lasts.index(None)]
            raise ConfigurationError(
                f'with stop="all" the epoch never ends: source {source} is not drawn any more before its end '
                f"({self.lengths[source]} samples)"
            )
        return max(cast("list[int]", lasts)) + 1

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "lengths": self.lengths, "by": self._costs}

    def _whole_state(self, bare: dict[str, Any]) -> dict[str, Any]:
        return {**bare, "weights": [list(stage) for stage in self.weights]}


def has_more_sources(saved: Mapping[str, Any], lengths: Sequence[int]) -> bool:
    """Whether sources were added at the end of those that a state, or an identity, is of."""
    known = saved.get("lengths")
    return isinstance(known, list) and len(known) < len(lengths) and known == lengths[: len(known)]


def _check_order(weights: Any) -> None:
    """Raise a ConfigurationError if weights are not in the order of the sources."""
    if isinstance(weights, Mapping):
        raise ConfigurationError(
            "weights should be a list with a number for each source, in the order of the sources: "
            f"weights={[*weights.values()]}, but got {weights!r}"
        )


def check_weights(weights: Any, count: int) -> None:
    """Raise a ConfigurationError if these are no weights of so many sources."""
    _check_order(weights)
    if len(weights) != count:
        raise ConfigurationError(f"there are {count} sources, but {len(weights)} weights: {weights}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights):
        raise ConfigurationError(f"weights should be 0 or more, and not all 0, but got {weights}")


def stages_of(weights: Any) -> list[tuple[int, Sequence[float]]]:
    """Return what stages weights consist of."""
    _check_order(weights)
    weights = weights.tolist() if hasattr(weights, "tolist") else weights
    if not weights or not isinstance(weights[0], (tuple, list)):
        return [(0, weights)]
    stages = dict(sorted((count_of(_AT, at, least=0), own) for at, own in weights))
    if len(stages) < len(weights):
        raise ConfigurationError(f"the same sample has several weights: {[at for at, _ in weights]}")
    if 0 not in stages:
        raise ConfigurationError(f"the first weights should hold from sample 0 on, but hold from {min(stages)}")
    return [*stages.items()]
