"""The protocol of a place where files lie, and how two versions of a file are told apart.

Source.version(url) ─> Version          Source.read(url, start, stop, version) ─> bytes of that version
Source.stream(url, offset, known) ─> chunks from there on, each with what is known of the file by then
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncGenerator
from typing import NamedTuple, NoReturn, Protocol
from urllib.parse import unquote, urlsplit

from asyncloader.datasets.retry import FetchError


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


class Source(Protocol):
    """Where files of one kind are. Each method makes one try. Belongs to one loop."""

    async def version(self, url: str) -> Version:
        """Return which version of a file is there."""

    async def read(self, url: str, start: int, stop: int, version: Version) -> bytes:
        """Return the bytes from `start` up to, and not including, `stop`, of this version of a file."""

    def stream(self, url: str, offset: int, known: Known) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Read from an offset on: chunks as they are stored, each with what is known of the file by then."""

    async def aclose(self) -> None:
        """Let go of connections and threads."""


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
