"""``loader.batch_keys(epoch, number)`` and ``loader.batch(epoch, number)``: one batch again, and nothing else moves.

Each case iterates as a trainer does, keeps the batches, and asks for some of them again: at the end, in the middle of a
run, after a resume in another process (a loader made alike), in any order.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    Subset,
    WeightedRandomSampler,
)

from asyncloader import ConfigurationError, DataLoader, sample_rng
from asyncloader.samplers import (
    BlockShuffleSampler,
    ElasticSampler,
    LengthBatchSampler,
    MixtureSampler,
    PackingBatchSampler,
    WeightedSampler,
    pack_collate,
)
from tests.sameness import same

LENGTH = 103
EPOCHS = 3


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


class Plain(Draws):
    """Draws from the generator of the sample only: without workers others are the trainer's."""

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch, sample_rng().random()


class Hides(Plain):
    """Does not show its epoch."""

    def __init__(self) -> None:
        self.hidden = -1

    def set_epoch(self, epoch: int) -> None:
        self.hidden = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.hidden, sample_rng().random()


class Counts(Sampler[int]):
    """A user's sampler with a state, which counts its epochs."""

    def __init__(self) -> None:
        self.runs = self.yielded = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order, first = np.random.default_rng(self.runs).permutation(LENGTH).tolist(), self.yielded
        for self.yielded, index in enumerate(order[first:], first + 1):
            yield index
        self.runs, self.yielded = self.runs + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"runs": self.runs, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.runs, self.yielded = state["runs"], state["yielded"]


class Shuffles(Sampler[int]):
    """A user's sampler that shuffles with Python's global generator."""

    def __init__(self) -> None:
        self.order = [*range(LENGTH)]

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(self.order, LENGTH))


class InPlace(Shuffles):
    """Shuffles its own list, so that each order depends on the one before."""

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter([*self.order])


LENGTHS = np.arange(LENGTH) % 17 + 1

SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 8},
    "shuffled": lambda: {"batch_size": 8, "shuffle": True},
    "shuffled, with a generator": lambda: {
        "batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(3), "drop_last": True
    },
    "drawn with replacement": lambda: {"batch_size": 8, "sampler": RandomSampler(range(LENGTH), True, 90)},
    "torch's weights": lambda: {"batch_size": 8, "sampler": WeightedRandomSampler(torch.arange(LENGTH) + 1.0, 64)},
    "distributed": lambda: {"batch_size": 8, "sampler": DistributedSampler(range(LENGTH), 3, 1, seed=4)},
    "elastic": lambda: {"batch_size": 8, "sampler": ElasticSampler(LENGTH, 3, 1)},
    "elastic, one by one": lambda: {"batch_size": None, "sampler": ElasticSampler(LENGTH)},
    "blocks": lambda: {"batch_size": 8, "sampler": BlockShuffleSampler([20, 43, 40])},
    "weights": lambda: {"batch_size": 8, "sampler": WeightedSampler(np.arange(LENGTH) + 1.0)},
    "lengths": lambda: {"batch_sampler": LengthBatchSampler(LENGTHS, max_tokens=60)},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(LENGTH)), 7, drop_last=False)},
    "a list": lambda: {"batch_sampler": [[*range(n, min(n + n % 5 + 1, LENGTH))] for n in range(0, LENGTH, 3)]},
    "a user's, with a state": lambda: {"batch_size": 8, "sampler": Counts()},
    "a user's": lambda: {"batch_size": 8, "sampler": Shuffles()},
}  # fmt: skip


def samplers(turn: int) -> list[Any]:
    """Return all samplers, for one of five tests: before a commit each sampler is in two of them, each night in all."""
    return [
        pytest.param(name, marks=() if (number - turn) % 5 in (0, 2) else pytest.mark.slow)
        for number, name in enumerate(SAMPLERS)
    ]


def made(name: str, **options: Any) -> DataLoader[Any]:
    """Make a loader as a trainer would at the beginning of a program."""
    return DataLoader(options.pop("dataset", None) or Draws(), **SAMPLERS[name](), **options)


def epochs(loader: DataLoader[Any], count: int = EPOCHS, first: int = 0) -> list[list[Any]]:
    """Iterate over some epochs, each of which is told."""
    batches = []
    for epoch in range(first, first + count):
        loader.set_epoch(epoch)
        batches.append([*loader])
    return batches


