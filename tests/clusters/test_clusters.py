"""Workers on the nodes of a Ray cluster: nodes that come, that go, and a trainer that is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.errors import WorkerStartError
from asyncloader.ray import RayWorkers, ray_launcher
from tests.clusters.clusters import agents
from tests.patience import wait_until

LENGTH = 200
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_with_ray.py"
PROGRAM = Path(__file__).with_name("killed_trainer.py")


class Drawing(Dataset[Any]):
    """Samples with random numbers, and who made them."""

    def __init__(self, gate: Path | None = None) -> None:
        self.gate = gate  # beyond the first few, samples wait for this file

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        while self.gate is not None and index >= 20 and not self.gate.exists():
            time.sleep(0.005)
        return index, torch.rand(200, 200), os.getpid()


class Barred(Drawing):
    """Cannot be opened before a file is there."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        while self.gate is not None and not self.gate.exists():
            time.sleep(0.005)


def workers() -> dict[psutil.Process, int]:
    """The agents that have workers, and how many. Workers are forked, look as agents do, and may end meanwhile."""
    found = {}
    for process in agents():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process] = len(process.children())
    return {process: count for process, count in found.items() if count}


def test_the_batches_are_those_of_local_workers(add_node: Any) -> None:
    """Of two nodes, beside a local worker; each node has one agent; nothing of ours is left afterwards."""
    for _ in range(2):
        add_node()
    torch.manual_seed(3)
    elsewhere = RayWorkers(num_workers=4)
    loader = DataLoader(Drawing(), 4, shuffle=True, num_workers=1, worker_backend=elsewhere, persistent_workers=True)
    batches = list(loader)
    wait_until(lambda: loader.stats().num_workers == 5)
    assert len({process.ppid() for process in workers()}) == 2
    batches += loader
    loader.close()
    torch.manual_seed(3)
    expected = DataLoader(Drawing(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    for (index, drawn, *_), (same, alike, *_) in zip(batches, [*expected, *expected], strict=True):
        assert index.tolist() == same.tolist()
        assert torch.equal(drawn, alike)
    expected.close()
    assert len({int(pid) for batch in batches[len(loader) :] for pid in batch[2]}) == 5
    wait_until(lambda: not agents())


def test_fewer_workers_than_were_asked_for_are_told_of(add_node: Any, caplog: pytest.LogCaptureFixture) -> None:
    """RayWorkers(8) that get 4: the log says so and why, stats too; and two raylets of one host have two names."""
    for _ in range(2):
        add_node()
    loader = DataLoader(Drawing(), 4, num_workers=1, worker_backend=RayWorkers(num_workers=8), persistent_workers=True)
    list(loader)
    wait_until(lambda: loader.stats().num_workers == 5)
    wait_until(lambda: "4 of 8 workers on other machines are there" in caplog.text)
    assert "the cluster has no room for the others, each of which takes {'CPU': 1.0}" in caplog.text
    list(loader)
    stats = loader.stats()
    loader.close()
    assert "4 of 8 workers on other machines took part" in str(stats)
    host = socket.gethostname()
    names = sorted({worker.node for worker in stats.workers.each} - {""})
    assert names[0] == host
    assert re.fullmatch(rf"{re.escape(host)}/[0-9a-f]{{8}}", names[1])
    assert len(names) == 2


class Wishes:
    """A controller that wants what the test says."""

    reason, due = "the test wants it", 0.0
    num_workers, most_here = 1, 1

    def __init__(self) -> None:
        self.wish = 1

    def begin_run(self) -> None: ...

    def observe(self, load: Any) -> None:
        self.num_workers = self.wish


def test_a_number_that_looks_after_itself(add_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More are had of the cluster, and given back, their CPUs too."""
    import ray

    wishes = Wishes()
    monkeypatch.setattr("asyncloader.run.workplace.Controller", lambda *args, **kwargs: wishes)
    for _ in range(2):
        add_node()
    loader = DataLoader(Drawing(), 1, sampler=itertools.cycle([1]), num_workers="auto", worker_backend="ray")
    iterator = iter(loader)
    for elsewhere, on_nodes in ((3, 3), (2, 2), (0, 0)):
        wishes.wish = 1 + elsewhere
        wait_until(lambda: next(iterator) and loader.stats().num_workers == wishes.wish)
        if not elsewhere:
            wait_until(lambda: next(iterator) and ray.available_resources().get("CPU") == 4)
        assert sum(workers().values()) >= on_nodes
    loader.close()
    wait_until(lambda: not agents())


def test_a_cluster_that_grows_and_loses_a_node(add_node: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From nothing; and a raylet that is killed takes its workers with it. No batch is lost or doubled."""
    gate = tmp_path / "open"
    loader = DataLoader(Drawing(gate), 1, worker_backend=RayWorkers(num_workers=4), max_buffered_bytes=0)
    iterator = iter(loader)
    first = add_node()
    seen = [next(iterator)]
    add_node()
    wait_until(lambda: loader.stats().num_workers == 4)
    os.kill(first.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    wait_until(lambda: loader.stats().num_workers == 2)
    gate.touch()
    seen += iterator
    assert [int(batch[0]) for batch in seen] == list(range(LENGTH))
    assert loader.stats().faults.retries == 0
    assert "is lost" in caplog.text
    wait_until(lambda: not agents())


def test_nodes_that_die_before_their_workers_are_ready(
    add_node: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as starts may fail, and all there are: the run waits for another node, as when they die later."""
    gate = tmp_path / "open"
    nodes = [add_node(num_cpus=1) for _ in range(3)]
    iterator = iter(DataLoader(Barred(gate), 1, worker_backend=RayWorkers(num_workers=3), max_buffered_bytes=0))
    wait_until(lambda: len(workers()) == 3)
    for node in nodes:
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    wait_until(lambda: caplog.text.count("its node has died") >= 3)
    add_node()
    gate.touch()
    assert [int(batch[0]) for batch in iterator] == list(range(LENGTH))
    wait_until(lambda: not agents())


def test_a_node_that_is_drained(add_node: Any, tmp_path: Path) -> None:
    """Its workers finish what they have, and leave before it is taken away; others take their place."""
    import ray
    from ray._raylet import GcsClient

    gate = tmp_path / "open"
    loader = DataLoader(Drawing(gate), 1, worker_backend=RayWorkers(num_workers=2), max_buffered_bytes=0)
    first = add_node()
    iterator = iter(loader)
    seen = [next(iterator)]
    wait_until(lambda: loader.stats().num_workers == 2)
    (agent,) = workers()
    add_node()
    client, preemption = GcsClient(address=ray.get_runtime_context().gcs_address), 2
    is_accepted, _ = client.drain_node(first.node_id, preemption, "the test wants it", 0)
    assert is_accepted
    wait_until(lambda: loader.stats().num_workers == 0 or len(workers()) == 2)
    gate.touch()
    wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)
    seen += iterator
    assert [int(batch[0]) for batch in seen] == list(range(LENGTH))
    assert loader.stats().faults.retries == 0
    loader.close()
    wait_until(lambda: not agents())


def test_workers_are_kept_to_a_placement_group(
    add_node: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It waits to be placed; each bundle has an agent, and nothing else is taken. Its removal is the end."""
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr(ray_launcher, "_WARN_AFTER_S", 0.0)
    add_node(num_cpus=4)
    group = placement_group([{"CPU": 2, "data": 1}, {"CPU": 3, "data": 1}], strategy="STRICT_SPREAD")
    loader = DataLoader(Drawing(tmp_path / "shut"), 1, worker_backend=RayWorkers(placement=group), max_buffered_bytes=0)
    iterator = iter(loader)
    wait_until(lambda: "The placement group has no room" in caplog.text)
    assert not agents()
    for _ in range(2):
        add_node(num_cpus=4, resources={"data": 1})
    assert int(next(iterator)[0]) == 0
    wait_until(lambda: loader.stats().num_workers == 5)
    assert sorted(workers().values()) == [2, 3]
    # Of each node: what no bundle has; of the bundles nothing is left.
    wait_until(lambda: sorted(has.get("CPU", 0) for has in available_resources_per_node().values()) == [0, 1, 2, 4])
    names = {name for has in available_resources_per_node().values() for name in has}
    assert not {name for name in names if name.startswith("CPU_group_")}
    remove_placement_group(group)
    with pytest.raises(WorkerStartError, match="was removed"):
        for _ in iterator:
            pass
    wait_until(lambda: not agents())


def test_nothing_outlives_a_trainer_that_is_killed(add_node: Any, cluster: Any) -> None:
    """kill -9: its agents and their workers are gone."""
    add_node()
    with subprocess.Popen(
        [sys.executable, PROGRAM, cluster.address], stdout=subprocess.PIPE, text=True, cwd="/"
    ) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert pids
        program.kill()
    wait_until(lambda: not agents() and not any(map(psutil.pid_exists, pids)))


def test_clients_of_ray_are_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents could not reach them."""
    import ray.util.client

    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(ConfigurationError, match="ray job submit"):
        iter(DataLoader(Drawing(), 4, worker_backend="ray"))


@pytest.mark.slow
def test_the_example_trains_on_while_a_node_is_killed(cluster: Any) -> None:
    """In a cluster of its own, to its closing line."""
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a node was killed" in done.stdout
    found = re.search(
        r"^(\d+) processes made 16384 samples: 2048 in each epoch, none lost or doubled", done.stdout, re.M
    )
    assert found is not None
    assert int(found[1]) >= 5
