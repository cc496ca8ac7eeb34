"""Keys that become known as time goes by: what is there is made and given, and nobody waits for what is not."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Sampler

from asyncloader import BatchTimeoutError, ConfigurationError, DataLoader
from asyncloader.engine.progress import Progress
from asyncloader.messages.snapshot import Pace
from asyncloader.protocols import SuppliesKeys
from asyncloader.run.plan import Plan
from tests.engine.test_run import Driver
from tests.support.patience import patiently, wait_until

END: Any = object()


class Line(Sampler[int]):
    """A sampler with one iterator: `put` has keys come, or the end."""

    keys_arrive = True

    def __init__(self) -> None:
        self.keys: deque[Any] = deque()
        self.changed = threading.Condition()
        self.told: list[tuple[int, Callable[[], object]]] = []
        self.is_over = False

    def put(self, *keys: Any) -> None:
        """Have these come."""
        with self.changed:
            self.keys.extend(keys)
            self.is_over = END in keys
            self.changed.notify_all()
            told = [tell for count, tell in self.told if self._has(count)]
            self.told = [(count, tell) for count, tell in self.told if not self._has(count)]
        for tell in told:
            tell()

    def _has(self, count: int) -> bool:
        return self.is_over or len(self.keys) >= count

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self.changed:
            assert self.changed.wait_for(lambda: self.keys, 20)
            if self.keys[0] is END:
                raise StopIteration
            key: int = self.keys.popleft()
            return key

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Return whether so many are there; otherwise tell."""
        with self.changed:
            if not self._has(count):
                self.told.append((count, tell))
            return self._has(count)


class Fed(SuppliesKeys[int]):
    """Squares of what is put into its line."""

    made: list[int] = []  # noqa: RUF012 - by copies of the dataset, in threads

    def __init__(self) -> None:
        self.line: Any = Line()
        self.made.clear()

    def make_sampler(self) -> Any:
        """Return the line."""
        return self.line

    def __getitem__(self, key: int) -> int:
        self.made.append(key)
        return key**2

    def __reduce__(self) -> Any:
        return object.__new__, (Fed,)


WORKERS = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2, "worker_backend": "thread"}, id="threads"),
    pytest.param({"num_workers": 2}, id="processes"),
]


@pytest.mark.parametrize("options", WORKERS)
def test_what_is_there_is_given(options: dict[str, Any]) -> None:
    """The window is larger than what has come: the rest is not waited for."""
    dataset = Fed()
    dataset.line.put(*range(4))
    iterator = iter(DataLoader(dataset, 2, **options))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [4, 9]]
    threading.Timer(0.05, dataset.line.put, (5, 6, 7)).start()
    assert next(iterator).tolist() == [25, 36]
    dataset.line.put(END)
    assert [batch.tolist() for batch in iterator] == [[49]]
    assert not dataset.line.told


@pytest.mark.parametrize("options", WORKERS)
async def test_the_callers_loop_does_not_wait(options: dict[str, Any]) -> None:
    """A task that waits for keys is woken by them; others go on meanwhile."""
    dataset = Fed()
    iterator = aiter(DataLoader(dataset, 2, **options))
    tasks = {asyncio.ensure_future(anext(iterator)) for _ in range(2)}
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in tasks)
    dataset.line.put(1, 2, 3)
    (first,), (second,) = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert (await first).tolist() == [1, 4]
    dataset.line.put(END)
    assert (await asyncio.wait_for(second, 20)).tolist() == [9]
    assert [batch async for batch in iterator] == []


def test_workers_get_what_comes_while_the_trainer_computes() -> None:
    """Nobody takes a batch, and keys go on to workers as far as the window."""
    dataset = Fed()
    dataset.line.put(0, 1)
    iterator = iter(DataLoader(dataset, 2, num_workers=1, worker_backend="thread", max_buffered_bytes=0))
    assert next(iterator).tolist() == [0, 1]
    dataset.line.put(*range(2, 20), END)
    wait_until(lambda: len(dataset.made) == 6)  # two batches beyond the one that was taken
    assert torch.cat(list(iterator)).tolist() == [key**2 for key in range(2, 20)]


@pytest.mark.parametrize("options", WORKERS)
def test_a_silence_is_named(options: dict[str, Any]) -> None:
    """With a time limit; the next call goes on."""
    dataset = Fed()
    iterator = iter(DataLoader(dataset, 2, timeout=0.3, **options))
    with pytest.raises(BatchTimeoutError, match="its keys have not arrived"):
        next(iterator)
    dataset.line.put(1, 2, END)
    assert [batch.tolist() for batch in patiently(iterator)] == [[1, 4]]


def test_the_dataset_brings_the_order() -> None:
    """A sampler that is given is used in its place; a shuffle is nothing that the loader could do."""
    dataset = Fed()
    assert DataLoader(dataset).sampler is dataset.line
    assert DataLoader(dataset, sampler=[3]).sampler == [3]
    assert torch.cat(list(DataLoader(dataset, sampler=[3]))).tolist() == [9]
    with pytest.raises(ConfigurationError, match="Fed brings its own order"):
        DataLoader(dataset, shuffle=True)


