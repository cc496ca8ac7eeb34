"""Workers that are renewed: the data are those of workers that stay, bit for bit, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.backends.processes.pool import Pool
from asyncloader.engine import recovery
from asyncloader.errors import WorkerStartError
from asyncloader.observe import private
from asyncloader.observe.faults import Faults
from asyncloader.observe.private import private_bytes
from tests.support import inside
from tests.support.patience import wait_until
from tests.test_num_workers import LENGTH, Awaited, Counting, Drawing, Gate, Gated, Stream, bits, expected

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture
def by_count() -> Iterator[None]:
    """Have workers be renewed by how much they have made."""
    with inside.renewals_by_count():
        yield


def pids(batches: list[Any]) -> list[int]:
    """Who made each batch."""
    return [int(batch[3][0]) for batch in batches]


def wait_for_renewals(loader: Any, count: int) -> None:
    """Wait until so many have been renewed in this run."""
    wait_until(lambda: loader.stats().workers.renewals >= count)


def _not_here(number: int) -> None:
    raise ValueError(f"key {number} cannot be unpickled")


class Unreadable:
    """A key that pickles, and does not unpickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _not_here, (self.number,)


class SlowEnough(Dataset[int]):
    """Samples that take as long as the start of a process."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.1)
        return index


def test_a_worker_whose_last_ticket_is_refused_is_renewed(by_count: None) -> None:
    """The renewal waits for the end of the last ticket, whatever becomes of it."""
    plan = [[number] if number % 2 == 0 else [Unreadable(number)] for number in range(16)]
    loader = DataLoader(SlowEnough(), batch_sampler=plan, num_workers=1, timeout=20, **inside.renewed_after(2))  # type: ignore[arg-type]
    seen, refused, iterator = [], 0, iter(loader)
    for keys in plan:
        try:
            seen.append(int(next(iterator)))
        except ValueError:
            refused += isinstance(keys[0], Unreadable)
    assert next(iterator, None) is None
    assert (seen, refused) == (list(range(0, 16, 2)), 8)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_data_are_those_of_workers_that_stay(by_count: None, scheduling: Any, in_order: bool) -> None:
    """Many processes, with the same two ids."""
    torch.manual_seed(3)
    options: Any = {"scheduling": scheduling, "in_order": in_order, "max_buffered_bytes": 0, **inside.renewed_after(2)}
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=2, **options)
    iterator = iter(loader)
    seen = []
    for batch in iterator:
        seen.append(batch)
        if len(seen) in (8, 12, 16):
            wait_for_renewals(loader, len(seen) // 4 - 1)
    assert sorted(map(bits, seen)) == sorted(expected())
    if in_order:
        assert [*map(bits, seen)] == expected()
    assert {int(batch[4][0]) for batch in seen} == {0, 1}
    assert {int(count) for batch in seen for count in batch[5]} == {2}
    stats = loader.stats()
    assert len(set(pids(seen))) >= 4
    assert stats.faults == Faults()


def test_workers_that_start_in_any_way_are_renewed(by_count: None, start_method: str) -> None:
    """Forked, by the fork server, spawned."""
    torch.manual_seed(3)
    options: Any = {"multiprocessing_context": start_method, **inside.renewed_after(18)}  # so there is one renewal
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=1, max_buffered_bytes=0, **options)
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(20)]
    wait_for_renewals(loader, 1)
    seen += iterator
    assert [*map(bits, seen)] == expected()
    assert len(set(pids(seen))) > 1


def test_workers_are_renewed_in_async_for(by_count: None) -> None:
    """And a loop in between."""
    torch.manual_seed(3)
    loader = DataLoader(Awaited(), 2, shuffle=True, num_workers=1, **inside.renewed_after(4))

    async def run() -> list[Any]:
        return [batch async for batch in loader]

    assert [*map(bits, asyncio.run(run()))] == expected(Awaited())


class Leaking(Drawing):
    """Samples each of which leaves memory behind."""

    left: ClassVar[list[bytearray]] = []

    def __getitem__(self, index: int) -> Any:
        self.left.append(bytearray(os.urandom(1 << 10)) * 4096)
        return super().__getitem__(index)


@pytest.mark.forked("what is patched is patched in the workers")
def test_a_worker_that_grows_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has much more than it may have; `stats()` says what each has."""
    monkeypatch.setattr(private, "_LOOK_S", 0.0)
    monkeypatch.setattr(private, "_SHARE", 0)
    torch.manual_seed(3)
    bound = 80 << 20
    loader = DataLoader(
        Leaking(),
        2,
        shuffle=True,
        num_workers=1,
        max_worker_memory=bound,
        max_buffered_bytes=0,
        persistent_workers=True,
    )
    seen, memory = [], []
    for batch in loader:
        seen.append(batch)
        renewals, stats = loader.stats().workers.renewals, loader.stats()
        memory.append(stats.workers.each[0].private_bytes)
        if memory[-1] > bound and len(seen) < 20:  # what is left is not worth another worker in the end
            wait_for_renewals(loader, renewals + 1)
    assert [*map(bits, seen)] == expected()
    assert len(set(pids(seen))) > 1
    assert bound < max(memory) < 2 * bound
    stats = loader.stats()
    loader.close()
    assert stats.as_dict()["workers"]["each"][0]["private_bytes"] == stats.workers.each[0].private_bytes
    assert f"renewed {stats.workers.renewals} times" in str(stats)


