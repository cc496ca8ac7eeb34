"""``loader.exclude(keys)``: samples that a trainer goes on without, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from asyncloader import ConfigurationError, DataLoader, sample_rng
from asyncloader.samplers import ElasticSampler, PackingBatchSampler, packed
from tests.sameness import same

LENGTH = 50


class Numbers:
    """Draws from the generator of its batch."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return int(index), sample_rng().random()


def loader_of(num_workers: int, **options: Any) -> DataLoader[Any]:
    """Make a loader whose order is the same each time."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": num_workers}
    return DataLoader(Numbers(), **{**defaults, **options})  # type: ignore[arg-type]


def indices(batches: Any) -> list[list[int]]:
    """Return what is in each batch."""
    return [np.ravel(batch[0]).tolist() for batch in batches]


def without(batches: list[list[int]], *gone: int) -> list[list[int]]:
    """Leave some samples out, and batches that have no others."""
    return [left for batch in batches if (left := [index for index in batch if index not in gone])]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_from_the_beginning(num_workers: int) -> None:
    """Each epoch goes without; all other batches, seeds included, are those of a loader that excludes nothing."""
    usual, loader = loader_of(num_workers), loader_of(num_workers)
    expected = [[*usual], [*usual]]
    torch.manual_seed(0)
    loader.exclude([7, np.int64(11), torch.tensor(23), *indices(expected[0])[5]])
    gone = {7, 11, 23, *indices(expected[0])[5]}
    torch.manual_seed(0)
    for epoch in expected:
        batches = [*loader]
        assert indices(batches) == without(indices(epoch), *gone)
        untouched = [batch for batch in epoch if not gone & {*batch[0].tolist()}]
        whole = [batch for batch in batches if batch[0].tolist() in indices(untouched)]
        assert same(whole, untouched)


@pytest.mark.covering(1)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_in_the_middle_and_resumed(batch_size: int | None, in_order: bool) -> None:
    """What is read already is given with them; a resume, at any batch, gives what the run gives that goes on."""
    options = {"batch_size": batch_size, "in_order": in_order, "max_buffered_bytes": 0}
    loader = loader_of(2, **options)
    iterator: Iterator[Any] = iter(loader)
    batches, states = [*islice(iterator, 3)], []
    gone = [*range(0, LENGTH, 3)]
    loader.exclude(gone)
    states.append((3, json.loads(json.dumps(loader.state_dict()))))
    for batch in iterator:
        batches.append(batch)
        states.append((len(batches), json.loads(json.dumps(loader.state_dict()))))
    assert len([index for batch in indices(batches)[:3] for index in batch]) == 3 * (batch_size or 1)
    (read,) = {number for _, _, number in json.loads(states[0][1]["excluded"])}
    assert 3 <= read <= 3 + 4  # 2 workers read 4 ahead
    ahead = {index for number in range(read) for index in np.ravel(loader.batch_keys(0, number)).tolist()}
    assert {index for batch in indices(batches) for index in batch} & {*gone} == ahead & {*gone}
    if in_order:
        by_number = (np.ravel(loader.batch(0, number)[0]).tolist() for number in range(5))
        assert [*by_number] == indices(batches[:5])
    at_the_end = json.loads(json.dumps(loader.state_dict()))
    second = [*loader]
    for count, state in states:
        other = loader_of(1, **options)
        other.load_state_dict(state)
        left, expected = indices(other), indices(batches[count:])
        assert (left == expected) if in_order else (sorted(left) == sorted(expected)), count
    other = loader_of(1, **options)
    other.load_state_dict(at_the_end)
    assert sorted(indices(other)) == sorted(indices(second))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_after_a_state_is_loaded(num_workers: int) -> None:
    """The way to skip what a loss spiked at: load, exclude, go on."""
    usual = loader_of(num_workers)
    iterator = iter(usual)
    first = indices(islice(iterator, 4))
    state = usual.state_dict()
    rest = indices(iterator)
    loader = loader_of(num_workers)
    loader.load_state_dict(state)
    bad = [rest[0][0], rest[2][1]]
    loader.exclude(bad)
    assert loader.batch_keys(0, 4) == without(rest[:1], *bad)[0]
    again = json.loads(json.dumps(loader.state_dict()))
    assert indices(loader) == without(rest, *bad)
    assert loader.batch_keys(0, 4) == without(rest[:1], *bad)[0]
    assert indices([loader.batch(0, 6)]) == without(rest[2:3], *bad)
    other = loader_of(num_workers)
    other.load_state_dict(again)
    assert indices(other) == without(rest, *bad)
    assert loader.batch_keys(0, 3) == first[3]  # before the state nothing was left out


def test_on_other_ranks() -> None:
    """A state with exclusions fits any number of ranks, also where whole batches are left out."""

    def ranked(ranks: int, rank: int) -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_size=2, sampler=ElasticSampler(LENGTH, ranks, rank))  # type: ignore[arg-type]

    loader = ranked(1, 0)
    loader.exclude(loader_keys := [*islice(iter(ElasticSampler(LENGTH, 1, 0)), 10, 14)])
    iterator = iter(loader)
    given = indices(islice(iterator, 5))
    state = loader.state_dict()
    parts = []
    for rank in range(2):
        other = ranked(2, rank)
        other.load_state_dict(state)
        parts += indices(other)
    seen = sorted(index for batch in [*given, *parts] for index in batch)
    assert seen == sorted({*range(LENGTH)} - {*loader_keys})


def test_pieces() -> None:
    """A sample that is yielded in pieces is left out with all of them."""
    documents = [np.full(length, number) for number, length in enumerate([5, 40, 7, 33, 16])]
    sampler = PackingBatchSampler([len(each) for each in documents], block_size=16, too_long="split", batch_size=2)
    loader = DataLoader(**packed(documents, sampler))
    loader.exclude([1])
    tokens = {int(token) for batch in loader for token in batch["input_ids"].ravel()}
    assert tokens - {0} == {2, 3, 4}


def test_keys_of_other_kinds() -> None:
    """Names, and tuples, which are lists after JSON."""
    data = {("a", 1): 1, ("b", 2): 2, "c": 3}
    loader = DataLoader(data, batch_size=1, sampler=[*data])  # type: ignore[arg-type]
    loader.exclude([("b", 2)])
    assert [int(batch) for batch in loader] == [1, 3]
    other = DataLoader(data, batch_size=1, sampler=[*data])  # type: ignore[arg-type]
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    other.exclude(["c"])
    assert [int(batch) for batch in other] == [1]


def test_a_state_that_is_loaded_afterwards() -> None:
    """What the loader was told to go on without stays out, from where the state is."""
    loader = loader_of(0)
    iterator = iter(loader)
    given = indices(islice(iterator, 3))
    state = loader.state_dict()
    loader.exclude(bad := [*range(0, LENGTH, 2)])
    loader.load_state_dict(state)
    assert {*loader.batch_keys(0, 4)} <= {*range(1, LENGTH, 2)}
    assert loader.batch_keys(0, 2) == given[2]
    left = indices(loader)
    assert not {index for batch in left for index in batch} & {*bad}
    loader.load_state_dict({})
    assert sum(map(len, indices(loader))) == LENGTH


def test_another_batch_size() -> None:
    """Numbers of batches mean others then: what was yet to be left out is left out."""

    def sized(batch_size: int) -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_size=batch_size, sampler=ElasticSampler(LENGTH), num_workers=1)  # type: ignore[arg-type]

    loader = sized(2)
    iterator = iter(loader)
    next(iterator)
    order = [index for number in range(25) for index in loader.batch_keys(0, number)]
    loader.exclude(order[30:])
    state = loader.state_dict()
    for size in (2, 8, 16):
        other = sized(size)
        other.load_state_dict(state)
        assert sorted(index for batch in indices(other) for index in batch) == sorted(order[2:30])


class Stream(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_what_cannot_be() -> None:
    """Each says why, and nothing is left out by it."""
    with pytest.raises(ConfigurationError, match="it is a stream"):
        DataLoader(Stream()).exclude([1])
    loader = loader_of(0)
    with pytest.raises(ConfigurationError, match=r"is \['12'\]"):
        loader.exclude("12")
    with pytest.raises(ConfigurationError, match="unhashable type"):
        loader.exclude([1, torch.tensor([1, 2])])
    assert sum(len(batch) for batch in indices(loader)) == LENGTH
