"""Slabs of a batch that is made in slices: each worker writes the rows of its slice where they belong.

    an earlier batch ── columns_of ──> BatchSlabs, one slab for each large tensor ── rows ──> a ticket: Rows of it
    the batch <── whole: all rows are there <── tensors over these rows <── its outcome <──── the worker

Workers that find other tensors do not use them, and their slices are joined by copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from asyncloader.transport.free_list import Region
from asyncloader.transport.join import Columns
from asyncloader.transport.loans import Rows
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.tensors import held


class BatchSlabs:
    """The slabs of one batch, on lease as long as this or a tensor over them is there.

    Made on the loop thread; `whole` may be called by the one that joins.

    Args:
        columns: Slabs, each with a tensor over all of its rows.

    Attributes:
        memory: The memory of each slab, by its number.
    """

    def __init__(self, columns: Sequence[tuple[Region, memoryview, torch.Tensor]]) -> None:
        self._columns = [(region, tensor) for region, _, tensor in columns]
        self.memory = {region.number: memory for region, memory, _ in columns}

    def rows(self, begin: int, end: int) -> list[Rows]:
        """Return where the samples from ``begin`` to ``end`` are to be, as a worker is told it."""
        return [_rows(region, tensor, begin, end) for region, tensor in self._columns]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the tensor that these are the rows of, which lie back to back; None if there is none."""
        first, count = parts[0], sum(map(len, parts))
        for region, tensor in self._columns:
            if tensor.data_ptr() == first.data_ptr() and tensor.dtype is first.dtype and len(tensor) == count:
                region.is_fresh = False  # each writer has reserved its rows; nobody else looks at this during a lease
                return tensor
        return None


def _rows(region: Region, tensor: torch.Tensor, begin: int, end: int) -> Rows:
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
    made: list[tuple[Region, memoryview, torch.Tensor]] = []
    for dtype, row in columns:
        nbytes = count * prod(row) * dtype.itemsize
        region = pool.obtain(nbytes, may_carve=True)
        if region is None:
            return None
        is_fresh = region.is_fresh
        memory = pool.lease(region, nbytes)[:nbytes]
        region.is_fresh = is_fresh  # until all rows are written
        made.append((region, memory, held(torch.frombuffer(memory, dtype=dtype), memory).view(count, *row)))
    return BatchSlabs(made) if made else None