def test_nobody_keeps_an_iterator_that_was_dropped() -> None:
    """What is told later reaches nobody."""
    dataset = Fed()
    iterator = iter(DataLoader(dataset, 2, num_workers=1, worker_backend="thread"))
    assert dataset.line.told
    del iterator
    dataset.line.put(1, 2)
    assert dataset.made == []


@given(st.integers(0, 9), st.integers(1, 3), st.lists(st.integers(0, 5), max_size=80))
def test_every_batch_comes_once_and_in_order(count: int, size: int, choices: list[int]) -> None:
    """However keys come, and the consumer, the loop and the workers take turns; nobody reads what is not there."""
    line, seen, coming = Line(), [], deque([*range(count), END])
    driver = Driver(Plan(line, iter(line), Progress(), Pace(), is_batched=False))
    run = driver.run
    run.read_first(driver.wake)
    for choice in chain(choices, cycle(range(4))):
        if choice == 0:
            driver.turn()
        elif choice == 1 and (item := driver.take()) is not None:
            seen.append(item.outcome.data)
        elif choice == 2 and run.has_news():
            try:
                run.read_on()
            except StopIteration:
                break
        elif choice == 3 and coming:
            line.put(*(coming.popleft() for _ in range(min(size, len(coming)))))
        if driver.sent and (choice > 3 or (choice == 3 and not coming)):
            driver.answer(min(driver.sent))
    assert seen == [*range(count)]
    assert run.all_taken


class Hasty(Line):
    """Keys come in the moment in which somebody asks for them, who is told inside the question."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.coming = deque([*range(count), END])

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Return whether so many were there; they are now."""
        if super().arrived(count, tell):
            return True
        self.put(*(self.coming.popleft() for _ in range(min(count, len(self.coming)))))
        return False


@pytest.mark.parametrize("options", WORKERS)
async def test_it_may_be_told_while_it_asks(options: dict[str, Any]) -> None:
    """Nobody takes the keys for missing afterwards."""
    dataset = Fed()
    dataset.line = Hasty(40)
    batches = [batch.tolist() async for batch in DataLoader(dataset, 2, timeout=5 if options else 0, **options)]
    assert batches == [[first**2, (first + 1) ** 2] for first in range(0, 40, 2)]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_sampler_that_cannot_begin_is_one_error(batch_size: Any, options: dict[str, Any]) -> None:
    """Then the epoch is over, as with torch."""

    class Broken(Line):
        def arrived(self, count: int, tell: Callable[[], object]) -> bool:
            raise OSError("no source")

        def __next__(self) -> int:
            raise OSError("no source")

    dataset = Fed()
    dataset.line = Broken()
    iterator = iter(DataLoader(dataset, batch_size, **options))
    with pytest.raises(OSError, match="no source"):
        next(iterator)
    assert list(iterator) == []


def test_a_run_that_was_left_takes_no_keys() -> None:
    """They belong to the one that begins."""
    line = Line()
    driver = Driver(Plan(line, iter(line), Progress(), Pace(), is_batched=False))
    driver.run.read_first(driver.wake)
    driver.run.leave()
    line.put(1, 2)
    driver.turn()
    assert driver.planned == []
    assert list(line.keys) == [1, 2]


def test_an_interrupt_in_who_brings_keys_wakes_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has news, and would sleep on."""
    line, woken = Line(), []
    driver = Driver(Plan(line, iter(line), Progress(), Pace(), is_batched=False))
    driver.run.read_first(driver.wake)
    monkeypatch.setattr(driver.run.handoff, "wake", lambda: woken.append(True))

    def interrupt(line: Line) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Line, "__next__", interrupt)
        line.put(1)
    assert woken
    assert driver.run.has_news()


class Follows(Line):
    """A sampler of batches whose iterator follows consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_at: list[int] = []

    def follow(self, given: Callable[[], int]) -> None:
        """Take what counts the batches that were given."""
        self.given = given

    def asked(self) -> None:
        """Note how many were."""
        if self.given() not in self.asked_at:
            self.asked_at.append(self.given())


class BringsBatches(Fed):
    """Squares, in batches that the dataset makes."""

    def __init__(self) -> None:
        self.line = Follows()
        self.made.clear()

    def make_batch_sampler(self) -> Any:
        """Return the line."""
        return self.line


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_sampler_that_follows_consumers(is_async: bool, options: dict[str, Any]) -> None:
    """It is told how many of its batches were given when a consumer asks for the next one, however far it is read."""
    dataset = BringsBatches()
    dataset.line.put([1, 2], [3], [4, 5, 6], END)
    loader = DataLoader(dataset, **options)
    assert loader.batch_sampler is dataset.line
    seen = []
    if is_async:
        async for batch in loader:
            seen.append(batch.tolist())
            assert dataset.line.given() == len(seen)
            assert dataset.line.asked_at == [*range(len(seen))]
    else:
        for batch in loader:
            seen.append(batch.tolist())
            assert dataset.line.given() == len(seen)
            assert dataset.line.asked_at == [*range(len(seen))]
    assert seen == [[1, 4], [9], [16, 25, 36]]
    assert dataset.line.asked_at == [0, 1, 2, 3]
