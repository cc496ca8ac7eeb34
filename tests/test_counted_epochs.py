"""Samplers of ours count the loader's epochs: each has its own order, also where nobody calls `set_epoch`."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler

from asyncloader import DataLoader
from asyncloader.datasets import ParallelMap
from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)
from tests.support import effort

COUNT = 40
_LENGTHS = [1 + index * 7 % 13 for index in range(COUNT)]
_BATCHED = {"balanced", "lengths", "lengths of a mixture", "packing"}
MAKES: dict[str, Callable[[], Any]] = {
    "elastic": lambda: ElasticSampler(COUNT),
    "mixture": lambda: MixtureSampler([30, 10], stop="all"),
    "weighted": lambda: WeightedSampler(_LENGTHS),
    "weighted, each once": lambda: WeightedSampler(_LENGTHS, replacement=False),
    "balanced": lambda: BalancedBatchSampler(_LENGTHS, batch_size=4),
    "lengths": lambda: LengthBatchSampler(_LENGTHS, max_tokens=40),
    "lengths of a mixture": lambda: LengthBatchSampler(
        _LENGTHS, max_tokens=40, sampler=MixtureSampler([30, 10], stop="all")
    ),
    "packing": lambda: PackingBatchSampler(_LENGTHS, block_size=20, batch_size=2),
}


class Indices(Dataset[int]):
    """Its samples are their own indices."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


