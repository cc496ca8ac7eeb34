"""Servers that tests of datasets share. Each is started when a test first asks for it, and stopped with the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncloader.datasets import RemoteDataset
from tests.services.fault_server import FaultServer
from tests.services.postgres import PostgreSQL
from tests.services.s3 import s3_server

OBJECTS = {f"number/{number}": f"object {number} ".encode() * (1 + number % 50) for number in range(200)}
SERVICES = {"s3", "database"}  # fixtures that need a server which pip does not install with the `dev` extra


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need a server, so that `make test` can leave them out."""
    for item in items:
        if SERVICES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.services)


@pytest.fixture(scope="session")
def fault_server() -> Iterator[FaultServer]:
    """A server of OBJECTS that fails as its urls say."""
    with FaultServer(OBJECTS) as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """moto's S3 server with OBJECTS in the bucket "pictures"."""
    with s3_server("pictures", {f"train/{name}": data for name, data in OBJECTS.items()}) as url:
        yield url


@pytest.fixture(scope="session")
def database() -> Iterator[PostgreSQL]:
    """PostgreSQL with a table `numbers` of 1,000 rows: id, its square, a word."""
    with PostgreSQL() as server:
        server.execute("CREATE TABLE numbers (id int PRIMARY KEY, square int, word text)")
        server.execute("INSERT INTO numbers SELECT n, n * n, 'word ' || n FROM generate_series(0, 999) n")
        yield server


@pytest.fixture(scope="session")
def threads_of_obstore(fault_server: FaultServer) -> None:
    """Bring to life what stays once obstore has been used: its threads, with their descriptors."""
    assert RemoteDataset(fault_server.store(), ["number/1"])[0] == OBJECTS["number/1"]


@pytest.fixture
def objects() -> dict[str, bytes]:
    """What the servers have."""
    return OBJECTS


@pytest.fixture
def folder_of_objects(tmp_path: Path) -> Path:
    """The same as files."""
    for name, data in OBJECTS.items():
        path = tmp_path / "objects" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
    return tmp_path / "objects"
