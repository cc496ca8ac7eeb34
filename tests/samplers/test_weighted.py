"""WeightedSampler: probabilities, with and without replacement, ranks that change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import WeightedSampler, weighted
from asyncloader.seeding.hashing import mix
from tests.samplers.legs import draw
from tests.support import effort


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


def test_weights_at_the_ends_of_their_range_are_drawn_as_any() -> None:
    """As often as any others in these proportions; without replacement the smallest one comes last, and 0 never."""
    weights = np.array([1e-150, 3e-150, 0.0, 4e-150])
    for scale in (1.0, 1e299):
        counts = np.bincount(list(WeightedSampler(weights * scale, 8000)), minlength=4)
        assert not counts[2]
        assert ((counts - np.array([1000, 3000, 0, 4000]))[[0, 1, 3]] ** 2 / [1000, 3000, 4000]).sum() < 25
    for epoch in range(20):
        sampler = WeightedSampler([0.0, 1e-150, 1.0, 1e150], 3, replacement=False)
        sampler.set_epoch(epoch)
        assert list(sampler) == [3, 2, 1]


def test_orders_are_those_of_the_plain_formulas() -> None:
    """A position has a number from 0 to 1; it falls on a sample, or makes a sample arrive."""
    weights = np.random.default_rng(0).random(1000) ** 4
    uniform = weighted._uniform(np.arange(1000), np.uint64(mix(3, 0)))
    race = np.argsort(-np.log1p(-uniform) / weights, kind="stable")
    assert list(WeightedSampler(weights, 1000, replacement=False, seed=3)) == race.tolist()
    sums = np.cumsum(weights)
    assert list(WeightedSampler(weights, 1000, seed=3)) == np.searchsorted(sums, uniform * sums[-1], "right").tolist()


def test_a_share_that_is_rounded_up_to_the_sum_is_of_a_sample_with_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of these; of those around it none has a weight."""
    monkeypatch.setattr(weighted, "_uniform", lambda positions, key: np.full(len(positions), 1.0))
    assert list(WeightedSampler([1.0, 3.0, 0.0, 0.0], 2)) == [1, 1]
    monkeypatch.setattr(weighted, "_uniform", lambda positions, key: np.zeros(len(positions)))
    assert list(WeightedSampler([0.0, 0.0, 1.0, 3.0], 2)) == [2, 2]


@settings(deadline=None, max_examples=effort.examples(90))
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
    if not replacement:
        assert drawn[150:] == whole[: len(drawn) - 150]


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1, -1], {}, "0, or from 1e-150 to"),
        ([1, float("inf")], {}, "0, or from 1e-150 to"),
        ([1, float("nan")], {}, "0, or from 1e-150 to"),
        ([1, 1e-200], {}, "0, or from 1e-150 to"),
        (["much"], {}, "one row"),
        ([], {}, "num_samples should be an integer of at least 1"),
        ([[1, 1]], {}, "one row"),
        ([0, 0], {}, "0 samples have a weight above 0, and 1 are needed"),
        ([1, 0], {"num_samples": 2, "replacement": False}, "1 samples have a weight above 0, and 2 are needed"),
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


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_weights_are_a_row_of_ones_own(kind: Any) -> None:
    """Of any kind; what is written into the row later changes nothing."""
    row = kind([1.0, 2.0, 0.0, 4.0])
    sampler, plain = WeightedSampler(row, 50), WeightedSampler([1, 2, 0, 4], 50)
    row[1] = row[3] = 0.0
    assert [*sampler] == [*plain]
