"""Which of the items that are numbered 0, 1, 2, ... were given: all below one, and a few beyond it.

    0 1 2 3 4 5 6 7 8 9 ...
    x x x x . x . . x .          low = 4, beyond = {5, 8}

Those beyond are as many as wait in buffers behind whatever numbers them. So this is small, however many were given.
"""

from __future__ import annotations

from collections.abc import Iterable


class Given:
    """The numbers of items that were given.

    Args:
        low: All below this one were.
        beyond: Of those above it, these.
    """

    __slots__ = ("beyond", "low")

    def __init__(self, low: int = 0, beyond: Iterable[int] = ()) -> None:
        self.low = low
        self.beyond = set(beyond)
        self._close_up()

    def __contains__(self, number: int) -> bool:
        return number < self.low or number in self.beyond

    def add(self, number: int) -> None:
        """Note that an item was given."""
        if number == self.low:
            self.low += 1
            self._close_up()
        elif number > self.low:
            self.beyond.add(number)

    def update(self, other: Given) -> None:
        """Note that all items were given which another record has."""
        self.low = max(self.low, other.low)
        self.beyond = {number for number in self.beyond | other.beyond if number >= self.low}
        self._close_up()

    def first_left(self, number: int) -> int:
        """Return the first number, from this one on, that was not given."""
        number = max(number, self.low)
        while number in self.beyond:
            number += 1
        return number

    def state(self) -> list[int]:
        """Return plain values: `low`, and those beyond in ascending order."""
        return [self.low, *sorted(self.beyond)]

    def _close_up(self) -> None:
        while self.low in self.beyond:
            self.beyond.discard(self.low)
            self.low += 1
