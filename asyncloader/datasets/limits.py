"""How much may come of what others send: bodies are counted while they come, and no length that is told is believed."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from io import FileIO

from asyncloader.datasets.retry import FetchError, TransientError

MAX_BYTES = 1 << 30
"""The most that a sample has, unless a dataset is told otherwise."""


def too_large(what: str, max_bytes: int) -> FetchError:
    """Return the error for a sample that has more bytes than it may have."""
    return FetchError(
        f"{what}: larger than {max_bytes:,} bytes, which is the most that a sample may have. If that is right, give "
        "the dataset a larger max_bytes"
    )


def decompress(data: bytes, max_bytes: int, url: str) -> bytes:
    """Return what gzip files hold, one after the other, with zeros behind them.

    Raises:
        TransientError: They were cut off.
        FetchError: They are damaged, or hold more than `max_bytes`.
    """
    parts, size = [], 0
    try:
        while data:
            unpack = zlib.decompressobj(wbits=31)
            part = unpack.decompress(data, max_bytes - size + 1)
            size += len(part)
            if size > max_bytes:
                raise too_large(f"{url}, decompressed", max_bytes)
            if not unpack.eof:
                raise TransientError("the body ended in the middle of the compressed data")
            parts.append(part)
            data = unpack.unused_data.lstrip(b"\0")
    except zlib.error as error:
        raise FetchError(f"{url}: damaged: {error}") from error
    return b"".join(parts)


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a file to read it, without a buffer, and without waiting for a pipe that somebody has put there.

    Raises:
        OSError: The file is not there, or is no regular file: a device, for example, that has no end.
    """
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return file