class FastLeak(Dataset[Any]):
    """Samples of which each leaves 4 MB behind, as fast as memory can be had; tells what the worker has by then."""

    left: ClassVar[list[bytearray]] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.left.append(bytearray(b"x" * 4096) * 1024)
        return index, os.getpid(), private_bytes()


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_fast_leak_is_bounded(num_workers: int, start_method: str) -> None:
    """No worker comes to more than one and a half times its bound, however long the start of another one takes."""
    bound = (280 if start_method == "spawn" else 160) << 20  # a spawned worker has torch to itself
    options: Any = {"multiprocessing_context": start_method, "max_worker_memory": bound, "num_workers": num_workers}
    loader = DataLoader(FastLeak(), 2, **options)
    indices, makers, memory = (torch.cat(column).tolist() for column in zip(*loader, strict=True))
    assert indices == list(range(100))
    assert max(memory) < 1.5 * bound
    assert num_workers < len(set(makers)) <= num_workers + loader.stats().workers.renewals


def test_persistent_workers_between_two_epochs(by_count: None) -> None:
    """Batches of all epochs count, and epochs that are too short for it are no hindrance."""
    torch.manual_seed(3)
    options: Any = {"persistent_workers": True, "prefetch_factor": 40}
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=2, **inside.renewed_after(20), **options)
    seen, makers = [], []
    while not makers or makers[0] == makers[-1]:
        batches = list(loader)
        seen += map(bits, batches)
        makers.append(set(pids(batches)))
    assert seen == expected(epochs=len(makers), **options)
    assert makers[0] == makers[1]  # all tickets of an epoch are given at once
    loader.close()


def test_many_epochs_of_persistent_workers(by_count: None) -> None:
    """Also where one is left in the middle."""
    torch.manual_seed(3)
    options: Any = {"persistent_workers": True}
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=2, **inside.renewed_after(20), **options)
    seen = [bits(batch) for _ in range(5) for batch in loader]
    next(iter(loader))
    seen += map(bits, loader)
    loader.close()
    wanted = expected(epochs=7, persistent_workers=True)
    assert seen == wanted[: 5 * LENGTH // 2] + wanted[6 * LENGTH // 2 :]


def test_a_state_goes_on_while_they_are_renewed(by_count: None) -> None:
    """With others that stay."""
    torch.manual_seed(3)
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=2, **inside.renewed_after(1))
    iterator = iter(loader)
    seen = [bits(next(iterator)) for _ in range(11)]
    state = loader.state_dict()
    del iterator
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=1)
    loader.load_state_dict(state)
    assert seen + [bits(batch) for batch in loader] == expected()


def test_while_workers_come_and_go(by_count: None) -> None:
    """Those that leave are not renewed, those that come are."""
    torch.manual_seed(3)
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=2, **inside.renewed_after(3), max_buffered_bytes=0)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(bits(batch))
        if change := {2: 4, 5: 1, 9: 3, 11: 2, 13: 1, 20: 2}.get(number):
            loader.set_num_workers(change)
    assert seen == expected()


# ------------------------------------------------------------------------------------------------ in the middle of it


class Renewed:
    """A loader whose workers stand at a gate, and are renewed when they have answered their tickets; later ones stay.

    Args:
        folder: For the gate.
        num_workers: How many there are.
        options: Of the loader.
    """

    def __init__(self, folder: Path, num_workers: int = 2, **options: Any) -> None:
        self.gate = Gate(folder)
        # A worker has tickets for batches before the gate and behind it, so it is due, and never without work.
        options = {"max_buffered_bytes": 0, "prefetch_factor": 4, **inside.renewed_after(1), **options}
        self.loader: Any = DataLoader(Gated(self.gate), 2, num_workers=num_workers, **options)
        self.iterator: Any = iter(self.loader)
        self.seen = [next(self.iterator) for _ in range(3)]
        self.engine = inside.engine(self.iterator)
        self.gate.wait_for(num_workers)
        wait_until(lambda: len(self.leaving) == num_workers)
        inside.renew_no_more(self.iterator)

    @property
    def leaving(self) -> set[int]:
        """Workers that finish what they have."""
        scheduler = self.engine.run.scheduler
        return scheduler.in_flight.keys() - scheduler.takers

    def rest(self) -> list[Any]:
        """Open the gate, and take what is left."""
        with self.gate.opened():
            self.seen += self.iterator
        return [batch[0].tolist() for batch in self.seen]


