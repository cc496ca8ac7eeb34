"""Objects in any file system that fsspec knows, fetched on threads."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from asyncloader.datasets.extras import require
from asyncloader.datasets.opened import Threads
from asyncloader.datasets.remote import Key, RemoteDataset
from asyncloader.datasets.retry import Retries, TransientError

T_co = TypeVar("T_co", covariant=True)


class FsspecDataset(RemoteDataset[tuple[Any, Threads], T_co]):
    """Serve what lies in a file system of fsspec: for what :class:`ObjectStoreDataset` does not reach.

    Each fetch is a call on a thread: that works with every file system, and is slower than what the other datasets do
    for those that they know.

    Args:
        url: A folder, in fsspec's words: ``hf://datasets/owner/name``, ``sftp://host/folder``, ``zip://*::/tmp/a.zip``.
        keys: Names of the files in it, or :class:`~asyncloader.datasets.ByteRange` of them; None takes all
            files, sorted, listed once at construction.
        decode: Makes a sample of a file's bytes and its key; without it the bytes are the sample.
        suffix: Which of the listed keys to take: those that end so, or in one of several ways.
        storage_options: Arguments of the file system, credentials among them.
        threads: How many files are fetched at once, in each worker; out of an archive one after the other.
        retries: How transient failures are retried: connections that fail or break off, and time-outs. What else a
            file system raises is raised at once.
        decode_threads: Threads that decode, in each worker: by default one in a worker process and up to four without
            one; 0 decodes on the event loop.

    Raises:
        ImportError: fsspec is not installed (``asyncloader[fsspec]``), or the client of this file system is not.
        FileNotFoundError: Nothing is listed.
    """

    def __init__(
        self,
        url: str,
        keys: Iterable[Key] | None = None,
        decode: Callable[[bytes, Any], T_co] | None = None,
        *,
        suffix: str | tuple[str, ...] = "",
        storage_options: Mapping[str, Any] | None = None,
        threads: int = 32,
        retries: Retries | None = None,
        decode_threads: int | None = None,
    ) -> None:
        require("fsspec", "fsspec", "FsspecDataset")
        self.url = url
        self.storage_options = dict(storage_options or {})
        self.threads = threads
        system, self.root = self._file_system()
        if keys is None:
            beyond = len(self.root.rstrip("/")) + 1 if self.root else 0
            keys = [path[beyond:] for path in sorted(system.find(self.root)) if path.endswith(suffix)]
            if not keys:
                raise FileNotFoundError(errno.ENOENT, f"no file that ends with {suffix!r} is there", url)
        super().__init__(keys, decode, retries or Retries(), decode_threads)

    def _file_system(self) -> tuple[Any, str]:
        import fsspec

        system, root = fsspec.core.url_to_fs(self.url, **self.storage_options)
        return system, root

    async def _fetch(self, client: tuple[Any, Threads], key: Key) -> bytes:
        system, threads = client
        name, start, stop = (key, None, None) if isinstance(key, str) else (key.key, key.start, key.stop)
        path = f"{self.root.rstrip('/')}/{name}" if self.root else name
        try:
            return bytes(await threads.run(system.cat_file, path, start, stop))
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except (ConnectionError, TimeoutError) as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            # aiohttp's errors, which file systems let through, and do not have a base of Python's own in common.
            if type(error).__name__ in ("ClientPayloadError", "ServerDisconnectedError", "ClientConnectorError"):
                raise TransientError(f"{type(error).__name__}: {error}") from error
            if getattr(error, "status", 0) in (429, 500, 502, 503, 504):
                raise TransientError(f"{type(error).__name__}: {error}") from error
            raise

    async def _connect(self) -> tuple[Any, Threads]:
        from fsspec.archive import AbstractArchiveFileSystem

        system, threads = self._file_system()[0], self.threads
        if isinstance(system, AbstractArchiveFileSystem):
            # All reads of an archive move one file position. tarfile does not guard it, nor does zipfile where it seeks
            # (3.12, 3.13): what another thread reads meanwhile would come in place of what was asked for.
            options = {**system.storage_options, "skip_instance_cache": True}  # others may read theirs at the same time
            system, threads = type(system)(*system.storage_args, **options), 1
        return system, Threads(threads, "fsspec")

    async def _disconnect(self, client: tuple[Any, Threads]) -> None:
        client[1].close()
