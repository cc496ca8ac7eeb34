"""Map and Filter: what a function makes of each sample, and which samples it lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asyncloader.streams.stream import Mark, Stream, asked, function_of, give

T_co = TypeVar("T_co", covariant=True)


class Map(Stream[T_co]):
    """Stream what a function makes of each sample, in the worker that reads it.

    Args:
        stream: Gives the samples.
        fn: Makes another sample of one. What it raises is the error of that sample.

    Example:
        >>> from asyncloader.streams import ShardedStream
        >>> stream = ShardedStream([range(3)], lambda shard, start: shard[start:])
        >>> [*Map(stream, str)]
        ['0', '1', '2']
    """

    def __init__(self, stream: Stream[Any], fn: Callable[[Any], Any]) -> None:
        super().__init__(stream)
        self._fn = function_of("fn", fn)

    def take(self) -> tuple[T_co, float, Mark]:
        """Return the next sample."""
        sample, position, mark = self.streams[0].take()
        return asked(self._fn, sample, mark), position, mark


class Filter(Map[T_co]):
    """Stream the samples that a function lets through. The others count as given.

    Args:
        stream: Gives the samples.
        fn: Says whether a sample is wanted. What it raises is the error of that sample.

    Example:
        >>> from asyncloader.streams import ShardedStream
        >>> stream = ShardedStream([range(6)], lambda shard, start: shard[start:])
        >>> [*Filter(stream, lambda sample: sample % 2)]
        [1, 3, 5]
    """

    def take(self) -> tuple[T_co, float, Mark]:
        """Return the next sample that is wanted."""
        while True:
            sample, position, mark = self.streams[0].take()
            if asked(self._fn, sample, mark):
                return sample, position, mark
            give(mark)
