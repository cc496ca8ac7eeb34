"""Servers and files that send more than anybody asked for: reading ends, in bounded memory, with an error."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import tarfile
import tracemalloc
import zipfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from aiohttp import web
from fsspec.implementations.local import LocalFileSystem

from asyncloader import ConfigurationError
from asyncloader.datasets import (
    ByteRange,
    FetchError,
    FsspecDataset,
    HTTPDataset,
    IndexedTarShards,
    ObjectStoreDataset,
    Retries,
    TarShards,
    listing,
    tar_index,
)
from asyncloader.datasets.source import Version
from asyncloader.datasets.sources import Access, Sources, gunzip

ONCE = Retries(tries=1, total_s=30)
MOST = 1 << 20
ROOM = 12 << 20  # what reading may take beside the sample itself: buffers of both ends, chunks that wait
BLOCK = bytes(1 << 16)


def member(name: str, data: bytes = b"", size: int | None = None, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data) if size is None else size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def empty(name: bytes) -> bytes:
    """Make an empty member faster than tarfile does: a server sends thousands of them."""
    header = bytearray(NOTHING)
    header[: len(name)] = name
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


NOTHING = member("")
SAMPLE = member("1.txt", b"one")
END = bytes(1024)
FOLDERS = member("folder", kind=tarfile.DIRTYPE) * 128
COMMENTS = member("g", b"13 comment=1\n", kind=tarfile.XGLTYPE) * 64
NAMES = member("L", b"n" * 100_000, kind=tarfile.GNUTYPE_LONGNAME)


@contextlib.contextmanager
def aborting(request: web.Request) -> Iterator[None]:
    """End the connection with the answer: nobody reads what waits to be sent."""
    try:
        with contextlib.suppress(ConnectionError):
            yield
    finally:
        if request.transport is not None:
            request.transport.abort()


class Endless:
    """What the server sends: how each body begins, and what follows it for ever.

    Attributes:
        sent: Bytes of bodies, so far.
    """

    bodies: dict[str, tuple[bytes, Callable[[int], bytes]]] = {  # noqa: RUF012
        "same": (b"", lambda _: BLOCK),
        "padding": (SAMPLE + END, lambda _: BLOCK),
        "hidden": (SAMPLE, lambda number: b"".join(member(f".{number}", BLOCK) for _ in range(4))),
        "folders": (SAMPLE, lambda _: FOLDERS),
        "files": (SAMPLE, lambda number: b"".join(empty(b"1.%d-%d" % (number, part)) for part in range(128))),
        "member": (SAMPLE + member("2.txt", size=1 << 50), lambda _: BLOCK),
        "global": (SAMPLE, lambda _: COMMENTS),
        "names": (SAMPLE, lambda _: NAMES),
        "unpacked.tar.gz": (gzip.compress(SAMPLE), lambda _: gzip.compress(b"") * 1000),
        "zeros.tar.gz": (gzip.compress(SAMPLE), lambda _: BLOCK),
    }

    def __init__(self) -> None:
        self.sent = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        begin, more = self.bodies[request.match_info["name"]]
        told = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        if "length" in request.query:
            told["Content-Length"] = request.query["length"]
        if "Range" in request.headers:
            told["Content-Range"] = request.headers["Range"].replace("=", " ") + "/1000000"
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200, headers=told)
        if "length" not in request.query:
            answer.enable_chunked_encoding()
        await answer.prepare(request)
        number = 0
        with aborting(request):
            await answer.write(begin)
            while True:
                data, number = more(number), number + 1
                if "drip" in request.query:
                    data = data[:1]
                    await asyncio.sleep(0.01)
                await answer.write(data)
                self.sent += len(data)
        return answer


@pytest.fixture
async def server() -> AsyncGenerator[Endless, None]:
    endless = Endless()
    app = web.Application()
    app.router.add_get("/{name}", endless.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endless.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield endless
    await runner.cleanup()


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more memory is taken than a sample may have, and a little."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST + ROOM
    finally:
        tracemalloc.stop()


async def first(dataset: Any) -> Any:
    async with dataset:
        return await dataset[0]


async def samples(dataset: TarShards[Any]) -> list[str]:
    found: list[str] = []
    try:
        async with dataset:
            async for sample in dataset:
                found.append(sample["__key__"])
    except FetchError as error:
        error.add_note(str(found))
        raise
    return found


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    """The bound of a test that would hang if it failed."""
    async with asyncio.timeout(seconds):
        return await work


@pytest.mark.usefixtures("bounded")
async def test_bodies_without_an_end(server: Endless) -> None:
    """Of a whole object no more is read than a sample may have; of a range no more than was asked for."""
    url = f"{server.url}/same"
    said = rf"same: larger than {MOST:,} bytes, which is the most that a sample may have.* larger max_bytes"
    with pytest.raises(FetchError, match=said):
        await within(30, first(HTTPDataset([url], retries=ONCE, max_bytes=MOST)))
    with pytest.raises(FetchError, match="same: more than the 10 bytes came that were asked for"):
        await within(30, first(HTTPDataset([ByteRange(url, 5, 15)], retries=ONCE)))
    assert server.sent < 3 * MOST + ROOM


async def test_a_length_that_is_too_large_is_not_waited_for(server: Endless) -> None:
    """It is told before the body."""
    url = f"{server.url}/same?length={MOST + 1}&drip=1"
    with pytest.raises(FetchError, match=f"larger than {MOST:,} bytes"):
        await within(30, first(HTTPDataset([url], retries=Retries(total_s=20), max_bytes=MOST)))


async def test_an_object_may_be_as_large_as_it_may_be() -> None:
    """Not a byte less: as it is stored, and decompressed."""
    for packed in (False, True):
        body = gzip.compress(bytes(MOST)) if packed else bytes(MOST)

        async def answer(_: web.Request, body: bytes = body, packed: bool = packed) -> web.Response:
            return web.Response(body=body, headers={"Content-Encoding": "gzip"} if packed else {})

        async with serving(answer) as url:
            assert await first(HTTPDataset([url], retries=ONCE, max_bytes=MOST)) == bytes(MOST)
            with pytest.raises(FetchError, match=f"larger than {MOST - 1:,} bytes"):
                await first(HTTPDataset([url], retries=ONCE, max_bytes=MOST - 1))


@contextlib.asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncGenerator[str, None]:
    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/object"
    finally:
        await runner.cleanup()


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("members", [1, 50])
async def test_what_is_compressed_a_thousandfold(members: int) -> None:
    """Not a byte more is decompressed than a sample may have, whether it is one gzip file or many."""
    body = gzip.compress(bytes(MOST)) * members if members > 1 else gzip.compress(bytes(50 << 20))
    tracemalloc.reset_peak()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    async with serving(answer) as url:
        with pytest.raises(FetchError, match=f"object, decompressed: larger than {MOST:,} bytes"):
            await first(HTTPDataset([url], retries=ONCE, max_bytes=MOST))


@pytest.mark.usefixtures("threads_of_obstore")
async def test_object_stores_that_send_more_than_they_said(server: Endless) -> None:
    """More than its size, or than the range; a size that is too large is not read."""
    options: dict[str, Any] = {
        "config": {"endpoint": server.url, "skip_signature": "true", "virtual_hosted_style_request": "true"},
        "client_options": {"allow_http": True},
        "retries": ONCE,
    }

    async def answer(request: web.Request) -> web.StreamResponse:
        told = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", "Transfer-Encoding": "chunked"}
        if "Range" in request.headers:
            told["Content-Range"] = "bytes 5-14/1000"
        told["Content-Length"] = "2000000" if "large" in request.path else "1000"
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200, headers=told)
        answer._chunked = True
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(4):
                await answer.write(BLOCK)
        return answer

    async with serving(answer) as url:
        options["config"]["endpoint"] = url.removesuffix("/object")
        for key, said in (
            ("k", "k: more than the 1,000 bytes came that were asked for"),
            (ByteRange("k", 5, 15), "k: more than the 10 bytes came"),
            ("large", f"large: larger than {MOST:,} bytes"),
        ):
            dataset = ObjectStoreDataset[bytes]("s3://bucket/p", [key], max_bytes=MOST, **options)
            with pytest.raises(FetchError, match=said):
                await within(30, first(dataset))


@pytest.mark.usefixtures("bounded")
async def test_ranges_of_files_are_as_long_as_they_are(server: Endless) -> None:
    """Of tokens, indexed shards and Parquet files."""
    sources = Sources(Access.to([server.url], "test", ONCE, None, None, None, None))
    try:
        with pytest.raises(FetchError, match="more than the 100 bytes came"):
            await within(30, sources.read_range(f"{server.url}/same", 0, 100, Version(1_000_000, '"1"')))
    finally:
        await sources.aclose()


ENDS = {
    "padding": "more than 4,194,304 bytes follow behind the end of the archive",
    "hidden": "from byte 0 to the end of .[0-9]+: larger than",
    "folders": "from byte 0 to the end of folder: larger than",
    "files": "from byte 0 to the end of 1.[0-9]+-[0-9]+: larger than",
    "member": r"from byte 1,024 to the end of 2\.txt: larger than",
    "global": "headers of [0-9,]+ bytes about one file|from byte 0 to the end of g: larger than",
    "names": "headers of [0-9,]+ bytes about one file|from byte 0 to the end of L: larger than",
    "unpacked.tar.gz": "bytes of compressed data hold nothing",
    "zeros.tar.gz": "bytes of compressed data hold nothing",
}


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", ENDS)
async def test_shards_without_an_end(server: Endless, name: str) -> None:
    """Whatever follows the first sample for ever: an error, after a bounded number of bytes."""
    dataset = TarShards[Any]([f"{server.url}/{name}"], retries=ONCE, max_bytes=MOST)
    with pytest.raises(FetchError, match=ENDS[name]):
        await within(60, samples(dataset))
    assert server.sent < 64 << 20


@pytest.mark.parametrize("name", ["padding", "member", "hidden"])
async def test_a_stream_that_drips_does_not_hang(server: Endless, name: str) -> None:
    """A byte now and then, for ever: 64 KiB have to come in the time that there is for a try."""
    dataset = TarShards[Any]([f"{server.url}/{name}?drip=1"], retries=Retries(tries=2, total_s=0.5))
    with pytest.raises(FetchError, match=r"did not come within 0\.5 s"):
        await within(30, samples(dataset))


async def test_a_sample_may_be_as_large_as_it_may_be(tmp_path: Path) -> None:
    """In its shard: headers and padding count; TarShards and IndexedTarShards agree. The one after it starts anew."""
    path = tmp_path / "a.tar"
    large = member("2.txt", bytes(600_000)) + member("2.cls", bytes(1000))
    path.write_bytes(SAMPLE + large + member("3.txt", bytes(600_000)) + member("3.cls", bytes(1000)) + END)
    assert await samples(TarShards([path], max_bytes=len(large))) == ["1", "2", "3"]
    assert len(IndexedTarShards[Any]([path], max_bytes=len(large))) == 3
    with pytest.raises(
        FetchError, match=f"a.tar, from byte 1,024 to the end of 2.cls: larger than {len(large) - 600:,}"
    ):
        await samples(TarShards([path], max_bytes=len(large) - 600))
    with pytest.raises(FetchError, match=f"a.tar, the sample from byte 1,024 on: larger than {len(large) - 600:,}"):
        IndexedTarShards([path], max_bytes=len(large) - 600)


def test_headers_about_one_file_have_a_bound_together(tmp_path: Path) -> None:
    """Each has less than a megabyte, with names of its own."""
    path = tmp_path / "a.tar"
    records = [b"900000 k%d=" % number + b"a" * 899_989 + b"\n" for number in range(9)]
    assert {len(record) for record in records} == {900_000}
    headers = b"".join(member("pax", record, kind=tarfile.XHDTYPE) for record in records)
    path.write_bytes(headers + SAMPLE + END)
    with pytest.raises(FetchError, match=r"a\.tar: damaged: headers of 2,[0-9,]+ bytes about one file"):
        IndexedTarShards([path])


async def test_compressed_data_that_holds_nothing_has_a_bound() -> None:
    """What lies between two files that were put one behind the other may be some padding."""

    async def source() -> AsyncGenerator[bytes, None]:
        yield gzip.compress(b"one") + bytes(100_000)
        yield gzip.compress(b"") * 100 + gzip.compress(b"two")

    assert b"".join([piece async for piece in gunzip(source(), "u")]) == b"onetwo"


@pytest.mark.parametrize("kind", ["zip", "folder"])
async def test_files_of_fsspec_have_a_bound(tmp_path: Path, kind: str) -> None:
    """Of an archive before they are decompressed."""
    url = str(tmp_path)
    if kind == "zip":
        url = f"zip://::{tmp_path}/a.zip"
        with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("large", bytes(100 << 20))
            archive.writestr("small", b"small")
    else:
        (tmp_path / "large").write_bytes(bytes(MOST + 1))
        (tmp_path / "small").write_bytes(b"small")
    dataset = FsspecDataset[Any](url, ["large", "small", ByteRange("large", 0, 9)], max_bytes=MOST)
    tracemalloc.start()
    try:
        async with dataset:
            with pytest.raises(FetchError, match=f"large: larger than {MOST:,} bytes"):
                await dataset[0]
            assert [await dataset[1], await dataset[2]] == [b"small", bytes(9)]
        assert tracemalloc.get_traced_memory()[1] < 2 * MOST + ROOM
    finally:
        tracemalloc.stop()


class Generous(LocalFileSystem):
    """A file system whose files have more and more, and do not say how much."""

    protocol = "generous"
    cachable = False
    given: ClassVar[int] = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return self

    def __enter__(self) -> Generous:
        return self

    def __exit__(self, *args: object) -> None: ...

    def read(self, count: int = 1 << 62) -> bytes:
        assert count <= MOST, "more was asked for at once than a sample may have"
        type(self).given += count
        return bytes(count)


async def test_no_more_is_read_of_a_file_of_fsspec_than_it_may_have() -> None:
    """Not even where its size is not known beforehand."""
    fsspec.register_implementation("generous", Generous, clobber=True)
    Generous.given = 0
    dataset = FsspecDataset[Any]("generous:///folder", ["large"], max_bytes=MOST)
    async with dataset:
        with pytest.raises(FetchError, match=f"large: larger than {MOST:,} bytes"):
            await dataset[0]
    assert Generous.given == MOST + 1


async def test_headers_without_an_end_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that makes one up after the other, and says that there are more."""
    monkeypatch.setattr(tar_index, "_MOST_FILES", 5_000)
    size = 1 << 50

    async def answer(request: web.Request) -> web.StreamResponse:
        told = {"ETag": '"1"', "Content-Length": str(size), "Accept-Ranges": "bytes"}
        if (asked := request.headers.get("Range")) is None:
            return web.Response(headers=told) if request.method == "HEAD" else web.Response(status=416)
        start, stop = map(int, asked.removeprefix("bytes=").split("-"))
        body = b"".join(member(f"{at // 512}.txt") for at in range(start, stop + 1, 512))[: stop + 1 - start]
        told |= {"Content-Length": str(len(body)), "Content-Range": f"bytes {start}-{stop}/{size}"}
        return web.Response(status=206, body=body, headers=told)

    async with serving(answer) as url:
        with pytest.raises(FetchError, match=r"damaged: more than 5,000 files, the last of which is 5000\.txt: split"):
            await within(60, asyncio.to_thread(IndexedTarShards[Any], [url], retries=ONCE))


