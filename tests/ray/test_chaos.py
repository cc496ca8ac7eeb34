"""Agents that are killed again and again, strangers on the port, a consumer that stops: a run comes out the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.ray import door as door_module
from tests import inside
from tests.patience import wait_until
from tests.ray.local_agents import LocalAgents, LocalLauncher

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Drawing(Dataset[Any]):
    """Samples with random numbers of all three generators; each takes its time."""

    def __init__(self, length: int, sleep_s: float = 0.0) -> None:
        self.length = length
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.sleep_s)
        return index, torch.rand(40, 40), np.random.rand(), random.random()


def same(batches: Any, expected: Any) -> int:
    """Compare two runs, bit by bit; return how many batches there were."""
    count = 0
    for (indices, large, *small), (other, alike, *rest) in zip(batches, expected, strict=True):
        assert indices.tolist() == other.tolist(), f"batch {count}"
        assert torch.equal(large, alike), f"batch {count}"
        assert [one.tolist() for one in small] == [one.tolist() for one in rest], f"batch {count}"
        count += 1
    return count


def local(length: int, batch_size: int) -> Any:
    """Return the batches of one local worker, after the seed that was set."""
    loader = DataLoader(Drawing(length), batch_size, shuffle=True, num_workers=1)
    torch.manual_seed(3)
    return loader


def kill_one(launcher: LocalLauncher, alive: list[int], which: random.Random) -> None:
    """Kill an agent, and have another one come."""
    number = alive.pop(which.randrange(len(alive)))
    os.kill(launcher.pids[number], signal.SIGKILL)
    known = set(launcher.pids)
    launcher.grow_soon(1)
    wait_until(lambda: set(launcher.pids) > known)
    alive.extend(set(launcher.pids) - known)


def test_agents_that_are_killed_on_the_way(caplog: pytest.LogCaptureFixture) -> None:
    """One after the other, each while it has tickets: nothing is lost or doubled, nobody is blamed."""
    agents = LocalAgents(1, 1)
    loader = DataLoader(Drawing(300), 1, shuffle=True, worker_backend=agents, max_buffered_bytes=0)
    torch.manual_seed(3)
    iterator, chance, alive = iter(loader), random.Random(1), [1, 2]
    seen = []
    for count in range(300):
        seen.append(next(iterator))
        if count in (50, 150):
            wait_until(lambda: loader.stats().num_workers == 2)
            kill_one(agents.newest, alive, chance)
    assert same(seen, local(300, 1)) == 300
    assert loader.stats().faults.retries == 0
    assert "is lost" in caplog.text
    loader.close()


@pytest.mark.slow
def test_ten_thousand_batches_with_an_agent_killed_every_two_seconds() -> None:
    """In the middle of whatever they do."""
    agents, over = LocalAgents(1, 1, 1, 1), threading.Event()
    killed = taken = 0

    def counted(batches: Iterator[Any]) -> Iterator[Any]:
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    def kill() -> None:
        nonlocal killed
        chance, alive = random.Random(1), [1, 2, 3, 4]
        while not over.wait(2.0) and taken < 9_500:  # at the end they go by themselves
            kill_one(agents.newest, alive, chance)
            killed += 1

    loader = DataLoader(Drawing(40_000, 0.004), 4, shuffle=True, worker_backend=agents)
    torch.manual_seed(3)
    iterator = iter(loader)
    wait_until(lambda: len(agents.newest.pids) == 4)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert same(counted(iterator), local(40_000, 4)) == 10_000
    finally:
        over.set()
        killer.join()
    stats = loader.stats()
    assert stats.faults.retries == 0
    assert killed >= 10
    print(f"{killed} agents were killed in {stats.elapsed_s:.0f} s")
    loader.close()


# ----------------------------------------------------------------------------------------------- strangers, slow ones


def ended(stranger: socket.socket) -> bool:
    """Whether the trainer has hung up; what it said before does not count."""
    with contextlib.suppress(ConnectionError):
        while data := stranger.recv(4096):
            assert len(data) < 100
    return True


def test_strangers_on_the_port_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, silence, and a byte now and then: they are dropped and counted, and the run goes on."""
    agents = LocalAgents(1)
    loader = DataLoader(Drawing(100), 1, shuffle=True, worker_backend=agents, max_buffered_bytes=0)
    torch.manual_seed(3)
    iterator = iter(loader)
    seen = [next(iterator)]
    monkeypatch.setattr(door_module, "PROOF_S", 0.2)  # the agent has proven itself by now
    order = agents.newest.orders[0]
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((order.host, order.port), 30)) for _ in range(6)]
        said = (b"GET / HTTP/1.1\r\n" * 20, bytes(200), b"a", b"", b"x" * 80, b"")
        for stranger, data in zip(strangers, said, strict=True):
            stranger.sendall(data)
        seen += [next(iterator) for _ in range(50)]
        assert all(map(ended, strangers))
        seen += iterator
    assert same(seen, local(100, 1)) == 100
    refused = inside.door(inside.session(iterator).pool).refused
    assert refused == {"no agent": 2, "too slow": 4}
    loader.close()


class Large(Dataset[torch.Tensor]):
    """Samples of 1 MB."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 18,), float(index))


def test_a_consumer_that_stops_is_sent_no_more_than_its_window() -> None:
    """And what may be run ahead: bytes come to a stand, and go on when it does."""
    agents = LocalAgents(2)
    ahead = 4 << 20
    loader = DataLoader(Large(), None, prefetch_factor=3, worker_backend=agents, max_buffered_bytes=ahead)
    iterator = iter(loader)
    seen = [next(iterator)]
    session: Any = inside.session(iterator)
    run = session.run
    wait_until(lambda: loader.stats().num_workers == 2)
    seen.append(next(iterator))  # which reads on as far as it is let
    wait_until(lambda: not run.inbox and len(run.handoff.ready) == run.scheduler.planned_count - 2 >= 3)
    planned, batch = run.scheduler.planned_count, 1 << 20
    assert planned <= 2 + 2 * 3 + ahead // batch
    (agent,) = session.pool.fleet.agents.values()
    assert planned * batch <= agent.link.num_bytes <= planned * (batch + 1000) + 10_000
    assert loader.stats().received.nbytes <= agent.link.num_bytes
    seen += iterator
    assert [int(batch[0]) for batch in seen] == list(range(100))
    loader.close()
