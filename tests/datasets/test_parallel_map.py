"""A stream that is read once and worked on by all: what comes, in which order, from any place, on any workers."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from asyncloader import ConfigurationError, DataLoader, StateMismatchError, threads
from asyncloader.datasets import ParallelMap
from asyncloader.datasets.stream_keys import Items, StreamKeys, size_of
from tests.support import inside
from tests.support.patience import wait_until

COUNT = 23


def numbers() -> Iterator[int]:
    """A stream without a state."""
    yield from range(COUNT)


async def slow_numbers() -> AsyncIterator[int]:
    """The same, awaited."""
    for number in range(COUNT):
        await asyncio.sleep(0)
        yield number


def square(number: int) -> int:
    """Make a sample."""
    return number**2


async def slow_square(number: int) -> int:
    """Make a sample, awaited."""
    await asyncio.sleep(0.001)
    return number**2


class Counting(IterableDataset[int]):
    """A stream whose iterator tells where it is; how much was read of it, and the epochs that it was told."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        self.read = 0
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Counter:
        return Counter(self)

    def set_epoch(self, epoch: int) -> None:
        """Note it."""
        self.epochs.append(epoch)


class Counter:
    """Its iterator."""

    def __init__(self, stream: Counting) -> None:
        self.stream = stream
        self.at = 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        if self.at == self.stream.count:
            raise StopIteration
        self.stream.read += 1
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def readers() -> list[threading.Thread]:
    """The threads that read streams."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncloader stream")]


def batches(loader: Any) -> list[list[int]]:
    """What comes of an epoch."""
    return [batch.tolist() for batch in loader]


PLACES = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2, "worker_backend": "thread"}, id="threads"),
    pytest.param({"num_workers": 2}, id="processes"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent"),
    pytest.param({"num_workers": 2, "scheduling": "dynamic"}, id="dynamic"),
]
WANTED = [[number**2 for number in range(first, min(first + 4, COUNT))] for first in range(0, COUNT, 4)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", PLACES)
@pytest.mark.parametrize("stream", [numbers, range(COUNT), Counting(), slow_numbers])
def test_each_item_comes_once_and_in_order(stream: Any, options: dict[str, Any]) -> None:
    """Epoch after epoch, on any workers; and from the middle of one, in a loader of any workers."""
    loader = DataLoader(ParallelMap(stream, square), 4, **options)
    assert [batches(loader) for _ in range(2)] == [WANTED] * 2
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    del iterator
    loader.close()
    other = DataLoader(ParallelMap(stream, square), 4, num_workers=1, worker_backend="thread")
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert [batches(other) for _ in range(2)] == [WANTED[2:], WANTED]
    wait_until(lambda: not readers())


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", PLACES[::2])
@pytest.mark.parametrize("fn", [square, slow_square])
async def test_with_async_for(fn: Any, options: dict[str, Any]) -> None:
    """Samples may be awaited, too."""
    loader = DataLoader(ParallelMap(slow_numbers, fn), 4, **options)
    assert [batch.tolist() async for batch in loader] == WANTED


def test_with_the_loader_of_torch() -> None:
    """Given its sampler by hand."""
    dataset = ParallelMap(numbers, square)
    assert batches(TorchLoader(dataset, 4, sampler=dataset.make_sampler(), num_workers=2)) == WANTED


def test_a_stream_with_a_state_is_not_read_again() -> None:
    """Its state of before is loaded, and what came since is left out."""
    stream = Counting(1000)
    loader = DataLoader(ParallelMap(stream, square), 10)
    iterator = iter(loader)
    for _ in range(90):
        next(iterator)
    state = loader.state_dict()
    del iterator
    again = Counting(1000)
    other = DataLoader(ParallelMap(again, square), 10)
    other.load_state_dict(state)
    assert batches(other) == [[number**2 for number in range(first, first + 10)] for first in range(900, 1000, 10)]
    assert again.read < 1000
    assert batches(other)[0] == [number**2 for number in range(10)]


def test_the_state_after_any_number_of_items() -> None:
    """Also after fewer than were read ahead, whose states of the stream have gone meanwhile."""
    sampler = ParallelMap(Counting(1000), square).make_sampler()
    keys = iter(sampler)
    for _ in range(900):
        next(keys)
    for taken in (0, 1, 500, 899, 900):
        other = ParallelMap(Counting(1000), square).make_sampler()
        other.load_state_dict(pickle.loads(pickle.dumps(sampler.state_after(taken))))
        assert next(iter(other)) == (taken, taken)
    assert sampler.state_dict()["number"] == 900


@pytest.mark.parametrize("has_started", [True, False])
@pytest.mark.parametrize("make", [lambda: numbers, lambda: range(COUNT), lambda: iter(range(COUNT))])
def test_a_start_that_is_interrupted_may_come_again(
    make: Any, has_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the thread is there, or after: one thread reads, and each item comes once."""
    keys, start = iter(ParallelMap(make(), square, max_items=3).make_sampler()), threads.start

    def interrupted(*args: Any) -> Any:
        monkeypatch.undo()
        if has_started:
            start(*args)
            wait_until(lambda: inside.waiting(keys) == 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(keys)
    assert [number for number, _ in keys] == list(range(COUNT))


def test_a_function_that_has_no_stream_is_an_error() -> None:
    """And no end."""

    def none() -> Any:
        return next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(ParallelMap(none, square), 2))


