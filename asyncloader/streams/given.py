"""Which of the items that are numbered 0, 1, 2, ... were given: all below one, and a few beyond it.

    0 1 2 3 4 5 6 7 8 9 ...
    x x x x . x . . x .          low = 4, beyond = {5, 8}

Those beyond are as many as wait in buffers behind whatever numbers them. So this is small, however many were given.
"""

from __future__ import annotations


class Given:
    """The numbers of items that were given.

    Args:
        low: All below this one were.
        beyond: Of those above it, these.

    Attributes:
        end: How many items there are; -1 as long as nobody knows.
    """

    __slots__ = ("beyond", "end", "low")
    beyond: set[int]
    end: int
    low: int

    def __init__(self, low: int = 0, *beyond: int) -> None:
        self.low, self.beyond, self.end = low, {*beyond}, -1

    def add(self, number: int) -> None:
        """Note that an item was given."""
        if number != self.low:
            self.beyond.add(number)
            return
        self.low += 1
        while self.beyond and self.low in self.beyond:
            self.beyond.remove(self.low)
            self.low += 1

    def update(self, low: int, *beyond: int) -> None:
        """Note that the items of another record were given."""
        left = {number for number in self.beyond.union(beyond) if number >= max(self.low, low)}
        self.low, self.beyond = max(self.low, low), left
        if self.low in left:
            left.remove(self.low)
            self.add(self.low)

    def first_left(self, number: int) -> int:
        """Return the first number, from this one on, that was not given."""
        number = max(number, self.low)
        while number in self.beyond:
            number += 1
        return number

    def state(self) -> list[int]:
        """Return plain values: `low`, and those beyond in ascending order."""
        return [self.low, *sorted(self.beyond)]
