"""Decide into how many slices a batch is divided, from what its samples are known to cost. Arithmetic on running means.

    made, carried ──> Slicer ──> cut: where the slices of a batch begin; one slice: it stays whole
                             └─> window: batches in flight or waiting

A slice costs what a ticket costs, some 0.4 ms of the loop thread and of a worker that waits, and bringing its samples
to those of the others. So a slice takes a worker some while at least, and a batch of cheap samples, or of such that are
dear to carry, stays whole. Otherwise slices become smaller towards the end of a batch, as far as that allows: where
samples take unlike times, or workers start at different ones, that is what keeps all busy until the batch is done.
A loader's first slices have one sample each: what these cost decides about the rest.
"""

from __future__ import annotations

import math
from typing import Any

_LEAST_SLICE_S = 0.02
"""A slice that takes a worker less is not worth its ticket: 2 % of it."""
_SHARE = 2
"""A slice has what is left of the batch, divided by the workers and by this: guided self-scheduling (Polychronopoulos
and Kuck, 1987). The first ones are large, the last ones as small as they may be, and all workers are done at once."""
_MOST_CARRYING = 0.03
"""Of what a sample costs to make. Where it costs more to carry, batches stay whole."""
_FADE = 0.98
_ALIKE_AFTER_MISS = 64
_SPAN = 32
"""A running mean looks back upon so many tickets."""


class _Mean:
    """A running mean a sample: of all tickets at first, then of the last ones."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, seconds: float, count: int) -> None:
        if count:
            if self._count < _SPAN:
                self._count += 1
            each = seconds / count
            self.value = each if self.value is None else self.value + (each - self.value) / self._count


class Slicer:
    """What is known of the samples of a loader, from run to run. Called from the loop thread only.

    Attributes:
        is_whole: Batches stay whole, whatever their samples cost: samples cannot be carried, or there are no single
            ones.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self._making = _Mean()
        self._sending = _Mean()
        self._opening = _Mean()
        self._num_first = 0  # slices yet to come that workers make first
        self._patience = 1.0
        self._layout: Any = None
        self._num_alike = 0  # of the last slices that told what they are like, after the first of them
        self._least_alike = 0

    def __repr__(self) -> str:
        return f"<Slicer making={self._making.value} carrying={self._carrying_s} whole={self.is_whole}>"

    @property
    def _carrying_s(self) -> float:
        return (self._sending.value or 0.0) + (self._opening.value or 0.0)

    def made(self, count: int, seconds: float) -> None:
        """A worker has made so many samples in this time."""
        self._making.add(seconds, count)

    def sent(self, count: int, seconds: float) -> None:
        """So many samples were made ready for another worker in this time."""
        if self._num_first:  # a single sample, and its worker had no slabs yet
            self._num_first -= 1
        else:
            self._sending.add(seconds, count)
            self._patience = 1.0

    def opened(self, count: int, seconds: float) -> None:
        """So many samples were opened by another worker in this time."""
        self._opening.add(seconds, count)

    def told(self, layout: Any, *, missed: bool) -> None:
        """The samples of a slice were carried, which are like this; None if they cannot be rows of a batch.

        Args:
            layout: What they are like.
            missed: They were to be written, and are unlike what was thought.
        """
        if missed:
            self._least_alike = _ALIKE_AFTER_MISS
        self._num_alike = self._num_alike + 1 if layout == self._layout and not missed else 0
        self._layout = layout

    @property
    def layout(self) -> Any:
        """What samples are thought to be like, so that they are written straight into batches; None if nobody knows.

        The first slice decides. Once samples were unlike that, many have to be alike.
        """
        return self._layout if self._num_alike >= self._least_alike else None

    @property
    def is_guessing(self) -> bool:
        """Whether nobody knows yet what samples cost."""
        return self._making.value is None and not self.is_whole

    def cut(self, count: int, num_workers: int) -> list[int]:
        """Return where the slices of a batch of so many samples begin, and where the last one ends.

        While nothing is known each worker gets one sample at first, to find out.
        """
        least = self._least(count, num_workers)
        bounds = [0]
        if self.is_guessing and least < count:
            self._num_first = num_workers
            bounds = [*range(min(num_workers + 1, count))]
        while (left := count - bounds[-1]) >= 2 * least:
            bounds.append(bounds[-1] + max(least, left // (_SHARE * num_workers)))
        return [*bounds, count]

    def _least(self, count: int, num_workers: int) -> int:
        """Return how many samples a slice has at the least; all of them if the batch stays whole."""
        if self.is_whole or num_workers < 2 or count < 2:
            return max(1, count)
        making = self._making.value
        if making is None:
            return 1
        if making * count < 2 * _LEAST_SLICE_S:
            return count
        least = math.ceil(_LEAST_SLICE_S / making)
        if 2 * least > count:
            return count
        if self.layout is None and self._carrying_s * self._patience > _MOST_CARRYING * making:
            self._patience *= _FADE  # to be tried again some time: the first ones cost most
            return count
        return least

    @staticmethod
    def window(slices: int, tickets: int, prefetch_factor: int) -> int:
        """Return how many batches of so many slices may be in flight or waiting.

        ``prefetch_factor`` in all, where that many have work for everybody; of whole ones as many as ``tickets``.
        """
        return max(prefetch_factor, math.ceil(tickets / slices))
