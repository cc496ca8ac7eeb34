"""Workers that die at work: nothing is lost, nothing is delivered twice, and what is raised says what happened."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader, WorkerDiedError
from asyncloader.errors import WorkerStartError
from asyncloader.worker import bootstrap
from tests.faults.datasets import DEATHS, Augmented, Deadly, deaths, plain
from tests.support import effort, inside
from tests.support.nursery import Program
from tests.support.patience import Stopwatch

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning"
)  # more workers than processors


def epoch(dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of one epoch, and in the place of a batch the error that was raised."""
    torch.manual_seed(7)
    batches: list[Any] = []
    iterator = iter(DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, **options))
    while True:
        try:
            batches.append(plain(next(iterator)))
        except StopIteration:
            return batches
        except RuntimeError as error:
            batches.append(error)


@pytest.mark.parametrize(
    "death",
    [pytest.param(death, marks=() if death in ("SIGKILL", "sys.exit") else pytest.mark.slow) for death in DEATHS],
)
def test_an_epoch_with_a_death_is_bit_identical(death: str, tmp_path: Path) -> None:
    """With on_crash="retry" nothing can be seen of a death, not even in random augmentation."""
    undisturbed = epoch(Augmented(40))
    assert epoch(Deadly(40, tmp_path, death, at=(13,))) == undisturbed
    assert len(deaths(tmp_path)) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
@pytest.mark.parametrize("prefetch_factor", [1, 4])
def test_many_deaths_are_recovered(scheduling: str, prefetch_factor: int, tmp_path: Path) -> None:
    """Deaths of both workers, several in a row, at the first and at the last batch."""
    options = {"scheduling": scheduling, "prefetch_factor": prefetch_factor}
    undisturbed = epoch(Augmented(40), **options)
    assert (
        epoch(Deadly(40, tmp_path, "SIGKILL", at=(0, 1, 2, 19, 39), times=2), max_retries=20, **options) == undisturbed
    )
    assert len(deaths(tmp_path)) == 10


@pytest.mark.slow
@pytest.mark.parametrize("death", ["SIGKILL", "os._exit", "sys.exit"])
def test_deaths_under_every_start_method(death: str, start_method: str, tmp_path: Path) -> None:
    """A worker is replaced by one that is started in the same way."""
    undisturbed = epoch(Augmented(16))
    assert epoch(Deadly(16, tmp_path, death, at=(5,)), multiprocessing_context=start_method) == undisturbed
    assert len(deaths(tmp_path)) == 1


def test_out_of_order_delivery_survives_deaths(tmp_path: Path) -> None:
    """With in_order=False every batch comes exactly once, whatever dies."""
    undisturbed = epoch(Augmented(40))
    disturbed = epoch(Deadly(40, tmp_path, "SIGKILL", at=(3, 17)), in_order=False)
    assert sorted(disturbed) == sorted(undisturbed)


def test_kills_from_outside_at_any_moment() -> None:
    """Workers killed at random moments, at work or idle, while starting or ending: the epoch is the same."""
    length = 120 if effort.is_quick else 240
    undisturbed = epoch(Augmented(length))
    torch.manual_seed(7)
    iterator = iter(DataLoader(Augmented(length), batch_size=4, shuffle=True, num_workers=2, max_retries=1000))
    ended = threading.Event()
    chance = random.Random(3)

    def kill_now_and_then() -> None:
        starting = 0
        while not ended.wait(chance.random() * 0.05):
            process = chance.choice(list(inside.engine(iterator).pool.processes.values()))
            # One that has not come up twice in a row would be taken for one that cannot.
            starting = 0 if process.is_ready else starting + 1
            if process.is_alive and starting < 2:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        batches = []
        for batch in iterator:
            batches.append(plain(batch))
            if len(batches) % 10 == 0:
                time.sleep(0.01)  # a step of training
    finally:
        ended.set()
        killer.join()
    assert batches == undisturbed


