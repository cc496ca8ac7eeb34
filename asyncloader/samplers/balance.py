"""Batches of equal cost: which batch each sample is put into, and an order in which neighbours cost the same.

    samples, the dearest first   14 11 6 5 5 4 3 3 2 2 2 1 1 1    each into the batch that costs the least so far
    batches                      [14][11][6 3 1][5 3 2][5 2 2 1][4 ...     nothing evens out a sample above the mean
    in a ring                    10 10 10 11 14 12 10 10 10       costs rise to such batches and fall again

However many neighbours the ranks take for a step, these cost about the same. The ring begins among the many batches
that cost the same, so it joins that of the window before.

Nothing here depends on the number of ranks, and no figure on how a machine rounds: sums are those of IEEE 754, in one
order, and costs are compared by the bits of their numbers. Logarithms might differ between two kinds of processors, and
with them the plans of two ranks.

Source: longest processing time first, R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math.
1969. Karmarkar and Karp's differencing, as verl has it for the batch of one step, evens out no better where there are
many samples for each batch, and takes a time that grows with the number of batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncloader.errors import ConfigurationError
from asyncloader.identity import checksum
from asyncloader.samplers.shuffle import Shuffle
from asyncloader.seeding.hashing import mix

Cost = Callable[[NDArray[Any]], Any]
_STEPS = 256
"""Neighbours whose costs differ by less than one of so many steps, from a power of two to the next, cost the same."""
_COARSE_STEPS = 8
"""The same for samples that are divided: few enough that the next epoch's order divides them otherwise."""
_BELOW_ALL = -1100
"""An exponent below that of any number but 0, for which `frexp` has the exponent of numbers from a half on."""


def balanced(costs: NDArray[Any], count: int, most: int) -> NDArray[np.int64]:
    """Return the batch that each sample is put into, so that all batches cost about the same.

    Args:
        costs: The cost of each sample, in the order of the epoch: see `dearest_first`.
        count: How many batches there are.
        most: How many samples a batch has at most; `count` times that are no fewer than the samples. Where samples
            are as many as batches or more, no batch is empty.
    """
    order = dearest_first(costs)
    batches = []
    cheapest = [(0.0, 0, batch) for batch in range(count)]  # a heap: what each costs, and how many samples it has
    for cost in costs[order].tolist():
        total, size, batch = cheapest[0]
        batches.append(batch)
        if size + 1 < most:
            heapq.heapreplace(cheapest, (total + cost, size + 1, batch))
        else:
            heapq.heappop(cheapest)
    found = np.empty(len(costs), dtype=np.int64)
    found[order] = batches
    return found


def dearest_first(costs: NDArray[Any]) -> NDArray[np.int64]:
    """Return an order from the highest cost to the lowest; costs within 9 % of each other stay in the order given.

    That order is another one in each epoch. Were samples sorted exactly, those of a window that holds a whole data set
    would make the same batches in every epoch.
    """
    return np.argsort(-_levels(costs, _COARSE_STEPS), kind="stable")


def _levels(costs: NDArray[Any], steps: int) -> NDArray[np.int64]:
    """Return numbers that are nearly logarithms of costs, with so many steps from a power of two to the next."""
    mantissas, exponents = np.frexp(costs.astype(np.float64))
    exponents[costs == 0] = _BELOW_ALL
    return exponents.astype(np.int64) * steps + (mantissas * 2 * steps).astype(np.int64)


def alike_in_a_row(costs: NDArray[Any], *key: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return an order of batches in which neighbours cost about the same; it begins and ends where most of them are.

    Args:
        costs: The cost of each batch.
        key: Seeds where it begins, and the order of batches that cost the same.
        shuffle: Otherwise these are in their own order.
    """
    levels, count = _levels(costs, _STEPS), len(costs)
    tie = Shuffle(count, *key)(np.arange(count)) if shuffle else np.arange(count)
    rising = np.lexsort((tie, levels))
    ring = np.concatenate([rising[::2], rising[1::2][::-1]])
    median = levels[rising[count // 2]]
    usual = np.flatnonzero(np.abs(levels[ring] - median) <= 1)
    begin = usual[mix(*key) % len(usual)] if shuffle else usual[0]
    return np.roll(ring, -begin)


def cost_of(cost: Cost | None, measured: NDArray[Any]) -> NDArray[np.float64]:
    """Return what samples cost: a function of what is known of them, or just that.

    Raises:
        ConfigurationError: if the function does not return a number of at least 0 for each.
    """
    if cost is None:
        return measured.astype(np.float64)
    found = np.asarray(cost(measured))
    if found.shape != measured.shape or found.dtype.kind not in "iuf":
        raise ConfigurationError(
            f"cost of an array of {len(measured)} numbers should be as many numbers, but is {found.dtype}{found.shape}"
        )
    bad = np.flatnonzero(~((found >= 0) & (found < np.inf)))
    if bad.size:
        raise ConfigurationError(f"cost({measured[bad[0]]}) should be a number of at least 0, but is {found[bad[0]]}")
    return found.astype(np.float64)


def checksum_of(cost: Cost | None, measured: NDArray[Any]) -> int | None:
    """Return what tells a function of costs from others: a checksum of what it makes of some samples."""
    return None if cost is None else checksum(cost_of(cost, measured))["checksum"]
