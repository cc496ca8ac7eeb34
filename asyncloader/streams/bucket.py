"""Bucket: batches of samples of like lengths, out of a window."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import index
from typing import TypeVar

from asyncloader.errors import ConfigurationError
from asyncloader.samplers.ordered import count_of
from asyncloader.streams.stream import Mark, Stream
from asyncloader.streams.window import Windowed

T = TypeVar("T")


class Bucket(Windowed[list[T]]):
    """Stream batches of samples of like lengths, each a list, for a loader with ``batch_size=None``.

    A batch has the sample that has waited longest, and of the window those whose lengths are nearest to its own: as
    many as fit, each laid out as long as the longest one of them, padding included.

    Args:
        stream: Gives the samples.
        length: The length of a sample.
        max_tokens: How many tokens a batch has at most, padding included.
        max_samples: How many samples it has at most.
        bounds: Lengths that batches are padded to, in ascending order, for programs that are compiled for few shapes. A
            sample counts as one of the next bound, and a batch has samples of one bound.
        window: Of how many samples at once a batch is chosen.

    Raises:
        ConfigurationError: for what cannot work.
        ValueError: while iterating, for a sample that is longer than `max_tokens` or the last bound.

    Example:
        >>> from asyncloader.streams import ShardedStream
        >>> words = ["a", "bbbb", "c", "dddd", "eee"]
        >>> stream = ShardedStream([words], lambda shard, start: shard[start:])
        >>> [*Bucket(stream, len, max_tokens=8)]
        [['a', 'c'], ['bbbb', 'dddd'], ['eee']]
    """

    def __init__(
        self,
        stream: Stream[T],
        length: Callable[[T], int],
        *,
        max_tokens: int,
        max_samples: int | None = None,
        bounds: Sequence[int] = (),
        window: int = 1000,
    ) -> None:
        super().__init__(stream, window)
        if not callable(length):
            raise ConfigurationError(f"length should be a function of a sample, but is {length!r}")
        self.length = length
        self.max_tokens: int = count_of("max_tokens", max_tokens)
        self.max_samples: int | None = None if max_samples is None else count_of("max_samples", max_samples)
        self.bounds: list[int] = [count_of("a bound", bound) for bound in bounds]
        if self.bounds != sorted(set(self.bounds)) or max(self.bounds, default=0) > self.max_tokens:
            raise ConfigurationError(f"bounds should be ascending, up to max_tokens={max_tokens}, but are {bounds}")

    def cost_of(self, sample: T) -> int:
        """Return the length that a sample is laid out with."""
        length = index(self.length(sample))
        longest = self.bounds[-1] if self.bounds else self.max_tokens
        if not 0 <= length <= longest:
            raise ValueError(
                f"a sample has length {length}, and a batch {longest} at most: give larger max_tokens or bounds, or "
                "leave such samples out with Filter"
            )
        return self.bounds[bisect_left(self.bounds, length)] if self.bounds else length

    def take(self) -> tuple[list[T], Mark]:
        """Return the sample that has waited longest, and those of the nearest lengths, with their marks."""
        self.fill()
        window = self._window
        first = longest = window[next(iter(window))].cost
        chosen: list[int] = []
        for number in sorted(window, key=lambda number: abs(window[number].cost - first))[: self.max_samples]:
            longest = max(longest, window[number].cost)
            if longest * (len(chosen) + 1) > self.max_tokens or (self.bounds and window[number].cost != first):
                break
            chosen.append(number)
        batch = [window.pop(number) for number in sorted(chosen)]
        return [each.sample for each in batch], [each.mark for each in batch]
