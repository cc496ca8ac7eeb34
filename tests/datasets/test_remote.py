"""RemoteDataset: objects over HTTP and in S3, failures that pass and that stay, forks."""

from __future__ import annotations

import asyncio
import gc
import pickle
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from obstore.store import HTTPStore, LocalStore, MemoryStore, S3Store

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import FetchError, RemoteDataset
from tests.datasets.conftest import OBJECTS
from tests.services.fault_server import FaultServer
from tests.services.s3 import KEYS
from tests.support.leftovers import Holdings
from tests.support.nursery import Program

pytestmark = pytest.mark.usefixtures("threads_of_obstore")


class Mark:
    """Something that a context refers to."""


mark: ContextVar[Mark] = ContextVar("mark")

HTTP: Any = {"allow_http": True}
QUICK: dict[str, Any] = {
    "retry_config": {
        "max_retries": 3,
        "retry_timeout": timedelta(seconds=20),
        "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=10), "base": 2},
    },
    # None is kept: a connection that is put back while its store goes stays open in one of a hundred runs.
    "client_options": {"timeout": "300ms", "pool_max_idle_per_host": "0"},
}


def length(data: bytes, name: str) -> int:
    return len(data)


def both_faces(dataset: RemoteDataset[Any]) -> list[Any]:
    """Read all samples by both faces."""

    async def awaited() -> list[Any]:
        return await asyncio.gather(*map(dataset.getitem, range(len(dataset))))

    found = list(dataset)
    assert asyncio.run(awaited()) == found
    return found


def test_objects_come_over_http(fault_server: FaultServer) -> None:
    """Decoded with their names; also one whose url is signed, which is a store of its own."""
    named = RemoteDataset(fault_server.store(), OBJECTS, lambda data, name: (name, data))
    assert both_faces(named) == list(OBJECTS.items())
    signed = HTTPStore.from_url(f"{fault_server.url('number/7')}?X-Signature=a%2Fb", client_options=HTTP)
    assert both_faces(RemoteDataset(signed, [""])) == [OBJECTS["number/7"]]
    with_headers = fault_server.store(client_options={"default_headers": {"x-token": "mine"}})
    assert RemoteDataset(with_headers, ["number/0"])[0] == OBJECTS["number/0"]
    assert fault_server.headers()["x-token"] == "mine"


def test_connections_are_closed_with_the_dataset(fault_server: FaultServer) -> None:
    """Though nothing is collected, and obstore is not called again: a dataset for each epoch leaves no sockets.

    What a sample's context refers to, in worker threads the dataset, goes with the sample as well: obstore may keep a
    context that it was called in until its next call.
    """
    marks = weakref.WeakSet[Mark]()

    async def marked(dataset: Any, key: int) -> bytes:
        mark.set(Mark())
        marks.add(mark.get())
        return await dataset.getitem(key)  # type: ignore[no-any-return]

    async def read() -> None:
        dataset = RemoteDataset(fault_server.store(), OBJECTS)
        await asyncio.gather(*(asyncio.create_task(marked(dataset, key)) for key in range(0, 200, 7)))

    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            before = Holdings.now()
            asyncio.run(read())
            assert before.more_than_before(collect=False) == []
            assert not marks
    finally:
        gc.enable()


def test_a_dataset_like_any_other(folder_of_objects: Path) -> None:
    """For torch's loader, in Subset; a copy is made of a pickle; iteration ends."""
    dataset = pickle.loads(pickle.dumps(RemoteDataset(LocalStore(str(folder_of_objects)), OBJECTS, length)))
    lengths = [len(data) for data in OBJECTS.values()]
    assert both_faces(dataset) == lengths
    for kind in (torch.utils.data.DataLoader, DataLoader):
        part = torch.utils.data.Subset(dataset, range(50))
        assert torch.cat(list(kind(part, batch_size=16))).tolist() == lengths[:50]
    with pytest.raises(IndexError):
        dataset[200]
    with pytest.raises(ConfigurationError, match="names should be a list"):
        RemoteDataset(MemoryStore(), "number/7")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_failures_that_pass_are_not_seen(fault_server: FaultServer, num_workers: int) -> None:
    """obstore tries again; every sample comes, in order, many at once."""
    names = [fault_server.name(name, fault="503", times=1) for name in OBJECTS]
    workers = {"num_workers": 2, "multiprocessing_context": "forkserver"} if num_workers else {}
    dataset = RemoteDataset(fault_server.store(**QUICK), names, length)
    loader: Any = DataLoader(dataset, batch_size=16, concurrency=32, **workers)  # type: ignore[arg-type]
    assert torch.cat(list(loader)).tolist() == [len(data) for data in OBJECTS.values()]


@pytest.mark.parametrize("fault", ["500", "429", "408", "reset", "cut", "short"])
def test_each_failure_passes(fault_server: FaultServer, fault: str) -> None:
    """Twice, then the object: it comes whole."""
    name = fault_server.name("number/7", fault=fault, times=2)
    assert RemoteDataset(fault_server.store(**QUICK), [name])[0] == OBJECTS["number/7"]


FAILURES = [("404", FileNotFoundError), ("403", PermissionError), ("400", FetchError), ("503", FetchError)]


@pytest.mark.parametrize(("fault", "kind"), FAILURES)
def test_failures_that_stay_are_told(fault_server: FaultServer, fault: str, kind: type[Exception]) -> None:
    """With the name: what is not there, may not be read, or does not come."""
    dataset = RemoteDataset(fault_server.store(**QUICK), [fault_server.name("number/7", fault=fault)])
    with pytest.raises(kind, match="number/7"):
        dataset[0]
    with pytest.raises(kind, match="number/7"):
        asyncio.run(dataset.getitem(0))


def test_objects_come_from_s3(s3: str) -> None:
    """One that is not there is named."""
    store = S3Store("pictures", prefix="train", endpoint=s3, client_options=HTTP, **KEYS)
    assert both_faces(RemoteDataset(store, OBJECTS)) == list(OBJECTS.values())
    with pytest.raises(FileNotFoundError, match="train/gone"):
        RemoteDataset(store, ["gone"])[0]


FORKED = """
import os, sys
from obstore.store import LocalStore
from asyncloader.datasets import RemoteDataset

def fork():
    if os.fork() == 0:
        try:
            print(len(dataset[0]), flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    print(os.wait()[1], flush=True)

dataset = RemoteDataset(LocalStore(sys.argv[1]), ["number/7"])
fork()
dataset[0]
fork()
"""


def test_forked_workers_are_told_that_the_parent_used_obstore(
    run: Callable[..., Program], folder_of_objects: Path
) -> None:
    """To make the dataset is no use; after a use a forked process gets an error instead of hanging."""
    done = run(FORKED, str(folder_of_objects))
    unused, ended, used, ended_too = done.out.splitlines()
    assert (unused, ended, ended_too) == (str(len(OBJECTS["number/7"])), "0", "0"), done.explain("")
    assert used.startswith("obstore was used in process"), done.explain("")
    assert 'multiprocessing_context="forkserver"' in used
