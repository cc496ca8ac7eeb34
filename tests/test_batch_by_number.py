"""``loader.batch_keys(epoch, number)`` and ``loader.batch(epoch, number)``: one batch again, and nothing else moves.

Each case iterates as a trainer does, keeps the batches, and asks for some of them again: at the end, in the middle of a
run, after a resume in another process (a loader made alike), in any order. What cannot be known is refused.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asyncloader import ConfigurationError, DataLoader, StateMismatchError, sample_rng
from asyncloader.samplers import (
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
)
from tests.support import effort
from tests.support.sameness import same

LENGTH = 103


class Draws:
    """Draws from all that a sample may draw from, and augments by its epoch."""

    def __init__(self) -> None:
        self.epoch = -1
        self.rng = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        drawn = [float(torch.rand(())), random.random(), np.random.rand(), sample_rng().random(), self.rng.random()]
        return index, self.epoch, torch.tensor(drawn, dtype=torch.float64)


class Plain:
    """Draws from the generator of the sample only."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, sample_rng().random()


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 8},
    "shuffled": lambda: {"batch_size": 8, "shuffle": True},
    "shuffled, with a generator": lambda: {
        "batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(3), "drop_last": True
    },
    "distributed": lambda: {"batch_size": 8, "sampler": DistributedSampler(range(LENGTH), 3, 1, seed=4)},
    "elastic": lambda: {"batch_size": 8, "sampler": ElasticSampler(LENGTH, 3, 1)},
    "elastic, one by one": lambda: {"batch_size": None, "sampler": ElasticSampler(LENGTH)},
    "lengths": lambda: {"batch_sampler": LengthBatchSampler(np.arange(LENGTH) % 17 + 1, max_tokens=60)},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(LENGTH)), 7, drop_last=False)},
}  # fmt: skip


def assert_again(loader: DataLoader[Any], epoch: int, batches: list[Any], first: int = 0) -> None:
    """Ask for batches of an epoch again, not in order. Each that a worker makes is made by a new one."""
    drawn = [torch.get_rng_state().tolist(), random.getstate()]
    few = loader.num_workers and effort.is_quick
    for number in (len(batches) - 1, first) if few else (len(batches) - 1, 0, len(batches) // 2):
        if first <= number < len(batches):
            assert loader.batch_keys(epoch, number) == np.asarray(batches[number][0]).tolist()
            assert same(loader.batch(epoch, number), batches[number]), (epoch, number)
    assert drawn == [torch.get_rng_state().tolist(), random.getstate()]
    with pytest.raises(IndexError, match=f"epoch {epoch} has no batch {len(batches)}"):
        loader.batch_keys(epoch, len(batches))


OF_WORKERS = ("shuffled", "elastic, one by one")
"""In these the batches are a worker's before a commit, and in all others too each night."""


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        pytest.param(name, number, marks=[pytest.mark.slow] * ((name in OF_WORKERS) != number))
        for name in SAMPLERS
        for number in (0, 1)
    ],
)
def test_of_past_and_resumed_epochs(name: str, num_workers: int) -> None:
    """Batches of the epochs before, of the running one, and of a state that another program has loaded."""

    def make() -> DataLoader[Any]:
        dataset: Any = Draws() if num_workers else Plain()
        return DataLoader(dataset, num_workers=num_workers, seeding="sample", **SAMPLERS[name]())

    few = num_workers and effort.is_quick
    torch.manual_seed(1)
    loader = make()
    loader.set_epoch(0)
    first = [*loader]
    at_the_end = json.loads(json.dumps(loader.state_dict()))
    loader.set_epoch(1)
    iterator = iter(loader)
    second = [*islice(iterator, 5)]
    in_the_middle = json.loads(json.dumps(loader.state_dict()))
    for number in (4, 1):
        assert same(loader.batch(1, number), second[number])
    second += iterator
    if not few:
        assert_again(loader, 1, second)
    assert_again(loader, 0, first)
    torch.manual_seed(99)
    for state, known in ((at_the_end, 0), (in_the_middle, 5)):
        other = make()
        other.load_state_dict(state)
        if not known:
            other.set_epoch(1)
        if known or not few:
            assert_again(other, 1, second, known)
        assert same([*other], second[known:])
        assert_again(other, 1, second, known)


