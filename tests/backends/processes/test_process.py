"""How workers are started, and what reaches them: under fork, forkserver and spawn."""

from __future__ import annotations

import asyncio
import concurrent.futures.process
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from asyncloader import DataLoader
from asyncloader.backends.processes import pool, process
from asyncloader.backends.worker import WorkerState
from asyncloader.engine.portal import get_portal
from asyncloader.errors import LoaderClosedError, WorkerDiedError
from tests.support import inside


class Squares(Dataset[int]):
    """Known to workers by its name."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index**2


def squares_of(loader: DataLoader[Any]) -> list[int]:
    """Return all numbers of an epoch."""
    return [int(number) for batch in loader for number in batch]


@pytest.mark.slow
def test_functions_and_classes_of_any_kind(start_method: str) -> None:
    """Lambdas, closures, and classes that nobody else can import."""
    offset = 5

    class Local(Squares):
        def __getitem__(self, index: int) -> int:
            return index + offset

    seen = []
    loader: DataLoader[Any] = DataLoader(
        Local(),
        batch_size=4,
        num_workers=2,
        collate_fn=lambda samples: [sample * 2 for sample in samples],
        worker_init_fn=lambda worker: seen.append(worker),
        multiprocessing_context=start_method,
    )
    assert squares_of(loader) == [(index + offset) * 2 for index in range(8)]
    assert seen == []


def test_executors_that_python_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit hook may run just after ours, and a thread that trains on come in between: workers start."""
    monkeypatch.setattr(concurrent.futures.process, "_global_shutdown", True)
    assert squares_of(DataLoader(Squares(), num_workers=2)) == [index**2 for index in range(8)]


class Odd:
    """Refuses to be pickled, but by a reducer that is registered with multiprocessing's pickler."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("pickled by nobody who does not know how")


def reduce_odd(odd: Odd) -> Any:
    assert get_spawning_popen() is not None
    return Odd, (odd.number,)


class Sharing(Squares):
    """Writes what it is asked for into memory of several kinds that the trainer looks at."""

    def __init__(self, context: Any) -> None:
        self.value = context.Value("i", 0)
        self.raw = context.RawArray("i", 8)
        self.tensor = torch.zeros(8).share_memory_()
        self.view = self.tensor[2:]
        self.odd = Odd(3)

    def __getitem__(self, index: int) -> int:
        with self.value.get_lock():
            self.value.value += 1
        self.raw[index] = index
        self.tensor[index] = index
        if index == 7:
            self.view[0] = self.odd.number
        return index


@pytest.mark.parametrize("by_value", [False, True], ids=["by reference", "by value"])
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_what_is_shared_stays_shared(method: str, by_value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, raw memory, tensors; also with a lambda beside them, which plain pickle refuses.

    So multiprocessing's reducers are used whoever pickles, those that users register among them.
    """
    monkeypatch.setitem(ForkingPickler._extra_reducers, Odd, reduce_odd)  # type: ignore[attr-defined]
    context = multiprocessing.get_context(method)
    dataset = Sharing(context)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        num_workers=1,
        multiprocessing_context=context,
        collate_fn=(lambda samples: samples) if by_value else None,
    )
    assert squares_of(loader) == list(range(8))
    assert dataset.value.value == 8
    assert list(dataset.raw) == list(range(8))
    assert dataset.tensor.tolist() == [0, 1, 3, 3, 4, 5, 6, 7]


class Sends(Squares):
    """Says who makes its samples, through a pipe."""

    def __init__(self, context: Any) -> None:
        self.reader, self.writer = context.Pipe(duplex=False)
        self.lock = context.Lock()

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.writer.send(os.getpid())
        return super().__getitem__(index)


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_each_worker_is_given_the_descriptors_of_the_dataset(method: str) -> None:
    """It was pickled once; and the trainer keeps no copies of them when the workers have gone."""
    context = multiprocessing.get_context(method)
    dataset = Sends(context)
    assert squares_of(DataLoader(dataset, num_workers=2, multiprocessing_context=context)) == [n**2 for n in range(8)]
    assert len({dataset.reader.recv() for _ in range(8)}) == 2


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_zeros_without_memory(method: str) -> None:
    """Forward-mode gradients and the backward of some functions are such; torch refuses to pickle them."""
    zeros = torch._efficientzerotensor((4, 3))
    loader = DataLoader(TensorDataset(zeros, torch.arange(4)), num_workers=1, multiprocessing_context=method)
    found = [torch.cat(column) for column in zip(*loader, strict=True)]
    assert [column.tolist() for column in found] == [[[0.0] * 3] * 4, [0, 1, 2, 3]]


