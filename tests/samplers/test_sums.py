"""Sums of weights: samples come by their shares, whatever the weights were before."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError
from asyncloader.samplers.sums import SumTree

WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-150, 1e150), st.integers(1, 9).map(float))


def drawn_plainly(weights: list[float], share: float) -> int:
    """Go down a tree whose sums are made where they are needed."""

    def total(node: int) -> float:
        return weights[node - len(weights)] if node >= len(weights) else total(2 * node) + total(2 * node + 1)

    node, rest = 1, share * total(1)
    while node < len(weights):
        left = total(2 * node)
        if rest >= left and total(2 * node + 1) > 0:
            node, rest = 2 * node + 1, rest - left
        else:
            node = 2 * node
    return node - len(weights)


@settings(deadline=None)
@given(
    weights=st.lists(WEIGHTS, min_size=1, max_size=40),
    updates=st.lists(st.lists(st.tuples(st.integers(0, 39), WEIGHTS), max_size=8), max_size=4),
    shares=st.lists(st.one_of(st.floats(0, 1, exclude_max=True), st.just(math.nextafter(1, 0))), max_size=20),
)
def test_a_tree_finds_what_one_finds_that_is_made_anew(
    weights: list[float], updates: list[list[tuple[int, float]]], shares: list[float]
) -> None:
    """Bit for bit, and never a sample without a weight; of equal indices the last counts."""
    tree = SumTree(np.array(weights))
    for update in updates:
        update = [(index % len(weights), weight) for index, weight in update]
        tree.set(np.array([index for index, _ in update], np.int64), np.array([weight for _, weight in update]))
        for index, weight in update:
            weights[index] = weight
    assert tree._sums[len(weights) :].tolist() == weights
    if not any(weights):
        with pytest.raises(ConfigurationError, match="set all weights to 0"):
            tree.find(np.array([0.5]))
        return
    found = tree.find(np.array(shares)).tolist()
    assert found == SumTree(np.array(weights)).find(np.array(shares)).tolist()
    assert found == [drawn_plainly(weights, share) for share in shares]
    assert all(weights[index] for index in found)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 1000])
def test_shares_are_those_of_the_weights(count: int) -> None:
    """Equal steps from 0 to 1 find each sample as often as its weight says, to within one step at each end."""
    weights = np.random.default_rng(count).integers(0, 20, count).astype(float)
    weights[-1] = 3
    steps = int(weights.sum())
    shares = (np.arange(steps) + 0.5) / steps
    counts = np.bincount(SumTree(weights).find(shares), minlength=count)
    assert counts.tolist() == weights.tolist()


def test_rounding_leads_to_no_sample_without_a_weight() -> None:
    """Sums are rounded up, and what is left of a share may come to more than what is left of the weights."""
    weights = [0.0, 0.7000006675720214, 2.0**-53, 2.0**-53, 3.000002861022949, 0.0, 0.0, 0.0]
    assert SumTree(np.array(weights)).find(np.array([math.nextafter(1, 0)])).tolist() == [4]


def test_a_copy_is_a_copy() -> None:
    """What is changed in it is not changed in the tree."""
    tree = SumTree(np.ones(10))
    copied = copy.deepcopy(tree)
    copied.set(np.arange(9), np.zeros(9))
    assert set(copied.find(np.linspace(0, 0.99, 50)).tolist()) == {9}
    assert set(tree.find(np.linspace(0, 0.99, 50)).tolist()) == set(range(10))
