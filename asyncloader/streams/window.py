"""What packs samples, or puts those of like lengths together: out of a window of those that come next.

    stream within ──> window: the first `window` samples that were not given ──> some of them, together

What is chosen depends on the window alone, in its order. So a state needs no more than what was given: the window of a
run that goes on is the same one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, TypeVar

from asyncloader.samplers.ordered import count_of
from asyncloader.streams.stream import Mark, Reading, Stream

T_co = TypeVar("T_co", covariant=True)


class Waiting(NamedTuple):
    """A sample in the window; what is asked of it; and how much of it was given."""

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
        """Return what is asked of a sample.

        Raises:
            Exception: if it cannot be given with any other, or alone.
        """

    def begin(self, reading: Reading, state: Any) -> None:
        """Begin to read."""
        self._window: dict[int, Waiting] = {}
        self._count, self._is_over = 0, False

    def fill(self) -> None:
        """See that the window has as many samples as it may have, or all that are left.

        Raises:
            StopIteration: if it has none.
            Exception: for a sample that is bad. The next call goes on behind it.
        """
        while not self._is_over and len(self._window) < self.window:
            try:
                sample, mark = self.streams[0].take()
            except StopIteration:
                self._is_over = True
                break
            try:
                cost = self.cost_of(sample)
            except Exception as error:
                self.refuse(error, mark)
            else:
                self.add(Waiting(sample, mark, cost))
        if not self._window:
            raise StopIteration

    def refuse(self, error: Exception, mark: Mark) -> None:
        """Raise the error of a sample that cannot be in the window, and counts as given."""
        self.streams[0].fail(error, mark)

    def add(self, waiting: Waiting) -> None:
        """Put a sample into the window."""
        self._window[self._count] = waiting
        self._count += 1

    def give(self, mark: Mark) -> None:
        """Note that several samples were given."""
        for each in mark:
            self.streams[0].give(each)
