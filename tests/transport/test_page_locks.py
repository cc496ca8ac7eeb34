"""Page locks: which regions are locked, how much of them, and what happens if the device refuses."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable

import pytest

from asyncloader.transport.page_locks import PageLocks
from asyncloader.transport.slab import SlabPool
from tests import inside

MIB = 1 << 20


class Locker:
    """A device that keeps books."""

    def __init__(self, *, refuses: str = "") -> None:
        self.locked: dict[int, int] = {}
        self.refuses = refuses
        self.calls = 0
        self.meanwhile: Callable[[], object] = bool

    def lock(self, address: int, nbytes: int) -> bool:
        self.calls += 1
        self.meanwhile()
        assert address not in self.locked
        if self.refuses != "lock":
            self.locked[address] = nbytes
        return self.refuses != "lock"

    def unlock(self, address: int) -> bool:
        self.calls += 1
        if self.refuses != "unlock":
            del self.locked[address]
        return self.refuses != "unlock"


def test_a_region_is_locked_when_it_is_used_again() -> None:
    """Once, up to so many bytes; others go on being copied."""
    device = Locker()
    locks = PageLocks(device, 3 * MIB)
    for region in (1, 2, 3, 2, 2, 3, 4):
        locks.lock(region, region * 8 * MIB, 2 * MIB)
    assert device.locked == {2 * 8 * MIB: 2 * MIB}
    assert locks.nbytes == 2 * MIB
    assert all(map(locks.unlock, (1, 2, 2)))
    assert (device.locked, locks.nbytes) == ({}, 0)
    locks.lock(3, 3 * 8 * MIB, 2 * MIB)
    assert device.locked == {3 * 8 * MIB: 2 * MIB}


@pytest.mark.parametrize("what", ["lock", "unlock"])
def test_a_device_that_refuses(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Is not asked again, and that is said once. What cannot be unlocked is not given back."""
    device = Locker()
    locks = PageLocks(device, 9 * MIB)
    for _ in range(2):
        locks.lock(1, 1, MIB)
    device.refuses = what
    with caplog.at_level(logging.WARNING, "asyncloader"):
        if what == "unlock":
            assert not locks.unlock(1)
        for region in (2, 2, 3, 3):
            locks.lock(region, region, MIB)
    assert device.locked == {1: MIB}
    assert device.calls == 2
    assert len(caplog.records) == 1
    assert "from now on batches are copied" in caplog.text
    device.refuses = ""
    assert locks.unlock(1)
    assert locks.nbytes == 0


def test_two_threads_that_pin() -> None:
    """The bound holds while another thread locks a region."""
    device = Locker()
    locks = PageLocks(device, 3 * MIB)
    locks.lock(1, 1, 2 * MIB)
    locks.lock(2, 2, 2 * MIB)

    def other() -> None:
        device.meanwhile = bool
        thread = threading.Thread(target=locks.lock, args=(2, 2, 2 * MIB))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    device.meanwhile = other
    locks.lock(1, 1, 2 * MIB)
    assert device.locked == {1: 2 * MIB}


def test_a_slab_that_cannot_be_unlocked_is_kept() -> None:
    """The device may still look at it; it is used again, as other memory that is not given back."""
    device = Locker()
    pool = SlabPool(lambda reserved: 64 * MIB)
    assert pool.handle() is not None
    pool.lock_for(device, 64 * MIB)
    pool.lock_for(Locker(refuses="lock"), 64 * MIB)  # the first one does
    for _ in range(2):
        memory = pool.receive(MIB)
        assert memory is not None
        pool.lock([address_of(memory), 17, 0])
        del memory
    assert list(device.locked.values()) == [MIB]
    device.refuses = "unlock"
    pool.trim()
    assert pool.statistics().reserved == MIB
    memory = pool.receive(MIB)
    assert memory is not None
    assert pool.statistics().free == 0
    del memory
    inside.arena(pool).close()


def address_of(memory: memoryview) -> int:
    """Return where memory is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
