"""Slabs of a batch that is made in slices: each worker writes the rows of its slice where they belong.

    an earlier batch ── columns_of ──> BatchSlabs, one slab for each large tensor ── rows ──> a ticket: Rows of it
    the batch <── whole: all rows are there <── tensors over these rows <── its outcome <──── the worker

Workers that find other tensors do not use them, and their slices are joined by copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from asyncloader.transport.free_list import Region
from asyncloader.transport.join import Columns
from asyncloader.transport.loans import Rows
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.tensors import held


class _Column(NamedTuple):
    region: Region
    memory: memoryview
    tensor: torch.Tensor  # over all rows


class BatchSlabs:
    """The slabs of one batch, on lease as long as this or a tensor over them is there.

    Made on the loop thread; `whole` may be called by the one that joins.

    Args:
        columns: Slabs with a tensor over each.

    Attributes:
        memory: The memory of each slab, by its number.
    """

    def __init__(self, columns: Sequence[_Column]) -> None:
        self._columns = columns
        self.memory = {column.region.number: column.memory for column in columns}

    def rows(self, begin: int, end: int) -> RowsOfSlice:
        """Return where the samples from ``begin`` to ``end`` are to be."""
        return RowsOfSlice(self, begin, end)

    def named(self, begin: int, end: int) -> list[Rows]:
        """Return the same as a worker is told it."""
        return [_rows(column, begin, end) for column in self._columns]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the tensor that these are the rows of; they lie back to back."""
        first, count = parts[0], sum(map(len, parts))
        for region, _, tensor in self._columns:
            if tensor.data_ptr() == first.data_ptr() and tensor.dtype is first.dtype and len(tensor) == count:
                region.is_fresh = False  # each writer has reserved its rows. Nobody else looks at this during a lease
                return tensor
        return None


class RowsOfSlice:
    """The rows of a slice, on their way to a worker: there a tuple of `Rows`.

    Args:
        slabs: Of the batch.
        begin: The first of its samples.
        end: Where they end.
    """

    def __init__(self, slabs: BatchSlabs, begin: int, end: int) -> None:
        self.slabs = slabs
        self._bounds = begin, end

    def __reduce__(self) -> Any:
        return tuple, (self.slabs.named(*self._bounds),)


def _rows(column: _Column, begin: int, end: int) -> Rows:
    region, _, tensor = column
    shape = tensor.shape[1:]
    each = prod(shape) * tensor.itemsize
    first, nbytes = begin * each, (end - begin) * each
    # Whoever gets the slab next may use all of it, so the writer of the last rows reserves what is behind them too.
    to_reserve = region.capacity - first if end == len(tensor) else nbytes
    return Rows(
        tensor.dtype, (end - begin, *shape), region.number, first, region.offset + first, nbytes,
        to_reserve if region.is_fresh else 0,
    )  # fmt: skip


def obtain(pool: SlabPool, columns: Columns, count: int) -> BatchSlabs | None:
    """Return slabs for a batch of so many samples with these large tensors; None if there is no memory for it.

    On the loop thread.
    """
    pool.turn()
    made: list[_Column] = []
    for dtype, row in columns:
        nbytes = count * prod(row) * dtype.itemsize
        region = pool.obtain(nbytes, may_carve=True)
        if region is None:
            return None
        is_fresh = region.is_fresh
        memory = pool.lease(region, nbytes)[:nbytes]
        region.is_fresh = is_fresh  # until all rows are written
        tensor = held(torch.frombuffer(memory, dtype=dtype), memory).view(count, *row)
        made.append(_Column(region, memory, tensor))
    return BatchSlabs(made) if made else None
