"""ElasticSampler: shuffled, divided among ranks, resumable anywhere on any number of ranks, of any length."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np

from asyncloader.samplers.ordered import Order, OrderedSampler, length_of
from asyncloader.samplers.shuffle import Shuffle


class ElasticSampler(OrderedSampler):
    """Shuffle a dataset of any length and divide it among ranks; go on anywhere, on any number of ranks.

    In place of :class:`torch.utils.data.DistributedSampler`, with its arguments. A state that was taken on R ranks is
    resumed on any other number: nothing of the epoch is repeated or left out. The state of any one rank serves
    all, provided that all ranks had taken the same number of samples, as they have between two steps. Nothing is
    stored of the order: 10 billion indices take no memory, and going on in the middle takes no time.

    Called from the thread that reads it.

    Args:
        dataset: The dataset, or its length.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        shuffle: Draw the samples in an order that `seed` and the epoch determine; otherwise in their own order.
        seed: The same on all ranks.
        drop_last: Where the samples cannot be divided evenly, leave out the last ones; otherwise samples from the
            beginning of the epoch's order are repeated at its end.

    Raises:
        ConfigurationError: if the rank is not one of the ranks, or the dataset is a sampler.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)
        self.dataset = dataset
        length_of(dataset)  # which refuses a sampler
        self.shuffle = shuffle

    def order(self) -> Order:
        """Return the order of the epoch that is set, which does not change afterwards."""
        length = self.num_indices()
        return Order(length, Shuffle(length, self.seed, self.epoch) if self.shuffle else np.asarray)

    def num_indices(self) -> int:
        """Return below which number all of its indices are."""
        return length_of(self.dataset)

    def _state_identity(self) -> dict[str, Any]:
        return {"length": self.num_indices(), **super()._state_identity()}
