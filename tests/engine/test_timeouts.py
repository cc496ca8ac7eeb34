"""The awaited batch does not come in time: an error that says where its worker is, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import BatchTimeoutError, DataLoader
from tests.support import inside
from tests.support.patience import hung, patiently, until

pytestmark = pytest.mark.usefixtures("patient_stacks")

FACES = ["for", "async for"]


class Gated(Dataset[int]):
    """Waits for a file before some sample."""

    def __init__(self, gate: Path, at: int = 6) -> None:
        self._gate = gate
        self._at = at
        self.reached = gate.with_suffix(".reached")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == self._at:
            self.wait_for_the_gate()
        return index

    def wait_for_the_gate(self) -> None:
        """Hang, until the file is there."""
        self.reached.touch()
        while not self._gate.exists():
            time.sleep(0.01)


async def take(iterator: Any, face: str) -> Any:
    """Take the next batch, by either face."""
    return next(iterator) if face == "for" else await anext(iterator)


async def take_at_last(iterator: Any, face: str) -> Any:
    """Take the next batch, however late its worker is."""
    while True:
        with contextlib.suppress(BatchTimeoutError):
            return await take(iterator, face)


@pytest.mark.forked("the timeout is shorter than the import of this module")
@pytest.mark.usefixtures("patient_stacks")
@pytest.mark.parametrize("face", FACES)
async def test_a_timeout_says_all_that_is_known(face: str, tmp_path: Path) -> None:
    """Types, torch's words, indices, the worker's pid and its stack; the next call waits for the same batch."""
    dataset = Gated(tmp_path / "gate")
    loader = DataLoader(dataset, batch_size=4, num_workers=2, timeout=0.6)
    iterator = iter(loader)
    assert (await take_at_last(iterator, face)).tolist() == [0, 1, 2, 3]
    await until(dataset.reached.exists)  # a worker makes it
    took = []
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(BatchTimeoutError) as caught:
            await take(iterator, face)
        took.append(time.monotonic() - begun)
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert isinstance(error, RuntimeError)
        assert "DataLoader timed out after 0.6 seconds" in str(error)
        assert (error.timeout_s, error.keys, error.pid) == (0.6, [4, 5, 6, 7], inside.pids(iterator)[1])
        assert "[4, 5, 6, 7]" in str(error)
        assert f"pid {error.pid}" in str(error)
        assert error.stack in str(error)
        assert "in wait_for_the_gate" in error.stack
        assert "test_timeouts.py" in error.stack
        del caught, error
    assert min(took) >= 0.6
    (tmp_path / "gate").touch()
    for expected in (4, 8, 12):
        assert (await take_at_last(iterator, face))[0] == expected
    with pytest.raises((StopIteration, StopAsyncIteration) if face == "async for" else StopIteration):
        await anext(iterator) if face == "async for" else next(iterator)


def test_a_worker_that_hangs_in_c_code_shows_its_stack(tmp_path: Path) -> None:
    """With the interpreter's lock held, no Python code can run there; the signal's handler writes all the same."""
    import ctypes

    gate = tmp_path / "gate"

    def collate(batch: list[int]) -> list[int]:
        while batch[0] and not gate.exists():  # the signal ends one sleep early
            ctypes.PyDLL(None).usleep(50_000)
        return batch

    iterator = iter(DataLoader(range(4), num_workers=1, collate_fn=collate, timeout=0.2))  # type: ignore[arg-type]
    assert next(patiently(iterator)) == [0]
    hung(iterator, "in collate")
    gate.touch()


def test_several_who_wait_are_all_told(tmp_path: Path) -> None:
    """Each consumer has a clock of its own; the worker is asked once at a time."""
    loader = DataLoader(Gated(tmp_path / "gate", at=4), batch_size=4, num_workers=1, timeout=0.2)
    iterator = iter(loader)
    assert next(patiently(iterator)).tolist() == [0, 1, 2, 3]
    errors: list[BatchTimeoutError] = []

    def wait() -> None:
        errors.append(hung(iterator, "in wait_for_the_gate"))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["in wait_for_the_gate" in error.stack for error in errors] == [True] * 3
    (tmp_path / "gate").touch()
    assert [int(batch[0]) for batch in patiently(iterator)] == [4, 8, 12]


@pytest.mark.parametrize("face", FACES)
async def test_a_wake_up_that_brings_nothing_is_no_timeout(face: str, tmp_path: Path) -> None:
    """Whoever waits looks again, and goes on waiting for as long as before."""
    loader = DataLoader(
        Gated(tmp_path / "gate", at=0), batch_size=4, num_workers=1, worker_backend="thread", timeout=60
    )
    iterator = iter(loader)
    taking = asyncio.create_task(asyncio.to_thread(next, iterator) if face == "for" else take(iterator, face))
    await until(lambda: inside.is_waiting(iterator))
    for _ in range(20):
        inside.run(iterator).handoff.wake()
        await asyncio.sleep(0.005)
    (tmp_path / "gate").touch()
    assert (await taking).tolist() == [0, 1, 2, 3]
    iterator.close()


@pytest.mark.slow
def test_a_worker_that_has_not_come_up_yet_is_left_alone(start_method: str) -> None:
    """The signal that asks for a stack would end a process that is still importing torch."""
    loader = DataLoader(
        range(8),
        batch_size=4,
        num_workers=1,
        timeout=0.02,
        multiprocessing_context=start_method,  # type: ignore[arg-type]
    )
    iterator = iter(loader)
    (pid,) = inside.pids(iterator)
    seen = []
    timeouts = []
    while len(seen) < 2:
        try:
            seen.append(next(iterator).tolist())
        except BatchTimeoutError as error:
            timeouts.append(error)
    assert all(error.stack or "has not come up yet" in str(error) for error in timeouts)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert timeouts or start_method != "spawn"  # a fork server that has imported torch is as quick as a fork
    assert inside.pids(iterator) == [pid]


async def test_the_clock_is_the_consumers_wait(tmp_path: Path) -> None:
    """Time that the consumer spends elsewhere does not count, and neither does what a task waits for."""
    (tmp_path / "gate").touch()
    loader = DataLoader(Gated(tmp_path / "gate"), batch_size=4, num_workers=2, timeout=1.0)
    iterator = aiter(loader)
    seen: list[int] = []
    while len(seen) < 2:  # however long both workers take to start; all batches are under way then
        with contextlib.suppress(BatchTimeoutError):
            seen.append(int((await anext(iterator))[0]))
    async for batch in iterator:
        await asyncio.sleep(1.1)
        seen.append(int(batch[0]))
    assert seen == [0, 4, 8, 12]
