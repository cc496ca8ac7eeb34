"""Where files lie: on this machine, or wherever obstore reaches. They are read whole or by ranges, now or awaited.

    path or url ── local ──────> opened, read, closed again
                └─ elsewhere ──> a store of obstore's for each server or bucket ──> get, of the version that is known

obstore runs its requests on threads of its own, which do not live on in a forked process: a store that was used before
the fork waits for ever after it. So constructors ask servers in a process of their own (:mod:`.apart`), and a forked
worker whose parent did use obstore says so.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import errno
import io
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from asyncloader.datasets.blocking import in_thread
from asyncloader.datasets.errors import FetchError, require, too_large
from asyncloader.errors import ConfigurationError, redacted

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

_used_in: int | None = None  # the process in which obstore has started its threads


class Version(NamedTuple):
    """The version of a file: another version differs in size or tag.

    Attributes:
        size: In bytes.
        tag: The time of the last change of a local file; otherwise the server's tag, "" if there is none.
    """

    size: int
    tag: str


class Part(NamedTuple):
    """What is to be read: a file, or some bytes of one.

    Attributes:
        url: Its path or url.
        start: The first byte.
        stop: The one behind the last; None for the end of the file.
        version: The version that is meant, if only one is.
        max_bytes: How large a file may be that is read to its end.
    """

    url: str
    start: int = 0
    stop: int | None = None
    version: Version | None = None
    max_bytes: int | None = None


class Source:
    """Reads files by their paths and urls. Any thread and any loop may call it; picklable, as far as the store is.

    Args:
        store: A store of obstore's, in which the urls are names of objects; None finds the store by the url.
        options: What else :func:`obstore.store.from_url` takes.
    """

    def __init__(self, store: ObjectStore | None, options: Mapping[str, Any]) -> None:
        self._store = store
        self._options = dict(options)
        self._made: dict[str, ObjectStore] = {}  # by server or bucket

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": {}}

    def is_local(self, url: str) -> bool:
        """Whether a file is read from a path of this machine."""
        return self._store is None and is_local(url)

    def check(self, urls: Sequence[str], user: str) -> None:
        """See whether files can be reached, without asking for them.

        Raises:
            ImportError: obstore is needed, and not installed; `user` is the class that needs it.
            ConfigurationError: There are no files, or a url is of no kind that is known.
        """
        if not urls:
            raise ConfigurationError(f"{user} was given no path and no url")
        if all(map(self.is_local, urls)):
            return
        require("obstore", "remote", user)
        for scheme in {urlsplit(url).scheme for url in urls if self._store is None and not is_local(url)}:
            if scheme not in _SCHEMES:
                raise ConfigurationError(
                    f"{scheme}:// is no place that {user} knows: these are {', '.join(sorted(_SCHEMES))} and paths. Or "
                    "give it a store of obstore's (store=...), in which the urls are names of objects"
                )

    def version(self, url: str) -> Version:
        """Return which version of a file is there."""
        if self.is_local(url):
            return version_of(path_of(url))
        import obstore

        with failures_told(url):
            return _version_in(obstore.head(*self._place(url)))

    def read(self, part: Part) -> bytes:
        """Return a file, or some bytes of one.

        Raises:
            FetchError: The file is too large, or another one now, or the bytes did not come.
        """
        if part.start == part.stop:
            return b""
        if self.is_local(part.url):
            return read_local(part)
        import obstore

        with failures_told(part.url):
            answer = obstore.get(*self._place(part.url), options=_options(part))
            end = _end_of(part, _version_in(answer.meta))
            return _whole(bytes(answer.bytes()), part, end)

    async def read_async(self, part: Part) -> bytes:
        """Return what `read` returns, without blocking the loop."""
        if part.start == part.stop or self.is_local(part.url):
            return await in_thread(self.read, part)
        import obstore

        with failures_told(part.url):
            answer = await _call(obstore.get_async, *self._place(part.url), options=_options(part))
            end = _end_of(part, _version_in(answer.meta))
            return _whole(bytes(await _call(answer.bytes_async)), part, end)

    def _place(self, url: str) -> tuple[ObjectStore, str]:
        """Return the store that an object is in, and its name there: the arguments of a call of obstore's."""
        _note_use()
        if self._store is not None:
            return self._store, url
        parts = urlsplit(url)
        root = f"{parts.scheme}://{parts.netloc}"
        if parts.scheme not in _HTTP:  # in the name of an object, ?, # and % mean nothing
            return self._store_at(root), url[len(root) :].lstrip("/")
        if parts.query:  # a signature, as a rule, which no name can have: a store of this one url
            return self._open(url), ""
        return self._store_at(root), unquote(parts.path.lstrip("/"))

    def _store_at(self, root: str) -> ObjectStore:
        if root not in self._made:
            self._made[root] = self._open(root)
        return self._made[root]

    def _open(self, root: str) -> ObjectStore:
        from obstore.store import HTTPStore, from_url

        parts = urlsplit(root)
        if parts.scheme not in _HTTP:
            return from_url(root, **self._options)
        client = {"allow_http": True, **(self._options.get("client_options") or {})}
        if parts.username is not None:  # which obstore would leave out
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            header = {"authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
            client["default_headers"] = {**header, **client.get("default_headers", {})}
            root = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        return HTTPStore.from_url(root, **{**self._options, "client_options": client})


class RangeFile(io.RawIOBase):
    """A file of which some bytes are asked for at a time, of the version that was there when the dataset was made."""

    def __init__(self, source: Source, url: str, version: Version) -> None:
        super().__init__()
        self._source = source
        self._url = url
        self._version = version
        self._at = 0

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        stop = max(self._at, min(self._at + len(buffer), self._version.size))
        data = self._source.read(Part(self._url, self._at, stop, self._version))
        buffer[: len(data)] = data
        self._at = stop
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._version.size}[whence]
        return self._at

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


