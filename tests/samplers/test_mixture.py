"""MixtureSampler: shares, epochs of sources, ends, curricula, ranks that change."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import tracemalloc
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, SequentialSampler, TensorDataset

import asyncloader
from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import ElasticSampler, MixtureSampler
from tests.samplers.legs import draw
from tests.support import effort

WEIGHTS = st.lists(st.floats(0.001, 10) | st.just(0.0), min_size=1, max_size=6).filter(any)


def sources_of(sampler: MixtureSampler, samples: list[int]) -> np.ndarray[Any, Any]:
    return np.searchsorted(np.cumsum(sampler.lengths), samples, side="right")


@settings(deadline=None, max_examples=effort.examples(36))
@given(weights=WEIGHTS, seed=st.integers(0, 9), data=st.data())
def test_every_window_has_each_source_within_one_of_its_share(weights: list[float], seed: int, data: Any) -> None:
    """Of each 1,000 samples, and over all of them together within a few."""
    lengths = [data.draw(st.sampled_from([1, 3, 250, 10_000, 10**9])) for _ in weights]
    sampler = MixtureSampler(lengths, weights, seed=seed)
    found = sources_of(sampler, list(itertools.islice(sampler, 12_000))).reshape(12, 1000)
    share = 1000 * np.array(weights) / sum(weights)
    counts = np.stack([np.bincount(window, minlength=len(weights)) for window in found])
    assert (np.abs(counts - share) < 1.001).all()
    assert (np.abs(counts.sum(axis=0) - 12 * share) < 5).all()


def test_shares_of_thousandths_hold_from_any_sample_on() -> None:
    """Also in windows that begin anywhere; and a batch of 50 is near its share."""
    sampler = MixtureSampler([1000, 1000, 50], [0.5, 0.3, 0.2])
    found = sources_of(sampler, list(itertools.islice(sampler, 5000)))
    for source, share in enumerate([0.5, 0.3, 0.2]):
        before = np.concatenate([[0], np.cumsum(found == source)])
        assert (before[1000:] - before[:-1000] == 1000 * share).all()
        assert (np.abs(before[50:] - before[:-50] - 50 * share) <= 3).all()


@settings(deadline=None, max_examples=effort.examples(30))
@given(lengths=st.lists(st.integers(1, 60) | st.just(5000), min_size=1, max_size=4), data=st.data())
def test_each_source_is_gone_through_epoch_by_epoch(lengths: list[int], data: Any) -> None:
    """Each sample once before any comes again; and each epoch of a source has an order of its own."""
    weights = [data.draw(st.floats(0.1, 1)) for _ in lengths]
    sampler = MixtureSampler(lengths, weights, seed=data.draw(st.integers(0, 99)))
    samples = np.array(list(itertools.islice(sampler, 20_000)))
    found = sources_of(sampler, samples.tolist())
    start = 0
    for source, length in enumerate(lengths):
        own = samples[found == source] - start
        epochs = [own[first : first + length].tolist() for first in range(0, len(own) - length + 1, length)]
        assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
        if length > 20:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
        start += length


def test_orders_of_short_sources_are_uniform() -> None:
    """Each of the 24 orders of four samples comes about equally often over the epochs of a source."""
    samples = list(itertools.islice(MixtureSampler([4], seed=3), 4800))
    seen = Counter(tuple(samples[first : first + 4]) for first in range(0, 4800, 4))
    deviation = sum((seen[order] - 50) ** 2 / 50 for order in itertools.permutations(range(4)))
    assert deviation < 60  # chi-squared with 23 degrees of freedom: above in 4 of 100,000 cases


@settings(deadline=None, max_examples=effort.examples(36))
@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=4), data=st.data())
def test_where_an_epoch_ends(lengths: list[int], data: Any) -> None:
    """ "first": before any sample comes twice, and one would come next. "all": with the last sample that is missing."""
    weights = [data.draw(st.floats(0.05, 1)) for _ in lengths]
    first = MixtureSampler(lengths, weights, stop="first")
    samples = list(first)
    assert len(samples) == len(first) == len(set(samples))
    endless = list(itertools.islice(MixtureSampler(lengths, weights), len(samples) + 1))
    assert endless[:-1] == samples
    assert endless[-1] in samples
    whole = MixtureSampler(lengths, weights, stop="all")
    samples = list(whole)
    assert len(samples) == len(whole)
    assert set(samples) == set(range(sum(lengths)))
    assert set(samples[:-1]) != set(range(sum(lengths)))


@settings(deadline=None, max_examples=effort.examples(45))
@given(
    legs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 400)), max_size=4),
    last=st.integers(1, 9),
    stop=st.sampled_from(["first", "all"]),
    told_by=st.integers(0, 8),
)
def test_ranks_may_change_at_any_step(legs: list[tuple[int, int]], last: int, stop: Any, told_by: int) -> None:
    """Together they draw what one rank draws: nothing is repeated or left out before the end."""

    def make(ranks: int, rank: int) -> MixtureSampler:
        stages = [(0, [5, 3, 0]), (1000, [1, 1, 1])]
        return MixtureSampler([700, 40, 900], stages, stop=stop, num_replicas=ranks, rank=rank, seed=7)

    whole = list(make(1, 0))
    drawn = draw(make, legs, last, told_by=told_by)
    assert drawn[: len(whole)] == whole
    assert len(drawn) < len(whole) + 9


def test_a_curriculum_changes_shares_and_is_in_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """Also one that is set on the way, which a sampler made without it goes on with, and says so."""
    sampler = MixtureSampler([100, 100_000], [(0, [1, 0]), (1500, [1, 3])], seed=1)
    iterator = iter(sampler)
    samples = [next(iterator) for _ in range(1000)]
    sampler.set_weights([0, 1], at=4100)
    samples += [next(iterator) for _ in range(6000)]
    found = sources_of(sampler, samples)
    assert [found[a:b].sum() for a, b in ((0, 1500), (1500, 2500), (2500, 3500), (4100, 7000))] == [0, 750, 750, 2900]
    assert abs(found[3500:4100].sum() - 450) < 10
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state["weights"] == [[0, [1, 0]], [1500, [1, 3]], [4100, [0, 1]]]
    assert (state["epoch"], state["cursor"], state["world"]) == (0, 7000, 1)

    resumed = MixtureSampler([100, 100_000], [1, 1], seed=1)
    with caplog.at_level(logging.WARNING, "asyncloader"):
        resumed.load_state_dict(state)
    assert "Use set_weights to change them" in caplog.text
    assert resumed.weights == sampler.weights
    assert list(itertools.islice(resumed, 500)) == list(itertools.islice(iterator, 500))
    with pytest.raises(ConfigurationError, match="from sample 7500 on, but not from 7499"):
        resumed.set_weights([1, 0], at=7499)


@settings(deadline=None, max_examples=effort.examples(60))
@given(
    cuts=st.lists(st.integers(1, 6000), min_size=1, max_size=6, unique=True),
    ranks=st.integers(1, 4),
    data=st.data(),
)
def test_each_weight_holds_from_its_sample_on(cuts: list[int], ranks: int, data: Any) -> None:
    """However close two changes are: no stage is rounded away, and no sample of a source is left out or comes early."""
    lengths = [data.draw(st.integers(1, 4000)) for _ in range(3)]
    starts = [0, *sorted(cuts)]
    stages = [(start, [data.draw(st.integers(0, 3)) for _ in lengths]) for start in starts]
    stages = [(start, weights if any(weights) else [1, 0, 0]) for start, weights in stages]
    make = partial(MixtureSampler, lengths, num_replicas=ranks, seed=data.draw(st.integers(0, 99)))
    given = [make(stages, rank=rank) for rank in range(ranks)]
    samples = np.array([*zip(*(itertools.islice(one, 7000 // ranks) for one in given), strict=True)]).ravel()
    found = sources_of(given[0], samples.tolist())
    for (start, weights), end in zip(stages, [*starts[1:], len(found)], strict=True):
        alone = MixtureSampler(lengths, weights)
        assert found[start:end].tolist() == sources_of(alone, list(itertools.islice(alone, end - start))).tolist()
    for source, length in enumerate(lengths):
        drawn = samples[found == source][:length]
        assert len(set(drawn.tolist())) == len(drawn)

    said = make(stages[0][1], rank=0)
    for start, weights in stages[1:]:
        said.set_weights(weights, at=start)
    assert said.weights == given[0].weights
    assert list(itertools.islice(said, 7000 // ranks)) == samples[::ranks].tolist()


def test_an_order_that_would_be_ignored_is_refused() -> None:
    """A sampler has a length, that of one rank, but neither a mixture nor ranks would follow its order."""
    with pytest.raises(ConfigurationError, match="the order of a ElasticSampler would be ignored"):
        MixtureSampler([ElasticSampler(50), 10])
    with pytest.raises(ConfigurationError, match="the order of a SequentialSampler would be ignored"):
        ElasticSampler(SequentialSampler(range(9)))


def test_weights_that_are_set_again_at_one_place_replace_those_before() -> None:
    """So states do not grow with each change of mind."""
    sampler = MixtureSampler([10, 10], [1, 1])
    sampler.set_weights([1, 3], at=2000)
    sampler.set_weights([3, 1], at=2000)
    assert sampler.weights == [(0, [1, 1]), (2000, [3, 1])]


def test_weights_hold_from_the_sample_that_is_named_or_are_refused() -> None:
    """However many samples were read, and named ahead: the order is that of a sampler that was told at the start."""
    for read in (0, 1, 63, 64, 65, 500):
        for ahead in (-1, 0, 1, 64, 300):
            sampler, told, at = MixtureSampler([50, 50], [1, 1]), MixtureSampler([50, 50], [1, 1]), read + ahead
            samples = iter(sampler)
            drawn = list(itertools.islice(samples, read))
            if ahead < 0:
                with pytest.raises(ConfigurationError):
                    sampler.set_weights([9, 1], at=at)
                continue
            for each in (sampler, told):
                each.set_weights([9, 1], at=at)
            drawn += itertools.islice(samples, 2000)
            assert drawn == list(itertools.islice(told, len(drawn))), (read, ahead)


def test_weights_from_another_thread_are_exact_or_refused() -> None:
    """While samples are drawn: the epoch is that of the weights that were taken."""
    sampler, has_begun, taken = MixtureSampler([50, 50], [1, 1]), threading.Event(), []
    samples = iter(sampler)

    def change() -> None:
        has_begun.wait()
        for number in range(300):
            at = sampler.state_dict()["cursor"] + (1, 40, 5000)[number % 3]
            try:
                sampler.set_weights([1 + number % 9, 1], at=at)
                taken.append((number, at))
            except ConfigurationError:
                pass

    other = threading.Thread(target=change)
    other.start()
    drawn = [next(samples)]
    has_begun.set()
    while other.is_alive():
        drawn.append(next(samples))
    drawn += itertools.islice(samples, 1000)
    told = MixtureSampler([50, 50], [1, 1])
    for number, at in taken:
        told.set_weights([1 + number % 9, 1], at=at)
    assert drawn == list(itertools.islice(told, len(drawn)))


def test_weights_that_would_change_the_past_or_the_end_are_refused() -> None:
    """What was read has its weights, and what has an end keeps it."""
    sampler = MixtureSampler([10, 10], [1, 1])
    next(iter(sampler))
    with pytest.raises(ConfigurationError, match="can change from sample 1 on, but not from 0"):
        sampler.set_weights([1, 0], at=0)
    with pytest.raises(ConfigurationError, match="stop=None"):
        MixtureSampler([10, 10], [1, 1], stop="all").set_weights([1, 0], at=1000)


def test_huge_sources_take_no_memory() -> None:
    """Sources of ten billion samples: an order, a state and going on in the middle, in some hundred kilobytes."""
    lengths = [10**10, 3 * 10**10]
    sampler = MixtureSampler(lengths, stop="first")
    tracemalloc.start()
    drawn = list(itertools.islice(sampler, 3000))
    state = {**sampler.state_dict(), "cursor": 12_345_678_901}
    resumed = MixtureSampler(lengths, stop="first")
    resumed.load_state_dict(state)
    drawn += itertools.islice(resumed, 3000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(drawn)) == 6000
    assert peak < 3_000_000
    assert len(json.dumps(state)) < 400


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """The same numbers give the same order; without shuffling, each source is in its own."""
    sampler = MixtureSampler([500, 500], stop="first", seed=1)
    orders = [list(sampler), list(sampler), list(MixtureSampler([500, 500], stop="first", seed=2))]
    sampler.set_epoch(1)
    orders.append(list(sampler))
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    plain = list(MixtureSampler([500, 500], stop="first", shuffle=False))
    assert [sample for sample in plain if sample < 500] == list(range(500))


def test_over_a_concatenated_dataset_with_torchs_loader() -> None:
    """Lengths are those of its parts."""
    parts = [TensorDataset(torch.arange(30)), TensorDataset(torch.arange(30, 40))]
    dataset = ConcatDataset(parts)
    sampler = MixtureSampler(dataset, [1, 1], stop="all")
    assert sampler.lengths == [30, 10]
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, num_workers=1)
    first = [int(value) for batch in itertools.islice(loader, 2) for value in batch[0]]
    sampler.load_state_dict(sampler.state_after(20))
    rest = [int(value) for batch in loader for value in batch[0]]
    assert first + rest == list(MixtureSampler(dataset, [1, 1], stop="all"))
    with pytest.raises(TypeError, match="has no end"):
        len(MixtureSampler(dataset, [1, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [], "weights": []}, "should name sources"),
        ({"lengths": [3, -1], "weights": [1, 1]}, "no less than 0 samples"),
        ({"lengths": [3, 3], "weights": [1]}, "there are 2 sources, but 1 weights"),
        ({"lengths": [3, 3], "weights": [1, -1]}, "0 or more, and not all 0"),
        ({"lengths": [3, 3], "weights": [0, 0]}, "0 or more, and not all 0"),
        ({"lengths": [3, 3], "weights": [1, float("nan")]}, "0 or more, and not all 0"),
        ({"lengths": [3, 3], "weights": [1, 1e-12]}, "at least 1e-09 of all"),
        ({"lengths": [3, 0], "weights": [1, 1]}, "a source without samples has a weight"),
        ({"lengths": [3, 3], "weights": [(10, [1, 1])]}, "should hold from sample 0 on"),
        (
            {"lengths": [3, 3], "weights": [(0, [1, 1]), (7, [1, 2]), (7, [2, 1])]},
            "the same sample has several weights",
        ),
        ({"lengths": [3, 3], "weights": [(0, [1, 1]), (2.5, [1, 2])]}, "at least 0, but got 2.5"),
        ({"lengths": [3, 3], "weights": [(0, [1, 1]), (-2, [1, 2])]}, "at least 0, but got -2"),
        ({"lengths": [3, 5000], "weights": [(0, [1, 1]), (1000, [1, 0])], "stop": "all"}, "never ends: source 1"),
        ({"lengths": [3, 3], "weights": [1, 1], "stop": "last"}, "stop should be one of 'first', 'all'"),
        ({"lengths": [3, 3], "weights": [1, 1], "num_replicas": 2, "rank": 2}, "Invalid rank 2"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """At construction, with what is wrong."""
    with pytest.raises(ConfigurationError, match=message):
        MixtureSampler(**options)


def test_shares_are_of_what_samples_cost() -> None:
    """By an array for each source, or its mean; also of weights that change."""
    draw = np.random.default_rng(0)
    costs = [draw.integers(500, 1500, 300), draw.integers(1, 20, 4000)]
    for by in (costs, [float(own.mean()) for own in costs]):
        sampler = MixtureSampler([300, 4000], [(0, [1, 3]), (40_000, [1, 1])], by=by)
        samples = np.array([*itertools.islice(sampler, 60_000)])
        cost = np.concatenate(costs)[samples]
        for part, share in ((slice(0, 40_000), 0.25), (slice(40_000, None), 0.5)):
            assert abs(cost[part][samples[part] < 300].sum() / cost[part].sum() - share) < 0.03
        assert sampler.weights == [(0, [1, 3]), (40_000, [1, 1])]
    for bad in ([1.0], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ConfigurationError, match="by should be"):
            MixtureSampler([3, 4], [1, 1], by=bad)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_sources_may_be_added_at_a_resume(weight: float) -> None:
    """Those that were there go on where they were, in the sampler's states and in the loader's; on other ranks, too."""
    lengths = [50, 70]
    datasets = [TensorDataset(torch.arange(length)) for length in (*lengths, 90)]
    begun = MixtureSampler(lengths, [1, 1])
    whole = [*itertools.islice(begun, 1040)]
    loader = asyncloader.DataLoader(ConcatDataset(datasets[:2]), 4, sampler=MixtureSampler(lengths, [1, 1]))
    given = list(itertools.islice(loader, 10))
    more = MixtureSampler([*lengths, 90], [1, 1, weight])
    other = asyncloader.DataLoader(ConcatDataset(datasets), 4, sampler=more)
    other.load_state_dict(loader.state_dict())
    assert len(given) == 10
    assert len([*itertools.islice(other, 5)]) == 5
    ranks = [MixtureSampler([*lengths, 90], [1, 1, weight], num_replicas=2, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(json.loads(json.dumps(begun.state_after(40))))
    found = [index for pair in zip(*(itertools.islice(rank, 500) for rank in ranks), strict=True) for index in pair]
    old = [index for index in found if index < 120]
    for first, last in ((0, 50), (50, 120)):  # each goes on in its order
        own = [[index for index in part if first <= index < last] for part in (whole[40:], old)]
        count = min(map(len, own))
        assert own[0][:count] == own[1][:count]
    assert len(found) - len(old) == 1000 * weight / (2 + weight)
    again = MixtureSampler([*lengths, 90], [1, 1, weight])
    again.load_state_dict(ranks[0].state_after(100))
    assert [*itertools.islice(again, 100)] == found[200:300]
    ends = MixtureSampler(lengths, [1, 1], stop="all")
    with pytest.raises(StateMismatchError, match="lengths"):
        MixtureSampler([*lengths, 90], [1, 1, 1], stop="all").load_state_dict(ends.state_dict())


def test_a_state_of_another_mixture_is_refused() -> None:
    """With the field that differs."""
    state = MixtureSampler([3, 4]).state_dict()
    for other, field in ((MixtureSampler([3, 5]), "lengths"), (MixtureSampler([3, 4], stop="all"), "stop")):
        with pytest.raises(StateMismatchError, match=f"{field} was"):
            other.load_state_dict(state)


def test_names_of_sources_are_no_order() -> None:
    """Of mappings the error says how to write the list."""
    weights: Any = {"a": 7, "b": 3}
    with pytest.raises(ConfigurationError, match=r"weights should be a list .*: weights=\[7, 3\], but got"):
        MixtureSampler([10, 10], weights=weights)
    with pytest.raises(ConfigurationError, match="weights should be a list"):
        MixtureSampler([10, 10]).set_weights(weights, 1000)
    lengths: Any = {"a": 10, "b": 10}
    with pytest.raises(ConfigurationError, match="lengths should be a list"):
        MixtureSampler(lengths, weights=[7, 3])