def test_the_worker_knows_who_it_is() -> None:
    """torch's worker info, one thread, in a process of its own that is its group's leader."""

    class Asking(Squares):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert info is not None
            leads = os.getpgid(0) == os.getpid()
            return info.id, info.num_workers, info.seed, len(info.dataset), os.getpid(), leads, torch.get_num_threads()

    torch.manual_seed(3)
    base_seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(3)
    iterator = iter(DataLoader(Asking(), num_workers=2, collate_fn=lambda samples: samples[0]))
    pids = inside.pids(iterator)
    samples = list(iterator)
    assert samples == [(i % 2, 2, base_seed + i % 2, 8, pids[i % 2], True, 1) for i in range(8)]
    assert get_worker_info() is None


def test_a_dataset_that_cannot_be_pickled() -> None:
    """Under spawn: torch's warning, then what pickling raised; no process was started."""

    class Locked(Squares):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    loader = DataLoader(Locked(), num_workers=2, multiprocessing_context="spawn")
    with (
        pytest.warns(UserWarning, match="Got pickle error when attempting to start a worker Process") as caught,
        pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"),
    ):
        iter(loader)
    assert [warning.filename for warning in caught] == [__file__]  # the user's line


async def test_a_dataset_that_cannot_be_pickled_async() -> None:
    """By the other face, at once as well."""

    class Locked(Squares):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    loader = DataLoader(Locked(), num_workers=2, multiprocessing_context="forkserver")
    with (
        pytest.warns(UserWarning, match="Got pickle error") as caught,
        pytest.raises(TypeError, match="cannot pickle"),
    ):
        aiter(loader)
    assert [warning.filename for warning in caught] == [__file__]


class Unready(Squares):
    """Cannot be unpickled while a file is there."""

    def __init__(self, obstacle: Path) -> None:
        self.obstacle = obstacle

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self.obstacle.exists():
            raise ConnectionError("no such database")


def test_a_dataset_that_cannot_be_unpickled_is_told_of_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By what it raised, and where; not by each worker, nor on stderr. The next run works where that was put right."""
    (tmp_path / "obstacle").touch()
    loader = DataLoader(Unready(tmp_path / "obstacle"), num_workers=2, multiprocessing_context="forkserver")
    with pytest.raises(ConnectionError, match="no such database") as caught:
        squares_of(loader)
    assert "The worker was unpickling the dataset and the functions that it needs." in caught.value.__notes__
    assert "__setstate__" in str(caught.value.__cause__)
    (tmp_path / "obstacle").unlink()
    assert squares_of(loader) == [index**2 for index in range(8)]
    assert capfd.readouterr().err == ""


class Gate:
    """Holds up what launches workers that are not forked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        launch_all = process.launch_all

        def launch_late(context: Any, launches: Any) -> None:
            if context.get_start_method() != "fork":
                self.reached.set()
                assert self.open.wait(60)
            launch_all(context, launches)

        monkeypatch.setattr(pool, "launch_all", launch_late)