def some(batches: list[Any]) -> list[int]:
    """Return numbers of batches, with the first, the last, and one between, not in order."""
    return [len(batches) - 1, 0, len(batches) // 2, len(batches) - 2]


def states() -> list[Any]:
    """Return what the global generators are."""
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


def assert_again(loader: DataLoader[Any], epoch: int, batches: list[Any], first: int = 0) -> None:
    """Ask for batches of an epoch again."""
    before = states()
    for number in some(batches):
        if number < first:
            continue
        indices = batches[number][0]
        keys = loader.batch_keys(epoch, number)
        assert keys == (indices.tolist() if isinstance(indices, torch.Tensor) else indices)
        assert same(loader.batch(epoch, number), batches[number]), (epoch, number)
    assert states() == before
    with pytest.raises(IndexError, match=f"epoch {epoch} has no batch {len(batches)}"):
        loader.batch_keys(epoch, len(batches))


@pytest.mark.covering(1)
@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("name", samplers(0))
def test_after_some_epochs(name: str, seeding: Any) -> None:
    """Each batch of each epoch, made by one of two workers, comes again."""
    torch.manual_seed(1)
    random.seed(1)
    loader = made(name, num_workers=2, seeding=seeding)
    batches = epochs(loader)
    for epoch in (1, 0, 2):
        assert_again(loader, epoch, batches[epoch])
    assert loader.dataset.epoch == EPOCHS - 1  # type: ignore[attr-defined]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", samplers(1))
@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_without_workers(name: str, seeding: Any) -> None:
    """The same in the trainer's process."""
    torch.manual_seed(2)
    random.seed(2)
    loader = made(name, dataset=Plain() if seeding == "batch" else Draws(), seeding=seeding)
    batches = epochs(loader)
    for epoch in (2, 0):
        assert_again(loader, epoch, batches[epoch])


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", samplers(2))
def test_nothing_else_moves(name: str, num_workers: int) -> None:
    """A trainer that asks in the middle of its run goes on as one that does not."""

    def train(*, asks: bool) -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        loader = made(name, dataset=Plain() if not num_workers else None, num_workers=num_workers)
        given: list[Any] = [*loader]
        for number, batch in enumerate(loader):
            given += [batch, random.random(), np.random.rand(), float(torch.rand(()))]
            if asks and number in (1, 6):
                again = loader.batch(1, number)
                assert same(again, batch)
                loader.batch_keys(1, number - 1)
                loader.batch(0, number)
        return [*given, *loader, loader.state_dict()["position"]]

    assert same(train(asks=True), train(asks=False))


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", samplers(3))
def test_of_a_state(name: str, num_workers: int) -> None:
    """Another program that loads a state, of the middle of an epoch or its end, has the batches of that epoch.

    Before it goes on with it, and then. What lies before the state is there where the sampler is drawn anew.
    """
    torch.manual_seed(4)
    random.seed(4)
    options: dict[str, Any] = {"num_workers": num_workers, "seeding": "sample"}
    loader = made(name, **options)
    epochs(loader, 1)
    at_the_end = json.loads(json.dumps(loader.state_dict()))
    loader.set_epoch(1)
    iterator = iter(loader)
    batches = [*islice(iterator, 5)]
    in_the_middle = json.loads(json.dumps(loader.state_dict()))
    batches += iterator

    torch.manual_seed(99)
    other = made(name, **options)
    other.load_state_dict(at_the_end)
    other.set_epoch(1)
    assert_again(other, 1, batches)
    with pytest.raises(IndexError, match=r"knows of epochs \[1\]"):
        other.batch_keys(0, 0)
    other = made(name, **options)
    other.load_state_dict(in_the_middle)
    assert_again(other, 1, batches, first=5)
    assert same([*other], batches[5:])
    assert_again(other, 1, batches, first=5)


def test_before_a_state() -> None:
    """A sampler that is drawn anew has what lies before the state; one with a state says what is lacking."""
    for name, has_it in (("shuffled", True), ("elastic", False)):
        loader = made(name, num_workers=2)
        iterator = iter(loader)
        batches = [*islice(iterator, 4)]
        state = loader.state_dict()
        other = made(name, num_workers=2)
        other.load_state_dict(state)
        if has_it:
            assert same(other.batch(0, 1), batches[1])
        else:
            with pytest.raises(IndexError, match="batch 1 lies before the state"):
                other.batch(0, 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", samplers(4))
def test_every_batch_of_every_state(name: str) -> None:
    """Also from that of the last batch, which is shorter than the others, and from one of a run that was resumed."""
    torch.manual_seed(7)
    random.seed(7)
    loader = made(name, seeding="sample")
    batches, states = [], [loader.state_dict()]
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    for at in {0, 1, len(batches) // 2, len(batches) - 1, len(batches)}:
        other = made(name, seeding="sample")
        other.load_state_dict(states[at])
        first = first_known(other, at)
        assert_again(other, 0, batches, first)
        assert same([*other], batches[at:])
        assert_again(other, 0, batches, first)


def first_known(loader: DataLoader[Any], at: int) -> int:
    """Return the first batch that a state of batch `at` has: where its sampler is drawn anew, the first of all."""
    for number in reversed(range(at)):
        try:
            loader.batch_keys(0, number)
        except IndexError as error:
            assert "lies before the state" in str(error)
            return number + 1
    return 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("face", ["plain", "async"])
def test_in_an_async_trainer(face: str, workers: int, seeding: Any) -> None:
    """`abatch`, beside a run of the same loader that goes on."""

    class Awaited(Plain):
        async def __getitem__(self, index: int) -> Any:
            await asyncio.sleep(0)
            return Plain.__getitem__(self, index)

    dataset = Awaited() if face == "async" else Plain()
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers, seeding=seeding)  # type: ignore[arg-type]

    async def train() -> None:
        first = [batch async for batch in loader]
        second = []
        async for batch in loader:
            second.append(batch)
            assert same(await loader.abatch(0, len(second) - 1), first[len(second) - 1])
        assert len(second) == len(first)
        again = await asyncio.gather(*(loader.abatch(1, number) for number in range(len(second))))
        assert same(again, second)
        with pytest.raises(IndexError, match="has no batch 13"):
            await loader.abatch(1, 13)

    asyncio.run(train())


@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True, "num_workers": 2},
        {"num_workers": 2, "scheduling": "dynamic", "in_order": False, "prefetch_factor": 4},
        {"num_workers": "auto", "max_workers": 2},
        {"num_workers": 2, "max_tasks_per_child": 3},
        {"num_workers": 2, "timeout": 30},
        {"num_workers": 2, "on_error": "replace"},
    ],
)
def test_with_other_options(options: dict[str, Any]) -> None:
    """Whatever made the batch the first time."""
    torch.manual_seed(5)
    loader = DataLoader(Draws(), batch_size=8, shuffle=True, **options)
    batches = epochs(loader, 2)
    for epoch in range(2):
        by_keys = {tuple(batch[0].tolist()): batch for batch in batches[epoch]}  # with in_order=False they come anyhow
        for number in (3, 11, 0):
            assert same(loader.batch(epoch, number), by_keys[tuple(loader.batch_keys(epoch, number))])
    loader.close()


