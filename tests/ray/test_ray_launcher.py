"""Where there is room for workers, by what Ray says of nodes; and options that cannot work. Without Ray."""

from __future__ import annotations

import pickle
import socket
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader import ConfigurationError, DataLoader
from asyncloader.ray import RayWorkers, private
from asyncloader.ray.ray_launcher import RayLauncher, _Actor, has_died
from asyncloader.ray.rooms import Lasting, Nodes, Place, Room, find_rooms, free_in_bundles

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


def test_an_agent_that_the_loop_does_not_admit_is_not_launched() -> None:
    """Its room is looked for again."""
    launcher = RayLauncher({"CPU": 1.0}, {}, Nodes())
    launcher._yard = SimpleNamespace(admit=lambda num_workers: None)  # type: ignore[assignment]
    launcher._asked.append(at("a", 2))
    launcher._admit(at("a", 2))
    step = launcher._steps.get_nowait()
    assert step is not None
    assert launcher._asked == [at("a", 2)]
    step()
    assert launcher._asked == []
    assert launcher._actors == {}


def warned(there: int, wanted: int | None, at_s: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is said at these times of workers that are there, where eight were asked for."""
    launcher = RayLauncher({"CPU": 1.0}, {}, Nodes(), 8)
    launcher._actors[1], launcher._wanted = _Actor(None, Place("a"), there), wanted
    for now in at_s:
        launcher._warn(False, now)
    return caplog.messages


def test_fewer_workers_than_were_asked_for_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """With how many there are and what the others would take, once; not while nodes are only slow to tell."""
    assert warned(2, 8, [0.0, 3.9], caplog) == []
    (words,) = warned(2, 8, [0.0, 4.0, 100.0], caplog)
    assert words.startswith("2 of 8 workers on other machines are there: the cluster has no room for the others")
    assert "{'CPU': 1.0}" in words


@pytest.mark.parametrize(("there", "wanted"), [(0, 8), (8, None), (2, 2), (9, 8)])
def test_no_shortage_is_told_of_where_there_is_none(
    there: int, wanted: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nobody is there something else is told; fewer may be wanted for a while."""
    assert warned(there, wanted, [0.0, 4.0, 100.0], caplog) == []


def test_what_lasts_is_told_once_each_time() -> None:
    """Counted from when it began, anew each time."""
    lasting = Lasting(4.0)
    looks = [
        (True, 0.0),
        (True, 2.0),
        (True, 4.0),
        (True, 9.0),
        (False, 10.0),
        (True, 11.0),
        (True, 14.0),
        (True, 15.0),
    ]
    assert [now for is_so, now in looks if lasting.look(is_so, now)] == [4.0, 15.0]


@pytest.mark.parametrize("version", ["2.59.1", "2.61.0", "3.0.0rc1"])
def test_a_version_of_ray_that_nobody_has_tested_is_refused(version: str) -> None:
    """With what to install; the bounds are those of the extra."""
    with pytest.raises(ConfigurationError, match=rf"but this is {version}.*'ray>=2.60,<2.61'"):
        private.check_version(version)
    private.check_version("2.60.3")
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["ray"] == ["ray>=2.60,<2.61"]
