"""An S3 server from PyPI: moto's, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping

import pytest

from tests.services.process import ROOT, free_port, stop, wait_until_it_listens

SERVER = """
import logging, sys
from moto.server import main
logging.getLogger("werkzeug").setLevel(logging.ERROR)
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""
REGION = "us-east-1"
KEYS = {"access_key_id": "key", "secret_access_key": "secret", "region": REGION}


@contextlib.contextmanager
def s3_server(bucket: str, objects: Mapping[str, bytes]) -> Iterator[str]:
    """Start it and put objects into a bucket. Yields its url."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask_cors") is None:
        reason = "moto is not installed; `make test-services` installs it"
        if os.environ.get("ASYNCLOADER_SERVICES") == "required":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    process = subprocess.Popen(command, text=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_it_listens(process, port)
        url = f"http://127.0.0.1:{port}"
        put(f"{url}/{bucket}", b"")
        for name, data in objects.items():
            put(f"{url}/{bucket}/{name}", data)
        yield url
    finally:
        stop(process)


def put(url: str, data: bytes) -> None:
    """Make a bucket or an object; moto takes requests that are not signed."""
    request = urllib.request.Request(url, data, {"Content-Type": "application/octet-stream"}, method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
