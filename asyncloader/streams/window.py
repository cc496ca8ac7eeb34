"""What packs samples, or puts those of like lengths together: out of a window of those that come next.

    stream within ──> window: the first `window` samples that were not given ──> some of them, together

What is chosen depends on the window alone, in its order. So a state needs no more than what was given: the window of a
run that goes on is the same one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeVar

from asyncloader.samplers.ordered import count_of
from asyncloader.streams.shuffle import check_order
from asyncloader.streams.stream import Mark, Reading, State, Stream, Within

T_co = TypeVar("T_co", covariant=True)


class Waiting(NamedTuple):
    """A sample in the window; what is asked of it; and how much of it was given."""

    sample: Any
    mark: Mark
    cost: Any
    start: int = 0


class Windowed(Within[T_co]):
    """A part that gives several samples together, out of a window.

    Args:
        stream: Gives the samples.
        window: Of how many samples at once those are chosen that are given together.
    """

    _of_reading = (*Stream._of_reading, "_window")

    def __init__(self, stream: Stream[Any], window: int) -> None:
        super().__init__(stream)
        check_order(self, stream)
        self.window = count_of("window", window)
        self._window: list[Waiting] = []

    @abstractmethod
    def cost_of(self, sample: Any) -> Any:
        """Return what is asked of a sample.

        Raises:
            Exception: if it cannot be given with any other, or alone.
        """

    def begin(self, reading: Reading, state: State | None) -> None:
        """Begin to read."""
        super().begin(reading, state)
        self._window, self._is_over = [], False

    def fill(self) -> None:
        """See that the window has as many samples as it may have, or all that are left.

        Raises:
            StopIteration: if it has none.
            Exception: for a sample that is bad. The next call goes on behind it.
        """
        while not self._is_over and len(self._window) < self.window:
            try:
                sample, mark = self.stream.take()
            except StopIteration:
                self._is_over = True
                break
            self.add(sample, mark)
        if not self._window:
            raise StopIteration

    def add(self, sample: Any, mark: Mark) -> None:
        """Put a sample into the window. One that cannot be there counts as given."""
        try:
            cost = self.cost_of(sample)
        except Exception as error:
            self.stream.fail(error, mark)
        self._window.append(Waiting(sample, mark, cost))

    def pop(self, places: Sequence[int]) -> list[Waiting]:
        """Return samples of the window, which are in it no more."""
        chosen, is_left = [self._window[place] for place in places], bytearray(b"\1") * len(self._window)
        for place in places:
            is_left[place] = 0
        self._window = [*compress(self._window, is_left)]
        return chosen

    def give(self, mark: Mark) -> None:
        """Note that several samples were given."""
        for each in mark:
            self.stream.give(each)

    def sources(self, mark: Mark) -> Iterator[tuple[Any, ...]]:
        """Yield what tells samples apart."""
        for each in mark:
            yield from self.stream.sources(each)

    @property
    def keeps_order(self) -> bool:
        """Whether samples may be given in another order: what was chosen depends on what was given before."""
        return False
