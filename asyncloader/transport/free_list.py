"""Regions of the arena, and the free ones among them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from asyncloader.transport.arena import PAGE


class Region:
    """A part of the arena that has memory."""

    __slots__ = ("capacity", "offset")

    def __init__(self, offset: int, capacity: int) -> None:
        self.offset = offset  # in the arena
        self.capacity = capacity

    def __repr__(self) -> str:
        return f"<Region of {self.capacity} bytes at {self.offset:#x}>"


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


def gaps(first: int, end: int, regions: Iterable[Region]) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what lies between some regions, from `first` to `end`."""
    for region in sorted(regions, key=lambda each: each.offset):
        if region.offset > first:
            yield first, region.offset - first
        first = region.offset + region.capacity
    if end > first:
        yield first, end - first


class FreeList:
    """Free regions. The last to come is used first, for it is warm; the first to come is given back first."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._by_age: dict[int, Region] = {}  # by offset
        self._by_capacity: dict[int, list[Region]] = {}
        self._capacities: list[int] = []  # sorted, of those that have regions

    def __iter__(self) -> Iterator[Region]:
        return iter(self._by_age.values())

    def put(self, region: Region) -> None:
        """Add a region that nobody uses."""
        stack = self._by_capacity.setdefault(region.capacity, [])
        if not stack:
            bisect.insort(self._capacities, region.capacity)
        stack.append(region)
        self._by_age[region.offset] = region
        self.nbytes += region.capacity

    def take(self, nbytes: int) -> Region | None:
        """Remove and return the best fit for a buffer."""
        i = bisect.bisect_left(self._capacities, nbytes)
        if i == len(self._capacities) or not fits(nbytes, self._capacities[i]):
            return None
        return self._remove(self._by_capacity[self._capacities[i]], -1)

    def take_oldest(self) -> Region | None:
        """Remove and return the region that has been free for longest."""
        for region in self._by_age.values():
            return self._remove(self._by_capacity[region.capacity], 0)
        return None

    def _remove(self, stack: list[Region], index: int) -> Region:
        # Both the stacks and _by_age are in order of arrival, so the oldest of all is at the bottom of its stack.
        region = stack.pop(index)
        if not stack:
            self._capacities.remove(region.capacity)
        del self._by_age[region.offset]
        self.nbytes -= region.capacity
        return region
