"""Large files read from beginning to end, from wherever they lie; where a connection breaks, the next one goes on.

Sources.read(url) ─> chunks in order   (offset n is here, connection lost) ─> asks for the bytes from n on
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from asyncloader.datasets.http import check, failures_told_apart, make_session, range_header
from asyncloader.datasets.objects import open_store, raise_told_apart
from asyncloader.datasets.opened import Threads
from asyncloader.datasets.retry import FetchError, Retries

if TYPE_CHECKING:
    import aiohttp
    from obstore.store import ObjectStore

CHUNK_BYTES = 1 << 20


def kind_of(url: str) -> str:
    """Tell where a url or path leads: "file", "http" or "store"."""
    scheme = urlsplit(url).scheme if "://" in url else "file"
    return scheme if scheme == "file" else "http" if scheme in ("http", "https") else "store"


class Sources:
    """Clients for all kinds of urls, each made when it is first needed. Belongs to one loop.

    Args:
        retries: For each chunk by itself: a file may take as long as it likes, as long as it goes on.
        headers: For HTTP.
        store_options: For object stores, as :func:`~asyncloader.datasets.objects.open_store` takes them.
    """

    def __init__(self, retries: Retries, headers: Mapping[str, str], store_options: Mapping[str, Any]) -> None:
        self._retries = retries
        self._headers = headers
        self._store_options = store_options
        self._threads = Threads(1, "shards")
        self._session: aiohttp.ClientSession | None = None
        self._stores: dict[str, ObjectStore] = {}

    async def close(self) -> None:
        """Close the clients."""
        self._threads.close()
        if self._session is not None:
            await self._session.close()

    async def read(self, url: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file, decompressed if its name ends with .gz or .tgz."""
        chunks = self._read(url)
        if urlsplit(url).path.endswith((".gz", ".tgz")):
            chunks = _gunzip(chunks, url)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _read(self, url: str) -> AsyncGenerator[bytes, None]:
        stream = _Stream(self, url)
        try:
            while chunk := await self._retries.run(stream.next_chunk, url):
                yield chunk
        finally:
            await stream.close()

    def begin(self, url: str, offset: int, tag: str | None) -> AsyncGenerator[tuple[bytes, str | None], None]:
        """Read from an offset on, once: chunks, each with the tag of the version that it belongs to."""
        return {"file": self._file, "http": self._http, "store": self._store}[kind_of(url)](url, offset, tag)

    async def _file(self, url: str, offset: int, tag: str | None) -> AsyncGenerator[tuple[bytes, str | None], None]:
        path = unquote(urlsplit(url).path) if "://" in url else url
        while True:
            chunk, now = await self._threads.run(_read_part, path, offset)
            if tag not in (None, now):
                raise FetchError(f"{url}: was changed while it was read")
            if not chunk:
                return
            yield chunk, now
            offset, tag = offset + len(chunk), now

    async def _http(self, url: str, offset: int, tag: str | None) -> AsyncGenerator[tuple[bytes, str | None], None]:
        if self._session is None:
            self._session = make_session(self._headers)
        headers = range_header(offset) if offset else {}
        if tag is not None:
            headers["If-Match"] = tag
        with failures_told_apart():
            async with self._session.get(url, headers=headers) as answer:
                check(answer, url, partial=offset > 0)
                tag = answer.headers.get("ETag")
                async for chunk in answer.content.iter_any():
                    yield chunk, None if tag is None or tag.startswith("W/") else tag

    async def _store(self, url: str, offset: int, tag: str | None) -> AsyncGenerator[tuple[bytes, str | None], None]:
        import obstore

        folder, _, name = url.rpartition("/")
        if folder not in self._stores:
            self._stores[folder] = open_store(folder + "/", self._store_options)
        options: Any = {"range": {"offset": offset}} if offset else {}
        if tag is not None:
            options["if_match"] = tag
        try:
            answer = await obstore.get_async(self._stores[folder], name, options=options)
            tag = answer.meta["e_tag"]
            async for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk), tag
        except Exception as error:
            raise_told_apart(error, url)


class _Stream:
    """One file on its way, and how far it has come."""

    def __init__(self, sources: Sources, url: str) -> None:
        self._begin = partial(sources.begin, url)
        self._offset = 0
        self._tag: str | None = None
        self._running: AsyncGenerator[tuple[bytes, str | None], None] | None = None

    async def next_chunk(self) -> bytes:
        """Return the next bytes, b"" at the end. After a failure the next call begins where this one failed."""
        if self._running is None:
            self._running = self._begin(self._offset, self._tag)
        try:
            chunk, self._tag = await anext(self._running)
        except StopAsyncIteration:
            return b""
        except BaseException:
            await self.close()
            raise
        self._offset += len(chunk)
        return chunk

    async def close(self) -> None:
        """Let go of the connection."""
        running, self._running = self._running, None
        if running is not None:
            await running.aclose()


def _read_part(path: str, offset: int) -> tuple[bytes, str]:
    """Read the bytes from an offset on, and what tells this version of the file from another.

    In one job, which leaves nothing open: a file that aiofiles holds open across awaits is lost to a cancellation that
    comes while a thread is opening it. Opening anew costs some microseconds for each MiB.
    """
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        return os.pread(file.fileno(), CHUNK_BYTES, offset), f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


async def _gunzip(chunks: AsyncGenerator[bytes, None], url: str) -> AsyncGenerator[bytes, None]:
    """Decompress; a file may be several gzip files one after the other."""
    unpack, is_between = zlib.decompressobj(wbits=31), True
    try:
        async for chunk in chunks:
            while chunk:
                yield unpack.decompress(chunk)
                chunk, is_between = unpack.unused_data, unpack.eof
                if is_between:
                    unpack = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise FetchError(f"{url}: damaged: {error}") from error
    finally:
        await chunks.aclose()
    if not is_between:
        raise FetchError(f"{url}: damaged: it ends in the middle of the compressed data")
