"""Data pipes of torch, on which threads of one process never meet: one of them would find the other's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe, graph_settings

from asyncloader import DataLoader
from asyncloader.backends.processes.pool import Pool
from asyncloader.backends.threads import worker
from asyncloader.worker import data_pipes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
WAIT_S = 30.0


class Meeting:
    """Keeps the first worker thread that walks over a graph there until another thread comes, to a pipe or to the lock.

    Args:
        stage: The walk that is meant.
    """

    def __init__(self, stage: str = "seeds") -> None:
        self.stage = stage
        self.stages: dict[threading.Thread, str] = {}
        self.walker: threading.Thread | None = None
        self.walks = threading.Event()
        self.came = threading.Event()
        self.met: list[threading.Thread] = []

    def look(self) -> None:
        """A pipe is pickled: by a walk, or to be copied or sent."""
        me = threading.current_thread()
        if self.walker is None and self.stages.get(me) == self.stage:
            self.walker = me
            self.walks.set()
            assert self.came.wait(WAIT_S)
        elif self.walker not in (None, me) and not self.came.is_set():
            self.met.append(me)
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
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know which walk a worker thread is at."""

    def told(stage: str, walk: Callable[..., Any]) -> Callable[..., Any]:
        def walk_and_tell(*args: Any, **kwargs: Any) -> Any:
            me = threading.current_thread()
            if me is not threading.main_thread():
                meeting.stages[me] = stage
            try:
                return walk(*args, **kwargs)
            finally:
                meeting.stages.pop(me, None)

        return walk_and_tell

    monkeypatch.setattr(f"{__name__}.meeting", Meeting())
    monkeypatch.setattr(data_pipes, "_walking", Lock())
    monkeypatch.setattr(data_pipes, "_sharding_worker_init_fn", told("shards", data_pipes._sharding_worker_init_fn))
    monkeypatch.setattr(graph_settings, "apply_random_seed", told("seeds", graph_settings.apply_random_seed))


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


@pytest.mark.parametrize("second", ["copies", "seeds", "shards"])
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
        if second != "copies":
            both.wait(WAIT_S)
        return copy

    meeting.stage = "shards" if second == "copies" else second
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


def test_the_trainer_makes_an_iterator_beside_a_worker_thread() -> None:
    """The constructor of torch's iterator seeds the pipes."""
    other = make_loader()
    assert [int(number) for number in walk_beside(lambda: iter(other))] == list(range(12))
    assert not meeting.met


def test_the_trainer_pickles_pipes_beside_a_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers that the fork server starts."""
    pack = Pool.pack
    monkeypatch.setattr(Pool, "pack", lambda pool: walk_beside(lambda: pack(pool)))
    loader = make_loader(num_workers=1, multiprocessing_context="forkserver")
    assert [int(number) for number in loader] == list(range(12))
    assert meeting.walker is not None
    assert not meeting.met
