"""Local files, each a sample."""

from __future__ import annotations

import errno
import operator
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import aiofiles.os

from asyncloader.datasets.blocking import executor
from asyncloader.datasets.decoding import Decoder
from asyncloader.datasets.numbers import ByNumber
from asyncloader.datasets.source import Part, listed, read_local

T_co = TypeVar("T_co", covariant=True)

# A file is read in one job of a thread. aiofiles.open makes three of each, and loses a file whose opening is cancelled.
_read = aiofiles.os.wrap(read_local)


class FileDataset(ByNumber[T_co]):
    """Serve files, each read whole and decoded by a function of yours.

    A :class:`~asyncloader.DataLoader` awaits the reads, by aiofiles, so that several are on their way at once: which
    helps where opening a file takes long, as on a file server.

    Args:
        paths: The files, in the order of their indices; or one path: a file, or a folder, of which all files that match
            ``pattern`` are taken, sorted by path.
        decode: Makes a sample of a file's bytes, ``decode(data)``, or of them and its path, ``decode(data, path)``;
            without it the bytes are the sample.
        pattern: Which files of a folder to take, as in :meth:`pathlib.Path.glob`.

    Raises:
        FileNotFoundError: The file or folder does not exist, or nothing in it matches.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("a.txt", "b.txt"):
        ...     _ = (folder / name).write_text(name * 2)
        >>> FileDataset(folder, lambda data, path: (path.stem, data.decode()))[1]
        ('b', 'b.txtb.txt')
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        decode: Callable[..., T_co] | None = None,
        *,
        pattern: str = "**/*",
    ) -> None:
        one = Path(paths) if isinstance(paths, (str, os.PathLike)) else None
        self.paths = listed(paths) if one is None or one.is_file() else _files_in(one, pattern)
        self.decode = decode
        self._decoder = Decoder(decode)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> T_co:
        """Read and decode one file."""
        path = self.paths[operator.index(index)]
        return self._decoder(read_local(Part(path)), Path(path))  # type: ignore[no-any-return]

    async def getitem(self, index: int) -> T_co:
        """Read and decode one file, without blocking the loop."""
        path = self.paths[operator.index(index)]
        data = await _read(Part(path), executor=executor())
        return await self._decoder.call_async(data, Path(path))  # type: ignore[no-any-return]


def _files_in(folder: Path, pattern: str) -> list[str]:
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", os.fspath(folder))
    files = sorted(str(path) for path in folder.glob(pattern) if path.is_file())
    if not files:
        raise FileNotFoundError(errno.ENOENT, f"nothing in it is {pattern}", os.fspath(folder))
    return files
