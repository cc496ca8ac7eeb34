"""BlockShuffleSampler: blocks of neighbours in a random order, and the samples of a few of them mixed.

    blocks        | a | b | c | d | e | f |      row groups of Parquet files, stretches of tar files
    shuffled      | d | a | f | b | e | c |
    windows       | d + a | f + b | e + c |      samples of neighbouring blocks, mixed

A position of the order is looked up, not drawn: position -> place in its window -> block -> index.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.samplers.ordered import Order, count_of
from asyncloader.samplers.shuffle import Shuffle, by_group

_WINDOWS_KEPT = 64
_BLOCKS_IN_WINDOW = 4


class BlockShuffleSampler(ElasticSampler):
    """Shuffle blocks of samples, and the samples within a window of some blocks; go on anywhere, as ElasticSampler.

    For datasets that read samples together, and would read everything for each batch of a random order. They should
    keep the blocks of a window, and one more. Each worker reads the blocks of which it gets samples.

    Args:
        block_sizes: How many samples there are in each block, one after the other.
        window: Samples that are mixed with each other; by default as many as there are in 4 blocks, on average.
        num_replicas, rank, shuffle, seed, drop_last: As ElasticSampler takes them. Without shuffling the order is that
            of the dataset.

    Raises:
        ConfigurationError: The dataset is empty, or an argument is invalid.
    """

    def __init__(
        self,
        block_sizes: ArrayLike,
        *,
        window: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        sizes = np.asarray(block_sizes)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 0).any() or not sizes.sum():
            raise ConfigurationError("block_sizes are the numbers of samples in blocks, at least one of them above 0")
        self.block_sizes = sizes.astype(np.int64)
        of_blocks = max(1, int(_BLOCKS_IN_WINDOW * sizes.sum() // len(sizes)))
        self.window = of_blocks if window is None else count_of("window", window)
        super().__init__(int(sizes.sum()), num_replicas, rank, shuffle, seed, drop_last)

    def order(self) -> Order:
        """Return the order of the epoch that is set, which does not change afterwards."""
        if not self.shuffle:
            return super().order()
        sizes, window, length, key = self.block_sizes, self.window, self.num_indices(), (self.seed, self.epoch)
        blocks = Shuffle(len(sizes), *key, 0)(np.arange(len(sizes)))
        ends = np.cumsum(sizes[blocks])  # in the shuffled row
        shifts = np.cumsum(sizes)[blocks] - ends  # from a place in that row to the index there

        @lru_cache(_WINDOWS_KEPT)
        def mixed(number: int) -> Shuffle:
            return Shuffle(min(window, length - number * window), *key, number + 1)

        def indices_at(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            numbers, places = np.divmod(positions, window)
            places = by_group(numbers, places, lambda number, own: mixed(number)(own) + number * window)
            places += shifts[np.searchsorted(ends, places, side="right")]
            return places

        return Order(length, indices_at)

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "blocks": self._checksum}

    @cached_property
    def _checksum(self) -> dict[str, int]:
        return checksum(self.block_sizes)
