"""Objects in S3, Google Cloud Storage, Azure or a folder, through obstore.

obstore runs its requests on threads of its own (tokio's), which do not live on in a forked process: a store that was
used before the fork waits for ever after it. So nothing of it is used in the parent: keys are listed by a process that
ends with the listing (:mod:`asyncloader.datasets.listing`), and a forked worker whose parent did use it says so.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from asyncloader.datasets.extras import require
from asyncloader.datasets.limits import MAX_BYTES, collect_range, too_large
from asyncloader.datasets.listing import list_apart
from asyncloader.datasets.remote import ByteRange, Key, RemoteDataset
from asyncloader.datasets.retry import FetchError, Retries, TransientError
from asyncloader.errors import as_cause, redacted

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T_co = TypeVar("T_co", covariant=True)

_FAILED_STATUS = re.compile(r"status: (\d{3})|status code: (\d{3})")
_used_in: int | None = None  # the process that has started tokio's threads


class OpenStore:
    """A store until it is closed. Belongs to one loop.

    A store has no `close`: its connections end with the last reference to it. Frames have references, tracebacks have
    frames, and obstore itself keeps the error of a request until it is used again. So frames are given this instead.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store: ObjectStore | None = store

    def get(self) -> ObjectStore:
        """Return the store, for an argument of a call."""
        if self._store is None:
            raise RuntimeError("the dataset was closed while a sample of it was fetched")
        return self._store

    def close(self) -> None:
        """Let the connections end."""
        self._store = None


class ObjectStoreDataset(RemoteDataset[OpenStore, T_co]):
    """Serve objects of a bucket, or ranges of them.

    Tried again are connections that fail or break off, time-outs, and all statuses from 500 on, 408 and 429.

    Args:
        url: The bucket, and the prefix that all keys have in common: ``s3://bucket/train``, ``gs://...``, ``az://...``,
            ``file:///folder``, and what else :func:`obstore.store.from_url` takes.
        keys: Names of the objects behind that prefix, or :class:`ByteRange` of them, in the order of their indices;
            None takes all objects there are, sorted, listed once at construction.
        decode: Makes a sample of an object's bytes and its key; without it the bytes are the sample.
        suffix: Which of the listed keys to take: those that end so, or in one of several ways.
        config: Of the store: ``region``, ``endpoint``, ``access_key_id``, ``skip_signature``, ... What is not given
            comes from the environment (``AWS_ACCESS_KEY_ID``, ...) or the machine's role.
        client_options: Of its HTTP client, such as ``{"timeout": "2 min"}`` for one try (30 s by default), or
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
        super().__init__(keys, decode, retries, decode_threads, max_bytes)

    async def _fetch(self, client: OpenStore, key: Key) -> bytes:
        import obstore

        name = key if isinstance(key, str) else key.key
        what = f"{self.url}/{name}"
        try:
            options: Any = {"range": (key.start, key.stop)} if isinstance(key, ByteRange) else {}
            answer = await obstore.get_async(client.get(), name, options=options)
            size = key.stop - key.start if isinstance(key, ByteRange) else answer.meta["size"]
            if not isinstance(key, ByteRange) and size > self.max_bytes:
                raise too_large(what, self.max_bytes)
            return await collect_range(answer.stream(), size, what)
        except (FetchError, TransientError):
            raise
        except Exception as error:
            raise_told_apart(error, what)

    def _options(self) -> dict[str, Any]:
        return {
            "config": self.config or None,
            "client_options": self.client_options or None,
            "credential_provider": self.credential_provider,
        }

    async def _connect(self) -> OpenStore:
        return OpenStore(open_store(self.url, self._options()))

    async def _disconnect(self, client: OpenStore) -> None:
        client.close()


def open_store(url: str, options: Mapping[str, Any]) -> ObjectStore:
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


def raise_told_apart(error: Exception, what: str) -> NoReturn:
    """Raise what an error of obstore means: not there, not allowed, may pass, will not pass."""
    from obstore import exceptions

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
