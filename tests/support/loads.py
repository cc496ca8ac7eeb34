"""Loads that are built to be limited in one known way, with the time that each part takes as a parameter.

Everything sleeps where nothing is said about CPU time: several workers then mean several at once on any machine.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import Dataset


class Load(Dataset[Any]):
    """Samples that take `fetch_s` each, and every so many-th `slow_s` more.

    Args:
        length: Samples.
        fetch_s: Seconds a sample.
        slow_every: Every so many-th sample takes `slow_s` longer; 0 for none.
        slow_s: Seconds.
        sample: What each of them is.
    """

    def __init__(
        self, length: int, fetch_s: float = 0.0, *, slow_every: int = 0, slow_s: float = 0.0, sample: Any = None
    ) -> None:
        self.length = length
        self.fetch_s = fetch_s
        self.slow_every = slow_every
        self.slow_s = slow_s
        self.sample = torch.zeros(8) if sample is None else sample

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        is_slow = self.slow_every and index % self.slow_every == self.slow_every // 2
        if duration_s := self.fetch_s + self.slow_s * bool(is_slow):
            time.sleep(duration_s)
        return self.sample


class SlowCollate:
    """Default collation that takes longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, samples: list[Any]) -> Any:
        time.sleep(self.seconds)
        return torch.utils.data.default_collate(samples)


def as_they_are(samples: list[Any]) -> list[Any]:
    """Collate nothing: the batch is a list of Python objects, and is pickled."""
    return samples