@given(
    count=st.integers(0, 40),
    before=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    steps=st.integers(0, 6),
    epoch=st.integers(0, 2),
    has_state=st.booleans(),
)
def test_ranks_share_a_stream_and_others_go_on(
    count: int, before: tuple[int, int], after: tuple[int, int], steps: int, epoch: int, has_state: bool
) -> None:
    """Any number of ranks, with batches of any size, gives what is left, each item once."""
    stream = Counting(count) if has_state else range(count)

    def loaders(ranks: int, batch_size: int) -> list[DataLoader[int]]:
        made = []
        for rank in range(ranks):
            place: dict[str, Any] = {"shard": "rank", "num_replicas": ranks, "rank": rank}
            made.append(DataLoader(ParallelMap(stream, square, **place), batch_size))
            made[-1].set_epoch(epoch)
        return made

    first = loaders(*before)
    steps = min(steps, count // (before[0] * before[1]))
    iterators = [iter(loader) for loader in first]
    seen = [next(iterator).tolist() for iterator in iterators for _ in range(steps)]
    state = first[0].state_dict()
    del iterators
    for loader in loaders(*after):
        loader.load_state_dict(state)
        seen += batches(loader)
    assert sorted(chain.from_iterable(seen)) == [number**2 for number in range(count)]


def test_the_stream_is_told_the_epoch() -> None:
    """Before it is iterated over; not where nobody says one."""
    stream = Counting()
    loader = DataLoader(ParallelMap(stream, square), 4)
    batches(loader)
    assert stream.epochs == []
    for epoch in (3, 4):
        loader.set_epoch(epoch)
        batches(loader)
    assert stream.epochs == [3, 4]


def broken() -> Iterator[int]:
    """A stream that ends by an exception."""
    yield from (1, 2, 3)
    raise ValueError("no more")


class Unpicklable(Exception):
    """An error that does not come through a pickle."""

    def __init__(self) -> None:
        super().__init__("a lock")
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An error that refuses notes, and to be told of its traceback."""

    number: int


class Speechless(Exception):
    """An error without a text, that does not come through a pickle."""

    def __str__(self) -> str:
        raise KeyError

    def __reduce__(self) -> Any:
        raise KeyError


@pytest.mark.covering(1)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("options", PLACES[::2])
def test_an_error_of_the_stream_comes_in_place_of_its_item(options: dict[str, Any], on_error: Any) -> None:
    """With the frames of the stream. It is the end, also under "skip": nobody knows what would have come."""
    loader = DataLoader(ParallelMap(broken, square), 2, on_error=on_error, **options)
    iterator = iter(loader)
    assert next(iterator).tolist() == [1, 4]
    state = loader.state_dict()
    with pytest.raises(ValueError, match="no more") as caught:
        list(iterator)
    assert "in place of item 3" in "".join(caught.value.__notes__)
    assert "broken" in [entry.name for entry in caught.traceback]
    assert list(iterator) == []
    other = DataLoader(ParallelMap(numbers, square), 2)
    other.load_state_dict(state)
    assert batches(other)[0] == [4, 9]


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (Unpicklable, Unpicklable, "a lock"),
        (lambda: Frozen(3), RuntimeError, "Frozen"),
        (Speechless, Speechless, None),
        (lambda: SystemExit(3), RuntimeError, "SystemExit: 3"),
        (KeyboardInterrupt, RuntimeError, "KeyboardInterrupt"),
        (StopAsyncIteration, RuntimeError, "StopAsyncIteration"),
    ],
)
@pytest.mark.covering(1)
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("options", PLACES[::2][:2])
def test_an_error_that_refuses_everything_is_told(
    error: Any, kind: type[Exception], match: str | None, begins: bool, options: dict[str, Any]
) -> None:
    """At the beginning of the stream, and in the middle. Nobody waits for ever, and no worker ends."""

    class Raising:
        def __iter__(self) -> Iterator[int]:
            if begins:
                raise error()
            return chain([2], iter(self.fail, None))

        def fail(self) -> int:
            raise error()

    iterator = iter(DataLoader(ParallelMap(Raising(), square), 1, **options))
    if not begins:
        assert next(iterator).tolist() == [4]
    with pytest.raises(kind) as caught:
        next(iterator)
    if match is not None:
        assert match in str(caught.value)
    if kind is RuntimeError:
        assert f"in place of item {int(not begins)}" in str(caught.value)
    del iterator, caught
    wait_until(lambda: not readers())
    with pytest.raises(TypeError, match="not iterable"):
        list(DataLoader(ParallelMap(lambda: 3, square), 2, **options))


class Gone:
    """A stream whose connection is lost."""

    count = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count > 5:
            raise ConnectionError("lost")
        return self.count


class AsyncGone:
    """The same for `async for`."""

    def __init__(self) -> None:
        self.gone = Gone()

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> int:
        return next(self.gone)


@pytest.mark.parametrize("kind", [Gone, AsyncGone])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_goes_on_raising_ends_each_epoch(kind: Any, num_workers: int) -> None:
    """Under "skip" as well, and not in silence; the batches before it were given."""
    loader = DataLoader(ParallelMap(kind(), abs), 2, num_workers=num_workers, on_error="skip")
    for wanted in ([1, 2, 3, 4], [], []):
        found: list[int] = []
        with pytest.raises(ConnectionError, match="lost"):
            for batch in loader:
                found += batch.tolist()
        assert found == wanted


def test_nothing_but_our_loader_takes_a_stream_by_number() -> None:
    """And the error says so, wherever a dataset of numbered samples would have been taken."""
    stream: Any = ParallelMap(range(6), abs)
    for use in (
        lambda: list(DataLoader(torch.utils.data.Subset(stream, [0, 1]), 2)),
        lambda: list(DataLoader(torch.utils.data.ConcatDataset([stream]), 2)),
        lambda: list(DataLoader(stream, 2, sampler=[0, 1])),
        lambda: list(torch.utils.data.DataLoader(stream, 2)),
        lambda: list(DataLoader(torch.utils.data.random_split(stream, [3, 3])[0], 2)),
    ):
        with pytest.raises(TypeError, match=r"give it to asyncloader.DataLoader as it is, without a sampler"):
            use()


@pytest.mark.parametrize(
    "stream", [lambda: numbers(), lambda: slow_numbers(), lambda: map(int, range(COUNT)), lambda: iter([*range(COUNT)])]
)
def test_an_iterator_is_read_once(stream: Any) -> None:
    """The second epoch would be empty."""
    loader = DataLoader(ParallelMap(stream(), square), 4)
    assert batches(loader) == WANTED
    with pytest.raises(ConfigurationError, match="give ParallelMap the function"):
        batches(loader)


class Slow:
    """A stream with one position, which a step leaves a while after it has begun."""

    at = 0

    def __iter__(self) -> Slow:
        self.at = 0
        return self

    def __next__(self) -> int:
        threading.Event().wait(0.003)
        if self.at == COUNT:
            raise StopIteration
        self.at += 1
        return self.at - 1


@pytest.mark.parametrize("options", PLACES[:4])
def test_an_epoch_that_is_left_takes_nothing_of_the_next(options: dict[str, Any]) -> None:
    """Though its thread is in the stream: the next one waits for it to come back."""
    loader = DataLoader(ParallelMap(Slow(), square), 4, **options)
    for _ in range(3):
        for _batch in loader:
            break
        assert batches(loader) == WANTED


def test_iterators_over_one_stream_do_not_wait_for_each_other() -> None:
    """Both are taken from."""
    loader = DataLoader(ParallelMap(range(COUNT), square, max_items=1), 4)
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [(batch, batch) for batch in WANTED]


class Stateless(Counting):
    """A stream that cannot provide its state after all."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_that_cannot_be_taken_costs_no_item(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and the stream is read again."""
    loader = DataLoader(ParallelMap(Stateless(), square), 4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    assert caplog.text.count("could not be taken") == 1
    other = DataLoader(ParallelMap(Stateless(), square), 4)
    other.load_state_dict(state)
    assert batches(other) == WANTED[1:]


class Keeping(IterableDataset[int]):
    """A stream that begins from a state that it has loaded time and again, as those of Hugging Face's `datasets`."""

    def __init__(self) -> None:
        self._starting_state_dict: Any = None
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self._starting_state_dict["at"] if self._starting_state_dict else 0, COUNT):
            self.at = number + 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self._starting_state_dict = state


@pytest.mark.covering(1)
@pytest.mark.parametrize("wrap", [lambda stream: stream, lambda stream: ParallelMap(stream, int)])
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "persistent_workers": True}, {"num_workers": 1, "worker_backend": "thread"}]
)
def test_a_stream_that_keeps_its_state_begins_at_its_beginning(wrap: Any, options: dict[str, Any]) -> None:
    """In the epochs after the one that was resumed. A state that the user has loaded stays."""
    whole = [[*range(at, min(at + 4, COUNT))] for at in range(0, COUNT, 4)]
    for steps in (0, 2, 6):
        loader = DataLoader(wrap(Keeping()), 4, **options)
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        state = loader.state_dict()
        del iterator
        other = DataLoader(wrap(Keeping()), 4, **options)
        other.load_state_dict(state)
        assert [batches(other) for _ in range(3)] == [whole[steps:], whole, whole]
        for each in (loader, other):
            each.close()
    stream = Keeping()
    stream.load_state_dict({"at": 20})
    assert batches(DataLoader(wrap(stream), 4)) == [[20, 21, 22]]


