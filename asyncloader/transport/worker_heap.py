"""The parent's record of the heap of one worker process: what of it is on lease, and what to return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from asyncloader.transport import codec
from asyncloader.transport.free_list import Region, gaps
from asyncloader.transport.heap import Heap
from asyncloader.transport.slab import SlabPool


class WorkerHeap:
    """A heap that one worker after the other owns, as this process sees it. Loop thread only."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._first, self._length = pool.new_heap()
        self._has_owner = True
        self._sent: dict[int, Region] = {}  # by offset: named by a payload, and still in use here
        self._returned: list[int] = []  # offsets of regions that the owner is to be told of

    def __repr__(self) -> str:
        return f"<WorkerHeap sent={list(self._sent)}>"

    def hand_over(self, num_workers: int) -> Heap | None:
        """Return the heap for the worker that owns it from now on, one of so many; None: there is no shared memory."""
        if (arena := self._pool.arena) is None or not self._length:
            return None
        sent = tuple(self._sent.values())  # those that come free before the worker is there are told as any others
        return Heap(arena, self._first, self._length, sent=sent, share=num_workers)

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
        """Return a region to whoever owns the heap; without an owner its memory is given back."""
        del self._sent[region.offset]
        if self._has_owner:
            self._returned.append(region.offset)
        elif self._pool.arena is not None:
            self._pool.arena.punch(*region)

    def returned(self) -> list[int]:
        """Take the offsets of regions that the worker may write to again, to be sent to it."""
        self._pool.drain()
        returned, self._returned = self._returned, []
        return returned

    # ------------------------------------------------------------------------------------------------------- the end
    def reclaim(self) -> None:
        """The worker has ended, and writes no more: give back what it had, but for what is in use here.

        A worker that is told to end gives its idle memory back by itself, so next to nothing is left to do. A worker
        that was killed may have had memory at any place.
        """
        self._has_owner = False
        self._returned.clear()
        if self._length:
            assert self._pool.arena is not None
            for gap in gaps(self._first, self._first + self._length, self._sent.values()):
                self._pool.arena.punch(*gap)
            self._pool.ownerless.append(self)


def heap_for_a_worker(pool: SlabPool) -> WorkerHeap:
    """Return a heap that has no owner, or a new one; from now on it has an owner."""
    if not pool.ownerless:
        return WorkerHeap(pool)
    heap: WorkerHeap = pool.ownerless.pop()
    heap._has_owner = True
    return heap