@pytest.mark.processes
def test_an_epoch_of_before(start_method: str) -> None:
    """The worker that makes it again is started as the loader says, and its copy of the dataset told the epoch."""
    loader = DataLoader(Hides(), batch_size=8, num_workers=1, multiprocessing_context=start_method)
    batches = epochs(loader, 2)
    for epoch in (0, 1):
        assert same(loader.batch(epoch, 3), batches[epoch][3])
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_was_told_its_first_epoch_since(num_workers: int) -> None:
    """Nobody can take it back to where it was before: that is an error, and no batch of the wrong epoch."""
    loader = DataLoader(Hides(), batch_size=8, num_workers=num_workers)
    batches = [*loader]
    assert same(loader.batch(0, 2), batches[2])
    loader.set_epoch(1)
    assert loader.batch_keys(0, 2) == batches[2][0].tolist()
    with pytest.raises(ConfigurationError, match=r"has been told epoch 1 .* and nothing before that run"):
        loader.batch(0, 2)
    batches = [*loader]
    assert same(loader.batch(1, 2), batches[2])


def test_with_threads() -> None:
    """Workers that are threads seed no global generators; what a sample draws of its own generator is the same."""
    loader = DataLoader(Plain(), batch_size=8, shuffle=True, num_workers=2, worker_backend="thread")
    batches = epochs(loader, 2)
    for epoch in (0, 1):
        assert_again(loader, epoch, batches[epoch])


