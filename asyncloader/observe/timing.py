"""How long something took, over many batches; and how durations and sizes are written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RECENT = 1000


@dataclass(frozen=True, slots=True)
class Timing:
    """How long something took, over a number of batches. All in seconds.

    Attributes:
        count: How many were measured.
        total_s: All of them together.
        longest_s: The longest.
        recent: The last thousand of them. Quantiles are theirs.
    """

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    recent: NDArray[np.float64] = field(default_factory=lambda: np.empty(0), repr=False, compare=False)

    def plus(self, seconds: NDArray[np.float64]) -> Timing:
        """Return the timing of these and further ones. What is below zero counts as zero."""
        seconds = np.maximum(seconds, 0.0)
        return Timing(
            self.count + len(seconds),
            self.total_s + float(seconds.sum()),
            max(self.longest_s, float(seconds.max(initial=0.0))),
            np.concatenate([self.recent, seconds])[-_RECENT:],
        )

    @property
    def mean_s(self) -> float:
        """The mean, 0 if there is none."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def p50_s(self) -> float:
        """The median of the recent ones."""
        return self.quantile(0.5)

    @property
    def p99_s(self) -> float:
        """The duration that 99 in 100 of the recent ones did not exceed."""
        return self.quantile(0.99)

    def quantile(self, share: float) -> float:
        """Return the duration that this share of the recent ones did not exceed."""
        return float(np.quantile(self.recent, share)) if self.count else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain numbers."""
        return {name: getattr(self, name) for name in ("count", "total_s", "mean_s", "p50_s", "p99_s", "longest_s")}


def show_s(seconds: float) -> str:
    """Write down a duration with two or three digits, in a unit that suits it."""
    exponent, unit = (0, "s") if seconds >= 1 else (3, "ms") if seconds >= 1e-3 else (6, "us")
    value = seconds * 10**exponent
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def show_bytes(count: float) -> str:
    """Write down a number of bytes with two or three digits, in a unit that suits it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            value = count / factor
            return f"{value:.{0 if value >= 100 else 1}f} {unit}"
    return f"{count / 1e3:.0f} kB"
