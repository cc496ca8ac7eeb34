"""Memory of dropped batches, to be used again in the same process (num_workers=0).

    free blocks ── allocate ──> on lease to a batch ── its last tensor dies ──> free block

A batch of 38.5 MB in new memory takes ten times as long as in memory that has been touched: page faults. Blocks that
the last few batches did not need are freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import weakref
from typing import Any

from asyncloader.transport.exporter import LeaseRef, exporter_at
from asyncloader.transport.free_list import capacity_for, fits

# malloc keeps what is smaller, and uses it again. Huge pages were tried: as fast later, up to ten times slower before.
RECYCLED_MIN = 1 << 20
_KEPT_BATCHES = 4


class _Block:
    """Memory for a large tensor."""

    __slots__ = ("address", "capacity", "last_batch", "memory")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.last_batch = 0


class Recycler:
    """Blocks of one loader. Any thread may call it, leases end in any thread and inside gc, a fork may come any time.

    So there is no lock: every step is one operation on a list or dict, which CPython does not interrupt. A forked child
    has copies of blocks and batches and may go on.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[_Block]] = {}  # by capacity, the last used last
        self._leases: dict[int, LeaseRef] = {}
        self._numbers = itertools.count()
        self._batches = 0
        self._on_end = _end_of_lease(weakref.ref(self))

    def begin_batch(self) -> None:
        """Note that another batch begins, and free what the last ones did not need."""
        self._batches += 1
        if not self._free:
            return
        for stack in list(self._free.values()):
            with contextlib.suppress(IndexError):  # another thread was faster
                while stack and stack[0].last_batch < self._batches - _KEPT_BATCHES:
                    stack.pop(0)

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory that is free again when nothing refers to it any more; None: there is none."""
        try:
            block = self._take(nbytes) or _Block(capacity_for(nbytes))
        except OSError:
            return None
        block.last_batch = self._batches
        exporter = exporter_at(block.address, block.capacity)
        exporter.block = block  # tensors may outlive the recycler
        ref, number = LeaseRef(exporter, self._on_end), next(self._numbers)
        ref.lease = number, block
        self._leases[number] = ref
        return memoryview(exporter).cast("B")[:nbytes]

    def ended(self, ref: LeaseRef) -> None:
        """Take a block back. Called in any thread, inside gc."""
        number, block = ref.lease
        if self._leases.pop(number, None) is not None:
            self._free.setdefault(block.capacity, []).append(block)

    def _take(self, nbytes: int) -> _Block | None:
        for capacity in sorted(self._free.copy()):
            if fits(nbytes, capacity):
                with contextlib.suppress(IndexError):
                    return self._free[capacity].pop()
        return None


def _end_of_lease(recycler_ref: weakref.ref[Recycler]) -> Any:
    def on_end(ref: LeaseRef) -> None:
        recycler = recycler_ref()
        if recycler is not None:
            recycler.ended(ref)

    return on_end
