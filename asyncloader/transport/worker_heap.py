"""The parent's record of the heap of one worker process: what of it is on lease, and what to return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from asyncloader.transport import codec
from asyncloader.transport.free_list import Region, gaps
from asyncloader.transport.heap import Heap
from asyncloader.transport.slab import SlabPool


class WorkerHeap:
    """A heap that one worker after the other owns, as this process sees it. Loop thread only.

    Attributes:
        idle: Without an owner, the regions that nobody uses.
    """

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._first, self._length = pool.new_heap()
        self._has_owner = True
        self._sent: dict[int, Region] = {}  # by offset: named by a payload, and still in use here
        self._returned: list[int] = []  # offsets of regions that the owner is to be told of
        self._left: list[Region] | None = None  # what the owner had, as it has told before its end
        self.idle: list[Region] = []

    def __repr__(self) -> str:
        return f"<WorkerHeap sent={list(self._sent)} idle={self.idle}>"

    def hand_over(self, num_workers: int) -> Heap | None:
        """Return the heap for the worker that owns it from now on, one of so many; None: there is no shared memory."""
        if (arena := self._pool.arena) is None or not self._length:
            return None
        idle, self.idle = self.idle, []
        bound = self._pool.max_bytes
        sent = self._sent.values()  # those that come free before the worker is there are told as any others
        return Heap(arena, self._first, self._length, idle=idle, sent=sent, share=num_workers, max_bytes=bound)

    # ------------------------------------------------------------------------------------------------------- payloads
    @property
    def decode(self) -> Callable[[Any], tuple[Any, int]]:
        """What returns the batch of a payload, and its bytes; slabs that it names are on lease from then on.

        Raises:
            LookupError: the payload names a slab that this worker does not have.
            Exception: whatever unpickling the batch raises.
        """
        return partial(codec.decode, open_region=self.open)

    def open(self, offset: int, capacity: int) -> memoryview:
        """Begin the lease of a region that a payload names."""
        if not (self._first <= offset < offset + capacity <= self._first + self._length) or offset in self._sent:
            raise LookupError(f"the slab of {capacity} bytes at {offset} is not this worker's to send")
        region = self._sent[offset] = Region(offset, capacity)
        return self._pool.lease(region, self._take_back)

    def _take_back(self, region: Region) -> None:
        """Return a region to whoever owns the heap."""
        del self._sent[region.offset]
        if self._has_owner:
            self._returned.append(region.offset)
        else:
            self.idle.append(region)

    def returned(self) -> list[int]:
        """Take the offsets of regions that the worker may write to again, to be sent to it."""
        self._pool.drain()
        returned, self._returned = self._returned, []
        return returned

    # ------------------------------------------------------------------------------------------------------- the end
    def on_left(self, regions: Iterable[tuple[int, int]]) -> None:
        """The worker has told what has memory in its heap. From now on it carves nothing."""
        self._left = [Region(*each) for each in regions]

    def reclaim(self) -> None:
        """The worker has ended, and writes no more: what it had is idle, but for what is in use here."""
        self._has_owner = False
        self._returned.clear()
        if self._left is None and self._pool.arena is not None:
            # It was killed, perhaps before it could name what it had carved: there is memory at any place.
            for gap in gaps(self._first, self._first + self._length, self._sent.values()):
                self._pool.arena.punch(*gap)
        self.idle = [region for region in self._left or () if region.offset not in self._sent]
        self._left = None
        if self._length:
            self._pool.ownerless.append(self)
            self._pool.plan_trim()

    def give_back_some(self, nbytes: int) -> bool:
        """Without an owner: give so much of what is idle back; return whether there was some."""
        if not self.idle:
            return False
        assert self._pool.arena is not None
        region = self.idle[-1]
        piece = min(nbytes, region.capacity)
        if not self._pool.arena.punch(region.offset + region.capacity - piece, piece):
            return False  # the platform cannot: what is idle stays, for the next worker
        region.capacity -= piece
        if not region.capacity:
            self.idle.pop()
        return True


def heap_for_a_worker(pool: SlabPool) -> WorkerHeap:
    """Return a heap that has no owner, the warmest, or a new one; from now on it has an owner."""
    if not pool.ownerless:
        return WorkerHeap(pool)
    heap: WorkerHeap = pool.ownerless.pop()
    heap._has_owner = True
    return heap
