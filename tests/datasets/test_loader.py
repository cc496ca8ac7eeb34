"""The datasets as they are meant to be used: in a DataLoader, with workers and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncloader
from asyncloader import DataLoader
from asyncloader.datasets import (
    FileDataset,
    FsspecDataset,
    HTTPDataset,
    ObjectStoreDataset,
    Retries,
    SQLDataset,
    TarShards,
)
from asyncloader.testing import assert_resumable
from tests.datasets.conftest import OBJECTS
from tests.datasets.test_shards import IDS, SHARDS, text
from tests.services.fault_server import FaultServer
from tests.services.postgres import PostgreSQL

BRISK = Retries(tries=4, first_wait_s=0.005, longest_wait_s=0.01)
pytestmark = pytest.mark.usefixtures("threads_of_obstore", "stream_of_the_portal")

PLACES = [(0, None), (1, "fork"), (2, "fork"), (1, "forkserver"), (2, "thread")]
LENGTHS = [len(data) for data in OBJECTS.values()]


def length(data: bytes, key: object) -> int:
    return len(data)


def square(row: Any) -> int:
    found: int = row["square"]
    return found


def with_noise(data: bytes, key: object) -> float:
    """A random augmentation that runs on a thread."""
    return len(data) + asyncloader.sample_rng().random()


def loader_of(dataset: Any, num_workers: int, place: str | None = None, **options: Any) -> DataLoader[Any]:
    """Make a loader whose workers are threads, or processes started in this way."""
    options |= {"worker_backend": "thread"} if place == "thread" else {"multiprocessing_context": place}
    return DataLoader(dataset, batch_size=16, num_workers=num_workers, **options)


def read(dataset: Any, num_workers: int, place: str | None = None, **options: Any) -> list[Any]:
    loader = loader_of(dataset, num_workers, place, **options)
    return [sample for batch in loader for sample in (batch.tolist() if torch.is_tensor(batch) else batch)]


@pytest.mark.parametrize(("num_workers", "place"), PLACES)
def test_every_sample_comes_in_order(
    fault_server: FaultServer, folder_of_objects: Path, num_workers: int, place: str | None
) -> None:
    """Files, HTTP with failures, an object store, fsspec: in a process of the workers' own or in this one."""
    faulty = [fault_server.url(name, fault="503", times=1) for name in OBJECTS]
    names = list(OBJECTS)
    datasets: list[Any] = [HTTPDataset(faulty, length, retries=BRISK)]
    if place != "fork":  # obstore may not be used in a process whose parent has used it, as this one has by now
        datasets.append(ObjectStoreDataset(folder_of_objects.as_uri(), names, length))
    if place != "forkserver":  # whose workers take long to start
        datasets.append(FileDataset([folder_of_objects / name for name in names], length))
        datasets.append(FileDataset([folder_of_objects / name for name in names], length, threads=4))
        datasets.append(FsspecDataset(str(folder_of_objects), names, length))
    for dataset in datasets:
        assert read(dataset, num_workers, place) == LENGTHS


@pytest.mark.services
@pytest.mark.parametrize(("num_workers", "place"), PLACES)
def test_rows_come_in_order(database: PostgreSQL, num_workers: int, place: str | None) -> None:
    """A query for each batch, a pool for each worker; a key that is missing is named where its batch is due."""
    dataset = SQLDataset(database.dsn, "SELECT * FROM numbers WHERE id = ANY($1)", range(1000), square)
    assert read(dataset, num_workers, place) == [n * n for n in range(1000)]
    dataset.keys = [*range(40), 5000, *range(40, 80)]
    batches = iter(loader_of(dataset, num_workers, place))
    assert [next(batches).tolist() for _ in range(2)] == [[n * n for n in range(b, b + 16)] for b in (0, 16)]
    with pytest.raises(KeyError) as caught:
        next(batches)
    assert caught.value.args == (5000,)
    assert sum(len(batch) for batch in batches) == 81 - 48


