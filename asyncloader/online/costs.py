"""The costs of units, in bounded memory: they show whether long units are lost more often than short ones."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any, NamedTuple

_BINS_PER_DOUBLING = 8
_NOTHING = -10_000  # the bin of what costs nothing; the least float above that is in bin -8592


class CostStats(NamedTuple):
    """The costs of units, tokens for example. Quantiles are right to 5 %, the mean and the most are exact.

    Attributes:
        units: How many these are.
        mean: On average.
        p10: A tenth of the units costs less.
        p50: Half of them.
        p90: Nine tenths.
        most: The most that one has cost.
    """

    units: int
    mean: float
    p10: float
    p50: float
    p90: float
    most: float


class Costs:
    """A histogram with eight bins for each doubling, and the sum."""

    def __init__(self) -> None:
        self._total = self._most = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, cost: float) -> None:
        """Count a unit. Its cost is finite, and not below zero."""
        self._total += cost
        self._most = max(self._most, cost)
        self._bins[round(_BINS_PER_DOUBLING * math.log2(cost)) if cost else _NOTHING] += 1

    def __bool__(self) -> bool:
        """Whether there are any units."""
        return bool(self._bins)

    def summary(self) -> CostStats:
        """Return mean and quantiles, if there are any units."""
        units = self._bins.total()
        p10, p50, p90 = (self._quantile(tenths) for tenths in (1, 5, 9))
        return CostStats(units, self._total / units, p10, p50, p90, self._most)

    def _quantile(self, tenths: int) -> float:
        numbers = sorted(self._bins)
        below = itertools.accumulate(self._bins[number] for number in numbers)
        units = self._bins.total()
        found = next(number for number, count in zip(numbers, below, strict=True) if 10 * count >= tenths * units)
        return 0.0 if found == _NOTHING else min(self._most, 2.0 ** (found / _BINS_PER_DOUBLING))

    def state(self) -> Any:
        """Return what `of` makes the same of."""
        return self._total, self._most, dict(self._bins)

    @classmethod
    def of(cls, state: Any) -> Costs:
        """Return those of a state."""
        made = cls()
        made._total, made._most, made._bins = state[0], state[1], Counter(state[2])
        return made