WANTED = [[i, i + 1] for i in range(0, LENGTH, 2)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("on_crash", ["retry", "skip"])
def test_one_that_dies_before_it_is_renewed(by_count: None, tmp_path: Path, on_crash: Any, num_workers: int) -> None:
    """Another one does what it had; what was not begun is not blamed."""
    renewed = Renewed(tmp_path, num_workers, on_crash=on_crash)
    at = min(renewed.engine.run.scheduler.in_flight[0])
    os.kill(renewed.engine.pool.processes[0].pid, signal.SIGKILL)
    wait_until(lambda: 0 not in renewed.leaving)
    seen = renewed.rest()
    assert seen == [batch for number, batch in enumerate(WANTED) if on_crash == "retry" or number != at]


def test_one_that_dies_and_its_error_is_raised(by_count: None, tmp_path: Path) -> None:
    """It names what the worker had; all the rest comes."""
    renewed = Renewed(tmp_path, on_crash="raise")
    lost = set(renewed.engine.run.scheduler.in_flight[0])
    os.kill(renewed.engine.pool.processes[0].pid, signal.SIGKILL)
    wait_until(lambda: 0 not in renewed.leaving)
    with renewed.gate.opened():
        with pytest.raises(RuntimeError, match="is killed by signal"):
            next(renewed.iterator)
        renewed.seen += renewed.iterator
    assert [batch[0].tolist() for batch in renewed.seen] == [
        batch for number, batch in enumerate(WANTED) if number not in lost
    ]


@pytest.mark.parametrize("number", [1, 3])
def test_one_that_is_to_leave_or_stay_before_it_is_renewed(by_count: None, tmp_path: Path, number: int) -> None:
    """A worker that leaves does what it was given; one that is to stay is renewed later."""
    renewed = Renewed(tmp_path)
    renewed.loader.set_num_workers(number)
    assert renewed.rest() == WANTED


def test_one_that_hangs_before_it_is_renewed(by_count: None, tmp_path: Path, patient_stacks: None) -> None:
    """It is killed, and another one does what it had."""
    renewed = Renewed(tmp_path, 1, timeout=60, on_timeout="retry", max_retries=50)
    inside.set_timeout(renewed.iterator, 0.3)
    hung = renewed.engine.pool.processes[0]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(next, renewed.iterator)
        wait_until(lambda: not hung.is_alive)
        with renewed.gate.opened():
            renewed.seen.append(asked.result())
            renewed.seen += list(renewed.iterator)
    assert [batch[0].tolist() for batch in renewed.seen] == WANTED


def test_closed_before_one_is_renewed(by_count: None, tmp_path: Path) -> None:
    """Nothing is left."""
    renewed = Renewed(tmp_path)
    with renewed.gate.opened():
        renewed.loader.close()


def test_left_before_one_is_renewed(by_count: None, tmp_path: Path) -> None:
    """The next run has nothing of what it had."""
    renewed = Renewed(tmp_path, persistent_workers=True)
    with renewed.gate.opened():
        assert [batch[0].tolist() for batch in renewed.loader] == WANTED
    renewed.loader.close()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_where_no_process_can_be_had_another_one_is_tried(
    by_count: None, caplog: Any, monkeypatch: Any, num_workers: int
) -> None:
    """Later; the other workers go on, and where there are none, training waits."""
    start, refused = Pool._start_other, iter(range(3))

    def refuse(*args: Any) -> Any:
        for _ in refused:
            raise OSError("no room")
        return start(*args)

    monkeypatch.setattr(Pool, "_start_other", refuse)
    torch.manual_seed(3)
    options: Any = {"max_buffered_bytes": 0, **inside.renewed_after(8)}
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=num_workers, **options)
    with caplog.at_level(logging.WARNING, "asyncloader"):
        assert [bits(batch) for batch in loader] == expected()
    assert "which is tried again: no room" in caplog.text
    assert loader.stats().faults == Faults()


