"""Shuffle: samples in random order, each near its place, by a buffer that no state contains.

A sample at the position p of the stream within has the key p + size * u(p), where u(p) is a random number from 0 to 1
that seed, epoch and p alone decide; samples are given in the order of their keys. A sample can be given as soon as its
key is below a position that was read: all later keys are above. So at most `size` samples wait, half of that as a rule.

That is one order of all samples, whatever was given of it. Without those that were given, the rest is in the same
order: that is why a run that goes on needs nothing but their positions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from asyncloader.samplers.ordered import count_of
from asyncloader.streams.stream import Mark, Reading, Stream

T_co = TypeVar("T_co", covariant=True)

_BLOCK = 4096
"""So many random numbers are drawn at once."""


class Shuffle(Stream[T_co]):
    """Stream samples in random order, each up to `size` places from its own.

    What waits to be given is in no state: it is read again. Put it around what reads and mixes samples, and within what
    packs them or puts them into batches.

    Args:
        stream: Gives the samples.
        size: How many samples wait at most.
        seed: Of the order.

    Raises:
        ConfigurationError: around `Pack` or `Bucket`, whose blocks are given in their order.

    Example:
        >>> from asyncloader.streams import ShardedStream
        >>> stream = ShardedStream([range(8)], lambda shard, start: shard[start:])
        >>> sorted(Shuffle(stream, size=4))
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(self, stream: Stream[T_co], size: int, seed: int = 0) -> None:
        super().__init__(stream)
        self.must_keep_order()
        self.size: int = count_of("size", size)
        self.seed: int = count_of("seed", seed, least=0)

    def begin(self, reading: Reading, states: Sequence[Any]) -> None:
        """Begin to read."""
        self._key = [self.seed, reading.epoch, reading.worker, *map(int, self.path.split("."))]
        self._block, self._drawn = -1, [0.0]
        self._waiting: list[tuple[float, int, T_co, Mark]] = []  # a heap; of equal keys, the one that came first
        self._taken = 0
        self._reached = -1.0  # the last position that was read

    def take(self) -> tuple[T_co, float, Mark]:
        """Return the sample with the least key."""
        waiting = self._waiting
        while not (waiting and waiting[0][0] < self._reached):
            try:
                sample, position, mark = self.streams[0].take()
            except StopIteration:
                if not waiting:
                    raise
                self._reached = np.inf
                break
            heapq.heappush(waiting, (position + self.size * self._random(position), self._taken, sample, mark))
            self._taken += 1
            self._reached = position
        key, _, sample, mark = heapq.heappop(waiting)
        return sample, key, mark

    def _random(self, position: float) -> float:
        """Return the random number of a position. One generator for each block: any number can be had at any time."""
        block, place = divmod(int(position), _BLOCK)
        if block != self._block:
            self._block, self._drawn = block, np.random.default_rng([*self._key, block]).random(_BLOCK).tolist()
        return self._drawn[place]
