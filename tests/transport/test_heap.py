"""A heap in its own process: its quota, and what it makes of memory that it cannot have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from asyncloader import machine
from asyncloader.transport import arena, heap
from asyncloader.transport.heap import Heap
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.worker_heap import heap_for_a_worker

MIB = 1 << 20
HeapOf = Callable[[int], Heap]
KEPT: list[memoryview] = []


@pytest.fixture
def owned() -> Iterator[HeapOf]:
    """Makes heaps in an arena of their own, of which each may take one of so many shares."""
    pool = SlabPool()

    def make(share: int) -> Heap:
        made = heap_for_a_worker(pool).hand_over(share)
        assert made is not None
        return made

    yield make
    KEPT.clear()
    assert pool.arena is not None
    pool.arena.close()


def num_taken(owner: Heap) -> int:
    """Take regions of 1 MiB until there is none to be had."""
    count = 0
    while count < 100 and (memory := owner.allocate(MIB)) is not None:
        KEPT.append(memory)
        count += 1
    return count


def test_all_heaps_take_half_of_what_is_left(owned: HeapOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each its share of that. What slabs have taken counts as left, so the limit stays where it is as they grow."""
    first, second, third = owned(2), owned(2), owned(2)
    monkeypatch.setattr(machine, "available_bytes", lambda: 24 * MIB - first.arena.reserved_bytes())
    assert [num_taken(each) for each in (first, second, third)] == [6, 6, 0]


def test_it_is_looked_up_again_after_a_while(owned: HeapOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may need more as time goes by, or less."""
    now, available = 0.0, 8 * MIB
    monkeypatch.setattr(heap, "monotonic", lambda: now)
    monkeypatch.setattr(machine, "available_bytes", lambda: available)
    owner = owned(1)
    assert num_taken(owner) == 4
    available = 40 * MIB
    now = 0.5
    assert num_taken(owner) == 0
    now = 2.0
    assert num_taken(owner) == 18  # 22, half of 40 and the 4


def test_idle_memory_of_other_sizes_goes_first(owned: HeapOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no more to be had."""
    owner = owned(1)
    monkeypatch.setattr(machine, "available_bytes", lambda: 8 * MIB - owner.arena.reserved_bytes())
    regions = [owner.allocate(MIB) for _ in range(4)]
    assert owner.allocate(2 * MIB) is None
    del regions[:2]
    assert owner.allocate(2 * MIB) is not None
    assert owner.arena.reserved_bytes() == 4 * MIB


def test_without_memory_it_does_not_try_each_time(owned: HeapOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has refused to reserve: no more is asked of it for a second."""
    now, tries = 0.0, 0

    def refuse(self: object, offset: int, length: int) -> bool:
        nonlocal tries
        tries += 1
        return False

    monkeypatch.setattr(heap, "monotonic", lambda: now)
    monkeypatch.setattr(arena.Arena, "reserve", refuse)
    owner = owned(1)
    assert [owner.allocate(MIB) for _ in range(10)] == [None] * 10
    now = 2.0
    assert owner.allocate(MIB) is None
    assert tries == 2
