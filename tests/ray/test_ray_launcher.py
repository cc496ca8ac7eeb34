"""Where there is room for workers, by what Ray says of nodes; and options that cannot work. Without Ray."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader import ConfigurationError, DataLoader
from asyncloader.engine.portal import get_portal
from asyncloader.ray import RayWorkers, ray_launcher
from asyncloader.ray.ray_launcher import RayLauncher, has_died
from asyncloader.ray.rooms import SHORT_AFTER_S, Nodes, Place, Room, Shortage, find_rooms, free_in_bundles
from asyncloader.worker.guarded_loop import GuardedLoop

FREE = {"here": {"CPU": 4.0}, "a": {"CPU": 2.0, "disk": 1.0}, "b": {"CPU": 8.0}, "full": {"memory": 1.0}}


def at(node: str, size: int) -> Room:
    return Room(Place(node), size)


@pytest.mark.parametrize(
    ("need", "wanted", "expected"),
    [
        ({"CPU": 1.0}, 9, [at("b", 8), at("a", 1)]),
        ({"CPU": 1.0}, 12, [at("b", 8), at("a", 2), at("here", 2)]),
        ({"CPU": 1.0}, None, [at("b", 8), at("a", 2)]),
        ({"CPU": 3.0}, 9, [at("b", 2), at("here", 1)]),
        ({"CPU": 0.5, "disk": 0.5}, 9, [at("a", 2)]),
        ({"GPU": 1.0}, 9, []),
    ],
)
def test_workers_go_where_there_is_room(need: dict[str, float], wanted: int | None, expected: list[Room]) -> None:
    """Where there is most first, to the trainer's own node last."""
    assert find_rooms(Nodes().free(FREE), need, wanted, "here") == expected


def test_a_node_that_is_alone_takes_all_there_is_room_for() -> None:
    assert find_rooms(Nodes().free({"here": {"CPU": 4.0}}), {"CPU": 1.0}, None, "here") == [at("here", 4)]


GROUP, OTHER = "0a" * 18, "0b" * 18
RESERVED = {
    "here": {"CPU": 4.0, f"CPU_group_0_{GROUP}": 8.0, f"CPU_group_{GROUP}": 9.0, f"bundle_group_0_{GROUP}": 1000.0},
    "a": {f"CPU_group_1_{GROUP}": 3.0, f"a_group_1_x_group_1_{GROUP}": 1.0, f"CPU_group_0_{OTHER}": 16.0},
    "b": {"CPU": 8.0, f"CPU_group_12_{GROUP}": 2.0, f"CPU_group_3_{GROUP}": 1.0, f"bundle_group_4_{GROUP}": 1000.0},
}


@pytest.mark.parametrize(
    ("need", "wanted", "expected"),
    [
        ({"CPU": 1.0}, None, [("a", 1, 3), ("b", 12, 2), ("b", 3, 1), ("here", 0, 8)]),
        ({"CPU": 1.0}, 4, [("a", 1, 3), ("b", 12, 1)]),
        ({"CPU": 2.0}, None, [("a", 1, 1), ("b", 12, 1), ("here", 0, 4)]),
        ({"CPU": 1.0, "a_group_1_x": 1.0}, None, [("a", 1, 1)]),
        ({"CPU": 9.0}, None, []),
    ],
)
def test_workers_go_into_bundles(need: dict[str, float], wanted: int | None, expected: list[Any]) -> None:
    """Into what is free of each, also on the trainer's own node; never into what is nobody's, or another group's."""
    rooms = find_rooms(free_in_bundles(RESERVED, GROUP), need, wanted, "here")
    assert rooms == [Room(Place(node, bundle), size) for node, bundle, size in expected]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 0}, "num_workers should be at least 1"),
        ({"num_workers": True}, "num_workers should be at least 1"),
        ({"max_workers": 0}, "max_workers should be at least 1"),
        ({"num_workers": 2, "max_workers": 3}, "give one of them"),
        ({"cpus_per_worker": 0}, "more than 0 of CPU"),
        ({"resources": {"disk": -1}}, "more than 0 of disk"),
        ({"placement": "pack"}, r"placement should be a placement group.*'pack'"),
        ({"placement": [{"CPU": 1}]}, r"ray.util.placement_group"),
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


def test_a_node_has_died_as_soon_as_its_raylet_does_not_listen() -> None:
    """Ray says so later; of a node that Ray does not know nothing can be said."""
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        host, port = raylet.getsockname()
        node = {"NodeID": "a", "Alive": True, "NodeManagerAddress": host, "NodeManagerPort": port}
        assert not has_died("a", [node | {"NodeID": "b", "Alive": False}, node])
        assert has_died("a", [node | {"Alive": False}])
        assert not has_died("c", [node])
    assert has_died("a", [node])


def test_nobody_is_admitted_after_the_wait_for_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that the loop admitted then would be counted as coming for ever: nobody launches it."""
    monkeypatch.setattr(ray_launcher, "_ANSWER_S", 0.05)
    portal, go_on, admitted = get_portal(), threading.Event(), []
    yard = SimpleNamespace(admit=admitted.append)
    launcher = RayLauncher({"CPU": 1.0}, {}, Nodes())
    launcher._yard, launcher._loop = yard, GuardedLoop(portal.loop)  # type: ignore[assignment]
    portal.post(go_on.wait)
    with pytest.raises(TimeoutError):
        launcher._admit(2)
    go_on.set()
    portal.call(lambda: None).result(10)
    assert admitted == []
    launcher._admit(3)
    assert admitted == [3]


def test_fewer_workers_than_were_asked_for_are_told_once_each_time() -> None:
    """With how many there are and what the others would take; not while nodes are only slow to tell."""
    shortage = Shortage("the cluster", {"CPU": 1.0}, 8)
    assert shortage.look(2, 8, 0.0) == ""
    assert shortage.look(2, 8, SHORT_AFTER_S / 2) == ""
    words = shortage.look(2, 8, SHORT_AFTER_S)
    assert words.startswith("2 of 8 workers on other machines are there: the cluster has no room for the others")
    assert "{'CPU': 1.0}" in words
    assert shortage.look(3, 8, 100.0) == ""
    assert shortage.look(8, 8, 200.0) == ""
    assert shortage.look(5, 8, 300.0) == ""
    assert shortage.look(5, 8, 300.0 + SHORT_AFTER_S).startswith("5 of 8 workers")


@pytest.mark.parametrize(("there", "wanted"), [(0, 8), (8, None), (2, 2), (9, 8)])
def test_no_shortage_is_told_of_where_there_is_none(there: int, wanted: int | None) -> None:
    """Where nobody is there something else is told; fewer may be wanted for a while."""
    shortage = Shortage("the cluster", {"CPU": 1.0}, 8)
    assert [shortage.look(there, wanted, at) for at in (0.0, SHORT_AFTER_S, 100.0)] == ["", "", ""]
