"""Objects in any file system that fsspec knows, fetched on threads."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from asyncloader.datasets.extras import require
from asyncloader.datasets.http import PASSING
from asyncloader.datasets.limits import MAX_BYTES
from asyncloader.datasets.opened import Threads
from asyncloader.datasets.remote import Key, RemoteDataset
from asyncloader.datasets.retry import FetchError, Retries, TransientError
from asyncloader.datasets.source import NOTHING, Known, Source, Version
from asyncloader.errors import ConfigurationError, as_cause, chain_of, redacted

T_co = TypeVar("T_co", covariant=True)

# Facts that tell versions of a file apart, as file systems name them; not the time of the last access.
_TAGS = (
    *("ETag", "etag", "e_tag", "md5Hash", "generation", "blob_id", "sha", "CRC"),
    *("mtime", "modify", "LastModified", "last_modified", "modificationTime", "modification_time"),
)
_PIECE_BYTES = 1 << 20
_PASSING_ERRNOS = frozenset(
    [errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN]
)
# Errors that clients of file systems raise for connections; they have no base of Python's own in common.
_PASSING_ERRORS = {
    "asyncio": ("IncompleteReadError",),
    "http.client": ("IncompleteRead",),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "requests.exceptions": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "httpx": ("TransportError",),
    "botocore.exceptions": ("ConnectionError", "HTTPClientError"),
    "azure.core.exceptions": ("ServiceRequestError", "ServiceResponseError"),
}


class FsspecSource(Source):
    """A file system of fsspec, called on threads. Belongs to one loop.

    Args:
        url: Where it is.
        options: Arguments of the file system.
        threads: How many files are read at once.
        max_bytes: How many bytes are read of a file; one more tells that it is larger.
    """

    def __init__(self, url: str, options: Mapping[str, Any], threads: int, max_bytes: int) -> None:
        from fsspec.archive import AbstractArchiveFileSystem

        self._system, self._most = open_system(url, options)[0], max_bytes + 1
        if isinstance(self._system, AbstractArchiveFileSystem):
            # All reads of an archive move one file position. tarfile does not guard it, nor does zipfile where it seeks
            # (3.12, 3.13): what another thread reads meanwhile would come in place of what was asked for.
            own = {**self._system.storage_options, "skip_instance_cache": True}  # others may read theirs meanwhile
            self._system, threads = type(self._system)(*self._system.storage_args, **own), 1
        self._threads = Threads(threads)

    async def stream(
        self, url: str, start: int = 0, stop: int | None = None, known: Known = NOTHING
    ) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Yield the bytes from one up to another, or the end, in one chunk."""
        try:
            data = await self._threads.run(self._read, url, start, stop)
        except Exception as error:
            if any(map(_passes, _causes(error))):
                raise TransientError(f"{type(error).__name__}: {error}") from as_cause(error)
            with secrets_kept():
                raise
        yield data, known

    def _read(self, path: str, start: int, stop: int | None) -> bytes:
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        system = self._system
        opens = type(system).cat_file is AbstractFileSystem.cat_file and not isinstance(system, AsyncFileSystem)
        if not opens or start or stop is not None:
            return bytes(system.cat_file(path, start if start or stop is not None else None, stop))
        parts, left = [], self._most
        with system.open(path, "rb") as file:
            size = getattr(file, "size", None)  # where that is known a read may be a request: one is enough
            most = size if isinstance(size, int) and size > 0 else _PIECE_BYTES
            while left and (part := file.read(min(left, most))):
                parts.append(part)
                left -= len(part)
        return b"".join(parts)

    async def aclose(self) -> None:
        """Let the threads end."""
        await self._threads.aclose()


