"""Slabs that several workers write the slices of a batch into: the batch is there with the last of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from asyncloader.transport import batch_slabs, collate
from asyncloader.transport.batch_slabs import BatchSlabs
from asyncloader.transport.codec import Encoder
from asyncloader.transport.join import CannotJoin, CollatedSlice, collated, columns_of, join
from asyncloader.transport.loans import WorkerSlabs
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.worker_loans import WorkerLoans
from tests import inside
from tests.effort import examples
from tests.sameness import same
from tests.transport.wire import make_pool


class Worker:
    """A worker and the parent's record of it, in this process."""

    def __init__(self, pool: SlabPool) -> None:
        handle = pool.handle()
        assert handle is not None
        slabs = WorkerSlabs(handle)
        self.loans = WorkerLoans(pool)
        slabs.ask = self.loans.grant
        self.encoder = Encoder(slabs)
        self.stacker = collate.install(self.encoder)

    def make(self, samples: list[Any], slabs: BatchSlabs | None, begin: int, *, is_shown: bool = True) -> CollatedSlice:
        """Collate a slice of a batch, and have it sent to the parent."""
        rows = () if slabs is None else pickle.loads(pickle.dumps(slabs.rows(begin, begin + len(samples))))
        self.encoder.name_rows(rows)
        self.stacker.min_bytes = 0 if rows else 1 << 16
        with self.encoder:
            data = default_collate(samples)
        parts = self.encoder.encode(collated(samples, data, default_collate))
        del data
        self.encoder.release()
        payload = b"".join(bytes(part) for part in parts)
        if slabs is not None and is_shown:
            self.loans.show((1, begin), slabs)
        found: CollatedSlice = self.loans.decode(payload)[0]
        self.loans.answered((1, begin))
        return found


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a worker for a while: our entries are in torch's map, and torch thinks so too."""
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", dict(torch_collate.default_collate_fn_map))
    monkeypatch.setattr(torch_worker, "_worker_info", object())


@pytest.fixture
def worker(pool: SlabPool, in_worker: None) -> Iterator[Worker]:
    made = Worker(pool)
    yield made
    made.loans.reclaim()


def made_of(
    worker: Worker, pool: SlabPool, samples: list[Any], bounds: list[int], like: list[Any] | None = None
) -> tuple[Any, BatchSlabs | None]:
    """Have slices made, the last one first, and joined; in slabs for a batch of such samples."""
    columns = columns_of(default_collate(like or samples))
    slabs = batch_slabs.obtain(pool, columns, len(samples))
    parts = [worker.make(samples[begin:end], slabs, begin) for begin, end in reversed(list(pairwise(bounds)))]
    return join(parts[::-1], slabs and slabs.whole), slabs


