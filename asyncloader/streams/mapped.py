"""Map and Filter: what a function makes of each sample, and which samples it lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asyncloader.errors import ConfigurationError
from asyncloader.streams.stream import Mark, Stream

T_co = TypeVar("T_co", covariant=True)


class _Applied(Stream[T_co]):
    """A function of each sample. A sample for which it raises counts as given, and the stream goes on behind it."""

    def __init__(self, stream: Stream[Any], fn: Callable[[Any], Any]) -> None:
        super().__init__(stream)
        if not callable(fn):
            raise ConfigurationError(f"fn should be a function of a sample, but is {fn!r}")
        self.fn = fn

    def _apply(self) -> tuple[Any, Any, Mark]:
        """Take a sample, and return it, what the function makes of it, and its mark."""
        sample, mark = self.streams[0].take()
        try:
            return sample, self.fn(sample), mark
        except Exception as error:
            self.fail(error, mark)


class Map(_Applied[T_co]):
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

    def take(self) -> tuple[T_co, Mark]:
        """Return the next sample."""
        _, made, mark = self._apply()
        return made, mark


class Filter(_Applied[T_co]):
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

    def take(self) -> tuple[T_co, Mark]:
        """Return the next sample that is wanted."""
        while True:
            sample, is_wanted, mark = self._apply()
            if is_wanted:
                return sample, mark
            self.give(mark)
