"""Async datasets, wherever they run: order, errors, cancellation, timeouts, resources, random numbers."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    get_worker_info,
)

from asyncloader import BatchTimeoutError, ConfigurationError, DataLoader, WorkerDiedError, sample_rng
from asyncloader.engine.portal import get_portal
from asyncloader.worker import stream as child_stream
from tests.support import inside
from tests.support.patience import PATIENCE_S, hung, patiently, patiently_async, wait_until

WORKERS: dict[str, Any] = {"num_workers": 2}
PLACES = [
    pytest.param(WORKERS, id="processes"),
    pytest.param({"num_workers": 0}, id="here"),
    pytest.param({"num_workers": 2, "worker_backend": "thread"}, id="threads"),
]
places = pytest.mark.parametrize("place", PLACES)
engines = pytest.mark.parametrize("place", [pytest.param(WORKERS, id="processes", marks=pytest.mark.slow), *PLACES[1:]])
"""Where the same child's code runs in each place: in processes each night."""


class Squares:
    """The least there is: no base class, one coroutine."""

    def __len__(self) -> int:
        return 20

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0.001 * (index * 7 % 5))  # they finish in another order than they begin
        return index * index


class BatchSquares(Squares):
    """Fetches a batch in one query."""

    async def __getitems__(self, keys: list[int]) -> list[int]:
        await asyncio.sleep(0.001)
        return [key * key for key in keys]


class Late(Dataset[int]):
    """A plain wrapper that hands the coroutine of an async dataset on, and that nobody can know to be async."""

    def __init__(self) -> None:
        self.inner = Squares()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class LateBatches(Late):
    """The same, by the batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.inner[index] for index in indices]


class Reference(int):
    """May be awaited, and need not be, as what Ray and dask return."""

    def __await__(self) -> Iterator[Any]:
        raise AssertionError


class References(Dataset[Any]):
    """Samples that `collate_fn` resolves."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Reference:
        return Reference(index)


class LateStream(IterableDataset[int]):
    """A plain stream of what has to be awaited."""

    def __iter__(self) -> Iterator[Any]:
        return map(Squares().__getitem__, range(20))


class Stream:
    """An async generator, split over the workers."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    async def __aiter__(self) -> AsyncIterator[int]:
        info = get_worker_info()
        for index in range(info.id if info else 0, self.count, info.num_workers if info else 1):
            await asyncio.sleep(0)
            yield index * index


class StreamOfAwaitables(Stream):
    """Yields samples that are still to be awaited."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for square in super().__aiter__():
            yield self.later(square)

    async def later(self, square: int) -> int:
        await asyncio.sleep(0.001 * (square % 3))
        return square


class Gate:
    """Opens once for all processes: a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        self.path.touch()

    async def wait(self) -> None:
        while not self.path.exists():  # noqa: ASYNC110 - a file is the event that processes share
            await asyncio.sleep(0.002)


class Gated(Squares):
    """One sample waits for a gate, or does something else that is given."""

    def __init__(self, gate: Gate, at: int = 0, act: Callable[[], Any] | None = None) -> None:
        self.gate = gate
        self.at = at
        self.act = act

    async def __getitem__(self, index: int) -> int:
        if index == self.at:
            await self.wait_for_the_gate()
            if self.act is not None:
                self.act()
        return await super().__getitem__(index)

    async def wait_for_the_gate(self) -> None:
        await self.gate.wait()


def flat(batches: Any) -> list[int]:
    """Return the samples of all batches."""
    return [int(sample) for batch in batches for sample in batch]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


SQUARES = [i * i for i in range(20)]


@pytest.mark.covering(1)
@engines
@pytest.mark.parametrize("concurrency", [None, 1, 3])
def test_samples_come_in_order(place: dict[str, Any], concurrency: int | None) -> None:
    """As from the plain dataset, whatever finishes first, through torch's wrappers, and with both faces."""
    squares: Any = Squares()
    for dataset in (
        squares,
        BatchSquares(),
        Subset(squares, range(20)),
        Subset(BatchSquares(), range(20)),  # type: ignore[arg-type]
        ConcatDataset([Subset(squares, range(5)), Subset(squares, range(5, 20))]),
    ):
        loader: Any = DataLoader(dataset, batch_size=3, concurrency=concurrency, **place)
        assert [len(batch) for batch in loader] == [3] * 6 + [2], dataset
        assert flat(loader) == SQUARES, dataset
    assert [int(sample) for sample in DataLoader(squares, batch_size=None, concurrency=concurrency, **place)] == SQUARES


