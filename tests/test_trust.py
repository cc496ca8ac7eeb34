"""States are values: a file that `torch.load` takes for safe runs no code, also when the state in it is loaded."""

from __future__ import annotations

import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from asyncloader import DataLoader
from asyncloader.datasets import ParallelMap
from asyncloader.online import Feed
from asyncloader.samplers import (
    BalancedBatchSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
)
from tests.support import effort

pytestmark = pytest.mark.on_threads

COUNT = 24
LENGTHS = [number % 5 + 1 for number in range(COUNT)]
NUMBERS: Any = [*range(COUNT)]


class Squares(IterableDataset[int]):
    """A stream whose state has a tensor, and whose iterator is itself."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == COUNT:
            self.at = 0
            raise StopIteration
        self.at += 1
        return (self.at - 1) ** 2

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


class Noisy(torch.utils.data.Dataset[int]):
    """A map-style dataset with a state."""

    def __init__(self) -> None:
        self.drawn = torch.zeros(2)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.drawn += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "names": ("a", "b")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["names"] == ("a", "b")
        self.drawn = state["drawn"].clone()


def feed_of(sample: Callable[[int], Any], puts: int, source: Any = None, **options: Any) -> DataLoader[Any]:
    """Return the loader of a feed with so many samples."""
    feed = Feed(range(COUNT) if source is None else source, batch_size=2, max_samples=COUNT, **options)
    for lease in itertools.islice(feed.leases(), puts):
        with lease:
            lease.put(sample(lease.value))
    return DataLoader(feed)


def source_of_squares() -> Any:
    """Return a stream that a feed waits for."""
    return Squares()


BY_SAMPLER: dict[str, Callable[..., Any]] = {
    "elastic": lambda puts=0: DataLoader(NUMBERS, 2, sampler=ElasticSampler(NUMBERS)),
    "weighted": lambda puts=0: DataLoader(NUMBERS, 2, sampler=WeightedSampler(LENGTHS)),
    "mixture": lambda puts=0: DataLoader(NUMBERS, 2, sampler=MixtureSampler([12, 12], [1, 2], stop="first")),
    "by length": lambda puts=0: DataLoader(NUMBERS, batch_sampler=LengthBatchSampler(LENGTHS, max_tokens=8)),
    "packed": lambda puts=0: DataLoader(
        NUMBERS, batch_sampler=PackingBatchSampler(LENGTHS, block_size=6), collate_fn=list
    ),
    "balanced": lambda puts=0: DataLoader(NUMBERS, batch_sampler=BalancedBatchSampler(LENGTHS, batch_size=2)),
    "torch's": lambda puts=0: DataLoader(NUMBERS, 2, shuffle=True),
}
LOADERS: dict[str, Callable[..., Any]] = {
    **BY_SAMPLER,
    "dataset with a state": lambda puts=0: DataLoader(Noisy(), 2),
    "dataset with a state, a worker": lambda puts=0: DataLoader(Noisy(), 2, num_workers=1, worker_backend="thread"),
    "stream": lambda puts=0: DataLoader(Squares(), 2),
    "stream, a worker": lambda puts=0: DataLoader(Squares(), 2, num_workers=1, worker_backend="thread"),
    "parallel map": lambda puts=0: DataLoader(ParallelMap(Squares(), str), 2),
    "feed of numbers": lambda puts=10: feed_of(int, puts),
    "feed of tensors": lambda puts=10: feed_of(lambda item: {"tokens": torch.full((3,), item), "name": "a"}, puts),
    "feed of views": lambda puts=10: feed_of(lambda item: torch.arange(100_000)[item : item + 1], puts),
    "feed of groups": lambda puts=10: feed_of(
        lambda item: [torch.tensor(item), torch.tensor(-item)], puts, group_size=2
    ),
    "feed with a source that has a state": lambda puts=10: feed_of(int, puts, Squares()),
    "feed with a stream": lambda puts=10: feed_of(int, puts, source_of_squares),
}


def begun(loader: Any, count: int = 2) -> tuple[Any, Iterator[Any]]:
    """Return a loader in the middle of an epoch, and its iterator."""
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    return loader, iterator


def written(state: Any) -> bytes:
    """Return what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(data: bytes) -> Any:
    """Read it as what is not trusted."""
    return torch.load(io.BytesIO(data), weights_only=True)


def rest(loader: Any, iterator: Any) -> list[Any]:
    """Return what is left; a feed is closed, and has no producers."""
    if isinstance(loader.dataset, Feed):
        loader.dataset.close()
    return [as_lists(batch) for batch in iterator]


