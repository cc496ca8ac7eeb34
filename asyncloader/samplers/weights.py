"""Weights by which samples are drawn, and their changes while an epoch is read.

    updates   moment: indices, weights         in the order in which they hold; none is ever undone
    find      a position ──> the weights there: those of the beginning, and all updates up to there ──> a sample

What is drawn is a function of positions, so a sampler may have been read beyond a position whose state is asked for:
the state has the weights there, and the updates after it.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import AsyncLoaderError
from asyncloader.samplers.shuffle import by_group
from asyncloader.samplers.sums import SumTree

Moment = tuple[int, int]
"""The number of a reading of the sampler, and a position in it: just before the sample there is drawn."""
_READINGS_KEPT = 8
"""States may be asked of so many earlier readings: of a loop, when others have looked at a batch beside it."""


@dataclass(frozen=True, eq=False)
class Update:
    """Weights of some samples that hold from a moment on."""

    begin: Moment
    indices: NDArray[np.int64]
    weights: NDArray[np.float64]


class ChangingWeights:
    """The weights of samples at any moment from a first one on. Called from the thread that draws; `add` from any.

    Args:
        initial: The weights that the sampler was made with.
        state: Weights that have changed since, as `state` returns them; None for none.
        since: The first moment.
    """

    def __init__(self, initial: NDArray[np.float64], state: dict[str, Any] | None = None, since: Moment = (0, 0)):
        self._initial = self._base = initial
        self._since = since
        self._updates: tuple[Update, ...] = ()  # replaced, and never changed: another thread may be reading it
        self._sums: SumTree | None = None
        self._summed: tuple[Update, ...] = ()  # the updates that are in the sums
        if state is not None:
            indices, weights = state["in_force"]
            self._base = initial.copy()
            self._base[slice(None) if indices is None else _row(indices, np.int64)] = _row(weights, np.float64)
            self._updates = tuple(
                Update((since[0] + later, position), _row(indices, np.int64), _row(weights, np.float64))
                for later, position, indices, weights in state["waiting"]
            )

    def add(self, update: Update) -> None:
        """Let weights change. Of the updates of one moment, the last one counts."""
        oldest = (update.begin[0] - _READINGS_KEPT, 0)
        if old := _count_until(self._updates, oldest):
            self._base, self._since, self._sums = self.at(oldest), oldest, None
        place = _count_until(self._updates, update.begin)
        self._updates = (*self._updates[old:place], update, *self._updates[place:])

    def find(self, reading: int, positions: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the samples at some positions of a reading.

        Args:
            reading: Its number.
            positions: The positions.
            shares: For each a number from 0 to below 1, which is divided among the samples by their weights.

        Raises:
            AsyncLoaderError: if the reading is so long ago that its weights are not known any more.
        """
        self._see_whether_known((reading, int(positions.min())))
        updates = self._updates
        first, last = (_count_until(updates, (reading, int(bound))) for bound in (positions.min(), positions.max()))
        begins = [update.begin[1] for update in updates[first:last]]  # those that begin in between
        counts = first + np.searchsorted(begins, positions, side="right")
        numbers = np.arange(len(positions))
        return by_group(counts, numbers, lambda count, own: self._sums_of(updates[:count]).find(shares[own]))

    def at(self, moment: Moment) -> NDArray[np.float64]:
        """Return the weights at a moment.

        Raises:
            AsyncLoaderError: if it is so long ago that they are not known any more.
        """
        self._see_whether_known(moment)
        weights = self._base.copy()
        for update in self._updates[: _count_until(self._updates, moment)]:
            weights[update.indices] = update.weights
        return weights

    def state(self, moment: Moment) -> dict[str, Any] | None:
        """Return, as plain data, the weights that have changed up to a moment, and later updates; None without any."""
        if self._base is self._initial and not self._updates:
            return None
        weights = self.at(moment)
        changed = np.flatnonzero(weights != self._initial)
        are_many = 2 * len(changed) > len(weights)
        return {
            "in_force": [None, _text(weights)] if are_many else [_text(changed), _text(weights[changed])],
            "waiting": [
                [each.begin[0] - moment[0], each.begin[1], _text(each.indices), _text(each.weights)]
                for each in self._updates[_count_until(self._updates, moment) :]
            ],
        }

    def _see_whether_known(self, moment: Moment) -> None:
        if moment < self._since:
            raise AsyncLoaderError(
                f"the weights of sample {moment[1]} are not known any more: the sampler has begun more than "
                f"{_READINGS_KEPT} epochs since, or has loaded a state"
            )

    def _sums_of(self, updates: tuple[Update, ...]) -> SumTree:
        """Return the sums of the weights after these updates, the first ones of all."""
        sums, summed = self._sums, self._summed
        if sums is None or updates[: len(summed)] != summed:
            sums, summed = SumTree(self._base), ()
        self._sums = None  # a Ctrl-C may leave sums of which some are those of before
        for update in updates[len(summed) :]:
            sums.set(update.indices, update.weights)
        self._sums, self._summed = sums, updates
        return sums


def _count_until(updates: tuple[Update, ...], moment: Moment) -> int:
    """Return how many updates hold at a moment."""
    return bisect_right(updates, moment, key=attrgetter("begin"))


def _text(row: NDArray[Any]) -> str:
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<")).tobytes()).decode()


def _row(text: str, kind: type) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), np.dtype(kind).newbyteorder("<")).astype(kind)
