"""Rows of one batch that several workers write into the same slabs, each its own.

    first slices ── samples, and what they are like ──> parent: Layout
    later ones <── Rows: layout, where the slabs are ── parent: Room, a slab for each large column
        └── sample i ──> row i of each column                └── all rows are there ──> the batch, without a copy

A column is one leaf of the samples, of all samples of the batch: a tensor, an array, a number. Small columns have one
slab together, and are copied out of it: a label that is kept should not keep the images. What is no row of anything
(texts) goes through the channel.

This is what torch's default collation makes of samples that are alike: same containers, and leaves of the same kind,
dtype and shape. Whatever else samples are, `layout_of` is None, and they are collated by torch's functions.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from asyncloader.transport.free_list import Region
from asyncloader.transport.loans import WorkerSlabs
from asyncloader.transport.tensors import INLINE_MAX, Array, carrier, numpy_dtypes

_ALIGNED = 64

Tree: TypeAlias = Any
"""The containers of a sample: a tuple of its kind and of what is in it; a leaf is its number."""


class Leaf(NamedTuple):
    """What one leaf of each sample is like.

    Attributes:
        kind: "tensor", "array", "number" (of numpy), "int", "float", "bool" or "text".
        dtype: Of the batch's tensor, as torch names it.
        shape: Of a sample's.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Of one row."""
        return self.torch_dtype.itemsize * math.prod(self.shape) if self.dtype else 0

    @property
    def stored(self) -> np.dtype[Any]:
        """As what numpy writes it: for dtypes that it does not know one of the same size."""
        return torch.empty(0, dtype=carrier(self.torch_dtype)).numpy().dtype


class Layout(NamedTuple):
    """What samples are like that are rows of one batch.

    Attributes:
        tree: Their containers.
        leaves: In the order in which `leaves_of` finds them.
    """

    tree: Tree
    leaves: tuple[Leaf, ...]


def layout_of(samples: Sequence[Any]) -> Layout | None:
    """Return what samples are like, if they are all alike; None if there are none, or they are not."""
    found = _look(samples[0]) if samples else None
    return found if found is not None and all(_look(sample) == found for sample in samples[1:]) else None


def _look(sample: Any) -> Layout | None:
    leaves: list[Leaf] = []
    tree = _tree(sample, leaves)
    return None if tree is None or not leaves else Layout(tree, tuple(leaves))


def _tree(thing: Any, leaves: list[Leaf]) -> Tree:
    kind = type(thing)
    if kind is dict:
        if not _KEYS.issuperset(map(type, thing)):
            return None
        members = [_tree(member, leaves) for member in thing.values()]
        return None if None in members else ("dict", tuple(thing), tuple(members))
    if kind is tuple or kind is list or (issubclass(kind, tuple) and _is_named(kind)):
        members = [_tree(member, leaves) for member in thing]
        if None in members or not members:
            return None
        return (kind.__name__, (), tuple(members)) if kind in (tuple, list) else ("named", kind, tuple(members))
    leaf = _leaf(thing, kind)
    if leaf is None:
        return None
    leaves.append(leaf)
    return ("leaf",)


@lru_cache(64)
def _is_named(kind: type) -> bool:
    """Whether this is a namedtuple that is made of its entries and nothing else, and that other processes know.

    Not one with a constructor of its own, which may refuse a batch: that is to be raised in a worker.
    """
    made = next(base for base in kind.__mro__ if tuple in base.__bases__)
    others = kind.__mro__[: kind.__mro__.index(made)]
    has_own = any({"__new__", "__init__"} & vars(base).keys() for base in others)
    if has_own or not hasattr(made, "_fields") or not hasattr(made, "_field_defaults"):
        return False
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return True


