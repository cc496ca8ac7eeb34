"""The elastic sampler: whole epochs as DistributedSampler divides them, and epochs that change ranks on their way."""

from __future__ import annotations

import itertools
import json
import math
import time
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from asyncloader import ConfigurationError, StateMismatchError
from asyncloader.samplers import ElasticSampler
from tests.support import effort


@given(length=st.integers(1, 70), ranks=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans())
def test_an_epoch_is_divided_as_by_torchs_sampler(length: int, ranks: int, shuffle: bool, drop_last: bool) -> None:
    """As many samples for each rank, each index as often, and without shuffling the very same ones."""
    options: dict[str, Any] = {"num_replicas": ranks, "shuffle": shuffle, "drop_last": drop_last}
    ours = [ElasticSampler(range(length), rank=rank, **options) for rank in range(ranks)]
    theirs = [DistributedSampler(range(length), rank=rank, **options) for rank in range(ranks)]
    drawn, expected = [list(sampler) for sampler in ours], [list(sampler) for sampler in theirs]
    assert list(map(len, drawn)) == list(map(len, expected)) == list(map(len, ours))
    if not shuffle:
        assert drawn == expected
    counts = Counter(itertools.chain.from_iterable(drawn))
    if drop_last:
        assert max(counts.values(), default=1) == 1
    else:
        assert set(counts) == set(range(length))
        assert max(counts.values()) == math.ceil(math.ceil(length / ranks) * ranks / length)


def test_orders_are_uniform_and_belong_to_seed_and_epoch() -> None:
    """Each of the 24 orders of four samples comes about equally often; the same numbers give the same order."""
    sampler = ElasticSampler(4)
    seen: Counter[tuple[int, ...]] = Counter()
    for epoch in range(1200):
        sampler.set_epoch(epoch)
        seen[tuple(sampler)] += 1
    deviation = sum((seen[order] - 50) ** 2 / 50 for order in itertools.permutations(range(4)))
    assert deviation < 60  # chi-squared with 23 degrees of freedom: above in 4 of 100,000 cases

    one, other = ElasticSampler(5000, seed=1), ElasticSampler(5000, seed=2)
    orders = [list(one), list(one), list(other)]
    one.set_epoch(1)
    orders.append(list(one))
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(5000)) for order in orders)


@settings(max_examples=effort.examples(300), deadline=None)
@given(
    length=st.integers(1, 400),
    legs=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=5),
    last=st.integers(1, 6),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_ranks_may_change_at_any_step(
    length: int, legs: list[tuple[int, int]], last: int, drop_last: bool, data: st.DataObject
) -> None:
    """Each leg goes on from the state of any one rank of the one before; together they draw the epoch, and no more."""
    state: dict[str, Any] | None = None
    drawn: list[int] = []

    def start(ranks: int) -> list[ElasticSampler]:
        samplers = [ElasticSampler(length, ranks, rank, seed=5, drop_last=drop_last) for rank in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
                assert sampler.state_dict() == {**state, "world": ranks}
            sampler.set_epoch(3)
        return samplers

    for ranks, steps in legs:
        samplers = start(ranks)
        taken = [list(itertools.islice(sampler, steps)) for sampler in samplers]
        assert len({len(own) for own in taken}) == 1
        drawn += itertools.chain.from_iterable(zip(*taken, strict=True))
        states = [sampler.state_dict() for sampler in samplers]
        assert all(other == states[0] for other in states)
        assert all(sampler.state_after(len(taken[0])) == states[0] for sampler in samplers)
        state = json.loads(json.dumps(states[data.draw(st.integers(0, ranks - 1))]))
    rest = [list(sampler) for sampler in start(last)]
    drawn += itertools.chain.from_iterable(zip(*rest, strict=True))

    whole = ElasticSampler(length, 1, 0, seed=5)
    whole.set_epoch(3)
    order = list(whole)
    assert drawn[:length] == order[: len(drawn)]  # nothing is repeated or left out before the end
    if drop_last:
        assert len(drawn) > length - last
    else:
        assert drawn[length:] == [order[i % length] for i in range(len(drawn) - length)]
        assert len(drawn) < length + max(ranks for ranks, _ in [*legs, (last, 0)])


def test_ten_billion_indices_cost_no_memory() -> None:
    """Cost no memory, and no time to go on in the middle of."""
    sampler = ElasticSampler(10_000_000_000)
    tracemalloc.start()
    drawn = list(itertools.islice(sampler, 6000))
    state = {**sampler.state_dict(), "cursor": 7_654_321_098}
    del sampler
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        resumed = ElasticSampler(10_000_000_000)
        resumed.load_state_dict(state)
        next(iter(resumed))
        times.append(time.perf_counter() - began)
    assert len(set(drawn)) == 6000
    assert max(drawn) > 2**33
    assert peak < 1_000_000
    assert min(times) < 1.0


def test_torchs_loader_goes_on_after_what_it_has_yielded() -> None:
    """torch's loader reads ahead; `state_after` tells the state as of what it has yielded."""
    data = range(100)
    sampler = ElasticSampler(data, 2, 1)
    loader = DataLoader(data, batch_size=5, sampler=sampler, num_workers=1)  # type: ignore[arg-type, var-annotated]
    batches = [batch.tolist() for batch in loader]
    for number, _ in enumerate(loader, 1):
        if number == 3:
            state = sampler.state_after(15)
            break
    sampler.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == batches[3:]
    assert [batch.tolist() for batch in loader] == batches


def test_what_does_not_fit_is_refused() -> None:
    """With the field, what it was, and what it is; and no rank that does not exist."""
    state = ElasticSampler(10).state_dict()
    for field, other in (("length", ElasticSampler(11)), ("shuffle", ElasticSampler(10, shuffle=False))):
        with pytest.raises(StateMismatchError, match=f"{field} was {state[field]} when it was taken") as caught:
            other.load_state_dict(state)
        assert (caught.value.field, caught.value.saved) == (field, state[field])
    with pytest.raises(StateMismatchError, match="version"):
        ElasticSampler(10).load_state_dict({})
    with pytest.raises(ValueError, match="Invalid rank 2"):
        ElasticSampler(10, 2, 2)


def test_numbers_may_be_those_of_numpy_and_nothing_else_is_taken_for_one() -> None:
    """They give the order of Python's, and states that are plain; no replicas, or no seed, is refused at once."""
    plain = ElasticSampler(50, num_replicas=2, rank=1, seed=5)
    numpys = ElasticSampler(np.int64(50), np.int32(2), np.int8(1), seed=np.int64(5))  # type: ignore[arg-type]
    for sampler in (plain, numpys):
        sampler.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert list(plain) == list(numpys)
    assert json.loads(json.dumps(numpys.state_dict())) == plain.state_dict()
    options: list[tuple[dict[str, Any], str]] = [
        ({"num_replicas": 0}, "num_replicas should be an integer of at least 1, but got 0"),
        ({"rank": 1.0}, "rank should be an integer, but got 1.0"),
        ({"seed": None}, "seed should be an integer, but got None"),
        ({"seed": True}, "seed should be an integer, but got True"),
    ]
    for bad, text in options:
        with pytest.raises(ConfigurationError, match=text):
            ElasticSampler(50, **bad)
