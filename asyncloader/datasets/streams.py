"""Large files from wherever they lie: read from beginning to end, or some bytes of them.

Sources.read(url) ─> chunks in order   (offset n is here, connection lost) ─> asks for the bytes from n on
Sources.version(url) ─> size, tag      Sources.read_range(url, start, stop, version) ─> bytes of that version
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import zlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import unquote, urlsplit

from asyncloader.datasets.extras import require
from asyncloader.datasets.http_client import (
    Client,
    check,
    failures_told_apart,
    is_at_end,
    is_gzipped,
    range_header,
)
from asyncloader.datasets.http_client import (
    read_range as read_range_over_http,
)
from asyncloader.datasets.limits import collect_range, open_regular
from asyncloader.datasets.objects import open_store, raise_told_apart
from asyncloader.datasets.opened import Threads
from asyncloader.datasets.retry import FetchError, Retries, TransientError

if TYPE_CHECKING:
    import aiohttp
    from obstore.store import ObjectStore

CHUNK_BYTES = 1 << 20

_LEAST_BYTES = 1 << 16  # have to come within the tries and the time that `Retries` allows, or a stream would not end
_MOST_EMPTY_BYTES = 1 << 20  # of compressed data that holds nothing


def kind_of(url: str) -> str:
    """Tell where a url or path leads: "file", "http" or "store"."""
    scheme = urlsplit(url).scheme if "://" in url else "file"
    return scheme if scheme == "file" else "http" if scheme in ("http", "https") else "store"


def path_of(url: str) -> str:
    """Return the path that a url leads to. In a path of a file, and in an object's name, # and ? mean nothing."""
    if "://" not in url or kind_of(url) == "store":
        return url
    return unquote(urlsplit(url).path)


def _quoted(url: str) -> str:
    """Quote what means something in a url, and nothing in the name of an object."""
    return url.replace("#", "%23").replace("?", "%3F")


