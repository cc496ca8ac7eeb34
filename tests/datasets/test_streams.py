"""Streams and objects from a server that answers word for word as it is told: what was changed, cut off, compressed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import zlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from asyncloader.datasets import ByteRange, FetchError, HTTPDataset, Retries
from asyncloader.datasets.http import HTTPSource
from asyncloader.datasets.local import read_range
from asyncloader.datasets.source import Version
from asyncloader.datasets.sources import Access, Sources
from tests import inside

BRISK = Retries(tries=3, first_wait_s=0.005, longest_wait_s=0.01, total_s=20)
OLD, NEW = bytes(range(256)) * 4, bytes(range(255, -1, -1)) * 4
DATE = "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT"
LATER = "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT"
GZIP = "Content-Encoding: gzip"


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """Return an answer; one whose body is shorter than its length breaks off."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "".join(f"{line}\r\n" for line in (*lines, "Connection: close", "")).encode() + body


def rest(data: bytes, start: int, *headers: str) -> bytes:
    """Return the answer that has the bytes from `start` on."""
    told = f"Content-Range: bytes {start}-{len(data) - 1}/{len(data)}"
    return answer(data[start:], told, *headers, status="206 Partial Content")


def beyond(length: int, *headers: str) -> bytes:
    """Return the answer that there are no bytes from there on."""
    return answer(b"", f"Content-Range: bytes */{length}", *headers, status="416 Range Not Satisfiable")


@contextlib.asynccontextmanager
async def answering(*answers: bytes) -> AsyncGenerator[str, None]:
    """Give these answers in turn, the last one for ever, each over a connection of its own."""
    turns = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(turns, answers[-1]))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def streamed(name: str, *answers: bytes) -> bytes:
    async with answering(*answers) as url:
        sources = Sources(Access.to([url], "test", BRISK, None, None, None, None))
        try:
            return b"".join([chunk async for chunk in sources.read(f"{url}/{name}")])
        finally:
            await sources.aclose()


async def fetched(*answers: bytes, part: tuple[int, int] | None = None) -> bytes:
    async with answering(*answers) as url:
        dataset = HTTPDataset[bytes]([ByteRange(url, *part) if part else url], retries=BRISK)
        async with dataset:
            return await dataset[0]


# ---------------------------------------------------------------------------------------------------------- resumed


async def test_a_stream_goes_on_where_it_broke_off() -> None:
    """With a tag and without one, of a length that is known from the first answer, from the second, or from none."""
    cut = answer(OLD[:300], length=len(OLD))
    assert await streamed("a", cut, rest(OLD, 300)) == OLD
    assert await streamed("a", answer(OLD[:300], DATE, length=len(OLD)), rest(OLD, 300, DATE)) == OLD
    unsaid = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n" + OLD + b"\r\n"  # without the end
    assert await streamed("a", unsaid, beyond(len(OLD))) == OLD
    part = answer(OLD[300:500], "Content-Range: bytes 300-499/*", status="206 Partial Content")
    assert await streamed("a", cut, part, rest(OLD, 500)) == OLD


@pytest.mark.parametrize("size", [600, 2000])
async def test_a_rest_of_another_length_is_of_another_object(size: int) -> None:
    """The server gives no tag: the length alone tells that it was replaced."""
    with pytest.raises(FetchError, match="was changed while it was read"):
        await streamed("a", answer(OLD[:300], length=len(OLD)), rest((NEW * 2)[:size], 300))
    part = answer(OLD[300:500], f"Content-Range: bytes 300-499/{len(OLD)}", status="206 Partial Content")
    with pytest.raises(FetchError, match="was changed while it was read"):
        await streamed("a", answer(OLD[:300], length=len(OLD)), part, rest((NEW * 2)[:size], 500))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (answer(OLD[:300], length=len(OLD)), beyond(300)),
        (answer(OLD[:300], DATE, length=len(OLD)), beyond(300, LATER)),
        (answer(OLD[:300], length=len(OLD)), beyond(200)),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + f"{DATE}\r\n\r\n".encode() + b"100\r\n" + OLD[:256],
         beyond(256, LATER)),
    ],
)  # fmt: skip
async def test_no_bytes_from_there_on_is_an_end_only_of_the_same_object(first: bytes, second: bytes) -> None:
    """416 below the length that it had, or with another tag, tells that it was replaced by a shorter one."""
    with pytest.raises(FetchError, match="was changed while it was read"):
        await streamed("a", first, second)


# ------------------------------------------------------------------------------------------------------- compressed


async def test_a_compressed_body_comes_whole_or_not_at_all() -> None:
    """Though the server was asked not to compress; one that is cut off is tried again, with a length or without."""
    packed = gzip.compress(OLD) + gzip.compress(NEW)
    assert await fetched(answer(packed, GZIP)) == OLD + NEW
    assert await fetched(answer(b"", GZIP)) == b""
    assert await fetched(answer(packed[:-20], GZIP), answer(packed, "Content-Encoding: X-GZIP")) == OLD + NEW
    endless = f"HTTP/1.1 200 OK\r\n{GZIP}\r\nConnection: close\r\n\r\n".encode()
    for cut in (answer(packed[:-20], GZIP), endless + packed[:-20], endless + packed[:100]):
        with pytest.raises(FetchError, match=r"ended in the middle of the compressed data \(3 tries\)"):
            await fetched(cut)
    with pytest.raises(FetchError, match="damaged"):
        await fetched(answer(b"no gzip", GZIP))


async def test_other_compression_is_refused() -> None:
    """Also of ranges: which bytes they count is not those of the object."""
    with pytest.raises(FetchError, match=r"compressed \(Content-Encoding: deflate\), of which only gzip"):
        await fetched(answer(zlib.compress(OLD), "Content-Encoding: deflate"))
    told = f"Content-Range: bytes 10-49/{len(OLD)}"
    with pytest.raises(FetchError, match="ranges of compressed bytes only"):
        await fetched(answer(OLD[10:50], told, GZIP, status="206 Partial Content"), part=(10, 50))


async def test_no_session_decompresses() -> None:
    """Not that for other origins, and not one that is told to."""
    client = HTTPSource(options={"auto_decompress": True})
    try:
        assert [session.auto_decompress for session in inside.sessions(client)] == [False, False]
    finally:
        await client.aclose()


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
async def test_a_compressed_stream_is_resumed_in_stored_bytes(name: str) -> None:
    """It is decompressed once, whether the server says so, its name does, or both; its end is not taken for granted."""
    packed = gzip.compress(os.urandom(1000))
    cut = answer(packed[:300], GZIP, length=len(packed))
    assert await streamed(name, cut, rest(packed, 300, GZIP)) == gzip.decompress(packed)
    with pytest.raises(FetchError, match="ends in the middle of the compressed data"):
        await streamed(name, answer(packed[:-20], GZIP))
    with pytest.raises(FetchError, match="was changed while it was read"):
        await streamed(name, cut, rest(packed, 300))


# ------------------------------------------------------------------------------------------------------ local ranges


def test_a_range_is_read_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives 2 GiB at a time, other systems less; only an empty piece is the end of the file."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    pread: Callable[[int, int, int], bytes] = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, at: pread(file, min(count, 7), at))
    version = Version.of_file(str(path))
    assert read_range(str(path), 3, 900, version) == OLD[3:900]
    with pytest.raises(FetchError, match="ends at byte 1024, before byte 1030"):
        read_range(str(path), 3, 1030, version)
