"""What the doctor says of Ray, by what a cluster tells; tests/clusters asks one that is there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from asyncloader.cli import cluster
from asyncloader.cli.finding import Finding
from asyncloader.ray import RayWorkers

TOLD: dict[str, Any] = {
    "gcs": "127.0.0.1:6379",
    "here": "a",
    "address": "127.0.0.1",
    "cpus": 24.0,
    "free": {"a": {"CPU": 4.0}, "b": {"CPU": 8.0}},
    "has_token": True,
}

Look = Callable[..., dict[str, Finding]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Have Ray installed, and its cluster tell this."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.60.0")
    monkeypatch.setattr(cluster, "_has_begun", lambda: True)

    def found(told: Any = TOLD, workers: RayWorkers | None = None) -> dict[str, Finding]:
        monkeypatch.setattr(cluster, "ask", lambda: told)
        return {one.what: one for one in cluster.look(workers)}

    return found


def test_a_cluster_is_shown_with_where_agents_dial(look: Look) -> None:
    """All is well but the address, which is this machine's own: the other node cannot reach it."""
    found = look()
    assert found["Ray"] == Finding("Ray", "2.60.0, a cluster of 2 nodes at 127.0.0.1:6379, 12 of 24 CPUs free")
    assert found["agents dial"].found.startswith("127.0.0.1, any port")
    assert "Other machines cannot reach that" in found["agents dial"].advice
    assert not found["agents dial"].is_bad
    assert set(found) == {"Ray", "agents dial"}
    assert look(TOLD | {"free": {"a": {"CPU": 4.0}}})["agents dial"].advice == ""


def test_a_cluster_without_token_is_told_of(look: Look) -> None:
    """Where it is on a network: one node is this machine's alone."""
    assert "RAY_AUTH_MODE=token" in look(TOLD | {"has_token": False})["Ray"].advice
    assert look(TOLD | {"has_token": False, "free": {"a": {}}})["Ray"].advice == ""


def test_an_address_that_is_not_this_machines(look: Look) -> None:
    """198.51.100.0/24 is nobody's."""
    found = look(TOLD | {"address": "198.51.100.7"})["agents dial"]
    assert found.is_bad
    assert "cannot listen" in found.found


@pytest.mark.parametrize(
    ("workers", "found", "is_enough"),
    [
        (RayWorkers(num_workers=4), "room for 4 of 4 workers, on 1 nodes", True),
        (RayWorkers(num_workers=32), "room for 12 of 32 workers, on 2 nodes", False),
        (RayWorkers(), "room for 8 workers, on 1 nodes", True),
        (RayWorkers(resources={"disk": 1}), "room for 0 workers, on 0 nodes", False),
    ],
)
def test_room_for_the_workers_of_a_loader(look: Look, workers: RayWorkers, found: str, is_enough: bool) -> None:
    room = look(TOLD, workers)["RayWorkers"]
    assert room.found == found
    assert bool(room.advice) is not is_enough


def test_a_cluster_that_is_gone(look: Look) -> None:
    found = look("nothing after 30 s")["Ray"]
    assert found.is_bad
    assert "does not answer: nothing after 30 s" in found.found


def test_clients_of_ray_would_be_refused(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    found = look()["Ray"]
    assert found.is_bad
    assert "ray job submit" in found.advice


def test_without_a_cluster(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is worth a word where a loader wants one."""
    monkeypatch.setattr(cluster, "_has_begun", lambda: False)
    assert look() == {"Ray": Finding("Ray", "2.60.0, no cluster")}
    assert "ray start" in look(TOLD, RayWorkers())["Ray"].advice


def test_without_ray(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bad where a loader needs it."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not look()["Ray"].advice
    found = look(TOLD, RayWorkers())["Ray"]
    assert found.is_bad
    assert found.advice == "pip install 'asyncloader[ray]'"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('noise'); print('{\"gcs\": 1}')", {"gcs": 1}),
        ("import sys; print('first', file=sys.stderr); sys.exit('ConnectionError: nobody')", "ConnectionError: nobody"),
        ("import time; time.sleep(30)", "nothing after 0 s"),
    ],
)
def test_it_is_asked_in_a_process_that_has_so_long(monkeypatch: pytest.MonkeyPatch, code: str, told: Any) -> None:
    """What it prints, the last line of its error, or that nothing came."""
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([sys.executable, "-c", code], **options))
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.3 if "sleep" in code else 30.0)
    assert cluster.ask() == told
