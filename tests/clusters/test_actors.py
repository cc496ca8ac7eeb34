"""Workers on the nodes of a Ray cluster: the same batches, whatever happens to actors and nodes."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncloader import DataLoader, WorkerDiedError
from asyncloader.datasets import CachedDataset, SharedList
from asyncloader.errors import WorkerStartError
from asyncloader.ray import RayWorkers, pool
from tests.clusters import datasets
from tests.support.patience import wait_until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_with_ray.py"
MANY = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROGRAM = Path(__file__).with_name("killed_trainer.py")


def stay(count: int = 2, **options: Any) -> RayWorkers:
    """Workers on nodes that are there all the while."""
    return RayWorkers(count, resources={"stays": 1}, **options)


def go(count: int, **options: Any) -> RayWorkers:
    """Workers on nodes that tests add, and take away."""
    return RayWorkers(count, resources={"goes": 1}, **options)


def indices(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch[0]]


def assert_alike(batches: list[Any], others: list[Any]) -> None:
    """Check that batches are the same, but for the processes that made them."""
    assert len(batches) == len(others)
    for (index, drawn, *_), (same, alike, *_) in zip(batches, others, strict=True):
        assert torch.equal(index, same)
        assert torch.equal(drawn, alike)


# ------------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (datasets.Drawing(), {"shuffle": True}),
        (datasets.Awaited(), {"shuffle": True, "seeding": "sample"}),
        (datasets.Drawing(), {"seeding": "worker"}),
    ],
)
def test_the_batches_are_those_of_local_processes(cluster: Any, dataset: Any, options: dict[str, Any]) -> None:
    """Two epochs, and what follows a state of the first one, also where local workers go on from it."""
    made = []
    for workers in ({"num_workers": 2}, {"worker_backend": stay()}):
        torch.manual_seed(3)
        loader = DataLoader(dataset, 4, persistent_workers=True, **options, **workers)
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(7)]
        state = loader.state_dict()
        batches += [*iterator, *loader]
        made.append(batches)
        loader.close()
    local, remote = made
    assert {int(pid) for batch in local for pid in batch[2]}.isdisjoint(int(p) for batch in remote for p in batch[2])
    assert_alike(remote, local)
    resumed = DataLoader(dataset, 4, num_workers=2, **options)
    resumed.load_state_dict(state)
    assert indices(resumed) == indices(local)[28:200]


def test_a_stream_is_divided_among_workers_by_their_ids(cluster: Any) -> None:
    """Each has its share, and a state that local workers go on from."""
    expected = [int(number) for batch in DataLoader(datasets.Counting(), 4, num_workers=2) for number in batch[0]]
    loader = DataLoader(datasets.Counting(), 4, worker_backend=stay(), persistent_workers=True)
    iterator = iter(loader)
    found = indices(next(iterator) for _ in range(5))
    state = loader.state_dict()
    assert found + indices(iterator) == expected
    assert indices(loader) == expected
    loader.close()
    resumed = DataLoader(datasets.Counting(), 4, num_workers=2)
    resumed.load_state_dict(state)
    assert found + indices(resumed) == expected


def test_samples_may_use_their_memory_again_and_batches_may_be_written_to(cluster: Any) -> None:
    """What a worker sends is copied out of its memory at once, and out of Ray's when it comes."""
    loader = DataLoader(datasets.OneBuffer(), batch_size=None, worker_backend=stay())
    kept = []
    for number, sample in enumerate(loader):
        assert sample.unique().tolist() == [number]
        sample += 1000
        kept.append(sample)
    assert [sample.unique().tolist() for sample in kept] == [[1000 + number] for number in range(40)]


# ------------------------------------------------------------------------------------------------- actors that end


