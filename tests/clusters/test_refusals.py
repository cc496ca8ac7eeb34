"""Where Ray does not do what one expects: placement groups that take agents in, files of this machine; and doctor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import ConfigurationError, DataLoader
from asyncloader.errors import WorkerStartError
from asyncloader.ray import RayWorkers, ray_launcher
from tests.clusters.test_clusters import Drawing, agents
from tests.patience import wait_until


class Trainer:
    """A training worker: an actor in a placement group that takes in what it starts, as Ray Train's."""

    def train(self) -> list[int]:
        loader = DataLoader(Drawing(), 4, worker_backend=RayWorkers(num_workers=2))
        found = [int(index) for batch in loader for index in batch[0]]
        loader.close()
        return found


def test_agents_are_outside_the_placement_group_of_who_trains(add_node: Any) -> None:
    """Where there is no room in it; they wait for a node, and go there."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    add_node(num_cpus=1)
    group = ray.util.placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    trainer = ray.remote(Trainer).options(num_cpus=1, scheduling_strategy=strategy).remote()
    trained = trainer.train.remote()
    add_node(num_cpus=2)
    try:
        assert ray.get(trained, timeout=60) == list(range(len(Drawing())))
    finally:
        ray.kill(trainer)
        ray.util.remove_placement_group(group)
    wait_until(lambda: not agents())


def test_a_placement_group_that_is_too_small_is_told_of(cluster: Any) -> None:
    """When a run begins, whether it has been placed or not; and so is one that is not there any more."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    group = placement_group([{"CPU": 1}, {"CPU": 3}])
    for options, words in (
        ({"cpus_per_worker": 4}, "no room for a worker in any of its bundles"),
        ({"num_workers": 5}, "no room for 5 workers"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            iter(DataLoader(Drawing(), 4, worker_backend=RayWorkers(placement=group, **options)))
    remove_placement_group(group)
    wait_until(lambda: placement_group_table(group)["state"] == "REMOVED")
    with pytest.raises(ConfigurationError, match="was removed"):
        iter(DataLoader(Drawing(), 4, worker_backend=RayWorkers(placement=group)))


class Imports(Dataset[int]):
    """Samples that need a module which is only in a folder of the trainer's."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        import only_in_that_folder  # type: ignore[import-not-found]

        return index + int(only_in_that_folder.VALUE)


def test_a_folder_of_this_machine_travels(add_node: Any, tmp_path: Path) -> None:
    """Which Ray does for whole jobs only."""
    add_node()
    (tmp_path / "only_in_that_folder.py").write_text("VALUE = 100")
    workers = RayWorkers(num_workers=1, runtime_env={"working_dir": str(tmp_path)})
    loader = DataLoader(Imports(), 4, worker_backend=workers)
    assert [batch.tolist() for batch in loader] == [[100, 101, 102, 103], [104, 105, 106, 107]]
    loader.close()
    wait_until(lambda: not agents())


@pytest.mark.slow
def test_a_folder_is_there_for_agents_that_come_late(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Ray drops what nobody has used for a while, but not while a loader is there; afterwards it does."""
    from ray._private.runtime_env import packaging
    from ray.util.placement_group import placement_group, remove_placement_group

    pinned, pin = [], packaging.pin_runtime_env_uri
    monkeypatch.setattr(packaging, "pin_runtime_env_uri", lambda uri, **how: (pin(uri, **how), pinned.append(uri)))
    monkeypatch.setenv("RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S", "4")
    monkeypatch.setattr(ray_launcher, "_KEPT_S", 6)
    monkeypatch.setattr(ray_launcher, "_LOOK_EVERY_S", 0.1)
    (tmp_path / "only_in_that_folder.py").write_text("VALUE = 200")
    group = placement_group([{"CPU": 64}])  # which waits: no actor uses the folder
    workers = RayWorkers(placement=group, runtime_env={"working_dir": str(tmp_path)})
    loader = DataLoader(Imports(), 4, worker_backend=workers)
    iterator = iter(loader)
    wait_until(lambda: len(pinned) == 6)  # when it was uploaded, and every 2 s: the first two have run out
    assert packaging.package_exists(pinned[0])
    del iterator
    loader.close()
    remove_placement_group(group)
    wait_until(lambda: not packaging.package_exists(pinned[0]))


def test_a_folder_that_is_too_large_is_told_of(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run begins, with what to do."""
    from ray._private.runtime_env import packaging

    monkeypatch.setattr(packaging, "GCS_STORAGE_MAX_SIZE", 10_000)
    (tmp_path / "large").write_bytes(random.Random(0).randbytes(20_000))
    workers = RayWorkers(num_workers=1, runtime_env={"working_dir": str(tmp_path)})
    with pytest.raises(ConfigurationError, match=r"(?s)runtime_env.*exceeds the maximum size.*excludes"):
        iter(DataLoader(Imports(), 4, worker_backend=workers))


def test_what_ray_does_not_take_ends_a_run_without_others(add_node: Any) -> None:
    """And is no agent that is waited for."""
    add_node()
    workers = RayWorkers(num_workers=1, runtime_env={"env_vars": {"A": 1}})
    with pytest.raises((WorkerStartError, ConfigurationError), match="env_vars"):
        next(iter(DataLoader(Imports(), 4, worker_backend=workers)))
