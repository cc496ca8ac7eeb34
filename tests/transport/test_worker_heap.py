"""The parent's record of a worker's heap: who owns it, and what is returned to the owner."""

from __future__ import annotations

import torch

from asyncloader.transport import arena
from asyncloader.transport.codec import Encoder
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.worker_heap import heap_for_a_worker
from tests.support import inside
from tests.transport.wire import Pool


def test_a_heap_goes_from_worker_to_worker(pool: SlabPool) -> None:
    """The last one that was left goes first, without memory but for what is in use; no two workers have the same."""
    first, second = heap_for_a_worker(pool), heap_for_a_worker(pool)
    owner, other = first.hand_over(2), second.hand_over(2)
    assert owner is not None
    assert other is not None
    batch = first.decode(b"".join(Encoder(owner).encode(torch.zeros(1 << 17))))[0]
    owner.allocate(1 << 20)  # and let go of it
    second.reclaim()
    first.reclaim()
    assert pool.reserved_bytes == 1 << 19
    assert heap_for_a_worker(pool) is first
    assert heap_for_a_worker(pool) is second
    heir = first.hand_over(2)
    assert heir is not None
    assert [each.capacity for each in heir.regions()] == [1 << 19]
    del batch
    heir.returned(first.returned())
    assert inside.idle_bytes(heir) == 1 << 19
    first.reclaim()
    second.reclaim()
    assert pool.reserved_bytes == 0


def test_where_there_is_no_room_for_another_heap() -> None:
    """Its worker sends batches through the channel; the others have theirs."""
    pool = Pool(create_arena=lambda size: arena.create(1 << 28))
    records = [heap_for_a_worker(pool) for _ in range(6)]
    heaps = [record.hand_over(1) for record in records]
    assert [heap is not None for heap in heaps] == [True] * 4 + [False] * 2
    for record in records:
        record.reclaim()
    assert {id(heap_for_a_worker(pool)) for _ in range(4)} == {id(record) for record in records[:4]}
    pool.close()