class Access(NamedTuple):
    """How files are reached.

    Attributes:
        retries: For each 64 KiB by themselves: a file may take as long as it likes, as long as it goes on.
        headers: For HTTP.
        store_options: For object stores, as :func:`~asyncloader.datasets.objects.open_store` takes them.
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


class Version(NamedTuple):
    """What tells a file from what it was, or may become.

    Attributes:
        size: In bytes.
        tag: Of a local file the time of its last change; else the tag that a server gives it, "" if it gives none.
    """

    size: int
    tag: str

    @classmethod
    def of_file(cls, file: int | str) -> Version:
        """Return that of a local file.

        Raises:
            OSError: It is not there.
        """
        status = os.stat(file)
        return cls(status.st_size, str(status.st_mtime_ns))


class Known(NamedTuple):
    """What is known of a file while it is read: the next bytes are to be of the same one. None is what was not said.

    Attributes:
        tag: What tells this version of the file from another.
        size: In bytes, as it is stored.
        is_gzipped: The server says that it is compressed.
    """

    tag: str | None = None
    size: int | None = None
    is_gzipped: bool | None = None

    def confirmed(self, now: Known, url: str) -> Known:
        """Add what is said now.

        Raises:
            FetchError: It contradicts what is known.
        """
        if any(None not in (old, new) and old != new for old, new in zip(self, now, strict=True)):
            raise FetchError(f"{url}: was changed while it was read")
        return self._replace(**{name: value for name, value in now._asdict().items() if value is not None})


class Sources:
    """Clients for all kinds of urls, each made when it is first needed. Belongs to one loop."""

    def __init__(self, access: Access) -> None:
        self._retries, self._headers, self._store_options = access
        self._threads = Threads(1, "shards")
        self._http_client: Client | None = None
        self._stores: dict[str, ObjectStore] = {}

    async def close(self) -> None:
        """Close the clients."""
        self._threads.close()
        self._stores.clear()
        if self._http_client is not None:
            await self._http_client.close()

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
        return await self._retries.run(partial(self._version, url), url)

    async def read_range(self, url: str, start: int, stop: int, version: Version) -> bytes:
        """Return the bytes from `start` up to, and not including, `stop`.

        Raises:
            FetchError: They did not come, or the file is not of this version any more.
        """
        if start == stop:
            return b""
        attempt = {"file": self._range_of_file, "http": self._range_over_http, "store": self._range_in_store}
        what = f"{url}, bytes {start} to {stop}"
        return await self._retries.run(partial(attempt[kind_of(url)], url, start, stop, version), what)

    async def read_ranges(self, ranges: Sequence[tuple[str, int, int, Version]]) -> list[bytes]:
        """Return the bytes of several ranges: those of local files read in one job of a thread, others at once."""
        local = [at for at, (url, *_) in enumerate(ranges) if kind_of(url) == "file"]
        away = [at for at, (url, *_) in enumerate(ranges) if kind_of(url) != "file"]
        found: dict[int, bytes] = {}
        if local:
            read = await self._threads.run(_read_ranges, [(path_of(ranges[at][0]), *ranges[at][1:]) for at in local])
            found.update(zip(local, read, strict=True))
        if away:
            read = await asyncio.gather(*(self.read_range(*ranges[at]) for at in away))
            found.update(zip(away, read, strict=True))
        return [found[at] for at in range(len(ranges))]

    async def _chunks(self, stream: _Stream, chunk: bytes, url: str) -> AsyncGenerator[bytes, None]:
        while chunk:
            yield chunk
            chunk = await self._retries.run(stream.next_chunk, url)

    def begin(self, url: str, offset: int, known: Known | None) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Read from an offset on, once: chunks as they are stored, each with what is known of the file by then."""
        attempt = {"file": self._file, "http": self._http, "store": self._store}
        return attempt[kind_of(url)](url, offset, known or Known())

    async def _file(self, url: str, offset: int, known: Known) -> AsyncGenerator[tuple[bytes, Known], None]:
        while True:
            chunk, now = await self._threads.run(_read_part, path_of(url), offset)
            known = known.confirmed(Known(now), url)
            if not chunk:
                return
            yield chunk, known
            offset += len(chunk)

    async def _http(self, url: str, offset: int, known: Known) -> AsyncGenerator[tuple[bytes, Known], None]:
        client = self._client()
        while True:
            headers = range_header(offset) if offset else {}
            if is_same := known.tag is not None and known.tag.startswith('"'):  # servers do not compare weak ones
                headers["If-Match"] = str(known.tag)
            with failures_told_apart():
                async with client.get(url, headers) as answer:
                    tag = tag_of(answer) or None
                    if offset and answer.status == 416:  # nothing lies behind what has come
                        known.confirmed(Known(tag, offset), url)
                        if is_at_end(answer, offset, is_same=is_same):
                            return
                    part = check(answer, url, offset or None)
                    size = answer.content_length if part is None else part.total
                    known = known.confirmed(Known(tag, size, is_gzipped(answer, url)), url)
                    async for chunk in answer.content.iter_any():
                        offset += len(chunk)
                        yield chunk, known
            if part is None or offset == known.size:
                return
            if offset != part.stop:  # else the server gave less than it was asked for, and is asked for more
                raise TransientError(f"the answer ended at byte {offset}, not {part.stop}")

    async def _store(self, url: str, offset: int, known: Known) -> AsyncGenerator[tuple[bytes, Known], None]:
        import obstore

        options: Any = {"range": {"offset": offset}} if offset else {}
        if known.tag is not None:
            options["if_match"] = known.tag
        try:
            answer = await obstore.get_async(*self._store_of(url), options=options)
            known = known.confirmed(Known(answer.meta["e_tag"], answer.meta["size"]), url)
            async for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                offset += len(chunk)
                yield bytes(chunk), known
                if offset == known.size:  # what happens to the connection now does not matter; the rest would be a 416
                    return
        except FetchError:
            raise
        except Exception as error:
            raise_told_apart(error, url)

    async def _version(self, url: str) -> Version:
        if kind_of(url) == "file":
            return await self._threads.run(Version.of_file, path_of(url))
        if kind_of(url) == "store":
            import obstore

            try:
                meta = await obstore.head_async(*self._store_of(url))
            except Exception as error:
                raise_told_apart(error, url)
            return Version(meta["size"], meta["e_tag"] or "")
        # Of a byte, not with HEAD: the answer shows at once whether the server gives ranges.
        with failures_told_apart():
            async with self._client().get(url, range_header(0, 1)) as answer:
                if is_at_end(answer, 0, is_same=False):
                    return Version(0, tag_of(answer))
                part = check(answer, url, 0, 1)
                if part is None or part.total is None:
                    raise FetchError(f"{url}: the server does not say how long it is")
                return Version(part.total, tag_of(answer))

    async def _range_of_file(self, url: str, start: int, stop: int, version: Version) -> bytes:
        return await self._threads.run(read_range, path_of(url), start, stop, version)

    async def _range_over_http(self, url: str, start: int, stop: int, version: Version) -> bytes:
        with failures_told_apart():
            async with self._client().get(url, range_header(start, stop)) as answer:
                part = check(answer, url, start, stop)
                if tag_of(answer) != version.tag or part is None or part.total not in (None, version.size):
                    raise_changed(url)
                return await read_range_over_http(answer, url, stop - start)

    async def _range_in_store(self, url: str, start: int, stop: int, version: Version) -> bytes:
        import obstore

        try:
            answer = await obstore.get_async(*self._store_of(url), options={"range": (start, stop)})
            if (answer.meta["size"], answer.meta["e_tag"] or "") != version:
                raise_changed(url)
            return await collect_range(answer.stream(), stop - start, url)
        except (FetchError, TransientError):
            raise
        except Exception as error:
            raise_told_apart(error, f"{url}, bytes {start} to {stop}")

    def _client(self) -> Client:
        if self._http_client is None:
            self._http_client = Client(self._headers)
        return self._http_client

    def _store_of(self, url: str) -> tuple[ObjectStore, str]:
        """Return the store that a url is in, and its name there. No frame is to keep the store: see OpenStore."""
        folder, _, name = url.rpartition("/")
        if folder not in self._stores:
            self._stores[folder] = open_store(_quoted(folder) + "/", self._store_options)
        return self._stores[folder], name


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