async def test_a_start_that_takes_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `async for`, a fork server that imports for seconds: neither the caller's loop nor other loaders wait."""
    gate = Gate(monkeypatch)
    iterator = aiter(DataLoader(Squares(), batch_size=None, num_workers=1, multiprocessing_context="forkserver"))
    first = asyncio.create_task(anext(iterator))
    await asyncio.to_thread(gate.reached.wait, 60)
    others = DataLoader(Squares(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert [number async for number in others] == [index**2 for index in range(8)]
    assert not first.done()
    gate.open.set()
    assert [await first] + [number async for number in iterator] == [index**2 for index in range(8)]


async def test_other_numbers_of_workers_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the beginning are launched first; then some come or go."""
    gate = Gate(monkeypatch)
    iterator = aiter(DataLoader(Squares(), batch_size=None, num_workers=2, multiprocessing_context="forkserver"))
    await asyncio.to_thread(gate.reached.wait, 60)
    iterator.set_num_workers(1)
    gate.open.set()
    assert [number async for number in iterator] == [index**2 for index in range(8)]


async def test_closed_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are being launched are ended, no others are begun with, and only then it is closed."""
    monkeypatch.setattr(pool, "_AT_ONCE", 1)
    gate = Gate(monkeypatch)
    iterator = aiter(DataLoader(Squares(), num_workers=2, multiprocessing_context="forkserver"))
    await asyncio.to_thread(gate.reached.wait, 60)
    inside.engine(iterator).request_close()
    get_portal().call(lambda: None).result(60)
    assert not inside.engine(iterator)._closed.is_set()
    gate.open.set()
    await iterator.aclose()  # which waits for some seconds only
    await asyncio.to_thread(inside.engine(iterator)._closed.wait, 60)
    assert [worker.is_alive() for worker in inside.workers(iterator)] == [False]
    with pytest.raises(LoaderClosedError):
        await anext(iterator)


@pytest.mark.covering(1)
@pytest.mark.parametrize("error", [ValueError("init"), StopIteration(), KeyError("k")])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_exception_in_worker_init_fn_answers_every_batch(error: Exception, num_workers: int) -> None:
    """As the dataset's would; the workers stay, and end orderly."""

    def init(worker: int) -> None:
        raise error

    iterator = iter(DataLoader(Squares(), batch_size=2, num_workers=num_workers, worker_init_fn=init))
    workers = inside.workers(iterator)
    for _ in range(4):
        with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
            next(iterator)
        assert f"Caught {type(error).__name__} in DataLoader worker process" in "".join(caught.value.__notes__)
        del caught
    assert next(iterator, None) is None
    for worker in workers:
        worker.join(5)
        assert worker.exitcode == 0


SCRIPT = """
import sys
from torch.utils.data import Dataset
from asyncloader import DataLoader

class InMain(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:
            raise OfMain(index)
        return double(index)

class OfMain(Exception):
    pass

def double(number):
    return number * 2

def train(method):
    seen = []
    iterator = iter(DataLoader(InMain(), batch_size=2, num_workers=2, multiprocessing_context=method))
    while True:
        try:
            seen += next(iterator).tolist()
        except OfMain as error:
            seen.append(error.args[0])
        except StopIteration:
            break
    print(seen)

if __name__ == "__main__":
    for method in ("fork", "forkserver", "spawn"):
        train(method)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "module", "-c", "exec"])
def test_what_the_main_program_defines(way: str, tmp_path: Path) -> None:
    """Classes, functions and exceptions of a script, of `python -m`, of `python -c`, of a notebook's cell.

    The trainer's ``except`` knows the exception, for it is the same class again.
    """
    (tmp_path / "program.py").write_text(SCRIPT)
    command = {
        "script": [str(tmp_path / "program.py")],
        "module": ["-m", "program"],
        "-c": ["-c", SCRIPT],
        # What a notebook does: the code of a cell is run in the namespace of a main module that has no file.
        "exec": ["-c", "import sys; exec(compile(sys.stdin.read(), '<cell>', 'exec'), globals())"],
    }[way]
    done = subprocess.run(
        [sys.executable, *command], input=SCRIPT, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 2, 4, 6, 5, 12, 14]\n" * 3, "", 0)


def test_representations(tmp_path: Path) -> None:
    """What a debugger shows: who, where, how far."""
    iterator = iter(DataLoader(Squares(), batch_size=2, num_workers=2))
    session = inside.engine(iterator)
    pids = inside.pids(iterator)
    assert repr(session.pool) == f"<Pool [{', '.join(f'<WorkerProcess {i} pid={pids[i]} RUNNING>' for i in (0, 1))}]>"
    assert repr(session).startswith("<Engine OPEN <Scheduler planned=")
    assert repr(iterator).startswith("<WorkerIterator taken=0 <Engine OPEN")
    iterator.close()
    assert repr(inside.workers(iterator)[0]) == f"<WorkerProcess 0 pid={pids[0]} DEAD>"
    assert repr(session).startswith("<Engine CLOSED")
    assert WorkerState.DEAD in {worker._process.state for worker in inside.workers(iterator)}
    assert isinstance(session.pool, pool.Pool)


def test_workers_begin_before_the_next_ones_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first tickets are in their sockets by then."""
    monkeypatch.setattr(pool, "_AT_ONCE", 1)
    has_begun = multiprocessing.get_context("fork").Event()

    class Telling(Squares):
        def __getitem__(self, index: int) -> int:
            has_begun.set()
            return index

    launch = process.WorkerProcess.launch

    def launch_late(worker: process.WorkerProcess, *args: Any) -> None:
        assert worker.worker_id == 0 or has_begun.wait(20)
        launch(worker, *args)

    monkeypatch.setattr(process.WorkerProcess, "launch", launch_late)
    assert squares_of(DataLoader(Telling(), num_workers=2, multiprocessing_context="fork")) == list(range(8))


@pytest.fixture
def ups(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A semaphore with as many places as workers have been heard to be up, by which nobody takes them for hung."""
    heard = multiprocessing.get_context("fork").Semaphore(0)
    on_up = process.WorkerProcess.on_up

    def hear(worker: process.WorkerProcess) -> None:
        on_up(worker)
        assert worker._up_timer is None or worker._up_timer.cancelled()
        heard.release()

    monkeypatch.setattr(process.WorkerProcess, "on_up", hear)
    return heard


def test_a_worker_is_up_before_its_trainer_has_its_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it says while the thread that forked it waits for a turn is heard: nobody takes it for one that hangs."""
    has_begun = multiprocessing.get_context("fork").Semaphore(0)

    def launch_and_wait(*args: Any) -> None:
        process.launch_all(*args)
        assert [has_begun.acquire(timeout=20) for _ in range(2)] == [True, True]  # they have said that they are up
        time.sleep(0.3)

    monkeypatch.setattr(pool, "launch_all", launch_and_wait)
    monkeypatch.setattr(process, "_UP_S", 0.2)
    options: Any = {"worker_init_fn": lambda worker: has_begun.release()}
    loader = DataLoader(Squares(), num_workers=2, multiprocessing_context="fork", **options)
    assert squares_of(loader) == [index**2 for index in range(8)]
    assert loader.stats().faults.replacements == 0
    assert caplog.text == ""


def test_a_source_that_takes_long_to_open(monkeypatch: pytest.MonkeyPatch, ups: Any) -> None:
    """As on another machine, where forked workers unpickle the dataset: that is the user's code, and may take long."""

    def slow(workers: Any) -> None:
        def opened() -> Any:
            assert ups.acquire(timeout=20)
            return workers._spec

        workers._source = opened

    monkeypatch.setattr(pool.Pool, "pack", slow)
    loader = DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
    assert squares_of(loader) == [index**2 for index in range(8)]
    assert loader.stats().faults.replacements == 0


class Exits(Squares):
    def __getitem__(self, index: int) -> int:
        os._exit(4)


def test_an_exit_code_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server tells it, and has to get a core first."""
    asked, find = 0, process.WorkerProcess._find_exitcode

    def find_late(worker: process.WorkerProcess) -> int | None:
        nonlocal asked
        asked += 1
        return None if asked < 200 else find(worker)

    monkeypatch.setattr(process.WorkerProcess, "_find_exitcode", find_late)
    with pytest.raises(WorkerDiedError) as caught:
        next(iter(DataLoader(Exits(), num_workers=1, on_crash="raise")))
    assert caught.value.exitcode == 4
