"""Objects on servers and in buckets, through obstore.

obstore runs its requests on threads of its own, which do not live on in a forked process: a store that was used before
the fork waits for ever after it. So a forked worker whose parent has read samples says so.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import operator
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import Dataset, get_worker_info

from asyncloader.datasets.blocking import in_thread
from asyncloader.errors import AsyncLoaderError, ConfigurationError, redacted

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_used_in: int | None = None  # the process in which obstore has started its threads


class FetchError(AsyncLoaderError, OSError):
    """An object did not come whole, for a reason other than that it is not there or may not be read."""


class RemoteDataset(Dataset[T_co]):
    """Serve objects that lie elsewhere: over HTTP, or in S3, Google Cloud Storage, Azure.

    The objects are read by `obstore <https://developmentseed.org/obstore>`_ (``asyncloader[remote]``), which tries
    again what may pass in a moment: by default ten times within three minutes. A :class:`~asyncloader.DataLoader` has
    ``concurrency`` of them on their way at once in each worker; for everybody else ``dataset[0]`` is a sample like any
    other.

    Args:
        store: A store of obstore's, such as ``S3Store("bucket")``, ``from_url("gs://bucket/train")`` or
            ``HTTPStore.from_url("https://host/folder")``. It travels to workers: those that cannot be pickled (a
            ``MemoryStore``) are for forked workers and none.
        names: The objects in there, in the order of the indices.
        decode: Makes a sample of the bytes of an object and its name, ``decode(data, name)``; without it the bytes are
            the sample. In a worker it runs on the worker's loop, otherwise on a thread.

    Raises:
        ConfigurationError: The names are one text.

    A sample raises FileNotFoundError for what is not there, PermissionError for what may not be read, and
    :class:`FetchError` for what else does not come.

    To make the dataset asks no server. A process in which obstore was used (by ``dataset[0]``, by a loader with
    ``num_workers=0``, by ``obstore.list``) can no longer fork workers that use it: give such loaders
    ``multiprocessing_context="forkserver"``.

    Example:
        >>> from obstore.store import MemoryStore
        >>> store = MemoryStore()
        >>> _ = store.put("a.txt", b"first")
        >>> dataset = RemoteDataset(store, ["a.txt"], lambda data, name: (name, data.decode()))
        >>> dataset[0]
        ('a.txt', 'first')
    """

    is_remote = True
    store: ObjectStore
    names: list[str]
    decode: Callable[[bytes, str], T_co] | None

    def __init__(
        self, store: ObjectStore, names: Iterable[str], decode: Callable[[bytes, str], T_co] | None = None
    ) -> None:
        if isinstance(names, str):
            raise ConfigurationError(f"names should be a list of objects, but is the text {names!r}")
        self.store, self.names, self.decode = store, list(names), decode

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> T_co:
        """Read one sample."""
        import obstore

        name = self.names[operator.index(index)]
        with _failures_told(name):
            data = bytes(obstore.get(self.store, name).bytes())
        return self._decoded(data, name)  # type: ignore[no-any-return]

    async def getitem(self, index: int) -> T_co:
        """Read one sample, without blocking the loop."""
        import obstore

        name = self.names[operator.index(index)]
        with _failures_told(name):
            answer = await _call(obstore.get_async, self.store, name)
            data = bytes(await _call(answer.bytes_async))
        if get_worker_info() is not None:  # whose loop has nothing else to do
            return self._decoded(data, name)  # type: ignore[no-any-return]
        return await in_thread(self._decoded, data, name)

    def _decoded(self, data: bytes, name: str) -> Any:
        return data if self.decode is None else self.decode(data, name)


def _call(function: Callable[..., Awaitable[T]], *args: Any) -> Awaitable[T]:
    """Call a function of obstore's, with an empty context.

    obstore copies the context of the call, to set the result in it. It lets go of the copy on a thread of its own that
    does not hold the interpreter's lock: the copy stays until obstore is called the next time. In a worker thread, the
    context knows the dataset (`get_worker_info`), whose connections would stay open after the last epoch.
    """
    return contextvars.Context().run(function, *args)


@contextlib.contextmanager
def _failures_told(name: str) -> Iterator[None]:
    """Raise what an error of obstore means: not there, not allowed, or did not come.

    Raises:
        RuntimeError: This process was forked from one that had used obstore.
    """
    from obstore import exceptions

    global _used_in
    if _used_in not in (None, os.getpid()):
        raise RuntimeError(
            f"obstore was used in process {_used_in} before it forked this one, and would wait for ever here. Start "
            'the workers with multiprocessing_context="forkserver" or "spawn"; or do not read samples of the dataset '
            "in the trainer's process before the loader has forked its workers."
        )
    _used_in = os.getpid()
    try:
        yield
    except Exception as error:
        # What follows the first line is a dump of Rust structures; there, and in causes, urls have their secrets.
        said = redacted(str(error).partition("\n")[0])
        if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
            raise FileNotFoundError(errno.ENOENT, said, redacted(name)) from None
        if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
            raise PermissionError(errno.EACCES, said, redacted(name)) from None
        raise FetchError(f"{name}: {type(error).__name__}: {said}") from None