def test_weights_that_were_set_on_the_way() -> None:
    """A mixture's weights say from which sample on they hold: batches before that and after it come again."""
    sampler = MixtureSampler([40_000, 60_000], [0.5, 0.5])
    loader = DataLoader(range(100_000), batch_size=100, sampler=sampler, num_workers=2)  # type: ignore[arg-type]
    given = []
    for number, batch in enumerate(loader):
        given.append(batch)
        if number == 10:
            sampler.set_weights([0.9, 0.1], at=50_000)
        if number == 650:
            break
    for number in (5, 499, 500, 640, 20):
        assert loader.batch_keys(0, number) == given[number].tolist()
        assert same(loader.batch(0, number), given[number])
    assert (given[640] < 40_000).sum() > 75


def test_weights_that_hold_for_windows() -> None:
    """They were set for samples that were not planned then: windows before and after those come again."""
    sampler = MixtureSampler([4_000, 6_000], [0.5, 0.5])
    lengths = np.full(10_000, 10)
    loader = DataLoader(
        range(10_000),  # type: ignore[arg-type]
        batch_sampler=LengthBatchSampler(lengths, max_tokens=1000, sampler=sampler, window=1000),
        num_workers=1,
    )
    iterator = iter(loader)
    given = [*islice(iterator, 30)]
    sampler.set_weights([0.9, 0.1], at=8_000)
    given += islice(iterator, 100)
    for number in (3, 31, 79, 80, 120):
        assert same(loader.batch(0, number), given[number])
    assert [(given[number] < 4_000).sum() > 60 for number in (79, 80)] == [False, True]


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_from_feedback(replacement: bool) -> None:
    """Batches come again with the weights that held for them, in this epoch and in the one before."""
    sampler = WeightedSampler(np.ones(300), 200, replacement)
    loader = DataLoader(range(300), batch_size=5, sampler=sampler, num_workers=2)  # type: ignore[arg-type]
    given: dict[tuple[int, int], list[int]] = {}
    for epoch in range(2):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            given[epoch, number] = batch.tolist()
            sampler.update(batch, batch % 7 + 0.1 + epoch)
            if number == 30 and epoch == 1:
                break
    for epoch, number in ((0, 0), (0, 7), (0, 39), (1, 0), (1, 20), (1, 30)):
        assert loader.batch_keys(epoch, number) == given[epoch, number]


class Shifted(Sampler[int]):
    """Has `state_after`, as samplers of ours, and is changed on the way."""

    def __init__(self) -> None:
        self.shift = self.read = self.start = 0

    def __iter__(self) -> Iterator[int]:
        self.read = self.start
        while self.read < 100:
            self.read += 1
            yield (self.read - 1 + self.shift) % 100

    def __len__(self) -> int:
        return 100

    def state_after(self, items: int) -> dict[str, Any]:
        return {"cursor": self.start + items, "shift": self.shift}

    def state_dict(self) -> dict[str, Any]:
        return self.state_after(self.read - self.start)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.read = state["cursor"]
        self.shift = state["shift"]


def test_a_sampler_of_the_users_that_was_changed() -> None:
    """Batches before that come again; later ones are an error, and not another batch."""
    sampler = Shifted()
    loader = DataLoader(range(100), batch_size=5, sampler=sampler)  # type: ignore[arg-type]
    iterator = iter(loader)
    given = [*islice(iterator, 5)]
    assert loader.batch_keys(0, 3) == given[3].tolist()
    sampler.shift = 50
    next(iterator)
    assert loader.batch_keys(0, 3) == given[3].tolist()
    with pytest.raises(ConfigurationError, match="does not give the same order again"):
        loader.batch_keys(0, 5)


def test_an_epoch_of_a_billion() -> None:
    """Nothing is drawn that lies before."""
    many = 1_000_000_000
    loader = DataLoader(range(many), batch_size=32, sampler=ElasticSampler(many, 8, 3), num_workers=1)  # type: ignore[arg-type]
    iterator = iter(loader)
    assert same(loader.batch(0, 0), next(iterator))
    sampler = copy.deepcopy(loader.sampler)
    sampler.load_state_dict({**loader.sampler.state_dict(), "cursor": 3_000_000 * 32 * 8})  # type: ignore[attr-defined]
    assert loader.batch_keys(0, 3_000_000) == [*islice(iter(sampler), 32)]
    iterator.close()  # type: ignore[attr-defined]


