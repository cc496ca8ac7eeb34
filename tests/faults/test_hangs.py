"""Workers that hang: with a timeout they are killed and replaced, and the batch is run again or left out."""

from __future__ import annotations

import os
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset

from asyncloader import BatchTimeoutError, DataLoader
from tests.faults.datasets import Augmented, plain
from tests.support.patience import patiently

pytestmark = [
    pytest.mark.usefixtures("patient_stacks"),
    pytest.mark.forked("limits are short: a worker of the fork server imports this module in that time, and pytest"),
]

FACES = ["for", "async for"]
TIMEOUT_S = 1.0
PATIENT: dict[str, Any] = {"timeout": TIMEOUT_S, "on_timeout": "retry", "max_retries": 50}
"""A worker that does not hang may be late too, on a busy machine: that costs a try."""


class Hanging(Augmented):
    """Hangs at some samples, each time or so many times, and notes who hangs.

    Args:
        length: Of the dataset.
        folder: Where a file is made for each time.
        at: Indices of the samples.
        times: How often each of them hangs.
    """

    def __init__(self, length: int, folder: Path, at: set[int], times: int = 1) -> None:
        super().__init__(length)
        self._folder = folder
        self._at = at
        self._times = times

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index in self._at:
            number = len(list(self._folder.glob(f"{index}-*")))
            if number < self._times:
                (self._folder / f"{index}-{number}").write_text(str(os.getpid()))
                self.hang()
        return sample

    def hang(self) -> None:
        """Never come back."""
        threading.Event().wait()


def pids(folder: Path) -> list[int]:
    """Return who hung."""
    return [int(path.read_text()) for path in folder.iterdir()]


async def epoch(dataset: Any, face: str = "for", **options: Any) -> list[Any]:
    """Return the batches of one epoch, and in the place of a batch the error that was raised."""
    torch.manual_seed(7)
    batches: list[Any] = []
    async with iter(DataLoader(dataset, batch_size=4, num_workers=2, **options)) as iterator:
        while True:
            try:
                batches.append(plain(next(iterator) if face == "for" else await anext(iterator)))
            except (StopIteration, StopAsyncIteration):
                return batches
            except BatchTimeoutError as error:
                batches.append(error)


@pytest.mark.parametrize("face", FACES)
async def test_a_batch_that_hung_is_run_again(face: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The epoch is bit-identical to one without the hang; who hung is gone, and the log says where it hung."""
    undisturbed = await epoch(Augmented(40))
    dataset = Hanging(40, tmp_path, {13, 22})
    assert await epoch(dataset, face, **PATIENT) == undisturbed
    hung = pids(tmp_path)
    assert len(set(hung)) == 2
    assert not any(psutil.pid_exists(pid) for pid in hung)
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("in hang" in warning for warning in warnings) == 2
    assert all("It is killed and replaced" in warning for warning in warnings)


async def test_closing_waits_until_the_killed_are_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the executor's thread comes to it."""
    is_alive = BaseProcess.is_alive

    def look_late(process: BaseProcess) -> bool:
        if process.pid in pids(tmp_path):
            threading.Event().wait(0.5)
        return is_alive(process)

    monkeypatch.setattr(BaseProcess, "is_alive", look_late)
    await epoch(Hanging(24, tmp_path, {5}), **PATIENT)
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


async def test_a_batch_that_hung_is_left_out(tmp_path: Path) -> None:
    """With on_timeout="skip" just that batch is missing."""
    undisturbed = await epoch(Augmented(40))
    disturbed = await epoch(Hanging(40, tmp_path, {13}, 9), timeout=TIMEOUT_S, on_timeout="skip")
    assert disturbed == undisturbed[:3] + undisturbed[4:]


async def test_a_batch_that_always_hangs_ends_in_an_error(tmp_path: Path) -> None:
    """After max_retries the error stands in its place, with indices, pid, stack and tries; the rest follows."""
    undisturbed = await epoch(Augmented(24))
    dataset = Hanging(24, tmp_path, {13}, 9)
    disturbed = await epoch(dataset, timeout=TIMEOUT_S, on_timeout="retry", max_retries=1)
    error = disturbed[3]
    assert isinstance(error, BatchTimeoutError)
    assert error.keys == [12, 13, 14, 15]
    assert error.pid == int((tmp_path / "13-1").read_text())
    assert "given up after 2 tries" in str(error)
    assert "in hang" in error.stack
    assert disturbed[:3] + disturbed[4:] == undisturbed[:3] + undisturbed[4:]


def test_several_who_wait_have_a_worker_replaced_once(tmp_path: Path) -> None:
    """Each consumer has a clock of its own, but a batch is tried again once for all of them."""
    dataset = Hanging(24, tmp_path, {0})
    loader = DataLoader(dataset, batch_size=4, num_workers=2, timeout=TIMEOUT_S, on_timeout="retry", max_retries=1)
    iterator = iter(loader)
    taken: list[list[int]] = []
    threads = [threading.Thread(target=lambda: taken.extend(batch[0].tolist() for batch in iterator)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(taken) == [list(range(i, i + 4)) for i in range(0, 24, 4)]
    assert len(list(tmp_path.iterdir())) == 1


class HangingStream(IterableDataset[int]):
    """A generator that hangs."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __iter__(self) -> Any:
        yield 0
        while not self.gate.exists():
            threading.Event().wait(0.01)
        yield 1


def test_a_stream_that_hangs_is_not_thrown_away(tmp_path: Path) -> None:
    """Its position would be lost: the error says so, and the next call waits for the same batch."""
    gate = tmp_path / "gate"
    loader = DataLoader(HangingStream(gate), num_workers=1, timeout=TIMEOUT_S, on_timeout="retry")
    iterator = iter(loader)
    assert int(next(patiently(iterator))) == 0
    with pytest.raises(BatchTimeoutError) as caught:
        next(iterator)
    assert "nobody knows where it was in its iterable dataset" in caught.value.__notes__[0]
    gate.touch()
    assert [int(batch) for batch in patiently(iterator)] == [1]
