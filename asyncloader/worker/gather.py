"""Batches that are fetched as a whole, and not sample by sample, where the dataset allows it.

A dataset with ``collated = True`` says that its ``__getitems__`` returns a batch. In data that are in memory the rows
of a batch are found all at once:

    TensorDataset                                its rows
    Subset (random_split) of one of these        the rows that its indices name
    ConcatDataset of some                        those of each, and how they lie in the batch
    StackDataset of all these                    those of each, in a tuple or a dict

Nothing is remembered from batch to batch, so whoever changes tensors, indices or lists of datasets between two batches
gets what torch would give. All other cases are fetched sample by sample, as torch does: keys that are no whole numbers,
or out of range, tensors that require grad, subclasses with methods of their own. Each such sample then raises, or is
skipped, as it would have been.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from asyncloader.messages.indices import Indices, Numbers
from asyncloader.messages.messages import WorkerSpec
from asyncloader.protocols import has_samples, is_collated, seeds_samples
from asyncloader.transport.collate import is_default, stacks_tuples
from asyncloader.transport.whole import Column, Source, Tree, Whole, ready, rows_in_memory

Array = NDArray[np.int64]
_Piece: TypeAlias = "tuple[Sequence[Source], Array, Array | None]"
"""Rows of one dataset: its tensors or arrays, the numbers of the rows, and their places in the batch."""

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

    def find(self, keys: Any) -> Whole | None:
        """Return the rows of a batch; None if its samples are to be fetched."""
        return rows_of(self._dataset, keys) if self.is_in_memory and stacks_tuples() else None

    def ready(self, samples: Any, keys: Any) -> Any:
        """Return what ``__getitems__`` returned of these keys, as a batch if that is what it is."""
        if not (self.is_collated and self._is_default):
            return samples
        return ready(samples, len(keys) if hasattr(keys, "__len__") else 1)


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


def rows_of(dataset: Any, keys: Any) -> Whole | None:
    """Return the rows of a batch; None if it is to be fetched sample by sample."""
    try:
        return rows_in_memory(_tree(dataset, keys), len(keys)) if len(keys) else None
    except Exception:  # what it is about is raised by its sample
        return None


def _kind(dataset: Any) -> Any:
    """Return which of the classes above gets the samples of a dataset; None if it is another one."""
    for kind, methods in _METHODS.items():
        if isinstance(dataset, kind):
            return kind if _has_methods(dataset, *methods) else None
    return None


def _has_methods(dataset: Any, getitem: Any, getitems: Any) -> bool:
    own = getattr(dataset, "__getitems__", None)
    is_same = not own if getitems is None else getattr(own, "__func__", None) is getitems
    return is_same and type(dataset).__getitem__ is getitem


def _tree(dataset: Any, keys: Any) -> Tree:
    """Return the columns of a batch; of stacked datasets those of each, as their samples are put together.

    Raises:
        LookupError: the samples have to be fetched one by one.
    """
    kind = _kind(dataset)
    if kind is Subset:
        return _tree(dataset.dataset, _picked(dataset.indices, keys))
    if kind is not StackDataset:
        return _columns([*_pieces(dataset, keys)])
    members = dataset.datasets
    if type(members) is dict:
        return {name: _tree(member, keys) for name, member in members.items()}
    if type(members) is tuple:
        return tuple(_tree(member, keys) for member in members)
    raise LookupError


def _pieces(dataset: Any, keys: Any, places: Array | None = None) -> Iterator[_Piece]:
    """Yield the rows of each dataset that holds some of a batch.

    Args:
        dataset: The rows of it, or of the parts it is made of.
        keys: The keys of the samples.
        places: The places of these samples in the batch; None for the whole batch.
    """
    kind = _kind(dataset)
    if kind is Subset:
        yield from _pieces(dataset.dataset, _picked(dataset.indices, keys), places)
    elif kind is ConcatDataset:
        numbers, ends = _numbers(keys, len(dataset)), np.array(dataset.cumulative_sizes)
        parts = ends.searchsorted(numbers, side="right")
        by_part = parts.argsort(kind="stable")
        for here in np.split(by_part, np.flatnonzero(np.diff(parts[by_part])) + 1):
            part = parts[here[0]]
            within = numbers[here] - (ends[part - 1] if part else 0)
            yield from _pieces(dataset.datasets[part], within, here if places is None else places[here])
    elif kind is None or kind is StackDataset:
        raise LookupError
    else:
        sources = dataset.tensors if kind is TensorDataset else dataset.arrays
        length = sources[0].shape[0]
        if not all(source.shape[0] == length and _is_plain(source) for source in sources):
            raise LookupError
        yield sources, _numbers(keys, length), places


def _columns(pieces: list[_Piece]) -> list[Column]:
    """Make the columns of a batch, whose rows are in some datasets."""
    order = None
    if len(pieces) > 1:
        places = np.concatenate([places for _, _, places in pieces if places is not None])
        order = np.empty_like(places)
        order[places] = np.arange(len(places))
    columns = []
    for sources in zip(*(sources for sources, _, _ in pieces), strict=True):
        if order is not None and len(set(map(_form, sources))) > 1:
            raise LookupError
        rows = [(source, numbers) for source, (_, numbers, _) in zip(sources, pieces, strict=True)]
        columns.append(Column(rows, order))
    return columns


def _picked(indices: Any, keys: Any) -> Any:
    """Return ``[indices[key] for key in keys]``."""
    if type(indices) is np.ndarray and indices.ndim == 1:
        return indices[_numbers(keys, len(indices))]
    if type(keys) is np.ndarray:
        keys = keys.tolist()
    return itemgetter(*keys)(indices) if len(keys) > 1 else [indices[key] for key in keys]


def _numbers(keys: Any, count: int) -> Array:
    """Return keys as numbers from 0 on below ``count``."""
    if type(keys) is Numbers or type(keys) is Indices:
        numbers = keys.array
    elif type(keys) is np.ndarray and keys.ndim == 1 and keys.dtype.type in _WHOLE_NUMBERS:
        numbers = keys.astype(np.int64)
    elif type(keys) in (list, tuple, range) and _WHOLE_NUMBERS.issuperset(map(type, keys)):
        numbers = np.fromiter(keys, np.int64, len(keys))
    else:
        raise LookupError
    if len(numbers) and int(numbers.view(np.uint64).max()) < count:  # negative ones are large then
        return numbers
    numbers = np.where(numbers < 0, numbers + count, numbers)
    if not (numbers.min() >= 0 and numbers.max() < count):
        raise LookupError
    return numbers


def _is_plain(source: Source) -> bool:
    """Whether rows of it, gathered, are what torch makes by stacking rows taken one by one."""
    if type(source) is not torch.Tensor:
        return type(source) in (np.ndarray, np.memmap)
    return (
        source.layout is torch.strided
        and not (source.requires_grad or source.is_quantized or source.is_nested or source.is_conj() or source.is_neg())
        and (source.is_contiguous() or source[0].is_contiguous())
    )


def _form(source: Source) -> Any:
    """Return what parts of one column have in common."""
    return type(source), source.dtype, source.shape[1:], source.device if isinstance(source, torch.Tensor) else None
