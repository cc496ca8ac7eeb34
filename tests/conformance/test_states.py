"""What torchdata's StatefulDataLoader promises of states, asked of it and of ours: one list of cases for both."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from asyncloader import DataLoader
from tests.wrap.ahead import taken_ahead

pytestmark = [pytest.mark.on_threads, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]

LENGTH = 20


@pytest.fixture(
    params=[pytest.param(StatefulDataLoader, marks=pytest.mark.slow), DataLoader, taken_ahead],
    ids=["torchdata", "ours", "ours, taken ahead"],
)
def loader_class(request: pytest.FixtureRequest) -> Any:
    """torchdata's loader and ours."""
    return request.param


class Plain(Dataset[int]):
    """Without a state."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Without a state; divided among workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, LENGTH, step))


class StatefulStream(Stream):
    """Its iterators tell where they are, and what they were asked."""

    def __iter__(self) -> Any:
        return Reader(list(super().__iter__()))


class Reader:
    """An iterator with a state."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.at = 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Plain, Stream, StatefulStream])
def test_states(loader_class: Any, dataset: Any, num_workers: int) -> None:
    """Every promise of CONTRACT, one after the other, for one kind of dataset."""

    def make() -> Any:
        return loader_class(dataset(), batch_size=3, num_workers=num_workers)

    whole = numbers(make())
    loader = make()
    initial = loader.state_dict()  # before iter()
    states = [initial]
    for _ in loader:
        states.append(loader.state_dict())
    after = loader.state_dict()
    copies = json.loads(json.dumps([*states, after]))  # goes through JSON
    assert [*states, after] == copies  # and has not changed since

    for done, state in list(enumerate(states))[:: 3 if num_workers else 1]:  # processes take their time
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert numbers(resumed) == whole[done:]  # batches yielded, and none inside the last body
        assert numbers(resumed) == whole  # later epochs are whole
    resumed = make()
    resumed.load_state_dict(after)
    assert numbers(resumed) == whole  # after the loop: a full epoch

    loader.load_state_dict({})  # a reset
    assert numbers(loader) == whole
    for batch in itertools.islice(loader, 2):
        assert torch.is_tensor(batch)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())  # after a break
    assert numbers(resumed) == whole[2:]


def test_every_n_steps_goes_on_at_the_same_batch(loader_class: Any) -> None:
    """With fewer snapshots what came after the last one is read again."""
    options = {"batch_size": 2, "num_workers": 2, "snapshot_every_n_steps": 3}
    loader = loader_class(StatefulStream(), **options)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    resumed = loader_class(StatefulStream(), **options)
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed) == numbers(iterator)
