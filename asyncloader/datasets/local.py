"""Local files, read on a thread."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence

from asyncloader.datasets.limits import open_regular
from asyncloader.datasets.opened import Threads
from asyncloader.datasets.retry import FetchError
from asyncloader.datasets.source import NOTHING, Known, Source, Version, path_of, raise_changed

CHUNK_BYTES = 1 << 20


class LocalSource(Source):
    """The machine's own files. Belongs to one loop."""

    def __init__(self) -> None:
        self._threads = Threads(1)

    async def version(self, url: str) -> Version:
        """Return which version of a file is there."""
        return await self._threads.run(Version.of_file, path_of(url))

    async def read(self, url: str, start: int, stop: int, version: Version | None = None) -> bytes:
        """Return some bytes of a file, of this version if one is given."""
        return await self._threads.run(read_range, path_of(url), start, stop, version)

    async def read_all(self, ranges: Sequence[tuple[str, int, int, Version]]) -> list[bytes]:
        """Return the bytes of several ranges, in one job of the thread."""
        return await self._threads.run(
            lambda: [read_range(path_of(url), start, stop, version) for url, start, stop, version in ranges]
        )

    async def stream(
        self, url: str, start: int = 0, stop: int | None = None, known: Known = NOTHING
    ) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Read from an offset on."""
        while stop is None or start < stop:
            count = CHUNK_BYTES if stop is None else min(CHUNK_BYTES, stop - start)
            chunk, now = await self._threads.run(_read_part, path_of(url), start, count)
            known = known.confirmed(now, url)
            yield chunk, known
            if not chunk:
                return
            start += len(chunk)

    async def aclose(self) -> None:
        """Let the thread end."""
        await self._threads.aclose()


def read_range(path: str, start: int, stop: int, version: Version | None) -> bytes:
    """Read some bytes of a local file, which must still be of this version."""
    at, parts = start, []
    with open_regular(path) as file:
        if version and Version.of_file(file.fileno()) != version:
            raise_changed(path)
        while at < stop and (part := os.pread(file.fileno(), stop - at, at)):  # Linux gives no more than 2 GiB at once
            parts.append(part)
            at += len(part)
    if at != stop:
        raise FetchError(f"{path}: ends at byte {at}, before byte {stop}")
    return b"".join(parts)


def _read_part(path: str, offset: int, count: int) -> tuple[bytes, Known]:
    """Read the bytes from an offset on, and what tells this version of the file from another.

    In one job, which leaves nothing open: a file that aiofiles holds open across awaits is lost to a cancellation that
    comes while a thread is opening it. Opening anew costs some microseconds for each MiB.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        tag = f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
        return os.pread(file.fileno(), count, offset), Known(tag)
