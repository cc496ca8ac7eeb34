"""Makes forks of this process cheap: what it has imported is laid into huge pages, and out of the collector's sight.

    small_forks.settle()                 # once everything has been imported
    small_forks.settle_if_grown()        # between two tests

A process that has imported torch has 150 MB of memory of its own, 37,000 pages. Each fork copies the entries of all of
them, and each exit of a child drops them again: 15 ms of system time together, more than most tests have to do
themselves. Pages of 2 MiB need one entry for each 512. What a child writes to is copied in small pages as before.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path

HUGE = 2 << 20
GROWN = 48 << 20
MADV_COLLAPSE = 25  # Linux 6.1; not in the module mmap


_settled_at = 0  # resident bytes


def settle_if_grown() -> None:
    """Do it again where the process has grown since: after some thousand tests it has four times the memory."""
    if _resident() - _settled_at > GROWN:
        settle()


def settle() -> None:
    """Do it now: for what has been made until here. What malloc keeps for later is given back before."""
    global _settled_at
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()  # collections in children would write to every object, and copy every page
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        _collapse()
    _settled_at = _resident()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _collapse() -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        if access.startswith("rw") and (not name or name[0] == "[heap]"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for start in range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
                madvise(start, HUGE, MADV_COLLAPSE)
