"""What is not the end of a stream: what its iterator says when it has raised, was cancelled, or its worker is dying."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader.worker.serial_loop import SerialLoop
from tests.faults.test_deaths import DEATHS
from tests.faults.test_stream_deaths import (
    Declared,
    OfIterator,
    Samples,
    Telling,
    Threaded,
    folder,
    kill,
    make_loader,
    plain,
    plan,
    undisturbed,
    wait_until,
)
from tests.support import inside

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Dying(Samples):
    """Ends its worker when a sample is read or awaited, in the way that `how` names."""

    deterministic = True
    how: str

    def read(self, number: int) -> Any:
        if self.befalls(f"die reading {number}"):
            DEATHS[self.how][0]()
        return self.later(number)

    async def later(self, number: int) -> int:
        if self.befalls(f"die at {number}"):
            DEATHS[self.how][0]()
        return await super().later(number)


class DyingGenerator(Dying, IterableDataset[Any]):
    """A generator, which has ended when it has raised."""

    def __iter__(self) -> Iterator[Any]:
        return (self.read(number) for number in self.numbers())


class DyingAsyncGenerator(Dying):
    """The same, async; it also ends when it is cancelled, as if that were its end."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in self.numbers():
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                return
            yield self.read(number)


class DyingIterator(Dying, Telling):
    """Tells where it is."""

    deterministic = False


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", DEATHS)
@pytest.mark.parametrize("kind", [DyingGenerator, DyingAsyncGenerator, DyingIterator])
def test_a_dying_worker_tells_no_end(kind: Any, how: str, folder: Path) -> None:
    """However it dies, where it reads or where it awaits, beside samples that are in flight: nothing is missing."""
    expected = undisturbed(kind, folder, concurrency=2, batch_size=1)
    kind = type(kind.__name__, (kind,), {"how": how})
    plan(folder, "die reading 21", "die at 34")
    loader = make_loader(kind, folder, concurrency=2, batch_size=1, max_retries=5)
    assert [plain(batch) for batch in loader] == expected
    assert not list(folder.iterdir())


class Interrupted(Declared):
    """A task of the dataset's own ends the process; its iterator ends when it is cancelled."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in self.numbers():
            if self.befalls(f"exit {number}"):
                leaving = asyncio.create_task(self.leave())
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                del leaving
                return
            yield self.read(number)

    async def leave(self) -> None:
        raise SystemExit(3)


def test_what_is_cancelled_because_the_loop_ends_tells_no_end(folder: Path) -> None:
    """SystemExit in a task of the dataset's own ends the loop, which then cancels everything else."""
    expected = undisturbed(Interrupted, folder)
    plan(folder, "exit 21")
    assert [plain(batch) for batch in make_loader(Interrupted, folder)] == expected
    assert not list(folder.iterdir())


class Deceived(Declared):
    """Its source goes away shortly before the worker does, so it seems to end."""

    pending = 0

    def read(self, number: int) -> Any:
        self.pending += 1
        return super().read(number)

    async def later(self, number: int) -> int:
        try:
            return await super().later(number)
        finally:
            self.pending -= 1

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in self.numbers():
            await asyncio.sleep(0)
            if self.befalls(f"lose the source at {number}"):
                while self.pending:  # else the end is told only after these  # noqa: ASYNC110
                    await asyncio.sleep(0)
                time.sleep(0.02)  # until more tickets are in the channel  # noqa: ASYNC251
                await asyncio.sleep(0)  # and were seen: it is read in this turn of the loop
                # It stands on the loop when the end is told, so before what the parent answers.
                asyncio.get_running_loop().call_soon(os.abort)
                return
            yield self.read(number)


def tell_slowly(worker: int) -> None:
    """Have the parent answer that the end was told before the loop goes on."""
    tell = SerialLoop._tell_at_end

    def slow(loop: SerialLoop, later: Callable[[], None]) -> None:
        tell(loop, later)
        time.sleep(0.02)

    SerialLoop._tell_at_end = slow  # type: ignore[method-assign]