def as_lists(batch: Any) -> Any:
    """Return a batch so that it can be compared."""
    if isinstance(batch, Tensor):
        return batch.tolist()
    return {name: as_lists(each) for name, each in batch.items()} if isinstance(batch, dict) else list(batch)


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield whatever is in a state that contains nothing, with where it is."""
    if isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))
    else:
        yield path, state


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another leaf."""
    if not path:
        return value
    first, *further = path
    if isinstance(state, dict):
        return {**state, first: replaced(state[first], tuple(further), value)}
    return type(state)(replaced(each, tuple(further), value) if at == first else each for at, each in enumerate(state))


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("name", LOADERS)
def test_states_are_values_that_torch_takes_for_safe(name: str) -> None:
    """No bytes that somebody would unpickle later; and what was read goes on as what was written."""
    loader, iterator = begun(LOADERS[name](10))
    state = loader.state_dict()
    assert [path for path, leaf in leaves(state) if isinstance(leaf, (bytes, bytearray))] == []
    data = written(state)
    assert len(data) < 100_000  # and views without the memory around them
    expected = rest(loader, iterator)
    resumed = LOADERS[name](0)
    resumed.load_state_dict(read(data))
    assert rest(resumed, iter(resumed)) == expected


@pytest.mark.parametrize("name", LOADERS)
def test_nothing_of_a_state_is_unpickled(name: str, tmp_path: Path) -> None:
    """Whichever of its values is a pickle in the file: the state may be refused, but no code runs."""
    loader, iterator = begun(LOADERS[name](5))
    state = loader.state_dict()
    rest(loader, iterator)
    pickled = pickle.dumps(Trap(tmp_path / "trapped"))
    for path, _ in effort.share([*leaves(state)], len(name), 4):
        resumed = LOADERS[name](0)
        try:
            resumed.load_state_dict(read(written(replaced(state, path, pickled))))
            if isinstance(resumed.dataset, Feed):
                resumed.dataset.close()  # before the loop begins, which may wait for batches that it leaves out
            rest(resumed, itertools.islice(resumed, 2))
        except Exception as error:  # any: the state is no state
            assert type(error).__name__
        finally:
            resumed.close()
    assert not (tmp_path / "trapped").exists()


class Answer:
    """A class of the user's, of which torch knows nothing."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_objects_are_in_a_state_as_they_are() -> None:
    """So `torch.load` refuses it by itself, unless it is told which classes to take, or that the file is trusted."""
    feed: Feed[int] = Feed(range(4), batch_size=2, max_samples=4, fn=lambda sample: sample.value.number)
    for lease in itertools.islice(feed.leases(), 4):
        with lease:
            lease.put(Answer(lease.value))
    data = written(feed.state_dict())
    with pytest.raises(pickle.UnpicklingError, match="Answer"):
        read(data)
    with torch.serialization.safe_globals([Answer]):
        known = read(data)
    for state in (known, torch.load(io.BytesIO(data), weights_only=False)):
        resumed: Feed[int] = Feed(range(4), batch_size=2, max_samples=4, fn=lambda sample: sample.value.number)
        resumed.load_state_dict(state)
        resumed.close()
        assert sorted(int(number) for batch in DataLoader(resumed) for number in batch) == [0, 1, 2, 3]


def test_a_state_of_a_feed_stays_as_it_was() -> None:
    """Whatever becomes of the samples, and in each feed that goes on from it."""
    feed: Feed[Any] = Feed(batch_size=1)
    sample = [torch.zeros(2)]
    feed.put_nowait(sample)
    state = feed.state_dict()
    sample[0] += 1
    for _ in range(2):
        resumed: Feed[Any] = Feed(batch_size=1, fn=change)
        resumed.load_state_dict(state)
        resumed.close()
        assert [batch[0].tolist() for batch in DataLoader(resumed)] == [[[1, 1]]]


def change(sample: Any) -> Any:
    """Change a sample in place."""
    sample.value[0].add_(1)
    return sample.value


class Refuses(Noisy):
    """Cannot begin in a state that was loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise LookupError("no such place")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_whose_state_could_not_be_begun_from_is_closed(num_workers: int) -> None:
    """Also while the error's traceback keeps the iterator that was not made; and another state may be loaded."""
    options: Any = {"num_workers": num_workers, "worker_backend": "thread" if num_workers else "process"}
    loader, iterator = begun(DataLoader(Noisy(), 2, **options))
    state = loader.state_dict()
    del iterator
    refusing: Any = DataLoader(Refuses(), 2, **options)
    refusing.load_state_dict(state)
    with pytest.raises(LookupError) as raised:
        list(refusing)
    assert raised.value.__traceback__ is not None
    refusing.close()
    refusing.load_state_dict({})
    assert len(list(refusing)) == COUNT // 2
