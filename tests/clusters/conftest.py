"""Clusters of Ray on this machine: several raylets, each a node to Ray. Left alone by `make test`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.clusters import end_all, make_cluster

HERE = Path(__file__).parent


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
            item.add_marker(pytest.mark.leaks("Ray's own processes and threads; ours are looked for by the tests"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:This DataLoader will create"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster whose head, where the trainer is, has no room for workers. Nodes are added by tests."""
    with make_cluster() as made:
        yield made


@pytest.fixture
def add_node(cluster: Any) -> Iterator[Any]:
    """Add nodes, each with 2 CPUs, that are there for one test."""
    added = []

    def add(**options: Any) -> Any:
        added.append(cluster.add_node(**{"num_cpus": 2, "object_store_memory": 80 << 20} | options))
        return added[-1]

    yield add
    end_all()
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)  # gracefully: the others would take it for alive for a while
