"""Files of fsspec's file systems: a folder, a zip file, and HTTP, whose client is asynchronous inside."""

from __future__ import annotations

import asyncio
import errno
import pickle
import socket
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec.asyn
import pytest
from fsspec.implementations.cached import SimpleCacheFileSystem
from fsspec.implementations.local import LocalFileSystem

from asyncloader import ConfigurationError
from asyncloader.datasets import ByteRange, FetchError, FsspecDataset, ParquetDataset, Retries
from tests.services.fault_server import FaultServer


@pytest.fixture(scope="module", autouse=True)
def thread_of_fsspec() -> None:
    """Bring to life what stays once fsspec has used an asynchronous file system: its loop, in a thread."""
    fsspec.asyn.get_loop()


@pytest.mark.parametrize("system", ["folder", "zip", "tar"])
async def test_files_come_listed_whole_and_in_parts(
    folder_of_objects: Path, objects: dict[str, bytes], system: str
) -> None:
    """All files sorted by path, those that end as asked, given ones and ranges; also after a journey as a pickle."""
    url = str(folder_of_objects)
    if system == "zip":
        archive = folder_of_objects.with_suffix(".zip")
        with zipfile.ZipFile(archive, "w") as file:
            for name, data in objects.items():
                file.writestr(name, data)
        url = f"zip://::{archive}"
    if system == "tar":
        archive = folder_of_objects.with_suffix(".tar")
        with tarfile.open(archive, "w") as tar:
            for name in objects:
                tar.add(folder_of_objects / name, name)
        url = f"tar://::{archive}"
    names = sorted(objects)
    whole = FsspecDataset(url, None, lambda data, key: (key, data))
    assert whole.keys == names
    assert FsspecDataset(url, suffix=("7", "8")).keys == [name for name in names if name[-1] in "78"]
    async with whole:
        assert await asyncio.gather(*map(whole.__getitem__, range(len(whole)))) == [(n, objects[n]) for n in names]
    parts: FsspecDataset[Any] = FsspecDataset(url, [ByteRange(name, 1, 5) for name in names])
    async with pickle.loads(pickle.dumps(parts)) as copy:
        assert await asyncio.gather(*map(copy.__getitem__, range(len(copy)))) == [objects[n][1:5] for n in names]
    with pytest.raises(FileNotFoundError, match=r"no file that ends with '\.jpg' is there"):
        FsspecDataset(url, suffix=".jpg")
    async with FsspecDataset(url, ["number/gone"]) as missing:
        with pytest.raises(FileNotFoundError, match="gone"):
            await missing[0]


@pytest.mark.leaks("fsspec keeps connections in its cache of file systems")
async def test_failures_over_http_are_tried_again(fault_server: FaultServer, objects: dict[str, bytes]) -> None:
    """Statuses and connections that pass, told from those that do not."""
    passing = [(fault, 2) for fault in ("503", "408", "425", "429", "reset", "short", "cut")]
    faults = [*passing, ("500", 99), ("400", 99)]
    keys = [fault_server.url("number/7", fault=fault, times=times).rpartition("/")[2] for fault, times in faults]
    brisk = Retries(tries=4, first_wait_s=0.005)
    async with FsspecDataset(fault_server.url("number"), keys, retries=brisk) as dataset:
        found = await asyncio.gather(*map(dataset.__getitem__, range(len(passing))))
        assert found == [objects["number/7"]] * len(passing)
        with pytest.raises(FetchError, match=r"500.*\(4 tries\)"):
            await dataset[-2]
        with pytest.raises(Exception, match="400"):
            await dataset[-1]


@pytest.mark.leaks("fsspec keeps connections in its cache of file systems")
async def test_servers_that_are_not_reached_are_tried_again() -> None:
    """Ports at which nobody listens, and names that nobody resolves."""
    for url in ("http://127.0.0.1:1", "http://nowhere.invalid"):
        async with FsspecDataset(url, ["object"], retries=Retries(tries=2, first_wait_s=0.005)) as dataset:
            with pytest.raises(FetchError, match=r"object: Client.*\(2 tries\)"):
                await dataset[0]


def raised_for(error: Exception, cause: Exception, *, explicit: bool = True) -> Exception:
    """An error that was raised because of another, or while another one was handled."""
    if explicit:
        error.__cause__ = cause
    else:
        error.__context__ = cause
    return error