def test_what_is_packed() -> None:
    """Keys of packed batches are pieces of samples."""
    documents = [np.arange(length) for length in LENGTHS.tolist()]
    sampler = PackingBatchSampler(LENGTHS, block_size=32, batch_size=2)
    collate = partial(pack_collate, block_size=32, batch_size=2)
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=collate, num_workers=1)  # type: ignore[arg-type]
    batches = [*loader]
    for number in some(batches):
        assert same(loader.batch(0, number), batches[number])


class Bad(Plain):
    """Some of its samples cannot be loaded."""

    def __getitem__(self, index: int) -> Any:
        if index in (3, *range(8, 16)):
            raise KeyError(index)
        return super().__getitem__(index)


def test_bad_samples() -> None:
    """They are left out, or raise, as in the run."""
    loader = DataLoader(Bad(), batch_size=8, num_workers=2, on_error="skip")
    batches = [*loader]
    assert same(loader.batch(0, 0), batches[0])
    assert same(loader.batch(0, 2), batches[1])
    assert loader.batch_keys(0, 1) == [*range(8, 16)]
    with pytest.raises(IndexError, match="batch 1 of epoch 0 is left out"):
        loader.batch(0, 1)
    with pytest.raises(IndexError, match="batch 1 of epoch 0 is left out"):
        asyncio.run(loader.abatch(0, 1))
    loader = DataLoader(Bad(), batch_size=8, num_workers=2)
    with pytest.raises(KeyError):
        next(iter(loader))
    with pytest.raises(KeyError):
        loader.batch(0, 0)
    assert same(loader.batch(0, 2)[0], torch.arange(16, 24))


class Mortal(Plain):
    """Ends a worker once."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        path = os.path.join(self.folder, "dead")
        if index == 60 and self.epoch == 1 and not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def test_workers_that_are_replaced_while_another_epoch_is_asked_for(tmp_path: Any) -> None:
    """A worker that is forked at a moment when the dataset is at another epoch makes batches of its own epoch."""
    expected = DataLoader(Plain(), batch_size=4)
    expected.set_epoch(0)
    first = [*expected]
    expected.set_epoch(1)
    second = [*expected]
    loader = DataLoader(Mortal(str(tmp_path)), batch_size=4, num_workers=2)
    loader.set_epoch(0)
    list(loader)
    loader.set_epoch(1)
    iterator, given = iter(loader), []
    for _ in range(10):
        given.append(next(iterator))
    for number in range(8):  # meanwhile the worker dies and is replaced
        assert same(loader.batch(0, number)[1], first[number][1])
    assert same([batch[:2] for batch in [*given, *iterator]], [batch[:2] for batch in second])
    assert (tmp_path / "dead").exists()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_backend": "thread"}])
def test_a_dataset_in_use_cannot_be_at_two_epochs(options: dict[str, Any]) -> None:
    """In this process there is one of it."""
    loader = DataLoader(Plain(), batch_size=8, **options)
    first = epochs(loader, 1)[0]
    loader.set_epoch(1)
    iterator: Any = iter(loader)
    next(iterator)
    with pytest.raises(ConfigurationError, match="is at epoch 1 in this process"):
        loader.batch(0, 0)
    assert loader.batch_keys(0, 0) == [*range(8)]
    list(iterator)
    assert same(loader.batch(0, 0), first[0])
    assert loader.dataset.epoch == 1  # type: ignore[attr-defined]


class Stream(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Remembers(Plain):
    """Has a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Locked(Sampler[int]):
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH


def test_what_cannot_be() -> None:
    """Each says why."""
    cases: list[tuple[DataLoader[Any], str]] = [
        (DataLoader(Stream()), "iterable dataset"),
        (DataLoader(Plain(), num_workers=1, seeding="worker"), 'seeding="worker"'),
        (DataLoader(Remembers()), "a state of its own"),
        (DataLoader(Plain(), sampler=Locked()), "cannot be copied"),
    ]
    for loader, why in cases:
        with pytest.raises(ConfigurationError, match=why):
            loader.batch(0, 0)
        list(loader)
        with pytest.raises(ConfigurationError, match=why):
            loader.batch_keys(0, 0)
    loader = DataLoader(Remembers(), snapshot_every_n_steps=0)
    list(loader)
    assert loader.batch(0, 3)[0].tolist() == [3]
    with pytest.raises(IndexError, match="was not iterated over"):
        DataLoader(Plain()).batch(0, 0)
    with pytest.raises(IndexError, match="is counted from 0"):
        loader.batch_keys(0, -1)
    for _ in range(9):
        list(loader)
    with pytest.raises(IndexError, match=r"knows of epochs \[2, 3, 4, 5, 6, 7, 8, 9\]"):
        loader.batch_keys(1, 0)


