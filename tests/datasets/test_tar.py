"""Tar archives that somebody made on purpose: reading them ends, takes what they hold and no more, or says why not."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncloader.datasets import FetchError
from asyncloader.datasets.sources import gunzip
from asyncloader.datasets.tar import Bytes, damage_told, headers, read_pax, read_samples

END = bytes(1024)


def header(name: str, size: int | bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A ustar header, with a size that may be any 12 bytes."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    return header(name, len(data), kind) + data + bytes(-len(data) % 512)


def pax(*records: bytes) -> bytes:
    return member("PaxHeader", b"".join(records), tarfile.XHDTYPE)


def record(text: bytes) -> bytes:
    length = len(text) + 2
    while len(b"%d %s\n" % (length, text)) != length:
        length = len(b"%d %s\n" % (length, text))
    return b"%d %s\n" % (length, text)


async def pieces(data: bytes, size: int = 700) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def read(data: bytes, size: int = 700) -> list[tuple[str, bytes]]:
    """Read all members. Nothing is awaited for long, so no loop is needed."""

    async def collect() -> list[tuple[str, bytes]]:
        stream, found = Bytes(pieces(data, size), "shard.tar"), []
        with damage_told("shard.tar"):
            async for path, length, begin in headers(stream):
                stream.mark = begin
                found.append((path, await stream.content(length, path)))
        return found

    return run(collect())


def run(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("something is waited for")


DAMAGED_PAX = {
    "no bytes": b"0 path=x\n",
    "fewer than it has": b"3 path=x\n",
    "negative": b"-9 path=x\n",
    "more than there are": b"11 path=x\n",
    "no number": b"nine path=x\n",
    "another digit": "９ path=x\n".encode(),
    "thousands": b"1_0 path=xy\n",
    "very many digits": b"9" * 5000 + b" path=x\n",
    "without a value": b"7 path\n",
    "without a name": b"5 =x\n",
    "without an end": b"9 path=xy",
    "only a length": b"2 ",
    "no space": b"9",
}


@pytest.mark.parametrize("records", DAMAGED_PAX.values(), ids=DAMAGED_PAX)
def test_damaged_pax_records_are_told(records: bytes) -> None:
    """Whatever their lengths say: none is read twice, and none is left out."""
    for before in ((), (record(b"comment=whole"),)):
        with pytest.raises(FetchError, match=r"shard\.tar: damaged: a pax record"):
            read(pax(*before, records) + member("a.txt", b"") + END)


SIZES = {
    "negative, in base 256": b"\xff" * 11 + b"\x00",
    "no number": b"1x\0\0\0\0\0\0\0\0\0\0",
    "huge": b"\x80" + b"\x7f" * 11,
    "more than there is": 10_000,
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"V"])
def test_sizes_that_cannot_be_are_told(size: Any, kind: bytes) -> None:
    """Without room being made for them."""
    tracemalloc.start()
    try:
        with pytest.raises(FetchError, match=r"shard\.tar(: damaged|.*larger than)"):
            read(header("a.txt", size, kind) + END)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [b"-5", b"1_0", b"0x10", b" 5", "５".encode(), b"9" * 30, b"9" * 19])
def test_a_pax_size_is_a_number_of_bytes(size: bytes) -> None:
    """Digits, of a number that may be."""
    with pytest.raises(FetchError, match=r"is not a number of bytes|ends in the middle|larger than"):
        read(pax(record(b"size=" + size)) + member("a.txt", b"12345") + END)


def test_headers_of_headers_are_bounded() -> None:
    """A name of more than a megabyte is none; nor does a chain of long ones cost more than each of them."""
    with pytest.raises(FetchError, match="a header of 1,048,577 bytes"):
        read(member("long", b"x" * ((1 << 20) + 1), tarfile.GNUTYPE_LONGNAME) + member("a.txt", b"") + END)
    many = [record(b"comment=%d" % number) for number in range(50_000)]
    assert read(pax(*many) + member("a.txt", b"1") + END, 1 << 20) == [("a.txt", b"1")]


def test_what_belongs_together_is_read_together() -> None:
    """Each kind of header as tarfile reads it: which have content, and which say something about the next one."""
    long = "folder/" + "long" * 60 + ".txt"
    archive = (
        member("all", record(b"path=no.txt"), tarfile.XGLTYPE)
        + member("link", b"somewhere\0", tarfile.GNUTYPE_LONGLINK)
        + pax(record(b"path=" + long.encode()), record(b"size=3"))
        + header("short.txt", 5)
        + b"one" + bytes(509)
        + member("name", b"two.txt\0 what is behind it", tarfile.GNUTYPE_LONGNAME)
        + member("short.txt", b"two")
        + header("a folder", 512, tarfile.DIRTYPE)
        + header("a link", 512, tarfile.SYMTYPE)
        + member("a label", b"v" * 1000, b"V")
        + member("solaris", record(b"path=three.txt"), tarfile.SOLARIS_XHDTYPE)
        + member("short.txt", b"three")
        + pax(record(b"path="))
        + member("four.txt", b"four")
        + member("old.txt", b"five", tarfile.AREGTYPE)
        + END
    )  # fmt: skip
    with tarfile.open(fileobj=io.BytesIO(archive)) as theirs:
        expected = [(info.name, theirs.extractfile(info).read()) for info in theirs if info.isreg()]  # type: ignore[union-attr]
    names = [long, "two.txt", "three.txt", "four.txt", "old.txt"]
    assert [data for _, data in expected] == [b"one", b"two", b"three", b"four", b"five"]
    assert read(archive) == list(zip(names, [data for _, data in expected], strict=True))


@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0"])
def test_sparse_files_are_refused(version: str) -> None:
    """Their holes would be any amount of memory, and without them they are not what they were."""
    archive = pax(record(b"GNU.sparse.major=" + version[:1].encode())) + member("a.txt", b"data") + END
    with pytest.raises(FetchError, match=r"a\.txt is sparse, which is not read here"):
        read(archive)
    with pytest.raises(FetchError, match=r"a\.txt is sparse"):
        read(member("a.txt", b"data", tarfile.GNUTYPE_SPARSE) + END)
    with pytest.raises(FetchError, match=r"a\.txt is a part"):
        read(member("a.txt", b"data", b"M") + END)


def test_an_archive_that_was_broken_off_is_never_a_short_one() -> None:
    """Wherever it was: also between two members, where nothing else would tell."""
    archive = member("1.txt", b"one") + member("2.txt", b"two")
    assert read(archive + bytes(512)) == [("1.txt", b"one"), ("2.txt", b"two")]
    for length in range(0, len(archive) + 1, 64):
        with pytest.raises(FetchError, match="damaged"):
            read(archive[:length])


@pytest.mark.parametrize("name", ["1.__key__", "1.__url__", "1.TXT", "1.txt"])
def test_no_file_takes_the_place_of_another(name: str) -> None:
    """Neither of the one before it, nor of what we say about the sample."""

    async def collect() -> list[Any]:
        archive = member("1.txt", b"one") + member(name, b"other") + END
        return [sample async for sample in read_samples(pieces(archive), "shard.tar")]

    with pytest.raises(FetchError, match=r"shard\.tar: a second \.\w+ of the sample 1"):
        run(collect())


TYPES = st.sampled_from(
    [b"0", b"\0", b"1", b"2", b"3", b"5", b"6", b"7", b"S", b"L", b"K", b"x", b"X", b"g", b"V", b"M"]
)
RECORDS = st.one_of(
    st.binary(max_size=40),
    st.lists(
        st.tuples(
            st.sampled_from([b"path", b"size", b"GNU.sparse.map", b"hdrcharset", b"\xff"]), st.binary(max_size=12)
        )
    ).map(lambda pairs: b"".join(record(b"=".join(pair)) for pair in pairs)),
)
MEMBERS = st.tuples(
    st.text(max_size=20).filter(lambda name: len(name.encode("utf-8", "ignore")) < 90 and name.isascii()),
    RECORDS,
    TYPES,
    st.one_of(st.none(), st.integers(0, 600), st.binary(min_size=12, max_size=12)),
)
ARCHIVES = st.lists(MEMBERS, max_size=6).map(
    lambda members: (
        b"".join(
            header(name, len(data) if size is None else size, kind) + data + bytes(-len(data) % 512)
            for name, data, kind, size in members
        )
        + END
    )
)


def held(archive: bytes) -> None:
    """Read it: to its end, or to an error that names it; what comes is no more than was there."""
    for size in (100, 5000):
        try:
            found = read(archive, size)
        except FetchError as error:
            assert "shard.tar: damaged" in str(error) or "larger than" in str(error)
        else:
            assert sum(len(data) for _, data in found) <= len(archive)


@settings(deadline=30_000)  # what takes long with these few bytes takes for ever
@given(st.one_of(ARCHIVES, st.binary(max_size=2000)))
@example(pax(b"0 path=x\n"))
def test_any_archive_is_read_or_refused(archive: bytes) -> None:
    """In time that its length bounds."""
    held(archive)


@settings(deadline=30_000)  # what takes long with these few bytes takes for ever
@given(ARCHIVES, st.data())
def test_archives_with_changed_bytes_are_read_or_refused(archive: bytes, data: st.DataObject) -> None:
    """Wherever they are changed."""
    changed = bytearray(archive)
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(archive) - 1), st.integers(0, 255)), max_size=5)):
        changed[at] = value
    held(bytes(changed))


@given(st.dictionaries(st.text(min_size=1).filter(lambda text: "=" not in text), st.text(), max_size=8))
def test_pax_records_come_back(records: dict[str, str]) -> None:
    """Those that are written as they should be."""
    written = b"".join(record(f"{key}={value}".encode("utf-8", "surrogatepass")) for key, value in records.items())
    found = read_pax(written)
    assert len(found) == len(records)
    assert {key.encode("utf-8", "surrogateescape") for key in found} == {
        key.encode("utf-8", "surrogatepass") for key in records
    }


@given(st.lists(st.binary(max_size=3000), max_size=4), st.integers(1, 900))
def test_gzip_files_one_after_the_other_are_one(parts: list[bytes], size: int) -> None:
    """However they are cut into pieces."""
    packed = b"".join(gzip.compress(part) + bytes(len(part) % 3) for part in parts)

    async def collect() -> bytes:
        return b"".join([piece async for piece in gunzip(pieces(packed, size), "u")])

    assert run(collect()) == b"".join(parts)