class Failing:
    """Has the processes of workers end at their start so many times, behind the first of each.

    Args:
        folder: Where the starts are noted.
        times: How often.
    """

    def __init__(self, folder: Path, times: int) -> None:
        self.folder = folder
        self.times = times

    def __call__(self, worker: int) -> None:
        begun = len(list(self.folder.iterdir()))
        (self.folder / f"{begun} {os.getpid()}").touch()
        if 0 < begun <= self.times:
            self.end()

    def end(self) -> None:
        """Fail."""
        os._exit(7)


@pytest.mark.parametrize("times", [2, 100])
def test_a_process_that_ends_at_its_start_is_tried_again(
    by_count: None, tmp_path: Path, caplog: Any, times: int
) -> None:
    """A few times where there is no other worker. Then the run ends, and the error says why."""
    torch.manual_seed(3)
    options: Any = {"max_buffered_bytes": 0, "worker_init_fn": Failing(tmp_path, times), **inside.renewed_after(4)}
    loader = DataLoader(Drawing(), 2, shuffle=True, num_workers=1, **options)
    if times == 2:
        assert [bits(batch) for batch in loader] == expected()
    else:
        with pytest.raises(WorkerStartError, match="Workers end before they can take a batch"):
            list(loader)


# ----------------------------------------------------------------------------------------------------- what is told


class Stopping(Failing):
    """A `worker_init_fn` in which the process stops for good."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_the_only_worker_stops_while_it_takes_the_place_of_another(
    by_count: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no ticket yet that anybody would look after: it is killed for its start, and the next one goes on."""
    monkeypatch.setattr(recovery, "_STARTING_S", 2.0)
    monkeypatch.setattr(recovery, "_FINISHING_S", 2.0)
    options: Any = {"worker_init_fn": Stopping(tmp_path, 1), "prefetch_factor": 1, **inside.renewed_after(2)}
    options |= {"timeout": 0.2, "on_timeout": "retry", "max_retries": 50}  # workers that do not stop may be late too
    loader = DataLoader(Drawing(), 2, num_workers=1, **options)
    assert [batch[0].tolist() for batch in loader] == [[at, at + 1] for at in range(0, LENGTH, 2)]
    assert len(list(tmp_path.iterdir())) > 2


def test_it_is_in_the_log_the_timeline_and_the_figures(by_count: None, tmp_path: Path, caplog: Any) -> None:
    """Each renewal."""
    with caplog.at_level(logging.INFO, "asyncloader"):
        options: Any = {"max_buffered_bytes": 0, "trace": tmp_path / "trace.json"}
        loader = DataLoader(Drawing(), 2, num_workers=1, **inside.renewed_after(3), **options)
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        wait_for_renewals(loader, 1)
        list(iterator)
        loader.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    stats = loader.stats()
    assert len([event for event in events if event["name"] == "worker 0 renewed"]) == stats.workers.renewals > 0
    assert caplog.text.count("worker 0 is renewed: it has ") == stats.workers.renewals
    assert stats.as_dict()["workers"]["renewals"] == stats.workers.renewals
    assert sum(worker.batches for worker in stats.workers.each) == LENGTH // 2


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [
        (range(8), {}, "and there are none: num_workers is 0"),
        (range(8), {"num_workers": 2, "worker_backend": "thread"}, "and there are none: these are threads"),
        (Stream(), {"num_workers": 2}, "an iterable dataset is divided"),
        (range(8), {"num_workers": 2, "seeding": "worker"}, 'with seeding="worker"'),
        (Counting(), {"num_workers": 2}, "a state of its own in each"),
    ],
    ids=["no workers", "threads", "stream", "seeding", "state"],
)
def test_where_workers_cannot_be_renewed(dataset: Any, options: Any, why: str) -> None:
    """The error is raised at construction, and says why."""
    with pytest.raises(ConfigurationError, match=f"max_worker_memory .*{why}"):
        DataLoader(dataset, max_worker_memory=1 << 30, **options)


def test_where_nobody_tells_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused."""
    monkeypatch.setattr("asyncloader.options._STATM", Path("/nowhere"))
    with pytest.raises(ConfigurationError, match="max_worker_memory cannot be kept here"):
        DataLoader(Drawing(), num_workers=1, max_worker_memory=1 << 30)


def test_kept_workers_keep_their_bounds(by_count: None) -> None:
    """What is set in between is for the next ones."""
    dataset: Dataset[Any] = Drawing()
    loader: Any = DataLoader(dataset, 2, num_workers=1, persistent_workers=True, **inside.renewed_after(1000))
    makers = {pid for batch in loader for pid in batch[3].tolist()}
    loader.max_worker_memory = inside.renewed_after(1)["max_worker_memory"]
    makers |= {pid for batch in loader for pid in batch[3].tolist()}
    assert len(makers) == 1
    loader.close()