class OfItsOwn(BatchSampler):
    """A subclass of torch's that draws from something of its own."""

    rng = random.Random(3)

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1]  # the first batch is always the same
        for batch in super().__iter__():
            yield self.rng.sample(batch, len(batch))


class WarmsUp(Sampler[int]):
    """Begins alike, and goes on differently in each epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        self.epochs += 1
        yield from np.random.default_rng(self.epochs).permutation(np.arange(8, LENGTH)).tolist()


def later_changed(loader: DataLoader[Any], name: str) -> None:
    """Change what an order is drawn from, between two runs."""
    sampler: Any = loader.sampler
    if name == "weights":
        sampler.weights = torch.ones(LENGTH)
    elif name == "generator":
        loader.generator = torch.Generator().manual_seed(8)
    elif name == "rows":
        random.shuffle(sampler)


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"batch_size": 8, "sampler": InPlace()}, ""),
        (lambda: {"batch_sampler": OfItsOwn(range(LENGTH), 8, False)}, ""),
        (lambda: {"batch_size": 8, "sampler": WarmsUp()}, ""),
        (lambda: {"batch_size": 8, "sampler": [*range(LENGTH)]}, "rows"),
        (lambda: {"batch_size": 8, "sampler": WeightedRandomSampler(torch.arange(LENGTH) + 1.0, 64)}, "weights"),
        (lambda: {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(1)}, "generator"),
    ],
)
def test_an_order_that_cannot_be_had_again(make: Any, change: str, num_workers: int) -> None:
    """An error, and no other batch in the place of the one that was meant."""
    loader = DataLoader(Plain(), num_workers=num_workers, **make())
    for _ in range(2):
        list(loader)
        later_changed(loader, change)
    list(loader)
    for epoch in [0] if change else range(2):
        with pytest.raises(ConfigurationError, match="does not give the same order again"):
            loader.batch_keys(epoch, 3)


def test_an_epoch_that_is_told_too_late() -> None:
    """torch's samplers look at it when the first batch is asked for: the state does not know of that."""
    loader = DataLoader(Plain(), batch_size=8, sampler=DistributedSampler(range(LENGTH), 2, 0))
    iterator = iter(loader)
    loader.set_epoch(5)
    list(iterator)
    with pytest.raises(ConfigurationError, match="does not give the same order again"):
        loader.batch(0, 2)


def test_keys_of_other_kinds_are_known_again() -> None:
    """Tensors, lists, names; what is equal only if it is the same object is taken on trust."""

    class Named:
        def __getitem__(self, key: Any) -> Any:
            return 0

    class Object:
        pass

    batches: list[Any] = [
        list(torch.randperm(8).split(4)),
        [[torch.tensor(3), torch.tensor(4)], [torch.tensor([5, 6])]],
        [["a", "b"], ["c"]],
        [[(1, "a")], [[2, 3]]],
        [[np.int64(3)], [np.array([1, 2])]],
        [[Object()], [Object()]],
    ]
    for batch_sampler in batches:
        loader = DataLoader(Named(), batch_sampler=batch_sampler)  # type: ignore[arg-type, var-annotated]
        list(loader)
        assert same(loader.batch_keys(0, 1), batch_sampler[1])


def test_numbers_of_all_kinds() -> None:
    """A number of numpy's or torch's is one, and stays what it is."""
    loader = DataLoader(Plain(), batch_size=8, num_workers=1)
    batches = [*loader]
    number = torch.tensor(3)
    for _ in range(2):
        assert same(loader.batch(np.int64(0), number), batches[3])  # type: ignore[arg-type]
    for wrong in (2.5, "3", None, True):
        with pytest.raises(ConfigurationError, match="number should be an integer"):
            loader.batch(0, wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="epoch should be an integer"):
            loader.batch_keys(wrong, 0)  # type: ignore[arg-type]


def test_what_the_batch_was_made_with() -> None:
    """Attributes that were set after its run do not count."""
    loader = DataLoader(Draws(), batch_size=8, num_workers=1)
    batches = [*loader]
    loader.collate_fn, loader.seeding = len, "sample"
    list(loader)
    assert same(loader.batch(0, 2), batches[2])
    assert loader.batch(1, 2) == 8


