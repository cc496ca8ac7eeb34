"""The next run, begun while the last batches of this one are taken: nothing else is different."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from random import SystemRandom
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asyncloader import ConfigurationError, DataLoader, WorkerDiedError, sample_rng
from asyncloader.epochs import Told
from asyncloader.errors import LoaderClosedError
from asyncloader.run.foresight import Foresight, Guess
from asyncloader.samplers import ElasticSampler
from tests import inside
from tests.faults.test_interrupts_everywhere import CtrlC
from tests.patience import wait_until

LENGTH = 23
AHEAD: dict[str, Any] = {"persistent_workers": True, "prefetch_epochs": 1, "worker_backend": "thread"}


class Epochs(Dataset[Any]):
    """Samples that depend on the key, on their seed and on the epoch; counts in all workers which were read."""

    def __init__(self) -> None:
        self.epoch = 0
        self.reads = torch.zeros(LENGTH, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, key: int) -> Any:
        self.reads[key] += 1
        return key, self.epoch, float(sample_rng().random())

    def wait_for_reads(self, number: int) -> None:
        """Wait until so many samples were read in all."""
        wait_until(lambda: int(self.reads.sum()) >= number)


def make_loader(kind: str = "shuffle", **options: Any) -> DataLoader[Any]:
    """Return a loader with a sampler of some kind, and workers that stay; nothing depends on how far it reads ahead."""
    dataset = Epochs()
    generator = torch.Generator().manual_seed(5)
    order: dict[str, Any] = {
        "shuffle": {"shuffle": True},
        "own generator": {"shuffle": True, "generator": generator},
        "in order": {},
        "replacement": {"sampler": RandomSampler(dataset, replacement=True, num_samples=40, generator=generator)},
        "subset": {"sampler": SubsetRandomSampler(range(0, LENGTH, 2))},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH)},
        "distributed": {"sampler": DistributedSampler(dataset, num_replicas=2, rank=1)},
        "elastic": {"sampler": ElasticSampler(dataset, num_replicas=2, rank=1)},
        "batches": {"batch_sampler": BatchSampler(RandomSampler(dataset), 5, drop_last=True), "batch_size": 1},
        "unbatched": {"shuffle": True, "batch_size": None},
    }[kind]
    defaults = {"batch_size": 3, "num_workers": 2, "max_buffered_bytes": 0, **AHEAD, "prefetch_epochs": 0}
    return DataLoader(dataset, **{**defaults, **order, **options})


def plain(batch: Any) -> Any:
    return [column.tolist() if isinstance(column, torch.Tensor) else column for column in batch]


def epochs_of(loader: DataLoader[Any], count: int, between: Callable[[int], object] = lambda _: None) -> list[Any]:
    """Return what is seen of some epochs: batches, states, and what the trainer draws itself."""
    torch.manual_seed(3)
    seen: list[Any] = []
    for number in range(count):
        between(number)
        for batch in loader:
            seen.append((plain(batch), torch.rand(1).item()))
        seen.append(loader.state_dict())
    loader.close()
    return seen


KINDS = [
    "shuffle", "own generator", "in order", "replacement", "subset", "weighted", "distributed", "elastic", "batches",
    "unbatched",
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("advances", [False, True], ids=["same epoch", "set_epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_is_different(kind: str, advances: bool) -> None:
    """Batches, states and generators, whatever the sampler, and whether it is told of epochs."""
    seen = []
    for prefetch_epochs in (0, 1):
        loader = make_loader(kind, prefetch_epochs=prefetch_epochs, seeding="sample" if advances else "batch")
        seen.append(epochs_of(loader, 4, loader.set_epoch if advances else lambda _: None))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["own generator", "in order", "distributed", "elastic", "unbatched"])
@pytest.mark.parametrize("advances", [False, True], ids=["same epoch", "set_epoch"])
def test_what_was_made_ahead_is_taken(kind: str, advances: bool) -> None:
    """Where the order can be known, no sample is read twice: the first epoch shows how the epochs go on."""
    loader = make_loader(kind, prefetch_epochs=1)
    dataset: Any = loader.dataset
    taken, ahead = 0, 4 if kind == "unbatched" else 4 * 3
    for number in range(4):
        if advances:
            loader.set_epoch(number)
        taken += sum(1 if kind == "unbatched" else len(plain(batch)[0]) for batch in loader)
    dataset.wait_for_reads(taken + ahead)
    loader.close()
    # In vain is what lies ahead of the last epoch, and once what lay ahead of the first, where the guess was wrong.
    assert int(dataset.reads.sum()) <= taken + 2 * ahead


def test_the_next_epoch_is_made_while_the_last_batch_is_used() -> None:
    """Before anybody asks for it, in worker processes; and it is the one that comes."""
    loader = make_loader("own generator", prefetch_epochs=1, worker_backend="process")
    dataset: Any = loader.dataset
    iterator: Any = iter(loader)
    first = list(itertools.islice(iterator, len(loader) - 1))
    wait_until(lambda: inside.run(iterator).ended)
    first.append(next(iterator))
    dataset.wait_for_reads(LENGTH + 4 * 3)
    assert next(iterator, None) is None
    second = [plain(batch)[0] for batch in loader]
    assert sorted(itertools.chain(*second)) == list(range(LENGTH))
    assert len(first) == len(second)
    dataset.wait_for_reads(2 * LENGTH + 4 * 3)
    loader.close()
    assert int(dataset.reads.sum()) == 2 * LENGTH + 4 * 3


async def test_async_for_has_no_gap_either() -> None:
    """The next epoch begins while the last batch is held."""
    loader = make_loader("in order", prefetch_epochs=1)
    dataset: Any = loader.dataset
    for number in (1, 2):
        keys = []
        async for batch in loader:
            keys += plain(batch)[0]
        assert keys == list(range(LENGTH))
        await asyncio.to_thread(dataset.wait_for_reads, number * LENGTH + 4 * 3)
    await asyncio.to_thread(loader.close)
    assert int(dataset.reads.sum()) == 2 * LENGTH + 4 * 3


def test_an_epoch_of_fewer_batches_than_the_window() -> None:
    """All of the next one is made ahead, its end included."""
    seen = [epochs_of(make_loader("own generator", prefetch_epochs=ahead, batch_size=20), 4) for ahead in (0, 1)]
    assert seen[0] == seen[1]


def test_no_samples_at_all() -> None:
    """There is nothing to begin ahead."""
    loader = DataLoader(Epochs(), sampler=SubsetRandomSampler([]), num_workers=1, **AHEAD)
    assert [list(loader) for _ in range(3)] == [[], [], []]
    loader.close()


def change_nothing(_: DataLoader[Any]) -> None:
    pass


def draw(loader: DataLoader[Any]) -> None:
    torch.rand(1, generator=loader.generator)


def jump(loader: DataLoader[Any]) -> None:
    loader.set_epoch(7)


def other_timeout(loader: DataLoader[Any]) -> None:
    loader.timeout = 30.0


def other_sampler(loader: DataLoader[Any]) -> None:
    """Change a sampler in place, in a way that it does not tell of."""
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        sampler.seed += 1


def break_off(loader: DataLoader[Any]) -> None:
    next(iter(loader))


def resume(loader: DataLoader[Any]) -> None:
    loader.load_state_dict(loader.state_dict())


def resume_in_the_middle(loader: DataLoader[Any]) -> None:
    iterator = iter(loader)
    list(itertools.islice(iterator, 3))
    state = loader.state_dict()
    loader.close()
    loader.load_state_dict(state)


def other_workers(loader: DataLoader[Any]) -> None:
    loader.set_num_workers(3 - loader.num_workers)


CHANGES = (
    change_nothing,
    other_workers,
    draw,
    jump,
    other_timeout,
    other_sampler,
    break_off,
    resume,
    resume_in_the_middle,
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    changes=st.lists(st.sampled_from(CHANGES), min_size=2, max_size=4),
    seeding=st.sampled_from(["batch", "sample"]),
)
def test_whatever_the_trainer_does_between_epochs(
    kind: str, changes: list[Callable[[DataLoader[Any]], None]], seeding: str
) -> None:
    """What turns out to be another epoch than was foreseen is begun anew."""
    seen = []
    for prefetch_epochs in (0, 1):
        loader = make_loader(kind, prefetch_epochs=prefetch_epochs, scheduling="dynamic", seeding=seeding)
        seen.append(epochs_of(loader, len(changes) + 1, lambda number, it=loader: number and changes[number - 1](it)))
    assert seen[0] == seen[1]


class Dies(Epochs):
    """Kills its worker at a key, when this is read for the second time: ahead of the second epoch."""

    def __getitem__(self, key: int) -> Any:
        if key == 4 and self.reads[key] == 1:
            self.reads[key] += 1
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


@pytest.mark.parametrize("on_crash", ["retry", "raise", "skip"])
def test_a_worker_that_dies_at_the_next_epoch(on_crash: str) -> None:
    """What is to be said of it is said there."""
    dataset = Dies()
    options: dict[str, Any] = {**AHEAD, "worker_backend": "process", "on_crash": on_crash}
    loader = DataLoader(dataset, batch_size=3, num_workers=2, **options)
    keys = [plain(batch)[0] for batch in loader]
    assert list(itertools.chain(*keys)) == list(range(LENGTH))
    dataset.wait_for_reads(LENGTH + 5)
    iterator, second = iter(loader), []
    lost: list[Any] = [keys[1]] if on_crash == "skip" else []
    while True:
        try:
            second.append(plain(next(iterator))[0])
        except StopIteration:
            break
        except WorkerDiedError as error:
            lost = error.keys
            assert keys[1] in lost
    loader.close()
    assert second == [each for each in keys if each not in lost]
    assert (len(lost) > 0) == (on_crash != "retry")


class Fails(Epochs):
    """Raises at a key in the second epoch."""

    def __getitem__(self, key: int) -> Any:
        if key == 4 and self.reads[key] == 1:
            raise KeyError("the second time")
        return super().__getitem__(key)


def test_what_a_sample_of_the_next_epoch_raises_is_raised_there() -> None:
    """In the place of its batch; what is left out is counted in that epoch."""
    loader = DataLoader(Fails(), batch_size=3, num_workers=2, **AHEAD)
    assert len(list(loader)) == 8
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError, match="the second time"):
        next(iterator)
    assert len(list(iterator)) == 6
    loader.close()
    skipping = DataLoader(Fails(), batch_size=3, num_workers=2, on_error="skip", **AHEAD)
    assert [(len(list(skipping)), skipping.stats().bad_samples) for _ in range(3)] == [(8, ()), (8, (4,)), (8, (4,))]
    skipping.close()


@pytest.mark.parametrize("taken", [4, 8], ids=["in its middle", "after its end"])
def test_closing_drops_both_epochs(taken: int) -> None:
    """An iterator that is closed gives nothing more, of this epoch or the next."""
    loader = make_loader("in order", prefetch_epochs=1, prefetch_factor=4)
    dataset: Any = loader.dataset
    iterator = iter(loader)
    list(itertools.islice(iterator, taken))
    if taken == 8:
        assert next(iterator, None) is None
    dataset.wait_for_reads(LENGTH)
    loader.close()
    if taken < 8:
        with pytest.raises(LoaderClosedError):
            list(iterator)
    with iter(loader) as again:
        assert plain(next(again))[0] == [0, 1, 2]


def test_figures_are_those_of_the_epoch_that_is_taken() -> None:
    """stats() tells of the next one when it is iterated; its clock begins then."""
    loader = make_loader("in order", prefetch_epochs=1)
    dataset: Any = loader.dataset
    assert len(list(loader)) == 8
    dataset.wait_for_reads(LENGTH + 12)
    began = time.perf_counter()
    assert (loader.stats().epoch, loader.stats().batches) == (0, 8)
    assert len(list(loader)) == 8
    assert (loader.stats().epoch, loader.stats().batches) == (1, 8)
    assert loader.stats().elapsed_s <= time.perf_counter() - began
    loader.close()


class Own(SequentialSampler):
    """A sampler that counts who iterates over it."""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"persistent_workers": False}, "persistent_workers=True"),
        ({"seeding": "worker"}, 'seeding="batch"'),
        ({"prefetch_epochs": 2}, "should be 0 or 1"),
        ({"prefetch_epochs": True}, "should be 0 or 1"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], says: str) -> None:
    """At construction, with what to change."""
    with pytest.raises(ConfigurationError, match=says):
        DataLoader(Epochs(), num_workers=1, **{**AHEAD, **options})


def test_what_cannot_be_read_in_vain_is_refused() -> None:
    """Streams, and datasets whose state would count it."""

    class Stateful(Epochs):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ConfigurationError, match="map-style"):
        DataLoader(Stream(), num_workers=1, **AHEAD)
    with pytest.raises(ConfigurationError, match="without a state"):
        DataLoader(Stateful(), num_workers=1, **AHEAD)
    DataLoader(Stateful(), num_workers=1, snapshot_every_n_steps=0, **AHEAD)


def test_what_cannot_be_foreseen_is_told() -> None:
    """A sampler of the user's may count how often it is iterated over."""
    loader = DataLoader(Epochs(), sampler=Own(range(4)), num_workers=1, **AHEAD)
    with pytest.warns(UserWarning, match="the order of Own"):
        assert [len(list(loader)) for _ in range(2)] == [4, 4]
    loader.close()


