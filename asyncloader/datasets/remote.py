"""The base of datasets of remote objects: keys, byte ranges, retries, decoding off the loop."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from torch.utils.data import Dataset

from asyncloader.checks import at_least
from asyncloader.datasets.opened import Openable, Threads, decoded
from asyncloader.datasets.retry import Retries, TransientError
from asyncloader.errors import ConfigurationError

T_co = TypeVar("T_co", covariant=True)
ClientT = TypeVar("ClientT", bound="Connection")


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


class Connection(Protocol):
    """A client that a dataset fetches its objects with."""

    async def aclose(self) -> None:
        """Let go of connections and threads."""


class RemoteDataset(Openable[tuple[ClientT, Threads]], Dataset[T_co], abc.ABC, Generic[ClientT, T_co]):
    """Serves objects by index: fetches with retries, decodes on a thread.

    Args:
        keys: The objects, or ranges of them, in the order of their indices.
        decode: Makes a sample of an object's bytes and its key.
        retries: How transient failures are retried.
        decode_threads: Threads for ``decode``, in each worker; see :class:`~asyncloader.datasets.opened.Threads`.
        max_bytes: How large a whole object may be.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        decode: Callable[[bytes, Any], T_co] | None,
        retries: Retries,
        decode_threads: int | None,
        max_bytes: int,
    ) -> None:
        super().__init__()
        at_least("max_bytes", max_bytes, least=1)
        self.keys: Sequence[Key] = list(keys)
        self.decode = decode
        self.retries = retries
        self.decode_threads = decode_threads
        self.max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self.keys)

    async def __getitem__(self, index: int) -> T_co:  # type: ignore[override]  # Dataset's is not asynchronous
        """Fetch and decode one object."""
        client, threads = self._client
        key = self.keys[index]
        data = await self.retries.run(partial(self._fetch_whole, client, key), _name(key))
        return cast(T_co, data) if self.decode is None else await threads.run(decoded, self.decode, data, key)

    async def _fetch_whole(self, client: ClientT, key: Key) -> bytes:
        if isinstance(key, ByteRange) and not 0 <= key.start < key.stop:
            if 0 <= key.start == key.stop:  # no request can ask for that
                return b""
            raise ConfigurationError(f"{key} is no range of bytes")
        data = await self._fetch(client, key)
        if isinstance(key, ByteRange) and len(data) != key.stop - key.start:
            raise TransientError(f"{len(data)} bytes came of the {key.stop - key.start} that were asked for")
        return data

    @abc.abstractmethod
    async def _fetch(self, client: ClientT, key: Key) -> bytes:
        """Make one try. Raise TransientError for what may be gone in a moment."""

    @abc.abstractmethod
    async def _connect(self) -> ClientT:
        """Make a client that belongs to the running loop."""

    @contextlib.asynccontextmanager
    async def _opens(self) -> AsyncGenerator[tuple[ClientT, Threads], None]:
        async with contextlib.aclosing(await self._connect()) as connection:
            with contextlib.closing(Threads(self.decode_threads if self.decode else 0, "decode")) as threads:
                yield connection, threads


def _name(key: Key) -> str:
    return key if isinstance(key, str) else f"{key.key}, bytes {key.start} to {key.stop}"