@pytest.mark.parametrize("death", DEATHS)
def test_a_death_is_raised_with_all_that_is_known(death: str, tmp_path: Path) -> None:
    """With on_crash="raise": pid, exit code or signal, indices, torch's words; then the epoch goes on."""
    dataset = Deadly(16, tmp_path, death, at=(5,))
    torch.manual_seed(0)
    options = {"on_crash": "raise", "prefetch_factor": 1, "max_buffered_bytes": 0}  # nothing is queued behind the batch
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=1, **options))  # type: ignore[arg-type]
    assert next(iterator)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    error = caught.value
    ((_, pid, _),) = deaths(tmp_path)
    exitcode = DEATHS[death][1]
    assert (error.pid, error.exitcode) == (pid, exitcode)
    assert error.keys[0] == [4, 5, 6, 7]
    assert "[4, 5, 6, 7]" in str(error)
    words = f"DataLoader worker (pid {pid}) "
    if exitcode < 0:
        words += f"is killed by signal: {signal.strsignal(-exitcode)}"
    else:
        words += f"exited unexpectedly with exit code {exitcode}"
    assert words in str(error)
    if death == "segmentation fault":
        assert "datasets.py" in error.output
        assert "in __getitem__" in str(error)
    del caught, error
    assert [batch[0].tolist() for batch in iterator] == [[8, 9, 10, 11], [12, 13, 14, 15]]


def _exit(text: Any, *_: Any) -> None:
    sys.exit(text)


class Exits(Dataset[int]):
    """Leaves the interpreter with a text."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        _exit("no disk at /data")
        return index


class ExitsAsync(Exits):
    """While it is awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        _exit("no disk at /data")
        return index


class ExitsStream(IterableDataset[int]):
    """When it is read."""

    def __iter__(self) -> Iterator[int]:
        _exit("no disk at /data")
        yield 1


class Ends(BaseException):
    """Is no Exception, and no exit."""


class Raises(Exits):
    """Raises what is no Exception."""

    def __getitem__(self, index: int) -> int:
        raise Ends("no disk at /data")


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Exits(), {}),
        (ExitsAsync(), {}),
        (ExitsStream(), {}),
        (Raises(), {}),
        (range(4), {"worker_init_fn": partial(_exit, "no disk at /data")}),
        (range(4), {"collate_fn": partial(_exit, "no disk at /data")}),
        (range(4), {"collate_fn": partial(_exit, {"disk": "no disk at /data"})}),
    ],
    ids=["sample", "awaited sample", "stream", "other exception", "worker_init_fn", "collate_fn", "no text"],
)
def test_the_text_of_an_exit_is_told(dataset: Any, options: dict[str, Any], start_method: str) -> None:
    """Wherever a worker leaves, the error has the text, and the user's line that said so."""
    loader = DataLoader(
        dataset,
        num_workers=1,
        on_crash="raise",
        multiprocessing_context=start_method,
        **options,  # type: ignore[arg-type]
    )
    with pytest.raises((WorkerDiedError, WorkerStartError)) as caught:
        list(loader)
    text = str(caught.value)
    assert "exited unexpectedly with exit code 1" in text
    assert "no disk at /data" in text
    assert "Last words" in text
    assert "test_deaths.py" in text
    assert "asyncloader/worker/" not in text


def test_a_death_names_all_batches_that_it_cost(tmp_path: Path) -> None:
    """With on_crash="raise" each index is delivered or named in the error, the batch in work first."""
    dataset = Deadly(32, tmp_path, "SIGKILL", at=(8,))
    batches = []
    lost: list[Any] = []
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=2, on_crash="raise", prefetch_factor=3))
    while True:
        try:
            batches += next(iterator)[0].tolist()
        except StopIteration:
            break
        except WorkerDiedError as error:
            named = error.keys
            lost += [key for keys in error.keys for key in keys]
    assert named[0] == [8, 9, 10, 11]
    assert batches == sorted(batches)
    assert sorted(batches + lost) == list(range(32))