class Echo(Dataset[Any]):
    """Gives what it is asked for, as text."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, key: Any) -> str:
        kind = getattr(key, "dtype", type(key).__name__)
        return f"{kind} {key.tolist() if hasattr(key, 'tolist') else key}"


class Odd:
    """A key of which nobody can say whether it is the same as another one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        raise TypeError("who knows")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"number {self.number}"


class Vague(Odd):
    """A key whose comparisons have no result."""

    def __eq__(self, other: object) -> Any:
        return NotImplemented if isinstance(other, int) else [self, other]

    __hash__ = None  # type: ignore[assignment]


ANY_KEYS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: list(range(6)),
    "tensors": lambda: torch.arange(12).view(6, 2),
    "tensors of one": lambda: torch.arange(6),
    "halves": lambda: torch.arange(12, dtype=torch.bfloat16).view(6, 2),
    "empty tensors": lambda: [torch.empty(0) for _ in range(6)],
    "arrays": lambda: np.arange(12).reshape(6, 2),
    "numbers of numpy": lambda: np.arange(6),
    "tuples": lambda: [(each, torch.tensor([each, each])) for each in range(6)],
    "dictionaries": lambda: [{"at": np.array([each, each])} for each in range(6)],
    "words": lambda: list("abcdef"),
    "not a number": lambda: [math.nan] * 6,
    "odd": lambda: [Odd(each) for each in range(6)],
    "vague": lambda: [Vague(each) for each in range(6)],
}


