"""Copies of a dataset that are made late are of the epoch of their run, whatever the trainer has set meanwhile."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, get_worker_info

from asyncloader import DataLoader, sample_rng
from asyncloader.engine.portal import get_portal
from tests.support import inside
from tests.support.patience import wait_until
from tests.test_epochs import Hidden, Shown

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LENGTH = 40
PLAIN: dict[str, Any] = {"batch_size": 1, "num_workers": 1, "max_buffered_bytes": 0}


@pytest.fixture(autouse=True)
def by_count() -> Iterator[None]:
    """Have workers be renewed by how much they have made."""
    with inside.renewals_by_count():
        yield


class Sampled(Hidden):
    """Tells of each sample who has made it, and its random number."""

    def __init__(self) -> None:
        super().__init__(LENGTH)

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return super().__getitem__(index), sample_rng().random(), len(self.calls), os.getpid(), info.id


class ShowsIt(Shown):
    """The same, with its epoch as an attribute."""

    def __init__(self) -> None:
        super().__init__(LENGTH)

    def __getitem__(self, index: int) -> Any:
        return 100 * self.epoch + index, sample_rng().random(), len(self.calls), os.getpid(), threading.get_ident()


class InPlace(Sampled):
    """Keeps what belongs to the epoch in a list, and changes that."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0]

    def set_epoch(self, epoch: int) -> None:
        self.order[0] = epoch

    def __getitem__(self, index: int) -> Any:
        self._epoch = self.order[0]
        return super().__getitem__(index)


class Wrapped:
    """Two of them in one of torch's."""

    def __new__(cls) -> Any:
        halves: list[Any] = [Sampled(), ShowsIt()]
        for half in halves:
            half.length = LENGTH // 2
        return ConcatDataset(halves)


def bits(batches: list[Any]) -> list[Any]:
    """What must be the same, whoever made the batch."""
    return [(int(batch[0]), float(batch[1])) for batch in batches]


def take(iterator: Any, is_async: bool, then: Callable[[int], object] = lambda _: None) -> list[Any]:
    """Take all batches, by `for` or `async for`; something is done after each, which is given their number so far."""

    async def take_them() -> list[Any]:
        batches: list[Any] = []
        async for batch in iterator() if callable(iterator) else iterator:
            batches.append(batch)
            then(len(batches))
        return batches

    if is_async:
        return asyncio.run(take_them())
    batches: list[Any] = []
    for batch in iterator:
        batches.append(batch)
        then(len(batches))
    return batches


@functools.cache
def of_fixed_number(kind: Any, first: int | None, **options: Any) -> list[Any]:
    """Return the bits of two epochs of one worker that stays: of the one that is set first, if it is, and of 1."""
    torch.manual_seed(3)
    loader = DataLoader(kind(), shuffle=True, **PLAIN, **options)
    seen = []
    for epoch in (first, 1):
        if epoch is not None:
            loader.set_epoch(epoch)
        seen.append(bits(list(loader)))
    loader.close()
    return seen


def resize(loader: Any) -> None:
    loader.set_num_workers(2)
    wait_until(lambda: loader.stats().num_workers == 2)


def kill(loader: Any) -> None:
    os.kill(inside.pids(inside.newest_iterator(loader))[0], signal.SIGKILL)
    wait_until(lambda: loader.stats().faults.replacements == 1)


def nothing(_: Any) -> None:
    """Workers are renewed by themselves."""


WAYS: list[tuple[Any, dict[str, Any]]] = [
    (resize, {}),
    (kill, {}),
    (nothing, inside.renewed_after(8)),
    (resize, {"worker_backend": "thread"}),
]
KINDS: list[Any] = [(Sampled, 0), (ShowsIt, 0), (ShowsIt, None), (InPlace, 0), (Wrapped, 0)]
TAKEN = [(Sampled, 0, True, False), (Sampled, 0, False, True), (Sampled, 0, True, True)]
PICKLED: dict[str, Any] = {"multiprocessing_context": "forkserver"}


def cases() -> list[Any]:
    """Return what is disturbed and how, with its options; what is read; whether workers stay; whether by async for.

    Threads share what a dataset holds, and changes in place.
    """
    kinds = [*((*each, False, False) for each in KINDS), *TAKEN]
    found = [
        (*way, *kind) for way in WAYS for kind in kinds if kind[0] is not InPlace or "worker_backend" not in way[1]
    ]
    return [*found, (resize, PICKLED, Sampled, 0, True, False)]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("disturb", "options", "kind", "first", "persistent", "is_async"), cases())
