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

from asyncloader.datasets.http_client import Client, check, failures_told_apart, is_at_end, range_header
from asyncloader.datasets.objects import open_store, raise_told_apart
from asyncloader.datasets.opened import Threads
from asyncloader.datasets.retry import FetchError, Retries, TransientError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CHUNK_BYTES = 1 << 20


def kind_of(url: str) -> str:
    """Tell where a url or path leads: "file", "http" or "store"."""
    scheme = urlsplit(url).scheme if "://" in url else "file"
    return scheme if scheme == "file" else "http" if scheme in ("http", "https") else "store"


def _path(url: str) -> str:
    """Return the path that a url leads to. In a path of a file, and in an object's name, # and ? mean nothing."""
    if "://" not in url or kind_of(url) == "store":
        return url
    return unquote(urlsplit(url).path)


def _quoted(url: str) -> str:
    """Quote what means something in a url, and nothing in the name of an object."""
    return url.replace("#", "%23").replace("?", "%3F")


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
        self._http_client: Client | None = None
        self._stores: dict[str, ObjectStore] = {}

    async def close(self) -> None:
        """Close the clients."""
        self._threads.close()
        if self._http_client is not None:
            await self._http_client.close()

    async def read(self, url: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file, decompressed if its name ends with .gz or .tgz."""
        chunks = self._read(url)
        if _path(url).endswith((".gz", ".tgz")):
            chunks = gunzip(chunks, url)
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
        while True:
            chunk, now = await self._threads.run(_read_part, _path(url), offset)
            if tag not in (None, now):
                raise FetchError(f"{url}: was changed while it was read")
            if not chunk:
                return
            yield chunk, now
            offset, tag = offset + len(chunk), now

    async def _http(self, url: str, offset: int, tag: str | None) -> AsyncGenerator[tuple[bytes, str | None], None]:
        if self._http_client is None:
            self._http_client = Client(self._headers)
        while True:
            headers = range_header(offset) if offset else {}
            if is_same := tag is not None and tag.startswith('"'):  # servers do not compare weak ones
                headers["If-Match"] = str(tag)
            with failures_told_apart():
                async with self._http_client.get(url, headers) as answer:
                    if offset and is_at_end(answer, offset, is_same=is_same):
                        return
                    part = check(answer, url, offset or None)
                    now = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or tag
                    if tag not in (None, now):
                        raise FetchError(f"{url}: was changed while it was read")
                    tag = now
                    async for chunk in answer.content.iter_any():
                        offset += len(chunk)
                        yield chunk, tag
            if part is None or offset == part.total:
                return
            if offset != part.stop:  # else the server gave less than it was asked for, and is asked for more
                raise TransientError(f"the answer ended at byte {offset}, not {part.stop}")

    async def _store(self, url: str, offset: int, tag: str | None) -> AsyncGenerator[tuple[bytes, str | None], None]:
        import obstore

        folder, _, name = url.rpartition("/")
        if folder not in self._stores:
            self._stores[folder] = open_store(_quoted(folder) + "/", self._store_options)
        options: Any = {"range": {"offset": offset}} if offset else {}
        if tag is not None:
            options["if_match"] = tag
        try:
            answer = await obstore.get_async(self._stores[folder], name, options=options)
            tag, size = answer.meta["e_tag"], answer.meta["size"]
            async for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                offset += len(chunk)
                yield bytes(chunk), tag
                if offset == size:  # what happens to the connection now does not matter; the rest would be a 416
                    return
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


async def gunzip(chunks: AsyncGenerator[bytes, None], url: str) -> AsyncGenerator[bytes, None]:
    """Decompress; a file may be several gzip files one after the other, and zeros behind them.

    Yields no more than CHUNK_BYTES at a time, however much a chunk grows: a thousandfold, if it is all the same.
    """
    unpack, is_between = zlib.decompressobj(wbits=31), True
    try:
        async for chunk in chunks:
            while chunk := chunk.lstrip(b"\0") if is_between else chunk:
                data = unpack.decompress(chunk, CHUNK_BYTES)
                chunk, is_between = unpack.unconsumed_tail or unpack.unused_data, unpack.eof
                if is_between:
                    unpack = zlib.decompressobj(wbits=31)
                if data:
                    yield data
    except zlib.error as error:
        raise FetchError(f"{url}: damaged: {error}") from error
    finally:
        await chunks.aclose()
    if not is_between:
        raise FetchError(f"{url}: damaged: it ends in the middle of the compressed data")