def tell_slowly_without_uvloop(worker: int) -> None:
    """Do so with asyncio's own loop."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    tell_slowly(worker)


@pytest.mark.covering(1)
@pytest.mark.parametrize("init", [tell_slowly, tell_slowly_without_uvloop])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_end_counts_from_a_worker_that_lives_on(batch_size: int, init: Callable[[int], None], folder: Path) -> None:
    """Killed when it has told the end of its data, before or within a batch, and is not confirmed: another reads on.

    Its death stands on the loop by then; the parent's answer lies in the channel before it comes to that.
    """
    expected = undisturbed(Deceived, folder, batch_size=batch_size)
    plan(folder, "lose the source at 21")
    loader = make_loader(Deceived, folder, batch_size=batch_size, worker_init_fn=init)
    assert [plain(batch) for batch in loader] == expected
    assert not list(folder.iterdir())


class Stubborn(Samples):
    """An async generator that takes a cancellation for the end of its data, or for a sample, or for an error."""

    deterministic = True
    answer = "end"

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in self.numbers():
            try:
                if self.befalls(f"hang {number}"):
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                if self.answer == "end":
                    return
                if self.answer == "raise":
                    raise KeyError("not what happened") from None
            yield self.read(number)


@pytest.mark.parametrize("answer", ["end", "sample", "raise"])
def test_a_run_that_is_left_says_nothing_to_the_next(answer: str, folder: Path) -> None:
    """The iterator of the last run is cancelled in the middle of a read; what it makes of that is not heard."""
    kind = type("Stubborn", (Stubborn,), {"answer": answer})
    expected = undisturbed(kind, folder)
    loader = make_loader(kind, folder, persistent_workers=True)
    plan(folder, "hang 18", "hang 19")
    iterator: Any = iter(loader)
    assert plain(next(iterator)) == expected[0]
    wait_until(lambda: not any(folder.iterdir()))
    assert [plain(batch) for batch in loader] == expected
    assert [plain(batch) for batch in loader] == expected
    loader.close()


class Numbered(IterableDataset[int]):
    """A plain stream that tells its place, and the number of its epoch; with a `finally`, or an end of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epoch = self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        try:
            while (number := self.at * info.num_workers + info.id) < 24:
                self.at += 1
                yield self.epoch * 100 + number
        finally:
            self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def numbered(epoch: int) -> list[list[int]]:
    """Return the batches of an epoch of `Numbered`, by two workers."""
    halves = [[list(range(w + 6 * i, w + 6 * i + 6, 2)) for i in range(4)] for w in (0, 1)]
    return [[epoch * 100 + number for number in batch] for pair in zip(*halves, strict=True) for batch in pair]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"worker_backend": "thread"}], ids=["processes", "threads"])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_epochs_are_numbered_on(every: int, options: dict[str, Any], folder: Path) -> None:
    """A worker is lost before its first batch of the first epoch, and in the middle of each."""
    common = {"persistent_workers": True, "snapshot_every_n_steps": every, "concurrency": None, **options}
    common["max_buffered_bytes"] = 0  # otherwise it may have come to its end
    loader = make_loader(Numbered, folder, **common)
    for epoch in range(4):
        iterator: Any = iter(loader)
        found = []
        for number in range(8):
            if number == 2 or not (number or epoch):
                lose(iterator, (epoch + number) % 2)
            found.append(plain(next(iterator)))
        assert found == numbered(epoch)
        assert next(iterator, None) is None
    loader.close()


def test_epochs_are_counted_on_by_a_worker_that_comes_between_two(folder: Path) -> None:
    """A worker is lost between two epochs; what its dataset had counted was in its state at the end of the first."""
    loader = make_loader(Numbered, folder, persistent_workers=True, concurrency=None)
    iterator: Any = iter(loader)
    assert [plain(batch) for batch in iterator] == numbered(0)
    lose(iterator, 0)
    del iterator
    assert [plain(batch) for batch in loader] == numbered(1)
    loader.close()


def lose(iterator: Any, worker: int) -> None:
    """Kill a worker, or abandon it as one that hangs, and wait until that is known."""
    processes = inside.engine(iterator).pool.processes
    wait_until(lambda: worker in processes)  # the last one's successor may be on its way
    before = processes[worker]
    if not before.is_alive:  # it was lost after its last batch, and the epoch needs it no more
        return
    if before.pid == os.getpid():
        portal = inside.engine(iterator).portal
        portal.call(abandon, inside.engine(iterator), worker).result()
    else:
        kill(iterator, worker)
        wait_until(lambda: not before.is_alive)


def abandon(session: Any, worker: int) -> None:
    """Do to a worker thread what an orderly death would be, on the loop."""
    process = session.pool.processes[worker]
    process.kill()
    session.on_died(worker, process)


@pytest.mark.parametrize("kind", [Declared, OfIterator, Threaded])
def test_who_dies_at_the_end_of_its_data_is_there_in_the_next_epoch(kind: Any, folder: Path) -> None:
    """Killed when everything was handed over, and when the other workers still have something."""
    expected = undisturbed(kind, folder)
    loader = make_loader(kind, folder, persistent_workers=True)
    for _ in range(2):
        iterator: Any = iter(loader)
        found = [plain(batch) for batch in iterator]
        assert found == expected
        for worker in (0, 1):
            lose(iterator, worker)
        del iterator
    loader.close()
