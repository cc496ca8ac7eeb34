"""A place where files lie: what all places do alike, and how two versions of a file are told apart.

version(url) ─> Version     stream(url, start, stop, known) ─> chunks as they are stored, with what is known by then
└─> read(url, start, stop, version), read_whole(url, max_bytes): counted, in one
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import stat
from collections.abc import AsyncGenerator
from typing import NamedTuple, NoReturn
from urllib.parse import unquote, urlsplit

from asyncloader.datasets.limits import decompress, too_large
from asyncloader.datasets.retry import FetchError, TransientError


class Version(NamedTuple):
    """The version of a file: another version differs in size or tag.

    Attributes:
        size: In bytes.
        tag: The time of the last change of a local file; otherwise the server's tag, "" if there is none.
    """

    size: int
    tag: str

    @classmethod
    def of_file(cls, file: int | str) -> Version:
        """Return that of a local file.

        Raises:
            OSError: The file is not there, or is no regular file: a pipe, for example, which would be waited for.
        """
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", file)
        return cls(status.st_size, str(status.st_mtime_ns))


class Known(NamedTuple):
    """Facts about a file that is being read: its next bytes must be of the same version. None is an unknown fact.

    Attributes:
        tag: The tag of this version.
        size: In bytes, as it is stored.
        is_gzipped: The server says that it is compressed.
    """

    tag: str | None = None
    size: int | None = None
    is_gzipped: bool | None = None

    def confirmed(self, now: Known, url: str) -> Known:
        """Add what is said now.

        Raises:
            FetchError: The new facts contradict those that are known.
        """
        if any(None not in (old, new) and old != new for old, new in zip(self, now, strict=True)):
            raise FetchError(f"{url}: was changed while it was read")
        return self._replace(**{name: value for name, value in now._asdict().items() if value is not None})


NOTHING = Known()


class Source(abc.ABC):
    """A place of files. Each method makes one try. Belongs to one loop."""

    @abc.abstractmethod
    def stream(
        self, url: str, start: int = 0, stop: int | None = None, known: Known = NOTHING
    ) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Yield chunks from one byte up to another, or the end, as they are stored, each with what is known by then.

        The first chunk may be empty: facts are known before the bytes are there.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Let go of connections and threads."""

    async def version(self, url: str) -> Version:
        """Return which version of a file is there. A byte is asked for, which shows whether a server gives ranges.

        Raises:
            FetchError: The server does not say how long the file is.
        """
        async with contextlib.aclosing(self.stream(url, 0, 1)) as chunks:
            _, known = await anext(chunks)
        if known.size is None:
            raise FetchError(f"{url}: the server does not say how long it is")
        return Version(known.size, known.tag or "")

    async def read(self, url: str, start: int, stop: int, version: Version | None = None) -> bytes:
        """Return the bytes from `start` up to, and not including, `stop`, of this version of a file if one is given.

        Raises:
            TransientError: Fewer came.
            FetchError: More came, or they are of another version.
        """
        return (await self._collect(url, start, stop, version, stop - start))[0]

    async def read_whole(self, url: str, max_bytes: int) -> bytes:
        """Return all of a file, decompressed if its server has compressed it.

        Raises:
            TransientError: The file was cut off.
            FetchError: The file is damaged, or has more than `max_bytes`. No more is read of it.
        """
        data, known = await self._collect(url, 0, None, None, max_bytes)
        return decompress(data, max_bytes, url) if known.is_gzipped else data

    async def _collect(
        self, url: str, start: int, stop: int | None, version: Version | None, most: int
    ) -> tuple[bytes, Known]:
        """Return all that a stream yields. No length that is told is believed: what comes is counted."""
        parts, came, wanted, known = [], 0, None, NOTHING
        async with contextlib.aclosing(self.stream(url, start, stop)) as chunks:
            async for chunk, known in chunks:
                if version and ((known.tag or "") != version.tag or known.size not in (None, version.size)):
                    raise_changed(url)
                came += len(chunk)
                wanted = known.size if stop is None else most
                if stop is None and max(came, wanted or 0) > most:
                    raise too_large(url, most)
                if wanted is not None and came > wanted:
                    raise FetchError(f"{url}: more than the {wanted:,} bytes came that were asked for")
                parts.append(chunk)
        if wanted is not None and came < wanted:
            raise TransientError(f"{came} bytes came of the {wanted} that were asked for")
        return b"".join(parts), known


def kind_of(url: str) -> str:
    """Tell where a url or path leads: "file", "http" or "store"."""
    scheme = urlsplit(url).scheme if "://" in url else "file"
    return scheme if scheme == "file" else "http" if scheme in ("http", "https") else "store"


def path_of(url: str) -> str:
    """Return the path that a url leads to. In a path of a file, and in an object's name, # and ? mean nothing."""
    if "://" not in url or kind_of(url) == "store":
        return url
    return unquote(urlsplit(url).path)


def raise_changed(url: str) -> NoReturn:
    """Say that a file is another one now."""
    raise FetchError(f"{url}: was changed since this dataset was made (its size or time is another one); make it anew")
