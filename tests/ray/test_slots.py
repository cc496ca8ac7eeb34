"""Workers of agents where it matters who makes a batch: streams, above all. There are so many from the beginning on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import DataLoader, WorkerDiedError
from asyncloader.errors import WorkerStartError
from tests.patience import wait_until
from tests.ray.local_agents import LocalAgents
from tests.ray.test_pool import is_there, kill_my_agent, other_secret

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LENGTH = 60


class Stream(IterableDataset[Any]):
    """Each worker reads its share; what the random generators of workers say is in it."""

    def __init__(self, folder: Path | None = None, fatal: int = -1) -> None:
        self.folder, self.fatal = folder, fatal

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return self.read(info.id, info.num_workers)

    def read(self, at: int, step: int) -> Iterator[Any]:
        while at < LENGTH:
            if at == self.fatal and self.folder is not None and not (self.folder / "done").exists():
                (self.folder / "done").touch()
                kill_my_agent()
            yield self.sample(at)
            at += step

    def sample(self, at: int) -> Any:
        return at, torch.rand(3)


class Again(Stream):
    """Another worker can read it from the beginning, and comes to the same."""

    deterministic = True

    def sample(self, at: int) -> Any:
        return at


class Stateful(Again):
    """Another worker can begin where it was."""

    deterministic = False
    at: int | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        at, self.at = info.id if self.at is None else self.at, None
        for sample in self.read(at, info.num_workers):
            self.now = sample + info.num_workers
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"at": getattr(self, "now", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = self.now = state["at"]


class Summing(Dataset[Any]):
    """A map-style dataset with a state in each worker."""

    total = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.total += index
        return index, self.total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class Drawing(Dataset[Any]):
    """Its samples depend on who makes them, with ``seeding="worker"``."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3)


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [plain(part) for part in batch]


def run_of(loader: Any, epochs: int = 1) -> list[Any]:
    torch.manual_seed(3)
    batches = [plain(batch) for _ in range(epochs) for batch in loader]
    loader.close()
    return batches


@pytest.mark.parametrize(
    ("dataset", "options", "here"),
    [(Stream(), {}, 0), (Stream(), {}, 1), (Summing(), {}, 1), (Drawing(), {"seeding": "worker"}, 0)],
    ids=["stream", "stream-beside", "state", "seeding"],
)
def test_the_batches_are_those_of_as_many_local_workers(dataset: Any, options: Any, here: int) -> None:
    """Of which some are elsewhere: in two epochs, with the same workers. All of them are asked for."""
    options = {"persistent_workers": True} | options
    agents = LocalAgents(2, 1, num_workers=3)
    loader = DataLoader(dataset, 4, num_workers=here, worker_backend=agents, **options)
    found = run_of(loader, epochs=2)
    assert found == run_of(DataLoader(dataset, 4, num_workers=3 + here, **options), epochs=2)
    assert agents.newest.asks
    nodes = [worker.node for worker in loader.stats().workers.each]
    assert nodes == [""] * here + [os.uname().nodename] * 3


@pytest.mark.parametrize("kind", [Stateful, pytest.param(Again, marks=pytest.mark.slow)])
def test_a_slot_that_is_lost_begins_anew_where_it_was(kind: Any, tmp_path: Path) -> None:
    """At another agent; nobody is blamed, and nothing is lost or doubled."""
    agents = LocalAgents(1, 1, 1, num_workers=2, grows=True)
    loader = DataLoader(kind(tmp_path, 31), 4, num_workers=1, worker_backend=agents, max_retries=0)
    assert run_of(loader) == run_of(DataLoader(kind(), 4, num_workers=3))
    assert loader.stats().faults.retries == 0
    assert len(agents.newest.orders) == 3


def test_a_stream_that_does_not_tell_where_it_was_ends_with_an_error(tmp_path: Path) -> None:
    """Which names the node, and what to do."""
    agents = LocalAgents(1, num_workers=1, grows=True)
    loader = DataLoader(Stream(tmp_path, 31), 4, worker_backend=agents)
    with pytest.raises(WorkerDiedError, match=f"is lost with node {os.uname().nodename}") as caught:
        list(loader)
    assert "state_dict()" in str(caught.value)
    loader.close()


def test_a_slot_moves_when_its_agent_is_told_to_end() -> None:
    """It begins where it was at the next one; the agent goes."""
    agents = LocalAgents(1, 1, num_workers=1, grows=True)
    loader = DataLoader(Stateful(), 1, worker_backend=agents, max_buffered_bytes=0)
    iterator = iter(loader)
    seen = [plain(next(iterator)) for _ in range(9)]
    pid = agents.newest.pids[1]
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_there(pid))
    seen += map(plain, iterator)
    assert seen == [[index] for index in range(LENGTH)]
    loader.close()


@pytest.mark.slow
def test_a_stream_goes_on_from_a_state() -> None:
    """With as many workers, wherever they are."""
    agents = LocalAgents(1, num_workers=1)
    options: Any = {"num_workers": 1, "worker_backend": agents}
    loader = DataLoader(Stateful(), 4, **options)
    iterator = iter(loader)
    head = [plain(next(iterator)) for _ in range(5)]
    state = loader.state_dict()
    loader.close()
    del iterator
    resumed = DataLoader(Stateful(), 4, num_workers=2)
    resumed.load_state_dict(state)
    elsewhere = DataLoader(Stateful(), 4, **options)
    elsewhere.load_state_dict(state)
    tail = run_of(elsewhere)
    assert tail == run_of(resumed)
    assert head + tail == run_of(DataLoader(Stateful(), 4, num_workers=2))


@pytest.mark.slow
def test_a_slot_that_nobody_comes_for_is_an_error() -> None:
    """Though there are local workers: what it would make is nobody else's."""
    agents = LocalAgents(1, 1, 1, num_workers=3, corrupt=other_secret)
    loader = DataLoader(Stream(), 4, num_workers=1, worker_backend=agents)
    with pytest.raises(WorkerStartError, match="cannot be made by others"):
        list(loader)
    loader.close()


def test_a_run_that_ends_before_an_agent_has_come() -> None:
    """And the next one, with the same workers."""
    agents = LocalAgents(num_workers=1)
    loader = DataLoader(Again(), 4, num_workers=1, worker_backend=agents, persistent_workers=True)
    iterator = iter(loader)
    seen = [plain(next(iterator))]
    iterator = iter(loader)
    agents.newest.grow_soon(1)
    assert seen + [plain(batch) for batch in iterator][1:] == run_of(DataLoader(Again(), 4, num_workers=2))
    loader.close()


@pytest.mark.slow
def test_what_waits_in_a_slot_needs_no_polling() -> None:
    """A consumer that is there before the agent is woken by it."""
    agents = LocalAgents(num_workers=1)
    loader = DataLoader(Again(), 4, worker_backend=agents)
    iterator = iter(loader)
    threading.Timer(0.05, agents.newest.grow_soon, [1]).start()
    assert len(list(iterator)) == LENGTH // 4
    loader.close()
