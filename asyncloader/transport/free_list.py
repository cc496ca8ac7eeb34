"""Regions of the arena, and the free ones among them."""

from __future__ import annotations

import bisect

from asyncloader.transport.loans import fits


class Region:
    """A part of the arena that has memory, or is about to get it."""

    __slots__ = ("capacity", "is_fresh", "number", "offset", "unused", "users")

    def __init__(self, number: int, offset: int, capacity: int) -> None:
        self.number = number
        self.offset = offset
        self.capacity = capacity
        self.is_fresh = True  # until a worker has written it
        self.unused = 0  # bytes, while it is on lease
        self.users: set[object] = set()

    def __repr__(self) -> str:
        return f"<Region {self.number} {self.capacity} bytes at {self.offset:#x}, users {self.users}>"


class FreeList:
    """Free regions. The last to come is used first, for it is warm; the first to come is given back first."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._by_age: dict[int, Region] = {}
        self._by_capacity: dict[int, list[Region]] = {}
        self._capacities: list[int] = []  # sorted, of those that have regions

    def put(self, region: Region) -> None:
        """Add a region that has no users left."""
        stack = self._by_capacity.setdefault(region.capacity, [])
        if not stack:
            bisect.insort(self._capacities, region.capacity)
        stack.append(region)
        self._by_age[region.number] = region
        self.nbytes += region.capacity

    def take(self, nbytes: int, is_loose: bool) -> Region | None:
        """Remove and return the best fit for a buffer."""
        i = bisect.bisect_left(self._capacities, nbytes)
        if i == len(self._capacities) or not fits(nbytes, self._capacities[i], is_loose):
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
        del self._by_age[region.number]
        self.nbytes -= region.capacity
        return region
