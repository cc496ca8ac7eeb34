"""What is left out of the quick tests is only the combination, never a value nor a pair of values."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import cover

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def product(sizes: list[int]) -> list[dict[str, int]]:
    names = [f"parameter {number}" for number in range(len(sizes))]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*map(range, sizes))]


def parts(combinations: list[dict[str, int]], strength: int) -> set[object]:
    return {part for values in combinations for part in itertools.combinations(sorted(values.items()), strength)}


@given(SIZES, st.sampled_from([1, 2]))
def test_every_part_of_the_product_is_in_the_choice(sizes: list[int], strength: int) -> None:
    """Values, or pairs of values."""
    everything = product(sizes)
    chosen = [everything[place] for place in cover(everything, strength)]
    assert parts(chosen, strength) == parts(everything, strength)


@given(SIZES)
def test_values_alone_need_as_many_as_the_longest_parameter_has(sizes: list[int]) -> None:
    """Each step takes a new value of every parameter that has one left."""
    assert len(cover(product(sizes), 1)) == max(sizes)


def test_pairs_need_a_fraction_of_the_product() -> None:
    """Four parameters with three values each: 81 combinations, of which nine would do at best."""
    assert len(cover(product([3, 3, 3, 3]), 2)) <= 15


def test_values_come_equally_often() -> None:
    """The short parameter is not left at one value."""
    everything = product([10, 2])
    second = [everything[place]["parameter 1"] for place in cover(everything, 1)]
    assert second.count(0) == second.count(1) == 5