def test_the_short_last_batch() -> None:
    """From the states around it: samples before it are counted as they were."""
    loader = DataLoader(Plain(), 8, shuffle=True, seeding="sample")
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    for state in states[-3:]:
        other = DataLoader(Plain(), 8, shuffle=True, seeding="sample")
        other.load_state_dict(state)
        assert_again(other, 0, batches, state["position"])


def test_before_a_state() -> None:
    """It says what is lacking."""
    loader = DataLoader(Plain(), 8, shuffle=True)
    next(islice(loader, 3, None))
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(IndexError, match="batch 1 lies before the state"):
        loader.batch(0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True, "num_workers": 2},
        {"num_workers": 2, "scheduling": "dynamic", "in_order": False},
        {"num_workers": "auto", "max_workers": 2},
        {"num_workers": 2, "on_error": "replace", "timeout": 30},
        {"num_workers": 2, "worker_backend": "thread"},
    ],
)
def test_with_other_options(options: dict[str, Any]) -> None:
    """Whatever made the batch the first time."""
    loader = DataLoader(Plain(), 8, shuffle=True, **options)
    batches = [*loader]
    by_keys = {tuple(batch[0].tolist()): batch for batch in batches}  # with in_order=False they come anyhow
    for number in (3, 12, 0):
        assert same(loader.batch(0, number), by_keys[tuple(loader.batch_keys(0, number))])
    loader.close()


def test_weights_that_were_set_on_the_way() -> None:
    """A mixture's weights say from which sample on they hold: batches before that and after it come again."""
    sampler = MixtureSampler([40_000, 60_000], [0.5, 0.5])
    loader = DataLoader(range(100_000), 100, sampler=sampler)  # type: ignore[arg-type]
    given = []
    for number, batch in enumerate(loader):
        given.append(batch)
        if number == 10:
            sampler.set_weights([0.9, 0.1], at=50_000)
        if number == 650:
            break
    for number in (5, 499, 500, 640):
        assert same(loader.batch(0, number), given[number])
    assert (given[640] < 40_000).sum() > 75


