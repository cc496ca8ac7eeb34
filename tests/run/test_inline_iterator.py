"""Batches made in the trainer's process: by the same maker as in workers, with other surroundings."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import asyncloader
from asyncloader import DataLoader
from asyncloader.errors import LoaderClosedError
from asyncloader.run.base_iterator import BaseIterator
from asyncloader.run.random_order import RandomOrder
from asyncloader.samplers import ElasticSampler
from tests.support.counted import Counted
from tests.support.patience import TRIES, Stopwatch, until


class Squares:
    """Samples by key; what is raised for keys that are exceptions is raised once."""

    def __init__(self) -> None:
        self.raised: list[BaseException] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: Any) -> int:
        if not isinstance(key, BaseException):
            return int(key) ** 2
        if key in self.raised:
            return -1
        self.raised.append(key)
        raise key


def squares(*batches: list[Any], **options: Any) -> DataLoader[Any]:
    """Return a loader of these batches, as lists."""
    return DataLoader(Squares(), batch_sampler=batches, collate_fn=list, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError(1)])
def test_what_a_sample_raises_is_raised_as_it_is(error: Exception) -> None:
    """The same object, with the indices of the batch, and without words about workers; the next batch follows."""
    iterator = iter(squares([error, 1], [2]))
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error
    assert [note.partition(" [")[0] for note in error.__notes__] == [
        "The sample with the index ValueError('bad') raised it."
        if isinstance(error, ValueError)
        else error.__notes__[0],
        "The batch has the indices",
    ]
    assert error.keys == [error, 1]  # type: ignore[attr-defined]
    assert list(iterator) == [[4]]
    del error.keys  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_an_interruption_is_no_failure_of_the_batch(error: BaseException) -> None:
    """It passes through, and the next call makes the batch anew."""
    loader = squares([1], [error, 3], [4])
    iterator = iter(loader)
    assert next(iterator) == [1]
    with pytest.raises(type(error)):
        next(iterator)
    assert loader.state_dict()["position"] == 1
    assert list(iterator) == [[-1, 9], [16]]


async def test_a_system_exit_on_the_thread_is_told_to_the_task() -> None:
    """Nobody else would tell; the thread goes on."""
    iterator: Any = aiter(squares([SystemExit(3)], [2]))
    with pytest.raises(SystemExit):
        await anext(iterator)
    assert [batch async for batch in iterator] == [[4]]
    await iterator.aclose()  # the key, which is the error, keeps it alive


class Interrupted(IterableDataset[int]):
    """The third sample is interrupted."""

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 3:
            raise KeyboardInterrupt
        if self.at == 7:
            raise StopIteration
        return self.at


def test_samples_of_a_stream_that_were_read_before_an_interruption_are_gone() -> None:
    """The iterator says so each time; the state is the one before."""
    loader = DataLoader(Interrupted(), batch_size=2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    for _ in range(2):
        with pytest.raises(LoaderClosedError, match="load the loader's state_dict"):
            next(iterator)
    assert loader.state_dict()["position"] == 1


@pytest.mark.parametrize("face", ["for", "async for"])
async def test_what_pinning_raises_stands_for_the_batch(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is made."""

    def pinned(batch: Any, device: object) -> Any:
        if 4 in batch:
            raise MemoryError("locked")
        return tuple(batch)

    construct = BaseIterator._construct

    def constructed(iterator: Any, loader: Any) -> None:
        construct(iterator, loader)
        iterator._pinned_for = "a device"

    monkeypatch.setattr(BaseIterator, "_construct", constructed)
    monkeypatch.setattr("asyncloader.run.inline_iterator.pinned", pinned)
    iterator: Any = iter(squares([2], [3]))
    with pytest.raises(MemoryError, match="locked"):
        await anext(iterator) if face == "async for" else next(iterator)
    assert (await anext(iterator) if face == "async for" else next(iterator)) == (9,)
    await iterator.aclose()


class Drawing:
    """Each sample is a number of its own generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(asyncloader.sample_rng().random())


@pytest.mark.parametrize("ahead", [[], [1], [2, 3]])
def test_numbers_of_batches_are_those_of_the_plan(ahead: list[int]) -> None:
    """Also where some were delivered out of order before: samples draw what they draw with workers."""

    def rest(num_workers: int) -> list[list[float]]:
        torch.manual_seed(0)
        loader = DataLoader(Drawing(), 2, num_workers=num_workers, in_order=False)  # type: ignore[arg-type]
        next(iter(loader))
        state = {**loader.state_dict(), "position": 1 if 1 not in ahead else 0, "ahead": ahead}
        loader.close()
        loader.load_state_dict(state)
        batches = sorted(batch.tolist() for batch in loader)
        loader.close()
        return batches

    batches = rest(0)
    assert batches == rest(1)
    assert len({sample for batch in batches for sample in batch}) == 2 * len(batches)


class Unloadable(IterableDataset[int]):
    """Its state cannot be brought back."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise OSError("gone")


def test_what_a_dataset_raises_when_it_is_opened_is_raised_by_iter() -> None:
    """As torch does where it makes the iterator."""
    loader = DataLoader(Unloadable(), 2)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(OSError, match="gone"):
        iter(loader)


class Waiting:
    """The first sample waits until it may be made."""

    def __init__(self) -> None:
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.began.set()
        assert self.may_go_on.wait(20)
        return index


