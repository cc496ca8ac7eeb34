"""Bucket: batches of samples of like lengths, out of a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from operator import index
from typing import TypeVar

from asyncloader.samplers.ordered import count_of
from asyncloader.streams.stream import Mark, Stream, function_of
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
        bounds: Lengths that batches are padded to, for programs that are compiled for few shapes. A sample counts as
            one of the next bound, and a batch has samples of one bound.
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
        bounds: Iterable[int] = (),
        window: int = 1000,
    ) -> None:
        super().__init__(stream, window)
        self._length = function_of("length", length)
        self.max_tokens: int = count_of("max_tokens", max_tokens)
        self.bounds: list[int] = sorted(count_of("a bound", bound) for bound in bounds)

    def cost_of(self, sample: T) -> float:
        """Return the length that a sample is laid out with."""
        length = index(self._length(sample))
        bound = next((bound for bound in self.bounds if bound >= length), inf) if self.bounds else length
        if length < 0 or bound > self.max_tokens:
            raise ValueError(
                f"a sample has length {length}, and is laid out as {bound} tokens of at most {self.max_tokens}: give "
                "larger max_tokens or bounds, or leave such samples out with Filter"
            )
        return bound

    def take(self) -> tuple[list[T], float, Mark]:
        """Return the sample that has waited longest, and those of the nearest lengths."""
        self.fill()
        window = self._window
        first = longest = window[next(iter(window))].cost
        chosen: list[int] = []
        for number in sorted(window, key=lambda number: abs(window[number].cost - first)):
            longest = max(longest, window[number].cost)
            if longest * (len(chosen) + 1) > self.max_tokens or (self.bounds and window[number].cost != first):
                break
            chosen.append(number)
        batch = [window.pop(number) for number in sorted(chosen)]
        return [each.sample for each in batch], 0, tuple(note for each in batch for note in each.mark)
