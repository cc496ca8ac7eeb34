"""What a worker is lent beforehand: enough that it need not ask, and no more than pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pickle import PickleBuffer

import numpy as np
import pytest

from asyncloader.transport.loans import WorkerSlabs, capacity_for
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.worker_loans import WorkerLoans
from tests import inside

KiB, MiB = 1 << 10, 1 << 20


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    made = SlabPool(lambda reserved: 1 << 40)
    made.handle()
    yield made
    made.close()


@pytest.fixture
def loans(pool: SlabPool) -> Iterator[WorkerLoans]:
    """Those of a worker that has made no batch yet."""
    made = WorkerLoans(pool)
    yield made
    made.reclaim()


def held(loans: WorkerLoans) -> Counter[int]:
    """Return how many regions of which capacity are on loan."""
    return Counter(region.capacity for region in inside.lent(loans).values())


def make(loans: WorkerLoans, *sizes: int) -> None:
    """Make a batch with buffers of these sizes, as a worker would, and drop it."""
    for nbytes in sizes:
        fitting = [number for number, region in inside.lent(loans).items() if region.capacity == capacity_for(nbytes)]
        number = fitting[0] if fitting else loans.grant([nbytes], [])[0].number
        loans.open(number, nbytes, is_kept=False)
    loans.learn(sizes)


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [((64 * KiB,), 16), ((128 * KiB, 8 * KiB), 16), ((512 * KiB,), 8), ((2 * MiB,), 3), ((6 * MiB, 64 * KiB), 3)],
)
def test_as_many_batches_ahead_as_pays(loans: WorkerLoans, sizes: tuple[int, ...], batches: int) -> None:
    """Small ones up to 4 MiB together, and sixteen; large ones three; never more than there are tickets."""
    make(loans, *sizes)
    loans.lend(2)
    assert held(loans) == Counter({capacity_for(nbytes): 2 for nbytes in sizes})
    loans.lend(100)
    assert held(loans) == Counter({capacity_for(nbytes): batches for nbytes in sizes})
    assert loans.lend(100) == []


def test_what_was_used_is_lent_again(loans: WorkerLoans) -> None:
    """Of each capacity as much as has gone, whatever else is there."""
    for _ in range(20):
        make(loans, 128 * KiB, 128 * KiB, 16 * KiB)
        loans.lend(4)
        assert held(loans) == Counter({128 * KiB: 8, 16 * KiB: 4})


def test_what_a_worker_returns_is_no_longer_on_loan(loans: WorkerLoans) -> None:
    """It asks for something else, and names what it has no use for."""
    (useless,) = loans.grant([64 * KiB], [])
    loans.grant([128 * KiB], [useless.number])
    assert held(loans) == Counter({128 * KiB: 1})


def test_sizes_that_change(pool: SlabPool, loans: WorkerLoans) -> None:
    """The largest of the last few is likely, until so many were alike."""
    make(loans, 256 * KiB)
    for number in range(10):
        make(loans, 64 * KiB)
        (likely,) = loans.lend(1)
        assert likely.capacity == (256 * KiB if number < 7 else 64 * KiB)
        loans.given_up(likely.number)
        pool.trim()


def read(pool: SlabPool, placed: bytes | tuple[int, int]) -> bytes:
    """Read pickled keys, as a worker does."""
    slabs = WorkerSlabs(inside.arena(pool))
    return placed if isinstance(placed, bytes) else bytes(slabs.view(*placed))


def test_large_keys_are_in_a_slab_until_the_ticket_is_answered(pool: SlabPool, loans: WorkerLoans) -> None:
    """Small ones are in the message. The slab is used again."""
    loans.has_reader = True
    small, parts = [b"abc"], [b"x" * 10, bytes(range(256)) * 80, PickleBuffer(np.arange(5_000).data)]
    assert loans.place(1, 0, small) == b"abc"
    placed = loans.place(1, 1, parts)
    assert isinstance(placed, tuple)
    assert read(pool, placed) == b"".join(map(bytes, parts))
    (region,) = inside.written(loans)
    loans.answered((1, 0))
    assert inside.written(loans) == [region]
    loans.answered((1, 1))
    assert not inside.written(loans)
    assert not region.users
    assert loans.place(1, 2, parts) == placed
    assert not loans.lend(4)  # a slab with keys is not on loan
    loans.reclaim()
    assert not region.users


def test_an_answer_frees_its_own_keys_and_those_of_earlier_runs(pool: SlabPool, loans: WorkerLoans) -> None:
    """In whichever order tickets are answered; an answer in a later run frees all before. No ticket is sent twice."""
    loans.has_reader = True
    parts = [bytes(100_000)]
    regions = {}
    for run, ticket in ((1, 0), (1, 5), (1, 6), (2, 0), (2, 3)):
        loans.place(run, ticket, parts)
        regions[run, ticket] = inside.written(loans)[-1]
    with pytest.raises(AssertionError, match="ticket 5 of run 1"):
        loans.place(1, 5, parts)
    for ticket, left in (((1, 5), "10 16 20 23"), ((1, 5), "10 16 20 23"), ((2, 3), "20"), ((3, 9), "")):
        loans.answered(ticket)
        wanted = [regions[int(name[0]), int(name[1])] for name in left.split()]
        assert inside.written(loans) == wanted
        assert [bool(region.users) for region in regions.values()] == [each in wanted for each in regions.values()]


def test_without_memory_or_reader_keys_are_in_the_message(pool: SlabPool, loans: WorkerLoans) -> None:
    """Over the budget; and for a worker that could not map the arena, or has not told yet that it has."""
    parts = [b"x" * 10, bytes(100_000)]
    assert loans.place(1, 0, parts) == b"".join(parts)
    poor = SlabPool(lambda reserved: 50_000)
    poor.handle()
    of_poor = WorkerLoans(poor)
    of_poor.has_reader = True
    assert of_poor.place(1, 0, parts) == b"".join(parts)
    of_poor.reclaim()
    poor.close()