@pytest.fixture
def taken_ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note at each run that was foreseen whether it was the one that came."""
    taken: list[bool] = []
    compare = Foresight.compare

    def noting(self: Foresight, *args: Any) -> Any:
        is_there = self._foreseen is not None
        found = compare(self, *args)
        if is_there:
            taken.append(found[0] is not None)
        return found

    monkeypatch.setattr(Foresight, "compare", noting)
    return taken


def of_keys(keys: Any, prefetch_epochs: int = 1, **options: Any) -> DataLoader[Any]:
    """Return a loader that draws these, in an order that can be known ahead."""
    sampler: Any = SubsetRandomSampler(keys, torch.Generator().manual_seed(4))
    options = {**AHEAD, "prefetch_epochs": prefetch_epochs, "num_workers": 1, **options}
    return DataLoader(Echo(), sampler=sampler, generator=torch.Generator().manual_seed(5), **options)


def epoch_to_its_end(loader: DataLoader[Any]) -> list[Any]:
    """Take an epoch, its last batch when all of them are made."""
    iterator: Any = iter(loader)
    seen = list(itertools.islice(iterator, len(loader) - 1))
    wait_until(lambda: inside.run(iterator).ended)
    return seen + list(iterator)


@pytest.mark.covering(2)
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("kind", ANY_KEYS)
def test_keys_of_any_kind_are_the_same_or_not(
    kind: str, backend: str, batch_size: int | None, taken_ahead: list[bool]
) -> None:
    """By what is in them: what was made ahead is taken, and is what would have been made then."""
    seen = []
    for prefetch_epochs in (0, 1):
        loader = of_keys(ANY_KEYS[kind](), prefetch_epochs, batch_size=batch_size, worker_backend=backend)
        seen.append([epoch_to_its_end(loader) for _ in range(3)])
        loader.close()
    assert seen[0] == seen[1]
    assert taken_ahead == [True, True]


def change_tensors(sampler: Any) -> None:
    sampler.indices.add_(1)


def change_arrays(sampler: Any) -> None:
    sampler.indices[:] += 1


def change_lists(sampler: Any) -> None:
    for key in sampler.indices:
        key[0] += 1


def change_dtypes(sampler: Any) -> None:
    sampler.indices = sampler.indices.astype(np.float64)


def change_types(sampler: Any) -> None:
    sampler.indices = [float(each) for each in sampler.indices]


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize(
    ("make_keys", "change"),
    [
        (lambda: torch.arange(12).view(6, 2), change_tensors),
        (lambda: torch.arange(6), change_tensors),
        (lambda: np.arange(12).reshape(6, 2), change_arrays),
        (lambda: [[each] for each in range(6)], change_lists),
        (lambda: np.arange(12).reshape(6, 2), change_dtypes),
        (lambda: list(range(6)), change_types),
    ],
    ids=["rows", "scalars", "arrays", "lists", "dtypes", "types"],
)
def test_keys_that_are_changed_in_place(
    make_keys: Any, change: Callable[[Any], None], backend: str, taken_ahead: list[bool]
) -> None:
    """When the next epoch is being made of them already: it is made anew."""
    seen = []
    for prefetch_epochs in (0, 1):
        loader = of_keys(make_keys(), prefetch_epochs, worker_backend=backend)
        epochs = [epoch_to_its_end(loader)]
        change(loader.sampler)
        epochs += [epoch_to_its_end(loader), epoch_to_its_end(loader)]
        seen.append(epochs)
        loader.close()
    assert seen[0] == seen[1]
    assert taken_ahead == [False, True]


def test_keys_that_cannot_be_written_down() -> None:
    """Threads can be given such; nothing is begun ahead of them."""

    class Own:
        def __repr__(self) -> str:
            return "own"

    seen = []
    for prefetch_epochs in (0, 1):
        loader = of_keys([Own() for _ in range(6)], prefetch_epochs)
        seen.append([epoch_to_its_end(loader) for _ in range(3)])
        loader.close()
    assert seen[0] == seen[1]


class Grows(Epochs):
    """Has another length later on."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 20

    def __len__(self) -> int:
        return self.length


