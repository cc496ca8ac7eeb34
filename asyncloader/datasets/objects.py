"""Objects in S3, Google Cloud Storage, Azure or a folder, through obstore.

obstore runs its requests on threads of its own (tokio's), which do not live on in a forked process: a store that was
used before the fork waits for ever after it. So nothing of it is used in the parent: keys are listed by a process that
ends with the listing (:mod:`asyncloader.datasets.listing`), and a forked worker whose parent did use it says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.datasets.extras import require
from asyncloader.datasets.limits import MAX_BYTES
from asyncloader.datasets.listing import list_apart
from asyncloader.datasets.local import CHUNK_BYTES
from asyncloader.datasets.remote import Key, RemoteDataset
from asyncloader.datasets.retry import FetchError, Retries, TransientError
from asyncloader.datasets.source import NOTHING, Known, Source, Version
from asyncloader.errors import as_cause, redacted

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore

T_co = TypeVar("T_co", covariant=True)

_FAILED_STATUS = re.compile(r"status: (\d{3})|status code: (\d{3})")
_used_in: int | None = None  # the process that has started tokio's threads


class StoreSource(Source):
    """Objects of stores. Belongs to one loop.

    A store has no `close`: its connections end with the last reference to it. Frames have references, tracebacks have
    frames, and obstore itself keeps the error of a request until it is used again. So no frame is to keep a store.

    Args:
        options: Options of the stores, as obstore takes them.
        root: The url that all objects begin with; without one, each folder has a store of its own.
    """

    def __init__(self, options: Mapping[str, Any], root: str | None = None) -> None:
        self._options = options
        self._root = root
        self._stores: dict[str, ObjectStore] | None = {} if root is None else {root: _open_store(root, options)}

    def _place(self, url: str) -> tuple[ObjectStore, str]:
        """Return the store that an object is in, and its name there: the arguments of a call."""
        if self._stores is None:
            raise RuntimeError("the dataset was closed while a sample of it was fetched")
        folder = url.rpartition("/")[0] if self._root is None else self._root
        if folder not in self._stores:  # what means something in a url means nothing in the name of an object
            quoted = folder.replace("#", "%23").replace("?", "%3F")
            self._stores[folder] = _open_store(quoted + "/", self._options)
        return self._stores[folder], url[len(folder) + 1 :]

    async def version(self, url: str) -> Version:
        """Return which version of an object is there."""
        import obstore

        with _failures_told_apart(url):
            meta = await obstore.head_async(*self._place(url))
            return Version(meta["size"], meta["e_tag"] or "")

    async def stream(
        self, url: str, start: int = 0, stop: int | None = None, known: Known = NOTHING
    ) -> AsyncGenerator[tuple[bytes, Known], None]:
        """Yield chunks from one byte up to another, or the end."""
        import obstore

        options: GetOptions = {} if known.tag is None else {"if_match": known.tag}
        if start or stop is not None:
            options["range"] = {"offset": start} if stop is None else (start, stop)
        with _failures_told_apart(url):
            answer = await obstore.get_async(*self._place(url), options=options)
            said = Known(answer.meta["e_tag"], answer.meta["size"])
            chunks = answer.stream(min_chunk_size=CHUNK_BYTES)  # from here on: obstore's threads may hold the answer
            known = known.confirmed(said, url)
            yield b"", known
            async for chunk in chunks:
                start += len(chunk)
                yield bytes(chunk), known
                if start == known.size:  # what happens to the connection now does not matter; the rest would be a 416
                    return

    async def aclose(self) -> None:
        """Let the connections end."""
        self._stores = None


class ObjectStoreDataset(RemoteDataset[T_co]):
    """Serve objects of a bucket, or ranges of them.

    Tried again are connections that fail or break off, time-outs, and all statuses from 500 on, 408 and 429.

    Args:
        url: The bucket, and the prefix that all keys have in common: ``s3://bucket/train``, ``gs://...``, ``az://...``,
            ``file:///folder``, and what else :func:`obstore.store.from_url` takes.
        keys: Names of the objects behind that prefix, or :class:`ByteRange` of them, in the order of their indices;
            None takes all objects there are, sorted, listed once at construction.
        decode: Makes a sample of an object's bytes and its key; without it the bytes are the sample.
        suffix: Which of the listed keys to take: those that end so, or in one of several ways.
        config: Settings of the store: ``region``, ``endpoint``, ``access_key_id``, ``skip_signature``, ... Settings
            that are not given come from the environment (``AWS_ACCESS_KEY_ID``, ...) or the machine's role.
        client_options: Settings of the HTTP client, such as ``{"timeout": "2 min"}`` for one try (30 s by default), or
            ``{"allow_http": True}``.
        credential_provider: Gets credentials that expire, as obstore's documentation tells; has to be picklable.
        retries: How transient failures are retried.
        max_bytes: How large an object may be; a larger one is an error. Ranges are as long as you say.
        decode_threads: Threads that decode, in each worker: by default one in a worker process and up to four without
            one; 0 decodes on the event loop.

    Raises:
        ImportError: obstore is not installed (``asyncloader[objects]``).
        FileNotFoundError: Nothing is listed.

    A sample raises FileNotFoundError for a key that is not there, PermissionError for one that may not be read, and
    :class:`FetchError` for what else does not succeed.

    With ``num_workers=0`` obstore runs in the process of the trainer, which can then no longer fork workers that use
    it: loaders with workers beside it need ``multiprocessing_context="forkserver"`` or ``"spawn"``.

    Example:
        >>> import asyncio, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("first")
        >>> dataset = ObjectStoreDataset(folder.as_uri(), decode=lambda data, key: (key, data.decode()))
        >>> dataset.keys
        ['a.txt']
    """

    def __init__(
        self,
        url: str,
        keys: Iterable[Key] | None = None,
        decode: Callable[[bytes, Any], T_co] | None = None,
        *,
        suffix: str | tuple[str, ...] = "",
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        credential_provider: Any = None,
        retries: Retries | None = None,
        max_bytes: int = MAX_BYTES,
        decode_threads: int | None = None,
    ) -> None:
        require("obstore", "objects", "ObjectStoreDataset")
        self.url = url
        self.config = dict(config or {})
        self.client_options = dict(client_options or {})
        self.credential_provider = credential_provider
        retries = retries or Retries()
        if keys is None:
            keys = [key for key in sorted(list_apart(url, self._options(), retries)) if key.endswith(suffix)]
            if not keys:
                wanted = f"no object that ends with {suffix!r}" if suffix else "no object"
                raise FileNotFoundError(errno.ENOENT, f"{wanted} is there", redacted(url))
        super().__init__(keys, decode, retries, decode_threads, max_bytes, f"{url}/")

    def _options(self) -> dict[str, Any]:
        return {
            "config": self.config or None,
            "client_options": self.client_options or None,
            "credential_provider": self.credential_provider,
        }

    def _source(self) -> StoreSource:
        return StoreSource(self._options(), self.url)


def _open_store(url: str, options: Mapping[str, Any]) -> ObjectStore:
    """Make a store for use in this process, without retries of its own: those here know a bound for all together.

    Raises:
        RuntimeError: This process was forked from one that had used obstore.
    """
    import obstore.store

    global _used_in
    if _used_in not in (None, os.getpid()):
        raise RuntimeError(
            f"obstore was used in process {_used_in} before it forked this one, and would wait for ever here. Start "
            'the workers with multiprocessing_context="forkserver" or "spawn".'
        )
    _used_in = os.getpid()
    return obstore.store.from_url(url, retry_config={"max_retries": 0}, **options)


@contextlib.contextmanager
def _failures_told_apart(what: str) -> Iterator[None]:
    """Raise what an error of obstore means: not there, not allowed, may pass, will not pass."""
    from obstore import exceptions

    try:
        yield
    except (FetchError, TransientError):
        raise
    except Exception as error:
        said = redacted(str(error).partition("\n")[0])  # what follows is a dump of Rust structures
        if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
            raise FileNotFoundError(errno.ENOENT, said, redacted(what)) from as_cause(error)
        if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            raise PermissionError(errno.EACCES, said, redacted(what)) from as_cause(error)
        if not isinstance(error, exceptions.GenericError):
            raise FetchError(f"{what}: {type(error).__name__}: {said}") from as_cause(error)
        status = next((int(one or other) for one, other in _FAILED_STATUS.findall(str(error))), 500)
        if status < 500 and status not in (408, 429):
            raise FetchError(f"{what}: {said}") from as_cause(error)
        raise TransientError(said) from as_cause(error)
