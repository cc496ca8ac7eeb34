"""Clusters of Ray on this machine: several raylets, each a node to Ray. Left alone by `make test`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncloader.run.worker_iterator import WorkerIterator
from tests.clusters.clusters import make_cluster

HERE = Path(__file__).parent
MEMORY = 100 << 20


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import Ray where its tests are left out."""
    if "not ray" in config.option.markexpr and collection_path.name.startswith("test_"):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder. Ray keeps processes, threads and descriptors of its own."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.timeout(300))  # Ray starts a process for each actor, which imports torch
            item.add_marker(pytest.mark.leaks("Ray's own processes and threads; ours are looked for by the tests"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of three nodes. The trainer's has no room for workers; the others, with 2 CPUs each, stay."""
    with make_cluster() as made:
        for _ in range(2):
            made.add_node(num_cpus=2, resources={"stays": 2}, object_store_memory=MEMORY)
        yield made


@pytest.fixture(autouse=True)
def _no_worker_is_left(cluster: Any) -> Iterator[None]:
    """End the runs of a test that failed: they would take the room of the next one."""
    yield
    for thing in gc.get_objects():
        if issubclass(type(thing), WorkerIterator):  # not isinstance, which asks what a weak proxy stands for
            thing.close()


@pytest.fixture
def add_node(cluster: Any) -> Iterator[Any]:
    """Add nodes, each with 2 CPUs, that are there for one test: workers go there for the resource "goes"."""
    added = []

    def add(**options: Any) -> Any:
        given = {"num_cpus": 2, "resources": {"goes": 2}, "object_store_memory": MEMORY, **options}
        added.append(cluster.add_node(**given))
        return added[-1]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)  # gracefully: the others would take it for alive for a while
