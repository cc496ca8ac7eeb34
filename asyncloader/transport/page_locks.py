"""Page-locked regions: slabs that a device copies from by itself, so that no thread has to copy them before.

    region ── leased for the second time ──> locked ── its memory is about to be given back ──> unlocked
                 the thread that pins                      the loop thread

Locking a page takes as long as copying it a few times, so it pays for memory that is used again and again. A region is
locked while a batch that lies in it is on lease, and unlocked when it has no users: so it is never both at once.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

log = logging.getLogger(__name__)


class LocksPages(Protocol):
    """A device that copies from memory of the host by itself, if its pages are locked."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock pages of this process; return whether that could be done."""

    def unlock(self, address: int) -> bool:
        """Unlock what was locked at an address; return whether that could be done."""


class PageLocks:
    """Which regions of a pool are locked.

    Args:
        device: Locks them.
        most: Bytes that may be locked at once.

    Attributes:
        nbytes: Bytes that are locked.
    """

    def __init__(self, device: LocksPages, most: int) -> None:
        self.nbytes = 0
        self._device = device
        self._most = most
        self._locked: dict[int, tuple[int, int]] = {}  # by number of the region: its address and bytes
        self._seen: set[int] = set()  # numbers of regions that were leased once
        self._changing = threading.Lock()

    def lock(self, region: int, address: int, nbytes: int) -> None:
        """Lock a region that is on lease, if it is leased again, and there is room. In a thread that pins."""
        with self._changing:
            if region in self._locked:
                return
            is_new = region not in self._seen
            self._seen.add(region)
            if is_new or self.nbytes + nbytes > self._most:
                return
            self._locked[region] = address, nbytes
            self.nbytes += nbytes
        if not self._device.lock(address, nbytes):
            with self._changing:
                del self._locked[region]
                self.nbytes -= nbytes
            self._give_up("locked")

    def unlock(self, region: int) -> bool:
        """Unlock a region without users; return whether its memory may be given back. On the loop thread."""
        with self._changing:
            self._seen.discard(region)
            if region not in self._locked:
                return True
            address, nbytes = self._locked[region]
        if not self._device.unlock(address):
            self._give_up("unlocked")
            return False
        with self._changing:
            del self._locked[region]
            self.nbytes -= nbytes
        return True

    def _give_up(self, what: str) -> None:
        """Lock nothing more."""
        if self._most:
            self._most = 0
            log.warning("Memory could not be %s for the device; from now on batches are copied before it.", what)