@places
async def test_async_for_gives_what_for_gives(place: dict[str, Any]) -> None:
    """The other face."""
    loader: Any = DataLoader(Squares(), batch_size=3, **place)  # type: ignore[arg-type]
    for _ in range(2):
        assert flat([batch async for batch in loader]) == SQUARES


def test_an_async_collate_fn_is_refused() -> None:
    """Its coroutines would be the batches."""

    async def collate(samples: list[int]) -> list[int]:
        return samples

    with pytest.raises(ConfigurationError, match="collated = True"):
        DataLoader(Squares(), collate_fn=collate)  # type: ignore[arg-type]


late_places = pytest.mark.parametrize(
    "place",
    [{}, {"num_workers": 1}, {"num_workers": 1, "concurrency": 2}, {"num_workers": 1, "worker_backend": "thread"}],
    ids=["here", "process", "threads of a process", "thread"],
)


@places
def test_plain_samples_beside_awaited_ones(place: dict[str, Any]) -> None:
    """Of a dataset that has both inside."""
    dataset = ConcatDataset([Squares(), range(3)])  # type: ignore[list-item]
    assert flat(DataLoader(dataset, batch_size=4, **place)) == [*(i * i for i in range(20)), 0, 1, 2]


@late_places
def test_samples_that_may_be_awaited_are_samples_like_others(place: dict[str, Any]) -> None:
    """As with torch's loader: `collate_fn` is given them."""
    loader: Any = DataLoader(References(), batch_size=2, collate_fn=lambda samples: [*map(int, samples)], **place)
    assert list(loader) == [[0, 1], [2, 3]]


@late_places
def test_samples_that_turn_out_to_be_awaitables_are_refused(place: dict[str, Any]) -> None:
    """Of a map-style dataset, by key or by the batch, and of a plain stream: the error says how they are awaited."""
    for dataset in (Late(), LateBatches(), LateStream()):
        if "concurrency" in place and isinstance(dataset, LateStream):
            continue  # awaits them
        with pytest.raises(TypeError, match=rf"{type(dataset).__name__} has to be awaited.*async def"):
            next(iter(DataLoader(dataset, batch_size=2, collate_fn=list, **place)))