def test_a_thread_that_waits_for_its_turn_hears_that_the_iterator_was_closed() -> None:
    """The one that makes a batch has it; nobody who looks, or closes, waits for that."""
    dataset = Waiting()
    loader: DataLoader[int] = DataLoader(dataset, batch_size=4)  # type: ignore[arg-type]
    iterator: Any = iter(loader)
    found: list[Any] = []

    def take() -> None:
        try:
            found.append(next(iterator).tolist())
        except LoaderClosedError:
            found.append("closed")

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert dataset.began.wait(20)
    assert loader.state_dict()["position"] == iterator.stats().batches == 0
    iterator.close()
    dataset.may_go_on.set()  # not before: the batch would have raised, had anything here waited for it
    for thread in threads:
        thread.join(20)
    assert sorted(found, key=str) == [[0, 1, 2, 3], "closed"]


BYTECODES = {1: 418, 32: 702}
"""At most, for a batch of so many samples that are made in C, in CPython 3.11: what a batch costs without workers is
to stay what it is. What C does is not counted; torch's loader takes 376 for a batch of one, and 686 for 32."""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions have other bytecodes")
@pytest.mark.parametrize("batch_size", [1, 32])
def test_bytecodes_of_a_batch(batch_size: int) -> None:
    """They are exact, whatever else the machine does, but for what is due once in a while: the least of some counts."""
    iterator = iter(DataLoader(range(10**6), batch_size))  # type: ignore[arg-type]
    for _ in range(50):
        next(iterator)
    counts = [0]

    def trace(frame: Any, event: str, arg: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[-1] += event == "opcode"
        return trace

    def take() -> None:
        for _ in range(100):
            counts.append(0)
            next(iterator)

    before = sys.gettrace()
    sys.settrace(trace)
    take()
    sys.settrace(before)
    assert min(counts[2:]) <= BYTECODES[batch_size]


class Computing:
    """Samples of 4 ms, each of which ends in an operation of torch's."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.perf_counter() + 0.004
        while time.perf_counter() < until:
            pass
        return torch.ones(8).sum()


async def longest_turns(loader: DataLoader[Any], count: int) -> list[float]:
    """Return how long the loop took from turn to turn while so many batches were taken, the longest first. Seconds."""
    turns: list[float] = []

    async def turn() -> None:
        while True:
            watch = Stopwatch()
            await asyncio.sleep(0.001)
            turns.append(watch.seconds())

    other = asyncio.create_task(turn())
    iterator = aiter(loader)
    for _ in range(count):
        await anext(iterator)
    other.cancel()
    return sorted(turns, reverse=True)


async def test_a_loop_has_its_turns_while_samples_compute() -> None:
    """A batch takes 64 ms, through which the loop would stand still; 49 turns of 50 take less than half of that.

    The aim on a quiet machine is 9 ms.
    """
    loader: DataLoader[Any] = DataLoader(Computing(), batch_size=16)  # type: ignore[arg-type]
    for _ in range(TRIES):
        turns = await longest_turns(loader, 10)
        if turns[len(turns) // 50] < 0.032:
            return
    pytest.fail(f"one in 50 turns takes {turns[len(turns) // 50]:.3f} s")


class Indices:
    """A million of them."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        return index


async def test_a_large_shuffle_is_drawn_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread; the order is that of `for`, and of the next epoch as well, whoever is cancelled meanwhile."""
    drawn_in: list[bool] = []
    draw, goes_on = RandomOrder._draw, threading.Event()
    goes_on.set()

    def drawing(order: RandomOrder) -> None:
        drawn_in.append(threading.current_thread() is threading.main_thread())
        assert goes_on.wait(60)
        draw(order)

    monkeypatch.setattr(RandomOrder, "_draw", drawing)
    loader: DataLoader[Any] = DataLoader(Indices(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    torch.manual_seed(5)
    by_for = [next(iter(loader)).tolist() for _ in range(2)]
    torch.manual_seed(5)
    found = []
    for epoch in range(2):
        iterator: Any = aiter(loader)
        if epoch:
            goes_on.clear()
            cancelled = asyncio.create_task(anext(iterator))
            await until(lambda: len(drawn_in) == 4)
            cancelled.cancel()
            goes_on.set()
        found.append((await anext(iterator)).tolist())
        assert iterator.state_dict()["position"] == 1
    assert found == by_for
    assert drawn_in == [True, True, False, False]


@pytest.mark.parametrize("stop", [(0, 2), (1, 0), (1, 2), (1, 5)])
def test_two_loaders_of_one_sampler_are_resumed_side_by_side(stop: tuple[int, int]) -> None:
    """As images and masks are: each where it was, though the sampler is put to its place twice before it is read."""

    def pair() -> list[DataLoader[Any]]:
        sampler = ElasticSampler(range(12), seed=3)
        return [DataLoader(range(12), batch_size=2, sampler=sampler) for _ in range(2)]  # type: ignore[arg-type]

    def rest(loaders: list[DataLoader[Any]], first: int) -> list[Any]:
        given = []
        for epoch in range(first, 3):
            for number, batches in enumerate(zip(*loaders, strict=True)):
                given.append([batch.tolist() for batch in batches])
                if first == 0 and (epoch, number) == stop:
                    states.append([loader.state_dict() for loader in loaders])
        return given

    states: list[Any] = []
    whole = rest(pair(), 0)
    resumed = pair()
    for loader, state in zip(resumed, states[0], strict=True):
        loader.load_state_dict(state)
    assert rest(resumed, stop[0]) == whole[6 * stop[0] + stop[1] + 1 :]
    assert all(ours == others for ours, others in whole)


def test_a_users_sampler_that_a_state_was_loaded_into_is_read_no_sooner_than_asked() -> None:
    """Its state may be saved by the user as well, who has been given nothing yet."""
    loader, resumed = (DataLoader(range(12), 2, sampler=Counted(12)) for _ in range(2))  # type: ignore[arg-type]
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    resumed.load_state_dict(loader.state_dict())
    rest = iter(resumed)
    assert resumed.sampler.state_dict() == {"at": 4}
    assert next(rest).tolist() == [4, 5]
