"""Decide into how many slices a batch is divided, from what its samples are known to cost. Arithmetic on running sums.

    made, joined, refused ──> Slicer ──> cut: where the slices of a batch begin; one slice: it stays whole

A slice costs what a ticket costs: some 0.4 ms of the loop thread, and of a worker that waits for the next one. So a
slice takes a worker a while at least, and a batch of cheap samples stays whole. Otherwise slices become smaller towards
the end of a batch, as far as that allows: where samples take unlike times, or workers start at different ones, that
keeps all workers busy until the batch is done. While nobody knows what a sample costs, a slice may be one sample.
"""

from __future__ import annotations

import math

from asyncloader.transport.join import Columns

_LEAST_SLICE_S = 0.02
"""A slice that takes a worker less is not worth its ticket: 2 % of it."""
_SHARE = 2
"""A slice has what is left of the batch, divided by the workers and by this: guided self-scheduling (Polychronopoulos
and Kuck, 1987). The first ones are large, the last ones as small as they may be, and all workers are done at once."""
_FADE = 0.97
"""What a ticket tells counts so much less with each later one."""
_MOST_REFUSED = 8
"""Batches stay whole where more than one in so many that were divided had to be made again."""


class Slicer:
    """Knows what the samples of a loader cost, from run to run. Called from the loop thread only.

    Attributes:
        is_whole: Batches stay whole, whatever their samples cost.
        columns: The large tensors of the last batch that was joined.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.columns: Columns = ()
        self._seconds = 0.0
        self._samples = 0.0
        self._num_joined = 0
        self._num_refused = 0

    def __repr__(self) -> str:
        return f"<Slicer {self._seconds:.3g} s for {self._samples:.3g} samples, whole={self.is_whole}>"

    @property
    def is_guessing(self) -> bool:
        """Whether nobody knows what a sample costs."""
        return not (self._samples or self.is_whole)

    def made(self, count: int, seconds: float) -> None:
        """A worker has made so many samples in this time."""
        self._seconds = _FADE * self._seconds + seconds
        self._samples = _FADE * self._samples + count

    def joined(self, columns: Columns) -> None:
        """The slices of a batch were joined, which has these large tensors."""
        self._num_joined += 1
        self.columns = columns

    def refused(self) -> None:
        """The slices of a batch could not be joined."""
        self._num_refused += 1
        self.is_whole |= _MOST_REFUSED * self._num_refused > self._num_joined + _MOST_REFUSED

    def cut(self, count: int, num_workers: int) -> list[int]:
        """Return where the slices of a batch of so many samples begin, and where the last one ends."""
        least = self._least(count, num_workers)
        bounds = [0]
        while (left := count - bounds[-1]) >= 2 * least:
            bounds.append(bounds[-1] + max(least, left // (_SHARE * num_workers)))
        return [*bounds, count]

    def _least(self, count: int, num_workers: int) -> int:
        """Return how many samples a slice has at the least; all of them if the batch stays whole."""
        whole = max(1, count)
        if self.is_whole or num_workers < 2:
            return whole
        if self.is_guessing:
            return 1
        each_s = self._seconds / self._samples
        return whole if each_s * count < 2 * _LEAST_SLICE_S else math.ceil(_LEAST_SLICE_S / each_s)