_HTTP = frozenset({"http", "https"})
_SCHEMES = _HTTP | {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"}


def listed(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return paths as texts: one text or path is a list of one."""
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


def is_local(url: str) -> bool:
    """Whether a path or url is that of a file of this machine."""
    return "://" not in url or url.startswith("file://")


def path_of(url: str) -> str:
    """Return the path that a local url leads to. In a path, #, ? and % mean nothing."""
    return unquote(urlsplit(url).path) if "://" in url else url


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file to read it, without a buffer, and without waiting for a pipe that somebody has put there.

    Raises:
        OSError: The file is not there, or is no regular file: a device, for example, that has no end.
    """
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return file


def version_of(file: int | str) -> Version:
    """Return which version of a local file is there.

    Raises:
        OSError: The file is not there, or is no regular file: a pipe, for example, which would be waited for.
    """
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no regular file", file)
    return Version(status.st_size, str(status.st_mtime_ns))


def read_local(part: Part) -> bytes:
    """Read some bytes of a local file, or all of it.

    Files are read and not mapped: a mapped file that somebody shortens kills the process that touches it (SIGBUS).
    """
    path, pieces = path_of(part.url), []
    with open_regular(path) as file:
        there = version_of(file.fileno())
        end, at = _end_of(part, there), part.start
        last = min(end, there.size)  # memory is made for what is asked for
        while at < last and (piece := os.pread(file.fileno(), last - at, at)):  # Linux gives no more than 2 GiB at once
            pieces.append(piece)
            at += len(piece)
        _end_of(part, version_of(file.fileno()))  # bytes that are read while a file is written may be of both versions
    return _whole(b"".join(pieces), part, end)


def raise_changed(url: str) -> NoReturn:
    """Say that a file is another one now."""
    raise FetchError(f"{url}: was changed since this dataset was made (its size or time is another one); make it anew")


def _call(function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> Awaitable[T]:
    """Call a function of obstore's, with an empty context.

    obstore copies the context of the call, to set the result in it. It lets go of the copy on a thread of its own that
    does not hold the interpreter's lock: the copy stays until obstore is called the next time. In a worker thread, the
    context knows the dataset (`get_worker_info`), whose connections would stay open after the last epoch.
    """
    return contextvars.Context().run(function, *args, **kwargs)


def _options(part: Part) -> GetOptions:
    options: GetOptions = {}
    if part.start or part.stop is not None:
        options["range"] = {"offset": part.start} if part.stop is None else (part.start, part.stop)
    if part.version is not None and part.version.tag:
        options["if_match"] = part.version.tag
    return options


def _version_in(meta: ObjectMeta) -> Version:
    return Version(meta["size"], meta["e_tag"] or "")


def _end_of(part: Part, there: Version) -> int:
    """Return the byte behind the last that is to come, and see that the file is the one that is meant."""
    if part.version not in (None, there):
        raise_changed(part.url)
    if part.stop is not None:
        return part.stop
    if part.max_bytes is not None and there.size > part.max_bytes:
        raise too_large(part.url, part.max_bytes)
    return there.size


def _whole(data: bytes, part: Part, end: int) -> bytes:
    if len(data) != end - part.start:
        raise FetchError(
            f"{part.url}: has {len(data):,} bytes from byte {part.start:,} on, where {end - part.start:,} were wanted"
        )
    return data


def _note_use() -> None:
    """Note that obstore starts threads in this process.

    Raises:
        RuntimeError: This process was forked from one that had used obstore.
    """
    global _used_in
    if _used_in not in (None, os.getpid()):
        raise RuntimeError(
            f"obstore was used in process {_used_in} before it forked this one, and would wait for ever here. Start "
            'the workers with multiprocessing_context="forkserver" or "spawn"; or do not read samples of the dataset '
            "in the trainer's process before the loader has forked its workers."
        )
    _used_in = os.getpid()


@contextlib.contextmanager
def failures_told(url: str) -> Iterator[None]:
    """Raise what an error of obstore means: not there, not allowed, changed, or did not come."""
    from obstore import exceptions

    try:
        yield
    except (FetchError, RuntimeError):  # the latter of `_note_use`
        raise
    except Exception as error:
        said = redacted(str(error).partition("\n")[0])  # what follows is a dump of Rust structures
        if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
            raise FileNotFoundError(errno.ENOENT, said, redacted(url)) from _as_cause(error)
        if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            raise PermissionError(errno.EACCES, said, redacted(url)) from _as_cause(error)
        if isinstance(error, exceptions.PreconditionError):
            raise_changed(url)
        raise FetchError(f"{url}: {type(error).__name__}: {said}") from _as_cause(error)


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised for, as tracebacks show them."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _as_cause(error: BaseException) -> BaseException | None:
    """Return another library's error, to be the cause of ours; None if a url in its text has a login or signature."""
    texts = [f"{one} {one!r}" for one in _chain_of(error)]
    return error if texts == list(map(redacted, texts)) else None
