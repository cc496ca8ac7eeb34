"""An HTTP server that fails as its urls say: a process of its own, started by tests and benchmarks, killed at will.

    with FaultServer(objects) as server:
        server.url("name")                                # the object, as it is
        server.url("name", fault="503", times=2)          # fails twice, then gives the object

Faults: a status such as ``503`` (``after=1``: with Retry-After), ``reset`` (the connection breaks), ``cut`` (it breaks
in the middle of the body), ``short`` (it ends in the middle), ``stall`` (silence in the middle), ``drip`` (a byte at a
time, but all of it in the end), ``whole`` (a range is asked for, the whole object comes), ``late`` (it breaks after the
last byte, of a body whose length is not told), ``elsewhere`` (other bytes come than were asked for), ``unsaid`` (it is
not said which bytes come), ``less`` (half of the range that was asked for), ``redirect`` (to the url ``to``),
``circle``. With ``etag="changes"`` each answer says that the object is another one than before, with ``weak=1`` by a
tag that servers do not compare.
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

    def url(self, name: str, **faults: Any) -> str:
        """Return the url of an object, with what is to go wrong there; each url counts its own failures."""
        if faults:
            faults["token"] = next(self._tokens)
        return f"http://127.0.0.1:{self.port}/{quote(name)}" + ("?" + urlencode(faults) if faults else "")

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
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.shelf.seen["connections"] += 1

    def connection_lost(self, _: Exception | None) -> None:
        for task in self.tasks:
            task.cancel()

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
        tag = f'"{self.shelf.failed[target] if "etag" in faults else 0}"'
        if "weak" in faults:
            tag = f"W/{tag}"
        status, more = "200", {"ETag": tag}
        if headers.get("if-match", tag) != tag:
            self.send("412", b"")
            return
        if "range" in headers and fault != "whole":
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            if start >= len(data):
                self.send("416", b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            if fault == "elsewhere":
                start, stop = 0, stop - start
            elif fault == "less":
                stop -= (stop - start) // 2
            if fault != "unsaid":
                more["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            status, data = "206", data[start:stop]
        if fault.isdigit():
            more = {"Retry-After": faults["after"]} if "after" in faults else {}
            self.send(fault, b"no", more)
        elif fault == "reset":
            self.transport.abort()
        elif fault in ("cut", "short", "stall"):
            self.send(status, data, more, len(data) // 2)
            if fault != "stall":
                asyncio.get_running_loop().call_soon(self.transport.abort if fault == "cut" else self.transport.close)
        elif fault == "late":
            self.transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n")
            self.transport.write(f"ETag: {tag}\r\n\r\n{len(data):x}\r\n".encode() + data + b"\r\n")
            asyncio.get_running_loop().call_later(0.05, self.transport.abort)
        elif fault == "redirect":
            self.send("302", b"", {"Location": faults["to"]})
        elif fault == "circle":
            self.send("302", b"", {"Location": target})
        elif fault == "drip":
            self.send(status, data, more, 0)
            task = asyncio.get_running_loop().create_task(self.drip(data))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            self.send(status, data, more)

    def send(self, status: str, data: bytes, more: Mapping[str, str] | None = None, sent: int | None = None) -> None:
        headers = {"Content-Length": len(data), **(more or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} {HTTPStatus(int(status)).phrase}\r\n{lines}\r\n".encode()
        self.transport.write(head + data[:sent])

    async def drip(self, data: bytes) -> None:
        for byte in data:
            self.transport.write(bytes([byte]))
            await asyncio.sleep(0.001)


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
