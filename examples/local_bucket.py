"""A server for train_from_object_store.py: as much of S3 as reading takes, with the latency of a store far away.

It lists a bucket (ListObjectsV2) and gives its objects (GetObject) out of a folder, and checks no signatures.

    python examples/local_bucket.py FOLDER [--latency-ms 20]     prints its url, serves until it is ended
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import uvloop
from aiohttp import web


@contextlib.contextmanager
def local_bucket(folder: Path, latency_ms: float) -> Iterator[str]:
    """Serve the files of a folder, as the objects of any bucket, from a process of its own. Yields the url."""
    command = [sys.executable, __file__, str(folder), "--latency-ms", str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def make_app(folder: Path, latency_s: float) -> web.Application:
    """Make the server."""
    objects = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    async def give_object(request: web.Request) -> web.Response:
        await asyncio.sleep(latency_s)
        data = objects.get(request.match_info["key"])
        return web.Response(status=404) if data is None else web.Response(body=data)

    async def list_objects(request: web.Request) -> web.Response:
        prefix = request.query.get("prefix", "")
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>0</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, data in sorted(objects.items())
            if key.startswith(prefix)
        )
        listed = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return web.Response(text=listed, content_type="application/xml")

    app = web.Application()
    app.router.add_get("/{bucket}", list_objects)
    app.router.add_get("/{bucket}/", list_objects)
    app.router.add_get("/{bucket}/{key:.+}", give_object)
    return app


async def serve(folder: Path, latency_s: float) -> None:
    """Serve until this is cancelled."""
    runner = web.AppRunner(make_app(folder, latency_s), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=20)
    args = parser.parse_args()
    uvloop.run(serve(args.folder, args.latency_ms / 1000))


if __name__ == "__main__":
    main()
