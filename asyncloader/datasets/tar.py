"""Tar streams in WebDataset's layout, taken apart: blocks ─> members (path and content) ─> samples.

tarfile reads only what it can wait for; here the bytes are awaited. It decodes the headers all the same.
"""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeAlias

from asyncloader.datasets.retry import FetchError

RawSample: TypeAlias = dict[str, Any]  # extension -> bytes, and "__key__", "__url__"

_BLOCK = 512


async def read_samples(chunks: AsyncIterator[bytes], url: str) -> AsyncGenerator[RawSample, None]:
    """Put the files of a shard together that have a name in common."""
    sample: RawSample = {}
    async with contextlib.aclosing(read_members(chunks, url)) as members:
        async for path, data in members:
            folder, slash, name = path.rpartition("/")
            stem, dot, extension = name.partition(".")
            if not stem or not dot:  # hidden files, and such as README
                continue
            key = folder + slash + stem
            if sample.get("__key__") != key:
                if sample:
                    yield sample
                sample = {"__key__": key, "__url__": url}
            sample[extension.lower()] = data
    if sample:
        yield sample


async def read_members(chunks: AsyncIterator[bytes], url: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield path and content of each regular file of a tar stream (ustar, GNU and pax headers)."""
    waiting = bytearray()

    async def take(count: int) -> bytes:
        while len(waiting) < count:
            chunk = await anext(chunks, None)
            if chunk is None:
                break
            waiting.extend(chunk)
        taken = bytes(waiting[:count])
        del waiting[:count]
        return taken

    more: dict[str, str] = {}  # what headers before a file say about it
    while block := await take(_BLOCK):
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros: the end
            return
        except tarfile.HeaderError as error:
            raise FetchError(f"{url}: damaged: {error}") from error
        size = int(more.get("size", header.size))
        data = await take(size)
        if len(data) < size or len(await take(-size % _BLOCK)) < -size % _BLOCK:
            raise FetchError(f"{url}: damaged: it ends in the middle of {more.get('path', header.name)}")
        if header.type == tarfile.XHDTYPE:
            more = _pax(data)
        elif header.type == tarfile.GNUTYPE_LONGNAME:
            more = {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        elif header.type != tarfile.XGLTYPE:
            if header.isreg():
                yield more.get("path", header.name), data
            more = {}


def _pax(data: bytes) -> dict[str, str]:
    """Read records such as "23 path=a/very/long/name" and a line feed; the number counts it all."""
    records = {}
    while data:
        length, _, _ = data.partition(b" ")
        record, data = data[len(length) + 1 : int(length) - 1], data[int(length) :]
        name, _, value = record.partition(b"=")
        records[name.decode()] = value.decode("utf-8", "surrogateescape")
    return records