@pytest.mark.parametrize("child", [False, True], ids=["alone", "with a child left behind"])
@pytest.mark.parametrize("death", ["SIGKILL", "os._exit"])
def test_a_death_is_known_within_100_ms(death: str, child: bool, tmp_path: Path) -> None:
    """The error comes within 100 ms of the death, also when a child holds copies of the worker's pipes.

    Best of five, without the time for which this process waits for a processor.
    """
    delays = []
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        iterator = iter(DataLoader(Deadly(1, folder, death, at=(0,), child=child), num_workers=1, on_crash="raise"))
        watch = Stopwatch()
        with pytest.raises(WorkerDiedError):
            next(iterator)
        now = time.monotonic() - watch.delayed_s()
        ((ended, _, pid),) = deaths(folder)
        iterator.close()
        assert not child or is_gone(pid, 2.0)
        delays.append(now - ended)
        if delays[-1] < 0.1:
            return
    pytest.fail(f"{[round(delay * 1000) for delay in delays]} ms")


def is_gone(pid: int, timeout_s: float) -> bool:
    """Whether a process that is not our child ends within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.005)
    return False


def test_a_skipped_batch_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With on_crash="skip" just the batch that killed its worker is missing."""
    undisturbed = epoch(Augmented(40))
    disturbed = epoch(Deadly(40, tmp_path, "SIGKILL", at=(13,)), on_crash="skip")
    (missing,) = [batch for batch in undisturbed if batch not in disturbed]
    assert 13 in missing[0]
    assert disturbed == [batch for batch in undisturbed if batch != missing]
    died, left_out = [record.getMessage() for record in caplog.records]
    assert "SIGKILL" in died
    assert f"indices {missing[0]} is left out" in left_out


def test_a_storm_of_deaths_backs_off(tmp_path: Path) -> None:
    """Worker after worker with no batch between them: each start waits longer than the one before."""
    dataset = Deadly(9, tmp_path, "os._exit", at=tuple(range(9)))
    assert [int(batch[0]) for batch in DataLoader(dataset, num_workers=1, on_crash="skip")] == []
    times = sorted(when for when, _, _ in deaths(tmp_path))
    pauses = [later - earlier for earlier, later in pairwise(times)]
    for pause, least in zip(pauses[3:], (0.02, 0.04, 0.08, 0.16, 0.32), strict=True):
        assert pause > least


