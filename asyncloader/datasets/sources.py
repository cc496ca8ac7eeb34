"""Large files from wherever they lie: read from beginning to end, or some bytes of them, tried again where that helps.

urls ─> Sources, with retries ─> a Source for each kind of url: LocalSource, HTTPSource, StoreSource

read(url) ─> chunks in order   (offset n is here, connection lost) ─> asks for the bytes from n on
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from asyncloader.datasets.extras import require
from asyncloader.datasets.http_source import HTTPSource
from asyncloader.datasets.local import CHUNK_BYTES, LocalSource
from asyncloader.datasets.objects import StoreSource
from asyncloader.datasets.retry import FetchError, Retries
from asyncloader.datasets.source import Known, Source, Version, kind_of, path_of

_LEAST_BYTES = 1 << 16  # have to come within the tries and the time that `Retries` allows, or a stream would not end
_MOST_EMPTY_BYTES = 1 << 20  # of compressed data that holds nothing


class Access(NamedTuple):
    """How files are reached.

    Attributes:
        retries: For each 64 KiB by themselves: a file may take as long as it likes, as long as it goes on.
        headers: For HTTP.
        store_options: For object stores, as obstore takes them.
    """

    retries: Retries
    headers: dict[str, str]
    store_options: dict[str, Any]

    @classmethod
    def to(
        cls,
        urls: Iterable[str],
        user: str,
        retries: Retries | None,
        headers: Mapping[str, str] | None,
        **store_options: Any,
    ) -> Access:
        """Put the arguments of a dataset together.

        Raises:
            ImportError: The client for one of the urls is not installed; `user` is the class that needs it.
        """
        kinds = set(map(kind_of, urls))
        for client, extra, kind in (("aiohttp", "http", "http"), ("obstore", "objects", "store")):
            if kind in kinds:
                require(client, extra, user)
        return cls(retries or Retries(), dict(headers or {}), store_options)


class Sources:
    """Sources for all kinds of urls, each made when it is first needed. Belongs to one loop."""

    def __init__(self, access: Access) -> None:
        self._retries = access.retries
        self._make: dict[str, Callable[[], Source]] = {
            "file": LocalSource,
            "http": partial(HTTPSource, access.headers),
            "store": partial(StoreSource, access.store_options),
        }
        self._made: dict[str, Source] = {}

    def _of(self, url: str) -> Source:
        kind = kind_of(url)
        if kind not in self._made:
            self._made[kind] = self._make[kind]()
        return self._made[kind]

    async def aclose(self) -> None:
        """Close the sources."""
        for source in self._made.values():
            await source.aclose()

    async def read(self, url: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file, decompressed if its name ends with .gz or .tgz, or the server says it has to be.

        If both are so it is decompressed once: servers take the name for a reason to say it.
        """
        async with contextlib.aclosing(_Stream(self, url)) as stream:
            first = await self._retries.run(stream.next_chunk, url)
            chunks = self._chunks(stream, first, url)
            if stream.known.is_gzipped or path_of(url).endswith((".gz", ".tgz")):
                chunks = gunzip(chunks, url)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def version(self, url: str) -> Version:
        """Return which version of a file is there."""
        return await self._retries.run(partial(self._of(url).version, url), url)

    async def read_range(self, url: str, start: int, stop: int, version: Version) -> bytes:
        """Return the bytes from `start` up to, and not including, `stop`.

        Raises:
            FetchError: They did not come, or the file is not of this version any more.
        """
        if start == stop:
            return b""
        attempt = partial(self._of(url).read, url, start, stop, version)
        return await self._retries.run(attempt, f"{url}, bytes {start} to {stop}")

    async def read_ranges(self, ranges: Sequence[tuple[str, int, int, Version]]) -> list[bytes]:
        """Return the bytes of several ranges: those of local files read in one job of a thread, others at once."""
        local = [one for one in ranges if kind_of(one[0]) == "file"]
        away = [one for one in ranges if kind_of(one[0]) != "file"]
        found = dict(zip(local, await cast(LocalSource, self._of("")).read_all(local), strict=True)) if local else {}
        found |= zip(away, await asyncio.gather(*(self.read_range(*one) for one in away)), strict=True)
        return [found[one] for one in ranges]

    async def _chunks(self, stream: _Stream, chunk: bytes, url: str) -> AsyncGenerator[bytes, None]:
        while chunk:
            yield chunk
            chunk = await self._retries.run(stream.next_chunk, url)

    def begin(self, url: str, offset: int, known: Known) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Read from an offset on, once."""
        return self._of(url).stream(url, offset, known)


class _Stream:
    """One file on its way, and how far it has come."""

    def __init__(self, sources: Sources, url: str) -> None:
        self.known = Known()
        self._begin = partial(sources.begin, url)
        self._offset = 0
        self._came: list[bytes] = []  # and has not been taken
        self._size = 0
        self._is_at_end = False
        self._running: AsyncGenerator[tuple[bytes, Known], None] | None = None

    async def next_chunk(self) -> bytes:
        """Return the next bytes, b"" at the end. After a failure the next call begins where this one failed."""
        while self._size < _LEAST_BYTES and not self._is_at_end:
            if self._running is None:
                self._running = self._begin(self._offset, self.known)
            try:
                chunk, self.known = await anext(self._running)
            except StopAsyncIteration:
                self._is_at_end = True
                break
            except BaseException:
                await self.aclose()
                raise
            self._offset += len(chunk)
            self._size += len(chunk)
            self._came.append(chunk)
        came, self._came, self._size = self._came, [], 0
        return came[0] if len(came) == 1 else b"".join(came)

    async def aclose(self) -> None:
        """Let go of the connection."""
        running, self._running = self._running, None
        if running is not None:
            await running.aclose()


async def gunzip(chunks: AsyncGenerator[bytes, None], url: str) -> AsyncGenerator[bytes, None]:
    """Decompress; a file may be several gzip files one after the other, and zeros behind them.

    Yields no more than CHUNK_BYTES at a time, however much a chunk grows: a thousandfold, if it is all the same.
    """
    unpack, is_between, empty = zlib.decompressobj(wbits=31), True, 0
    try:
        async for chunk in chunks:
            empty += len(chunk)
            if empty > _MOST_EMPTY_BYTES + len(chunk):
                raise FetchError(f"{url}: damaged: {empty:,} bytes of compressed data hold nothing")
            while chunk := chunk.lstrip(b"\0") if is_between else chunk:
                data = unpack.decompress(chunk, CHUNK_BYTES)
                chunk, is_between = unpack.unconsumed_tail or unpack.unused_data, unpack.eof
                if is_between:
                    unpack = zlib.decompressobj(wbits=31)
                if data:
                    empty = 0
                    yield data
    except zlib.error as error:
        raise FetchError(f"{url}: damaged: {error}") from error
    finally:
        await chunks.aclose()
    if not is_between:
        raise FetchError(f"{url}: damaged: it ends in the middle of the compressed data")
