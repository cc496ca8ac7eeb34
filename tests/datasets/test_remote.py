"""RemoteDataset: objects over HTTP and in S3, ranges, failures that pass and that stay, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from obstore.store import LocalStore, MemoryStore

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import FetchError, RemoteDataset, list_urls
from asyncloader.datasets.apart import run_apart
from asyncloader.datasets.source import Part, read_local, version_of
from tests.datasets.conftest import OBJECTS
from tests.services.fault_server import FaultServer
from tests.services.s3 import KEYS
from tests.support.leftovers import Holdings
from tests.support.nursery import Program

pytestmark = pytest.mark.usefixtures("threads_of_obstore")


class Mark:
    """Something that a context refers to."""


mark: ContextVar[Mark] = ContextVar("mark")

QUICK: dict[str, Any] = {
    "retry_config": {
        "max_retries": 3,
        "retry_timeout": timedelta(seconds=20),
        "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=10), "base": 2},
    },
    "client_options": {"timeout": "300ms"},
}


def both_faces(dataset: RemoteDataset[Any]) -> list[Any]:
    """Read all samples by both faces."""

    async def awaited() -> list[Any]:
        return await asyncio.gather(*map(dataset.getitem, range(len(dataset))))

    found = list(dataset)
    assert asyncio.run(awaited()) == found
    return found


def test_objects_and_ranges_come_over_http(fault_server: FaultServer) -> None:
    """Whole objects and ranges, decoded with their urls; names with blanks and signatures in the query are kept."""
    urls: list[Any] = [fault_server.url(name) for name in OBJECTS]
    assert both_faces(RemoteDataset(urls, lambda data, url: (url, data))) == list(
        zip(urls, OBJECTS.values(), strict=True)
    )
    ranges = [(url, 2, 9) for url in urls] + [(urls[0], 3, 3)]
    assert both_faces(RemoteDataset(ranges)) == [*(data[2:9] for data in OBJECTS.values()), b""]
    signed = RemoteDataset(fault_server.url("number/7") + "?X-Signature=a%2Fb")
    assert (len(signed), signed[0], signed[-1]) == (1, OBJECTS["number/7"], OBJECTS["number/7"])
    with_headers = RemoteDataset(urls[0], client_options={"default_headers": {"x-token": "mine"}})
    assert with_headers[0] == OBJECTS["number/0"]
    assert fault_server.headers()["x-token"] == "mine"


def test_connections_are_closed_with_the_dataset(fault_server: FaultServer) -> None:
    """Though nothing is collected, and obstore is not called again: a dataset for each epoch leaves no sockets.

    What a sample's context refers to, in worker threads the dataset, goes with the sample as well: obstore may keep a
    context that it was called in until its next call.
    """
    marks = weakref.WeakSet[Mark]()
    urls = list(map(fault_server.url, OBJECTS))

    async def marked(dataset: Any, key: int) -> bytes:
        mark.set(Mark())
        marks.add(mark.get())
        return await dataset.getitem(key)  # type: ignore[no-any-return]

    async def read() -> None:
        dataset = RemoteDataset(urls)
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


def test_a_dataset_like_any_other(fault_server: FaultServer, folder_of_objects: Path) -> None:
    """For torch's loader, in Subset; paths and urls of this machine too; a copy is made of a pickle."""
    paths: list[Any] = [folder_of_objects / name for name in OBJECTS]
    dataset = RemoteDataset([path.as_uri() for path in paths[:100]] + paths[100:], len)
    lengths = [len(data) for data in OBJECTS.values()]
    assert both_faces(dataset) == lengths
    for kind in (torch.utils.data.DataLoader, DataLoader):
        part = torch.utils.data.Subset(pickle.loads(pickle.dumps(dataset)), range(50))
        assert torch.cat(list(kind(part, batch_size=16))).tolist() == lengths[:50]
    with pytest.raises(IndexError):
        dataset[200]