def tag_of(answer: aiohttp.ClientResponse) -> str:
    """Return the tag of the version that an answer has bytes of."""
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def raise_changed(url: str) -> NoReturn:
    """Say that a file is another one now."""
    raise FetchError(f"{url}: was changed since this dataset was made (its size or time is another one); make it anew")


def read_range(path: str, start: int, stop: int, version: Version) -> bytes:
    """Read some bytes of a local file, which must still be of this version."""
    at, parts = start, []
    with open_regular(path) as file:
        if Version.of_file(file.fileno()) != version:
            raise_changed(path)
        while at < stop and (part := os.pread(file.fileno(), stop - at, at)):  # Linux gives no more than 2 GiB at once
            parts.append(part)
            at += len(part)
    if at != stop:
        raise FetchError(f"{path}: ends at byte {at}, before byte {stop}")
    return b"".join(parts)


def _read_ranges(ranges: Sequence[tuple[str, int, int, Version]]) -> list[bytes]:
    return [read_range(*one) for one in ranges]


def _read_part(path: str, offset: int) -> tuple[bytes, str]:
    """Read the bytes from an offset on, and what tells this version of the file from another.

    In one job, which leaves nothing open: a file that aiofiles holds open across awaits is lost to a cancellation that
    comes while a thread is opening it. Opening anew costs some microseconds for each MiB.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        return os.pread(file.fileno(), CHUNK_BYTES, offset), f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


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
