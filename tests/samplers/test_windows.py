"""What batch samplers that plan do alike: each sample once, in equal steps, on ranks that change any time; composed."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)
from tests.samplers.legs import draw, flat
from tests.support import effort

Lengths = np.ndarray[Any, Any]


def by_length(lengths: Any, ranks: int = 1, rank: int = 0, **options: Any) -> LengthBatchSampler:
    options = {"max_tokens": 600, "window": 64, "seed": 4, **options}
    return LengthBatchSampler(lengths, num_replicas=ranks, rank=rank, **options)


def packed(lengths: Any, ranks: int = 1, rank: int = 0, **options: Any) -> PackingBatchSampler:
    options = {"block_size": 150, "batch_size": 2, "window": 64, "seed": 4, **options}
    return PackingBatchSampler(lengths, num_replicas=ranks, rank=rank, **options)


def packed_by_cost(lengths: Any, ranks: int = 1, rank: int = 0, **options: Any) -> PackingBatchSampler:
    return packed(lengths, ranks, rank, **{"cost": lambda sizes: sizes * sizes, **options})


def balanced(lengths: Any, ranks: int = 1, rank: int = 0, **options: Any) -> BalancedBatchSampler:
    options = {"batch_size": 5, "window": 64, "seed": 4, **options}
    return BalancedBatchSampler(lengths, num_replicas=ranks, rank=rank, **options)


KINDS: dict[str, Callable[..., Any]] = {
    "lengths": by_length,
    "packing": packed,
    "packing by cost": packed_by_cost,
    "balanced": balanced,
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_of_lengths = pytest.mark.parametrize("kind", ["lengths", "packing"])


def some_lengths(count: int, seed: int = 0) -> Lengths:
    return np.random.default_rng(seed).integers(1, 151, count)


@each_kind
@settings(deadline=None, max_examples=effort.examples(60))
@given(
    count=st.integers(1, 700),
    legs=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 25)), max_size=4),
    last=st.integers(1, 8),
    shuffle=st.booleans(),
    told_by=st.integers(0, 7),
)
def test_every_sample_comes_once_whatever_the_ranks(
    kind: str, count: int, legs: list[tuple[int, int]], last: int, shuffle: bool, told_by: int
) -> None:
    """In every leg each rank gets as many batches; counted over all, nothing is lost, and nothing comes twice.

    Where fewer samples are left at the end than there are ranks, some of these come to several.
    """
    lengths = some_lengths(count)
    drawn = draw(lambda *place: KINDS[kind](lengths, *place, shuffle=shuffle), legs, last, told_by=told_by)
    counts = Counter(flat(drawn))
    assert set(counts) == set(range(count))
    assert counts.total() - count < 8
    if counts.total() > count:
        assert set(map(len, drawn[-8:])) >= {1}


@each_kind
def test_from_four_ranks_to_two_to_eight(kind: str) -> None:
    """10,000 samples, counted one by one."""
    lengths = some_lengths(10_000)
    drawn = draw(lambda *place: KINDS[kind](lengths, *place, window=1000), [(4, 100), (2, 150)], 8)
    assert sorted(flat(drawn)) == list(range(10_000))


@each_kind
@given(count=st.integers(1, 300), ranks=st.integers(1, 8), drop_last=st.booleans(), epoch=st.integers(0, 3))
@settings(deadline=None, max_examples=effort.examples(60))
def test_ranks_have_as_many_batches_as_they_say(kind: str, count: int, ranks: int, drop_last: bool, epoch: int) -> None:
    """`len` is the same on all ranks, and what they yield; what `drop_last` leaves out is less than one step."""
    samplers = [KINDS[kind](some_lengths(count), ranks, rank, drop_last=drop_last) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in samplers]
    assert {len(own) for own in batches} == {len(sampler) for sampler in samplers} == {len(batches[0])}
    counts = Counter(key for own in batches for batch in own for key in batch)
    if drop_last:
        assert max(counts.values(), default=1) == 1
        units = KINDS[kind](some_lengths(count), 1, 0, **({"batch_size": 1} if kind == "packing" else {}))
        units.set_epoch(epoch)
        step = ranks * (2 if kind == "packing" else 1)
        whole = count // 5 if kind == "balanced" else len(units)
        assert len(batches[0]) == whole // step
    else:
        assert set(counts) == set(range(count))


@each_kind
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    """The same numbers give the same batches; a state of another epoch is dropped."""
    lengths = some_lengths(500)
    sampler = KINDS[kind](lengths)
    orders = [list(sampler), list(sampler), list(KINDS[kind](lengths, seed=5))]
    sampler.load_state_dict(sampler.state_after(2))
    sampler.set_epoch(1)
    orders.append(list(sampler))
    assert orders[0] == orders[1]
    assert len({repr(order) for order in orders}) == 3
    assert all(sorted(flat(order)) == list(range(500)) for order in orders)


@each_kind
@settings(deadline=None, max_examples=effort.examples(21))
@given(
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=3),
    last=st.integers(1, 5),
    inner=st.sampled_from(["mixture", "elastic", "weighted"]),
    epoch=st.integers(0, 2),
)
def test_the_order_may_be_that_of_another_sampler(
    kind: str, legs: list[tuple[int, int]], last: int, inner: str, epoch: int
) -> None:
    """A mixture, packed: what the innermost draws is drawn once, on whatever ranks. Epochs reach it."""
    lengths = some_lengths(600)

    def order() -> Any:
        orders: dict[str, Any] = {
            "mixture": MixtureSampler([400, 150, 50], [3, 2, 1], stop="all", seed=1),
            "elastic": ElasticSampler(600, seed=3),
            "weighted": WeightedSampler(lengths, 500),
        }
        return orders[inner]

    def make(ranks: int, rank: int) -> Any:
        sampler = KINDS[kind](lengths, ranks, rank, sampler=order())
        sampler.set_epoch(epoch)
        return sampler

    whole = order()
    whole.set_epoch(epoch)
    expected = Counter(whole)
    drawn = Counter(flat(draw(make, legs, last)))
    extra = drawn - expected
    assert not expected - drawn
    assert extra.total() < 5


@each_kind
def test_a_mixture_without_an_end_goes_on_for_ever(kind: str) -> None:
    """Its shares hold in what is planned, it has no length, and its weights may change on the way."""
    lengths = np.full(200, 10)

    def make(ranks: int, rank: int) -> Any:
        mixture = MixtureSampler([100, 100], [(0, [1, 3]), (20_000, [1, 0])])
        large = {"batch_size": 50} if kind == "balanced" else {}
        return KINDS[kind](lengths, ranks, rank, sampler=mixture, window=2000, **large)

    sampler = make(1, 0)
    iterator = iter(sampler)
    samples = np.array(flat([next(iterator) for _ in range(900)]))
    assert ((samples[:4000] < 100).sum(), (samples[-3000:] < 100).sum()) == (1000, 3000)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = make(1, 0)
    resumed.load_state_dict(state)
    assert list(itertools.islice(resumed, 50)) == list(itertools.islice(iterator, 50))
    with pytest.raises(TypeError, match="has no end"):
        len(sampler)
    with pytest.raises(ConfigurationError, match="weights can"):
        resumed.sampler.set_weights([1, 1], at=20_000 if kind == "lengths" else 0)


@pytest.mark.parametrize("kind", ["lengths", "packing"])
def test_a_batch_size_may_change_too(kind: str) -> None:
    """What a state counts are batches by length, or blocks: any number of these may make a batch from there on."""
    lengths = some_lengths(900)
    first = KINDS[kind](lengths, 3, 0)
    taken = [list(itertools.islice(KINDS[kind](lengths, 3, rank), 7)) for rank in range(3)]
    other = packed(lengths, batch_size=5) if kind == "packing" else by_length(lengths)
    list(itertools.islice(first, 7))
    other.load_state_dict(first.state_dict())
    assert sorted(flat([*itertools.chain(*taken), *other])) == list(range(900))


@each_kind
@pytest.mark.parametrize("form", ["list", "int32", "tensor", "file"])
def test_lengths_come_in_many_forms(kind: str, form: str, tmp_path: Path) -> None:
    """All mean the same batches, and the same states."""
    lengths = some_lengths(300)
    np.save(tmp_path / "lengths.npy", lengths)
    forms: dict[str, Any] = {
        "list": lengths.tolist(),
        "int32": lengths.astype(np.int32),
        "tensor": torch.from_numpy(lengths),
        "file": tmp_path / "lengths.npy",
    }
    sampler = KINDS[kind](forms[form])
    expected = KINDS[kind](lengths)
    assert list(sampler) == list(expected)
    assert sampler.state_dict() == expected.state_dict()


@each_kind
def test_ten_million_lengths_take_no_more_memory(kind: str) -> None:
    """Than they have themselves, and the plan of a window: to begin, and to go on in the middle."""
    lengths = np.tile(some_lengths(1_000_000).astype(np.int32), 10)
    tracemalloc.start()
    sampler = KINDS[kind](lengths, window=8192)
    next(iter(sampler))
    state = {**sampler.state_dict(), "cursor": {"window": 700, "unit": 5}}
    sampler.load_state_dict(state)
    next(iter(sampler))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6_000_000
    assert len(json.dumps(state)) < 650


@each_kind
def test_what_a_state_says(kind: str) -> None:
    """Where the epoch is, of how many ranks, and what it has to fit, for people to read."""
    sampler = KINDS[kind](some_lengths(500), 2, 1)
    next(iter(sampler))
    state = sampler.state_dict()
    assert (state["epoch"], state["world"], state["seed"]) == (0, 2, 4)
    assert state["cursor"] == {"window": 0, "unit": 4 if kind == "packing" else 2}
    assert state["costs" if "balanced" in kind else "lengths"]["count"] == 500
    assert f"rank 1 of 2, epoch 0, at {state['cursor']}" in repr(sampler)


@each_kind
def test_a_state_of_something_else_is_refused(kind: str) -> None:
    """With the field that differs: lengths, what is planned, the order within."""
    lengths = some_lengths(100)
    state = KINDS[kind](lengths).state_dict()
    option, value = {
        "lengths": ("max_tokens", 601),
        "balanced": ("batch_size", 6),
    }.get(kind, ("block_size", 151))
    others: dict[str, Any] = {
        "costs" if "balanced" in kind else "lengths": KINDS[kind](lengths[::-1]),
        "window": KINDS[kind](lengths, window=65),
        "drop_last": KINDS[kind](lengths, drop_last=True),
        "seed": KINDS[kind](lengths, sampler=ElasticSampler(100)),
        "kind": KINDS[kind](lengths, sampler=WeightedSampler(lengths)),
        option: KINDS[kind](lengths, **{option: value}),
    }
    for field, other in others.items():
        with pytest.raises(StateMismatchError, match=f"{field} was"):
            other.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="version"):
        KINDS[kind](lengths).load_state_dict({})


@each_of_lengths
@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "should be one row of integers|there are no lengths"),
        ([1.5, 2.0], {}, "one row of integers, but are float64"),
        ([[1, 2]], {}, "one row of integers"),
        ([1, -2, 3], {}, "sample 1 has a length of -2"),
        ([1, 2000], {}, "sample 1 has 2000 tokens"),
        ([1, 2], {"sampler": ElasticSampler(3)}, "there are 2 lengths, but the sampler is one of 3 samples"),
        ([1, 2], {"sampler": RandomSampler(range(2))}, "but is a RandomSampler"),
        ([1, 2], {"window": 0}, "window should be an integer of at least 1"),
        ([1, 2], {"rank": 3}, "Invalid rank 3"),
        ([1, 2], {"too_long": "drop"}, "too_long should be"),
    ],
)
def test_bad_options_are_refused(kind: str, lengths: Any, options: dict[str, Any], message: str) -> None:
    """At construction, with what is wrong."""
    with pytest.raises(ConfigurationError, match=message):
        KINDS[kind](lengths, **options)


@each_of_lengths
def test_bad_lengths_of_a_file_are_told_when_they_are_planned(kind: str, tmp_path: Path) -> None:
    """A file that is mapped is not read as a whole before: the sample is named."""
    for length, message in ((1000, "sample 77 has 1000 tokens"), (-1, "sample 77 has a length of -1")):
        lengths = np.full(1000, 5)
        lengths[77] = length
        np.save(tmp_path / "lengths.npy", lengths)
        sampler = KINDS[kind](tmp_path / "lengths.npy")
        with pytest.raises(ConfigurationError, match=message):
            list(sampler)


def test_the_length_is_that_of_the_weights_in_a_state() -> None:
    """Also if it was asked for before, with the weights that the mixture was made with."""

    def make(weights: list[float]) -> LengthBatchSampler:
        mixture = MixtureSampler([300, 400], weights, stop="first")
        return by_length(some_lengths(700), sampler=mixture)

    sampler, other = make([1, 1]), make([9, 1])
    assert len(sampler) != len(other)
    sampler.load_state_dict(other.state_dict())
    assert len(sampler) == len(other) == len(list(sampler))


@settings(deadline=None, max_examples=effort.examples(36))
@given(
    kind=st.sampled_from(["balanced", "by_length", "few_by_length", "packed"]),
    count=st.integers(1000, 4000),  # the two or three longest of so few as 500 are a large share of all batches
    spread=st.floats(0.2, 1.2),
    seed=st.integers(0, 10**6),
)
def test_hardly_a_batch_comes_again_where_a_window_holds_all_samples(
    kind: str, count: int, spread: float, seed: int
) -> None:
    """In another epoch other samples meet, although all of them are divided by their lengths."""
    lengths = np.minimum(np.random.default_rng(seed).lognormal(5, spread, count).astype(int) + 1, 4000)
    options: dict[str, Any] = {"window": 1 << 14, "seed": seed, "num_replicas": 1, "rank": 0}
    makes: dict[str, Callable[[], Any]] = {
        "balanced": lambda: BalancedBatchSampler(lengths + 0.5, batch_size=8, **options),
        "by_length": lambda: LengthBatchSampler(lengths, max_tokens=16_000, **options),
        "few_by_length": lambda: LengthBatchSampler(lengths, max_tokens=40_000, max_batch=8, **options),
        "packed": lambda: PackingBatchSampler(lengths, block_size=4096, **options),
    }
    epochs = []
    for epoch in range(4):
        sampler = makes[kind]()
        sampler.set_epoch(epoch)
        epochs.append({frozenset(batch) for batch in sampler if len(batch) > 1})
    again = sum(len(epochs[0] & later) for later in epochs[1:])
    most = 0.1 if kind == "packed" else 0.03  # a long document leaves room for few others
    assert again <= most * 3 * len(epochs[0]) + 1
