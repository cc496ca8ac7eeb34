"""The methods of a dataset that are awaited: its asynchronous face, also through torch's wrappers.

A dataset may have two faces: ``__getitem__`` returns a sample, for everybody; ``async def getitem`` or ``getitems``
fetch the same samples without blocking, for this package. See :class:`asyncloader.typing.TwoFacedDataset`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from asyncloader.protocols import has_async_face, has_method, members, probe


def sample_method(dataset: Any) -> Callable[[Any], Any]:
    """Return the function that fetches a sample by its key; what it returns may have to be awaited."""
    if not any(map(has_async_face, members(dataset))) and hasattr(type(dataset), "__getitem__"):
        return lambda key: dataset[key]
    kind = type(dataset)
    if isinstance(dataset, Subset) and kind.__getitem__ is Subset.__getitem__:
        inner = sample_method(dataset.dataset)
        return lambda key: inner(dataset.indices[key])
    if isinstance(dataset, ConcatDataset) and kind.__getitem__ is ConcatDataset.__getitem__:
        return _concatenated(dataset, [sample_method(each) for each in dataset.datasets])
    if has_async_face(dataset) and has_method(dataset, "getitem"):
        return dataset.getitem  # type: ignore[no-any-return]
    get_samples = batch_method(dataset)
    if get_samples is None or (hasattr(kind, "__getitem__") and not has_async_face(dataset)):
        return lambda key: dataset[key]

    async def one(key: Any) -> Any:
        (sample,) = await resolved(get_samples([key]))
        return sample

    return one


async def resolved(value: Any) -> Any:
    """Return a value, awaited if it has to be."""
    return await value if hasattr(type(value), "__await__") else value


def batch_method(dataset: Any) -> Callable[[Any], Any] | None:
    """Return the function that fetches the samples of a batch together, if the dataset has one."""
    kind = type(dataset)
    if isinstance(dataset, Subset) and kind.__getitems__ is Subset.__getitems__:
        inner = batch_method(dataset.dataset)
        return None if inner is None else lambda keys: inner([dataset.indices[key] for key in keys])
    if has_async_face(dataset):
        method = probe(dataset, "getitems") if has_method(dataset, "getitems") else None
        return method if callable(method) else None
    return getattr(dataset, "__getitems__", None) or None


def _concatenated(dataset: Any, parts: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def get(key: int) -> Any:
        if key < -len(dataset):
            raise ValueError("absolute value of index should not exceed dataset length")  # as torch says it
        number = key + len(dataset) if key < 0 else key
        part = bisect.bisect_right(dataset.cumulative_sizes, number)
        return parts[part](number - (dataset.cumulative_sizes[part - 1] if part else 0))

    return get
