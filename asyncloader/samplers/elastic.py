"""Samplers of our own. They are torch Samplers, and work with torch's DataLoader as well.

    ElasticSampler    shuffled, divided among ranks, resumable anywhere on any number of ranks, of any length

The order of an epoch is one permutation of all indices, the same on all ranks; rank r of R takes its positions r,
r + R, r + 2 R and so on. How far the epoch is, is therefore one number, the global cursor, whichever rank tells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from asyncloader.errors import StateMismatchError
from asyncloader.hashing import mix

_ROUNDS = 8
_BLOCK = 4096
"""Indices that are computed at once: some 0.3 ms, and 0.4 MB with all that numpy needs meanwhile."""
_STATE_VERSION = 1


class Shuffle:
    """A pseudo-random permutation of ``range(length)`` that is computed where it is looked at, never stored.

    A Feistel network over the least power of two that is not below ``length``; what falls outside is permuted again
    until it falls inside ("cycle walking"), less than once on average.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.

    Args:
        length: How many there are; below 2**62.
        key: Whatever tells this order from others.
    """

    def __init__(self, length: int, *key: int) -> None:
        self._length = length
        bits = max(8, (length - 1).bit_length())  # over a handful of values a Feistel network is not uniform
        self._widths = (bits // 2, bits - bits // 2)
        self._keys = [np.uint64(mix(*key, number)) for number in range(_ROUNDS)]
        self._whole: NDArray[np.int64] | None = None
        if 1 << bits <= _BLOCK:  # a short order is looked up: there, cycles outside may be long
            order = self._permute(np.arange(1 << bits, dtype=np.uint64)).astype(np.int64)
            self._whole = order[order < length]

    def __call__(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the indices at these positions."""
        if self._whole is not None:
            return np.take(self._whole, positions)
        indices = self._permute(positions.astype(np.uint64))
        while (outside := np.flatnonzero(indices >= self._length)).size:
            indices[outside] = self._permute(indices[outside])
        return indices.astype(np.int64)

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left_bits, right_bits = self._widths
        left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
        for key in self._keys:
            # The halves change places, and so do their widths, which differ by one where the bits are odd in number.
            left, right = right, left ^ (_scramble(right, key) >> np.uint64(64 - left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right


def _scramble(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Mix 64 bits, the best of them to the top: two multiplications, as in the finalizer of MurmurHash3."""
    values = (values ^ key) * np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(32)
    values += key
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(29)
    values *= np.uint64(0x9E3779B97F4A7C15)
    return values


class ElasticSampler(Sampler[int]):
    """Shuffle a dataset of any length and divide it among ranks; go on anywhere, on any number of ranks.

    In place of :class:`torch.utils.data.DistributedSampler`, with its arguments. A state that was taken on R ranks is
    resumed on any other number: nothing of the epoch is repeated or left out. The state of any one rank serves
    all, provided that all ranks had taken the same number of samples, as they have between two steps. Nothing is
    stored of the order: 10 billion indices take no memory, and going on in the middle takes no time.

    Called from the thread that reads it.

    Args:
        dataset: What to sample from, or its length.
        num_replicas: Ranks that share an epoch; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        shuffle: Draw the samples in an order that `seed` and the epoch determine; otherwise in their own order.
        seed: The same on all ranks.
        drop_last: Where the samples cannot be divided evenly, leave out the last ones; otherwise samples from the
            beginning of the epoch's order are repeated at its end.

    Raises:
        ValueError: if the rank is not one of the ranks.
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
        in_group = dist.is_available() and dist.is_initialized()
        self.num_replicas = num_replicas or (dist.get_world_size() if in_group else 1)
        self.rank = rank if rank is not None else (dist.get_rank() if in_group else 0)
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"Invalid rank {self.rank}, rank should be in the interval [0, {self.num_replicas - 1}]")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._resume_at = 0  # the next iterator begins here
        self._run = _Run(0)

    def __repr__(self) -> str:
        return (
            f"<ElasticSampler rank {self.rank} of {self.num_replicas}, epoch {self.epoch}, "
            f"{self._cursor()} of {self.num_indices()} samples>"
        )

    def __len__(self) -> int:
        """Return the samples of this rank in a whole epoch."""
        return len(self._positions(0))

    def __iter__(self) -> Iterator[int]:
        run = self._run = _Run(self._resume_at)
        self._resume_at = 0
        positions = self._positions(run.start)
        order = self.order()
        for first in range(0, len(positions), _BLOCK):
            block = positions[first : first + _BLOCK]
            # What is beyond the end is repeated.
            for index in order(np.arange(block.start, block.stop, block.step) % order.length).tolist():
                run.read += 1
                yield index

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of; to be called before each. A state of another epoch is dropped."""
        if epoch != self.epoch:
            self._resume_at = 0
            self._run = _Run(0)
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return how far the newest iterator has been read.

        A loader with workers reads ahead of what it yields. :class:`asyncloader.DataLoader` takes that into account;
        for torch's use `state_after`.
        """
        return self._state_at(self._cursor())

    def state_after(self, samples: int) -> dict[str, Any]:
        """Return the state after so many samples of the newest iterator, counted on this rank."""
        return self._state_at(self._run.start + samples * self.num_replicas)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of whichever rank and number of ranks.

        Raises:
            StateMismatchError: if the state is of another dataset, another order, or a later version.
        """
        if state.get("version") != _STATE_VERSION:
            raise StateMismatchError("version", state.get("version"), _STATE_VERSION)
        for field, now in self._fits().items():
            if state.get(field) != now:
                raise StateMismatchError(field, state.get(field), now)
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._resume_at = state["cursor"]
        self._run = _Run(state["cursor"])

    def _state_at(self, cursor: int) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "cursor": cursor,
            "epoch": self.epoch,
            "seed": self.seed,
            **self._fits(),
        }

    def _fits(self) -> dict[str, Any]:
        """Return what of the sampler must be the same for a state to mean the same samples, as plain data."""
        return {"length": self.num_indices(), "shuffle": self.shuffle, "drop_last": self.drop_last}

    def _cursor(self) -> int:
        """Return how many samples all ranks together have taken, if all have taken as many as this one."""
        return self._run.start + self._run.read * self.num_replicas

    def order(self) -> Order:
        """Return the order of the epoch that is set, which does not change afterwards."""
        length = self.num_indices()
        return _Order(length, Shuffle(length, self.seed, self.epoch) if self.shuffle else None)

    def num_indices(self) -> int:
        """Return below which number all of its indices are."""
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    def _positions(self, start: int) -> range:
        """Return the positions of this rank in the order of the epoch, from a global cursor on."""
        left = max(0, self.num_indices() - start)
        each = left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)
        return range(start + self.rank, start + each * self.num_replicas, self.num_replicas)


class Order(Protocol):
    """The order of one epoch: a function from positions to indices, and how many positions there are."""

    @property
    def length(self) -> int:
        """How many positions it has."""

    def __call__(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the indices at these positions."""


class _Order(NamedTuple):
    length: int
    shuffle: Shuffle | None

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions if self.shuffle is None else self.shuffle(positions)


class _Run:
    """One iterator: where it began, and what was read of it."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.read = 0