def test_a_late_worker_is_of_the_epoch_of_its_run(
    disturb: Callable[[Any], None], options: Any, kind: Any, first: int | None, persistent: bool, is_async: bool
) -> None:
    """The trainer sets the next one in mid-run, then a worker comes: the bits are those of one worker that stays."""
    torch.manual_seed(3)
    loader: Any = DataLoader(kind(), shuffle=True, persistent_workers=persistent, **PLAIN, **options)
    renewals = 0
    if first is not None:
        loader.set_epoch(first)

    def then(number: int) -> None:
        nonlocal renewals
        if number == 4:
            loader.set_epoch(1)
            renewals = loader.stats().workers.renewals
            disturb(loader)
        elif number in (14, 26) and disturb is nothing:  # the first may have been forked before
            wait_for_renewals(loader, renewals + number // 13)

    batches = take(loader, is_async, then)
    assert len({(int(batch[3]), int(batch[4])) for batch in batches}) > 1
    seen = [bits(batches), bits(take(loader, is_async))]
    loader.close()
    assert seen == of_fixed_number(kind, first, persistent_workers=persistent)


class Stream(IterableDataset[int]):
    """Yields the same again."""

    deterministic = True

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (100 * self._epoch + index for index in range(LENGTH))


class Stateful(Stream):
    """And tells where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        begin, self.position = self.position, 0
        for self.position in range(begin + 1, LENGTH + 1):
            yield 100 * self._epoch + self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_who_reads_a_stream_on_is_of_the_epoch_of_its_run(kind: Any, persistent: bool) -> None:
    """In the place of a worker that was killed, after the next epoch was set."""
    loader: Any = DataLoader(kind(), persistent_workers=persistent, **PLAIN)
    loader.set_epoch(0)
    for epoch in range(3):
        seen = []
        for batch in loader:
            seen.append(int(batch[0]))
            if len(seen) == 4:
                loader.set_epoch(epoch + 1)
                kill(loader)
        assert seen == [100 * epoch + index for index in range(LENGTH)]
    loader.close()


def wait_for_renewals(iterator: Any, count: int) -> None:
    """Wait until so many workers have been renewed."""
    wait_until(lambda: iterator.stats().workers.renewals >= count)


@pytest.mark.parametrize("kind", [Sampled, pytest.param(ShowsIt, marks=pytest.mark.slow), InPlace])
def test_two_iterators_of_two_epochs(kind: Any) -> None:
    """At once, and the workers of both are renewed."""
    loader: Any = DataLoader(kind(), **inside.renewed_after(12), **PLAIN)
    iterators = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        iterators.append(iter(loader))
    seen: list[list[int]] = [[], []]
    for number in range(LENGTH):
        for iterator, values in zip(iterators, seen, strict=True):
            values.append(int(next(iterator)[0]))
            if number in (16, 32):
                wait_for_renewals(iterator, number // 16)
    for iterator in iterators:
        iterator.close()
    assert seen == [list(range(LENGTH)), list(range(100, 100 + LENGTH))]


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Something that the portal's thread does not pass until it is set."""
    gate = threading.Event()
    yield gate
    gate.set()


BACKENDS: list[dict[str, Any]] = [{}, {"multiprocessing_context": "forkserver"}, {"worker_backend": "thread"}]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", BACKENDS, ids=["fork", "forkserver", "thread"])
@pytest.mark.parametrize(("kind", "first"), [(Sampled, 0), (ShowsIt, 0), (ShowsIt, None), (InPlace, 0), (Wrapped, 0)])
def test_set_epoch_after_aiter(kind: Any, first: int | None, options: Any, held: threading.Event) -> None:
    """Before any copy is made: it is for the next run."""
    if kind is InPlace and options.get("worker_backend"):
        pytest.skip("threads share what the dataset holds")
    loader: Any = DataLoader(kind(), **{**PLAIN, "num_workers": 2}, **options)
    if first is not None:
        loader.set_epoch(first)

    async def begin() -> Any:
        get_portal().post(held.wait)
        iterator = aiter(loader)
        loader.set_epoch(1)
        held.set()
        return [int(batch[0]) async for batch in iterator]

    wanted = [index if kind is not Wrapped else index % (LENGTH // 2) for index in range(LENGTH)]
    assert asyncio.run(begin()) == wanted
    assert [int(batch[0]) for batch in loader] == [100 + index for index in wanted]


class CopiedLate(Sampled):
    """Its copies on threads are not made before the gate is open."""

    gate: threading.Event

    def __copy__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.gate.wait()
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied


@pytest.mark.parametrize("first", [0, None])
def test_set_epoch_after_iter_with_threads(first: int | None, held: threading.Event) -> None:
    """Each has its copy after that: it is for the next run."""
    dataset: Any = CopiedLate()
    dataset.gate = held
    loader = DataLoader(dataset, worker_backend="thread", **PLAIN)
    if first is not None:
        loader.set_epoch(first)
    iterator = iter(loader)
    loader.set_epoch(1)
    held.set()
    assert [int(batch[0]) for batch in iterator] == list(range(LENGTH))
    assert [int(batch[0]) for batch in loader] == list(range(100, 100 + LENGTH))


class ForkedMeanwhile(Sampled):
    """Is copied while the trainer tells it of an epoch."""

    loader: Any

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if epoch == 1 and get_worker_info() is None:
            resize(self.loader)


def test_a_copy_that_is_made_while_the_trainer_sets_an_epoch() -> None:
    """Nobody knows what it has heard: it is told."""
    dataset: Any = ForkedMeanwhile()
    dataset.loader = loader = DataLoader(dataset, **PLAIN)
    loader.set_epoch(0)
    iterator = iter(loader)
    values = [int(next(iterator)[0]) for _ in range(4)]
    loader.set_epoch(1)
    batches = list(iterator)
    assert values + [int(batch[0]) for batch in batches] == list(range(LENGTH))
    assert {int(batch[4]) for batch in batches} == {0, 1}
    del dataset.loader


def test_a_run_that_begins_while_workers_are_started(start_method: str) -> None:
    """They are of the new one."""
    loader: Any = DataLoader(Sampled(), persistent_workers=True, multiprocessing_context=start_method, **PLAIN)

    async def begin_twice() -> list[int]:
        loader.set_epoch(0)
        aiter(loader)
        loader.set_epoch(1)
        return [int(batch[0]) async for batch in loader]

    assert asyncio.run(begin_twice()) == list(range(100, 100 + LENGTH))
    loader.close()