def test_skipping_every_batch_comes_to_the_end(tmp_path: Path) -> None:
    """A window full of batches that are skipped is read on, and the loop ends."""
    dataset = Deadly(12, tmp_path, "os._exit", at=tuple(range(12)), times=100)
    assert epoch(dataset, on_crash="skip", prefetch_factor=1) == []


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_batch_that_always_kills_ends_in_an_error(max_retries: int, tmp_path: Path) -> None:
    """After max_retries the error stands in the place of the batch, and the rest follows."""
    undisturbed = epoch(Augmented(40))
    disturbed = epoch(Deadly(40, tmp_path, "SIGKILL", at=(13,), times=100), max_retries=max_retries)
    (place,) = [i for i, batch in enumerate(disturbed) if isinstance(batch, WorkerDiedError)]
    error = disturbed[place]
    assert [error.keys] == [[undisturbed[place][0]]]
    assert (f"tried {max_retries + 1} times" in str(error)) == (max_retries > 0)
    assert disturbed[:place] + disturbed[place + 1 :] == undisturbed[:place] + undisturbed[place + 1 :]
    assert len(deaths(tmp_path)) == max_retries + 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("on_crash", ["retry", "raise", "skip"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_that_never_come_up_end_in_an_error(on_crash: str, num_workers: int, tmp_path: Path) -> None:
    """A worker_init_fn that always crashes: WorkerStartError after a bounded number of tries, then the end."""

    def crash(worker: int) -> None:
        (tmp_path / f"{os.getpid()}").touch()
        os._exit(7)

    errors = []
    loader = DataLoader(range(100), num_workers=num_workers, worker_init_fn=crash, on_crash=on_crash)  # type: ignore[arg-type]
    iterator = iter(loader)
    while True:
        try:
            next(iterator)
        except StopIteration:
            break
        except RuntimeError as error:
            errors.append(error)
    assert isinstance(errors[-1], WorkerStartError)
    assert "exit code 7" in str(errors[-1])
    assert len(errors) == 1 or on_crash == "raise"
    assert len(list(tmp_path.iterdir())) <= 2 * num_workers + 3


class DieOnce:
    """A worker_init_fn that ends the first process that calls it."""

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "died"

    def __call__(self, worker: int) -> None:
        if not self.flag.exists():
            self.flag.touch()
            os._exit(7)


def test_a_worker_that_is_gone_before_it_is_known_is_replaced(
    start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended, and the program or the fork server has reaped it, before anybody could open its pidfd."""
    open_pidfd, was_gone = os.pidfd_open, []

    def when_gone(pid: int, flags: int = 0) -> int:
        if not was_gone:
            deadline = time.monotonic() + 60
            if start_method != "fork":  # it comes to its initialisation later, with its first message
                os.kill(pid, signal.SIGKILL)
            if start_method != "forkserver":
                os.waitpid(pid, 0)
            while psutil.pid_exists(pid) and time.monotonic() < deadline:
                time.sleep(0.001)
            was_gone.append(not psutil.pid_exists(pid))
        return open_pidfd(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", when_gone)
    options: Any = {"worker_init_fn": DieOnce(tmp_path), "multiprocessing_context": start_method}
    loader = DataLoader(range(40), num_workers=1, **options)
    assert [int(batch) for batch in loader] == list(range(40))
    assert was_gone == [True]


def test_one_worker_that_never_comes_up_ends_in_an_error() -> None:
    """What the other worker made comes, and the error; nobody waits for ever."""

    def crash(worker: int) -> None:
        if worker == 1:
            os._exit(7)

    batches: list[int] = []
    iterator = iter(DataLoader(range(100), num_workers=2, worker_init_fn=crash))  # type: ignore[arg-type]
    with pytest.raises(WorkerStartError, match="exit code 7"):
        batches.extend(int(batch) for batch in iterator)
    batches += [int(batch) for batch in iterator]
    assert batches == list(range(0, 2 * len(batches), 2))


@pytest.mark.forked("what is patched in this process holds in its workers")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_worker_that_cannot_be_set_up_says_why(
    num_workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ImportError before any of the user's code is told as what it is, and nothing is tried again."""

    def cannot_import(importing: frozenset[str]) -> None:
        raise ImportError("no such library here")

    monkeypatch.setattr(bootstrap, "forget_imports_of_others", cannot_import)
    iterator = iter(DataLoader(range(100), num_workers=num_workers))  # type: ignore[arg-type]
    with pytest.raises(WorkerStartError) as caught:
        next(iterator)
    text = str(caught.value)
    assert "could not be set up" in text
    assert text.count("ImportError: no such library here") == 1
    assert "collate_fn" not in text + caplog.text
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_a_main_module_that_cannot_be_imported_again(start_method: str, run: Callable[..., Program]) -> None:
    """Whoever imports it, a worker or from Python 3.14 on the fork server, writes the traceback to stderr."""
    program = run(f"""
from asyncloader import DataLoader
from asyncloader.errors import WorkerStartError
if __name__ == '__mp_main__':
    raise ImportError('no such library here')
if __name__ == '__main__':
    try:
        list(DataLoader(range(100), num_workers=1, multiprocessing_context='{start_method}'))
    except WorkerStartError as error:
        print(error)
""")
    assert "ImportError: no such library here" in program.err
    assert 'program_0.py", line 5' in program.err
    assert "stderr" in program.out
    assert '`if __name__ == "__main__"' in program.out
    assert "collate_fn" not in program.out + program.err


def test_a_worker_that_cannot_be_replaced_leaves_its_work_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the system has no room for another process, the healthy worker makes what is left, and a warning says so."""
    dataset = Deadly(400, tmp_path, "SIGKILL", at=(200,))  # beyond what is made before somebody takes batches
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=4))

    def refuse(*args: Any) -> None:
        raise WorkerStartError("no room")

    monkeypatch.setattr(inside.engine(iterator).pool, "_starting", refuse)
    assert [int(key) for batch in iterator for key in batch[0]] == list(range(400))
    assert [record.levelname for record in caplog.records if "no room" in record.getMessage()] == ["WARNING"]
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
