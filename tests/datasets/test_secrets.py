"""Logins and signatures of urls: they are in no error, traceback or log."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from obstore.store import HTTPStore

from asyncloader import ConfigurationError, DataLoader
from asyncloader.datasets import FetchError, RemoteDataset
from asyncloader.errors import StateMismatchError, redacted
from tests.services.fault_server import FaultServer

ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}, "client_options": {"allow_http": True}}
QUERY = "&X-Amz-Signature=s3cret&sig=s3cret%2Fs3cret&access_token=s3cret"

pytestmark = pytest.mark.usefixtures("threads_of_obstore")

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


def signed(server: FaultServer, fault: str = "400") -> RemoteDataset[Any]:
    """An object that does not come; its url has a login and signatures, and is a store of its own."""
    return at(f"{server.root}/{server.name('number/7', fault=fault)}{QUERY}")


def at(url: str) -> RemoteDataset[Any]:
    return RemoteDataset(HTTPStore.from_url(url.replace("//", "//me:s3cret@"), **ONCE), [""])


FAILURES: dict[str, Callable[[FaultServer], Any]] = {
    "status": lambda server: signed(server)[0],
    "awaited": lambda server: asyncio.run(signed(server).getitem(0)),
    "gone": lambda server: signed(server, "404")[0],
    "refused": lambda server: signed(server, "403")[0],
    "no server": lambda _: at("http://127.0.0.1:1/x?sig=s3cret")[0],
    "worker": lambda server: next(
        iter(DataLoader(signed(server), num_workers=1, multiprocessing_context="forkserver"))
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_no_error_and_no_log_has_a_secret(
    fault_server: FaultServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the message, nor what it was raised for, nor a line of the log."""
    caplog.set_level(logging.DEBUG, "asyncloader")
    with pytest.raises(Exception) as found:
        FAILURES[kind](fault_server)
    told = "".join(traceback.format_exception(found.value))
    lines = [line for line in told.splitlines() if not line.startswith("    ")]  # of the code of this file
    assert "s3cret" not in "\n".join(lines)
    assert "s3cret" not in repr(found.value)
    assert "s3cret" not in caplog.text
