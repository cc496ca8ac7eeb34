"""Rows that several workers write into one batch: as torch collates them, or not at all."""

from __future__ import annotations

from collections import namedtuple
from itertools import chain, pairwise
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import default_collate

from asyncloader.transport.loans import WorkerSlabs
from asyncloader.transport.room import Room, make_room
from asyncloader.transport.rows import RowsOf, layout_of
from asyncloader.transport.slab import SlabPool
from tests.sameness import same
from tests.transport.wire import make_pool

Point = namedtuple("Point", ["x", "label"])
Other = namedtuple("Other", ["x", "label"])


class Named(NamedTuple):
    """A namedtuple with a method, and a default."""

    point: Any
    weight: float = 1.0

    def half(self) -> float:
        return self.weight / 2


class Checked(namedtuple("_Checked", ["x", "label"])):
    """A namedtuple that refuses batches."""

    def __new__(cls, x: Any, label: Any) -> Checked:
        """Make one of two numbers."""
        assert type(x) is int
        return super().__new__(cls, x, label)


class Counted(tuple):  # type: ignore[type-arg]
    """A tuple with a class of its own, of which torch makes another one."""


ROWS = [
    lambda i: torch.full((100, 100), float(i)),
    lambda i: torch.full((3, 4), i, dtype=torch.bfloat16),
    lambda i: torch.tensor(i % 2 == 0),
    lambda i: torch.full((2, 3, 8, 8), float(i)).to(memory_format=torch.channels_last),
    lambda i: torch.arange(20 + i)[i::2][:5],
    lambda i: np.full((100, 300), i, np.uint8),
    lambda i: np.array(i),
    lambda i: np.asfortranarray(np.full((3, 5), i, np.complex64)),
    lambda i: i,
    lambda i: i / 3,
    lambda i: i % 2 == 0,
    lambda i: np.float32(i),
    lambda i: f"sample {i}",
    lambda i: bytes([i]),
    lambda i: (torch.full((200, 100), float(i)), i, f"{i}.jpg"),
    lambda i: Point(torch.full((100, 200), float(i)), f"{i}.jpg"),
    lambda i: {"both": [Named(Point(i, (i, "text"))), Named(Point(1.5, (i, "more")))]},
    lambda i: {"image": torch.full((100, 200), i), "meta": {"box": [1.5, i], "name": str(i)}, "pair": (i, (i, [i]))},
]

NO_ROWS = [
    lambda i: torch.zeros(i + 1),
    lambda i: torch.zeros(0, 3),
    lambda i: torch.zeros(3, requires_grad=True),
    lambda i: torch.zeros(3).to_sparse(),
    lambda i: torch.zeros(3, dtype=torch.complex64).conj(),
    lambda i: torch.nn.Parameter(torch.zeros(3)),
    lambda i: np.zeros(3)[::-1],
    lambda i: np.zeros(3, [("x", "f4"), ("flag", "u1")])["x"],  # torch refuses such strides
    lambda i: np.uint64(i),  # and these, but for arrays of them
    lambda i: np.array(["text"]),
    lambda i: i if i % 2 else float(i),
    lambda i: torch.zeros(3, dtype=torch.float64 if i % 2 else torch.float32),
    lambda i: 1 << 70,
    lambda i: None,
    lambda i: object(),
    lambda i: [],
    lambda i: {"a": i} if i % 2 else {"b": i},
    lambda i: {"a": i, "b": i} if i % 2 else {"b": i, "a": i},
    lambda i: (i, i) if i % 2 else [i, i],
    lambda i: Point(i, i) if i % 2 else (i, i),
    lambda i: Point(i, i) if i % 2 else Other(i, i),
    lambda i: Checked(i, i),
    lambda i: Counted((i, i)),
    lambda i: namedtuple("Unknown", "x label")(i, i),  # no other process would find it
]


@pytest.fixture
def slabs(pool: SlabPool) -> WorkerSlabs:
    """What a worker sees of the pool, in this process."""
    handle = pool.handle()
    assert handle is not None
    attached = handle.attach()
    assert attached is not None
    return attached