@contextlib.contextmanager
def raises_as(sampler: DistributedSampler[Any]) -> Iterator[None]:
    """Expect what the sampler raises now: in torch 2.6 without a text, later with one."""
    with pytest.raises(AssertionError) as own:
        list(sampler)
    with pytest.raises(AssertionError) as found:
        yield
    assert str(found.value) == str(own.value)


@pytest.mark.parametrize("taken", [0, 2, 4, 5, 6], ids=["first", "middle", "last", "end", "over"])
def test_what_a_sampler_raises_of_the_next_epoch_is_raised_there(taken: int) -> None:
    """And not by this one, none of whose batches is lost: the dataset became longer in it, or after it."""
    seen = []
    for prefetch_epochs in (0, 1):
        torch.manual_seed(3)
        dataset = Grows()
        sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
        options = {**AHEAD, "prefetch_epochs": prefetch_epochs}
        loader = DataLoader(dataset, 2, sampler=sampler, num_workers=1, **options)
        iterator: Any = iter(loader)
        log: list[Any] = [plain(next(iterator, [])) for _ in range(taken)]
        wait_until(lambda it=iterator, count=taken: count < 4 or inside.run(it).ended)
        dataset.length = 30
        log += map(plain, iterator)
        iterator = iter(loader)
        with raises_as(sampler):
            next(iterator)
        dataset.length = 20
        log += [plain(batch) for _ in range(2) for batch in loader]
        loader.close()
        seen.append(log)
    assert seen[0] == seen[1]
    assert len(seen[1]) == 15 + (taken == 6)


