"""Large files from wherever they lie: read from beginning to end, or some bytes of them, tried again where that helps.

urls ─> Sources, with retries ─> a Source for each kind of url: LocalSource, HTTPSource, StoreSource

read(url) ─> chunks in order   (offset n is here, connection lost) ─> asks for the bytes from n on
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

from asyncloader.datasets.extras import require
from asyncloader.datasets.http import HTTPSource
from asyncloader.datasets.local import CHUNK_BYTES, LocalSource
from asyncloader.datasets.objects import StoreSource
from asyncloader.datasets.retry import FetchError, Retries
from asyncloader.datasets.source import NOTHING, Known, Source, Version, kind_of, path_of

_LEAST_BYTES = 1 << 16  # have to come within the tries and the time that `Retries` allows, or a stream would not end
_MOST_EMPTY_BYTES = 1 << 20  # of compressed data that holds nothing


Place: TypeAlias = tuple[int, int, int]
"""Number of the file, first byte, and the one behind the last."""

_GAP_BYTES = 1 << 14  # to be read for nothing rather than to ask once more
_MOST_BYTES = 1 << 26  # read in one: what is longer may as well come in parts at once, each of them retried alone


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
        config: Mapping[str, Any] | None,
        client_options: Mapping[str, Any] | None,
        credential_provider: Any,
    ) -> Access:
        """Put the arguments of a dataset together.

        Raises:
            ImportError: The client for one of the urls is not installed; `user` is the class that needs it.
        """
        kinds = set(map(kind_of, urls))
        for client, extra, kind in (("aiohttp", "http", "http"), ("obstore", "objects", "store")):
            if kind in kinds:
                require(client, extra, user)
        options = {"config": config, "client_options": client_options, "credential_provider": credential_provider}
        return cls(retries or Retries(), dict(headers or {}), options)


class Sources:
    """Sources for all kinds of urls, each made when it is first needed, with retries. Belongs to one loop."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._made: dict[str, Source] = {}

    def _of(self, url: str) -> Source:
        kind = kind_of(url)
        if kind not in self._made:
            _, headers, options = self._access
            self._made[kind] = (
                LocalSource() if kind == "file" else HTTPSource(headers) if kind == "http" else StoreSource(options)
            )
        return self._made[kind]

    async def aclose(self) -> None:
        """Close the sources."""
        for source in self._made.values():
            await source.aclose()

    async def version(self, url: str) -> Version:
        """Return which version of a file is there."""
        return await self._access.retries.run(partial(self._of(url).version, url), url)

    async def read_range(self, url: str, start: int, stop: int, version: Version) -> bytes:
        """Return the bytes from `start` up to, and not including, `stop`.

        Raises:
            FetchError: They did not come, or the file is not of this version any more.
        """
        if start == stop:
            return b""
        attempt = partial(self._of(url).read, url, start, stop, version)
        return await self._access.retries.run(attempt, f"{url}, bytes {start} to {stop}")

    async def read_places(
        self, urls: Sequence[str], versions: Sequence[Version], places: Sequence[Place]
    ) -> list[memoryview]:
        """Return the bytes of each place, which may be written to; those of neighbours are parts of one memory.

        If all files are local, one job of a thread reads them; otherwise all are asked for at once.
        """
        reads, which = merged(places)
        ranges = [(urls[file], start, stop, versions[file]) for file, start, stop in reads]
        if all(kind_of(url) == "file" for url, *_ in ranges):
            contents = await cast(LocalSource, self._of("")).read_all(ranges)
        else:
            contents = await asyncio.gather(*(self.read_range(*one) for one in ranges))
        memories = [memoryview(bytearray(content)) for content in contents]
        return [
            memories[read][start - reads[read][1] : stop - reads[read][1]]
            for read, (_, start, stop) in zip(which, places, strict=True)
        ]

    async def read(self, url: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file, decompressed if its name ends with .gz or .tgz, or the server says it has to be.

        If both are so it is decompressed once: servers take the name for a reason to say it.
        """
        async with contextlib.aclosing(self._pieces(url)) as pieces:
            first, known = await anext(pieces)

            async def chunks() -> AsyncGenerator[bytes, None]:
                yield first
                async for piece, _ in pieces:
                    yield piece

            content = chunks()
            if known.is_gzipped or path_of(url).endswith((".gz", ".tgz")):
                content = gunzip(content, url)
            async with contextlib.aclosing(content):
                async for chunk in content:
                    yield chunk

    async def _pieces(self, url: str) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Yield a file as it is stored, in pieces that are tried again by themselves, from where they failed."""
        known, begin, at, parts = NOTHING, 0, 0, list[bytes]()
        running: AsyncGenerator[tuple[bytes, Known], None] | None = None

        async def more() -> bool:
            nonlocal known, at, running
            running = running or self._of(url).stream(url, at, None, known)
            try:
                while at - begin < _LEAST_BYTES:
                    chunk, known = await anext(running)
                    parts.append(chunk)
                    at += len(chunk)
            except StopAsyncIteration:
                return False
            except BaseException:
                broken, running = running, None
                await broken.aclose()
                raise
            return True

        try:
            while await self._access.retries.run(more, url):
                yield b"".join(parts), known
                parts.clear()
                begin = at
            yield b"".join(parts), known
        finally:
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


def merged(places: Sequence[Place], gap: int = _GAP_BYTES, most: int = _MOST_BYTES) -> tuple[list[Place], list[int]]:
    """Return the ranges to read, and for each place which of them it is in."""
    reads: list[Place] = []
    which = [0] * len(places)
    for at in sorted(range(len(places)), key=places.__getitem__):
        file, start, stop = places[at]
        last, first, end = reads[-1] if reads else (-1, 0, 0)
        is_near = file == last and start <= end + gap
        if is_near and (stop <= end or stop - first <= most):
            reads[-1] = (file, first, max(end, stop))
        else:
            reads.append((file, start, stop))
        which[at] = len(reads) - 1
    return reads, which
