"""BlockShuffleSampler: blocks of neighbours in a random order, and the samples of a few of them mixed.

    blocks        | a | b | c | d | e | f |      row groups of Parquet files, stretches of tar files
    shuffled      | d | a | f | b | e | c |
    cut           | d | a | f |   | b | e | c |        a stretch for each worker of each rank
    windows       | d + a | f . . |                    samples of neighbouring blocks, mixed

A position of the order is looked up, not drawn: position -> worker's stretch -> place in its window -> block -> index.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.elastic import ElasticSampler
from asyncloader.samplers.ordered import Order, count_of
from asyncloader.samplers.shuffle import Shuffle, by_group

Lanes: TypeAlias = tuple[int, int, int]
"""The readers of the blocks, each with a stretch of its own, a batch at a time: the number of ranks, which take
positions in turn; of workers of each rank, which take its batches in turn; and of samples in a batch."""

_WINDOWS_KEPT = 64
_BLOCKS_IN_WINDOW = 4


class BlockShuffleSampler(ElasticSampler):
    """Shuffle blocks of samples, and the samples within a window of some blocks; go on anywhere, as ElasticSampler.

    For datasets that read samples together, and would read everything for each batch of a random order: row groups of
    a :class:`~asyncloader.datasets.ParquetDataset`, stretches of :class:`~asyncloader.datasets.TarShards`. They
    say how large their blocks are (``dataset.block_sizes``), and keep as many as ``cache_bytes`` allow: that should be
    what a window takes, and one block more.

    Each worker of each rank reads blocks of its own, if the numbers of workers and of samples in a batch are told. On
    other numbers all is as exact, and blocks are read by several. A state has those numbers: its epoch is finished as
    it was begun, and read by as many ranks and workers as there are then.

    Args:
        block_sizes: How many samples there are in each block, one after the other.
        window: Samples that are mixed with each other; by default as many as there are in 4 blocks, on average.
        num_workers, batch_size: As given to the loader on each rank.
        num_replicas, rank, shuffle, seed, drop_last: As ElasticSampler takes them. Without shuffling the order is that
            of the dataset.

    Raises:
        ConfigurationError: The dataset is empty, or an argument is invalid.
        ValueError: The rank is not one of the ranks.
    """

    def __init__(
        self,
        block_sizes: ArrayLike,
        *,
        window: int | None = None,
        num_workers: int = 0,
        batch_size: int = 1,
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
        num_workers = count_of("num_workers", num_workers, least=0)
        batch_size = count_of("batch_size", batch_size)
        super().__init__(int(sizes.sum()), num_replicas, rank, shuffle, seed, drop_last)
        self._own_lanes: Lanes = (self.num_replicas, max(1, num_workers), batch_size)
        self._lanes = self._own_lanes

    def order(self) -> Order:
        """Return the order of the epoch that is set, which does not change afterwards."""
        if not self.shuffle:
            return super().order()
        sizes, window, lanes, key = self.block_sizes, self.window, self._lanes, (self.seed, self.epoch)
        length = self.num_indices()
        blocks = Shuffle(len(sizes), *key, 0)(np.arange(len(sizes)))
        ends = np.cumsum(sizes[blocks])  # in the shuffled row
        shifts = np.cumsum(sizes)[blocks] - ends  # from a place in that row to the index there

        @lru_cache(_WINDOWS_KEPT)
        def mixed(number: int) -> Shuffle:
            return Shuffle(min(window, length - number * window), *key, number + 1)

        def indices_at(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            numbers, places = np.divmod(places_of(positions, length, lanes), window)
            places = by_group(numbers, places, lambda number, own: mixed(number)(own) + number * window)
            places += shifts[np.searchsorted(ends, places, side="right")]
            return places

        return Order(length, indices_at)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        if epoch != self.epoch:
            self._lanes = self._own_lanes
        super().set_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another sampler, blocks or order, or a later version.
        """
        super().load_state_dict(state)
        self._lanes = tuple(state["lanes"])

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "blocks": self._checksum, "window": self.window}

    @cached_property
    def _checksum(self) -> str:
        found = checksum(self.block_sizes)
        return f"{found['count']}:{found['checksum']:08x}"

    def _more_state(self) -> dict[str, Any]:
        return {"lanes": list(self._lanes)}


def places_of(positions: NDArray[np.int64], length: int, lanes: Lanes) -> NDArray[np.int64]:
    """Return for positions in the order their places in the row of blocks, which is cut into equal stretches.

    Samples that are left when all lanes have had the same number of whole batches are at the end, for all.
    """
    ranks, workers, batch_size = lanes
    num_batches = length // (ranks * workers * batch_size)  # of each worker
    number, rank = np.divmod(positions, ranks)  # of the sample on its rank
    batch, sample = np.divmod(number, batch_size)
    turn, worker = np.divmod(batch, workers)
    places = ((rank * workers + worker) * num_batches + turn) * batch_size + sample
    return np.where(positions < num_batches * ranks * workers * batch_size, places, positions)
