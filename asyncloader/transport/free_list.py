"""Regions of the arena, and the free ones among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from asyncloader.transport.arena import PAGE


class Region(NamedTuple):
    """A part of the arena.

    Attributes:
        offset: Where it begins in the arena.
        capacity: Its length.
    """

    offset: int
    capacity: int


def fits(nbytes: int, capacity: int) -> bool:
    """Whether memory that is there should serve a buffer, rather than new memory.

    It may be twice as large. Whoever keeps the buffer keeps all of it; but batches whose sizes vary would find nothing
    most of the time if it had to fit closely.
    """
    return nbytes <= capacity <= 2 * nbytes + 8 * PAGE


def capacity_for(nbytes: int) -> int:
    """Round up to one of 128 capacities between powers of two: whole pages, at most 0.8 % too large from 512 KiB on."""
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 8))
    return -(-nbytes // step) * step


def gaps(first: int, end: int, regions: Iterable[Region]) -> Iterator[Region]:
    """Yield what lies between some regions, from `first` to `end`."""
    for offset, capacity in sorted(regions):
        if offset > first:
            yield Region(first, offset - first)
        first = offset + capacity
    if end > first:
        yield Region(first, end - first)


class FreeList:
    """Free regions by capacity. Of one capacity the last to come is used first, for it is warm.

    The first to come of the capacity that has been there for longest is given back first.
    """

    def __init__(self) -> None:
        self.nbytes: int = 0
        self._by_capacity: dict[int, list[Region]] = {}

    def __iter__(self) -> Iterator[Region]:
        return chain.from_iterable(self._by_capacity.values())

    def put(self, region: Region) -> None:
        """Add a region that nobody uses."""
        self._by_capacity.setdefault(region.capacity, []).append(region)
        self.nbytes += region.capacity

    def take(self, nbytes: int) -> Region | None:
        """Remove and return the best fit for a buffer."""
        capacity = min((each for each in self._by_capacity if fits(nbytes, each)), default=None)
        return None if capacity is None else self._remove(capacity, -1)

    def take_oldest(self) -> Region | None:
        """Remove and return the region that is given back first."""
        return next((self._remove(capacity, 0) for capacity in self._by_capacity), None)

    def _remove(self, capacity: int, index: int) -> Region:
        stack = self._by_capacity[capacity]
        region = stack.pop(index)
        if not stack:
            del self._by_capacity[capacity]
        self.nbytes -= capacity
        return region