@engines
@pytest.mark.parametrize("kind", [Stream, StreamOfAwaitables])
def test_streams_are_read_by_async_for_in_each_worker(place: dict[str, Any], kind: type[Stream]) -> None:
    """Read with ``async for``, each worker its own part; short batches at the end of each; dropped if so asked."""
    loader: Any = DataLoader(kind(), batch_size=3, **place)  # type: ignore[arg-type]
    assert isinstance(loader.dataset, IterableDataset)
    for _ in range(2):
        assert sorted(flat(loader)) == SQUARES
    if loader.num_workers == 2:
        assert [batch.tolist() for batch in loader][:2] == [[0, 4, 16], [1, 9, 25]]
    workers = max(loader.num_workers, 1)
    lengths = [len(batch) for batch in DataLoader(kind(), batch_size=3, drop_last=True, **place)]  # type: ignore[arg-type]
    assert lengths == [3] * (20 // workers // 3 * workers)
    assert sorted(map(int, DataLoader(kind(), batch_size=None, **place))) == SQUARES  # type: ignore[arg-type]
    chained: Any = ChainDataset([kind(4), kind(2)])  # type: ignore[list-item]
    assert sorted(flat(DataLoader(chained, batch_size=3, **place))) == [0, 0, 1, 1, 4, 9]


class CountsPasses:
    """A stream that is its own iterator, and counts how often somebody iterates over it; in two kinds."""

    passes = left = 0

    def begin(self) -> Any:
        self.passes, self.left = self.passes + 1, 3
        return self

    def read(self, end: type[Exception]) -> int:
        if not self.left:
            raise end
        self.left -= 1
        return self.passes


class PlainPasses(CountsPasses, IterableDataset[int]):
    __iter__ = CountsPasses.begin

    def __next__(self) -> int:
        return self.read(StopIteration)


class AsyncPasses(CountsPasses):
    __aiter__ = CountsPasses.begin

    async def __anext__(self) -> int:
        return self.read(StopAsyncIteration)


@engines
def test_streams_of_a_chain_are_iterated_over_once(place: dict[str, Any]) -> None:
    """As torch's ChainDataset does: a stream may shuffle by how often it was."""
    chained: Any = ChainDataset([AsyncPasses(), PlainPasses()])  # type: ignore[list-item]
    assert set(flat(DataLoader(chained, batch_size=2, **place))) == {1}


@engines
def test_a_slow_sample_holds_up_its_own_batch_only(place: dict[str, Any], gate: Gate) -> None:
    """Batches behind it are finished, also those of the same worker; in order they wait for it."""
    loader: Any = DataLoader(Gated(gate), batch_size=2, in_order=False, **place)  # type: ignore[arg-type]
    iterator = iter(loader)
    others = [next(iterator) for _ in range(9)]
    gate.open()
    assert next(iterator).tolist() == [0, 1]
    assert sorted(flat(others)) == SQUARES[2:]
    assert flat(DataLoader(Gated(gate), batch_size=2, **place)) == SQUARES  # type: ignore[arg-type]


class Broken(Squares):
    """Some samples raise, one cancels itself; what is cancelled with them writes it down."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    async def __getitem__(self, index: int) -> int:
        if index == 4:
            await asyncio.sleep(0.01)
            raise LookupError("no such sample")
        if index == 5:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.notes.touch()
                raise
        if index == 8:
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task
        return await super().__getitem__(index)


@places
def test_an_exception_costs_its_own_batch(place: dict[str, Any], tmp_path: Path) -> None:
    """The object that was raised, the indices, the coroutine's frames; other samples of the batch are cancelled."""
    iterator: Any = iter(DataLoader(Broken(tmp_path / "note"), batch_size=2, **place))  # type: ignore[arg-type]
    seen: list[Any] = []
    errors: list[Exception] = []
    while True:
        try:
            seen += next(iterator).tolist()
        except StopIteration:
            break
        except Exception as error:
            errors.append(error)
    assert seen == SQUARES[:4] + SQUARES[6:8] + SQUARES[10:]
    missing, cancelled = errors
    assert isinstance(missing, LookupError)
    assert missing.args == ("no such sample",)
    assert any("[4, 5]" in note for note in missing.__notes__)
    assert isinstance(cancelled, RuntimeError)
    assert "CancelledError" in str(cancelled)
    iterator.close()
    assert (tmp_path / "note").exists()
    errors.clear()
    del missing, cancelled


class LastFirst:
    """Sample 1 raises after sample 3 has raised, and sample 0 comes last of all."""

    def __init__(self) -> None:
        self.has_raised = {1: threading.Event(), 3: threading.Event()}

    def __len__(self) -> int:
        return 8

    def get(self, index: int) -> int:
        if index in self.has_raised:
            self.has_raised[index].set()
            raise KeyError(index)
        return index

    async def __getitem__(self, index: int) -> int:
        while index < 2 and not self.has_raised[3 - 2 * (index == 0)].is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        return self.get(index)


class LastFirstOnThreads(LastFirst):
    """The same for a dataset that is not async."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if index < 2:
            assert self.has_raised[3 - 2 * (index == 0)].wait(60)
            time.sleep(0.02)  # so that the other error is on its way
        return self.get(index)


@pytest.mark.forked("events of threads are not sent")
@pytest.mark.parametrize("place", [{}, {"num_workers": 1, "worker_backend": "thread"}], ids=["here", "thread"])
@pytest.mark.parametrize("kind", [LastFirst, LastFirstOnThreads])
def test_of_several_errors_the_first_in_the_batch_is_raised(kind: Any, place: dict[str, Any]) -> None:
    """Whichever is raised first: which error it is follows from the data, as without overlap."""
    if kind is LastFirstOnThreads and not place:
        place = {"num_workers": 1, "worker_backend": "process"}
    iterator: Any = iter(DataLoader(kind(), batch_size=4, concurrency=4, **place))
    with pytest.raises(KeyError) as caught:
        next(iterator)
    assert caught.value.args == (1,)
    assert flat(iterator) == [4, 5, 6, 7]


@engines
def test_bad_samples_are_known_one_by_one(place: dict[str, Any], tmp_path: Path) -> None:
    """With on_error the rest of the batch is waited for, and mended."""
    arguments: dict[str, Any] = {"sampler": [3, 4, 6, 7], "batch_size": 2, **place}
    dataset: Any = Broken(tmp_path / "note")
    assert [batch.tolist() for batch in DataLoader(dataset, on_error="skip", **arguments)] == [[9], [36, 49]]
    assert [batch.tolist() for batch in DataLoader(dataset, on_error="replace", **arguments)] == [[9, 9], [36, 49]]


class Noted:
    """Writes down what is opened and closed."""

    count = 20

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, what: str) -> None:
        worker = get_worker_info()
        path = self.folder / f"{what} {worker.id if worker else 'main'}"
        path.write_text(path.read_text() + "I" if path.exists() else "I")

    async def __aenter__(self) -> None:
        await asyncio.sleep(0)
        self.note("enter")

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.sleep(0)
        self.note("exit")

    def notes(self) -> dict[str, int]:
        return {path.name: len(path.read_text()) for path in self.folder.iterdir()}


class NotedStream(Noted, Stream):
    """Has a generator with something to clean up."""

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            async for square in super().__aiter__():
                yield square
        finally:
            self.note("finally")


class Cleaning(Noted, Stream):
    """Has a generator that awaits its own cleanup after the last sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = Gate(folder / "gate")

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            async for square in super().__aiter__():
                yield square
        finally:
            self.note("begun")
            await self.gate.wait()
            self.note("done")


@pytest.mark.covering(1)
@places
@pytest.mark.forked("what is patched is patched in the workers")
@pytest.mark.parametrize("how", ["close", "again"])
def test_cleanup_at_the_end_is_not_cancelled(
    place: dict[str, Any], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a stream has not been heard of when the loader is closed, or the next run begins."""
    dataset = Cleaning(tmp_path)
    drop = child_stream.Stream.drop

    def note(stream: child_stream.Stream) -> None:
        drop(stream)  # what that cancels hears of it in the next turn of the loop
        stream._loop.call_soon(stream._loop.call_soon, dataset.gate.open)

    monkeypatch.setattr(child_stream.Stream, "drop", note)
    monkeypatch.setattr(child_stream, "_PATIENCE_S", 60.0)
    loader = DataLoader(dataset, 5, **place, persistent_workers=bool(place["num_workers"]))  # type: ignore[arg-type]
    iterator: Any = iter(loader)
    for _ in range(4):
        next(iterator)
    names = ["0", "1"] if place["num_workers"] else ["main"]
    wait_until(lambda: all((tmp_path / f"begun {name}").exists() for name in names))
    if how == "again":
        del iterator
        assert sorted(flat(loader)) == SQUARES
    loader.close()
    assert all(dataset.notes().get(f"done {name}", 0) == 1 + (how == "again") for name in names)


class NotedSquares(Noted):
    """Has coroutines with something to clean up."""

    def __len__(self) -> int:
        return self.count

    async def __getitem__(self, index: int) -> int:
        try:
            await asyncio.sleep(0.01)
        finally:
            self.note("finally")
        return index * index


@pytest.mark.covering(2)
@places
@pytest.mark.parametrize("kind", [NotedStream, NotedSquares])
@pytest.mark.parametrize("how", ["exhausted", "break", "exception", "dropped"])
def test_what_was_opened_is_closed(place: dict[str, Any], kind: type[Noted], how: str, tmp_path: Path) -> None:
    """Once in each worker; generators and coroutines run their ``finally`` before it."""
    dataset = kind(tmp_path)
    iterator = iter(DataLoader(dataset, batch_size=2, **place))  # type: ignore[arg-type]
    next(iterator), next(iterator)  # both workers are at work
    if how == "exhausted":
        assert len(list(iterator)) == 8
    elif how == "exception":
        with pytest.raises(ZeroDivisionError), iterator:
            _ = 1 / 0
    if how == "dropped":
        session = inside.engine(iterator)
        del iterator
        assert session.wait_closed(5)
    else:
        iterator.close()
    names = ["0", "1"] if place.get("num_workers") else ["main"]
    notes = dataset.notes()
    assert {name: 1 for what in ("enter", "exit") for name in [f"{what} {n}" for n in names]}.items() <= notes.items()
    assert all(f"finally {name}" in notes for name in names)


@places
async def test_a_timeout_names_the_await(place: dict[str, Any], gate: Gate) -> None:
    """Through the frames of the coroutines, in either face; the next call waits for the same batch."""
    for face in ("for", "async for"):
        dataset: Any = Gated(gate, at=4)
        iterator: Any = iter(DataLoader(dataset, batch_size=4, timeout=1.0, **place))
        first = next(patiently(iterator)) if face == "for" else await anext(patiently_async(iterator))
        assert first.tolist() == SQUARES[:4]
        with pytest.raises(BatchTimeoutError) as caught:
            next(iterator) if face == "for" else await anext(iterator)
        assert caught.value.keys == [4, 5, 6, 7]
        assert "in wait_for_the_gate" in caught.value.stack
        assert "await self.gate.wait()" in caught.value.stack
        assert "1 of the 4 samples" in caught.value.stack
        del caught
        gate.open()
        rest = [*patiently(iterator)] if face == "for" else [batch async for batch in patiently_async(iterator)]
        assert flat(rest) == SQUARES[4:]
        gate.path.unlink()


@engines
async def test_asking_again_does_not_begin_a_sample_again(place: dict[str, Any], gate: Gate, tmp_path: Path) -> None:
    """A batch that takes longer than the timeout comes at last: each of its samples was begun once."""

    class Noted(Gated):
        async def wait_for_the_gate(self) -> None:
            with (tmp_path / "begun").open("a") as begun:
                begun.write("x")
            await super().wait_for_the_gate()

    iterator: Any = iter(DataLoader(Noted(gate), batch_size=4, timeout=0.2, **place))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(BatchTimeoutError):
            await anext(iterator)
    gate.open()
    assert flat([batch async for batch in patiently_async(iterator)]) == SQUARES
    assert (tmp_path / "begun").read_text() == "x"


def test_what_blocks_the_loop_for_all_is_named(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers, by a timeout."""
    monkeypatch.setattr("asyncloader.run.worker_iterator._ANSWER_S", 0.5)
    gate.open()
    release = threading.Event()
    blocking: Any = DataLoader(Gated(gate, act=release.wait), batch_size=4, timeout=0.2)  # type: ignore[arg-type]
    iterator = iter(blocking)
    error = hung(iterator, "is blocked")
    assert "release.wait" in error.stack or "self.act()" in error.stack
    release.set()
    del error
    assert flat(patiently(iterator)) == SQUARES
    with pytest.raises(AssertionError):  # torch's own, in 2.6 without a text
        iter(DataLoader(range(4), timeout=1))  # type: ignore[arg-type]


@pytest.mark.forked("the timeout is shorter than the import of this module")
def test_a_timeout_names_where_an_async_generator_is(gate: Gate) -> None:
    """Which no task of asyncio's shows."""

    class Slow(Stream):
        async def __aiter__(self) -> AsyncIterator[int]:
            yield 0
            await gate.wait()
            yield 1

    iterator: Any = iter(DataLoader(Slow(), batch_size=2, timeout=0.3, num_workers=1))  # type: ignore[arg-type]
    hung(iterator, "await gate.wait()")
    gate.open()
    assert flat(patiently(iterator)) == [0, 1]


def kill_once(folder: Path) -> Callable[[], None]:
    """Return a function that kills its process the first time that it is called."""

    def act() -> None:
        if not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def test_a_worker_that_dies_is_replaced(gate: Gate, tmp_path: Path) -> None:
    """With several of its batches in flight: all of them are fetched again, each is delivered once."""
    gate.open()
    dataset: Any = Gated(gate, at=8, act=kill_once(tmp_path))
    assert flat(DataLoader(dataset, batch_size=2, num_workers=2)) == SQUARES


def test_only_the_batch_that_kills_is_given_up(gate: Gate) -> None:
    """Batches that were in flight beside it are not to blame, and are delivered."""
    gate.open()
    dataset: Any = Gated(gate, at=8, act=lambda: os.kill(os.getpid(), signal.SIGKILL))
    iterator: Any = iter(DataLoader(dataset, batch_size=2, num_workers=1, max_retries=1))
    seen = []
    errors = []
    for _ in range(10):
        try:
            seen += next(iterator).tolist()
        except WorkerDiedError as error:
            errors.append(error.keys)
    assert seen == SQUARES[:8] + SQUARES[10:]
    assert errors == [[[8, 9]]]
    skipping: Any = DataLoader(dataset, batch_size=2, num_workers=2, on_crash="skip")
    assert flat(skipping) == seen


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_hung_worker_of_this_process_is_abandoned(place: dict[str, Any], gate: Gate) -> None:
    """Another takes its place; a thread that hangs ends when what it waits for comes."""
    hangs = threading.Event()

    async def hang(self: Gated) -> None:
        if not hangs.is_set():
            hangs.set()
            await asyncio.sleep(3600)

    dataset: Any = type("Hanging", (Gated,), {"wait_for_the_gate": hang})(gate, 8)
    loader: Any = DataLoader(dataset, batch_size=2, timeout=0.3, on_timeout="retry", max_retries=50, **place)
    assert flat(loader) == SQUARES


@places
def test_persistent_workers_cancel_what_was_left(place: dict[str, Any], tmp_path: Path) -> None:
    """What is in flight of an epoch that was left is cancelled, and reaches nobody."""
    if not place.get("num_workers"):
        pytest.skip("torch allows persistent workers with workers only")
    for kind in (Stream, StreamOfAwaitables, Squares):
        loader: Any = DataLoader(kind(), batch_size=2, persistent_workers=True, **place)  # type: ignore[arg-type]
        for _ in range(3):
            assert len(next(iter(loader))) == 2
        assert sorted(flat(loader)) == SQUARES
        loader.close()


class Noisy(Squares):
    """Draws, in between awaits."""

    async def __getitem__(self, index: int) -> Any:
        first = sample_rng().integers(1 << 40)
        await asyncio.sleep(0.001 * (index % 4))
        return np.array([index, first, await asyncio.to_thread(lambda: sample_rng().integers(1 << 40))])


def run(dataset: Any, **arguments: Any) -> Any:
    """Return one epoch under a fixed seed."""
    import torch

    loader: Any = DataLoader(dataset, batch_size=3, generator=torch.Generator().manual_seed(5), **arguments)
    return np.concatenate([batch.numpy() for batch in loader]).tolist()


def test_random_numbers_of_a_sample_are_its_own(tmp_path: Path, gate: Gate) -> None:
    """Whatever the concurrency, the number of workers, or a death among them."""
    expected = run(Noisy(), num_workers=1, concurrency=1)
    draws = [draw for row in expected for draw in row[1:]]
    assert len(set(draws)) == 40
    for arguments in ({"num_workers": 1}, {"num_workers": 2, "concurrency": 5}):
        assert run(Noisy(), **arguments) == expected

    class Mortal(Noisy):
        async def __getitem__(self, index: int) -> Any:
            sample = await super().__getitem__(index)
            if index == 11:
                kill_once(tmp_path)()
            return sample

    assert run(Mortal(), num_workers=2) == expected
    with pytest.raises(RuntimeError, match="no sample is being fetched"):
        contextvars.Context().run(sample_rng)  # an empty one: tests of interrupts stop this thread at any line


@pytest.mark.slow
def test_ten_thousand_awaits_in_one_worker(gate: Gate, tmp_path: Path) -> None:
    """All in flight at once, each under 20 kB beyond its sample."""

    class Counted:
        count = 10_000

        def __len__(self) -> int:
            return self.count + 1

        def __init__(self) -> None:
            self.waiting = 0

        async def __getitem__(self, index: int) -> int:
            import psutil

            memory = psutil.Process().memory_info().rss
            if index == 0:
                self.base = memory
                return 0
            self.waiting += 1
            if self.waiting == self.count:
                (tmp_path / "bytes").write_text(str(memory - self.base))
                gate.open()
            while not gate.path.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            return index

    loader: Any = DataLoader(Counted(), batch_size=25, num_workers=1, concurrency=10_001)  # type: ignore[arg-type]
    assert flat(loader) == list(range(10_001))
    assert int((tmp_path / "bytes").read_text()) < 10_000 * 20_000


@pytest.mark.leaks("the portal's loop keeps the threads of asyncio.to_thread for the next time")
@engines
def test_decoding_on_a_thread_starves_nobody(place: dict[str, Any]) -> None:
    """A sample that computes in ``asyncio.to_thread`` lets the others of its worker go on meanwhile."""

    class Mixed(Squares):
        async def __getitem__(self, index: int) -> int:
            if index == 0:
                others = asyncio.Event()
                self.others = others
                return await asyncio.to_thread(self.decode, asyncio.get_running_loop())
            await asyncio.sleep(0.001)
            self.seen = getattr(self, "seen", 0) + 1
            return index * index

        def decode(self, loop: asyncio.AbstractEventLoop) -> int:
            while getattr(self, "seen", 0) < 5:  # computes until others have come through
                sum(range(1000))
            return 0

    dataset: Any = Mixed()
    assert flat(DataLoader(dataset, batch_size=2, **place)) == SQUARES


def process_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


class Named(Squares):
    """A sample is the name of its task, its thread and its process."""

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        task: Any = asyncio.current_task()
        return task.get_name(), threading.current_thread().name, process_name()


@places
def test_tasks_threads_and_processes_have_names(place: dict[str, Any]) -> None:
    """Tools that show what a program waits for tell dataset, batch, sample and worker: asyncio pstree, py-spy, top."""
    here = process_name()
    names = {sample for batch in DataLoader(Named(), 5, collate_fn=list, **place) for sample in batch}  # type: ignore[arg-type]
    assert {task for task, _, _ in names} == {
        f"Named: batch {batch}, sample {sample}" for batch in range(4) for sample in range(5)
    }
    workers = {(thread, process) for _, thread, process in names}
    if not place["num_workers"]:
        assert workers == {("asyncloader", here)}
    elif place.get("worker_backend") == "thread":
        assert workers == {(f"asyncloader worker {worker} of Named", here) for worker in range(2)}
    else:
        assert workers == {("MainThread", "asyncloader 0"), ("MainThread", "asyncloader 1")}


# ------------------------------------------------------------------------------------------------------ other loops


class FromQueue:
    """Asks a queue of the application on the loop that it belongs to."""

    def __init__(self, queue: asyncio.Queue[int | None]) -> None:
        self.queue = queue
        self.loop = asyncio.get_running_loop()

    async def __aiter__(self) -> AsyncIterator[int]:
        while (item := await self._get()) is not None:
            yield item

    async def _get(self) -> int | None:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.queue.get(), self.loop))


async def test_a_queue_of_the_application_is_asked_on_its_loop() -> None:
    """Every item of a queue that soon is full comes; and a loader that was left has nothing in flight there."""
    queue: asyncio.Queue[int | None] = asyncio.Queue(2)

    async def produce() -> None:
        for item in (*range(12), None):
            await queue.put(item)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        assert flat([batch async for batch in DataLoader(FromQueue(queue), batch_size=4)]) == list(range(12))


async def test_a_dataset_with_objects_of_its_own_stays_on_the_background_loop() -> None:
    """Locks and semaphores limit its own samples; and there they overlap with a trainer that blocks its loop."""

    class Limited:
        def __init__(self) -> None:
            self.limit = asyncio.Semaphore(2)
            self.lock = asyncio.Lock()

        def __len__(self) -> int:
            return 12

        async def __getitem__(self, index: int) -> int:
            async with self.limit, self.lock:
                await asyncio.sleep(0)
                return threading.get_ident()

    dataset: Any = Limited()
    for _ in range(2):  # the second time they belong to the background loop
        found = {thread async for thread in DataLoader(dataset, batch_size=None)}
        assert found == {get_portal().call(threading.get_ident).result(PATIENCE_S)}
