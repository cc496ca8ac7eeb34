"""Datasets that have an answer for every name: a mock in a unit test, the stub of a remote object.

torch's loader works with them, since it asks for little. Wrappers pass on what they do not have, and are another thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from asyncloader import DataLoader
from asyncloader.protocols import is_async, is_resource, is_stateful, probe

pytestmark = pytest.mark.on_threads


class Numbers(Dataset[int]):
    """Eight samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Stub(Numbers):
    """Asks a server for whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: f"{name} on the server"


class Counting(Numbers):
    """Counts its samples, and provides that as its state."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Wrapper(Numbers):
    """Passes on what it does not have, as wrappers do."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> int:
        return int(self._dataset[index])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class SetOnTheInstance(Numbers):
    """Has methods that were set on the object."""

    def __init__(self) -> None:
        inner = Counting()
        self._inner = inner
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    def __getitem__(self, index: int) -> int:
        return self._inner[index]


def mock(**options: Any) -> Any:
    """Return a mock of eight samples."""
    made = MagicMock(**options)
    methods = {"__len__": lambda: 8, "__getitem__": lambda index: index, "__iter__": lambda: iter(range(8))}
    for name, method in methods.items():
        if hasattr(made, name):
            getattr(made, name).side_effect = method
    return made


MOCKS: list[Callable[[], Any]] = [
    mock,
    lambda: mock(spec=Numbers),
    lambda: mock(spec=["__len__", "__getitem__", "__iter__"]),
    lambda: mock(spec=Stream),
    Stub,
]
PLACES: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "worker_backend": "thread"},
    {"num_workers": 1, "concurrency": 2},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", MOCKS)
@pytest.mark.parametrize("options", PLACES)
@pytest.mark.forked("a mock cannot be pickled")
def test_an_object_that_has_every_name_is_a_plain_dataset(make: Callable[[], Any], options: dict[str, Any]) -> None:
    """Batches, states and epochs are those of a dataset that has no method but torch's."""
    expected = [batch.tolist() for batch in TorchLoader(make(), 2)]
    dataset = make()
    if isinstance(dataset, IterableDataset):
        options = {**options, "num_workers": min(1, options.get("num_workers", 0))}
    loader: Any = DataLoader(dataset, 2, **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert [batch.tolist() for batch in loader] == expected
    with iter(loader) as iterator:
        next(iterator)
        state = loader.state_dict()
    loader.close()
    resumed: Any = DataLoader(make(), 2, **options)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == expected[1:]
    resumed.close()


@pytest.mark.parametrize("make", MOCKS)
def test_none_of_our_protocols_is_found_in_it(make: Callable[[], Any]) -> None:
    """Not async, with nothing to open, without a state, or another method of ours."""
    dataset = make()
    assert not any(is_so(dataset) for is_so in (is_async, is_resource, is_stateful))
    names = ("set_epoch", "collated", "keys_arrive", "state_after", "preload", "_state_identity")
    assert {probe(dataset, name) for name in names} == {None}


def test_a_dataset_may_raise_whatever_it_is_asked_for() -> None:
    """torch asks it for nothing but its samples."""

    class LooksUp(Stream):
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    assert [batch.tolist() for batch in DataLoader(LooksUp(), 4, num_workers=1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_a_mock_was_given_counts() -> None:
    """It was set on the object, or is a method of the class."""
    dataset = mock()
    dataset.set_epoch = lambda epoch: None
    assert callable(probe(dataset, "set_epoch"))
    stub: Any = type("WithState", (Stub,), {"set_epoch": lambda self, epoch: None})()
    assert callable(probe(stub, "set_epoch"))


@pytest.mark.parametrize("make", [lambda: Wrapper(Counting()), SetOnTheInstance, Counting])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.forked("one of them has bound methods of another object")
def test_a_state_is_found_in_wrappers_and_on_objects(make: Callable[[], Any], num_workers: int) -> None:
    """As torchdata finds it: a resumed run goes on counting."""
    loader: Any = DataLoader(make(), 2, num_workers=num_workers)
    with iter(loader) as iterator:
        assert next(iterator).tolist() == [1, 2]
        state = loader.state_dict()
    resumed: Any = DataLoader(make(), 2, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[3, 4], [5, 6], [7, 8]]


def test_a_mock_of_a_sampler() -> None:
    """Samplers are asked for methods of ours as well."""
    sampler = MagicMock(spec=RandomSampler)
    sampler.__iter__.side_effect = lambda: iter([3, 1, 2])
    sampler.__len__.return_value = 3
    loader: Any = DataLoader(Numbers(), 2, sampler=sampler)
    assert [batch.tolist() for batch in loader] == [[3, 1], [2]]
