"""Logins and signatures of urls: they reach the servers that they are for, and no error, traceback or log."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import fsspec.asyn
import pytest

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import (
    ByteRange,
    FetchError,
    FsspecDataset,
    HTTPDataset,
    IndexedTarShards,
    ObjectStoreDataset,
    ParquetDataset,
    Retries,
    TarShards,
    TokenBlocks,
)
from asyncloader.errors import StateMismatchError, redacted
from tests.services.fault_server import FaultServer

TWICE = Retries(tries=2, first_wait_s=0.001)
QUERY = "&X-Amz-Signature=s3cret&sig=s3cret%2Fs3cret&access_token=s3cret"

pytestmark = [
    pytest.mark.leaks("fsspec keeps connections in its cache of file systems"),
    pytest.mark.usefixtures("threads_of_obstore"),
]


@pytest.fixture(scope="module", autouse=True)
def thread_of_fsspec() -> None:
    fsspec.asyn.get_loop()


TEXTS = {
    "https://me:s3cret@host/a.tar: gone": "https://***@host/a.tar: gone",
    "https://s3cret@host:8080/a": "https://***@host:8080/a",
    "postgresql://me:s3@cret@db/x": "postgresql://***@db/x",
    "s3://bucket/a@b.tar": "s3://bucket/a@b.tar",
    "mail me@host": "mail me@host",
    "http://h/a?id=17&X-Amz-Signature=s3cret&n=2": "http://h/a?id=17&X-Amz-Signature=***&n=2",
    "http://h/a?sv=1&sig=s3%2Bcret": "http://h/a?sv=1&sig=***",
    "('http://h/a?api_key=s3cret')": "('http://h/a?api_key=***')",
    "url='http://h/a?TOKEN=s3cret', message='no'": "url='http://h/a?TOKEN=***', message='no'",
    "http://h/cb#access_token=s3cret": "http://h/cb#access_token=***",
    f"http://h/a?x={'0123456789abcdef' * 4}: 404": "http://h/a?x=***: 404",
    "http://h/a?name=train-000017.tar&part=3": "http://h/a?name=train-000017.tar&part=3",
    "http://me:s3cret@a/ and http://you:s3cret@b/?key=s3cret": "http://***@a/ and http://***@b/?key=***",
    "zip://::https://me:s3cret@h/a.zip": "zip://::https://***@h/a.zip",
    "7.jpg?sig=s3cret, 404": "7.jpg?sig=***, 404",
    "which key=value? token=none": "which key=value? token=none",
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_without_their_secrets(text: str) -> None:
    """What names the object stays; what opens it goes."""
    assert redacted(text) == TEXTS[text]
    assert redacted(TEXTS[text]) == TEXTS[text]
    for error in (FetchError(text), ConfigurationError(text), pickle.loads(pickle.dumps(FetchError(text)))):
        assert (str(error), repr(error).count("s3cret")) == (TEXTS[text], 0)
    assert "s3cret" not in str(StateMismatchError("shards", [text], [text]))


def of(server: FaultServer, fault: str = "500") -> str:
    """A url with a login and signatures, of an object that does not come."""
    return server.url("number/7", fault=fault).replace("http://", "http://me:s3cret@") + QUERY


def iterated(dataset: Any) -> Any:
    async def read() -> Any:
        async with dataset:
            return [sample async for sample in dataset]

    return asyncio.run(read())


def first(dataset: Any) -> Any:
    async def read() -> Any:
        async with dataset:
            return await dataset[0]

    return asyncio.run(read())


FAILURES: dict[str, Callable[[FaultServer], Any]] = {
    "status": lambda server: first(HTTPDataset([of(server)], retries=TWICE)),
    "range": lambda server: first(HTTPDataset([ByteRange(of(server), 3, 5)], retries=TWICE)),
    "no range": lambda server: first(HTTPDataset([ByteRange(of(server), 5, 3)], retries=TWICE)),
    "gone": lambda server: first(HTTPDataset([of(server, "404")], retries=TWICE)),
    "refused": lambda server: first(HTTPDataset([of(server, "403")], retries=TWICE)),
    "reset": lambda server: first(HTTPDataset([of(server, "reset")], retries=TWICE)),
    "late": lambda server: first(HTTPDataset([of(server, "stall")], retries=Retries(total_s=0.1))),
    "circle": lambda server: first(HTTPDataset([of(server, "circle")], retries=TWICE)),
    "no url": lambda _: first(HTTPDataset(["http://me:s3cret@:99999/x?sig=s3cret"], retries=TWICE)),
    "elsewhere": lambda server: first(
        HTTPDataset([server.url("number/7", fault="redirect", to="ftp://me:s3cret@h/?sig=s3cret")], retries=TWICE)
    ),
    "shards": lambda server: iterated(TarShards([of(server)], retries=TWICE)),
    "indexed shards": lambda server: IndexedTarShards([of(server)], retries=TWICE),
    "tokens": lambda server: TokenBlocks([of(server)], 4, dtype="u1", retries=TWICE),
    "rows": lambda server: ParquetDataset([of(server)], retries=TWICE),
    "no rows": lambda server: ParquetDataset([of(server, "")], retries=TWICE),
    "worker": lambda server: next(iter(DataLoader(HTTPDataset([of(server)], retries=TWICE), num_workers=1))),
    "store": lambda _: first(
        ObjectStoreDataset("http://me:s3cret@127.0.0.1:1/x?sig=s3cret", ["k"], retries=TWICE)
    ),
    "listing": lambda _: ObjectStoreDataset("http://me:s3cret@127.0.0.1:1/x?sig=s3cret", retries=TWICE),
    "fsspec": lambda server: first(
        FsspecDataset(of(server).partition("number")[0] + "number", [of(server, "400").rpartition("/")[2]])
    ),
    "fsspec, tried again": lambda server: first(
        FsspecDataset(of(server).partition("number")[0] + "number", [of(server).rpartition("/")[2]], retries=TWICE)
    ),
    "fsspec, gone": lambda server: first(
        FsspecDataset(of(server).partition("number")[0] + "number", ["gone?sig=s3cret"], retries=TWICE)
    ),
    "rows through fsspec": lambda _: ParquetDataset(["ftp://me:s3cret@127.0.0.1:1/a.parquet?sig=s3cret"]),
    "cache": lambda server: FsspecDataset("simplecache::" + of(server)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILURES)
def test_no_error_and_no_log_has_a_secret(
    fault_server: FaultServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the message, nor what it was raised for, nor the lines about tries."""
    caplog.set_level(logging.DEBUG, "asyncloader")
    with pytest.raises(Exception) as found:
        FAILURES[kind](fault_server)
    told = "".join(traceback.format_exception(found.value))
    lines = [line for line in told.splitlines() if not line.startswith("    ")]  # of the code of this file
    assert "s3cret" not in "\n".join(lines)
    assert "s3cret" not in repr(found.value)
    assert "s3cret" not in caplog.text


async def test_the_secrets_reach_the_server(fault_server: FaultServer) -> None:
    """What is left out of errors is not left out of requests."""
    url = fault_server.url("number/7", fault="500", times=1).replace("http://", "http://me:s3cret@") + QUERY
    async with HTTPDataset([url], retries=TWICE) as dataset:
        assert await dataset[0]
    assert fault_server.headers()["authorization"] == "Basic bWU6czNjcmV0"
