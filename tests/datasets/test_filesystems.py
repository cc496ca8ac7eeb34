"""Files of fsspec's file systems: a folder, a zip file, and HTTP, whose client is asynchronous inside."""

from __future__ import annotations

import asyncio
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest

from asyncloader.datasets import ByteRange, FetchError, FsspecDataset, Retries
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
    faults = [("503", 2), ("reset", 2), ("short", 2), ("500", 99), ("400", 99)]
    keys = [fault_server.url("number/7", fault=fault, times=times).rpartition("/")[2] for fault, times in faults]
    brisk = Retries(tries=4, first_wait_s=0.005)
    async with FsspecDataset(fault_server.url("number"), keys, retries=brisk) as dataset:
        assert await asyncio.gather(*map(dataset.__getitem__, range(3))) == [objects["number/7"]] * 3
        with pytest.raises(FetchError, match=r"500.*\(4 tries\)"):
            await dataset[3]
        with pytest.raises(Exception, match="400"):
            await dataset[4]