class FsspecDataset(RemoteDataset[T_co]):
    """Serve what lies in a file system of fsspec: for what :class:`ObjectStoreDataset` does not reach.

    Each fetch is a call on a thread: that works with every file system, and is slower than what the other datasets do
    for those that they know.

    Args:
        url: A folder, in fsspec's words: ``hf://datasets/owner/name``, ``sftp://host/folder``, ``zip://::/tmp/a.zip``.
        keys: Names of the files in it, or :class:`~asyncloader.datasets.ByteRange` of them; None takes all
            files, sorted, listed once at construction.
        decode: Makes a sample of a file's bytes and its key; without it the bytes are the sample.
        suffix: Which of the listed keys to take: those that end so, or in one of several ways.
        storage_options: Arguments of the file system, credentials among them.
        threads: How many files are fetched at once, in each worker; out of an archive one after the other.
        retries: How transient failures are retried: connections that fail or break off, names that are not resolved,
            time-outs, and the statuses that :class:`HTTPDataset` retries. All other errors of a file system are raised
            at once.
        max_bytes: How large a file may be; a larger one is an error. File systems of fsspec's asynchronous kind
            (``http``, ``s3``, ``gs``, ``az``), and those that fetch files in ways of their own, have a file in memory
            before it is measured, for as long as ``retries`` say; from others no more is read.
        decode_threads: Threads that decode, in each worker: by default one in a worker process and up to four without
            one; 0 decodes on the event loop.

    Raises:
        ConfigurationError: The file system, or one that it reads through, is one of fsspec's caches (``simplecache``,
            ``filecache``, ``blockcache``): several threads or processes that fill one get wrong bytes from it.
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
        max_bytes: int = MAX_BYTES,
        decode_threads: int | None = None,
    ) -> None:
        require("fsspec", "fsspec", "FsspecDataset")
        self.url = url
        self.storage_options = dict(storage_options or {})
        self.threads = threads
        system, self.root = open_system(url, self.storage_options)
        if keys is None:
            beyond = len(self.root.rstrip("/")) + 1 if self.root else 0
            with secrets_kept():
                found = system.find(self.root)
            keys = [path[beyond:] for path in sorted(found) if path.endswith(suffix)]
            if not keys:
                raise FileNotFoundError(errno.ENOENT, f"no file that ends with {suffix!r} is there", redacted(url))
        prefix = f"{self.root.rstrip('/')}/" if self.root else ""
        super().__init__(keys, decode, retries, decode_threads, max_bytes, prefix)

    def _source(self) -> FsspecSource:
        return FsspecSource(self.url, self.storage_options, self.threads, self.max_bytes)


def open_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system that a url leads to, and the path in it.

    Raises:
        ConfigurationError: The file system is one of fsspec's caches, or reads through one.
    """
    import fsspec

    for link in url.split("::"):  # before what is cached there is opened
        kind: type = object
        with contextlib.suppress(ValueError, ImportError):  # a path, or what url_to_fs refuses below
            kind = fsspec.get_filesystem_class(link.partition("://")[0])
        _refuse_cache(kind, url)
    with secrets_kept():
        system, path = fsspec.core.url_to_fs(url, **options)
    for layer in _layers(system):
        _refuse_cache(type(layer), url)
    return system, path


def version_in(system: Any, path: str) -> Version:
    """Return which version of a file a file system has now, by its size and what else the file system tells.

    Raises:
        FileNotFoundError: The file is not there.
    """
    system.invalidate_cache(path)  # listings that it keeps
    told = system.info(path)
    tags = [str(told[name]) for name in _TAGS if told.get(name) is not None]
    if not tags:
        with contextlib.suppress(Exception):  # most that tell nothing else do not know the time either
            tags = [str(system.modified(path))]
    return Version(told["size"] or 0, " ".join(tags))


@contextlib.contextmanager
def secrets_kept() -> Iterator[None]:
    """Replace what a file system raises if a url in its text has a login or signature."""
    try:
        yield
    except Exception as error:
        if as_cause(error) is not None:
            raise
        if isinstance(error, (FileNotFoundError, PermissionError)):
            raise type(error)(redacted(str(error))) from None
        raise FetchError(f"{type(error).__name__}: {error}") from None


def _refuse_cache(kind: type, url: str) -> None:
    from fsspec.implementations.cached import CachingFileSystem

    if issubclass(kind, CachingFileSystem):
        raise ConfigurationError(
            f"{url}: {kind.__name__} is a cache of fsspec's, from which several threads or processes get wrong bytes "
            "while they fill it. Leave it out of the url; to keep samples, wrap the dataset in CachedDataset, or copy "
            "the files to a local folder first"
        )


def _layers(system: Any) -> Iterator[Any]:
    """Yield a file system, and those that it reads through: by themselves, or by files that it holds open."""
    from fsspec import AbstractFileSystem

    waiting, seen = [system], set[int]()
    while waiting:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, AbstractFileSystem):
            yield layer
        held = list(getattr(layer, "__dict__", {}).values())
        held += [item for value in held if isinstance(value, dict) for item in value.values()]
        waiting += [item for item in held if isinstance(item, AbstractFileSystem) or hasattr(item, "fs")]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield what an error says of why it was raised.

    A file that is not there is a fact by itself, whatever was handled when that came out; but fsspec's HTTP also says
    so of a server that it did not reach, and gives that as the cause.
    """
    for one in chain_of(error):
        yield one
        if isinstance(one, (FileNotFoundError, PermissionError)) and one.__cause__ is None:
            return


def _passes(error: BaseException) -> bool:
    """Tell whether an error says that the same request may succeed in a moment."""
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    if not PASSING.isdisjoint(_statuses(error)):
        return True
    for module, names in _PASSING_ERRORS.items():  # only what was imported can have been raised
        if isinstance(error, tuple(getattr(sys.modules.get(module), name, ()) for name in names)):
            return True
    return False


def _statuses(error: BaseException) -> Iterator[Any]:
    """Yield what may be the HTTP status of an error, under the names that clients give it."""
    answer = getattr(error, "response", None)
    for source in (error, answer):
        for name in ("status", "status_code", "code"):
            if isinstance(status := getattr(source, name, None), int):
                yield status
                break  # aiohttp has two, and warns of the other one
    if isinstance(answer, dict):  # botocore's
        yield answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