class OrderOfEpoch:
    """A stream whose order depends on the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(COUNT).tolist())


def same(item: int) -> int:
    return item


def make(kind: str, **options: Any) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(ParallelMap(OrderOfEpoch(), same), batch_size=4, collate_fn=list, **options)
    if kind in _BATCHED:
        return DataLoader(Indices(), batch_sampler=MAKES[kind](), collate_fn=list, **options)
    return DataLoader(Indices(), sampler=MAKES[kind](), batch_size=4, collate_fn=list, **options)


def order_of(kind: str, epoch: int) -> list[Any]:
    """Return the batches of an epoch as the user sets it."""
    loader = make(kind)
    loader.set_epoch(epoch)
    return list(loader)


def set_on(loader: DataLoader[Any], by: str, epoch: int) -> None:
    sampler: Any = (
        loader.batch_sampler if type(loader.batch_sampler).__module__.startswith("asyncl") else loader.sampler
    )
    (loader if by == "loader" else sampler).set_epoch(epoch)


_EPOCHS = st.lists(
    st.tuples(
        st.none() | st.tuples(st.sampled_from(["loader", "sampler"]), st.integers(0, 3)),
        st.none() | st.integers(1, 3),
    ),
    min_size=2,
    max_size=5,
)


@settings(deadline=None, max_examples=effort.examples(60))
@given(kind=st.sampled_from([*MAKES, "stream"]), epochs=_EPOCHS, data=st.data())
def test_a_run_counts_where_nobody_sets_the_epoch_and_so_does_one_that_is_resumed(
    kind: str, epochs: list[Any], data: Any
) -> None:
    """Whoever sets an epoch, whether loops are left, wherever a state was taken."""
    saved_in = data.draw(st.integers(0, len(epochs) - 1))
    loader, state, number, orders = make(kind), None, -1, []
    for place, (told, most) in enumerate(epochs):
        number = number + 1 if told is None else told[1]
        if told is not None:
            set_on(loader, *told)
        whole = order_of(kind, number)
        taken = whole[: len(whole) if most is None else most]
        orders.append(taken)
        if place != saved_in:
            assert list(itertools.islice(loader, most)) == taken
            continue
        saved_after = data.draw(st.integers(1, len(taken) - 1 if most is not None and most > 1 else len(taken)))
        iterator = iter(loader)
        assert [next(iterator) for _ in range(saved_after)] == taken[:saved_after]
        if saved_after == len(whole):
            assert next(iterator, None) is None
        state = json.loads(json.dumps(loader.state_dict()))
        assert list(iterator)[: len(taken) - saved_after] == taken[saved_after:]
        rest = taken[saved_after:]

    resumed = make(kind)
    assert state is not None
    resumed.load_state_dict(state)
    if rest:
        assert list(itertools.islice(resumed, len(rest) if epochs[saved_in][1] else None)) == rest
    elif saved_after < len(orders[saved_in]) or epochs[saved_in][1] is not None:
        return  # a loop that was left: the resumed run goes on in it
    for (told, most), taken in zip(epochs[saved_in + 1 :], orders[saved_in + 1 :], strict=True):
        if told is not None:
            set_on(resumed, *told)
        assert list(itertools.islice(resumed, most)) == taken


@pytest.mark.on_threads
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_workers_make_each_epoch_in_its_order(options: dict[str, Any]) -> None:
    """Also persistent ones."""
    for kind in ("elastic", "lengths", "stream"):
        loader = make(kind, **options)
        assert [list(loader) for _ in range(3)] == [order_of(kind, epoch) for epoch in range(3)]


def test_a_batch_by_its_number_is_of_the_counted_epoch() -> None:
    """And so is one of a past epoch."""
    loader = make("elastic")
    epochs = [list(loader) for _ in range(3)]
    assert [loader.batch(epoch, 2) for epoch in range(3)] == [batches[2] for batches in epochs]


def test_two_loaders_with_one_sampler_count_together() -> None:
    """The second one finds that the epoch has begun."""
    sampler = ElasticSampler(COUNT)
    one, other = (DataLoader(Indices(), sampler=sampler, batch_size=4, collate_fn=list) for _ in range(2))
    for epoch in range(3):
        pairs = list(zip(one, other, strict=True))
        assert [left for left, _ in pairs] == [right for _, right in pairs] == order_of("elastic", epoch)


def test_a_state_that_the_sampler_itself_was_given_counts() -> None:
    """The next run goes on from there, and the one after it is the next epoch."""
    loader = make("elastic")
    list(loader)
    sampler: Any = loader.sampler
    sampler.load_state_dict({**sampler.state_after(0), "cursor": 8})
    assert list(loader) == order_of("elastic", 0)[2:]
    assert list(loader) == order_of("elastic", 1)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_torchs_distributed_sampler_is_spoken_of_at_the_second_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """Once, if nobody has called `set_epoch`, and its order depends on that."""
    sampler: DistributedSampler[int] = DistributedSampler(Indices(), 1, 0)
    loader = DataLoader(Indices(), sampler=sampler, batch_size=4)
    next(iter(loader))
    list(loader)
    assert not warnings_of(caplog)
    list(loader)
    list(loader)
    (text,) = warnings_of(caplog)
    assert "DistributedSampler gives the same order in every epoch" in text
    caplog.clear()

    for tell in ("loader", "sampler", None):
        told = DistributedSampler(Indices(), 1, 0, shuffle=tell is not None)
        quiet = DataLoader(Indices(), sampler=told, batch_size=4)
        for epoch in range(3):
            if tell is not None:
                (quiet if tell == "loader" else told).set_epoch(epoch)
            list(quiet)
    assert not warnings_of(caplog)


class Rows(Indices):
    """Has `set_epoch`, and keeps to itself what it was told."""

    def __init__(self) -> None:
        self._told = 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch

    def __getitem__(self, index: int) -> int:
        return self._told


class CountedRows(Rows):
    """Says that it counts by itself."""

    counts_epochs = True


def test_a_call_on_the_dataset_that_persistent_workers_do_not_hear(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, at the second epoch; not of calls that reach them, nor of workers that start anew."""
    options: dict[str, Any] = {"num_workers": 1, "batch_size": COUNT}
    dataset = Rows()
    loader = DataLoader(dataset, persistent_workers=True, **options)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        (batch,) = list(loader)
        assert torch.equal(batch, torch.zeros(COUNT, dtype=torch.int64))
        assert len(warnings_of(caplog)) == (epoch > 0)
    assert "Rows gives the same order in every epoch" in warnings_of(caplog)[0]
    caplog.clear()

    quiet = DataLoader(Rows(), persistent_workers=True, **options)
    anew, counted = DataLoader(dataset, **options), DataLoader(CountedRows(), persistent_workers=True, **options)
    for epoch in range(3):
        quiet.set_epoch(epoch)
        assert [int(batch[0]) for batch in quiet] == [epoch]
        dataset.set_epoch(epoch)
        assert [int(batch[0]) for batch in anew] == [epoch]
        list(counted)
    assert not warnings_of(caplog)
