"""Clients of datasets, open while in use: a source of data that belongs to an event loop, threads, a cache."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, Self, TypeVar

from torch.utils.data import Dataset, get_worker_info

from asyncloader.datasets.block_cache import BlockCache
from asyncloader.seeding.turns import sample_seed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Closable(Protocol):
    """A source of data, or threads: what is closed on the loop that has opened it."""

    async def aclose(self) -> None:
        """Let go of connections and threads."""


ClientT = TypeVar("ClientT", bound=Closable)
SourceT = TypeVar("SourceT", bound=Closable)


class Openable(abc.ABC, Generic[ClientT]):
    """Opens a client for the first user on a loop, closes it with the last one; pickles without it.

    An object may be entered several times (by two iterators without workers, which share a loop) and on several loops
    at once, each of which gets a client of its own; nobody touches the client of another loop.
    """

    def __init__(self) -> None:
        self._opened: dict[asyncio.AbstractEventLoop, tuple[ClientT, int]] = {}  # with how many have entered there

    @abc.abstractmethod
    def _connect(self) -> ClientT:
        """Return a client that belongs to the running loop, and connects at the first request, within its retries."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        client, users = self._opened.get(loop) or (self._connect(), 0)
        self._opened[loop] = client, users + 1
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        client, users = self._opened.pop(loop)
        if users > 1:
            self._opened[loop] = client, users - 1
        else:  # whoever enters from here on gets a client of its own
            await client.aclose()

    @property
    def _client(self) -> ClientT:
        """The client of the running loop."""
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} is not open: a DataLoader opens it; without one, `async with dataset:`")
        return opened[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}


class BatchDataset(Openable[ClientT], Dataset[T_co], Generic[ClientT, T_co]):
    """Reads the samples of a batch together."""

    seeds_samples = True

    async def __getitem__(self, index: int) -> T_co:  # type: ignore[override]  # Dataset's is not asynchronous
        """Read one sample."""
        (sample,) = await self.__getitems__([index])
        return sample

    @abc.abstractmethod
    async def __getitems__(self, indices: Sequence[int]) -> list[T_co]:
        """Read the samples of a batch."""


class Opened(Generic[SourceT]):
    """A client of several parts, closed together.

    Attributes:
        source: Where the data come from.
        threads: Decode samples.
        cache: Blocks that were read last.
    """

    def __init__(self, source: SourceT, threads: int | None, cache: BlockCache[Any] | None = None) -> None:
        self.source = source
        self.threads = Threads(threads)
        self.cache = cache or BlockCache[Any](0)

    async def aclose(self) -> None:
        """Close all parts, whatever comes of the first ones."""
        async with contextlib.aclosing(self.source), contextlib.aclosing(self.threads), contextlib.aclosing(self.cache):
            pass


def decoded(decode: Callable[..., T], *args: Any) -> T:
    """Decode the sample at hand. The sample has random numbers of its own: see :class:`asyncloader.sample_seed`."""
    with sample_seed():
        return decode(*args)


def all_decoded(decode: Callable[[Any], T], things: Iterable[Any]) -> list[T]:
    """Decode the samples of a batch, in its order."""
    samples = []
    for position, thing in enumerate(things):
        with sample_seed(position):
            samples.append(decode(thing))
    return samples


class Threads:
    """Threads on which samples are read or decoded while the loop goes on.

    Args:
        count: How many; 0 does the work on the loop. None is one in a worker, of which there are several, and otherwise
            one for each processor, up to four.
    """

    def __init__(self, count: int | None) -> None:
        if count is None:
            count = 1 if get_worker_info() else min(os.cpu_count() or 1, 4)
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="dataset") if count else None

    async def run(self, function: Callable[..., T], /, *args: Any) -> T:
        """Call a function on one of the threads, with the context of the caller (:func:`asyncloader.sample_rng`)."""
        if self._executor is None:
            return function(*args)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, function, *args)

    async def aclose(self) -> None:
        """Let the threads end, each after the call it is at; waiting for one that hangs would hang the loop."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
