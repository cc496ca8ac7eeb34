"""Shuffle: samples in random order, each near its place, by a buffer that no state contains.

Sample n of the stream within has the key n + size * u(n), where u(n) is a random number from 0 to 1 that seed, epoch
and n alone decide; samples are given in the order of their keys. A sample can be given as soon as its key is below the
number of the next one: all later keys are above. So at most `size` samples wait, half of that as a rule.

That is one order of all samples, whatever was given of it. Without those that were given, the rest is in the same
order: that is why a run that goes on needs nothing but their numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from asyncloader.samplers.ordered import count_of
from asyncloader.streams.given import Given
from asyncloader.streams.stream import Mark, Reading, State, Stream

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

    size: int
    seed: int

    def __init__(self, stream: Stream[T_co], size: int, seed: int = 0) -> None:
        super().__init__(stream)
        self.must_keep_order()
        self.size, self.seed = count_of("size", size), count_of("seed", seed, least=0)

    def begin(self, reading: Reading, state: State | None) -> None:
        """Begin to read."""
        state = state or {"given": [0], "round": 0}
        self._given, self._round = Given(*state["given"]), state["round"]
        self._next = self._given.first_left(0)
        self._key = [self.seed, reading.epoch, reading.worker, self._round]
        self._block, self._drawn = -1, [0.0]
        self._waiting: list[tuple[float, int, T_co, Mark]] = []  # a heap
        self._is_over = False

    def take(self) -> tuple[T_co, Mark]:
        """Return the sample with the least key."""
        waiting = self._waiting
        while not self._is_over and not (waiting and waiting[0][0] < self._next):
            try:
                sample, mark = self.streams[0].take()
            except StopIteration:
                self._is_over = True
                break
            number = self._next
            heapq.heappush(waiting, (number + self.size * self._random(number), number, sample, mark))
            self._next = self._given.first_left(number + 1)
        if not waiting:
            raise StopIteration
        _, number, sample, mark = heapq.heappop(waiting)
        return sample, (number, mark)

    def _random(self, number: int) -> float:
        """Return the random number of a sample. One generator of Philox for each block: any can be had at any time."""
        block, place = divmod(number, _BLOCK)
        if block != self._block:
            self._block, self._drawn = block, np.random.default_rng([*self._key, block]).random(_BLOCK).tolist()
        return self._drawn[place]

    def give(self, mark: Mark) -> None:
        """Note that a sample was given."""
        number, within = mark
        self._given.add(number)
        self.streams[0].give(within)

    def state(self) -> State:
        """Return which numbers were given."""
        return {"given": self._given.state(), "round": self._round}

    def merged(self, states: Sequence[State]) -> State:
        """Return a state for another order of what is left."""
        return {"given": [0], "round": 1 + max(state["round"] for state in states)}