def _leaf(thing: Any, kind: type) -> Leaf | None:
    if kind is torch.Tensor:
        is_plain = (
            thing.layout is torch.strided
            and thing.device.type == "cpu"
            and not (thing.requires_grad or thing.is_quantized or thing.is_nested or thing.is_conj() or thing.is_neg())
        )
        dtype = str(thing.dtype).removeprefix("torch.") if is_plain and thing.numel() else ""
        return Leaf("tensor", dtype, tuple(thing.shape)) if dtype else None
    if kind is np.ndarray:
        itemsize = thing.itemsize  # torch takes no other strides
        has_rows = thing.size and all(stride >= 0 and stride % itemsize == 0 for stride in thing.strides)
        return Leaf("array", thing.dtype.name, thing.shape) if has_rows and thing.dtype in numpy_dtypes else None
    if kind in _NUMBERS:
        return Leaf(kind.__name__, _NUMBERS[kind], ()) if kind is not int or -(1 << 63) <= thing < 1 << 63 else None
    if isinstance(thing, np.generic):
        is_taken = thing.dtype in numpy_dtypes and kind is not np.uint64  # which torch takes in arrays only
        return Leaf("number", thing.dtype.name, ()) if is_taken else None
    if kind is str or kind is bytes:
        return Leaf("text", "", ())
    return None


_KEYS = frozenset({str, int, bytes, bool, type(None)})
_NUMBERS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


def leaves_of(thing: Any, tree: Tree) -> list[Any]:
    """Return the leaves of a sample whose containers are these."""
    if tree[0] == "leaf":
        return [thing]
    members = thing.values() if tree[0] == "dict" else thing
    return [leaf for member, part in zip(members, tree[2], strict=True) for leaf in leaves_of(member, part)]


def rebuilt(tree: Tree, leaves: list[Any], *, as_batch: bool) -> Any:
    """Return the containers with these leaves, which are taken from the list; in a batch plain tuples are lists."""
    if tree[0] == "leaf":
        return leaves.pop(0)
    members = [rebuilt(part, leaves, as_batch=as_batch) for part in tree[2]]
    if tree[0] == "dict":
        return dict(zip(tree[1], members, strict=True))
    if as_batch:  # torch transposes tuples and lists with `zip`, and leaves texts as they are then
        are_texts = (part[0] == "leaf" and type(member) is list for part, member in zip(tree[2], members, strict=True))
        members = [tuple(member) if is_text else member for member, is_text in zip(members, are_texts, strict=True)]
    if tree[0] == "named":
        return tree[1](*members)
    return members if as_batch or tree[0] == "list" else tuple(members)


class Column(NamedTuple):
    """Where the rows of one leaf are.

    Attributes:
        slab: Which of the slabs of the batch; -1 for texts.
        offset: In it.
    """

    slab: int
    offset: int


