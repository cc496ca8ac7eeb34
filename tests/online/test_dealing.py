"""Dealing a step to ranks: equal cost, no rank without a unit, each unit once."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.online.dealing import deal


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 5))
def test_each_rank_gets_as_much(costs: list[int], ranks: int, spare: int) -> None:
    """Each unit goes to one rank, up to the number of units that a rank takes; no rank gets none."""
    most = -(-len(costs) // ranks) + spare
    parts = deal(costs, ranks, most)
    assert len(parts) == ranks
    assert all(0 < len(part) <= most and part == sorted(part) for part in parts)
    if len(costs) >= ranks:
        assert sorted(chain.from_iterable(parts)) == [*range(len(costs))]
    else:
        assert {place for part in parts for place in part} == {*range(len(costs))}
    totals = [sum(costs[place] for place in part) for part in parts]
    if spare == 5 and len(costs) > ranks and most >= len(costs):  # no rank is full: that of the dearest is the last
        assert max(totals) - min(totals) <= max(costs)


def test_equal_numbers() -> None:
    """Where a step is whole, ranks get as many units, and dear ones are apart."""
    parts = deal([9, 9, 1, 1, 1, 1], 2, 3)
    assert [len(part) for part in parts] == [3, 3]
    assert [sum([9, 9, 1, 1, 1, 1][place] for place in part) for part in parts] == [11, 11]