@pytest.mark.parametrize("kind", [Plain, Hides])
def test_batches_of_several_epochs_at_once(kind: Any) -> None:
    """Each worker is told its own epoch, and the trainer's dataset none, whoever else reads it meanwhile."""
    loader = DataLoader(kind(), batch_size=8, num_workers=1)
    all_batches = epochs(loader)

    async def train() -> None:
        numbers = [(epoch, number) for epoch in range(3) for number in range(3)]
        asked = [asyncio.ensure_future(loader.abatch(*each)) for each in numbers]
        await asyncio.sleep(0)
        batches = [batch async for batch in loader]  # of the epoch that was told last
        assert same([batch[1] for batch in batches], [batch[1] for batch in all_batches[2]])
        for (epoch, number), batch in zip(numbers, await asyncio.gather(*asked), strict=True):
            assert same(batch, all_batches[epoch][number])

    asyncio.run(train())
    with ThreadPoolExecutor(3) as executor:
        made = [*executor.map(lambda epoch: loader.batch(epoch, 1), [0, 1, 2] * 2)]
    assert same(made, [all_batches[epoch][1] for epoch in [0, 1, 2] * 2])
    assert vars(loader.dataset)["epoch" if kind is Plain else "hidden"] == 2


def test_another_thread_draws_meanwhile() -> None:
    """Nothing that it draws is drawn again, where the sampler does not draw from global generators."""
    loader = DataLoader(Plain(), batch_size=8, sampler=ElasticSampler(LENGTH), num_workers=1)
    list(loader)
    drawn, is_over = [], threading.Event()

    def draw() -> None:
        while not is_over.is_set():
            drawn.append((random.random(), float(torch.rand(()))))

    thread = threading.Thread(target=draw)
    thread.start()
    for number in range(8):
        loader.batch_keys(0, number)
        if number % 4 == 0:
            loader.batch(0, number)
    is_over.set()
    thread.join()
    pythons, torchs = zip(*drawn, strict=True)
    assert len({*pythons}) == len(pythons)
    assert len({*zip(torchs, torchs[1:], torchs[2:], strict=False)}) == len(torchs) - 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_shares_its_generator_with_the_sampler(num_workers: int) -> None:
    """It is where it was, and so is the running epoch."""
    generator = torch.Generator().manual_seed(1)

    class Shares(Plain):
        own = generator

        def __getitem__(self, index: int) -> Any:
            return index, float(torch.rand((), generator=self.own))

    loader = DataLoader(Shares(), batch_size=8, shuffle=True, generator=generator, num_workers=num_workers)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    before = generator.get_state()
    loader.batch(0, 3)
    loader.batch_keys(0, 4)
    assert torch.equal(generator.get_state(), before)


def test_after_a_break_the_dataset_may_be_told_again() -> None:
    """What the error says to do helps."""
    loader = DataLoader(Plain(), batch_size=8)
    first = epochs(loader, 1)[0]
    loader.set_epoch(1)
    iterator: Any = iter(loader)
    next(iterator)
    with pytest.raises(ConfigurationError, match=r"close\(\) the run"):
        loader.batch(0, 0)
    iterator.close()
    assert same(loader.batch(0, 0), first[0])
    for _ in loader:
        break
    assert same(loader.batch(0, 1), first[1])


def test_a_loader_that_is_reset() -> None:
    """Nothing is known of what was before."""
    loader = DataLoader(Plain(), batch_size=8)
    list(loader)
    loader.load_state_dict({})
    with pytest.raises(IndexError, match="was not iterated over"):
        loader.batch_keys(0, 0)


def test_a_subset_of_a_subset() -> None:
    """Datasets inside torch's wrappers are not copied with the samplers, and hear of the epoch."""
    dataset = Plain()
    inner = Subset(Subset(dataset, range(0, LENGTH, 2)), range(40))  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(inner, batch_size=8, shuffle=True, num_workers=1)
    batches = epochs(loader, 2)
    assert same(loader.batch(0, 2), batches[0][2])
    assert same(loader.batch(1, 2), batches[1][2])
    assert dataset.epoch == 1


def test_a_subclass_with_an_iterator_of_its_own() -> None:
    """Only the run itself counts."""

    class Endless(DataLoader[Any]):
        def __iter__(self) -> Any:
            while True:
                yield from super().__iter__()

    loader = Endless(Plain(), batch_size=8, shuffle=True, num_workers=1)
    batches = [*islice(loader, 20)]
    assert same(loader.batch(1, 4), batches[13 + 4])