KINDS: list[Any] = [
    lambda i: torch.full((100, 100), float(i)),
    lambda i: torch.full((100, 300), i, dtype=torch.bfloat16),
    lambda i: torch.full((2, 3, 64, 64), float(i)).to(memory_format=torch.channels_last),
    lambda i: np.full((100, 300), i, np.uint8),
    lambda i: np.asfortranarray(np.full((300, 50), i, np.complex64)),
    lambda i: (torch.full((100, 100), float(i)), torch.full((100, 100), -float(i)), i, str(i)),
    lambda i: {"image": torch.full((200, 100), i), "label": i},
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_batch_is_made_where_it_is(kind: int, worker: Worker, pool: SlabPool) -> None:
    """As torch collates it; each large tensor has a slab of its own, and nothing else is on lease."""
    samples = [KINDS[kind](i) for i in range(7)]
    batch, slabs = made_of(worker, pool, samples, [0, 3, 5, 6, 7])
    assert slabs is not None
    assert same(batch, default_collate(samples))
    assert pool.statistics().leased == sum(memory.nbytes for memory in slabs.memory.values()) + slack(pool, slabs)
    slabs = batch = None
    pool.turn()
    assert pool.statistics().leased == 0


def slack(pool: SlabPool, slabs: BatchSlabs) -> int:
    """Return what the slabs are larger than the tensors in them."""
    return sum(inside.region(pool, number).capacity - memory.nbytes for number, memory in slabs.memory.items())


def test_a_label_that_is_kept_does_not_keep_the_images(worker: Worker, pool: SlabPool) -> None:
    """Nor does one image tensor keep the other."""
    (one, other, labels, names), slabs = made_of(worker, pool, [KINDS[5](i) for i in range(4)], [0, 2, 4])
    del slabs
    both = pool.statistics().leased
    del one
    pool.turn()
    assert pool.statistics().leased == both // 2
    del other
    pool.turn()
    assert pool.statistics().leased == 0
    assert (labels.tolist(), names) == ([0, 1, 2, 3], ("0", "1", "2", "3"))


@pytest.mark.parametrize(
    "samples",
    [
        [
            {"a": torch.zeros(200, 100), "b": torch.ones(200, 100)},
            {"b": torch.ones(200, 100), "a": torch.zeros(200, 100)},
        ],
        [torch.zeros(200, 100, dtype=torch.float64)] * 2,
        [torch.zeros(100, 100)] * 2,
    ],
    ids=["columns of one shape in another order", "dtype", "shape"],
)
def test_samples_that_are_unlike_those_before_are_joined_by_copying(
    samples: list[Any], worker: Worker, pool: SlabPool
) -> None:
    """The slabs are not used then, or not in the order that the batch needs."""
    like = [samples[0] if isinstance(samples[0], dict) else torch.zeros(200, 100)] * 2
    batch, _ = made_of(worker, pool, samples, [0, 1, 2], like)
    assert same(batch, default_collate(samples))


def test_slices_that_differ_are_not_joined(worker: Worker, pool: SlabPool) -> None:
    """Although each of them could be made."""
    with pytest.raises(CannotJoin):
        made_of(worker, pool, [torch.zeros(200, 100), torch.zeros(200, 101)], [0, 1, 2], [torch.zeros(200, 100)] * 2)


def test_without_memory_for_its_rows_a_worker_makes_a_slice_elsewhere(
    worker: Worker, pool: SlabPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be reserved is not written to."""
    monkeypatch.setattr(WorkerSlabs, "reserve", lambda *arguments: False)
    samples = [KINDS[0](i) for i in range(4)]
    batch, _ = made_of(worker, pool, samples, [0, 2, 4])
    assert same(batch, default_collate(samples))


def test_over_the_budget_there_are_none() -> None:
    """Nor is anything kept back of those that there were."""
    pool = make_pool(1 << 20)
    pool.handle()
    columns = ((torch.float32, (1 << 16,)), (torch.float32, (1 << 20,)))
    assert batch_slabs.obtain(pool, columns, 2) is None
    pool.turn()
    assert pool.statistics().leased == 0
    pool.close()


def test_a_slab_that_was_not_shown_is_none_of_the_workers(worker: Worker, pool: SlabPool) -> None:
    """Whatever its payload says."""
    slabs = batch_slabs.obtain(pool, ((torch.float32, (100, 100)),), 4)
    with pytest.raises(LookupError):
        worker.make([KINDS[0](0)], slabs, 0, is_shown=False)


def test_a_worker_that_may_still_write_keeps_the_slabs(worker: Worker, pool: SlabPool) -> None:
    """Until it has answered, begins another run, or is gone."""
    slabs = batch_slabs.obtain(pool, ((torch.float32, (100, 100)),), 4)
    assert slabs is not None
    worker.loans.show((1, 0), slabs)
    del slabs
    pool.turn()
    assert pool.statistics().leased > 0
    worker.loans.answered((1, 7))
    pool.turn()
    assert pool.statistics().leased > 0
    worker.loans.answered((2, 0))
    pool.turn()
    assert pool.statistics().leased == 0


@pytest.mark.usefixtures("in_worker")
@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 9), data=st.data())
def test_any_division_gives_the_whole_batch(count: int, data: st.DataObject) -> None:
    """Slices of any size, one batch after the other in the same slabs."""
    cuts = data.draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count - 1)) if count > 1 else set()
    pool = make_pool()
    worker = Worker(pool)
    for number in range(2):
        samples = [(torch.full((50, 500), float(i + number)), i) for i in range(count)]
        batch, slabs = made_of(worker, pool, samples, [0, *sorted(cuts), count])
        assert same(batch, default_collate(samples))
        del batch, slabs
    worker.loans.reclaim()
    pool.close()
