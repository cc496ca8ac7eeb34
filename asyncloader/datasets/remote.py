"""The base of datasets of remote objects: keys, byte ranges, retries, decoding off the loop."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from torch.utils.data import Dataset

from asyncloader.checks import at_least
from asyncloader.datasets.opened import Openable, Opened, decoded
from asyncloader.datasets.retry import Retries
from asyncloader.datasets.source import Source
from asyncloader.errors import ConfigurationError

T_co = TypeVar("T_co", covariant=True)


class ByteRange(NamedTuple):
    """Part of an object: of a large file that holds many samples, for example.

    Attributes:
        key: Name of the object, as the dataset takes it: its url or its path.
        start: First byte, counted from 0.
        stop: First byte that does not belong to it any more.
    """

    key: str
    start: int
    stop: int


Key: TypeAlias = str | ByteRange


class RemoteDataset(Openable[Opened[Source]], Dataset[T_co], abc.ABC, Generic[T_co]):
    """Serves objects by index: fetches with retries, decodes on a thread.

    Args:
        keys: The objects, or ranges of them, in the order of their indices.
        decode: Makes a sample of an object's bytes and its key.
        retries: How transient failures are retried.
        decode_threads: Threads for ``decode``, in each worker; see :class:`~asyncloader.datasets.opened.Threads`.
        max_bytes: How large a whole object may be.
        prefix: The beginning of the urls of all objects.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        decode: Callable[[bytes, Any], T_co] | None,
        retries: Retries | None,
        decode_threads: int | None,
        max_bytes: int,
        prefix: str = "",
    ) -> None:
        super().__init__()
        at_least("max_bytes", max_bytes, least=1)
        self.keys: Sequence[Key] = list(keys)
        self.decode = decode
        self.retries = retries or Retries()
        self.decode_threads = decode_threads
        self.max_bytes = max_bytes
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self.keys)

    async def __getitem__(self, index: int) -> T_co:  # type: ignore[override]  # Dataset's is not asynchronous
        """Fetch and decode one object."""
        opened, key = self._client, self.keys[index]
        name = key if isinstance(key, str) else f"{key.key}, bytes {key.start} to {key.stop}"
        data = await self.retries.run(partial(self._fetch, opened.source, key), name)
        return cast(T_co, data) if self.decode is None else await opened.threads.run(decoded, self.decode, data, key)

    async def _fetch(self, source: Source, key: Key) -> bytes:
        """Make one try."""
        if isinstance(key, str):
            return await source.read_whole(self._prefix + key, self.max_bytes)
        name, start, stop = key
        if 0 <= start == stop:  # no request can ask for that
            return b""
        if not 0 <= start < stop:
            raise ConfigurationError(f"{key} is no range of bytes")
        return await source.read(self._prefix + name, start, stop)

    @abc.abstractmethod
    def _source(self) -> Source:
        """Return where the objects are, for the running loop."""

    def _connect(self) -> Opened[Source]:
        return Opened(self._source(), self.decode_threads if self.decode else 0)