async def test_the_same_in_async_for() -> None:
    """The epoch in which it happens is whole."""
    dataset = Grows()
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = DataLoader(dataset, 2, sampler=sampler, num_workers=1, **AHEAD)
    keys = []
    async for batch in loader:
        keys += plain(batch)[0]
        dataset.length = 30
    assert len(keys) == 10
    with raises_as(sampler):
        await anext(aiter(loader))
    await asyncio.to_thread(loader.close)


class Bad:
    """Indices of which one cannot be had at times."""

    def __init__(self) -> None:
        self.is_bad = False

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> int:
        if self.is_bad and at == 3:
            raise LookupError("not now")
        return at


def test_what_a_sampler_raises_stands_in_its_place() -> None:
    """Also where the epoch could be foreseen without it: the batches before it come, and those after nothing."""
    seen = []
    for prefetch_epochs in (0, 1):
        indices = Bad()
        loader = of_keys(indices, prefetch_epochs, batch_size=1, prefetch_factor=6)
        epoch_to_its_end(loader)
        indices.is_bad = True
        iterator, log = iter(loader), []
        for _ in range(8):
            try:
                log.append(next(iterator, "the end"))
            except LookupError as error:
                log.append(str(error))
        loader.close()
        seen.append(log)
    assert seen[0] == seen[1]
    assert "not now" in seen[1]


