"""BalancedBatchSampler: batches of a step cost the same, on any number of ranks; and the packing of batches that do."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import BalancedBatchSampler, MixtureSampler, PackingBatchSampler
from asyncloader.samplers.balance import alike_in_a_row, balanced, dearest_first
from tests.support import effort

Numbers = np.ndarray[Any, Any]


def log_normal(count: int, seed: int = 0) -> Numbers:
    drawn = np.random.default_rng(seed).lognormal(np.log(500) - 0.5, 1.0, count)
    return drawn.astype(np.int64).clip(1, 8192)


def attention(lengths: Numbers) -> Numbers:
    return lengths + lengths * lengths / 4096


def imbalance(totals: Numbers, ranks: int) -> Numbers:
    """Return the largest cost over the mean of each step."""
    steps = totals[: len(totals) // ranks * ranks].reshape(-1, ranks)
    found: Numbers = steps.max(axis=1) / steps.mean(axis=1)
    return found


def totals_of(sampler: Any, costs: Numbers) -> Numbers:
    return np.array([costs[batch].sum() for batch in sampler])


@pytest.mark.parametrize("cost", [None, attention])
@pytest.mark.parametrize("options", [{"batch_size": 8}, {"batch_size": 32}], ids=str)
def test_batches_of_a_step_cost_the_same(cost: Any, options: Any) -> None:
    """Log-normal lengths: the slowest of 8 ranks takes 3 % more than the mean at most, of random batches half as much
    again; and the order of batches is one for any number of ranks.
    """
    lengths = log_normal(131_072)
    costs = lengths if cost is None else cost(lengths)
    alone = BalancedBatchSampler(lengths, cost=cost, num_replicas=1, rank=0, **options)
    batches = list(alone)
    totals = totals_of(batches, costs)
    assert imbalance(totals, 8).mean() <= 1.03
    assert imbalance(totals, 3).mean() <= 1.03
    at_random = costs.reshape(-1, 8 if options == {"batch_size": 8} else 32).sum(axis=1)
    assert imbalance(at_random, 8).mean() > 1.3
    of_rank = BalancedBatchSampler(lengths, cost=cost, num_replicas=8, rank=3, **options)
    steps = len(batches) // 8
    assert list(itertools.islice(of_rank, steps)) == batches[3 : steps * 8 : 8]


def test_dear_batches_come_at_any_time_and_their_like_beside_them() -> None:
    """Where a sample costs more than a mean batch, nothing evens it out: batches of the same step are dear, too."""
    lengths = log_normal(65_536)
    totals = totals_of(BalancedBatchSampler(lengths, batch_size=2), lengths)
    assert totals.max() > 8 * totals.mean()
    assert imbalance(totals, 8).mean() <= 1.03
    dearest = [int(part.argmax()) for part in np.split(totals, 4)]
    assert len({place // 1000 for place in dearest}) > 1


@settings(deadline=None, max_examples=effort.examples(120))
@given(
    costs=st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=1, max_size=120),
    count=st.integers(1, 30),
    slack=st.integers(0, 3),
)
def test_each_sample_goes_to_the_cheapest_batch_that_has_room(costs: list[float], count: int, slack: int) -> None:
    """The dearest first, as looking at all batches finds it; among equals the one with the fewest samples."""
    most = -(-len(costs) // count) + slack
    totals, sizes, expected = [0.0] * count, [0] * count, {}
    for sample in dearest_first(np.array(costs)).tolist():
        batch = min((batch for batch in range(count) if sizes[batch] < most), key=lambda b: (totals[b], sizes[b], b))
        totals[batch] += costs[sample]
        sizes[batch] += 1
        expected[sample] = batch
    assert balanced(np.array(costs), count, most).tolist() == [expected[sample] for sample in range(len(costs))]
    if len(costs) >= count:
        assert min(sizes) > 0


@given(costs=st.lists(st.floats(0, 1e300) | st.integers(0, 40), min_size=1, max_size=100))
def test_costs_that_are_close_stay_in_the_order_of_the_epoch(costs: list[float]) -> None:
    """Those of 9 % or more between them are sorted; among equals, the first of the epoch is the first."""
    order = dearest_first(np.array(costs)).tolist()
    assert sorted(order) == list(range(len(costs)))
    for here, after in itertools.pairwise(order):
        assert costs[here] >= costs[after] / 1.126
        if costs[here] == costs[after] or costs[here] < costs[after]:
            assert here < after


@settings(deadline=None)
@given(costs=st.lists(st.floats(0, 1e300), min_size=1, max_size=300), seed=st.integers(0, 9), shuffle=st.booleans())
@example(costs=[0.0, 1.0, 2.0, 0.125], seed=0, shuffle=False)
def test_neighbours_cost_about_the_same(costs: list[float], seed: int, shuffle: bool) -> None:
    """All batches come, and round the ring no more lies between two neighbours than one step of the sorted costs."""
    order = alike_in_a_row(np.array(costs), seed, 1, shuffle=shuffle)
    assert sorted(order) == list(range(len(costs)))
    rows = np.array(costs)[order]
    for here, beside in zip(rows, np.roll(rows, 1), strict=True):
        between = sum(min(here, beside) * 1.01 < cost < max(here, beside) * 0.99 for cost in costs)
        assert between <= 1


@settings(deadline=None, max_examples=effort.examples(75))
@given(count=st.integers(1, 400), batch_size=st.integers(1, 20), window=st.integers(1, 300), drop_last=st.booleans())
def test_all_batches_have_as_many_samples(count: int, batch_size: int, window: int, drop_last: bool) -> None:
    """Those of the last window may have fewer, so that none is missing; or else these are dropped."""
    sampler = BalancedBatchSampler(
        log_normal(count), batch_size=batch_size, window=window, drop_last=drop_last, num_replicas=1, rank=0
    )
    batches = list(sampler)
    assert len(batches) == len(sampler)
    samples = [index for batch in batches for index in batch]
    assert len(set(samples)) == len(samples) == (count // batch_size * batch_size if drop_last else count)
    in_window = max(1, window // batch_size)
    for place, batch in enumerate(batches):
        if drop_last or place < len(batches) - in_window:
            assert len(batch) == batch_size
        assert 1 <= len(batch) <= batch_size


def test_costs_are_any_numbers_and_may_all_be_nothing(tmp_path: Path) -> None:
    """Seconds that were measured, in all forms that lengths come in; where nothing costs anything, batches are even."""
    seconds = log_normal(300) / 1e4
    np.save(tmp_path / "costs.npy", seconds)
    expected = list(BalancedBatchSampler(seconds, batch_size=7))
    forms: list[Any] = [seconds.tolist(), torch.from_numpy(seconds), tmp_path / "costs.npy"]
    for form in forms:
        assert list(BalancedBatchSampler(form, batch_size=7)) == expected
    nothing = BalancedBatchSampler([0] * 40, batch_size=4, num_replicas=3, rank=1)
    assert list(map(len, nothing)) == [4, 4, 4, 1]


def test_a_mixture_by_length_is_balanced() -> None:
    """Orders of other samplers: what they draw is drawn."""
    lengths = log_normal(30_000)
    mixture = MixtureSampler([10_000, 20_000], [3, 1], seed=1)
    sampler = BalancedBatchSampler(lengths, batch_size=16, sampler=mixture, num_replicas=8, rank=0)
    taken = np.array(list(itertools.islice(sampler, 100))).flatten()
    assert abs((taken < 10_000).mean() - 0.75) < 0.05


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ([], {}, "there are no costs"),
        ([[1, 2]], {}, "costs should be one row of numbers"),
        (["a"], {}, "costs should be one row of numbers"),
        ([1, -2, 3], {}, "sample 1 has a cost of -2"),
        ([1, float("nan"), 3], {}, "sample 1 has a cost of nan"),
        ([1, float("inf"), 3], {}, "sample 1 has a cost of inf"),
        ([1, 2], {"sampler": MixtureSampler([3])}, "there are 2 costs, but the sampler is one of 3 samples"),
        ([1, 2], {"sampler": range(2)}, "but is a range"),
        ([1, 2], {"batch_size": 0}, "batch_size should be an integer of at least 1"),
        ([1, 2], {"cost": lambda n: 1.0}, "cost of an array of 2 numbers should be as many numbers"),
        ([1, 2], {"cost": lambda n: n - 2}, r"cost\(1.0\) should be a number of at least 0, but is -1.0"),
        ([1, 2], {"cost": lambda n: n / 0}, r"cost\(1.0\) should be a number of at least 0, but is inf"),
        ([1, 2], {"window": 0}, "window should be an integer of at least 1"),
        ([1, 2], {"rank": 3}, "Invalid rank 3"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_options_are_refused(costs: Any, options: dict[str, Any], message: str) -> None:
    """At construction, with what is wrong."""
    with pytest.raises(ConfigurationError, match=message):
        BalancedBatchSampler(costs, **{"batch_size": 2, **options})


def test_another_cost_is_another_sampler() -> None:
    """Functions cannot be compared; what they return for some hundreds of samples can."""
    lengths = log_normal(500)

    def make(cost: Any) -> BalancedBatchSampler:
        return BalancedBatchSampler(lengths, batch_size=4, cost=cost)

    state = make(attention).state_dict()
    make(lambda n: n * (1 + n / 4096)).load_state_dict(make(lambda n: n * (1 + n / 4096)).state_dict())
    make(attention).load_state_dict(state)
    for other in (None, lambda n: n + n * n / 2048):
        with pytest.raises(StateMismatchError, match="fit: cost was"):
            make(other).load_state_dict(state)


@pytest.mark.parametrize(("block_size", "batch_size", "ranks"), [(8192, 4, 8), (8192, 1, 4), (2048, 8, 8)])
def test_packed_batches_of_a_step_cost_the_same(block_size: int, batch_size: int, ranks: int) -> None:
    """Of blocks that are as full as without: what attention within documents costs differs between full blocks."""
    lengths = log_normal(65_536).clip(1, block_size)
    options: Any = {"block_size": block_size, "batch_size": batch_size, "window": 16_384}
    plain = PackingBatchSampler(lengths, **options)
    by_cost = PackingBatchSampler(lengths, cost=attention, **options)
    before, after = (imbalance(totals_of(sampler, attention(lengths)), ranks).mean() for sampler in (plain, by_cost))
    assert after <= 1.03
    assert after - 1 < (before - 1) / 4
    assert by_cost.fill > plain.fill - 0.01


def test_states_of_packing_by_cost() -> None:
    """A state is of the cost, by what it returns; with one, the batch size belongs to it."""
    make = partial(PackingBatchSampler, log_normal(500), block_size=8192)
    for one, other in ((None, attention), (attention, None), (attention, np.square)):
        make(cost=one).load_state_dict(make(cost=one).state_dict())
        with pytest.raises(StateMismatchError, match="fit: cost was"):
            make(cost=other).load_state_dict(make(cost=one).state_dict())
    make(batch_size=3).load_state_dict(make().state_dict())
    with pytest.raises(StateMismatchError, match="fit: batch_size was"):
        make(cost=attention, batch_size=3).load_state_dict(make(cost=attention).state_dict())
    with pytest.raises(ConfigurationError, match="cost of an array of 256 numbers should be as many"):
        make(cost=lambda n: 1)