@pytest.mark.parametrize("deaths", [3, pytest.param(30, marks=MANY)])
def test_no_batch_is_lost_or_doubled_when_actors_are_killed(cluster: Any, tmp_path: Path, deaths: int) -> None:
    """Another one makes the batch again, the same."""
    length = 40 * deaths
    torch.manual_seed(5)
    expected = list(DataLoader(datasets.Drawing(length=length), 4, shuffle=True, num_workers=1))
    torch.manual_seed(5)
    loader = DataLoader(datasets.Deadly(tmp_path, deaths, length), 4, shuffle=True, worker_backend=stay())
    assert_alike(list(loader), expected)
    assert len(list(tmp_path.iterdir())) == deaths
    faults = loader.stats().faults
    assert faults.replacements == deaths
    assert deaths <= faults.retries <= 2 * deaths  # also of the batch before, whose buffers an actor may take with it


def test_a_stream_goes_on_where_an_actor_was_killed(cluster: Any) -> None:
    """The next one has its id and its place."""
    loader = DataLoader(datasets.Counting(slow_s=0.01), 2, worker_backend=stay())
    found = []
    for number, batch in enumerate(loader):
        found += batch[0].tolist()
        if number == 6:
            os.kill(int(batch[1][0]), signal.SIGKILL)
    assert found == [number for at in range(0, 60, 4) for number in (at, at + 2, at + 1, at + 3)]


def test_a_sample_that_ends_its_process_is_named(cluster: Any) -> None:
    """As for local workers; what it raises otherwise comes as it was raised, with the node and what to do."""
    loader = DataLoader(datasets.Failing(), 4, worker_backend=stay(), max_retries=0)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(FileNotFoundError, match=r"5\.jpg") as raised:
        next(iterator)
    notes = "\n".join(raised.value.__notes__)
    assert re.search(r"in DataLoader worker process \d on node \S+/[0-9a-f]{8}", notes)
    assert "runtime_env of RayWorkers" in notes
    with pytest.raises(WorkerDiedError, match=r"exit code 3.*\[8, 9, 10, 11\]"):
        next(iterator)
    assert next(iterator)[0].tolist() == [12, 13, 14, 15]


