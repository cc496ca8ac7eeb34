"""Keep durations by the million in little room, and so cheaply that it need not be turned off.

    add(row) ──> rows in hand ── every 256, at once ──> Folded: sums, longest, log-spaced buckets of each column
                      └── take() ── a snapshot, folded when somebody looks ──> Timing

A row is a list of numbers: durations in seconds, or times and counts that durations are worked out of when rows are
folded. A row is kept as it is and folded together with others by numpy: 0.5 us a row, where counting eight columns one
by one in Python took 4 us. Buckets are an eighth of an octave wide, so a quantile is right to within 5 %. Rows in hand
lie in an array: as tuples they took six times the memory, and pushed from the processor's cache what the next batch
needed.

A single thread, or several that take turns under a lock, may add; any thread may take a snapshot, without a lock: the
folded rows and the rows in hand change together, in one assignment.
"""

from __future__ import annotations

import copy
import functools
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Columns: TypeAlias = Callable[[npt.NDArray[np.float64]], list[npt.NDArray[np.float64]]]
"""Makes the columns of a tally of those of its rows."""

_FOLD_AT = 256
_PER_OCTAVE: Final = 8
_BUCKETS: Final = 32 * _PER_OCTAVE  # from 1 us to more than an hour; the first is for what is shorter


class Folded(NamedTuple):
    """Rows that were added up; never changed."""

    rows: int
    sums: npt.NDArray[np.float64]
    longest: npt.NDArray[np.float64]
    buckets: npt.NDArray[np.int64]  # (columns, _BUCKETS)

    def with_rows(self, rows: array[float], width: int, columns: Columns, late: int) -> Folded:
        """Return the sum of these and those; the last ``late`` columns of the very first row do not count."""
        if not rows:
            return self
        count = len(self.sums)
        values = np.maximum(columns(np.array(rows).reshape(-1, width).T), 0.0).T
        begins = count if self.rows else count - late
        values[0, begins:] = 0.0
        places = np.log2(np.maximum(values * 1e6, 0.5)) * _PER_OCTAVE + 1
        places = np.clip(places, 0, _BUCKETS - 1).astype(np.int64) + np.arange(count) * _BUCKETS
        counts = np.bincount(places.ravel(), minlength=count * _BUCKETS).reshape(count, _BUCKETS)
        counts[begins:, 0] -= 1
        return Folded(
            self.rows + len(values),
            self.sums + values.sum(0),
            np.maximum(self.longest, values.max(0)),
            self.buckets + counts,
        )


@functools.cache
def _empty(columns: int) -> Folded:
    return Folded(0, np.zeros(columns), np.zeros(columns), np.zeros((columns, _BUCKETS), np.int64))


class Tally:
    """The durations, or other numbers, of some columns, row by row. Numbers below zero count as zero.

    Args:
        names: The names of the columns.
        late: How many of them, the last ones, count from the second row on.
        width: How many numbers a row has; as many as there are columns if 0.
        columns: Makes the columns of the numbers of rows; those themselves by default.
    """

    def __init__(self, *names: str, late: int = 0, width: int = 0, columns: Columns = list) -> None:
        self._names = names
        self._how = width or len(names), columns, late
        self._full = self._how[0] * _FOLD_AT
        self._state: tuple[Folded, array[float]] = (_empty(len(names)), array("d"))
        self._rows = self._state[1]

    def add(self, row: list[float]) -> None:
        """Add a row."""
        rows = self._rows
        rows.fromlist(row)
        if len(rows) >= self._full:
            self._state = (self._state[0].with_rows(rows, *self._how), array("d"))
            self._rows = self._state[1]

    def take(self) -> Tally:
        """Return a tally of what there is so far, to be looked at."""
        folded, rows = self._state
        taken = copy.copy(self)
        taken._state = folded, rows[:]
        return taken

    def timings(self) -> dict[str, Timing]:
        """Return what there is so far, by the names of the columns."""
        taken = self.take()
        return {name: Timing(taken, column) for column, name in enumerate(self._names)}

    @property
    def all(self) -> Folded:
        """Everything, added up. While rows are still added, ask a snapshot for it (`take`)."""
        folded, rows = self._state
        if rows:
            folded = folded.with_rows(rows, *self._how)
            self._state = folded, array("d")
        return folded


class Timing:
    """How long something took, over a number of batches. All in seconds.

    Quantiles are right to within 5 %.
    """

    __slots__ = ("_column", "_snapshot")

    def __init__(self, snapshot: Tally, column: int) -> None:
        self._snapshot = snapshot
        self._column = column

    @property
    def count(self) -> int:
        """How many were measured."""
        return int(self._snapshot.all.buckets[self._column].sum())

    @property
    def total_s(self) -> float:
        """All of them together."""
        return float(self._snapshot.all.sums[self._column])

    @property
    def mean_s(self) -> float:
        """The mean, 0 if there is none."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def longest_s(self) -> float:
        """The longest."""
        return float(self._snapshot.all.longest[self._column])

    @property
    def p50_s(self) -> float:
        """The median."""
        return self.quantile(0.5)

    @property
    def p99_s(self) -> float:
        """The duration that 99 in 100 did not exceed."""
        return self.quantile(0.99)

    def quantile(self, share: float) -> float:
        """Return the duration that this share of all did not exceed."""
        if not self.count:
            return 0.0
        reached = np.cumsum(self._snapshot.all.buckets[self._column])
        place = int(np.searchsorted(reached, max(1.0, share * self.count)))
        if place == 0:
            return 0.0
        return min(2 ** ((place - 0.5) / _PER_OCTAVE) * 1e-6, self.longest_s)

    def as_dict(self) -> dict[str, float]:
        """Return the figures as plain numbers."""
        return {name: getattr(self, name) for name in ("count", "total_s", "mean_s", "p50_s", "p99_s", "longest_s")}

    def __repr__(self) -> str:
        return f"<Timing {self.count} x {show_s(self.mean_s)}, p99 {show_s(self.p99_s)}>"


def show_s(seconds: float) -> str:
    """Write down a duration with two or three digits, in a unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            value = seconds * factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    raise AssertionError("the last unit takes everything")


def show_bytes(count: float) -> str:
    """Write down a number of bytes with two or three digits, in a unit that suits it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            value = count / factor
            return f"{value:.{0 if value >= 100 else 1}f} {unit}"
    return f"{count / 1e3:.0f} kB"