def written(pool: SlabPool, slabs: WorkerSlabs, samples: list[Any], bounds: list[int]) -> tuple[Room, list[RowsOf]]:
    """Have samples written by several workers, the last one first."""
    layout = layout_of(samples)
    assert layout is not None
    room = make_room(pool, layout, len(samples))
    assert room is not None
    parts = []
    for begin, end in reversed(list(pairwise(bounds))):
        texts = room.rows().write(slabs, samples[begin:end], begin)
        assert texts is not None
        parts.append(RowsOf(room.rows(), begin, end, texts))
    return room, parts[::-1]


@pytest.mark.parametrize("kind", range(len(ROWS)))
def test_rows_are_what_torch_collates(kind: int, pool: SlabPool, slabs: WorkerSlabs) -> None:
    """The same batch, also in how its tensors lie in memory; and the slabs are free when it is gone."""
    samples = [ROWS[kind](i) for i in range(7)]
    room, parts = written(pool, slabs, samples, [0, 2, 3, 7])
    batch = room.batch([list(chain(*texts)) for texts in zip(*(part.texts for part in parts), strict=True)])
    expected = default_collate(samples)
    del room
    assert same(batch, expected)
    if isinstance(batch, torch.Tensor):
        assert batch.is_contiguous()
        assert batch.untyped_storage().nbytes() == batch.nbytes
    batch = None
    pool.turn()
    assert pool.statistics().leased == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("kind", range(len(ROWS)))
def test_samples_can_be_read_again(kind: int, is_private: bool, pool: SlabPool, slabs: WorkerSlabs) -> None:
    """Where others of the batch are unlike them: types, values, and memory of their own if that is wanted."""
    samples = [ROWS[kind](i) for i in range(5)]
    room, parts = written(pool, slabs, samples, [0, 2, 5])
    again = [sample for part in parts for sample in part.read(slabs, is_private=is_private)]
    assert same(again, samples)
    del parts
    if is_private:
        del room
        pool.trim()
        assert same(again, samples)


@pytest.mark.parametrize("kind", range(len(NO_ROWS)))
def test_what_are_no_rows(kind: int) -> None:
    """Shapes, dtypes and types that differ, and whatever torch's functions have their own ideas about."""
    assert layout_of([NO_ROWS[kind](i) for i in range(1, 4)]) is None


def test_samples_that_differ_are_not_written(pool: SlabPool, slabs: WorkerSlabs) -> None:
    """The whole slice is told to be unlike."""
    layout = layout_of([torch.zeros(3)])
    assert layout is not None
    room = make_room(pool, layout, 4)
    assert room is not None
    assert room.rows().write(slabs, [torch.zeros(3), torch.zeros(4)], 0) is None
    assert room.rows().write(slabs, [torch.zeros(3, dtype=torch.int64)], 0) is None


def test_a_label_that_is_kept_does_not_keep_the_images(pool: SlabPool, slabs: WorkerSlabs) -> None:
    """Small columns are copies; each large one has a slab of its own."""
    samples = [(torch.zeros(100, 300), torch.ones(100, 300), i) for i in range(4)]
    room, _ = written(pool, slabs, samples, [0, 4])
    one, other, labels = room.batch([])
    del room
    pool.turn()
    both = pool.statistics().leased
    del one
    pool.turn()
    assert pool.statistics().leased == both // 2
    del other
    pool.turn()
    assert pool.statistics().leased == 0
    assert labels.tolist() == [0, 1, 2, 3]


def test_no_room_is_no_error(slabs: WorkerSlabs) -> None:
    """Over the budget nothing is kept back either."""
    pool = make_pool(1 << 20)
    pool.handle()
    layout = layout_of([(torch.zeros(1 << 16), torch.zeros(1 << 20))])
    assert layout is not None
    assert make_room(pool, layout, 2) is None
    pool.close()


@given(st.integers(1, 9), st.data())
def test_any_division(count: int, data: st.DataObject) -> None:
    """Whoever writes which rows, in whatever order."""
    cuts = data.draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count - 1)) if count > 1 else set()
    pool = make_pool()
    handle = pool.handle()
    assert handle is not None
    slabs = handle.attach()
    assert slabs is not None
    samples = [(torch.full((50, 500), float(i)), i) for i in range(count)]
    room, _ = written(pool, slabs, samples, [0, *sorted(cuts), count])
    assert same(room.batch([]), default_collate(samples))
    del room
    pool.close()
