"""PackingBatchSampler: samples packed into blocks of a fixed number of tokens; and what a loader needs for it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.samplers.balance import Cost, alike_in_a_row, balanced, checksum_of, cost_of, dearest_first
from asyncloader.samplers.best_fit import best_fit
from asyncloader.samplers.lengths import LengthsLike
from asyncloader.samplers.ordered import OrderedSampler, count_of
from asyncloader.samplers.pack_collate import pack_collate
from asyncloader.samplers.shuffle import Shuffle
from asyncloader.samplers.windows import Units, WindowedBatchSampler

TooLong = Literal["raise", "cut"]
_WINDOW = 1 << 13
_PACKED = "asyncloader.samplers.packed says it once, for both: DataLoader(**packed(dataset, sampler), num_workers=...)"


def packed(
    dataset: Any, sampler: PackingBatchSampler, *, pad_id: int = 0, shift_labels: bool = False
) -> dict[str, Any]:
    """Return the arguments of a loader that packs a dataset as this sampler plans it: torch's loader, or ours.

    Args:
        dataset: Map-style, plain or async, of rows of tokens or dictionaries with them: see :func:`pack_collate`.
        sampler: Says how large blocks are, how many are in a batch, and what becomes of samples that are too long.
        pad_id: The token that fills the end of a block.
        shift_labels: Let labels be the tokens that come next.

    Returns:
        ``dataset``; ``batch_sampler``; and ``collate_fn``, which makes batches of `batch_size` blocks.

    Example:
        >>> from asyncloader import DataLoader
        >>> rows = [list(range(length)) for length in (5, 3, 4, 2)]
        >>> sampler = PackingBatchSampler([5, 3, 4, 2], block_size=7, batch_size=2)
        >>> [batch["input_ids"].shape for batch in DataLoader(**packed(rows, sampler))]
        [torch.Size([2, 7])]
    """
    collate = partial(
        pack_collate,
        block_size=sampler.block_size,
        batch_size=sampler.batch_size,
        too_long=sampler.too_long,
        pad_id=pad_id,
        shift_labels=shift_labels,
    )
    return {"dataset": dataset, "batch_sampler": sampler, "collate_fn": collate}


class PackingBatchSampler(WindowedBatchSampler):
    """Pack samples into blocks of `block_size` tokens, `batch_size` blocks a batch; go on anywhere, on any ranks.

    Samples are taken in windows of the shuffled order; those of a window are packed, the longest first (lengths within
    9 % count as equal), each into the block that it fills best, and the blocks are shuffled. The sampler yields the
    keys of a batch's samples, block after block; :func:`pack_collate` makes a batch of the samples. All ranks get as
    many batches. A state, of any one rank, is resumed on any number of ranks, and with any `batch_size`.

    Called from the thread that reads it.

    Args:
        lengths: How many tokens each sample has: a list, an array, a tensor, or the path of a .npy file, of which only
            those of one window are looked at.
        block_size: Tokens of a block.
        batch_size: Blocks of one rank's batch.
        too_long: For samples longer than a block: "raise"; or "cut": each counts as one of `block_size` tokens, and
            :func:`pack_collate` is told to cut it too.
        sampler: The order of samples: a sampler of this package, such as `MixtureSampler`, whose own ranks do not
            matter. By default all samples, shuffled.
        window: Samples that are packed at once: more fill blocks better, and take longer.
        shuffle: Without, and without a sampler, windows are as the samples lie, and blocks ordered by their first one.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Leave out the blocks at an epoch's end that are too few for a batch on all ranks. Otherwise they are
            divided, so that each rank has a last batch, of fewer blocks, and no sample comes twice, unless there are
            fewer than ranks.
        cost: The cost of samples, as a function of an array of their lengths, where cut samples have the length that is
            laid out: ``lambda n: n + n * n / 4096`` for attention within documents. Then batches of a
            step cost the same on all ranks, as with :class:`BalancedBatchSampler`. A window is packed as whole batches,
            so up to `batch_size` - 1 blocks of each stay empty, and a state is for one `batch_size`.

    Raises:
        ConfigurationError: if lengths are no integers, negative, too long or not as many as the sampler has.
    """

    _may_differ = WindowedBatchSampler._may_differ | {"batch_size"}

    def __init__(
        self,
        lengths: LengthsLike,
        *,
        block_size: int,
        batch_size: int = 1,
        too_long: TooLong = "raise",
        sampler: OrderedSampler | None = None,
        window: int = _WINDOW,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        cost: Cost | None = None,
    ) -> None:
        super().__init__(lengths, sampler, window, shuffle, num_replicas, rank, seed, drop_last)
        self.block_size: int = count_of("block_size", block_size)
        self.batch_size: int = count_of("batch_size", batch_size)
        self._units_per_batch = self.batch_size if cost is None else 1  # with a cost, units are whole batches
        one_of("too_long", too_long, TooLong)
        self.too_long = too_long
        self.cost = cost
        self._cost_checksum = checksum_of(cost, self.lengths.sample())
        self._lengths_of(self.lengths.longest())

    @property
    def fill(self) -> float:
        """Share of blocks, between 0 and 1, that are tokens in what was planned so far; at first, one window is."""
        return self._share_of_tokens()

    def check_collation(self, collate_fn: Any) -> None:
        """Refuse a `collate_fn` that does not make the blocks that were planned. Our loader asks; see `packed`.

        Raises:
            ConfigurationError: if it is torch's, which packs nothing, or `pack_collate` with other sizes.
        """
        if collate_fn is default_collate:
            raise ConfigurationError(f"PackingBatchSampler needs a collate_fn that packs a batch's samples. {_PACKED}")
        if getattr(collate_fn, "func", collate_fn) is not pack_collate:
            return
        given = {"batch_size": self.batch_size, "too_long": "raise", **getattr(collate_fn, "keywords", {})}
        for name in ("block_size", "batch_size", "too_long"):
            if given.get(name) != (value := packed(None, self)["collate_fn"].keywords[name]):
                raise ConfigurationError(
                    f"PackingBatchSampler has {name}={value!r}, and pack_collate {name}={given.get(name)!r}. {_PACKED}"
                )

    def _plan(self, indices: NDArray[np.int64], *key: int) -> Units:
        sizes = np.minimum(self._lengths_of(indices), self.block_size)
        largest_first = dearest_first(sizes)
        blocks = np.empty_like(sizes)
        blocks[largest_first] = best_fit(sizes[largest_first].tolist(), self.block_size)
        if self.shuffle:
            blocks = Shuffle(int(blocks.max()) + 1, *key)(blocks)
        else:
            _, first, blocks = np.unique(blocks, return_index=True, return_inverse=True)
            blocks = np.argsort(np.argsort(first))[blocks]
        units = blocks if self.cost is None else self._in_batches(blocks, cost_of(self.cost, sizes), *key)
        self._tokens += int(sizes.sum())
        self._space += (int(units.max()) + 1) * self.block_size * (self.batch_size if self.cost else 1)
        # Block after block, and within a block in the order of the window, not by length.
        by_block = np.argsort(blocks, kind="stable")
        return Units(indices[by_block], units[by_block])

    def _in_batches(self, blocks: NDArray[np.int64], costs: NDArray[np.float64], *key: int) -> NDArray[np.int64]:
        """Return the batch of each sample, in batches of blocks that cost the same; the order of these is planned too.

        Args:
            blocks: The block of each sample.
            costs: The cost of each sample.
            key: The numbers that seed the order.
        """
        of_blocks = np.bincount(blocks, costs)
        count = -(-len(of_blocks) // self.batch_size)
        batches = balanced(of_blocks, count, self.batch_size)
        order = alike_in_a_row(np.bincount(batches, of_blocks, count), *key, shuffle=self.shuffle)
        return np.argsort(order)[batches][blocks]

    def _check_length(self, index: int, length: int) -> None:
        if length > self.block_size and self.too_long == "raise":
            raise ConfigurationError(
                f"sample {index} has {length} tokens, and a block has {self.block_size}: give a larger block_size, or "
                'too_long="cut", or divide such samples in the dataset'
            )

    def _state_identity(self) -> dict[str, Any]:
        batch_size = self.batch_size if self.cost else None  # otherwise a state counts blocks
        return {**super()._state_identity(), "cost": self._cost_checksum, "batch_size": batch_size}
