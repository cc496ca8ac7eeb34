"""Tar streams in WebDataset's layout, taken apart: blocks ─> members (path and content) ─> samples.

tarfile reads only what it can wait for; here the bytes are awaited, and tarfile decodes the headers. Shards come
from elsewhere: whatever is in one, reading it ends, holds no more than one sample of it, and writes nothing anywhere.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from asyncloader.datasets.limits import MAX_BYTES, too_large
from asyncloader.datasets.retry import FetchError

T = TypeVar("T")
RawSample: TypeAlias = dict[str, Any]  # extension -> bytes, and "__key__", "__url__"

_BLOCK = 512
_MOST_METADATA = 1 << 20  # bytes of a header that tells of the next one; Go's archive/tar has the same bound
_HEADER_ONLY = frozenset(
    [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
)
_LONG_NAMES = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_BEFORE_OTHERS = frozenset([tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE, *_LONG_NAMES])
_PARTIAL = {tarfile.GNUTYPE_SPARSE: "sparse", b"M": "a part of one that is split over archives"}
_NAMES_OF_OURS = ("__key__", "__url__")
_RECORD = re.compile(rb"([0-9]{1,7}) ")


class Damaged(Exception):
    """An archive is damaged; the text says how."""


async def read_samples(
    chunks: AsyncIterator[bytes], url: str, max_bytes: int = MAX_BYTES
) -> AsyncGenerator[RawSample, None]:
    """Put the files of a shard together that have a name in common.

    Raises:
        FetchError: The archive is damaged; a sample has two files with one extension, or more than `max_bytes`, in
            which headers count, and so does what lies between it and the next sample.
    """
    stream = Bytes(chunks, url, max_bytes)
    async with contextlib.aclosing(grouped(stream, stream.content)) as samples:
        async for key, files, _, _ in samples:
            yield {"__key__": key, "__url__": url, **files}
            files.clear()  # the sample is the reader's now, while the next one is put together


async def grouped(
    stream: Bytes, take: Callable[[int, str], Awaitable[T]]
) -> AsyncGenerator[tuple[str, dict[str, T], int, int], None]:
    """Yield of each sample of a shard its key, its files by extension, and where they begin and end, headers included.

    Args:
        stream: The shard.
        take: Takes the content of a file from the stream, given its size and path, and returns what is wanted of it.

    Raises:
        FetchError: As for `read_samples`.
    """
    last, files, begins, ends = "", dict[str, T](), 0, 0
    with damage_told(stream.url):
        async with contextlib.aclosing(headers(stream)) as members:
            async for path, size, begin in members:
                key, extension = key_and_extension(path)
                if not key:
                    await stream.skip(size, path)
                    continue
                if key != last:
                    stream.mark = begin
                    if last:
                        yield last, files, begins, ends
                    last, files, begins = key, {}, begin
                if extension in files or extension in _NAMES_OF_OURS:
                    raise FetchError(f"{stream.url}: a second .{extension} of the sample {key}: {path}")
                files[extension] = await take(size, path)
                ends = stream.at
    if last:
        yield last, files, begins, ends


def key_and_extension(path: str) -> tuple[str, str]:
    """Return the name of the sample that a file belongs to, and what the file is of it; "" and "" if to none."""
    folder, slash, name = path.rpartition("/")
    stem, dot, extension = name.partition(".")
    if not stem or not dot:  # hidden files, and such as README
        return "", ""
    return folder + slash + stem, extension.lower()


@contextlib.contextmanager
def damage_told(url: str) -> Iterator[None]:
    """Raise a FetchError that names the shard for what is wrong with it."""
    try:
        yield
    except Damaged as damage:
        raise FetchError(f"{url}: damaged: {damage}") from damage.__cause__


class Bytes:
    """A stream of chunks, from which as many bytes are taken at a time as are wanted.

    Args:
        chunks: The stream.
        url: Named in errors.
        max_bytes: How many may be taken from `mark` on.

    Attributes:
        at: How many have been taken.
        mark: How many had been taken where the sample at hand begins.
    """

    def __init__(self, chunks: AsyncIterator[bytes], url: str, max_bytes: int = MAX_BYTES) -> None:
        self.url = url
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._waiting = bytearray()
        self.at = self.mark = 0

    async def take(self, count: int) -> bytes:
        """Return the next bytes; fewer only at the end."""
        while len(self._waiting) < count and (chunk := await anext(self._chunks, None)) is not None:
            self._waiting += chunk
        with memoryview(self._waiting) as waiting:
            taken = bytes(waiting[:count])
        del self._waiting[:count]
        self.at += len(taken)
        return taken

    def check(self, size: int, name: str) -> None:
        """Refuse what is too large before it is read, so that nobody can have it read for ever."""
        if self.at + size - self.mark > self._max_bytes:
            raise too_large(f"{self.url}, from byte {self.mark:,} to the end of {name}", self._max_bytes)

    async def content(self, size: int, name: str) -> bytes:
        """Return the content of a member, and pass over what fills its last block."""
        self.check(size, name)
        data = await self.take(size)
        if len(data) < size or len(await self.take(-size % _BLOCK)) < -size % _BLOCK:
            raise Damaged(f"it ends in the middle of {name}")
        return data

    async def skip(self, size: int, name: str) -> None:
        """Pass over the content of a member, without holding it."""
        self.check(size, name)
        left = size + -size % _BLOCK
        while left:
            if not (taken := len(await self.take(min(left, _MOST_METADATA)))):
                raise Damaged(f"it ends in the middle of {name}")
            left -= taken


async def headers(stream: Bytes) -> AsyncGenerator[tuple[str, int, int], None]:
    """Yield path and size of each regular file, and where its first header begins; its content is to be taken then."""
    more: dict[str, str] = {}  # what headers before a file say about it
    begin = stream.at
    while True:
        header = _header(await stream.take(_BLOCK))
        if header is None:
            return
        if header.type in _BEFORE_OTHERS:
            more |= await _told(header, stream, begin)
            continue
        name = more.get("path") or header.name
        size = _size(more.get("size") or header.size, name)
        if header.type in _PARTIAL or (header.isreg() and any(key.startswith("GNU.sparse.") for key in more)):
            kind = _PARTIAL.get(header.type, _PARTIAL[tarfile.GNUTYPE_SPARSE])
            raise Damaged(f"{name} is {kind}, which is not read here: pack it as it is")
        if header.isreg():
            yield name, size, begin
        elif header.type not in _HEADER_ONLY:
            await stream.skip(size, name)
        else:
            stream.check(0, name)
        more, begin = {}, stream.at


async def _told(header: tarfile.TarInfo, stream: Bytes, begin: int) -> dict[str, str]:
    """Read what a header says about the next one; headers about one file have a bound together."""
    size = _size(header.size, header.name)
    if size > _MOST_METADATA:
        raise Damaged(f"a header of {size:,} bytes")
    if stream.at + size - begin > 2 * _MOST_METADATA:
        raise Damaged(f"headers of {stream.at + size - begin:,} bytes about one file")
    data = await stream.content(size, header.name)
    if header.type == tarfile.XGLTYPE:  # about all that follow: who packed them, as a rule
        return {}
    long = _LONG_NAMES.get(header.type)
    return read_pax(data) if long is None else {long: _text(data.partition(b"\0")[0])}


def _header(block: bytes) -> tarfile.TarInfo | None:
    """Decode a header; None for the block of zeros that ends the archive."""
    if not block:  # a copy that was broken off may end so, and the epoch would be short in silence
        raise Damaged("it ends without the mark of its end")
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
        return None
    except tarfile.HeaderError as error:
        raise Damaged(str(error)) from error


def _size(said: str | int, name: str) -> int:
    if isinstance(said, str):
        said = int(said) if said.isascii() and said.isdigit() and len(said) < 20 else -1
    if said < 0:
        raise Damaged(f"the size of {name} is not a number of bytes")
    return said


def read_pax(data: bytes) -> dict[str, str]:
    """Read records such as "23 path=a/very/long/name" and a line feed; the number counts it all.

    Raises:
        Damaged: They are not.
    """
    records, at = {}, 0
    while at < len(data):
        if (length := _RECORD.match(data, at)) is None:
            raise Damaged("a pax record without a length")
        end = at + int(length[1])
        keyword, is_there, value = data[length.end() : end - 1].partition(b"=")
        if not keyword or not is_there or data[end - 1 : end] != b"\n":
            raise Damaged("a pax record that is none")
        records[_text(keyword)] = _text(value)
        at = end
    return records


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