def test_a_hung_worker_tells_where_it_is_and_is_replaced(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the stack of its thread."""
    options: dict[str, Any] = {"timeout": 15, "on_timeout": "retry"}
    loader = DataLoader(datasets.Hanging(tmp_path), 4, worker_backend=stay(), **options)
    assert indices(loader) == list(range(datasets.LENGTH))
    assert loader.stats().faults.timeouts == 1
    assert "_wait_for_ever" in caplog.text


def test_a_dataset_that_cannot_be_unpickled_there_is_an_error_of_every_batch(cluster: Any) -> None:
    """With what to do about it."""
    with pytest.raises(ImportError, match="a module that is not here") as raised:
        list(DataLoader(datasets.Unreadable(), 4, worker_backend=stay(1)))
    assert "runtime_env of RayWorkers" in "\n".join(raised.value.__notes__)


# --------------------------------------------------------------------------------------------- nodes that come and go


def test_actors_wait_for_nodes_and_those_that_are_there_make_all_batches(add_node: Any) -> None:
    """A run begins without any; more workers than there is room for hold up nobody, and come when there is room."""
    loader = DataLoader(datasets.Slow(), 2, worker_backend=go(4), persistent_workers=True)
    iterator = iter(loader)
    add_node()
    assert indices(iterator) == list(range(datasets.LENGTH))
    assert loader.stats().num_workers == 2
    add_node()
    wait_until(lambda: indices(loader) == list(range(datasets.LENGTH)) and loader.stats().num_workers == 4)
    loader.close()


@pytest.mark.parametrize("losses", [1, pytest.param(10, marks=MANY)])
def test_no_batch_is_lost_or_doubled_when_nodes_are_lost(add_node: Any, cluster: Any, losses: int) -> None:
    """Raylets are killed. Other workers make what was in hand there, also while no node has room for more."""
    length = 200 * losses + 400
    torch.manual_seed(5)
    expected = list(DataLoader(datasets.Drawing(length=length), 4, shuffle=True, num_workers=1))
    torch.manual_seed(5)
    nodes = [add_node(), add_node()]
    data = datasets.Slow(length=length)
    loader = DataLoader(data, 4, shuffle=True, worker_backend=go(4), scheduling="dynamic")
    found, lost = [], 0
    for number, batch in enumerate(loader):
        found.append(batch)
        if lost < losses and number % 50 == 20:
            wait_until(lambda: loader.stats().num_workers >= 3)
            os.kill(nodes.pop(0).all_processes["raylet"][0].process.pid, signal.SIGKILL)
            lost += 1
            nodes.append(add_node())
    assert lost == losses
    assert_alike(found, expected)
    assert 0 < loader.stats().faults.retries <= 2 * losses  # of the batch that each worker there was at


def test_a_stream_goes_on_where_a_node_was_lost(add_node: Any, cluster: Any) -> None:
    """All ids are there from the beginning; the ids of the lost node begin again on another one, at their places."""
    nodes = [add_node(num_cpus=1, resources={"goes": 1}) for _ in range(2)]
    loader = DataLoader(datasets.Counting(slow_s=0.02), 2, worker_backend=go(2))
    found = []
    for number, batch in enumerate(loader):
        found += batch[0].tolist()
        if number == 6:
            os.kill(nodes[0].all_processes["raylet"][0].process.pid, signal.SIGKILL)
            add_node()
    assert found == [number for at in range(0, 60, 4) for number in (at, at + 2, at + 1, at + 3)]


def test_the_number_of_workers_changes_while_they_are_at_work(cluster: Any) -> None:
    """Up and down, in the middle of a run."""
    import ray

    loader = DataLoader(datasets.Slow(), 2, worker_backend=stay(1), persistent_workers=True)

    def are_at_work(count: int) -> bool:
        return indices(loader) == list(range(datasets.LENGTH)) and loader.stats().num_workers == count

    for count in (3, 1):
        loader.set_num_workers(count)
        wait_until(partial(are_at_work, count))
    loader.close()
    wait_until(lambda: ray.available_resources().get("stays") == 4)


def test_what_processes_share_is_once_on_each_node(cluster: Any, tmp_path: Path) -> None:
    """The rows of a list, where Ray keeps them. A cache keeps samples there, in its folder."""
    rows = SharedList(range(0, 1000, 5))
    cached = CachedDataset(datasets.Lookup(rows), tmp_path / "cache", fingerprint="one")
    data: Any
    for data, first in ((datasets.Lookup(rows[100:]), 500), (cached, 0)):
        loader = DataLoader(data, 10, sampler=range(100), worker_backend=stay(1))
        found = [(int(value), int(pid)) for batch in loader for value, pid in zip(*batch, strict=True)]
        assert [value for value, _ in found] == list(range(first, first + 500, 5))
        makers = {pid for _, pid in found}
        assert os.getpid() not in makers
    assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == 100


# ------------------------------------------------------------------------------------------------- options and ends


def test_options_of_actors_are_passed_on_and_datasets_are_closed(cluster: Any, tmp_path: Path) -> None:
    """Environment variables get there, and what is registered for the end of a process is run."""
    workers = stay(2, runtime_env={"env_vars": {"GIVEN_BY_RAY": "this"}}, num_cpus=0.5)
    loader = DataLoader(datasets.Leaving(tmp_path), 4, worker_backend=workers, persistent_workers=True)
    pids: set[int] = set()
    while len(pids) < 2:
        for _, given, made in loader:
            assert set(given) == {"this"}
            pids |= set(made.tolist())
    loader.close()
    wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {f"left {pid}" for pid in pids})
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_async_datasets_are_closed_where_they_were_opened(cluster: Any, tmp_path: Path) -> None:
    """At the end of a run."""
    pids = set()
    for batch in DataLoader(datasets.Awaited(tmp_path), 4, worker_backend=stay()):
        pids |= set(batch[2].tolist())
    wait_until(lambda: {path.name for path in tmp_path.iterdir()} >= {f"closed {pid}" for pid in pids})


def test_what_ray_refuses_ends_the_run(cluster: Any) -> None:
    """When it begins, or with the first actor; nobody waits for what cannot come."""
    with pytest.raises(ValueError, match="num_cpu"):
        iter(DataLoader(datasets.Drawing(), 4, worker_backend=RayWorkers(2, num_cpu=1)))
    with pytest.raises(Exception, match="env_vars"):
        next(iter(DataLoader(datasets.Drawing(), 4, worker_backend=stay(runtime_env={"env_vars": {"A": 1}}))))


def test_a_run_ends_when_ray_is_shut_down() -> None:
    """And no other Ray is begun by it; also where Ray tells nothing of calls that were on their way."""
    program = (
        "import ray; from tests.clusters.datasets import Slow; from asyncloader import DataLoader\n"
        "from asyncloader.ray import RayWorkers\n"
        "ray.init('local', num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)\n"
        "iterator = iter(DataLoader(Slow(), 1, worker_backend=RayWorkers(1)))\n"
        "next(iterator)\n"
        "ray.shutdown()\n"
        "try: list(iterator)\n"
        "except Exception as error: print('ended by', error, ray.is_initialized())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    told = r"(ray\.shutdown\(\) was called|Ray has not been started yet)"
    assert re.search(rf"ended by No worker can be had on another machine\..*{told}.*\bFalse$", run.stdout.strip(), re.S)


def test_other_versions_are_refused_with_both_named(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless they are allowed; another version of this package never is."""
    here = pool.facts()

    def run(on_mismatch: Any, **others: str) -> list[int]:
        monkeypatch.setattr(pool, "facts", lambda: here | others)
        loader = DataLoader(datasets.Drawing(), 100, worker_backend=stay(1, on_mismatch=on_mismatch))
        return indices(loader)

    with pytest.raises(WorkerStartError, match=rf"Python is 3\.99 here and {re.escape(here['Python'])} there"):
        run("raise", Python="3.99")
    with pytest.raises(WorkerStartError, match=rf"asyncloader is 9 here and {re.escape(here['asyncloader'])} there"):
        run("warn", asyncloader="9")
    assert run("warn", numpy="9") == list(range(datasets.LENGTH))
    assert f"numpy is 9 here and {here['numpy']} there" in caplog.text


class Trainer:
    """A training worker: an actor in a placement group that takes in what it starts, as Ray Train's."""

    def train(self) -> list[int]:
        return indices(DataLoader(datasets.Drawing(), 4, worker_backend=RayWorkers(2)))


def test_workers_are_outside_the_placement_group_of_the_trainer(add_node: Any) -> None:
    """Where there is no room in it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    add_node()
    group = ray.util.placement_group([{"CPU": 1, "goes": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    trainer = ray.remote(Trainer).options(num_cpus=1, scheduling_strategy=strategy).remote()
    try:
        assert ray.get(trainer.train.remote(), timeout=120) == list(range(datasets.LENGTH))
    finally:
        ray.kill(trainer)
        ray.util.remove_placement_group(group)


def test_nothing_outlives_a_trainer_that_is_killed(cluster: Any) -> None:
    """kill -9: its actors are gone."""
    with subprocess.Popen(
        [sys.executable, PROGRAM, cluster.address], stdout=subprocess.PIPE, text=True, cwd="/"
    ) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert pids
        program.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.slow
def test_the_example_trains_on_while_a_node_is_killed() -> None:
    """In a cluster of its own, to its closing line."""
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a node was killed" in done.stdout
    assert re.search(r"^\d+ processes made 16384 samples: 2048 in each epoch, none lost", done.stdout, re.M)


def test_rows_of_a_batch_travel_without_the_rest_of_it() -> None:
    """As an inference engine returns them, and a feed passes them on as keys."""
    rows = list(torch.zeros(64, 4096))[:8]
    (data,) = pool._pickled_keys(rows)
    assert len(data) < 1.1 * 8 * rows[0].nbytes
    assert all(torch.equal(one, other) for one, other in zip(pickle.loads(data), rows, strict=True))