def test_sizes_are_those_of_what_is_within() -> None:
    """Of containers and of attributes, also of objects that answer to any name in their own way."""

    @dataclasses.dataclass
    class Sample:
        image: bytes
        boxes: Any

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    large = bytes(10_000)
    for thing in (large, [large], {"a": large}, {large}, Sample(large, None), Sample(b"", deque([large]))):
        assert 10_000 <= size_of(thing) < 11_000
    assert size_of(Odd()) < 1_000


def test_so_much_is_read_ahead_and_no_more() -> None:
    """In items, and in bytes; a batch in any case."""

    def read_of(batch_size: int, **bounds: int) -> int:
        stream = Counting(10_000)
        iterator = iter(DataLoader(ParallelMap(stream, square, **bounds), batch_size))
        next(iterator)
        wait_until(lambda: before_and_now(stream)[0] == before_and_now(stream)[1])
        return stream.read

    def before_and_now(stream: Counting) -> tuple[int, int]:
        before = stream.read
        threading.Event().wait(0.05)
        return before, stream.read

    assert 10 <= read_of(10, max_items=30) <= 50
    assert 10 <= read_of(10, max_items=1) <= 25
    assert 10 <= read_of(10, max_bytes=28 * 40) <= 60


@given(
    sizes=st.lists(st.integers(0, 2_000), max_size=60),
    max_items=st.integers(1, 10),
    max_bytes=st.integers(1, 5_000),
    batch_size=st.integers(1, 12),
    ranks=st.integers(1, 3),
)
def test_all_comes_whatever_the_bounds(
    sizes: list[int], max_items: int, max_bytes: int, batch_size: int, ranks: int
) -> None:
    """Small items and large ones, batches that the bounds have no room for, every n-th item."""
    bounds: dict[str, Any] = {"max_items": max_items, "max_bytes": max_bytes}
    place: dict[str, Any] = {"shard": "rank", "num_replicas": ranks, "rank": ranks - 1}
    dataset = ParallelMap([*map(bytes, sizes)], len, **bounds, **place)
    assert list(chain.from_iterable(batches(DataLoader(dataset, batch_size)))) == sizes[ranks - 1 :: ranks]


