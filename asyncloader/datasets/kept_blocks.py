"""Blocks of files that were used last, in a bounded number of bytes: rows and samples of later batches share them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class KeptBlocks(Generic[V]):
    """Keeps what was used last. Any thread may call it; a copy in another process begins empty.

    Args:
        max_bytes: How much to keep.
        size_of: How many bytes a block takes.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._blocks: OrderedDict[int, V] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, number: int) -> V | None:
        """Return a block if it is here."""
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
            return self._blocks.get(number)

    def keep(self, number: int, block: V) -> None:
        """Keep a block; those that were used longest ago make room for it."""
        size = self._size_of(block)
        with self._lock:
            if number in self._blocks or size > self._max_bytes:
                return
            self._blocks[number] = block
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._size_of(self._blocks.popitem(last=False)[1])

    def __reduce__(self) -> Any:
        return KeptBlocks, (self._max_bytes, self._size_of)
