"""Objects of buckets: from moto's S3 server, from a folder, and from a server that fails as told."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncloader.datasets import ByteRange, FetchError, ObjectStoreDataset, Retries
from tests.datasets.conftest import OBJECTS
from tests.leftovers import Holdings
from tests.nursery import Program
from tests.services.fault_server import FaultServer
from tests.services.s3 import KEYS

pytestmark = pytest.mark.usefixtures("threads_of_obstore")

PLAIN = {"allow_http": True}
BRISK = Retries(tries=4, first_wait_s=0.005, longest_wait_s=0.01, total_s=20)


def from_s3(s3: str, *arguments: Any, **options: Any) -> ObjectStoreDataset[Any]:
    config = {**KEYS, "endpoint": s3}
    return ObjectStoreDataset(*arguments, config=config, client_options=PLAIN, retries=BRISK, **options)


async def test_objects_and_ranges_come_from_s3(s3: str, objects: dict[str, bytes]) -> None:
    """Listed at construction, sorted; whole objects and ranges, all at once; also after a journey as a pickle."""
    listed = from_s3(s3, "s3://pictures/train", None, lambda data, key: (key, data))
    names = sorted(objects)
    assert listed.keys == names
    async with listed:
        found = await asyncio.gather(*(listed[index] for index in range(len(listed))))
    assert found == [(name, objects[name]) for name in names]
    ranges = from_s3(s3, "s3://pictures/train", [ByteRange(name, 2, 9) for name in names])
    async with pickle.loads(pickle.dumps(ranges)) as copy:
        assert await asyncio.gather(*map(copy.__getitem__, range(len(copy)))) == [objects[name][2:9] for name in names]


async def test_what_is_not_there_is_named(s3: str) -> None:
    """A key, a bucket, and a prefix with nothing behind it."""
    async with from_s3(s3, "s3://pictures/train", ["number/1", "gone"]) as dataset:
        with pytest.raises(FileNotFoundError, match=r"s3://pictures/train/gone"):
            await dataset[1]
    with pytest.raises(FileNotFoundError, match=r"no object that ends with '\.jpg' is there.*s3://pictures/train"):
        from_s3(s3, "s3://pictures/train", suffix=".jpg")
    with pytest.raises(FetchError, match="s3://no-such-bucket/"):
        from_s3(s3, "s3://no-such-bucket/")


@pytest.fixture(scope="module")
def bucket_server() -> Iterator[FaultServer]:
    """Objects of a bucket that fail as told, in the way S3's urls are made."""
    with FaultServer({f"bucket/{name}": data for name, data in OBJECTS.items()}) as server:
        yield server


def failing(server: FaultServer, *faults: str, **more: Any) -> ObjectStoreDataset[Any]:
    """A dataset whose samples go wrong as told: the faults are part of the keys, of which the urls are made."""
    keys = [server.url("bucket/number/7", fault=fault, **more).partition("/bucket/")[2] for fault in faults]
    config = {"endpoint": server.url("")[:-1], "skip_signature": True, "region": "us-east-1"}
    client_options = {**PLAIN, "timeout": "300ms"}
    return ObjectStoreDataset("s3://bucket/", keys, config=config, client_options=client_options, retries=BRISK)


async def test_failures_that_pass_are_not_seen(bucket_server: FaultServer, objects: dict[str, bytes]) -> None:
    """Each fault twice, then the object: all objects come, whole."""
    faults = ("500", "503", "429", "408", "reset", "cut", "short", "stall")
    async with failing(bucket_server, *faults, times=2) as dataset:
        found = await asyncio.gather(*(dataset[index] for index in range(len(dataset))))
    assert found == [objects["number/7"]] * len(faults)


async def test_failures_that_stay_are_told(bucket_server: FaultServer) -> None:
    """After the last try the error has the key, what happened, and how often; what is forbidden is not tried again."""
    async with failing(bucket_server, "503", "reset", "short", "403", "400") as dataset:
        for index in range(3):
            with pytest.raises(FetchError, match=r"^number/7.fault=.*\(4 tries\)$"):
                await dataset[index]
        with pytest.raises(PermissionError, match="number/7"):
            await dataset[3]
        with pytest.raises(FetchError, match="400 Bad Request"):
            await dataset[4]


async def test_connections_end_with_the_dataset_whatever_keeps_an_error(bucket_server: FaultServer) -> None:
    """A traceback has frames of ours in it, which have what they fetched with."""
    before = Holdings.now()
    async with failing(bucket_server, "503") as dataset:
        with pytest.raises(FetchError) as caught:
            await dataset[0]
    assert before.more_than_before(collect=False) == []
    assert caught.traceback


async def test_a_server_that_stays_away_is_an_error_in_bounded_time() -> None:
    """Nobody listens any more: the error says so after the last try."""
    with FaultServer({"bucket/number/7": b""}) as server:
        dataset = failing(server, "")
    async with dataset:
        with pytest.raises(FetchError, match=r"\(4 tries\)"):
            await dataset[0]


FORKED = """
import asyncio, os, sys
from asyncloader.datasets import ObjectStoreDataset

async def first():
    async with dataset:
        return await dataset[0]

def fork():
    if os.fork() == 0:
        try:
            print(asyncio.run(first()), flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    print(os.wait()[1], flush=True)

dataset = ObjectStoreDataset(sys.argv[1])
fork()
asyncio.run(first())
fork()
"""


def test_forked_workers_are_told_that_the_parent_used_obstore(run: Callable[..., Program], tmp_path: Path) -> None:
    """Listing does not count as use; after a use a forked process gets an error instead of hanging."""
    (tmp_path / "file").write_text("text")
    done = run(FORKED, tmp_path.as_uri())
    unused, ended, used, ended_too = done.out.splitlines()
    assert (unused, ended, ended_too) == ("b'text'", "0", "0"), done.explain("")
    assert used.startswith("obstore was used in process"), done.explain("")