class Bad(Plain):
    """Some of its samples cannot be loaded."""

    def __getitem__(self, index: int) -> Any:
        if index in (3, *range(8, 16)):
            raise KeyError(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples(num_workers: int) -> None:
    """They are left out, or raise, as in the run."""
    loader = DataLoader(Bad(), 8, num_workers=num_workers, on_error="skip")
    batches = [*loader]
    assert same([loader.batch(0, number) for number in (0, 2)], batches[:2])
    assert loader.batch_keys(0, 1) == [*range(8, 16)]
    with pytest.raises(IndexError, match="batch 1 of epoch 0 is left out"):
        loader.batch(0, 1)
    loader.on_error = "raise"
    list(islice(loader, 0))
    with pytest.raises(KeyError):
        loader.batch(1, 0)


class Stream(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Remembers(Plain):
    """Has a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load nothing."""


class Locked(ElasticSampler):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.lock = threading.Lock()


class Shuffles(Sampler[int]):
    """A user's sampler, which shuffles its own list."""

    def __init__(self) -> None:
        self.order = [*range(LENGTH)]

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter([*self.order])


class OfItsOwn(BatchSampler):
    """A subclass of torch's that draws from something of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        return (random.sample(batch, len(batch)) for batch in super().__iter__())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dataset": Stream()}, "iterable dataset"),
        ({"num_workers": 1, "seeding": "worker"}, 'seeding="worker"'),
        ({"dataset": Remembers()}, "a state of its own"),
        ({"sampler": Locked()}, "cannot be copied"),
        ({"sampler": Shuffles()}, "order of Shuffles cannot be known"),
        ({"batch_sampler": OfItsOwn(range(LENGTH), 8, False)}, "order of OfItsOwn cannot be known"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    """It says why, and gives no other batch in the place of the one that was meant."""
    loader: DataLoader[Any] = DataLoader(**{"dataset": Plain(), **options})
    list(islice(loader, 3))
    with pytest.raises(ConfigurationError, match=why):
        loader.batch(0, 0)
    with pytest.raises(ConfigurationError, match=why):
        loader.batch_keys(0, 0)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [*range(LENGTH)], lambda sampler: random.shuffle(sampler)),
        (lambda: SubsetRandomSampler([*range(LENGTH)]), lambda sampler: sampler.indices.reverse()),
        (lambda: WeightedRandomSampler(torch.arange(LENGTH) + 1.0, 64), lambda sampler: sampler.weights.fill_(1.0)),
    ],
)
def test_rows_that_may_have_changed(make: Any, change: Any) -> None:
    """A sampler that holds rows is compared with a state, by their checksum, and taken from memory no batch of."""
    loader = DataLoader(Plain(), 8, sampler=make())
    iterator = iter(loader)
    batches = [next(iterator)]
    state = loader.state_dict()
    batches += islice(iterator, 2)
    with pytest.raises(ConfigurationError, match="load a state of it"):
        loader.batch(0, 2)
    iterator.close()  # type: ignore[attr-defined]
    loader.load_state_dict(state)
    assert same(loader.batch(0, 2), batches[2])
    change(loader.sampler)
    with pytest.raises(StateMismatchError):
        loader.batch(0, 2)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_backend": "thread"}])
def test_a_dataset_of_this_process_at_another_epoch(options: dict[str, Any]) -> None:
    """There is one of it here, and it is not told another epoch; in worker processes there are others."""
    loader = DataLoader(Draws(), 8, seeding="sample", **options)
    loader.set_epoch(0)
    first = [*loader]
    loader.set_epoch(1)
    with pytest.raises(ConfigurationError, match="is at epoch 1 in this process"):
        loader.batch(0, 0)
    assert loader.batch_keys(0, 0) == [*range(8)]
    loader.set_epoch(0)
    assert same(loader.batch(0, 0)[0], first[0][0])


def test_what_is_not_known() -> None:
    """Of what the loader was not iterated over, of what it has forgotten, and what is no number."""
    loader = DataLoader(Plain(), 8)
    with pytest.raises(IndexError, match="nothing is known of epoch 0"):
        loader.batch(0, 0)
    for _ in range(9):
        list(islice(loader, 1))
    with pytest.raises(IndexError, match="nothing is known of epoch 0"):
        loader.batch_keys(0, 0)
    with pytest.raises(IndexError, match="counted from 0"):
        loader.batch_keys(1, -1)
    assert loader.batch_keys(np.int64(1), torch.tensor(3)) == [*range(24, 32)]  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="number should be an integer"):
        loader.batch(1, 2.5)  # type: ignore[arg-type]
    loader.load_state_dict({})
    with pytest.raises(IndexError, match="nothing is known of epoch 0"):
        loader.batch_keys(0, 0)


def test_what_the_batch_was_made_with() -> None:
    """Attributes that were set after its run do not count."""
    loader = DataLoader(Plain(), 8)
    batches = [*loader]
    loader.collate_fn, loader.seeding = len, "sample"
    assert same(loader.batch(0, 2), batches[2])


def test_a_batch_size_that_was_set_between_two_epochs() -> None:
    """Samples are numbered by the batch size of their epoch."""
    loader = DataLoader(Plain(), 8, seeding="sample")
    assert len([*loader]) == 13
    loader.batch_sampler.batch_size = 5  # type: ignore[union-attr]
    assert_again(loader, 1, [*loader])