def test_stores_of_ones_own(folder_of_objects: Path) -> None:
    """A ready store, in which the urls are names; one that cannot be pickled is for this process and its forks."""
    local = RemoteDataset(list(OBJECTS), store=LocalStore(str(folder_of_objects)))
    assert both_faces(pickle.loads(pickle.dumps(local))) == list(OBJECTS.values())
    memory = MemoryStore()
    memory.put("a", b"first")
    assert both_faces(RemoteDataset(["a", ("a", 1, 3)], store=memory)) == [b"first", b"ir"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_failures_that_pass_are_not_seen(fault_server: FaultServer, num_workers: int) -> None:
    """obstore tries again; every sample comes, in order, many at once."""
    urls = [fault_server.url(name, fault="503", times=1) for name in OBJECTS]
    workers = {"num_workers": 2, "multiprocessing_context": "forkserver"} if num_workers else {}
    loader: Any = DataLoader(RemoteDataset(urls, len, **QUICK), batch_size=16, concurrency=32, **workers)  # type: ignore[arg-type]
    assert torch.cat(list(loader)).tolist() == [len(data) for data in OBJECTS.values()]


@pytest.mark.parametrize("fault", ["500", "429", "408", "reset", "cut", "short"])
def test_each_failure_passes(fault_server: FaultServer, fault: str) -> None:
    """Twice, then the object: it comes whole."""
    url = fault_server.url("number/7", fault=fault, times=2)
    assert RemoteDataset(url, **QUICK)[0] == OBJECTS["number/7"]


def test_failures_that_stay_are_told(fault_server: FaultServer) -> None:
    """With the url: what is not there, may not be read, does not come, is too large, or is less than was asked for."""
    for fault, kind in (("404", FileNotFoundError), ("403", PermissionError), ("400", FetchError), ("503", FetchError)):
        dataset = RemoteDataset(fault_server.url("number/7", fault=fault), **QUICK)
        with pytest.raises(kind, match="number/7"):
            dataset[0]
        with pytest.raises(kind, match="number/7"):
            asyncio.run(dataset.getitem(0))
    for fault in ("elsewhere", "unsaid", "whole", "less"):
        dataset = RemoteDataset([(fault_server.url("number/7", fault=fault), 2, 90)], **QUICK)
        with pytest.raises(FetchError, match="number/7"):
            dataset[0]
    large = RemoteDataset(fault_server.url("number/49"), max_bytes=100)
    with pytest.raises(FetchError, match=r"number/49: larger than 100 bytes.*give the dataset a larger max_bytes"):
        large[0]
    with pytest.raises(FetchError, match="larger than 100 bytes"):
        asyncio.run(large.getitem(0))


def test_a_range_that_a_local_file_does_not_have_is_an_error(tmp_path: Path) -> None:
    """Also one for which there is no memory."""
    path = tmp_path / "ten"
    path.write_bytes(b"0123456789")
    assert RemoteDataset([(path, 2, 4)])[0] == b"23"
    for start, stop in ((2, 11), (0, 1 << 50), (20, 30)):
        with pytest.raises(FetchError, match=rf"ten: has \d+ bytes from byte {start} on"):
            RemoteDataset([(path, start, stop)])[0]


def test_a_local_file_that_is_changed_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may be of both versions."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(100))
    version = version_of(str(path))
    assert read_local(Part(str(path), 0, 100, version)) == bytes(100)

    def changed(fd: int, count: int, offset: int) -> bytes:
        monkeypatch.undo()
        path.write_bytes(b"1" * 100)
        os.utime(path, ns=(1, 1))
        return bytes(count)

    monkeypatch.setattr(os, "pread", changed)
    with pytest.raises(FetchError, match="numbers: was changed"):
        read_local(Part(str(path), 0, 100, version))


def noisy(number: int) -> int:
    """A function of other code, which prints."""
    print("printed by a library")
    os.write(1, b"and by one in C")
    return number + 1


@pytest.mark.interpreter
def test_what_is_printed_in_a_process_of_its_own_is_no_answer() -> None:
    """It goes where errors go."""
    assert run_apart(noisy, 3) == 4


def test_what_cannot_work_is_refused_at_construction() -> None:
    """And nothing is asked of a server for it."""
    for urls, words in (
        ([], "was given no path and no url"),
        ("ftp://host/a", r"ftp:// is no place that RemoteDataset knows: these are .*store=\.\.\."),
        ([("s3://bucket/a", 3, 2)], "there are no bytes from 3 up to 2"),
        ([("s3://bucket/a", 3)], "a sample is a url or"),
        ([7], "a sample is a url or"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            RemoteDataset(urls)  # type: ignore[arg-type]
    assert len(RemoteDataset("https://user:secret@nowhere.invalid/a")) == 1


@pytest.fixture(scope="module")
def s3_options(s3: str) -> dict[str, Any]:
    return {"config": {**KEYS, "endpoint": s3}, "client_options": {"allow_http": True}}


def test_objects_and_ranges_come_from_s3(s3_options: dict[str, Any]) -> None:
    """Listed by a process of its own, sorted; whole objects and ranges."""
    urls = list_urls("s3://pictures/train/", **s3_options)
    assert urls == [f"s3://pictures/train/{name}" for name in sorted(OBJECTS)]
    assert both_faces(RemoteDataset(urls, **s3_options)) == [OBJECTS[name] for name in sorted(OBJECTS)]
    assert both_faces(RemoteDataset([(url, 2, 9) for url in urls[:9]], **s3_options))[0] == OBJECTS["number/0"][2:9]
    assert list_urls("s3://pictures/train", "/7", **s3_options) == ["s3://pictures/train/number/7"]
    with pytest.raises(FileNotFoundError, match=r"no object that ends with '\.jpg' is there.*s3://pictures/train"):
        list_urls("s3://pictures/train", ".jpg", **s3_options)
    with pytest.raises(FileNotFoundError, match="s3://pictures/train/gone"):
        RemoteDataset("s3://pictures/train/gone", **s3_options)[0]
    with pytest.raises((FetchError, FileNotFoundError), match="s3://no-such-bucket"):
        list_urls("s3://no-such-bucket/", **s3_options)


FORKED = """
import os, sys
from asyncloader.datasets import RemoteDataset, TarShards

def fork():
    if os.fork() == 0:
        try:
            print(dataset[0], flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    print(os.wait()[1], flush=True)

dataset = RemoteDataset(["number/7"], store=__import__("obstore").store.LocalStore(sys.argv[1]), decode=len)
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
