"""Memory of dropped batches, to be used again in the same process (num_workers=0, batches of other machines).

    free ── allocate ──> in use by a batch ── its last tensor dies ──> free

A batch of 38.5 MB in new memory takes ten times as long as in memory that has been touched: page faults. Memory that
the last few batches did not need is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import TypeAlias

from asyncloader.transport.arena import exporter_at
from asyncloader.transport.free_list import capacity_for, fits

# malloc keeps what is smaller, and uses it again. Huge pages were tried: as fast later, up to ten times slower before.
RECYCLED_MIN = 1 << 20
_KEPT_BATCHES = 4

_Free: TypeAlias = tuple[int, mmap.mmap]
"""Free memory, and the number of the batch that it was taken for last."""


class Recycler:
    """The memory of one loader. Any thread may call it, tensors die in any thread and inside gc, forks come any time.

    So there is no lock: every step is one operation on a list, which CPython does not interrupt. A forked child has
    copies of the memory, and may go on.

    Attributes:
        free: The memory that is free. As long as there is none, batches need not be told of.
    """

    def __init__(self) -> None:
        self.free: list[_Free] = []  # the last used last
        self._batches = 0

    def begin_batch(self) -> None:
        """Note that another batch begins, and free what the last ones that were told of did not need."""
        self._batches += 1
        for each in self.free.copy():
            if each[0] < self._batches - _KEPT_BATCHES:
                self._taken(each)

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory that is free again when nothing refers to it any more; None: there is none."""
        fitting = [each for each in reversed(self.free.copy()) if fits(nbytes, len(each[1]))]
        fitting.sort(key=lambda each: len(each[1]))
        try:
            memory = next((each[1] for each in fitting if self._taken(each)), None)
            memory = memory or mmap.mmap(-1, capacity_for(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return None
        exporter = exporter_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
        # The tensors keep the memory, which may outlive the recycler; at the end of the interpreter it stays.
        weakref.finalize(exporter, self.free.append, (self._batches, memory)).atexit = False
        return memoryview(exporter).cast("B")[:nbytes]

    def _taken(self, free: _Free) -> bool:
        """Take this out of what is free; False if another thread was faster."""
        with contextlib.suppress(ValueError):
            self.free.remove(free)
            return True
        return False
