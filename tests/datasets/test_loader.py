"""A remote dataset as it is meant to be used: in a DataLoader, with workers and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import asyncloader
from asyncloader import DataLoader
from asyncloader.datasets import RemoteDataset
from tests.datasets.conftest import OBJECTS
from tests.services.fault_server import FaultServer

pytestmark = pytest.mark.usefixtures("threads_of_obstore")

LENGTHS = [len(data) for data in OBJECTS.values()]


def length(data: bytes, name: str) -> int:
    return len(data)


def with_noise(data: bytes, name: str) -> float:
    """A random augmentation."""
    return len(data) + asyncloader.sample_rng().random()


def read(dataset: Any, num_workers: int, place: str | None = None, **options: Any) -> list[Any]:
    """Read all samples with workers that are threads, or processes started in this way."""
    options |= {"worker_backend": "thread"} if place == "thread" else {"multiprocessing_context": place}
    loader: Any = DataLoader(dataset, batch_size=16, num_workers=num_workers, **options)
    return [sample for batch in loader for sample in batch.tolist()]


@pytest.mark.parametrize(("num_workers", "place"), [(0, None), (1, "forkserver"), (2, "thread")])
def test_every_sample_comes_in_order(fault_server: FaultServer, num_workers: int, place: str | None) -> None:
    """In a process of the workers' own or in this one. (obstore may not be used after a fork.)"""
    assert read(RemoteDataset(fault_server.store(), OBJECTS, length), num_workers, place) == LENGTHS


def test_noise_is_that_of_the_sample(fault_server: FaultServer) -> None:
    """Whatever the number of workers, and however samples overlap."""
    dataset = RemoteDataset(fault_server.store(), OBJECTS, with_noise)
    torch.manual_seed(3)
    expected = read(dataset, 0, concurrency=1)
    torch.manual_seed(3)
    assert read(dataset, 2, "thread", concurrency=7) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_early_closes_everything(fault_server: FaultServer, num_workers: int) -> None:
    """A loop that is broken off leaves no thread, process or descriptor (see conftest.py)."""
    dataset = RemoteDataset(fault_server.store(), OBJECTS, length)
    options: dict[str, Any] = {"multiprocessing_context": "forkserver"} if num_workers else {}
    for batch in DataLoader(dataset, batch_size=16, num_workers=num_workers, concurrency=64, **options):
        assert batch.tolist() == LENGTHS[:16]
        break
