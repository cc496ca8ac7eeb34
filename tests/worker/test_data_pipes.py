"""Data pipes of torch, on which threads of one process never meet: one of them would find the other's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

from asyncloader import DataLoader
from asyncloader.backends.threads import worker
from asyncloader.worker import data_pipes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
WAIT_S = 30.0


class Meeting:
    """Keeps the first thread that walks over a graph there until a second thread has come, to a pipe or to the lock."""

    def __init__(self) -> None:
        self.walker: threading.Thread | None = None
        self.walks = threading.Event()
        self.came = threading.Event()
        self.met: list[str] = []

    def look(self) -> None:
        """A pipe is being pickled, by torch's walk or to be copied or sent."""
        me = threading.current_thread()
        if IterDataPipe.reduce_ex_hook is None:
            return
        if self.walker is None:
            if me is threading.main_thread():
                return
            self.walker = me
            self.walks.set()
            assert self.came.wait(WAIT_S)
        elif me is not self.walker and not self.came.is_set():
            self.met.append(me.name)
            self.came.set()


meeting = Meeting()


class Lock:
    """The lock, which tells that a thread has to wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            meeting.came.set()
            self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class Numbers(IterDataPipe[int]):
    """Each of several workers has its share, and torch is to find the pipe behind it."""

    def __init__(self, source: IterDataPipe[int] | None = None) -> None:
        self.source = source
        self.share = (1, 0)

    def apply_sharding(self, shares: int, number: int) -> None:
        if self.source is not None:
            self.share = (shares, number)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.share[1], 12, self.share[0])

    def __getstate__(self) -> Any:
        meeting.look()
        return super().__getstate__()


class Plain(Numbers):
    """Cannot be divided."""

    apply_sharding: Any = None


@pytest.fixture(autouse=True)
def new_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.meeting", Meeting())
    monkeypatch.setattr(data_pipes, "_walking", Lock())


def make_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(Plain()), batch_size=None, **options)


def walk_beside(act: Callable[[], Any]) -> Any:
    """Do something while a worker thread of a loader walks over the graph; return what came of it."""
    numbers: list[list[int]] = []
    loader = make_loader(num_workers=1, worker_backend="thread")
    reading = threading.Thread(target=lambda: numbers.append([int(number) for number in loader]))
    reading.start()
    assert meeting.walks.wait(WAIT_S)
    try:
        return act()
    finally:
        meeting.came.set()
        reading.join(WAIT_S)
        assert numbers == [list(range(12))]


@pytest.mark.parametrize("second", ["walks", "copies"])
def test_two_worker_threads_take_turns(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither walks while the other one copies its pipes or walks over them."""
    copied: list[threading.Thread] = []
    both = threading.Barrier(2)
    private_copy = worker.private_copy

    def copy_in_order(dataset: Any) -> Any:
        copied.append(threading.current_thread())
        if second == "copies" and len(copied) == 2:
            assert meeting.walks.wait(WAIT_S)
        copy = private_copy(dataset)
        if second == "walks":
            both.wait(WAIT_S)
        return copy

    monkeypatch.setattr(worker, "private_copy", copy_in_order)
    loader = make_loader(num_workers=2, worker_backend="thread")
    assert [int(number) for number in loader] == list(range(12))
    assert meeting.walker is not None
    assert not meeting.met


def test_the_trainer_makes_a_loader_beside_a_worker_thread() -> None:
    """torch's own constructor walks over the graph as well."""
    other = walk_beside(lambda: make_loader(shuffle=True))
    assert not meeting.met
    assert [int(number) for number in other] == list(range(12))


def test_the_trainer_pickles_pipes_beside_a_worker_thread() -> None:
    """For workers that the fork server starts."""
    loader = make_loader(num_workers=1, multiprocessing_context="forkserver")
    assert [int(number) for number in walk_beside(lambda: list(loader))] == list(range(12))
    assert not meeting.met
