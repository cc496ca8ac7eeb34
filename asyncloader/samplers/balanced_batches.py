"""BalancedBatchSampler: batches of equal cost, so that no rank waits for another one."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.balance import Cost, alike_in_a_row, balanced, balanced_within, cost_of
from asyncloader.samplers.lengths import Costs, Lengths, LengthsLike
from asyncloader.samplers.ordered import OrderedSampler, count_of
from asyncloader.samplers.windows import Units, WindowedBatchSampler

TooLong = Literal["raise", "alone"]
_WINDOW = 1 << 14
_PROBES = 256


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
            tensor, the path of a .npy file, or a function of an array of indices. Only those of one window are looked
            at, at construction those of arrays in memory.
        batch_size: Samples of a batch. Or give `max_cost`.
        max_cost: The highest cost of a batch. Batches have as many samples as it takes to come near it.
        max_batch: With `max_cost`, how many samples a batch has at most.
        cost: Makes costs of an array of lengths, as the model computes: ``lambda n: n + n * n / 4096`` for attention
            over whole sequences. By default costs are as given.
        too_long: For samples that cost more than `max_cost`: "raise", or "alone" in a batch above it.
        sampler: The order of samples: a sampler of this package, such as `MixtureSampler`, whose own ranks do not
            matter. By default all samples, shuffled.
        num_samples: How many samples there are; needed for a function of costs without a sampler.
        window: Samples that are divided at once. More of them balance better where single samples cost more than a
            mean batch: have some steps of all ranks in it.
        shuffle: Without, and without a sampler, windows are as the samples lie.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Leave out the batches at an epoch's end that are too few for all ranks, and with `batch_size` the
            last samples, which are too few for a whole batch. Otherwise some batches of the last window have a sample
            or more less, and the last step is divided once more, so that each rank gets a batch, and no sample comes
            twice, unless there are fewer than ranks.

    Raises:
        ConfigurationError: if costs are no numbers, negative, above `max_cost` or not as many as the sampler has.

    Example:
        >>> lengths = [100, 5, 60, 40, 90, 10, 55, 45]
        >>> sampler = BalancedBatchSampler(lengths, batch_size=2, num_replicas=4, rank=0)
        >>> [sum(lengths[index] for index in batch) for batch in sampler]
        [100]
    """

    _measure: ClassVar[type[Lengths]] = Costs

    def __init__(
        self,
        costs: LengthsLike,
        *,
        batch_size: int | None = None,
        max_cost: float | None = None,
        max_batch: int | None = None,
        cost: Cost | None = None,
        too_long: TooLong = "raise",
        sampler: OrderedSampler | None = None,
        num_samples: int | None = None,
        window: int = _WINDOW,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(costs, sampler, num_samples, window, shuffle, num_replicas, rank, seed, drop_last)
        if (batch_size is None) == (max_cost is None):
            raise ConfigurationError("give either batch_size, samples of a batch, or max_cost, what a batch may cost")
        if batch_size is not None and max_batch is not None:
            raise ConfigurationError("max_batch is for batches of a max_cost; with batch_size all have as many samples")
        self.batch_size = None if batch_size is None else count_of("batch_size", batch_size)
        self.max_batch = None if max_batch is None else count_of("max_batch", max_batch)
        if max_cost is not None and (isinstance(max_cost, bool) or not isinstance(max_cost, Real) or not max_cost > 0):
            raise ConfigurationError(f"max_cost should be a number above 0, but got {max_cost!r}")
        self.max_cost = None if max_cost is None else float(max_cost)
        one_of("too_long", too_long, TooLong)
        self.too_long = too_long
        self.cost = cost
        self._samples_per_unit = self.batch_size
        self._cost_checksum = cost and checksum(cost_of(cost, self.lengths.sample(_PROBES)))["checksum"]
        self._check_longest()

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean of ranks, summed over the steps that were planned so far; 1 at best.

        At first, one window is planned.
        """
        return 1 / self._share_of_tokens()

    def _plan(self, indices: NDArray[np.int64], *key: int) -> Units:
        costs = self._costs_of(indices)
        if self.max_cost is not None:
            batches, count = balanced_within(costs, self.max_cost, self.max_batch)
        else:
            most = self.batch_size or 1
            count = -(-len(indices) // most)
            batches = balanced(costs, count, most)
        totals = np.bincount(batches, costs, count)
        order = alike_in_a_row(totals, *key, shuffle=self.shuffle)
        self._note_steps(totals[order])
        return Units(indices, np.argsort(order)[batches])

    def _costs_of(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        costs = cost_of(self.cost, self.lengths(indices))
        dearest = int(costs.argmax())
        self._check_cost(int(indices[dearest]), float(costs[dearest]))
        return costs

    def _note_steps(self, totals: NDArray[Any]) -> None:
        """Count what the batches of a window cost, in whole steps, and what they would if all were the slowest."""
        steps = totals[: len(totals) // self.num_replicas * self.num_replicas].reshape(-1, self.num_replicas)
        self._tokens += steps.sum()
        self._space += steps.max(axis=1, initial=0).sum() * self.num_replicas

    def _check_length(self, index: int, length: float) -> None:
        self._check_cost(index, float(cost_of(self.cost, np.array([length]))[0]))

    def _check_cost(self, index: int, cost: float) -> None:
        if self.max_cost is not None and cost > self.max_cost and self.too_long == "raise":
            raise ConfigurationError(
                f"sample {index} costs {cost:g}, more than max_cost ({self.max_cost:g}): raise max_cost, or give "
                'too_long="alone" for a batch of its own above the budget'
            )

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "cost": self._cost_checksum}