class Refusal(Exception):
    """What a client makes of an answer, under a name that nobody knows."""

    def __init__(self, **told: Any) -> None:
        super().__init__("refused")
        self.__dict__.update(told)


class Failing(LocalFileSystem):
    """The local file system, whose first two reads of a file raise what its name says."""

    protocol = "failing"
    cachable = False
    errors: ClassVar[dict[str, Callable[[], Exception]]] = {
        "reset": lambda: OSError(errno.ECONNRESET, "reset"),
        "unreachable": lambda: OSError(errno.EHOSTUNREACH, "no route"),
        "name": lambda: socket.gaierror(socket.EAI_AGAIN, "no name"),
        "cause": lambda: raised_for(RuntimeError("read failed"), ConnectionResetError("reset")),
        "context": lambda: raised_for(RuntimeError("read failed"), BrokenPipeError("pipe"), explicit=False),
        "chain": lambda: raised_for(RuntimeError(), raised_for(ValueError(), TimeoutError("late"))),
        "not reached": lambda: raised_for(FileNotFoundError("x"), ConnectionRefusedError("refused")),
        "status": lambda: Refusal(status=425),
        "status code": lambda: Refusal(status_code=408),
        "code": lambda: Refusal(code=503),
        "botocore": lambda: Refusal(response={"ResponseMetadata": {"HTTPStatusCode": 500}}),
        "gone": lambda: raised_for(FileNotFoundError("gone"), ConnectionResetError("reset"), explicit=False),
        "forbidden": lambda: Refusal(status=403),
        "disk": lambda: OSError(errno.EIO, "disk"),
    }
    failed: ClassVar[list[str]] = []

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        name = path.rpartition("/")[2]
        if self.failed.count(name) < 2:
            self.failed.append(name)
            raise self.errors[name]()
        return b"whole"


@pytest.fixture
def failing() -> type[Failing]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.failed.clear()
    return Failing


@pytest.mark.parametrize("name", Failing.errors)
async def test_what_passes_is_known_by_its_kind(failing: type[Failing], name: str) -> None:
    """By class, errno and status, of the error itself or of one that it was raised for: not by its name."""
    async with FsspecDataset("failing:///", [name], retries=Retries(tries=3, first_wait_s=0.001)) as dataset:
        if name in ("gone", "forbidden", "disk"):
            with pytest.raises((FileNotFoundError, Refusal, OSError)) as found:
                await dataset[0]
            assert type(found.value) is type(failing.errors[name]())
            assert failing.failed == [name]
        else:
            assert await dataset[0] == b"whole"
            assert failing.failed == [name] * 2


@pytest.mark.parametrize("protocol", ["simplecache", "filecache", "blockcache", "cached"])
def test_caches_of_fsspec_are_refused(folder_of_objects: Path, tmp_path: Path, protocol: str) -> None:
    """From which threads and processes that fill them get wrong bytes; wherever in a chain they are."""
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(folder_of_objects / "number" / "1", "a/1")
    options: dict[str, Any] = {protocol: {"cache_storage": str(tmp_path / "cache")}}
    chains = [
        (f"{protocol}::file://{folder_of_objects}", options),
        (f"zip://::{protocol}::file://{archive}", options),
        (f"dir://a::zip://::{protocol}::file://{archive}", options),
        (f"{protocol}::zip://::file://{archive}", options),
    ]
    for url, given in chains:
        with pytest.raises(ConfigurationError, match=r"a cache of fsspec's.*CachedDataset, or copy the files"):
            FsspecDataset(url, ["1"], storage_options=given)
    with pytest.raises(ConfigurationError, match="a cache of fsspec's"):
        ParquetDataset(f"{protocol}::file://{archive}", storage_options=options)


def test_a_cache_of_ones_own_is_refused(folder_of_objects: Path, tmp_path: Path) -> None:
    """Also where it is named in the options of another file system."""

    class Own(SimpleCacheFileSystem):
        protocol = "own"

    fsspec.register_implementation("own", Own, clobber=True)
    storage = str(tmp_path / "cache")
    with pytest.raises(ConfigurationError, match="Own is a cache of fsspec's"):
        FsspecDataset(f"own::file://{folder_of_objects}", storage_options={"own": {"cache_storage": storage}})
    hidden = {"target_protocol": "own", "target_options": {"target_protocol": "file", "cache_storage": storage}}
    with pytest.raises(ConfigurationError, match="Own is a cache of fsspec's"):
        FsspecDataset("dir://", storage_options={"path": str(folder_of_objects), **hidden})
