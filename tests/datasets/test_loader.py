"""The datasets as they are meant to be used: in a DataLoader, with workers and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncloader
from asyncloader import DataLoader
from asyncloader.datasets import FileDataset, RemoteDataset, TarShards
from tests.datasets.conftest import OBJECTS
from tests.datasets.tars import IDS, SHARDS, text
from tests.services.fault_server import FaultServer

pytestmark = pytest.mark.usefixtures("threads_of_obstore")

PLACES = [(0, None), (1, "fork"), (2, "fork"), (1, "forkserver"), (2, "thread")]
LENGTHS = [len(data) for data in OBJECTS.values()]


def with_noise(data: bytes, key: object) -> float:
    """A random augmentation."""
    return len(data) + asyncloader.sample_rng().random()


def read(dataset: Any, num_workers: int, place: str | None = None, **options: Any) -> list[Any]:
    """Read all samples with workers that are threads, or processes started in this way."""
    options |= {"worker_backend": "thread"} if place == "thread" else {"multiprocessing_context": place}
    loader: Any = DataLoader(dataset, batch_size=16, num_workers=num_workers, **options)
    return [sample for batch in loader for sample in (batch.tolist() if torch.is_tensor(batch) else batch)]


@pytest.mark.parametrize(("num_workers", "place"), PLACES)
def test_every_sample_comes_in_order(
    fault_server: FaultServer, folder_of_objects: Path, tmp_path: Path, num_workers: int, place: str | None
) -> None:
    """Files, shards, and objects over HTTP: in a process of the workers' own or in this one."""
    assert read(FileDataset([folder_of_objects / name for name in OBJECTS], len), num_workers, place) == LENGTHS
    (tmp_path / "0.tar").write_bytes(SHARDS["00.tar"])
    assert read(TarShards(tmp_path / "0.tar", text), num_workers, place) == IDS[:20]
    if place != "fork":  # obstore may not be used in a process whose parent has used it, as this one has by now
        assert read(RemoteDataset(list(map(fault_server.url, OBJECTS)), len), num_workers, place) == LENGTHS


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_noise_is_that_of_the_sample(folder_of_objects: Path, num_workers: int) -> None:
    """Whatever the number of workers, and however samples overlap; after a resume too."""
    dataset = FileDataset([folder_of_objects / name for name in OBJECTS], with_noise)
    torch.manual_seed(3)
    expected = read(dataset, 1)
    torch.manual_seed(3)
    assert read(dataset, num_workers, concurrency=7) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_early_closes_everything(folder_of_objects: Path, num_workers: int) -> None:
    """A loop that is broken off leaves no thread, process or descriptor (see conftest.py)."""
    dataset = FileDataset([folder_of_objects / name for name in OBJECTS], len)
    for batch in DataLoader(dataset, batch_size=16, num_workers=num_workers, concurrency=64):
        assert batch.tolist() == LENGTHS[:16]
        break


def picture(data: bytes, key: object) -> torch.Tensor:
    return torch.full((3, 100, 100), len(data), dtype=torch.float32)


def test_large_batches_arrive_whole(folder_of_objects: Path) -> None:
    """Those for which a worker has to ask for shared memory, in a loop that watches the same socket."""
    for _ in range(3):
        dataset = FileDataset([folder_of_objects / name for name in OBJECTS], picture)
        loader = DataLoader(dataset, batch_size=20, num_workers=2)
        assert [batch[:, 1, 2, 3].tolist() for batch in loader] == [LENGTHS[b : b + 20] for b in range(0, 200, 20)]
