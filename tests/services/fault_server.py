"""An HTTP server that fails as its urls say: a process of its own, started by tests and benchmarks, killed at will.

    with FaultServer(objects) as server:
        server.store()                                    # of obstore's; the objects have their names in there
        server.name("name", fault="503", times=2)         # an object that fails twice, and then comes

Faults: a status such as ``503``, ``reset`` (the connection breaks), ``cut`` (it breaks in the middle of the body),
``short`` (it ends in the middle).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode

from tests.services.process import ROOT, stop


class FaultServer:
    """Starts and stops the server; its objects are files of a folder that it reads once.

    Args:
        objects: By name, as urls have it.
        latency_s: How long each answer is held back.
    """

    def __init__(self, objects: Mapping[str, bytes], latency_s: float = 0.0) -> None:
        self._folder = TemporaryDirectory()
        for name, data in objects.items():
            path = Path(self._folder.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._latency_s = latency_s
        self._process: subprocess.Popen[str] | None = None
        self._tokens = itertools.count()
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Start it, on the port it had before if it had one."""
        arguments = [self._folder.name, "--port", str(self.port), "--latency-s", str(self._latency_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.fault_server", *arguments],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.stdout.close()
        self.port = int(line)

    def kill(self) -> None:
        """End it as a crash would, without a word to its clients."""
        if self._process is not None:
            stop(self._process, signal.SIGKILL)
            self._process = None

    @property
    def root(self) -> str:
        """The url that all objects are under."""
        return f"http://127.0.0.1:{self.port}"

    def store(self, **options: Any) -> Any:
        """Return a store of obstore's, with further options of its client and of retries."""
        from obstore.store import HTTPStore

        client = {"allow_http": True, **options.pop("client_options", {})}
        return HTTPStore.from_url(self.root, client_options=client, **options)

    def name(self, name: str, **faults: Any) -> str:
        """Return the name of an object that goes wrong in this way; each name counts its own failures."""
        return f"{name}?{urlencode({**faults, 'token': next(self._tokens)})}"

    def url(self, name: str) -> str:
        """Return the url of an object."""
        return f"{self.root}/{quote(name)}"

    def seen(self) -> dict[str, int]:
        """Return what the server counted: requests, connections, most requests at once."""
        return self._tell("seen")

    def headers(self) -> dict[str, str]:
        """Return the headers of the last request for an object."""
        return self._tell("headers")

    def _tell(self, what: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url(f"-/{what}"), timeout=10) as answer:
            told: dict[str, Any] = json.load(answer)
        return told


# ---- what runs in the process ----


class Shelf:
    """The objects, and what was asked for."""

    def __init__(self, folder: Path, latency_s: float) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        self.objects = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        self.latency_s = latency_s
        self.failed: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.headers: dict[str, str] = {}


class Connection(asyncio.Protocol):
    """One client. Requests have no body and are not pipelined."""

    transport: asyncio.Transport

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.shelf.seen["connections"] += 1

    def data_received(self, data: bytes) -> None:
        self.received += data
        while b"\r\n\r\n" in self.received:
            head, _, self.received = self.received.partition(b"\r\n\r\n")
            seen = self.shelf.seen
            seen["now"] += 1
            seen["most at once"] = max(seen["most at once"], seen["now"])
            asyncio.get_running_loop().call_later(self.shelf.latency_s, self.answer, head.decode("latin-1"))

    def answer(self, head: str) -> None:
        self.shelf.seen["now"] -= 1
        if self.transport.is_closing():
            return
        request, *lines = head.split("\r\n")
        target = request.split(" ")[1]
        if "?" not in target:  # object stores quote it as well
            target = unquote(target)
        path, _, query = target.partition("?")
        path = unquote(path)
        if path in ("/-/seen", "/-/headers"):
            self.send("200", json.dumps(getattr(self.shelf, path[3:])).encode())
            return
        self.shelf.seen["requests"] += 1
        data = self.shelf.objects.get(path[1:])
        if data is None:
            self.send("404", b"")
            return
        faults = dict(parse_qsl(query))
        fault = faults.get("fault", "")
        if fault and self.shelf.failed[target] < int(faults.get("times", 1 << 60)):
            self.shelf.failed[target] += 1
        else:
            fault = ""
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self.shelf.headers = headers
        status, more = "200", {"ETag": '"0"'}
        if "range" in headers:  # of a client that goes on after a failure
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            more["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            status, data = "206", data[start:stop]
        if fault.isdigit():
            self.send(fault, b"no")
        elif fault == "reset":
            self.transport.abort()
        elif fault in ("cut", "short"):
            self.send(status, data, more, len(data) // 2)
            asyncio.get_running_loop().call_soon(self.transport.abort if fault == "cut" else self.transport.close)
        else:
            self.send(status, data, more)

    def send(self, status: str, data: bytes, more: Mapping[str, str] | None = None, sent: int | None = None) -> None:
        headers = {"Content-Length": len(data), **(more or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} {HTTPStatus(int(status)).phrase}\r\n{lines}\r\n".encode()
        self.transport.write(head + data[:sent])


async def serve(folder: Path, port: int, latency_s: float) -> None:
    shelf = Shelf(folder, latency_s)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(shelf), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.0)
    args = parser.parse_args()
    run: Any = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        run = uvloop.run
    run(serve(args.folder, args.port, args.latency_s))


if __name__ == "__main__":
    main()
