"""What packs samples, or puts those of like lengths together: out of a window of those that come next.

    stream within ──> window: the first `window` samples that were not given ──> some of them, together

What is chosen depends on the window alone, in its order. So a state needs no more than what was given: the window of a
run that goes on is the same one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from asyncloader.samplers.ordered import count_of
from asyncloader.streams.stream import Mark, Reading, Stream, asked, give

T_co = TypeVar("T_co", covariant=True)


class Waiting(NamedTuple):
    """A sample in the window; what it costs; and where what is left of it begins, if a part was given."""

    sample: Any
    mark: Mark
    cost: Any
    start: int = 0


class Windowed(Stream[T_co]):
    """A part that gives several samples together, out of a window: by number, in the order in which they came.

    Args:
        stream: Gives the samples.
        window: Of how many samples at once those are chosen that are given together.
    """

    def __init__(self, stream: Stream[Any], window: int) -> None:
        super().__init__(stream)
        self.must_keep_order()
        self.keeps_order = False  # what is chosen depends on what was given before
        self.window: int = count_of("window", window)

    @abstractmethod
    def cost_of(self, sample: Any) -> Any:
        """Return what is asked of a sample; None for one that is to be left out.

        Raises:
            Exception: if it cannot be given with any other, or alone.
        """

    def begin(self, reading: Reading, states: Sequence[Any]) -> None:
        """Begin to read."""
        self._window: dict[int, Waiting] = {}
        self._count = 0

    def fill(self) -> None:
        """See that the window has as many samples as it may have, or all that are left.

        Raises:
            StopIteration: if it has none.
            Exception: for a sample that is bad. The next call goes on behind it.
        """
        while len(self._window) < self.window:
            try:
                sample, _, mark = self.streams[0].take()
            except StopIteration:
                if self._window:
                    break
                raise
            cost = asked(self.cost_of, sample, mark)
            if cost is None:
                give(mark)
            else:
                self.put(self._count, Waiting(sample, mark, cost))
                self._count += 1

    def put(self, number: int, waiting: Waiting) -> None:
        """Put a sample into the window."""
        self._window[number] = waiting
