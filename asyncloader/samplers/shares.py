"""How a mixture is divided among its sources: which source each slot of a cycle has, and which of its draws that is.

A cycle has 1,000 slots. Weights, put end to end, divide the interval from 0 to 1,000; each slot has a point in it, and
belongs to the source that its point falls on:

    cycle m     |.   .   .   .   .   .   .   .   .   .|     points 1 apart, all moved by the same u(m) < 1
    sources      |----- a -----|-- b --|------ c ------|

So each source has its share of every cycle, rounded up or down ("systematic sampling"). u(m) is the van der Corput
sequence, m with its bits in reverse order behind the point: over cycles what was rounded evens out, and how many
draws of a source are before any cycle can be counted without looking at those cycles. Slot s has the point
619 s mod 1,000, which spreads each source over the cycle.

All of it is in integers, units of 2**-32 of a slot.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CYCLE = 1000
_STEP = 619  # has no factor in common with 1,000, and is near its golden section
_BITS = 32
_UNIT = 1 << _BITS
_DRIFT = 2 * _BITS + 2
"""By more than this what was drawn of a source is never off its share: less than 1 for each bit of two bounds."""
_POINTS = (np.arange(CYCLE) * _STEP % CYCLE) * _UNIT

Array = NDArray[np.int64]


class Stage:
    """Weights that hold from a position on, until those of the next stage. Its cycles are counted from there.

    Args:
        start: The first position.
        weights: The weight of each source; at least one is above 0.
        base: How many draws of each source come before this stage.
    """

    start: int
    weights: tuple[float, ...]
    base: Array

    def __init__(self, start: int, weights: Sequence[float], base: Array) -> None:
        self.start, self.weights, self.base = start, tuple(map(float, weights)), base
        ends = np.cumsum(np.asarray(weights, dtype=np.float64))
        self._bounds = np.zeros(len(weights) + 1, dtype=np.int64)
        self._bounds[1:] = np.rint(ends / ends[-1] * (CYCLE * _UNIT))
        self._intervals = [_intervals(int(bound) % _UNIT) for bound in self._bounds]

    def sources(self, cycles: Array) -> Array:
        """Return the source of each slot: a row of 1,000 for each of these cycles."""
        points = _POINTS + _van_der_corput(cycles)[:, None]
        return np.searchsorted(self._bounds[1:], points, side="right")

    def before(self, cycles: Array) -> Array:
        """Return how many draws of each source come before each of these cycles, one row for each."""
        below = np.empty((len(cycles), len(self._bounds)), dtype=np.int64)
        for column, (bound, (bits, residues)) in enumerate(zip(self._bounds, self._intervals, strict=True)):
            hits = (cycles[:, None] - residues + (1 << bits) - 1) >> bits
            below[:, column] = cycles * (bound // _UNIT) + hits.sum(axis=1)
        return self.base + np.diff(below, axis=1)

    def draws(self, positions: Array) -> tuple[Array, Array]:
        """Return of each of these positions, which are not before the stage, its source, and which draw of it."""
        cycles, slots = np.divmod(positions - self.start, CYCLE)
        cycles, row = np.unique(cycles, return_inverse=True)
        sources = self.sources(cycles)
        return sources[row, slots], _rank_within_rows(sources, self.before(cycles))[row, slots]

    def before_position(self, position: int) -> Array:
        """Return how many draws of each source come before a position."""
        cycle, slot = divmod(position - self.start, CYCLE)
        cycles = np.array([cycle])
        begun = np.bincount(self.sources(cycles)[0, :slot], minlength=len(self.weights))
        before: Array = self.before(cycles)[0] + begun
        return before


class Schedule:
    """The stages of a mixture, in their order; the first one begins at position 0.

    Attributes:
        stages: The stages.
    """

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def add(self, start: int, weights: Sequence[float]) -> None:
        """Let other weights hold from a position on, not before the last stage; there, they replace its own."""
        base = np.zeros(len(weights), dtype=np.int64)
        if self.stages:
            last = self.stages[-1]
            base = last.before_position(start)
            if last.start == start:
                del self.stages[-1]
        self.stages.append(Stage(start, weights, base))

    def draws(self, positions: Array) -> tuple[Array, Array]:
        """Return of each position its source, and which draw of it."""
        sources, draws = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted([stage.start for stage in self.stages], positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            own = numbers == number
            sources[own], draws[own] = self.stages[number].draws(positions[own])
        return sources, draws

    def find(self, source: int, draw: int) -> int | None:
        """Return the position of a draw of a source; None if it does not come."""
        # the last stage that begins before the draw
        stage = self.stages[sum(int(stage.base[source]) <= draw for stage in self.stages) - 1]
        if not stage.weights[source]:
            return None
        left = draw - int(stage.base[source])
        each = CYCLE * stage.weights[source] / sum(stage.weights)
        cycles = range(int((left + _DRIFT) / each) + 2)  # it is in one of these
        number = bisect.bisect_right(cycles, draw, key=lambda cycle: stage.before(np.array([cycle]))[0, source])
        begin = stage.start + (number - 1) * CYCLE
        sources, draws = stage.draws(np.arange(begin, begin + CYCLE))
        return begin + int(np.flatnonzero((sources == source) & (draws == draw))[0])


def _rank_within_rows(sources: Array, before: Array) -> Array:
    """Return for each slot how many of the same source are before it in its row, plus those before the row."""
    rows, slots = sources.shape
    kind = np.uint16 if before.shape[1] <= 1 << 16 else np.int64  # sorted by their digits, which is faster
    by_source = np.argsort(sources.astype(kind), axis=1, kind="stable")
    ordered = np.take_along_axis(sources, by_source, axis=1)
    begins = np.ones((rows, slots), dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(begins, np.arange(slots), 0), axis=1)
    ranks = np.arange(slots) - first + np.take_along_axis(before, ordered, axis=1)
    draws = np.empty_like(ranks)
    np.put_along_axis(draws, by_source, ranks, axis=1)
    return draws


def _van_der_corput(numbers: Array) -> Array:
    """Return the last 32 bits of numbers in reverse order."""
    bits = numbers & (_UNIT - 1)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        bits = ((bits >> shift) & mask) | ((bits & mask) << shift)
    return bits


def _intervals(bound: int) -> tuple[Array, Array]:
    """Divide [0, bound) into intervals of van der Corput's numbers, one for each bit that is set in the bound.

    Returns:
        For each interval of length 2**(32 - bits) the bits, and the remainder modulo 2**bits of the numbers in it.
    """
    levels = np.array([level for level in range(_BITS) if bound >> (_BITS - 1 - level) & 1], dtype=np.int64)
    starts = (bound >> (_BITS - levels)) << (_BITS - levels)
    return levels + 1, _van_der_corput(starts)
