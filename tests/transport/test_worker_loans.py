"""What a worker is lent beforehand: enough that it need not ask, and no more than pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from asyncloader.transport.loans import capacity_for
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