def test_it_is_read_on_before_all_is_taken() -> None:
    """When half of what the bounds allow is left."""
    stream = Counting(10_000)
    iterator = iter(DataLoader(ParallelMap(stream, square, max_items=30), 10))
    for taken in range(10, 300, 10):
        next(iterator)
        wait_until(lambda least=taken + 10: stream.read >= least)  # type: ignore[misc]


def test_what_was_taken_is_not_counted_on() -> None:
    """Though the taker is faster than the stream, so that the thread never waits."""
    items = Items(max_items=10, max_bytes=1_000_000)
    keys = StreamKeys(items, lambda: None)
    for number in range(1_000):
        assert not items.must_wait()
        items.put((number, bytes(1_000)))
        assert next(keys) == (number, bytes(1_000))
    assert len(inside.sizes(items)) <= 10


def test_an_error_after_the_last_item_is_raised_behind_it() -> None:
    """The stream is closed before its end is told."""

    class Closing(Opened):
        async def __aexit__(self, *exc_info: object) -> None:
            raise ValueError("closed badly")

    loader = DataLoader(ParallelMap(Closing(), square), 1)
    for _ in range(2):
        found = []
        with pytest.raises(ValueError, match="closed badly"):
            for batch in loader:
                found += batch.tolist()
        assert found == [*chain.from_iterable(WANTED)]
    wait_until(lambda: not readers())


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [numbers, slow_numbers])
@pytest.mark.parametrize("options", PLACES[:3])
def test_nothing_is_left_of_an_iterator_that_is_dropped(
    options: dict[str, Any], stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no garbage is collected."""
    monkeypatch.setattr(f"{__name__}.COUNT", 10_000)  # workers that run ahead do not come to the end of the stream
    gc.collect()
    gc.disable()
    try:
        iterator = iter(DataLoader(ParallelMap(stream, square, max_items=1), 2, **options))
        next(iterator)
        assert readers()
        del iterator
        wait_until(lambda: not readers())
    finally:
        gc.enable()


def test_a_stream_that_waits_for_ever_is_left() -> None:
    """An async one is cancelled, and runs its cleanup."""
    cleaned = threading.Event()

    async def endless() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    iterator = iter(DataLoader(ParallelMap(endless, square), 2))
    assert next(iterator).tolist() == [1, 4]
    del iterator
    assert cleaned.wait(20)
    wait_until(lambda: not readers())


def test_a_worker_that_dies_costs_no_item(tmp_path: Any) -> None:
    """Its items are with the tickets, which go to another."""

    def deadly(number: int) -> int:
        if number == 9 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number**2

    loader = DataLoader(ParallelMap(numbers, deadly), 4, num_workers=2)
    assert batches(loader) == WANTED
    assert loader.stats().faults.retries


class Opened:
    """An async stream that is opened and closed, and whose samples are awaited."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def __aenter__(self) -> Opened:
        self.told.append("opened")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.told.append("closed")

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in range(COUNT):
            yield asyncio.sleep(0, number)


def test_a_stream_that_is_a_resource_is_opened() -> None:
    """In each epoch, on the loop that it is read on."""
    stream = Opened()
    loader = DataLoader(ParallelMap(stream, square), 4)
    assert [batches(loader) for _ in range(2)] == [WANTED] * 2
    wait_until(lambda: not readers())
    assert stream.told == ["opened", "closed"] * 2


def reciprocal(number: int) -> float:
    return 1 / number


def test_a_bad_sample_is_named_by_the_number_of_its_item() -> None:
    """The sample of the second item, 0, cannot be made."""
    loader = DataLoader(ParallelMap([7, 0, 9], reciprocal), 1, on_error="skip")
    assert len(list(loader)) == 2
    assert list(loader.stats().faults.bad_samples) == [1]


def test_a_copy_that_is_made_while_the_stream_is_read_does_not_read_it() -> None:
    """Workers of a later run are given one."""
    dataset = ParallelMap(range(100), square, max_items=2)
    iterator = iter(DataLoader(dataset, 1))
    next(iterator)
    assert pickle.loads(pickle.dumps(dataset))[5, 5] == 25
    iterator.close()


def test_what_cannot_work_is_refused() -> None:
    """At construction, with what to do; a state of another order as well."""
    for options in ({"max_items": 0}, {"max_bytes": True}, {"shard": "all"}, {"rank": 1}):
        with pytest.raises(ConfigurationError):
            ParallelMap(range(3), square, **options)  # type: ignore[arg-type]
    for stream, fn in ((3, square), (range(3), 3)):
        with pytest.raises(ConfigurationError):
            ParallelMap(stream, fn)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has no stream"):
        pickle.loads(pickle.dumps(ParallelMap(range(3), square))).make_sampler()
    state = DataLoader(ParallelMap(range(3), square), 2).state_dict()
    with pytest.raises(StateMismatchError, match="shard"):
        DataLoader(ParallelMap(range(3), square, shard="rank"), 2).load_state_dict(state)


def test_bounds_are_integers_of_any_kind() -> None:
    """numpy's and torch's too."""
    for kind in (np.int64, torch.tensor):
        dataset = ParallelMap(range(10), square, max_items=kind(5), max_bytes=kind(1000))
        assert [*chain.from_iterable(batches(DataLoader(dataset, 4)))] == [number * number for number in range(10)]


@pytest.mark.parametrize(("count", "ranks", "size"), [(7, 2, 4), (7, 2, 2), (7, 2, 3), (7, 3, 3), (8, 3, 2), (5, 3, 1)])
def test_a_state_of_any_rank_after_any_step_is_that_of_all(count: int, ranks: int, size: int) -> None:
    """Also one of a rank with fewer items, whose last batch is short: none comes twice, and none not at all."""

    def make(num_replicas: int, rank: int) -> DataLoader[int]:
        stream = ParallelMap(range(count), square, shard="rank", num_replicas=num_replicas, rank=rank)
        return DataLoader(stream, size, collate_fn=list)

    loaders: list[Any] = [iter(make(ranks, rank)) for rank in range(ranks)]
    seen: list[int] = []
    while batches := [batch for each in loaders if (batch := next(each, []))]:
        seen += chain.from_iterable(batches)
        for state in [each.state_dict() for each in loaders]:
            for ranks_then in (1, 2) if not state["finished"] else ():
                rest: list[int] = []
                for rank in range(ranks_then):
                    other = make(ranks_then, rank)
                    other.load_state_dict(state)
                    rest += chain.from_iterable(other)
                assert sorted(seen + rest) == [number**2 for number in range(count)]


def test_lengths() -> None:
    """Those of the stream, if it has one; of a rank, its part."""
    assert len(DataLoader(ParallelMap(range(10), square), 4)) == 3
    assert [
        len(DataLoader(ParallelMap(range(10), square, shard="rank", num_replicas=3, rank=rank))) for rank in range(3)
    ] == [4, 3, 3]
    with pytest.raises(TypeError):
        len(DataLoader(ParallelMap(numbers, square)))


def test_random_numbers_are_those_of_any_workers() -> None:
    """By batch, and by sample."""

    def noisy(number: int) -> torch.Tensor:
        return torch.rand(2) + number

    def made(num_workers: int, seeding: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [*DataLoader(ParallelMap(numbers, noisy), 4, num_workers=num_workers, seeding=seeding)]

    for seeding in ("batch", "sample"):
        for one, other in zip(made(1, seeding), made(2, seeding), strict=True):
            assert torch.equal(one, other)