def columns_of(layout: Layout, count: int) -> tuple[list[Column], list[int]]:
    """Return where the columns of a batch of so many samples are, and how large the slabs have to be.

    A large column has a slab of its own; all small ones have one together, the last.
    """
    columns: list[Column] = []
    sizes: list[int] = []
    small = 0
    num_large = sum(leaf.nbytes * count > INLINE_MAX for leaf in layout.leaves)
    for leaf in layout.leaves:
        nbytes = leaf.nbytes * count
        if leaf.kind == "text":
            columns.append(Column(-1, 0))
        elif nbytes > INLINE_MAX:
            columns.append(Column(len(sizes), 0))
            sizes.append(nbytes)
        else:
            columns.append(Column(num_large, small))
            small += -(-nbytes // _ALIGNED) * _ALIGNED
    return columns, sizes + [small] * bool(small)


class Rows(NamedTuple):
    """Where a worker is to write rows, or finds some.

    Attributes:
        layout: What samples have to be like.
        size: Of the whole batch: samples.
        places: Of its slabs: number, offset in the arena, capacity, whether memory is to be reserved first.
    """

    layout: Layout
    size: int
    places: tuple[tuple[int, int, int, bool], ...]

    def write(self, slabs: WorkerSlabs, samples: Sequence[Any], begin: int) -> list[list[Any]] | None:
        """Write samples into rows from ``begin`` on.

        Returns:
            The texts among them, column by column; None if nothing was written: samples are unlike the layout, or there
            is no memory.
        """
        if layout_of(samples) != self.layout:
            return None
        columns, _ = columns_of(self.layout, self.size)
        end = begin + len(samples)
        if not all(self._reserve(slabs, *pair, begin, end) for pair in zip(columns, self.layout.leaves, strict=True)):
            return None
        views = [view_of(self._memory(slabs, each), each, leaf, self.size) for each, leaf in self._columns(columns)]
        texts: list[list[Any]] = [[] for leaf in self.layout.leaves if leaf.kind == "text"]
        for row, sample in enumerate(samples, begin):
            numbers = iter(views)
            words = iter(texts)
            for thing, leaf in zip(leaves_of(sample, self.layout.tree), self.layout.leaves, strict=True):
                if leaf.kind == "text":
                    next(words).append(thing)
                else:
                    next(numbers)[row] = _as_array(thing) if leaf.kind == "tensor" else thing
        return texts

    def read(self, slabs: WorkerSlabs, begin: int, end: int, texts: list[list[Any]], *, is_private: bool) -> list[Any]:
        """Return samples that were written into these rows; of memory of their own, or that of the slabs."""
        columns, _ = columns_of(self.layout, self.size)
        views = iter(
            [view_of(self._memory(slabs, each), each, leaf, self.size) for each, leaf in self._columns(columns)]
        )
        words = iter(texts)
        by_leaf = []
        for leaf in self.layout.leaves:
            if leaf.kind == "text":
                by_leaf.append(next(words))
            else:
                rows = next(views)[begin:end]
                by_leaf.append([_as_sample(row, leaf) for row in (rows.copy() if is_private else rows)])
        return [rebuilt(self.layout.tree, list(leaves), as_batch=False) for leaves in zip(*by_leaf, strict=True)]

    def _columns(self, columns: list[Column]) -> list[tuple[Column, Leaf]]:
        return [(each, leaf) for each, leaf in zip(columns, self.layout.leaves, strict=True) if each.slab >= 0]

    def _memory(self, slabs: WorkerSlabs, column: Column) -> memoryview:
        _, offset, capacity, _ = self.places[column.slab]
        return slabs.view(offset, capacity)

    def _reserve(self, slabs: WorkerSlabs, column: Column, leaf: Leaf, begin: int, end: int) -> bool:
        if column.slab < 0 or not self.places[column.slab][3]:
            return True
        at = self.places[column.slab][1] + column.offset + begin * leaf.nbytes
        return slabs.reserve(at, (end - begin) * leaf.nbytes)


def view_of(memory: Any, column: Column, leaf: Leaf, count: int) -> Array:
    """Return the rows of a column, in the memory of its slab."""
    return np.ndarray((count, *leaf.shape), leaf.stored, memory, column.offset)


def _as_array(tensor: torch.Tensor) -> Array:
    return tensor.view(carrier(tensor.dtype)).numpy()


def _as_sample(row: Any, leaf: Leaf) -> Any:
    if leaf.kind == "tensor":
        return torch.from_numpy(np.asarray(row)).view(leaf.torch_dtype)
    if leaf.kind == "array":
        return np.asarray(row)
    return row if leaf.kind == "number" else row.item()


class RowsOf(NamedTuple):
    """Samples that were written into some rows.

    Attributes:
        rows: Those of the batch; in the parent its `Room`.
        begin: The first of them.
        end: Where they end.
        texts: Those among the samples, by column.
    """

    rows: Any
    begin: int
    end: int
    texts: list[list[Any]]

    @property
    def regions(self) -> list[Region]:
        """That they are in. In the parent."""
        regions: list[Region] = self.rows.regions
        return regions

    def read(self, slabs: WorkerSlabs | None, *, is_private: bool) -> list[Any]:
        """Return the samples. In a worker."""
        assert slabs is not None
        samples: list[Any] = self.rows.read(slabs, self.begin, self.end, self.texts, is_private=is_private)
        return samples