@pytest.mark.covering(1)
@pytest.mark.parametrize(("num_workers", "place"), PLACES)
@pytest.mark.parametrize("num_shards", [2, 6])
def test_shards_are_shared_among_workers(tmp_path: Path, num_shards: int, num_workers: int, place: str | None) -> None:
    """Each sample once, with more shards than workers and with fewer; persistent workers count the epochs on."""
    paths = [tmp_path / name for name in list(SHARDS)[:num_shards]]
    for path in paths:
        path.write_bytes(SHARDS[path.name])
    dataset = TarShards(paths, text, shuffle_shards=True, shuffle_buffer=10)
    loader = loader_of(dataset, num_workers, place, persistent_workers=num_workers > 0)
    epochs = []
    for epoch in range(2):
        if not num_workers:
            dataset.set_epoch(epoch)
        epochs.append([sample for batch in loader for sample in batch])
    assert [sorted(epoch) for epoch in epochs] == [IDS[: 20 * num_shards]] * 2
    assert epochs[0] != epochs[1]


def test_augmentation_on_threads_is_reproducible(fault_server: FaultServer, folder_of_objects: Path) -> None:
    """`sample_rng` reaches the function that decodes: the same numbers for any number of workers and any timing."""
    urls = [fault_server.url(name) for name in OBJECTS]
    stutter = [fault_server.url(name, fault="503", times=number % 3) for number, name in enumerate(OBJECTS)]

    def run(dataset: Any, *arguments: Any, **options: Any) -> list[Any]:
        torch.manual_seed(5)
        return read(dataset, *arguments, **options)

    quiet = run(HTTPDataset(urls, with_noise), 1)
    assert len(set(quiet)) == len(quiet)
    assert run(HTTPDataset(stutter, with_noise, retries=BRISK), 2, concurrency=50) == quiet
    files = FileDataset([folder_of_objects / name for name in OBJECTS], with_noise)
    assert run(files, 1) == run(files, 2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_server_killed_in_the_middle_costs_nothing(num_workers: int) -> None:
    """Killed after the first batch and started again: every sample comes, in order."""
    patient = Retries(tries=1000, first_wait_s=0.02, longest_wait_s=0.1)
    with FaultServer(OBJECTS, latency_s=0.05) as server:
        dataset = HTTPDataset([server.url(name) for name in OBJECTS] * 3, length, retries=patient)
        batches = iter(DataLoader(dataset, batch_size=16, num_workers=num_workers, concurrency=32))
        found = next(batches).tolist()
        server.kill()
        server.start()
        for batch in batches:
            found += batch.tolist()
    assert found == LENGTHS * 3


def picture(data: bytes, key: object) -> torch.Tensor:
    return torch.full((3, 100, 100), len(data), dtype=torch.float32)


def test_large_batches_arrive_whole(fault_server: FaultServer) -> None:
    """Those for which a worker has to ask for shared memory, in a loop that watches the same socket."""
    urls = [fault_server.url(name) for name in OBJECTS]
    for _ in range(3):
        loader = DataLoader(HTTPDataset(urls, picture), batch_size=20, num_workers=2)
        assert [batch[:, 1, 2, 3].tolist() for batch in loader] == [LENGTHS[b : b + 20] for b in range(0, 200, 20)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_early_closes_everything(fault_server: FaultServer, num_workers: int) -> None:
    """A loop that is broken off while requests hang leaves no thread, process or connection (see conftest.py)."""
    urls = [fault_server.url(name) for name in OBJECTS]
    urls[40:] = [fault_server.url(name, fault="stall") for name in list(OBJECTS)[40:]]
    loader = DataLoader(HTTPDataset(urls, length), batch_size=16, num_workers=num_workers)
    for batch in loader:
        assert batch.tolist() == LENGTHS[:16]
        break


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_resume_in_the_middle(tmp_path: Path, num_workers: int) -> None:
    """A loader's state after any batch gives the rest of the epoch, and then the next epoch."""
    paths = [tmp_path / name for name in list(SHARDS)[:2]]
    for path in paths:
        path.write_bytes(SHARDS[path.name])
    assert_resumable(lambda: loader_of(TarShards(paths, text, shuffle_shards=True, shuffle_buffer=10), num_workers))
