"""WeightedSampler: probabilities, with and without replacement, ranks that change."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import WeightedSampler, weighted
from asyncloader.seeding.hashing import mix
from tests.samplers.legs import draw


def test_samples_come_by_their_weights() -> None:
    """As often as their share says, to within chance; those without a weight never."""
    weights = [1.0, 0.0, 2.0, 5.0, 0.0]
    seen = Counter(WeightedSampler(weights, 16_000, seed=5))
    assert set(seen) == {0, 2, 3}
    deviation = sum((seen[i] - 2000 * weights[i]) ** 2 / (2000 * weights[i]) for i in seen)
    assert deviation < 20  # chi-squared with 2 degrees of freedom: above in 5 of 100,000 cases


def test_without_replacement_each_comes_once_and_the_heavy_ones_first() -> None:
    """The first one drawn is each sample with the probability that is its share."""
    weights = np.array([1.0, 3.0, 0.0, 4.0])
    first: Counter[int] = Counter()
    for seed in range(1600):
        drawn = list(WeightedSampler(weights, 3, replacement=False, seed=seed))
        assert sorted(drawn) == [0, 1, 3]
        first[drawn[0]] += 1
    deviation = sum((first[i] - 200 * weights[i]) ** 2 / (200 * weights[i]) for i in (0, 1, 3))
    assert deviation < 20


TINY, LARGE = 5e-324, 1.7e308
EDGES = [
    [TINY, TINY, TINY],
    [LARGE, LARGE, LARGE],
    [0.0, LARGE, 0.0, LARGE, LARGE],
    [1e-309, 2e-309, 1e-309],
    [2.3e-308, 2.3e-308, 1e-309],
    [1e308, 5e307, 2e307],
]


@pytest.mark.parametrize("weights", EDGES, ids=str)
@pytest.mark.parametrize("replacement", [True, False])
def test_weights_at_the_ends_of_the_range_of_floats(weights: list[float], replacement: bool) -> None:
    """Are drawn as often as any others in these proportions, and 0 is never drawn."""
    counts = np.zeros(len(weights))
    if replacement:
        counts += np.bincount(list(WeightedSampler(weights, 4000)), minlength=len(weights))
    else:
        for seed in range(4000):
            counts[next(iter(WeightedSampler(weights, 2, replacement=False, seed=seed)))] += 1
    scaled = np.array([float(Fraction(weight) / sum(map(Fraction, weights))) for weight in weights])
    assert not counts[scaled == 0].any()
    there = scaled > 0
    assert ((counts - 4000 * scaled)[there] ** 2 / (4000 * scaled[there])).sum() < 25


def test_the_smallest_weight_is_more_than_none() -> None:
    """Without replacement it comes after all larger ones, and among its like in any order; 0 never comes."""
    weights = [0.0, TINY, 1.0, TINY, LARGE, 0.0]
    seen: Counter[tuple[int, ...]] = Counter()
    for epoch in range(200):
        sampler = WeightedSampler(weights, 4, replacement=False)
        sampler.set_epoch(epoch)
        seen[tuple(sampler)] += 1
    assert set(seen) == {(4, 2, 1, 3), (4, 2, 3, 1)}
    assert min(seen.values()) > 60


def test_ordinary_weights_are_drawn_as_ever() -> None:
    """Bit for bit: by the plain formulas, and whatever power of two they are scaled by."""
    weights = np.random.default_rng(0).random(1000) ** 4
    uniform = weighted._uniform(np.arange(1000), np.uint64(mix(3, 0)))
    race = np.argsort(-np.log1p(-uniform) / weights, kind="stable")
    for scale in (1.0, 2.0**-900, 2.0**900):
        assert list(WeightedSampler(weights * scale, 1000, replacement=False, seed=3)) == race.tolist()
        ends = np.cumsum(weights)
        assert (
            list(WeightedSampler(weights * scale, 1000, seed=3))
            == np.searchsorted(ends, uniform * ends[-1], "right").tolist()
        )


@settings(deadline=None, max_examples=60)
@given(
    legs=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), max_size=4),
    last=st.integers(1, 6),
    replacement=st.booleans(),
)
def test_ranks_may_change_at_any_step(legs: list[tuple[int, int]], last: int, replacement: bool) -> None:
    """Together they draw what one rank draws."""
    weights = np.arange(1, 201)

    def make(ranks: int, rank: int) -> WeightedSampler:
        return WeightedSampler(weights, 150, replacement, num_replicas=ranks, rank=rank, seed=2)

    whole = list(make(1, 0))
    assert len(whole) == len(make(1, 0)) == 150
    drawn = draw(make, legs, last)
    assert drawn[:150] == whole
    assert len(drawn) < 156


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1, -1], {}, "0 or more"),
        ([1, float("inf")], {}, "0 or more"),
        ([1, float("nan")], {}, "0 or more"),
        ([], {}, "not be all 0"),
        ([[1, 1]], {}, "one row"),
        ([0, 0], {}, "not be all 0"),
        ([1, 0], {"num_samples": 2, "replacement": False}, "2 samples cannot be drawn without replacement: 1 have"),
        ([1, 1], {"num_samples": 0}, "at least 1"),
    ],
)
def test_bad_options_are_refused(weights: Any, options: dict[str, Any], message: str) -> None:
    """At construction, with what is wrong."""
    with pytest.raises(ConfigurationError, match=message):
        WeightedSampler(weights, **options)


def test_a_state_of_other_weights_is_refused() -> None:
    """By a checksum of them."""
    with pytest.raises(StateMismatchError, match="weights was"):
        WeightedSampler([1, 2]).load_state_dict(WeightedSampler([1, 3]).state_dict())
