"""The parent's record of the heap of one worker process: what of it is on lease, and what to return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer
from typing import Any

from asyncloader.transport import codec
from asyncloader.transport.free_list import Region, gaps
from asyncloader.transport.heap import Heap
from asyncloader.transport.slab import Lease, SlabPool

# Pickled keys of more bytes go through a slab. Measured, CPU of all processes, us a ticket in the message and by slab:
# 8 KiB 96 and 97, 16 KiB 116 and 104, 64 KiB 248 and 146, 192 KiB 608 and 218.
_KEYS_INLINE = 16 << 10


class WorkerHeap:
    """A heap that one worker after the other owns, as this process sees it. Loop thread only.

    Attributes:
        idle: Without an owner, the regions that nobody uses.
        has_reader: The worker has told that it can read the heap of this process.
    """

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._first, self._length = pool.new_heap()
        self._has_owner = True
        self._sent: dict[int, Region] = {}  # by offset: named by a payload, and still in use here
        self._returned: list[int] = []  # offsets of regions that the owner is to be told of
        self._left: list[Region] | None = None  # what the owner had, as it has told before its end
        self._watched: list[Lease] = []  # on lease while it was forked
        # By ticket (number of the run, of the batch), in the order of runs: the slab that its keys are in.
        self._written: dict[tuple[int, int], Region] = {}
        self.idle: list[Region] = []
        self.has_reader = False

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

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Start the process inside, in this thread: then what a fork shows it is nobody's when it has ended."""
        with self._pool.starting(self) as self._watched:
            yield

    # ------------------------------------------------------------------------------------------------------- payloads
    def decode(self, payload: Any) -> tuple[Any, int]:
        """Return the batch of a payload, and its bytes. Slabs that it names are on lease from here on.

        Raises:
            LookupError: the payload names a slab that this worker does not have.
            Exception: whatever unpickling the batch raises.
        """
        return codec.decode(payload, self.open)

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

    # ----------------------------------------------------------------------------------------------------------- keys
    def place(self, run: int, ticket: int, parts: Sequence[Any]) -> bytes | tuple[int, int]:
        """Find a place for the pickled keys of a ticket: a slab, as offset and length, or one piece for the message.

        The slab is the worker's to read, until it has answered the ticket: it reads all tickets of a message at once.
        """
        if len(parts) == 1 and len(parts[0]) <= _KEYS_INLINE:  # most tickets
            return bytes(parts[0])
        assert (run, ticket) not in self._written, f"the worker has ticket {ticket} of run {run} already"
        pieces = [PickleBuffer(part).raw() for part in parts]
        nbytes, own = sum(map(len, pieces)), self._pool.own if self.has_reader else None
        if own is None or nbytes <= _KEYS_INLINE or (region := own.take(nbytes)) is None:
            return b"".join(pieces)
        self._written[run, ticket] = region
        memory, at = own.memory_of(region), 0
        for piece in pieces:
            memory[at : at + len(piece)] = piece
            at += len(piece)
        return region.offset, nbytes

    def answered(self, ticket: tuple[int, int]) -> None:
        """The worker has answered this ticket, and is not at any of an earlier run."""
        written = self._written
        if ticket in written:
            self._put_back(ticket)
        while written and (first := next(iter(written)))[0] < ticket[0]:
            self._put_back(first)

    def _put_back(self, ticket: tuple[int, int]) -> None:
        assert self._pool.own is not None
        self._pool.own.put_back(self._written.pop(ticket))

    # ------------------------------------------------------------------------------------------------------- the end
    def on_left(self, regions: Iterable[tuple[int, int]]) -> None:
        """The worker has told what has memory in its heap. From now on it carves nothing."""
        self._left = [Region(*each) for each in regions]

    def reclaim(self) -> None:
        """The worker has ended, and writes no more: what it had is idle, but for what is in use here."""
        for ticket in list(self._written):
            self._put_back(ticket)
        self._has_owner = self.has_reader = False
        self._returned.clear()
        if self._left is None and self._pool.arena is not None:
            # It was killed, perhaps before it could name what it had carved: there is memory at any place.
            for gap in gaps(self._first, self._first + self._length, self._sent.values()):
                self._pool.arena.punch(*gap)
        self.idle = [region for region in self._left or () if region.offset not in self._sent]
        self._left = None
        watched, self._watched = self._watched, []
        for lease in watched:
            lease.release(self)
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
