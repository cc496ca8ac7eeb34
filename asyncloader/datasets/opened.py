"""Resources that a dataset holds open while it is in use: a client that belongs to an event loop, threads."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

from torch.utils.data import get_worker_info

from asyncloader.seeding.turns import sample_seed

T = TypeVar("T")
ClientT = TypeVar("ClientT")


@dataclasses.dataclass
class _Opened(Generic[ClientT]):
    """The client of one loop, and how many users have entered the dataset there."""

    users: int = 0
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    context: contextlib.AbstractAsyncContextManager[ClientT] | None = None
    client: ClientT | None = None


class Openable(abc.ABC, Generic[ClientT]):
    """Opens a client on the loop that enters first, closes it when the last has left; pickles without it.

    One object may be entered several times (by two iterators without workers, which share a loop) and on several loops
    at once, each of which gets a client of its own; nobody touches the client of another loop.
    """

    def __init__(self) -> None:
        self._opened: dict[asyncio.AbstractEventLoop, _Opened[ClientT]] = {}

    @abc.abstractmethod
    def _opens(self) -> contextlib.AbstractAsyncContextManager[ClientT]:
        """Return what makes a client that belongs to the running loop, and closes it there."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        opened = self._opened.setdefault(loop, _Opened())
        opened.users += 1
        try:
            async with opened.turn:
                if opened.client is None:
                    opened.context = self._opens()
                    opened.client = await opened.context.__aenter__()
        except BaseException:
            self._leave(loop, opened)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        opened = self._opened[loop]
        self._leave(loop, opened)
        # From here on nobody finds it any more: who enters now gets a client of its own.
        if opened.users == 0 and opened.context is not None:
            await opened.context.__aexit__(None, None, None)

    def _leave(self, loop: asyncio.AbstractEventLoop, opened: _Opened[ClientT]) -> None:
        opened.users -= 1
        if opened.users == 0:
            del self._opened[loop]

    @property
    def _client(self) -> ClientT:
        """The client of the running loop."""
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is None or opened.client is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} is not open: a DataLoader opens it; without one, `async with dataset:`")
        return opened.client

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}


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
        count: How many; 0 does the work on the loop. None is one in a worker, of which there are several, and else
            one for each processor, up to four.
        name: Prefix of the threads' names.
    """

    def __init__(self, count: int | None, name: str) -> None:
        if count is None:
            count = 1 if get_worker_info() else min(os.cpu_count() or 1, 4)
        self.count = count
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name) if count else None

    async def run(self, function: Callable[..., T], /, *args: Any) -> T:
        """Call a function on one of the threads, with the context of the caller (:func:`asyncloader.sample_rng`)."""
        if self._executor is None:
            return function(*args)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, function, *args)

    def close(self) -> None:
        """Let the threads end, each after the call it is at; waiting for one that hangs would hang the loop."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
