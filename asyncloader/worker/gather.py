"""Batches that are fetched as a whole, and not sample by sample, where the dataset allows it.

A dataset with ``collated = True`` says that its ``__getitems__`` returns a batch. Of a `TensorDataset`, also through
`Subset` (`random_split`), the rows of a batch are found all at once.

Nothing is remembered from batch to batch, so whoever changes tensors or indices between two batches gets what torch
would give. All other cases are fetched sample by sample, as torch does: keys that are no whole numbers, or out of
range, tensors that require grad, several datasets in one, subclasses. Each such sample then raises, or is skipped, as
it would have been.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_convert

from asyncloader.messages.messages import WorkerSpec
from asyncloader.protocols import has_samples, is_collated, seeds_samples
from asyncloader.transport.collate import is_default, stacks_tuples
from asyncloader.transport.whole import Whole

_METHODS = {kind: (kind.__getitem__, getattr(kind, "__getitems__", None)) for kind in (TensorDataset, Subset)}
_WHOLE_NUMBERS = frozenset({int, np.int64, np.int32})


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

    by_sample: bool

    def __init__(self, dataset: Any, spec: WorkerSpec) -> None:
        self.is_collated: bool = spec.auto_collation and is_collated(dataset)
        self.by_sample = spec.knows_places and not (self.is_collated or seeds_samples(dataset)) and has_samples(dataset)
        self._dataset = dataset
        self._is_default = spec.auto_collation and is_default(spec.collate_fn)
        self.is_in_memory: bool = self._is_default and is_in_memory(dataset)

    def find(self, keys: Any) -> Whole | None:
        """Return the rows of a batch; None if its samples are to be fetched."""
        return rows_of(self._dataset, keys) if self.is_in_memory and stacks_tuples() else None

    def ready(self, samples: Any, keys: Any) -> Any:
        """Return what ``__getitems__`` returned of these keys, as a batch if that is what it is."""
        if not (self.is_collated and self._is_default):
            return samples
        # As without automatic batching, arrays become tensors.
        count = len(keys) if hasattr(keys, "__len__") else 1
        return Whole(count, lambda _: default_convert(samples))  # type: ignore[no-untyped-call]


def is_in_memory(dataset: Any) -> bool:
    """Whether batches of a dataset may be found as a whole, by what it is made of."""
    kind = _kind(dataset)
    return kind is TensorDataset or (kind is Subset and is_in_memory(dataset.dataset))


def rows_of(dataset: Any, keys: Any) -> Whole | None:
    """Return the rows of a batch; None if it is to be fetched sample by sample."""
    try:
        count = len(keys)  # first: what has no length may be an iterator, which can be read only once
        while (kind := _kind(dataset)) is Subset:
            dataset, keys = dataset.dataset, [*map(dataset.indices.__getitem__, keys)]
        if kind is None or not (count and _WHOLE_NUMBERS.issuperset(map(type, keys))):
            return None
        tensors = dataset.tensors
        length = len(tensors[0])
        numbers = np.fromiter(keys, np.int64, count)
        numbers += length * (numbers < 0)
        is_there = numbers.min() >= 0 and numbers.max() < length
        if is_there and all(len(tensor) == length and _is_plain(tensor) for tensor in tensors):
            # What torch's default collation makes of samples that are tuples of rows is a list of tensors.
            return Whole(count, lambda gather: [gather(tensor, numbers) for tensor in tensors])
    except Exception:  # what it is about is raised by its sample
        pass
    return None


def _kind(dataset: Any) -> type | None:
    """Return which of torch's classes above a dataset is, with the methods that torch has given it; None for others."""
    kind = type(dataset)
    methods = getattr(kind, "__getitem__", None), getattr(kind, "__getitems__", None)
    return kind if _METHODS.get(kind) == methods and "__getitems__" not in vars(dataset) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether rows of it, gathered, are what torch makes by stacking rows taken one by one."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and (tensor.is_contiguous() or tensor[0].is_contiguous())
    )