def test_the_next_epoch_is_guessed_by_the_latest_step() -> None:
    """Whatever the steps before were."""
    guess = Guess([SequentialSampler(range(4))])
    guess.learn([Told(0), Told(0, 1)], [Told(1), Told(1, 2)])
    assert guess.next([Told(1), Told(1, 2)]) == [Told(2), Told(2, 3)]
    guess.learn([Told(1), Told(1, 2)], [Told(6), Told(6, 3)])
    assert guess.next([Told(6), Told(6, 3)]) == [Told(11), Told(11, 4)]


class Moved:
    """What an epoch's order is drawn from, to see whether it has moved.

    Args:
        loader: Whose samplers and generators are looked at.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        samplers = [loader.batch_sampler, loader.sampler]
        self._attributes = [dict(vars(each)) for each in samplers if each is not None]
        own = [generator for each in samplers if (generator := getattr(each, "generator", None)) is not None]
        self._states = [each.get_state().tolist() for each in (torch.default_generator, *own)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moved) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where it is traced")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one_in", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"])
def test_drawing_ahead_moves_nothing_wherever_it_is_interrupted(one_in: int, kind: str) -> None:
    """Neither generators nor samplers: at every bytecode, what the next epoch is drawn from is as it was."""
    loader = make_loader(kind)
    before, settings = Moved(loader), inside.options(loader)
    begun: list[Any] = []
    moment, is_interrupted = 0, True
    while is_interrupted:
        moment, is_interrupted = moment + SystemRandom().randint(1, 2 * one_in - 1), False
        try:
            with CtrlC(moment):
                Foresight(settings).foresee(settings, (), (), lambda keys, *_, **__: begun.append(keys))
        except KeyboardInterrupt:
            is_interrupted = True
        assert Moved(loader) == before
    assert moment > 20
    if isinstance(loader.sampler, (DistributedSampler, ElasticSampler)):
        loader.sampler.set_epoch(1)
    assert begun[-1] == list(itertools.islice(loader.batch_sampler or loader.sampler, len(begun[-1])))


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="CPython 3.12.1 crashes by itself where it is traced")
@pytest.mark.parametrize("face", ["for", "async for"])
@pytest.mark.parametrize("one_in", [27, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"])
def test_an_interrupt_leaves_the_next_epochs_as_they_are(one_in: int, face: str) -> None:
    """In order, and with their samples' own numbers."""

    async def take(iterator: Any) -> list[Any]:
        return [plain(batch) async for batch in iterator]

    def epochs(moment: int) -> tuple[list[Any], bool]:
        torch.manual_seed(moment)
        loader = make_loader("shuffle", prefetch_epochs=1, batch_size=8)
        seen: list[Any] = []
        is_interrupted, iterator = False, iter(loader)
        seen += [plain(next(iterator)), plain(next(iterator))]
        wait_until(lambda: inside.run(iterator).ended)  # type: ignore[attr-defined]
        taking = asyncio.new_event_loop()
        try:
            with CtrlC(moment) if moment else contextlib.nullcontext():
                seen += taking.run_until_complete(take(iterator)) if face == "async for" else map(plain, iterator)
        except KeyboardInterrupt:
            is_interrupted = True
        taking.close()
        seen = [*seen[:2], *(plain(batch) for _ in range(2) for batch in loader)]
        loader.close()
        return seen, is_interrupted

    moment, is_interrupted = 0, True
    while is_interrupted:
        moment += SystemRandom().randint(1, 2 * one_in - 1)
        torch.manual_seed(moment)
        plainly = make_loader("shuffle", batch_size=8)
        whole = [plain(batch) for _ in range(3) for batch in plainly]
        plainly.close()
        seen, is_interrupted = epochs(moment)
        assert seen == [*whole[:2], *whole[3:]], f"interrupted at moment {moment}"
