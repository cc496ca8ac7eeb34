"""What units cost: a histogram that stays small, whatever comes."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.online.costs import Costs


@given(st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=1, max_size=60))
def test_quantiles_are_right_to_five_percent(values: list[float]) -> None:
    """Of any costs: the mean and the most are exact, and a state has the same."""
    costs = Costs()
    for value in values:
        costs.add(value)
    count, mean, *quantiles, most = Costs.of(pickle.loads(pickle.dumps(costs.state()))).summary()
    assert (count, mean, most) == (len(values), pytest.approx(sum(values) / len(values)), max(values))
    for share, found in zip((0.1, 0.5, 0.9), quantiles, strict=True):
        exact = sorted(values)[max(0, -(-len(values) * round(share * 10) // 10) - 1)]
        assert found == pytest.approx(exact, rel=0.05, abs=0)


def test_memory_is_bounded() -> None:
    """Costs from one token to a million tokens take no more bins than those have doublings."""
    costs, numbers = Costs(), random.Random(0)
    for _ in range(50_000):
        costs.add(numbers.randint(1, 1_000_000))
    assert len(costs._bins) <= 8 * 20 + 1
