"""Batches that are fetched as a whole, and not sample by sample, where the dataset allows it.

A dataset with ``collated = True`` says that its ``__getitems__`` returns a batch. In data that are in memory the rows
of a batch are found all at once:

    TensorDataset, ArrayDataset                  its rows
    Subset (random_split) of one of these        the rows that its indices name
    ConcatDataset of some                        those of each, and how they lie in the batch
    StackDataset of all these                    those of each, in a tuple or a dict

Nothing is remembered from batch to batch, so whoever changes tensors, indices or lists of datasets between two batches
gets what torch would give. What is not plainly the common case is left to be fetched sample by sample, as torch does:
keys that are no whole numbers, or out of range, tensors that require grad, subclasses with methods of their own. There
it raises, or is skipped, as it would have been.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from asyncloader.messages.indices import Indices, Numbers
from asyncloader.messages.messages import WorkerSpec
from asyncloader.protocols import has_samples, is_collated, seeds_samples
from asyncloader.transport.collate import is_default, stacks_tuples
from asyncloader.transport.whole import Column, Ready, Rows, Source, Tree

Array = NDArray[np.int64]

_METHODS = {
    kind: (kind.__getitem__, getattr(kind, "__getitems__", None))
    for kind in (TensorDataset, Subset, ConcatDataset, StackDataset)
}
_WHOLE_NUMBERS = frozenset({int, np.int64, np.int32, np.int16, np.int8, np.uint32, np.uint16, np.uint8})


class WholeBatches:
    """Knows whether batches of one dataset need no collating. Any thread may call it.

    Args:
        dataset: Map-style.
        spec: How batches are made of it. If the loader does not collate with torch's default, its function is given
            what torch would give it.

    Attributes:
        is_collated: ``__getitems__`` of the dataset returns a batch.
        is_in_memory: Batches may be gathered: `find` is worth a look.
        by_sample: Samples are asked for one by one though the dataset has ``__getitems__``.
    """

    def __init__(self, dataset: Any, spec: WorkerSpec) -> None:
        self.is_collated = spec.auto_collation and is_collated(dataset)
        self.by_sample = spec.knows_places and not (self.is_collated or seeds_samples(dataset)) and has_samples(dataset)
        self._dataset = dataset
        self._is_default = spec.auto_collation and is_default(spec.collate_fn)
        self.is_in_memory = gathers(dataset, spec.auto_collation, spec.collate_fn)

    def find(self, keys: Any) -> Rows | None:
        """Return the rows of a batch; None if its samples are to be fetched."""
        return rows_of(self._dataset, keys) if self.is_in_memory and stacks_tuples() else None

    def ready(self, samples: Any, keys: Any) -> Any:
        """Return what ``__getitems__`` returned of these keys, as a batch if that is what it is."""
        if not (self.is_collated and self._is_default):
            return samples
        return Ready(samples, len(keys) if hasattr(keys, "__len__") else 1)


def gathers(dataset: Any, auto_collation: bool, collate_fn: Any) -> bool:
    """Whether batches are gathered, as long as nothing about the dataset changes, and their keys may be arrays."""
    return auto_collation and is_default(collate_fn) and is_in_memory(dataset)


def is_in_memory(dataset: Any) -> bool:
    """Whether batches of a dataset may be found as a whole, by what it is made of."""
    kind = _kind(dataset)
    if kind is Subset:
        return is_in_memory(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(is_in_memory, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(is_in_memory, parts.values() if type(parts) is dict else parts))
    return kind is not None


def rows_of(dataset: Any, keys: Any) -> Rows | None:
    """Return the rows of a batch; None if it is to be fetched sample by sample."""
    try:
        tree = _tree(dataset, keys)
        return None if tree is None or not len(keys) else Rows(tree, len(keys))
    except Exception:  # it is raised by the sample that it is about
        return None


def _kind(dataset: Any) -> Any:
    """Return which of the classes above gets the samples of a dataset; None if it is another one."""
    for kind, methods in _METHODS.items():
        if isinstance(dataset, kind):
            return kind if _has_methods(dataset, *methods) else None
    # Looked for where it is if anybody has one: who has none, as most spawned workers, need not import it.
    arrays = sys.modules.get("asyncloader.datasets.arrays")
    if arrays is None or not isinstance(dataset, arrays.ArrayDataset):
        return None
    kind = arrays.ArrayDataset
    return kind if _has_methods(dataset, kind.__getitem__, kind.__getitems__) else None


def _has_methods(dataset: Any, getitem: Any, getitems: Any) -> bool:
    own = getattr(dataset, "__getitems__", None)
    is_same = not own if getitems is None else getattr(own, "__func__", None) is getitems
    return is_same and type(dataset).__getitem__ is getitem


def _tree(dataset: Any, keys: Any) -> Tree | None:
    """Return the columns of a batch; of stacked datasets those of each, as their samples are put together."""
    kind = _kind(dataset)
    if kind is Subset:
        return _tree(dataset.dataset, _picked(dataset.indices, keys))
    if kind is not StackDataset:
        return _columns(dataset, keys)
    parts = dataset.datasets
    if type(parts) not in (dict, tuple):
        return None
    names, members = zip(*(parts.items() if type(parts) is dict else enumerate(parts)), strict=True)
    trees = [_tree(member, keys) for member in members]
    if any(tree is None for tree in trees):
        return None
    return dict(zip(names, trees, strict=True)) if type(parts) is dict else tuple(trees)


def _columns(dataset: Any, keys: Any) -> list[Column] | None:
    kind = _kind(dataset)
    if kind is Subset:
        return _columns(dataset.dataset, _picked(dataset.indices, keys))
    if kind is ConcatDataset:
        return _columns_of_parts(dataset, keys)
    if kind is None or kind is StackDataset:
        return None
    sources = dataset.tensors if kind is TensorDataset else dataset.arrays
    length = sources[0].shape[0]
    numbers = _numbers(keys, length)
    if numbers is None:
        return None
    for source in sources:
        if source.shape[0] != length or not _is_plain(source):
            return None
    return [Column([(source, numbers)]) for source in sources]


def _picked(indices: Any, keys: Any) -> Any:
    """Return ``[indices[key] for key in keys]``."""
    if type(indices) is np.ndarray and indices.ndim == 1:
        numbers = _numbers(keys, len(indices))
        return None if numbers is None else indices[numbers]
    if type(keys) is np.ndarray:
        keys = keys.tolist()
    return itemgetter(*keys)(indices) if len(keys) > 1 else [indices[key] for key in keys]


def _columns_of_parts(dataset: ConcatDataset[Any], keys: Any) -> list[Column] | None:
    numbers = _numbers(keys, len(dataset))
    if numbers is None:
        return None
    ends = np.array(dataset.cumulative_sizes)
    parts = ends.searchsorted(numbers, side="right")
    if (parts == parts[0]).all():
        return _columns(dataset.datasets[parts[0]], _within(numbers, ends, parts[0]))
    by_part = parts.argsort(kind="stable")
    places = np.split(by_part, np.flatnonzero(np.diff(parts[by_part])) + 1)  # in the batch, of the rows of each part
    found = []
    for own in places:
        part = parts[own[0]]
        columns = _columns(dataset.datasets[part], _within(numbers[own], ends, part))
        if columns is None:
            return None
        found.append(columns)
    return _joined(found, by_part)


def _within(numbers: Array, ends: Array, part: Any) -> Array:
    return numbers - ends[part - 1] if part else numbers


def _joined(found: list[list[Column]], by_part: Array) -> list[Column] | None:
    """Make one column of those of several parts, whose rows are to be at the places ``by_part`` one after the other."""
    if len(set(map(len, found))) > 1:
        return None
    order = np.empty_like(by_part)
    order[by_part] = _in_order([columns[0] for columns in found])
    parts = [[part for column in columns for part in column.parts] for columns in zip(*found, strict=True)]
    are_alike = all(_are_alike([source for source, _ in of_column]) for of_column in parts)
    return [Column(of_column, order) for of_column in parts] if are_alike else None


def _in_order(columns: Sequence[Column]) -> Array:
    """Return, of all rows of these columns, one column after the other, the numbers in the order of each."""
    counts = [sum(len(numbers) for _, numbers in column.parts) for column in columns]
    begins = np.cumsum([0, *counts])
    orders = (np.arange(n) if c.order is None else c.order for n, c in zip(counts, columns, strict=True))
    return np.concatenate([begin + order for begin, order in zip(begins, orders, strict=False)])


def _numbers(keys: Any, count: int) -> Array | None:
    """Return keys as numbers from 0 on below ``count``; None if one of them is none."""
    numbers: Array | None
    if type(keys) is Numbers or type(keys) is Indices:
        numbers = keys.array
    elif type(keys) is np.ndarray:
        numbers = keys.astype(np.int64) if keys.ndim == 1 and keys.dtype.type in _WHOLE_NUMBERS else None
    elif type(keys) in (list, tuple, range) and _WHOLE_NUMBERS.issuperset(map(type, keys)):
        numbers = np.fromiter(keys, np.int64, len(keys))
    else:
        return None
    if numbers is None or not len(numbers):
        return None
    if int(numbers.view(np.uint64).max()) < count:  # negative ones are large then
        return numbers
    numbers = np.where(numbers < 0, numbers + count, numbers)
    return numbers if numbers.min() >= 0 and numbers.max() < count else None


def _is_plain(source: Source) -> bool:
    """Whether rows of it, gathered, are what torch makes by stacking rows taken one by one."""
    if type(source) is not torch.Tensor:
        return type(source) in (np.ndarray, np.memmap)
    return (
        source.layout is torch.strided
        and not (source.requires_grad or source.is_quantized or source.is_nested or source.is_conj() or source.is_neg())
        and (source.is_contiguous() or source[0].is_contiguous())
    )


def _are_alike(sources: list[Source]) -> bool:
    def form(source: Source) -> Any:
        return type(source), source.dtype, source.shape[1:], source.device if isinstance(source, torch.Tensor) else None

    first = form(sources[0])
    return all(form(source) == first for source in sources)
