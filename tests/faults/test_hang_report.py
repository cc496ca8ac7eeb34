"""A batch that has not come for long: the log says what it waits for, with no option set."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader
from asyncloader.backends.worker import Worker
from asyncloader.engine import hang_report
from asyncloader.errors import LoaderClosedError
from asyncloader.observe.meter import Meter
from asyncloader.online import Feed
from asyncloader.run import plan
from tests.support.patience import until, wait_until
from tests.test_arriving_keys import Fed

pytestmark = pytest.mark.usefixtures("patient_stacks")

FACES = ["for", "async for"]
BACKENDS = ["process", "thread"]


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a wait be too long after a second."""
    monkeypatch.setattr(hang_report, "LOOK_S", 0.1)
    for module in (hang_report, plan):
        monkeypatch.setattr(module, "FIRST_S", 1.0)


class Gated(Dataset[int]):
    """Does not come back from sample 5 while there is no such file."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.wait_for_the_gate()
        return index

    def wait_for_the_gate(self) -> None:
        """Hang."""
        while not self._gate.exists():
            time.sleep(0.01)


class Busy(Gated):
    """Computes most of the time, for as long as there is no such file."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        while not self._gate.exists():
            sum(range(100_000))
            time.sleep(0.003)
        return index


class GatedStream(IterableDataset[int]):
    """Hangs likewise."""

    def __init__(self, gate: Path) -> None:
        self._gated = Gated(gate)

    def __iter__(self) -> Iterator[int]:
        return (self._gated[index] for index in range(16))


