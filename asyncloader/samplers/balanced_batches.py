"""BalancedBatchSampler: batches of equal cost, so that no rank waits for another one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from asyncloader.samplers.balance import Cost, alike_in_a_row, balanced, checksum_of, cost_of
from asyncloader.samplers.lengths import LengthsLike
from asyncloader.samplers.ordered import OrderedSampler, count_of
from asyncloader.samplers.windows import Units, WindowedBatchSampler

_WINDOW = 1 << 14


class BalancedBatchSampler(WindowedBatchSampler):
    """Make batches that cost the same, so that no rank waits for another one's long sequences; go on anywhere.

    Samples are taken in windows of the shuffled order. The samples of a window are divided into batches of equal cost;
    where single samples cost more than that, their batches come in a row, the ones that cost alike beside each other.
    Costs within 9 % count as equal, and their samples are divided in the order of the epoch, so hardly a batch comes
    again.
    The batches of a step therefore cost the same on any number of ranks, and the batches themselves are the same on
    any. All ranks get as many; a state, of any one rank, is resumed on any number of ranks.

    Called from the thread that reads it.

    Args:
        costs: The cost of each sample, in any unit, or its length, which `cost` makes a cost of: a list, an array, a
            tensor, or the path of a .npy file, of which only those of one window are looked at.
        batch_size: Samples of a batch.
        cost: Makes costs of an array of lengths, as the model computes: ``lambda n: n + n * n / 4096`` for attention
            over whole sequences. By default costs are as given.
        sampler: The order of samples: a sampler of this package, such as `MixtureSampler`, whose own ranks do not
            matter. By default all samples, shuffled.
        window: Samples that are divided at once. More of them balance better where single samples cost more than a
            mean batch: have some steps of all ranks in it.
        shuffle: Without, and without a sampler, windows are as the samples lie.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Leave out the batches at an epoch's end that are too few for all ranks, and the last samples, which
            are too few for a whole batch. Otherwise some batches of the last window have a sample or more less, and the
            last step is divided once more, so that each rank gets a batch, and no sample comes twice, unless there are
            fewer than ranks.

    Raises:
        ConfigurationError: if costs are no numbers, negative, or not as many as the sampler has.

    Example:
        >>> lengths = [100, 5, 60, 40, 90, 10, 55, 45]
        >>> sampler = BalancedBatchSampler(lengths, batch_size=2, num_replicas=4, rank=0)
        >>> [sum(lengths[index] for index in batch) for batch in sampler]
        [100]
    """

    _measure: ClassVar[str] = "cost"
    batch_size: int

    def __init__(
        self,
        costs: LengthsLike,
        *,
        batch_size: int,
        cost: Cost | None = None,
        sampler: OrderedSampler | None = None,
        window: int = _WINDOW,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(costs, sampler, window, shuffle, num_replicas, rank, seed, drop_last)
        self.batch_size = self._samples_per_unit = count_of("batch_size", batch_size)
        self.cost = cost
        self._cost_checksum = checksum_of(cost, self.lengths.sample())

    def _plan(self, indices: NDArray[np.int64], *key: int) -> Units:
        costs = cost_of(self.cost, self.lengths(indices))
        count = -(-len(indices) // self.batch_size)
        batches = balanced(costs, count, self.batch_size)
        order = alike_in_a_row(np.bincount(batches, costs, count), *key, shuffle=self.shuffle)
        return Units(indices, np.argsort(order)[batches])

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "cost": self._cost_checksum}
