"""What tests of agents share."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator

import pytest

from asyncloader.ray.door import Door
from asyncloader.ray.launcher import MakeContext
from asyncloader.worker.guarded_loop import GuardedLoop
from tests.ray.callers import Heard, gone


@pytest.fixture(scope="session")
def make_context(tmp_path_factory: pytest.TempPathFactory) -> MakeContext:
    """Make contexts for TLS on this machine."""
    place = tmp_path_factory.mktemp("tls")
    certificate, key = place / "cert.pem", place / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)

    def make(purpose: ssl.Purpose) -> ssl.SSLContext:
        context = ssl.create_default_context(purpose, cafile=str(certificate))
        if purpose is ssl.Purpose.CLIENT_AUTH:
            context.load_cert_chain(certificate, key)
        return context

    return make


@pytest.fixture
async def trainer() -> AsyncIterator[Heard]:
    """A door that is open; agents of number 1 may come in."""
    heard = Heard(expects=1)
    heard.door = Door(GuardedLoop(asyncio.get_running_loop()), heard.is_expected, heard.on_open)
    heard.door.open("127.0.0.1", 0, None)
    yield heard
    heard.door.close()
    for link in heard.open:
        link.drop("the test is over")
    await gone(*heard.open)
