"""The parent's record of a worker's heap: keys that it has not read yet, and what is returned to it."""

from __future__ import annotations

from collections.abc import Iterator
from pickle import PickleBuffer

import numpy as np
import pytest
import torch

from asyncloader.transport import arena
from asyncloader.transport.codec import Encoder
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.worker_heap import WorkerHeap, heap_for_a_worker
from tests import inside
from tests.transport.wire import make_pool


@pytest.fixture
def heap(pool: SlabPool) -> Iterator[WorkerHeap]:
    """That of a worker that has made no batch yet."""
    made = heap_for_a_worker(pool)
    yield made
    made.reclaim()


def test_a_heap_goes_from_worker_to_worker(pool: SlabPool) -> None:
    """The last one that was left goes first, with what is idle in it; two workers never have the same."""
    first, second = heap_for_a_worker(pool), heap_for_a_worker(pool)
    owner, other = first.hand_over(2), second.hand_over(2)
    assert owner is not None
    assert other is not None
    batch = first.decode(b"".join(Encoder(owner).encode(torch.zeros(1 << 17))))[0]
    owner.put_back(owner.take(1 << 20))  # type: ignore[arg-type]
    second.reclaim()
    first.on_left([(each.offset, each.capacity) for each in owner.regions()])
    first.reclaim()
    assert [each.capacity for each in first.idle] == [1 << 20]
    assert heap_for_a_worker(pool) is first
    assert heap_for_a_worker(pool) is second
    heir = first.hand_over(2)
    assert heir is not None
    assert sorted(each.capacity for each in heir.regions()) == [1 << 19, 1 << 20]
    assert heir.idle_bytes == 1 << 20
    del batch
    heir.returned(first.returned())
    assert heir.idle_bytes == 3 << 19
    first.reclaim()
    second.reclaim()
    assert pool.reserved_bytes == 0


def test_where_there_is_no_room_for_another_heap() -> None:
    """Its worker sends batches through the channel, and is given keys in messages; the others have theirs."""
    pool = make_pool(create_arena=lambda size: arena.create(1 << 28))
    records = [heap_for_a_worker(pool) for _ in range(6)]
    heaps = [record.hand_over(1) for record in records]
    assert [heap is not None for heap in heaps] == [True] * 4 + [False] * 2
    for record in records:
        record.has_reader = True
    assert records[0].place(0, 0, [bytes(100_000)]) == bytes(100_000)
    for record in records:
        record.reclaim()
    assert {id(heap_for_a_worker(pool)) for _ in range(4)} == {id(record) for record in records[:4]}
    pool.close()


def read(pool: SlabPool, placed: bytes | tuple[int, int]) -> bytes:
    """Read pickled keys, as a worker does."""
    own = pool.own
    assert own is not None
    return placed if isinstance(placed, bytes) else bytes(own.view(*placed))


def test_large_keys_are_in_a_slab_until_the_ticket_is_answered(pool: SlabPool, heap: WorkerHeap) -> None:
    """Small ones are in the message. The slab is used again."""
    heap.has_reader = True
    small, parts = [b"abc"], [b"x" * 10, bytes(range(256)) * 80, PickleBuffer(np.arange(5_000).data)]
    assert heap.place(1, 0, small) == b"abc"
    placed = heap.place(1, 1, parts)
    assert isinstance(placed, tuple)
    assert read(pool, placed) == b"".join(map(bytes, parts))
    (region,) = inside.written(heap)
    heap.answered((1, 0))
    assert inside.written(heap) == [region]
    heap.answered((1, 1))
    assert not inside.written(heap)
    assert heap.place(1, 2, parts) == placed
    assert not heap.returned()


def test_an_answer_frees_its_own_keys_and_those_of_earlier_runs(pool: SlabPool, heap: WorkerHeap) -> None:
    """In whichever order tickets are answered; an answer in a later run frees all before. No ticket is sent twice."""
    heap.has_reader = True
    parts = [bytes(100_000)]
    regions, wanted_bytes = {}, 102_400
    for run, ticket in ((1, 0), (1, 5), (1, 6), (2, 0), (2, 3)):
        heap.place(run, ticket, parts)
        regions[run, ticket] = inside.written(heap)[-1]
    with pytest.raises(AssertionError, match="ticket 5 of run 1"):
        heap.place(1, 5, parts)
    for ticket, left in (((1, 5), "10 16 20 23"), ((1, 5), "10 16 20 23"), ((2, 3), "20"), ((3, 9), "")):
        heap.answered(ticket)
        wanted = [regions[int(name[0]), int(name[1])] for name in left.split()]
        assert inside.written(heap) == wanted
        assert pool.own is not None
        assert pool.own.idle_bytes == (5 - len(wanted)) * wanted_bytes


def test_without_memory_or_reader_keys_are_in_the_message(pool: SlabPool, heap: WorkerHeap) -> None:
    """Over the budget; and for a worker that could not map the arena, or has not told yet that it has."""
    parts = [b"x" * 10, bytes(100_000)]
    assert heap.place(1, 0, parts) == b"".join(parts)
    poor = make_pool(50_000)
    of_poor = heap_for_a_worker(poor)
    of_poor.has_reader = True
    assert of_poor.place(1, 0, parts) == b"".join(parts)
    of_poor.reclaim()
    poor.close()
