"""Blocks of files that were read last, in a bounded number of bytes: the rows or samples of a batch share them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class BlockCache(Generic[V]):
    """Keeps what was used last; who asks for what is being read waits for that. Belongs to one loop.

    Args:
        max_bytes: How much to keep; what is being read, or in use, comes on top.
        size_of: How many bytes a block takes.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[V], int] = len) -> None:  # type: ignore[assignment]
        self.bytes = 0
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._blocks: OrderedDict[int, V] = OrderedDict()
        self._reading: dict[int, asyncio.Task[V]] = {}

    async def get_all(self, numbers: Iterable[int], read: Callable[[int], Coroutine[Any, Any, V]]) -> dict[int, V]:
        """Return blocks by their numbers; those that are not here are read, all at once."""
        wanted = dict.fromkeys(numbers)
        return dict(zip(wanted, await asyncio.gather(*(self.get(number, read) for number in wanted)), strict=True))

    async def get(self, number: int, read: Callable[[int], Coroutine[Any, Any, V]]) -> V:
        """Return one block."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        task = self._reading.get(number)
        if task is None:
            task = self._reading[number] = asyncio.create_task(self._read(number, read))
            task.add_done_callback(_seen)
        return await asyncio.shield(task)  # others may wait for it

    async def aclose(self) -> None:
        """Let go of all blocks, and end what is being read."""
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        if reading:
            await asyncio.wait(reading)
        self._blocks.clear()

    async def _read(self, number: int, read: Callable[[int], Coroutine[Any, Any, V]]) -> V:
        try:
            block = await read(number)
        finally:
            del self._reading[number]
        size = self._size_of(block)
        if size <= self._max_bytes:
            self._blocks[number] = block
            self.bytes += size
            while self.bytes > self._max_bytes:
                self.bytes -= self._size_of(self._blocks.popitem(last=False)[1])
        return block


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # raised by who waits; if nobody does any more it is no news