PAGES = {
    "made up": ("there are more than 2,000 objects: name those that are wanted", 1000),
    "empty": ("come to a halt: 1,000 more keys did not come within 1 s. Give more time", 0),
    "few": ("come to a halt: 1,000 more keys did not come within 1 s. Give more time", 1),
    "endless": ("listing, which may take 536,870,912 bytes, ended with code -6: memory allocation of", 0),
}


@pytest.mark.parametrize("page", PAGES)
async def test_listings_without_an_end_have_a_bound(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page says that there is another one, whatever is on it, or has no end itself."""
    monkeypatch.setattr(listing, "MOST_KEYS", 2_000)
    monkeypatch.setattr(listing, "_MOST_BYTES", 1 << 29)
    said, count = PAGES[page]

    async def answer(request: web.Request) -> web.StreamResponse:
        if page == "endless":
            endless = web.StreamResponse()
            await endless.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await endless.write(b" " * (1 << 20))
            return endless
        number = int(request.query.get("continuation-token", 0))
        await asyncio.sleep(0 if page == "made up" else 0.02)
        keys = "".join(
            f"<Contents><Key>{number}-{key}</Key><Size>1</Size><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            "<ETag>1</ETag></Contents>"
            for key in range(count)
        )
        return web.Response(
            text=f"<ListBucketResult><IsTruncated>true</IsTruncated>{keys}"
            f"<NextContinuationToken>{number + 1}</NextContinuationToken></ListBucketResult>"
        )

    async with serving(answer) as url:
        options: dict[str, Any] = {
            "config": {"endpoint": url.removesuffix("/object"), "skip_signature": "true"},
            "client_options": {"allow_http": True},
            "retries": Retries(tries=1, total_s=1 if page in ("empty", "few") else 30),
        }
        with pytest.raises(FetchError, match=said):
            await within(60, asyncio.to_thread(ObjectStoreDataset[Any], "s3://bucket/p", **options))


def test_the_bound_is_a_number_of_bytes(tmp_path: Path) -> None:
    """At construction."""
    (tmp_path / "a.tar").write_bytes(SAMPLE + END)
    for wrong in (0, -1, True, 1e9, None):
        for make in (HTTPDataset, TarShards, IndexedTarShards):
            with pytest.raises(ConfigurationError, match="max_bytes should be an integer of at least 1"):
                make([str(tmp_path / "a.tar")], max_bytes=wrong)  # type: ignore[operator]
