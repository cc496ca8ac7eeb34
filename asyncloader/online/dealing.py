"""Dealing: which units of a step each rank gets. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncloader.samplers.balance import balanced


def deal(costs: Sequence[float], ranks: int, most: int) -> list[list[int]]:
    """Return which units of a step each rank gets, so that ranks cost about the same. No rank gets none.

    Args:
        costs: The costs of the units of the step; at least one unit.
        ranks: How many ranks there are.
        most: How many units a rank gets at most; with all ranks no fewer than there are units.

    Returns:
        For each rank the places of its units among those of the step, ascending. Each unit goes to one rank; but where
        units are fewer than ranks, the ranks beyond repeat them.
    """
    count = len(costs)
    if count <= ranks:
        return [[rank % count] for rank in range(ranks)]
    if ranks == 1:
        return [[*range(count)]]
    found = balanced(np.asarray(costs, dtype=np.float64), ranks, most)
    return [np.flatnonzero(found == rank).tolist() for rank in range(ranks)]
