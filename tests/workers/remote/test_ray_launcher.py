"""Where there is room for workers, by what Ray says of nodes; and options that cannot work. Without Ray."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from asyncloader import ConfigurationError, DataLoader
from asyncloader.ray import RayWorkers
from asyncloader.workers.remote.ray_launcher import Room, find_rooms

FREE = {"here": {"CPU": 4.0}, "a": {"CPU": 2.0, "disk": 1.0}, "b": {"CPU": 8.0}, "full": {"memory": 1.0}}


@pytest.mark.parametrize(
    ("need", "wanted", "expected"),
    [
        ({"CPU": 1.0}, 9, [Room("b", 8), Room("a", 1)]),
        ({"CPU": 1.0}, 12, [Room("b", 8), Room("a", 2), Room("here", 2)]),
        ({"CPU": 1.0}, None, [Room("b", 8), Room("a", 2)]),
        ({"CPU": 3.0}, 9, [Room("b", 2), Room("here", 1)]),
        ({"CPU": 0.5, "disk": 0.5}, 9, [Room("a", 2)]),
        ({"GPU": 1.0}, 9, []),
    ],
)
def test_workers_go_where_there_is_room(need: dict[str, float], wanted: int | None, expected: list[Room]) -> None:
    """Where there is most first, to the trainer's own node last."""
    assert find_rooms(FREE, need, wanted, "here") == expected


def test_a_node_that_is_alone_takes_all_there_is_room_for() -> None:
    assert find_rooms({"here": {"CPU": 4.0}}, {"CPU": 1.0}, None, "here") == [Room("here", 4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 0}, "num_workers should be at least 1"),
        ({"num_workers": True}, "num_workers should be at least 1"),
        ({"max_workers": 0}, "max_workers should be at least 1"),
        ({"num_workers": 2, "max_workers": 3}, "give one of them"),
        ({"cpus_per_worker": 0}, "more than 0 of CPU"),
        ({"resources": {"disk": -1}}, "more than 0 of disk"),
        ({"on_mismatch": "ignore"}, "on_mismatch"),
        ({"port": 70000}, "port"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RayWorkers(**options)


def test_a_loader_with_them_can_be_pickled() -> None:
    """Libraries hand loaders around."""
    loader = DataLoader([1, 2, 3], worker_backend=RayWorkers(num_workers=3, resources={"disk": 1}))
    assert pickle.loads(pickle.dumps(loader)).worker_backend == loader.worker_backend


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run begins."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"asyncloader\[ray\]"):
        iter(DataLoader([1, 2, 3], worker_backend="ray"))
