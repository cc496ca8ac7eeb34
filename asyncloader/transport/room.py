"""The slabs of a batch that several workers write into, in the parent: see :mod:`asyncloader.transport.rows`."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from asyncloader.transport.free_list import Region
from asyncloader.transport.rows import Layout, Rows, columns_of, rebuilt, view_of
from asyncloader.transport.slab import SlabPool
from asyncloader.transport.tensors import INLINE_MAX, held

_BATCH = "batch"  # a user of regions


class Room:
    """The slabs of a batch that is written row by row, in the parent: on lease, first to nobody, then to the batch.

    Args:
        layout: Of its samples.
        count: How many these are.
        regions: Its slabs.
        memories: Of these.

    Attributes:
        nbytes: Of the batch.
    """

    def __init__(self, layout: Layout, count: int, regions: list[Region], memories: list[memoryview]) -> None:
        self.layout = layout
        self.count = count
        self.nbytes = count * sum(leaf.nbytes for leaf in layout.leaves)
        self.regions = regions
        self._memories = memories
        self._pickled = b""

    def __reduce__(self) -> Any:
        if not self._pickled:  # all slices of the batch are told the same
            self._pickled = pickle.dumps(self.rows(), 5)
        return pickle.loads, (self._pickled,)

    def rows(self) -> Rows:
        """Return what a worker has to know of it."""
        places = tuple((each.number, each.offset, each.capacity, each.is_fresh) for each in self.regions)
        return Rows(self.layout, self.count, places)

    def batch(self, texts: list[list[Any]]) -> Any:
        """Return the batch: all rows are there.

        Args:
            texts: By column of texts, those of all samples.
        """
        columns, sizes = columns_of(self.layout, self.count)
        for region in self.regions:
            region.is_fresh = False
        has_small = any(0 < leaf.nbytes * self.count <= INLINE_MAX for leaf in self.layout.leaves)
        words = iter(texts)
        leaves: list[Any] = []
        for column, leaf in zip(columns, self.layout.leaves, strict=True):
            if column.slab < 0:
                leaves.append(next(words))
                continue
            memory = self._memories[column.slab]
            if has_small and column.slab == len(sizes) - 1:
                made = torch.from_numpy(view_of(memory, column, leaf, self.count).copy())
            else:
                memory = memory[: leaf.nbytes * self.count]
                made = held(torch.from_numpy(view_of(memory, column, leaf, self.count)), memory)
            leaves.append(made if made.dtype is leaf.torch_dtype else made.view(leaf.torch_dtype))
        return rebuilt(self.layout.tree, leaves, as_batch=True)


def make_room(pool: SlabPool, layout: Layout, count: int) -> Room | None:
    """Return slabs for a batch of so many samples; None if that is over the budget, or there are none. Loop thread."""
    _, sizes = columns_of(layout, count)
    pool.turn()
    regions: list[Region] = []
    for nbytes in sizes:
        region = pool.obtain(nbytes, may_carve=True)
        if region is None:
            for other in regions:
                pool.release(other, _BATCH)
            return None
        region.users.add(_BATCH)
        regions.append(region)
    memories = []
    for region, nbytes in zip(regions, sizes, strict=True):
        is_fresh = region.is_fresh
        memories.append(pool.lease(region, nbytes))
        region.is_fresh = is_fresh  # until all rows are written
        region.users.discard(_BATCH)
    return Room(layout, count, regions, memories)
