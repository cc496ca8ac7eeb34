"""A heap: the addresses of the arena that one process carves slabs from and uses again, by itself.

      cold ── carve ──> taken ── sent in a payload ──> the parent's ── returned with a later ticket ──┐
       ^                ^  └── its last reference here died before ──> idle <─────────────────────────┤
       │                └──────────────────── taken again ───────────────────────────┘ │              │
       └─ sweep ────────────────────────────────────────────────────────────────────────┘              │
                        taken <── something here still refers to it (a cache of collated batches, say) ┘

Only the owner of a heap writes to it, and only to what is neither sent nor referred to here. So there is nothing to ask
the parent for, and nothing that the parent could give away: the parent only says when nobody there looks at a slab any
more. (mimalloc's heaps of threads are such owners, and get blocks that others free as lists in the same way.)
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from time import monotonic
from typing import Any

from asyncloader import machine
from asyncloader.transport.arena import Arena, exporter_at
from asyncloader.transport.free_list import FreeList, Region, capacity_for, gaps

PERIOD_S = 5.0  # use is looked at in periods: what neither this one nor the last one needed is given back
SWEEP_BYTES = 4 << 20  # given back at a time: 1 ms
_LOOK_EVERY_S = 1.0  # how much memory there is: to read the files takes 0.1 ms


class Heap:
    """The slabs of one worker process. For the thread of it that serves.

    Made by the trainer, which a worker inherits it from, or which pickles it while the worker is launched.

    Args:
        arena: The shared memory. None in a worker that could not map it.
        first: Where the addresses of this heap begin in the arena.
        length: How many there are.
        sent: Regions that batches of the owner before are still in. They are returned as this owner's own.
        share: The quota is one of so many parts of what slabs may take in all.

    Attributes:
        reserved: Bytes that have memory.
    """

    def __init__(
        self,
        arena: Arena,
        first: int,
        length: int,
        *,
        sent: Collection[Region] = (),
        share: int = 1,
    ) -> None:
        self.arena = arena
        self._idle = FreeList()
        self._taken: dict[int, tuple[Region, weakref.ref[Any]]] = {}  # by offset
        # By offset. The reference is that of this process, which may look at what it has sent as well.
        self._sent: dict[int, tuple[Region, weakref.ref[Any] | None]] = {each.offset: (each, None) for each in sent}
        self._first, self._end = first, first + length
        self._cold = Region(first, 0)  # addresses without memory: those that regions are carved from next
        self.reserved: int = sum(each.capacity for each in sent)
        self._peaks = [0, self.reserved]  # bytes in use at most, in the last period and in this one
        self._period_ends = 0.0
        self._share = share
        self._limit = 0
        self._looked_at = -_LOOK_EVERY_S
        self._kept: list[Any] = []  # exporters of regions that forked children may look at

    def __repr__(self) -> str:
        return f"<Heap reserved={self.reserved} idle={self._idle.nbytes} taken={[*self._taken]} sent={[*self._sent]}>"

    def regions(self) -> list[Region]:
        """Return all that has memory."""
        return [*self._idle, *(region for region, _ in [*self._taken.values(), *self._sent.values()])]

    # -------------------------------------------------------------------------------------------------- getting slabs
    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory for a part of a batch, free again when nothing refers to it; None: there is none to be had."""
        self._give_back_surplus()
        region = self._idle.take(nbytes)
        if region is None and self._taken:
            self._recover()
            region = self._idle.take(nbytes)
        if region is None and (region := self._carve(capacity_for(nbytes))) is None:
            return None
        self._peaks[1] = max(self._peaks[1], self._in_use)
        exporter = exporter_at(self.arena.base + region.offset, region.capacity)
        self._taken[region.offset] = region, weakref.ref(exporter)
        return memoryview(exporter).cast("B")[:nbytes]

    @property
    def _in_use(self) -> int:
        return self.reserved - self._idle.nbytes

    def _recover(self) -> None:
        """Find regions whose last reference has died: of what never became part of a batch, or came back before."""
        for region, ref in list(self._taken.values()):
            if ref() is None:
                del self._taken[region.offset]
                self._idle.put(region)

    def _carve(self, capacity: int) -> Region | None:
        self._peaks[1] = max(self._peaks[1], self._in_use + capacity)
        if not self._may_grow(capacity):
            # Pressed for memory: what is idle goes first, at about the price that the new region costs.
            self._sweep(capacity, keep=0)
            if not self._may_grow(capacity):
                return None
        if self._cold.capacity < capacity:
            cold = gaps(self._first, self._end, self.regions())
            self._cold = next((gap for gap in cold if gap.capacity >= capacity), self._cold)
            if self._cold.capacity < capacity:
                return None
        offset, there = self._cold
        # Before the first byte is written: a write to shared memory that cannot grow is SIGBUS.
        if not self.arena.reserve(offset, capacity):
            self._limit = 0  # until the next look
            return None
        self._cold = Region(offset + capacity, there - capacity)
        self.reserved += capacity
        return Region(offset, capacity)

    def _may_grow(self, capacity: int) -> bool:
        """Whether that is within the quota: half of what the machine, and every cgroup around it, could still give.

        A cgroup at its limit does not fail an allocation, it kills, and perhaps the trainer. So slabs stay well below
        it, and what does not fit goes through the channel. The file itself tells what all heaps take together. Workers
        that grow at the same moment do not see each other: each has only its share.
        """
        now, reserved = monotonic(), self.arena.reserved_bytes()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._limit = (machine.available_bytes() + reserved) // 2
            self._looked_at = now
        return reserved + capacity <= self._limit and self.reserved + capacity <= self._limit // self._share

    # ------------------------------------------------------------------------------------------------- giving back
    def _give_back_surplus(self) -> None:
        """Note the end of a period, and give some of what was not needed lately back.

        An eighth over the recent peak may stay reserved without being in use, for sizes that vary.
        """
        if (now := monotonic()) >= self._period_ends:
            self._period_ends = now + PERIOD_S
            self._peaks = [self._peaks[1], self._in_use]
        peak = max(self._peaks)
        self._sweep(SWEEP_BYTES, keep=peak + (peak >> 3) + SWEEP_BYTES)

    def trim(self) -> None:
        """Give all that is idle back."""
        self._recover()
        self._sweep(self.reserved, keep=0)

    def _sweep(self, nbytes: int, keep: int) -> None:
        """Give idle regions back, oldest first, at least `nbytes` of them, until no more than `keep` are reserved."""
        while nbytes > 0 and self.reserved > keep and (region := self._idle.take_oldest()) is not None:
            if not self.arena.punch(*region):
                # The platform cannot punch holes: what is reserved stays, to be used again.
                self._idle.put(region)
                return
            self._cold = Region(
                self._first, 0
            )  # look again: what lies low is taken first, which keeps page tables small
            self.reserved -= region.capacity
            nbytes -= region.capacity

    # ------------------------------------------------------------------------------------------------- sending slabs
    def locate(self, address: int, nbytes: int) -> tuple[Region, int] | None:
        """Return the region taken here that holds these bytes, and their offset in it."""
        at = address - self.arena.base
        if not 0 <= at < self.arena.size:
            return None
        first = self._taken.get(at)  # as a rule it begins there
        for region, _ in self._taken.values() if first is None else (first,):
            offset = at - region.offset
            if 0 <= offset <= region.capacity - nbytes:
                return region, offset
        return None

    def send(self, offset: int) -> None:
        """Note that the region there is the parent's now: it is not written again before it is returned."""
        if offset not in self._sent:  # it may be in a payload twice
            self._sent[offset] = self._taken.pop(offset)

    def returned(self, offsets: Iterable[int]) -> None:
        """Take regions back that nobody in the parent looks at any more."""
        for offset in offsets:
            region, ref = self._sent.pop(offset, (None, None))
            if region is None:  # a payload was damaged on its way
                continue
            if ref is not None and ref() is not None:
                self._taken[offset] = region, ref
            else:
                self._idle.put(region)

    # ----------------------------------------------------------------------------------------------------- forks
    def before_fork(self) -> None:
        """Keep for good what this process refers to: a child that it forks has the same memory, and may look longer.

        Most workers refer to no batch then, unless they keep some.
        """
        refs = [ref for _, ref in [*self._taken.values(), *self._sent.values()]]
        self._kept += [exporter for ref in refs if ref is not None and (exporter := ref()) is not None]
