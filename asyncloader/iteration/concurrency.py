"""How many samples, and so how many batches, a worker of a loader has in flight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncloader.protocols import is_async, probe

if TYPE_CHECKING:
    from asyncloader.loader import DataLoader

ASYNC_DEFAULT = 64
"""Samples that a worker awaits at once unless the loader says otherwise."""

_UNKNOWN_BATCH_SIZE = 8


class Concurrency(NamedTuple):
    """What one worker fetches at once.

    Attributes:
        is_async: The dataset is async; else several samples are fetched on threads.
        samples: In flight at most; 1 for a plain dataset without the option.
        batches: Tickets that a worker needs to have, to have so many samples in flight.
    """

    is_async: bool
    samples: int
    batches: int

    @property
    def overlaps(self) -> bool:
        """Whether samples are fetched on a loop."""
        return self.is_async or self.samples > 1


def concurrency_of(loader: DataLoader[Any]) -> Concurrency:
    """Look at the loader as it is now."""
    awaits = is_async(loader.dataset)
    samples = loader.concurrency or (ASYNC_DEFAULT if awaits else 1)
    if not awaits and samples == 1:
        return Concurrency(False, 1, 0)
    # One more to begin with when the first is finished, and one on its way through the channel.
    return Concurrency(awaits, samples, math.ceil(samples / _batch_size(loader)) + 2)


def _batch_size(loader: DataLoader[Any]) -> int:
    """Return how many samples a batch has; a guess where a batch sampler of the user's does not say."""
    sampler: Any = loader.batch_sampler
    if sampler is None:
        return 1
    size = loader.batch_size or probe(sampler, "batch_size")
    return size if isinstance(size, int) and size > 0 else _UNKNOWN_BATCH_SIZE
