"""What of a loader must be the same for its states to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from asyncloader.iteration.plan import samplers_within
from asyncloader.protocols import probe
from asyncloader.samplers import ElasticSampler

if TYPE_CHECKING:
    from asyncloader.loader import DataLoader


@dataclass(frozen=True)
class Fits:
    """Describes what of a loader must be the same for its states to mean the same batches.

    Holds the parts of the loader, not the loader: its iterator, which is told by this, must not keep it alive.
    """

    dataset: Any
    sampler: Any
    index_sampler: Any
    batch_size: int | None
    drop_last: bool

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Fits:
        """Look at a loader as it is now."""
        return cls(loader.dataset, loader.sampler, loader._index_sampler, loader.batch_size, loader.drop_last)

    def describe(self) -> dict[str, Any]:
        """Return what must be the same, as plain data."""
        samplers = samplers_within(self.index_sampler)
        is_elastic = any(isinstance(sampler, ElasticSampler) for sampler in samplers)
        is_iterable = isinstance(self.dataset, IterableDataset)
        divided = next((sampler for sampler in samplers if _is_divided(sampler)), None)
        return {
            "dataset_length": None if is_iterable else _length(self.dataset),
            "batch_size": None if is_elastic else self.batch_size,
            "drop_last": self.drop_last,
            "sampler": "(".join(type(sampler).__name__ for sampler in samplers) + ")" * (len(samplers) - 1),
            "samples": None if is_elastic or is_iterable else _length(self.sampler),
            "num_replicas": None if is_elastic or divided is None else divided.num_replicas,
            "rank": None if is_elastic or divided is None else divided.rank,
        }


def _is_divided(sampler: Any) -> bool:
    return isinstance(probe(sampler, "num_replicas"), int) and isinstance(probe(sampler, "rank"), int)


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None
