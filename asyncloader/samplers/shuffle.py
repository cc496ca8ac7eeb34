"""Orders that are computed where they are looked at, never stored.

Shuffle      a permutation of ``range(length)``
reshuffled   the indices of a source over and over, each time in another order
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.seeding.hashing import mix

_ROUNDS = 8
_SHORT = 4096
"""Orders up to this length are made whole."""


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
        if 1 << bits <= _SHORT:  # a short order is looked up: there, cycles outside may be long
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
            left, right = right, left ^ (scramble(right, key) >> np.uint64(64 - left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right


def reshuffled(length: int, shuffle: bool, *key: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function of draws, counted from 0: the indices of one source over and over, each epoch in another order.

    Args:
        length: How many indices the source has.
        shuffle: Otherwise each epoch is in the source's own order.
        key: Whatever tells this source from others.
    """
    order = lru_cache(1)(lambda epoch: Shuffle(length, *key, epoch))

    def indices_at(draws: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(draws, length)
        if not shuffle:
            return places
        if length <= _SHORT:
            named, row = np.unique(epochs, return_inverse=True)
            # The orders of many epochs are made at once, by sorting numbers that look random.
            numbers = named[:, None] * length + np.arange(length)
            orders = np.argsort(scramble(numbers.astype(np.uint64), np.uint64(mix(*key))), axis=1)
            return orders[row, places].astype(np.int64, copy=False)
        return by_group(epochs, places, lambda epoch, own: order(epoch)(own))

    return indices_at


def by_group(
    groups: NDArray[np.int64],
    values: NDArray[np.int64],
    function: Callable[[int, NDArray[np.int64]], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Return what a function makes of some values, called once for each group, with those in it."""
    found = np.empty_like(values)
    order = np.argsort(groups, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(own):
            found[own] = function(int(groups[own[0]]), values[own])
    return found


def scramble(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Mix 64 bits, the best of them to the top: two multiplications, as in the finalizer of MurmurHash3."""
    values = (values ^ key) * np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(32)
    values += key
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(29)
    values *= np.uint64(0x9E3779B97F4A7C15)
    return values
