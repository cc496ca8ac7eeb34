"""LengthBatchSampler: batches of samples of like length, under a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncloader.checks import one_of
from asyncloader.errors import ConfigurationError
from asyncloader.samplers.lengths import LengthsLike
from asyncloader.samplers.ordered import OrderedSampler, count_of
from asyncloader.samplers.shuffle import Shuffle
from asyncloader.samplers.windows import Units, WindowedBatchSampler

TooLong = Literal["raise", "alone"]
_WINDOW = 1 << 14


class LengthBatchSampler(WindowedBatchSampler):
    """Make batches of samples of like length, as many as a budget of tokens allows; go on anywhere, on any ranks.

    Samples are taken in windows of the shuffled order. The samples of a window are sorted by length, cut into batches
    whose longest sample, times their number, is within the budget, and these batches are shuffled. An epoch has two
    windows at least, with other samples in each epoch, so hardly a batch comes again. All ranks get as
    many batches; a state, of any one rank, is resumed on any number of ranks.

    Called from the thread that reads it.

    Args:
        lengths: How many tokens each sample has: a list, an array, a tensor, or the path of a .npy file, of which only
            those of one window are looked at.
        max_tokens: Tokens of a batch at most, padding included: samples times the length of the longest.
        max_batch: How many samples a batch has at the most.
        buckets: Lengths that batches are padded to, so that they come in few shapes: each batch has samples of one
            bucket. Without, each batch is as long as its longest sample, which pads less.
        too_long: For samples longer than `max_tokens`: "raise", or "alone" in a batch above the budget.
        sampler: The order of samples: a sampler of this package, such as `MixtureSampler`, whose own ranks do not
            matter. By default all samples, shuffled.
        window: Samples that are sorted at once.
        shuffle: Without, and without a sampler, windows are as the samples lie, and each begins with its longest.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        seed: The same on all ranks.
        drop_last: Leave out the batches at an epoch's end that are too few for all ranks. Otherwise they are divided
            once more, so that each rank gets one, and no sample comes twice, unless there are fewer than ranks.

    Raises:
        ConfigurationError: if lengths are no integers, negative, too long or not as many as the sampler has.
    """

    def __init__(
        self,
        lengths: LengthsLike,
        *,
        max_tokens: int,
        max_batch: int | None = None,
        buckets: Sequence[int] | None = None,
        too_long: TooLong = "raise",
        sampler: OrderedSampler | None = None,
        window: int = _WINDOW,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(lengths, sampler, window, shuffle, num_replicas, rank, seed, drop_last)
        self.max_tokens: int = count_of("max_tokens", max_tokens)
        self.max_batch: int | None = None if max_batch is None else count_of("max_batch", max_batch)
        one_of("too_long", too_long, TooLong)
        self.too_long = too_long
        self.buckets: list[int] = sorted({count_of("a bucket", bound) for bound in buckets or ()})
        if buckets is not None and (not self.buckets or (too_long == "raise" and self.buckets[-1] > self.max_tokens)):
            raise ConfigurationError(
                f"buckets should be lengths between 1 and max_tokens ({self.max_tokens}), but are {self.buckets}"
            )
        # Were the samples of one window sorted, which holds them all, they would make the same batches in every epoch.
        self._least_windows = 2 if shuffle else 1
        self._lengths_of(self.lengths.longest())

    @property
    def padding_share(self) -> float:
        """Share of tokens, between 0 and 1, that are padding in what was planned so far; at first, one window is."""
        return 1 - self._share_of_tokens()

    def _plan(self, indices: NDArray[np.int64], *key: int) -> Units:
        lengths = self._lengths_of(indices)
        padded = self._padded_lengths(lengths)
        by_length = np.argsort(-padded, kind="stable")
        sizes = self._cut(padded[by_length])
        batches = np.repeat(np.arange(len(sizes)), sizes)
        self._tokens += int(lengths.sum())
        self._space += int((padded[by_length][np.cumsum(sizes) - sizes] * sizes).sum())
        if self.shuffle:
            batches = np.argsort(Shuffle(len(sizes), *key)(np.arange(len(sizes))))[batches]
        return Units(indices[by_length], batches)

    def _cut(self, padded: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of the batches that samples, the longest first, are cut into."""
        most = self.max_batch or len(padded)
        capacity = np.clip(self.max_tokens // np.maximum(padded, 1), 1, most).tolist()
        ends = np.searchsorted(-padded, -padded, side="right").tolist() if self.buckets else None
        sizes = []
        begin = 0
        while begin < len(padded):
            end = min(begin + capacity[begin], ends[begin] if ends else len(padded))
            sizes.append(end - begin)
            begin = end
        return np.array(sizes)

    def _padded_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.buckets:
            return lengths
        bucket = np.searchsorted(self.buckets, lengths)
        beyond = bucket == len(self.buckets)
        return np.where(beyond, lengths, np.array(self.buckets)[np.where(beyond, 0, bucket)])

    def _check_length(self, index: int, length: int) -> None:
        if length > self.max_tokens and self.too_long == "raise":
            raise ConfigurationError(
                f"sample {index} has {length} tokens, more than max_tokens ({self.max_tokens}): raise max_tokens, or "
                'give too_long="alone" for a batch of its own above the budget'
            )

    def _state_identity(self) -> dict[str, Any]:
        return {**super()._state_identity(), "buckets": self.buckets}