class GatedAsync:
    """Hangs in an await."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def __len__(self) -> int:
        return 16

    async def __getitem__(self, index: int) -> int:
        while index == 5 and not self._gate.exists():
            await self.wait_for_the_gate()
        return index

    async def wait_for_the_gate(self) -> None:
        """Hang."""
        await asyncio.sleep(0.01)


class Locked(Dataset[int]):
    """Takes a lock for each sample."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return index


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said of batches that do not come."""
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [message for message in messages if "for a batch that has not come" in message]


async def epoch(loader: Any, face: str) -> list[Any]:
    """Take all batches, in another thread, or on this loop."""
    if face == "for":
        return await asyncio.to_thread(list, loader)
    return [batch async for batch in loader]


async def taken_at_last(loader: Any, face: str, gate: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Take an epoch that hangs until the hang was reported; return the only report."""
    task = asyncio.create_task(epoch(loader, face))
    await until(lambda: reports(caplog) or task.done())
    await asyncio.sleep(0.3)
    gate.touch()  # noqa: ASYNC240
    batches = await task
    assert sorted(index for batch in batches for index in batch.tolist()) == list(range(len(loader.dataset)))
    (report,) = reports(caplog)
    return report


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_report_names_worker_batch_and_place(
    backend: Any, face: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And what the worker does for the kernel, if it is a process. The run goes on as if nothing had been."""
    loader = DataLoader(Gated(tmp_path / "gate"), batch_size=4, num_workers=2, worker_backend=backend)
    report = await taken_at_last(loader, face, tmp_path / "gate", caplog)
    assert "The awaited batch has the indices [4, 5, 6, 7]; worker 1 (pid " in report
    assert "in wait_for_the_gate" in report
    assert ("s of CPU time in the last second" in report) == (backend == "process")


@pytest.mark.parametrize("face", FACES)
async def test_the_worker_of_a_stream(face: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its batches have no indices."""
    stream = GatedStream(tmp_path / "gate")
    task = asyncio.create_task(epoch(DataLoader(stream, batch_size=4, num_workers=1), face))
    await until(lambda: reports(caplog) or task.done())
    (tmp_path / "gate").touch()
    assert len(await task) == 4
    (report,) = reports(caplog)
    assert "is of an iterable dataset; worker 0" in report
    assert "in wait_for_the_gate" in report


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("face", FACES)
async def test_an_await_that_does_not_end(
    face: str, num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the loop of a worker, or on ours."""
    dataset: Any = GatedAsync(tmp_path / "gate")
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers)
    report = await taken_at_last(loader, face, tmp_path / "gate", caplog)
    assert "wait_for_the_gate" in report


def test_a_lock_that_another_thread_held_at_the_fork(caplog: pytest.LogCaptureFixture) -> None:
    """The report shows the place, that the worker lacks threads, and the line to write."""
    dataset, is_held = Locked(), threading.Event()

    def hold() -> None:
        with dataset.lock:
            is_held.set()
            wait_until(lambda: reports(caplog))

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(20)
    iterator = iter(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))
    consumer = threading.Thread(target=suppressed, args=(iterator,))
    consumer.start()
    thread.join()
    iterator.close()
    consumer.join()
    (report,) = reports(caplog)
    assert "in __getitem__" in report
    assert "It sleeps" in report
    assert "has used 0.0" in report
    assert 'multiprocessing_context="forkserver"' in report


def test_a_worker_that_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not idle, and so no thread is to blame."""
    iterator = iter(DataLoader(Busy(tmp_path / "gate"), num_workers=1))
    opener = threading.Thread(target=lambda: (wait_until(lambda: reports(caplog)), (tmp_path / "gate").touch()))
    opener.start()
    assert next(iterator).tolist() == [0]
    opener.join()
    iterator.close()
    (report,) = reports(caplog)
    assert "forkserver" not in report
    assert float(report.partition("has used ")[2].partition(" s of CPU")[0]) > 0


def test_what_is_told_of_a_process() -> None:
    """Each state has its words; the fork is named only where it may be the cause."""
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def told(*, was_forked: bool) -> str:
        now = hang_report.activity(stopped.pid)
        return hang_report.describe(stopped.pid, now, now, was_forked=was_forked)

    try:
        wait_until(lambda: "It sleeps" in told(was_forked=False))
        stopped.send_signal(signal.SIGSTOP)
        words = f"kill -CONT {stopped.pid}"
        wait_until(lambda: words in told(was_forked=True))
        assert "forkserver" not in told(was_forked=True)
    finally:
        stopped.kill()
        stopped.wait()
    assert told(was_forked=True) == ""
    assert hang_report.describe(os.getpid(), None, hang_report.activity(os.getpid()), was_forked=True) == ""


def test_nothing_is_looked_up_of_a_worker_on_another_machine(caplog: pytest.LogCaptureFixture) -> None:
    """Its number may be that of any process here."""
    worker = Worker(0, None)  # type: ignore[arg-type]
    worker.pid = os.getppid()
    worker.ask_stack = lambda ticket, tell: tell("")  # type: ignore[method-assign]
    ticket = SimpleNamespace(worker=0, batch=0, keys=[1])
    scheduler = SimpleNamespace(awaited=lambda: ticket)
    run: Any = SimpleNamespace(scheduler=scheduler, named=lambda ticket: ticket, meter=Meter(0, 1, 2))
    pool: Any = SimpleNamespace(processes={0: worker})
    hang_report.report(run, pool, 60.0, lambda delay_s, call, *args: call(*args))  # type: ignore[arg-type,return-value]
    (report,) = reports(caplog)
    assert "CPU time" not in report


def suppressed(iterator: Iterator[Any]) -> None:
    """Take a batch that does not come."""
    with pytest.raises(LoaderClosedError):
        next(iterator)


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_keys_that_come_late_are_no_hang(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is known of where they come from, and so nothing is said."""
    fed = Fed()
    iterator = iter(DataLoader(fed, batch_size=1, num_workers=num_workers))
    task = asyncio.create_task(anext(iterator))
    await asyncio.sleep(2.5)
    assert not caplog.records
    fed.line.put(3)
    await task
    await iterator.aclose()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_leased", [False, True])
async def test_a_feed_says_that_nobody_produces(
    is_leased: bool, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said while a producer is at work on a lease, for however long."""
    feed: Feed[int] = Feed(range(8), batch_size=2)
    async with contextlib.AsyncExitStack() as leases:
        if is_leased:
            await leases.enter_async_context(feed.lease())
        task = asyncio.create_task(anext(iter(DataLoader(feed, num_workers=num_workers))))
        await asyncio.sleep(2.5)
        assert [("no producer has a lease" in each) for each in reports(caplog)] == [True] * (not is_leased)
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await task


async def test_a_trainer_that_trains_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    """However long a step takes; and nothing is asked when nobody waits."""
    iterator = iter(DataLoader(range(8), batch_size=2, num_workers=1))  # type: ignore[arg-type]
    await anext(iterator)
    await asyncio.sleep(2.5)
    assert not caplog.records
    assert len([batch async for batch in iterator]) == 3
